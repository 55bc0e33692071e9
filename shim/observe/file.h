/*
 * What goes into a file that the user named: opened, written and closed at once, so that no descriptor of ours is there for the
 * program to close, or to open a file of its own under its number (laws 6, 25). In an exiting process and a signal handler, too.
 *
 *   no file, or a regular one     its end; where the pattern does not name the pid, ".PID" is added (law 26)
 *   a pipe, a character device    as it is named
 *   a folder, a disk              not at all
 *   below /dev, but for /dev/shm  nothing is made
 *   below /proc                   as it is named: descriptors of this process by another spelling, or of another process
 *   a DESCRIPTOR                  that one itself, where the program's next words would stand, while it is of the same file (law 32)
 */
#ifndef VRAM_OBSERVE_FILE_H
#define VRAM_OBSERVE_FILE_H

#include <stdbool.h>
#include <stddef.h>

#include "config/options.h"

/* One attempt. Its user keeps it, because it is large and may be needed on a small stack. */
struct vram_file {
    char path[VRAM_PATH_MAX];
    bool begun;      /* some of the bytes are there */
    const char *why; /* "no space is left there" */
};

/* Adds the bytes at the end of the file that the option means. 0, or a negative errno: then the three say what is to be said.
 * errno is kept. The caller holds cancellation (base/cancel.h). */
int vram_file_append(struct vram_file *file, const struct vram_output *output, const char *bytes, size_t len);

#endif

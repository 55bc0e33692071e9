/*
 * What goes into a file that the user named: opened, written and closed at once, so that no descriptor of ours is there for the
 * program to close, or to open a file of its own under its number (laws 6, 25). In an exiting process and a signal handler, too.
 */
#ifndef VRAM_OBSERVE_FILE_H
#define VRAM_OBSERVE_FILE_H

#include <stddef.h>

#include "config/options.h"

/* Adds the bytes at the end of the file that the pattern means; where that does not name the pid, ".PID" is added (law 26). 0,
 * or a negative errno; the path is in *ret_path either way, for what is said then. errno is kept. */
int vram_file_append(const struct vram_output *output, const char *bytes, size_t len, char *ret_path, size_t cap);

#endif

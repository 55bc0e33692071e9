/*
 * Which file a descriptor is of: what stood at a number when the program started, or was put there, is known again by this
 * (base/say.h, config/output.c). A file that is unlinked and closed leaves its inode to the next one that is made, so of a regular
 * file the time at which it was made counts as well.
 *
 * That time is compared where both have it: not every kernel and file system tells it, and in a sandbox (base/sandbox.h), where a
 * call that the program does not make itself may end it, nobody asks.
 *
 * No lock; async-signal-safe; errno is kept.
 */
#ifndef VRAM_BASE_IDENTITY_H
#define VRAM_BASE_IDENTITY_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct vram_identity {
    uint64_t dev, ino, rdev;
    uint64_t born; /* ns; 0: not known */
    mode_t mode;   /* is not compared */
};

bool vram_identify(int fd, struct vram_identity *ret_identity); /* false: it is not open */
bool vram_identity_same(const struct vram_identity *a, const struct vram_identity *b);

#endif

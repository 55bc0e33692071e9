/*
 * What the shim says on the terminal, in a way that cannot hurt the program (laws 29, 32): on descriptor 2 only, and only
 * while that is still the file it was at load; never blocking for long; with SIGPIPE held back and consumed; errno kept.
 * Everything here but vram_say is safe in a signal handler.
 */
#ifndef VRAM_BASE_SAY_H
#define VRAM_BASE_SAY_H

#include <stddef.h>

#include "base/compiler.h"

/* Remember what descriptor 2 is. Once, at load (and in a fork's child nothing changes: it is the same file). */
void vram_say_init(void);

/* One line, "vramshim: " before it and a newline after it. At most a few hundred lines a process; then one that says so. */
void vram_say(const char *fmt, ...) VRAM_PRINTF(1, 2);

/* The bytes as they are. Returns 0, or a negative errno (-EBADF: descriptor 2 is no longer the one from load; -EAGAIN: the
 * reader did not read within 100 ms at some point, the rest is dropped). */
int vram_say_raw(const char *bytes, size_t len);

/* The same to any descriptor of ours. */
int vram_write_gently(int fd, const char *bytes, size_t len);

#endif

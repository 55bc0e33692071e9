/*
 * What the shim says on the terminal, in a way that cannot hurt the program (laws 29, 32): on descriptor 2 only, and only
 * while that is the program's error stream; never blocking for long; with SIGPIPE held back and consumed; no cancellation point
 * (base/cancel.h); errno kept.
 *
 * The error stream is the file that was at 2 at load, or the last that the program itself put there by dup2, dup3 or freopen of
 * stderr (interpose/libc.c), which is adopted; either is known again (base/identity.h), however it came back. A number 2 that was
 * closed, and that open() or dup() then gave to another file, is never written to: where the program has no error stream,
 * nothing is said.
 *
 * Two ways to speak:
 *
 *   vram_say     an answer that somebody asked for, what is wrong or missing, what is told once: always said
 *   vram_notice  what the program's own loop can bring about: at a rate, each kind for itself; what was left out is counted in
 *                the next line of its kind ("(and 153 more like this were not shown)")
 *
 *   invariants
 *   - a line is one line: control characters of whatever was inserted are escaped (vramshim/quote.h)
 *   - a line is said as a whole (up to 5 KiB, a path included), or ends with "..."
 *   - of a kind, no more than its burst and one each period are said, and the first, and each that comes a period after the last
 *     one said, is (base/rate.h)
 *
 * No lock. Everything here but vram_say and vram_notice is safe in a signal handler.
 */
#ifndef VRAM_BASE_SAY_H
#define VRAM_BASE_SAY_H

#include <stdbool.h>
#include <stddef.h>

#include "base/compiler.h"

/* What repeats by itself, with how many are said at once and how many seconds there are between more: */
#define VRAM_NOTICE_KINDS(X)                                                                                           \
    X(VRAM_NOTICE_RESCUED, 3, 600)     /* the program went on: of no more than passing interest */                     \
    X(VRAM_NOTICE_EACH_RESCUE, 20, 10) /* the same for who wants to know (VERBOSE) */                                  \
    X(VRAM_NOTICE_NOT_RESCUED, 20, 10) /* a program that probes for the largest size fails often */                    \
    X(VRAM_NOTICE_DECAY, 20, 10)                                                                                       \
    X(VRAM_NOTICE_IDLE, 20, 10)        /* flushes that nobody asked for */                                             \
    X(VRAM_NOTICE_NO_DRAIN, 20, 10)    /* and what was wrong in them */

enum vram_notice {
#define VRAM_NOTICE_NAME(kind, burst, seconds) kind,
    VRAM_NOTICE_KINDS(VRAM_NOTICE_NAME)
#undef VRAM_NOTICE_NAME
};

/* What descriptor 2 is now is the program's error stream: at load; and when the program has put something there, in our own
 * process only. A fork's child keeps what its parent had. */
void vram_say_start(void);
void vram_say_adopt(void);

/* One line, "vramshim: " before it and a newline after it. */
void vram_say(const char *fmt, ...) VRAM_PRINTF(1, 2);

/* The same, if its kind has not been said too often. Whether it was said. */
bool vram_notice(enum vram_notice kind, const char *fmt, ...) VRAM_PRINTF(2, 3);

/* The bytes as they are. Returns 0, or a negative errno (-EBADF: the program has no error stream; -EAGAIN: the reader did not
 * read within 100 ms at some point, the rest is dropped).
 *
 * Where nothing may be asked about the descriptor (the program has sandboxed itself, base/sandbox.h, or poll() is refused) it is
 * written to without asking: a pipe that nobody reads then blocks, as it does for the program itself. */
int vram_say_raw(const char *bytes, size_t len);

/* The same to any descriptor of ours. */
int vram_write_gently(int fd, const char *bytes, size_t len);

void vram_say_forget(void); /* in a forked child: what its parent left out is not its own */

#endif

/*
 * The program's threads may be cancelled, at a cancellation point, which most calls that wait are: open, close, read, write, poll,
 * nanosleep, sigtimedwait. The driver's entries and _exit are none for the program, so they must not become some by what we do
 * in them: a thread would end that meant to end the process, or leave with a lock of the program's or of ours (laws 27, 32).
 *
 *   invariant   on a thread of the program's, each cancellation point of ours is between these two
 *
 * They nest. No lock; async-signal-safe; no system call.
 */
#ifndef VRAM_BASE_CANCEL_H
#define VRAM_BASE_CANCEL_H

#include <pthread.h>

/* Returns what to give back. */
static inline int vram_cancel_hold(void)
{
    int before = PTHREAD_CANCEL_ENABLE; /* an older glibc without libpthread does nothing */
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
    return before;
}

static inline void vram_cancel_give_back(int before) { pthread_setcancelstate(before, NULL); }

#endif

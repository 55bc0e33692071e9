/* Sleeping on a word of this process's memory. Waking is async-signal-safe. errno may change. */
#ifndef VRAM_BASE_FUTEX_H
#define VRAM_BASE_FUTEX_H

#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define VRAM_FOR_EVER UINT64_MAX

/* Until the word is not `expected`, somebody wakes it, a signal comes, or max_ns have passed: look again. */
static inline void vram_futex_wait(atomic_uint *word, unsigned expected, uint64_t max_ns)
{
    const struct timespec t = {(time_t)(max_ns / 1000000000), (long)(max_ns % 1000000000)};
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, max_ns == VRAM_FOR_EVER ? NULL : &t, NULL, 0);
}

static inline void vram_futex_wake(atomic_uint *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

#endif

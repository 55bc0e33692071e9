/* Monotonic time in nanoseconds. Policy modules take the time as an argument; only edges read the clock. */
#ifndef VRAM_BASE_CLOCK_H
#define VRAM_BASE_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline uint64_t vram_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Cheaper by far, and behind by some milliseconds: for what is written down each time and seldom read. */
static inline uint64_t vram_now_roughly(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

#endif

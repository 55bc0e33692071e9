/*
 * How often a thing that repeats may be told: a burst, then one each period; while it is quiet the burst comes back, one
 * each period. Pure: time is an input. No lock: any thread may ask.
 *
 *   invariants
 *   - told between a and b  <=  burst + (b - a) / period
 *   - the first is told, and each that comes a period after the last one told
 *   - told + counted in some `left_out` + still in left_out  ==  asked
 */
#ifndef VRAM_BASE_RATE_H
#define VRAM_BASE_RATE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct vram_rate {
    unsigned burst;        /* at least 1 */
    uint64_t period;       /* ns */
    _Atomic uint64_t full; /* when the whole burst is there again */
    atomic_uint left_out;  /* since one was told */
};

/* Whether this one may be told; then *ret_left_out is how many before it were not. */
static inline bool vram_rate_pass(struct vram_rate *rate, uint64_t now, unsigned *ret_left_out)
{
    uint64_t full = atomic_load(&rate->full), from;
    do {
        from = full > now ? full : now;
        if (from - now > (rate->burst - 1) * rate->period) {
            atomic_fetch_add(&rate->left_out, 1);
            return false;
        }
    } while (!atomic_compare_exchange_weak(&rate->full, &full, from + rate->period));
    *ret_left_out = atomic_exchange(&rate->left_out, 0);
    return true;
}

#endif

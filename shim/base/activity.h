/* Whether the program is at work on the GPU, as far as we see it: set by its calls, looked at and cleared by whoever waits for it
 * to be idle. Written only when it is clear, so that threads at work do not fight for the line. */
#ifndef VRAM_BASE_ACTIVITY_H
#define VRAM_BASE_ACTIVITY_H

#include <stdbool.h>

extern bool vram_activity;

static inline void vram_activity_mark(void)
{
    if (!__atomic_load_n(&vram_activity, __ATOMIC_RELAXED))
        __atomic_store_n(&vram_activity, true, __ATOMIC_RELAXED);
}

/* Whether it was at work since this was asked last. */
static inline bool vram_activity_take(void) { return __atomic_exchange_n(&vram_activity, false, __ATOMIC_RELAXED); }

#endif

/*
 * One view of a device's memory: what the driver says is in use = the sum of what has a name + a remainder. No lock
 * held by callers; calls the driver.
 *
 * What was in use when the program got its first memory on the device is a name of its own: contexts and modules of
 * before, and other programs. Managed memory is left out of the sum: it may be on the host.
 */
#ifndef VRAM_HEAP_VIEW_H
#define VRAM_HEAP_VIEW_H

#include <stdbool.h>
#include <stdint.h>

enum { VRAM_VIEW_PARTS = 12 };

struct vram_device_view {
    uint64_t total, used; /* bytes, of the card, by everybody */
    uint64_t named;       /* sum of the parts */
    struct {
        const char *words;
        uint64_t bytes;
    } parts[VRAM_VIEW_PARTS]; /* largest first, none of 0 bytes */
    unsigned count;
    uint64_t managed; /* not in the sum */
};

/* False: the program has no memory there, or the driver cannot be asked (capture, exit, no context). */
bool vram_view(int device, struct vram_device_view *ret_view);

/* To be called after the program got memory on the device, the current context's: looks what was there before, once. */
void vram_view_first(int device);

#endif

/* Where an interposed dlsym goes on (laws 2, 3, 7, 33). */
#ifndef VRAM_INTERPOSE_LOOKUP_H
#define VRAM_INTERPOSE_LOOKUP_H

#include <stdbool.h>

#include "driver/driver.h"
#include "driver/next.h"

/* Whose lookups are not ours to change: the driver looking itself up gets itself (law 7), as does who stands before it (law 33). */
static inline bool vram_lookup_is_behind_us(const void *caller)
{
    return vram_driver_contains(caller) || vram_next_contains(caller);
}

/* The function that the trampoline (dlsym.S) jumps to with the caller's arguments: the real dlsym, or for a name of ours on
 * an explicit handle vram_dlsym_substitute. May run before any constructor, inside a malloc that is looking itself up: no
 * allocation, no lock; and it is built without a sanitizer, whose runtime looks itself up before it is ready. */
void *vram_dlsym_route(void *handle, const char *name, const void *caller);

/* dlsym, with the answer replaced where it is an entry that we hook. */
void *vram_dlsym_substitute(void *handle, const char *name);

#endif

/*
 * Who stood before the driver (law 33). Some message-passing libraries define the driver's entries themselves, call the driver
 * behind, and drop a buffer's registration when it is freed. We stand before them and answer from the cache, so what reaches the
 * driver from us has to pass them: memory given back behind their back is corrupted data on a network.
 *
 * Of each entry that we export, the next definition in the program's global scope is looked for, a function of an object that is
 * neither we nor the driver. Where there is one, vram_driver()->name leads through it, and everything of ours that calls the driver by
 * that name with it. Its object is pinned: a dlclose does not unload it under us.
 *
 * What such an object looks up on a handle is the driver's own, as it would be for the driver: it never comes back to our cache in the
 * middle of a call of its own. What it calls by name while we call it comes to our wrappers, and these ask vram_next_is_inside.
 *
 * Not a definition: data (loaders of the driver keep tables of pointers under these names), what was loaded without RTLD_GLOBAL,
 * what comes after the driver. A stub that only looks the driver up and forwards is one, and harmless.
 *
 * When it is looked: at load, when everything that the program is linked against is there; where the driver is among that, nothing
 * that comes later stands before it, and that is all. Else when the driver is found, which is within somebody's lookup of it, and by
 * our own thread before it gives memory back: asking the loader waits for a dlopen that another thread is in, so no other call of
 * the program's asks. (An object is in the global scope only when its constructors are done.)
 *
 *   invariants
 *   - a definition, once found, is for good
 *   - vram_next_inside on a thread: a call of ours to a next definition that has not returned, or that was left by longjmp or an
 *     exception, which is noticed by where it lies and what has become of it. (What such a call was about stays as it was: the end of
 *     its context then waits for it, for ever.)
 */
#ifndef VRAM_DRIVER_NEXT_H
#define VRAM_DRIVER_NEXT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/compiler.h"

/* A call of ours under way, on the stack of the thread that makes it. */
struct vram_next_call {
    uint64_t mark; /* while it is under way: what vram_next_begin put there */
};

extern VRAM_TLS struct vram_next_call *vram_next_inside;

void vram_next_begin(struct vram_next_call *call);
void vram_next_end(struct vram_next_call *call);

/* While vram_next_inside: the caller is in a frame below that call. Else it was left without returning, and is forgotten. */
bool vram_next_is_inside(void);

/* Looks, unless nothing can have changed. Asks the loader only about names that some object defines; what dlerror() has to say may be
 * forgotten then. No lock held. */
void vram_next_look(void);

/* At load, after the look: where the driver is in the global scope by then, no other look finds anything. */
void vram_next_settle(void);

/* The next definition of the entry that is number `index` of those that we export, in the order of entries.def, as far as it has been
 * looked for. NULL: it is the driver's. */
void *vram_next_definition(unsigned index);

/* The address lies in an object with a next definition. */
bool vram_next_contains(const void *address);

#endif

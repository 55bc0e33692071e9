/*
 * The driver's entries, found once; everything that calls libcuda calls it through here. No lock; the tables are filled by
 * whichever thread comes first, idempotently.
 *
 * The entries are found by walking libcuda.so.1's symbol table (base/elf.h), not by dlsym: no lock of the loader, no
 * reference count, no error left behind. An entry that the driver lacks is NULL. Where another library of the program stood
 * before the driver, calls of that entry go through it (driver/next.h).
 */
#ifndef VRAM_DRIVER_DRIVER_H
#define VRAM_DRIVER_DRIVER_H

#include <stdbool.h>
#include <stddef.h>

#include "base/lock.h"
#include "vramshim/cuda_abi.h"

struct vram_driver {
#define VRAM_HOOK(name, parameters, arguments) __typeof__(&name) name;
#define VRAM_CALL(name) __typeof__(&name) name;
#include "driver/entries.def"
#undef VRAM_HOOK
#undef VRAM_CALL
};

extern struct vram_driver vram_driver_table;
extern struct vram_driver vram_driver_through; /* by way of who stands before the driver; NULL where nobody does */
extern struct vram_driver vram_driver_own; /* the driver's own addresses: to know them, and to call what must end there */
extern bool vram_driver_ready; /* accessed atomically; set after the table is filled */

/* Finds libcuda.so.1 among the loaded objects. False while it is not loaded. Cheap when it was found before. */
bool vram_driver_find(void);

/* Who stands before the driver may have come since. At load, and on our own thread: asking the loader may wait for a dlopen
 * elsewhere. */
void vram_driver_look_again(void);

/* The first entry that the shim cannot keep blocks without and this driver does not have; NULL: it has them all. */
const char *vram_driver_missing(void);

/* Whether this driver has entries, younger than we are, that make contexts which we would not see. */
bool vram_driver_is_younger(void);

/* The address range of the driver's own code, to know its own lookups (law 7). False if not found yet. */
bool vram_driver_contains(const void *address);

/* The table. Every call of a hook implies that the driver is loaded; where it is not (somebody found our export without
 * it), entries are NULL and the hook answers NOT_INITIALIZED. */
static inline const struct vram_driver *vram_driver(void)
{
    if (!__atomic_load_n(&vram_driver_ready, __ATOMIC_ACQUIRE))
        vram_driver_find();
    return &vram_driver_table;
}

/* VRAM_DRV(cuMemFree_v2)(addr): a call of the driver. No lock may be held across it (law 28). */
#define VRAM_DRV(name) (vram_locks_check_none(), vram_driver()->name)

#endif

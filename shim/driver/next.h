/*
 * Who stood before the driver (law 33). Some message-passing libraries define the driver's entries themselves, call the driver
 * behind, and drop a buffer's registration when it is freed. We stand before them and answer from the cache, so what reaches the
 * driver from us has to pass them: memory given back behind their back is corrupted data on a network.
 *
 * Of each entry that we export, the next definition in the program's global scope is looked for, a function of an object that is
 * neither we nor the driver. Where there is one, vram_driver()->name leads through it, and everything of
 * ours that calls the driver by that name with it. What it calls meanwhile on its thread ends at the driver, by whatever name and
 * way it comes: its lookups lead back to our own wrappers, and these ask vram_next_inside first.
 *
 * Not a definition: data (loaders of the driver keep tables of pointers under these names), what was loaded without RTLD_GLOBAL,
 * what comes after the driver. A stub that only looks the driver up and forwards is one, and harmless: it comes back to us.
 *
 * Looked for at load, when everything that the program is linked against is there, and once more when the driver is found. What is
 * loaded into the global scope later than that is not seen.
 *
 *   vram_next_inside > 0 on a thread: a next definition that we have called has not returned there
 *   (one that leaves by longjmp or an exception leaves it so: the thread then calls the driver, natively)
 */
#ifndef VRAM_DRIVER_NEXT_H
#define VRAM_DRIVER_NEXT_H

#include "base/compiler.h"

extern VRAM_TLS unsigned vram_next_inside;

/* Looks, if objects have come since the last look. Asks the loader only about names that some object defines; what dlerror() has to
 * say may be forgotten then. On any thread, no lock held. */
void vram_next_look(void);

/* The next definition of the entry that is number `index` of those that we export, in the order of entries.def, as far as it has been
 * looked for. NULL: it is the driver's. */
void *vram_next_definition(unsigned index);

#endif

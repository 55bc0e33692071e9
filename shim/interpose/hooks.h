/*
 * The wrappers around the driver's entries. Each line VRAM_HOOK of driver/entries.def expands to
 *
 *   the exported entry <name>     a gate that every call passes: what a definition before the driver calls while we call it
 *                                 ends at the driver (law 33), entries that the driver lacks answer NOT_INITIALIZED, a
 *                                 process that is not ours goes straight to the driver (law 25), errno stays as it was
 *                                 (law 32); all others go to
 *   hook_<name>                   what the shim does, written by hand in hooks_*.c; `caller` is the return address of
 *                                 whoever called the entry
 *   a line of the table           by which dlsym and cuGetProcAddress substitute (law 2)
 */
#ifndef VRAM_INTERPOSE_HOOKS_H
#define VRAM_INTERPOSE_HOOKS_H

#include "driver/driver.h"

#define VRAM_EXPAND(...) __VA_ARGS__

#define VRAM_HOOK(name, parameters, arguments) CUresult hook_##name(uintptr_t caller, VRAM_EXPAND parameters);
#define VRAM_LAUNCH(name, parameters, arguments)
#define VRAM_CALL(name)
#include "driver/entries.def"
#undef VRAM_HOOK
#undef VRAM_CALL

/* The wrapper that stands in front of this entry of the driver, or NULL: then the address is none of ours. */
void *vram_hook_for(const void *real);

#endif

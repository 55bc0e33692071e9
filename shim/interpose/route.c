/* The first steps of every dlsym in the process. Declared in lookup.h. */
#include <dlfcn.h>
#include <stdbool.h>

#include "base/compiler.h"
#include "base/elf.h"
#include "base/libc.h"
#include "config/options.h"
#include "interpose/lookup.h"

/* Decides by the name alone. Names of the driver are few among all that a process looks up: two letters settle most. */
static bool hooked_name(const char *name)
{
    static const char *const names[] = {
#define VRAM_HOOK(name, parameters, arguments) #name,
#define VRAM_LAUNCH(name, parameters, arguments)
#define VRAM_CALL(name)
#include "driver/entries.def"
#undef VRAM_HOOK
#undef VRAM_CALL
    };
    static const char *const launches[] = {
#define VRAM_HOOK(name, parameters, arguments)
#define VRAM_LAUNCH(name, parameters, arguments) #name,
#define VRAM_CALL(name)
#include "driver/entries.def"
#undef VRAM_HOOK
#undef VRAM_CALL
    };
    if (vram_likely(name[0] != 'c' || name[1] != 'u'))
        return false;
    for (size_t i = 0; i < VRAM_LENGTH(names); i++)
        if (vram_elf_same(names[i], name))
            return true;
    for (size_t i = 0; vram_options_watch_launches() && i < VRAM_LENGTH(launches); i++)
        if (vram_elf_same(launches[i], name))
            return true;
    return false;
}

void *vram_dlsym_route(void *handle, const char *name, const void *caller)
{
    if (handle == RTLD_NEXT || handle == RTLD_DEFAULT || !name || !hooked_name(name))
        return (void *)vram_libc_dlsym();
    if (vram_elf_is_second())
        return (void *)vram_libc_dlsym();
    if (vram_driver_find() && vram_lookup_is_behind_us(caller))
        return (void *)vram_libc_dlsym();
    return (void *)vram_dlsym_substitute;
}

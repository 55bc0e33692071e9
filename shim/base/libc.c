#include "base/libc.h"

#include <stddef.h>

#include "base/elf.h"

static void *find(const char *name)
{
    static const char *const libraries[] = {"libc.so.6", "libdl.so.2", "libpthread.so.0"};
    for (size_t i = 0; i < 3; i++) {
        const struct link_map *map = vram_elf_find(libraries[i]);
        void *p = map ? vram_elf_symbol(map, name) : NULL;
        if (p)
            return p;
    }
    return NULL;
}

#define VRAM_DEFINE(ret, name, params)                                                                                 \
    ret(*vram_libc_##name(void)) params                                                                                \
    {                                                                                                                  \
        static void *found;                                                                                            \
        void *p = __atomic_load_n(&found, __ATOMIC_RELAXED);                                                           \
        if (!p) {                                                                                                      \
            p = find(#name);                                                                                           \
            __atomic_store_n(&found, p, __ATOMIC_RELAXED);                                                             \
        }                                                                                                              \
        return (ret(*) params)p;                                                                                       \
    }
VRAM_LIBC_FUNCTIONS(VRAM_DEFINE)

#include "driver/next.h"

#include <dlfcn.h>
#include <link.h>
#include <stdbool.h>
#include <stddef.h>

#include "base/elf.h"
#include "base/libc.h"

static const char *const names[] = {
#define VRAM_HOOK(name, parameters, arguments) #name,
#define VRAM_CALL(name)
#include "driver/entries.def"
#undef VRAM_HOOK
#undef VRAM_CALL
};
enum { NAMES = VRAM_LENGTH(names) };

VRAM_TLS unsigned vram_next_inside;

static void *definitions[NAMES];  /* accessed atomically; once set, for good */
static unsigned long long looked; /* the loader's count of objects at the last look; accessed atomically */

struct look {
    unsigned long long adds;
    bool behind_us, defined[NAMES];
};

static bool is_driver(const struct link_map *map) { return vram_elf_is_named(map, "libcuda.so.1"); }
static bool is_copy(const struct link_map *map) { return vram_elf_is_named(map, "libvramshim.so"); }

/* The loader shows its objects in the order of its list, and holds back whoever wants to unload one. */
static int look_at(struct dl_phdr_info *info, size_t size, void *arg)
{
    extern ElfW(Dyn) _DYNAMIC[] __attribute__((visibility("hidden")));
    struct look *look = arg;
    struct link_map map = {.l_addr = info->dlpi_addr};
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
            map.l_ld = (ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
    if (size >= offsetof(struct dl_phdr_info, dlpi_subs))
        look->adds = info->dlpi_adds;
    if (__atomic_load_n(&looked, __ATOMIC_RELAXED) == look->adds && look->adds)
        return 1;
    if (map.l_ld == _DYNAMIC)
        look->behind_us = true;
    else if (map.l_ld && look->behind_us && !is_driver(&map) && !is_copy(&map))
        vram_elf_mark_functions(&map, names, NAMES, look->defined);
    return 0;
}

/* What the loader's own search finds behind us, in the global scope. A copy of us has stepped back, and leads to what stands behind
 * it. */
static void *search(const char *name)
{
    void *p = vram_libc_dlsym()(RTLD_NEXT, name);
    __asm__ volatile("" : "+r"(p)); /* no jump instead of the call: the one who asks is this library */
    if (!p) {
        vram_libc_dlsym()(RTLD_DEFAULT, "_exit"); /* a lookup that succeeds leaves no dlerror() */
        return NULL;
    }
    const struct link_map *map = vram_elf_containing((uintptr_t)p);
    return map && !is_driver(map) ? p : NULL;
}

void vram_next_look(void)
{
    struct look look = {0};
    if (dl_iterate_phdr(look_at, &look) != 0)
        return;
    for (size_t i = 0; i < NAMES; i++)
        if (look.defined[i] && !__atomic_load_n(&definitions[i], __ATOMIC_RELAXED))
            __atomic_store_n(&definitions[i], search(names[i]), __ATOMIC_RELAXED);
    __atomic_store_n(&looked, look.adds, __ATOMIC_RELAXED);
}

void *vram_next_definition(unsigned index) { return __atomic_load_n(&definitions[index], __ATOMIC_RELAXED); }

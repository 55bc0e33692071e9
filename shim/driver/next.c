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

enum { OBJECTS = 16 };

static void *definitions[NAMES];       /* accessed atomically; once set, for good */
static unsigned long long looked;      /* the loader's count of objects when all had been asked about; accessed atomically */
static bool settled;                   /* nothing can come any more; accessed atomically */
static struct {
    uintptr_t start, end; /* accessed atomically, end first: 0 until both are there */
} objects[OBJECTS];

/* Calls of ours that are under way. */
VRAM_TLS struct vram_next_call *vram_next_inside;

static uint64_t mark_of(const struct vram_next_call *call) { return (uintptr_t)call ^ UINT64_C(0x9e3779b97f4a7c15); }

void vram_next_begin(struct vram_next_call *call)
{
    __atomic_store_n(&call->mark, mark_of(call), __ATOMIC_RELAXED);
    vram_next_inside = call;
}

void vram_next_end(struct vram_next_call *call)
{
    __atomic_store_n(&call->mark, 0, __ATOMIC_RELAXED);
    vram_next_inside = NULL;
}

/* The stack grows downwards: what lies above us is there to be read. */
__attribute__((no_sanitize("address"))) bool vram_next_is_inside(void)
{
    const struct vram_next_call *call = vram_next_inside;
    if ((uintptr_t)call > (uintptr_t)__builtin_frame_address(0) && __atomic_load_n(&call->mark, __ATOMIC_RELAXED) == mark_of(call))
        return true;
    vram_next_inside = NULL;
    return false;
}

/* The look. */
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
    if (look->adds && __atomic_load_n(&looked, __ATOMIC_ACQUIRE) == look->adds)
        return 1;
    if (map.l_ld == _DYNAMIC)
        look->behind_us = true;
    else if (map.l_ld && look->behind_us && !is_driver(&map) && !is_copy(&map))
        vram_elf_mark_functions(&map, names, NAMES, look->defined);
    return 0;
}

/* The loader's own search: what it finds behind us, in the global scope, and in which object; NULL: nothing. */
static void *search(const char *name, const struct link_map **ret_map)
{
    void *p = vram_libc_dlsym()(RTLD_NEXT, name);
    __asm__ volatile("" : "+r"(p)); /* no jump instead of the call: the one who asks is this library */
    if (!p)
        vram_libc_dlsym()(RTLD_DEFAULT, "_exit"); /* a lookup that succeeds leaves no dlerror() */
    *ret_map = p ? vram_elf_containing((uintptr_t)p) : NULL;
    return *ret_map ? p : NULL;
}

static void remember(const struct link_map *map)
{
    uintptr_t start, end;
    vram_elf_span(map, &start, &end);
    for (int i = 0; i < OBJECTS; i++) {
        uintptr_t nobody = 0;
        if (__atomic_load_n(&objects[i].start, __ATOMIC_ACQUIRE) == start)
            return;
        if (__atomic_compare_exchange_n(&objects[i].start, &nobody, start, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
            __atomic_store_n(&objects[i].end, end, __ATOMIC_RELEASE);
            return;
        }
        if (nobody == start)
            return;
    }
}

/* A copy of us has stepped back, and leads to what stands behind it. The object is pinned; it may have gone before. */
static void *find(const char *name)
{
    const struct link_map *map, *again;
    void *p = search(name, &map);
    if (!p || is_driver(map) || !vram_libc_dlopen()(map->l_name, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE) || search(name, &again) != p)
        return NULL;
    if (!is_copy(map))
        remember(map);
    return p;
}

void vram_next_look(void)
{
    struct look look = {0};
    bool all = true;
    if (__atomic_load_n(&settled, __ATOMIC_ACQUIRE) || dl_iterate_phdr(look_at, &look) != 0)
        return;
    for (size_t i = 0; i < NAMES; i++) {
        if (!look.defined[i] || __atomic_load_n(&definitions[i], __ATOMIC_RELAXED))
            continue;
        void *p = find(names[i]);
        if (p)
            __atomic_store_n(&definitions[i], p, __ATOMIC_RELEASE);
        all &= p != NULL;
    }
    if (all)
        __atomic_store_n(&looked, look.adds, __ATOMIC_RELEASE);
}

void vram_next_settle(void)
{
    const struct link_map *map;
    if (vram_elf_find("libcuda.so.1") && search("cuDeviceGetCount", &map) && is_driver(map))
        __atomic_store_n(&settled, true, __ATOMIC_RELEASE);
}

void *vram_next_definition(unsigned index) { return __atomic_load_n(&definitions[index], __ATOMIC_ACQUIRE); }

bool vram_next_contains(const void *address)
{
    for (int i = 0; i < OBJECTS; i++) {
        uintptr_t end = __atomic_load_n(&objects[i].end, __ATOMIC_ACQUIRE);
        if (!end)
            return false;
        if ((uintptr_t)address >= __atomic_load_n(&objects[i].start, __ATOMIC_RELAXED) && (uintptr_t)address < end)
            return true;
    }
    return false;
}

#include "driver/driver.h"

#include <stdint.h>

#include "base/compiler.h"
#include "base/elf.h"
#include "driver/next.h"

struct vram_driver vram_driver_table, vram_driver_through, vram_driver_own;
bool vram_driver_ready;

static uintptr_t code_start, code_end; /* accessed atomically, valid once the table is ready */
static bool younger;                   /* the same */

/* Once: who reads an entry after `ready` must not meet the store of a thread that was slower to find the same. Who comes
 * second has seen the store of the first, and passes that on. (The thread sanitizer takes a failed exchange for a store.) */
__attribute__((no_sanitize("thread"))) static void settle(void **entry, void *value)
{
    void *unset = NULL;
    __atomic_compare_exchange_n(entry, &unset, value, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

/* through_<name>: a call of ours by way of who stands before the driver; what that one calls meanwhile ends at the driver. */
static struct vram_driver next;
#define VRAM_HOOK(name, parameters, arguments)                                                                         \
    static CUresult through_##name parameters                                                                          \
    {                                                                                                                  \
        struct vram_next_call call;                                                                                    \
        vram_next_begin(&call);                                                                                        \
        CUresult r = next.name arguments;                                                                              \
        vram_next_end(&call);                                                                                          \
        return r;                                                                                                      \
    }
#define VRAM_CALL(name)
#include "driver/entries.def"
#undef VRAM_HOOK
#undef VRAM_CALL

/* Once, as settle: a definition that was found is for good. */
static void look_for_next(void)
{
    unsigned exported = 0;
    void *found;
    vram_next_look();
#define VRAM_HOOK(name, parameters, arguments)                                                                         \
    if ((found = vram_next_definition(exported++))) {                                                                  \
        settle((void **)&next.name, found);                                                                            \
        settle((void **)&vram_driver_through.name, (void *)through_##name);                                            \
    }
#define VRAM_CALL(name)
#include "driver/entries.def"
#undef VRAM_HOOK
#undef VRAM_CALL
}

void vram_driver_look_again(void)
{
    look_for_next();
    if (!__atomic_load_n(&vram_driver_ready, __ATOMIC_ACQUIRE))
        return;
#define VRAM_HOOK(name, parameters, arguments)                                                                         \
    if (vram_driver_through.name)                                                                                      \
        __atomic_store_n((void **)&vram_driver_table.name, (void *)through_##name, __ATOMIC_RELEASE);
#define VRAM_CALL(name)
#include "driver/entries.def"
#undef VRAM_HOOK
#undef VRAM_CALL
}

bool vram_driver_find(void)
{
    if (__atomic_load_n(&vram_driver_ready, __ATOMIC_ACQUIRE))
        return true;
    const struct link_map *map = vram_elf_find("libcuda.so.1");
    if (!map)
        return false;

    /* Threads that come here together find the same values; the flag comes last. */
    look_for_next();
#define VRAM_CALL(name)                                                                                                \
    settle((void **)&vram_driver_own.name, vram_elf_symbol(map, #name));                                               \
    settle((void **)&vram_driver_table.name, (void *)vram_driver_own.name);
#define VRAM_HOOK(name, parameters, arguments)                                                                         \
    if (vram_driver_through.name)                                                                                      \
        settle((void **)&vram_driver_table.name, (void *)through_##name);                                              \
    VRAM_CALL(name)
#include "driver/entries.def"
#undef VRAM_HOOK
#undef VRAM_CALL
    static const char *const unknown[] = {"cuCtxCreate_v5", "cuCtxCreate_v6", "cuCtxCreate_v7", "cuCtxCreate_v8",
                                          "cuGLCtxCreate_v3", "cuVDPAUCtxCreate_v3"};
    for (size_t i = 0; i < VRAM_LENGTH(unknown); i++)
        if (vram_elf_symbol(map, unknown[i]))
            __atomic_store_n(&younger, true, __ATOMIC_RELAXED);
    uintptr_t start, end;
    vram_elf_span(map, &start, &end);
    __atomic_store_n(&code_start, start, __ATOMIC_RELAXED);
    __atomic_store_n(&code_end, end, __ATOMIC_RELAXED);
    __atomic_store_n(&vram_driver_ready, true, __ATOMIC_RELEASE);
    return true;
}

bool vram_driver_is_younger(void)
{
    return vram_driver_find() && __atomic_load_n(&younger, __ATOMIC_RELAXED);
}

bool vram_driver_contains(const void *address)
{
    return __atomic_load_n(&vram_driver_ready, __ATOMIC_ACQUIRE) &&
           (uintptr_t)address >= __atomic_load_n(&code_start, __ATOMIC_RELAXED) &&
           (uintptr_t)address < __atomic_load_n(&code_end, __ATOMIC_RELAXED);
}

const char *vram_driver_missing(void)
{
#define VRAM_HOOK(name, parameters, arguments)
#define VRAM_CALL(name)                                                                                                \
    if (!vram_driver()->name)                                                                                          \
        return #name;
#define VRAM_MAYBE(name)
#include "driver/entries.def"
#undef VRAM_HOOK
#undef VRAM_CALL
    return NULL;
}

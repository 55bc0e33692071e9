#include "interpose/hooks.h"

#include <errno.h>

#include "base/activity.h"
#include "base/compiler.h"
#include "base/proc.h"
#include "config/options.h"
#include "driver/next.h"

/* `real`, or the answer: of the driver alone to who stands before it while we call that one, and of that one where the driver is
 * not loaded, which it may load (a stub). */
#define FIND(name, arguments)                                                                                          \
    if (vram_unlikely(vram_next_inside) && vram_next_is_inside())                                                      \
        return vram_driver_own.name ? vram_driver_own.name arguments : CUDA_ERROR_NOT_INITIALIZED;                     \
    __typeof__(&name) real = vram_driver()->name;                                                                      \
    if (vram_unlikely(!real))                                                                                          \
        return vram_driver_through.name ? vram_driver_through.name arguments : CUDA_ERROR_NOT_INITIALIZED;

/* The entries. `entry_` names are ours alone; the exported aliases could be bound to another preloaded library's. */
#define ENTRY(name, parameters, arguments, hook_call)                                                                  \
    static CUresult entry_##name parameters                                                                            \
    {                                                                                                                  \
        FIND(name, arguments)                                                                                          \
        if (vram_unlikely(!vram_proc_is_ours()))                                                                       \
            return real arguments;                                                                                     \
        vram_activity_mark();                                                                                          \
        uintptr_t caller = (uintptr_t)__builtin_return_address(0);                                                     \
        int saved = errno;                                                                                             \
        CUresult r = hook_call;                                                                                        \
        errno = saved;                                                                                                 \
        return r;                                                                                                      \
    }                                                                                                                  \
    VRAM_EXPORT __typeof__(entry_##name) name __attribute__((alias("entry_" #name)));
#define VRAM_HOOK(name, parameters, arguments)                                                                         \
    ENTRY(name, parameters, arguments, hook_##name(caller, VRAM_EXPAND arguments))
/* A launch is only seen: not even its errno is kept. */
#define VRAM_LAUNCH(name, parameters, arguments)                                                                       \
    static CUresult entry_##name parameters                                                                            \
    {                                                                                                                  \
        FIND(name, arguments)                                                                                          \
        vram_activity_mark();                                                                                          \
        return real arguments;                                                                                         \
    }                                                                                                                  \
    VRAM_EXPORT __typeof__(entry_##name) name __attribute__((alias("entry_" #name)));
#define VRAM_CALL(name)
#include "driver/entries.def"
#undef VRAM_HOOK

static const struct {
    void *wrapper;
    void *const *real;
    bool launch;
} table[] = {
#define VRAM_HOOK(name, parameters, arguments) {(void *)entry_##name, (void *const *)&vram_driver_own.name, false},
#define VRAM_LAUNCH(name, parameters, arguments) {(void *)entry_##name, (void *const *)&vram_driver_own.name, true},
#include "driver/entries.def"
#undef VRAM_HOOK
#undef VRAM_CALL
};

void *vram_hook_for(const void *real)
{
    if (!real || !vram_driver_find())
        return NULL;
    for (size_t i = 0; i < VRAM_LENGTH(table); i++)
        if (__atomic_load_n(table[i].real, __ATOMIC_RELAXED) == real)
            return table[i].launch && !vram_options_watch_launches() ? NULL : table[i].wrapper;
    return NULL;
}

#include "entry.h"

#include "capture.h"
#include "context.h"
#include "sim.h"
#include "work.h"

#include <ctype.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* clang-format off */
#define SIM(name, version, needs, params, args) ID_##name,
#define SIM_PT(name, pt, version, needs, params, args) ID_##name, ID_##name##pt,
#define STUB(name, version) ID_##name,
enum id {
#include "entries.def"
    ID_COUNT
};
#undef SIM
#undef SIM_PT
#undef STUB
/* clang-format on */

/* What happens to one entry's calls; all under the state lock. */
static struct {
    unsigned long calls, calls_during_capture;
    unsigned long fail_after, fail_count; /* that many calls pass, then that many fail */
    int fail_code;
    bool hidden, reported;
    sim_callback callback;
    void *callback_arg;
} entries[ID_COUNT];

struct entry_info {
    const char *name;
    void *address;
    int version;
    bool per_thread;
};
static const struct entry_info info[ID_COUNT];

/* Takes the lock and answers true when the entry shall do its work; else *result is the answer and the lock is free. */
static bool enter(enum id id, unsigned int needs, bool per_thread, CUresult *result)
{
    CUresult r = CUDA_SUCCESS;
    sim_lock();
    if (sim.exited) {
        r = CUDA_ERROR_DEINITIALIZED;
        goto out;
    }
    if (sim.forked) {
        r = CUDA_ERROR_NOT_INITIALIZED;
        goto out;
    }
    sim.used = true;
    entries[id].calls++;
    if (sim_capture_count())
        entries[id].calls_during_capture++;
    sim_callback callback = sim_thread.in_callback ? NULL : entries[id].callback;
    if (callback) {
        void *arg = entries[id].callback_arg;
        sim_unlock();
        sim_thread.in_callback = true;
        callback(info[id].name, arg);
        sim_thread.in_callback = false;
        sim_lock();
    }
    if (!sim_thread.serial)
        sim_thread.serial = ++sim.next_id;
    if (entries[id].fail_after) {
        entries[id].fail_after--;
    } else if (entries[id].fail_count) {
        entries[id].fail_count--;
        r = (CUresult)entries[id].fail_code;
        goto out;
    }
    if (entries[id].hidden || info[id].version > sim.config.version) {
        r = CUDA_ERROR_NOT_SUPPORTED;
        goto out;
    }
    if (needs & INIT && !sim.initialised) {
        r = CUDA_ERROR_NOT_INITIALIZED;
        goto out;
    }
    /* A capture refuses before anything else is looked at: also a free of 0 (measured). */
    if (needs & UNSAFE)
        r = sim_capture_check_unsafe();
    if (!r && (needs & CTX) == CTX)
        r = sim_context_check();
    if (!r && (needs & LIVE) == LIVE) {
        sim_work_poll();
        r = sim_context_current()->error;
    }
    /* But a sticky error is told before a capture is (measured for cuCtxSynchronize). */
    if (!r && needs & NEVER)
        r = sim_capture_check_never(sim_context_current());
out:
    if (r) {
        sim_unlock();
        *result = r;
        return false;
    }
    sim_thread.per_thread_default = per_thread;
    return true;
}

static CUresult leave(CUresult r)
{
    sim_thread.per_thread_default = false;
    sim_unlock();
    return r;
}

static CUresult stub(enum id id)
{
    CUresult r;
    if (!enter(id, NONE, false, &r))
        return r;
    bool first = !entries[id].reported;
    entries[id].reported = true;
    leave(r);
    if (first)
        fprintf(stderr, "simdriver: %s is not simulated\n", info[id].name);
    return CUDA_ERROR_NOT_SUPPORTED;
}

/*
 * Each entry is a static function, exported under its name by an alias. So the table below holds our own addresses,
 * whatever a preloaded library puts in front of the exported names. Stubs take any arguments, which the C declaration
 * of their name may contradict: they get the name by the assembler alone.
 */
#define EXPORT(target) __attribute__((visibility("default"), alias(#target)))

/* clang-format off */
#define clear(output) (output ? (void)(*output = 0) : (void)0)
#define ENTRY(name, call, needs, per_thread, params, args, clear)                                                       \
    CUresult name params;                                                                                               \
    static CUresult entry_##name params                                                                                 \
    {                                                                                                                   \
        CUresult r;                                                                                                     \
        clear;                                                                                                          \
        return enter(ID_##name, needs, per_thread, &r) ? leave(do_##call args) : r;                                     \
    }                                                                                                                   \
    CUresult name params EXPORT(entry_##name);
#define SIM(name, version, needs, params, args) ENTRY(name, name, needs, false, params, args, )
#define SIM_OUT(name, version, needs, params, args, clear) ENTRY(name, name, needs, false, params, args, clear)
#define SIM_PT(name, pt, version, needs, params, args)                                                                  \
    ENTRY(name, name, needs, false, params, args, )                                                                     \
    ENTRY(name##pt, name, needs, true, params, args, )
#define STUB(name, version)                                                                                             \
    static CUresult entry_##name(void)                                                                                  \
    {                                                                                                                   \
        return stub(ID_##name);                                                                                         \
    }                                                                                                                   \
    CUresult export_##name(void) __asm__(#name) EXPORT(entry_##name);
#include "entries.def"
#undef SIM
#undef SIM_PT
#undef STUB

#define SIM(name, version, needs, params, args) [ID_##name] = {#name, (void *)entry_##name, version, false},
#define SIM_PT(name, pt, version, needs, params, args)                                                                  \
    [ID_##name] = {#name, (void *)entry_##name, version, false},                                                        \
    [ID_##name##pt] = {#name #pt, (void *)entry_##name##pt, version, true},
#define STUB(name, version) [ID_##name] = {#name, (void *)entry_##name, version, false},
static const struct entry_info info[ID_COUNT] = {
#include "entries.def"
};
#undef SIM
#undef SIM_PT
#undef STUB
/* clang-format on */

static int find(const char *entry)
{
    for (int i = 0; i < ID_COUNT; i++)
        if (!strcmp(info[i].name, entry))
            return i;
    return -1;
}

/* Whether the exported name is the symbol with nothing or _v<n> behind it, and _ptsz or _ptds after that. */
static bool is_variant(const struct entry_info *e, const char *symbol, size_t len)
{
    if (strncmp(e->name, symbol, len))
        return false;
    const char *rest = e->name + len;
    if (rest[0] == '_' && rest[1] == 'v' && isdigit((unsigned char)rest[2]))
        for (rest += 2; isdigit((unsigned char)*rest); rest++)
            ;
    return e->per_thread ? !strcmp(rest, "_ptsz") || !strcmp(rest, "_ptds") : !*rest;
}

void *sim_entry_lookup(const char *symbol, int version, bool per_thread, CUdriverProcAddressQueryResult *status)
{
    size_t len = strlen(symbol);
    int best = -1;
    bool exists = false;
    *status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    /* A name that carries its suffix already is not found (measured), although it is exported. */
    for (size_t i = len; i > 2; i--) {
        if (symbol[i - 1] == 'v' && symbol[i - 2] == '_' && isdigit((unsigned char)symbol[i]))
            return NULL;
    }
    if (len > 5 && (!strcmp(symbol + len - 5, "_ptsz") || !strcmp(symbol + len - 5, "_ptds")))
        return NULL;
    for (int i = 0; i < ID_COUNT; i++) {
        if (!is_variant(&info[i], symbol, len) || entries[i].hidden || info[i].version > sim.config.version)
            continue;
        exists = true;
        if (info[i].version > version || (info[i].per_thread && !per_thread))
            continue;
        if (best < 0 || info[i].version > info[best].version ||
            (info[i].version == info[best].version && info[i].per_thread))
            best = i;
    }
    /* From CUDA 12 on the plain name means the entry whose last argument is flags. */
    if (best == ID_cuGraphInstantiate_v2 && version >= 12000)
        best = ID_cuGraphInstantiateWithFlags;
    if (best < 0) {
        if (exists)
            *status = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
        return NULL;
    }
    *status = CU_GET_PROC_ADDRESS_SUCCESS;
    return info[best].address;
}

static CUresult get_proc_address(const char *symbol, void **pfn, int version, uint64_t flags,
                                 CUdriverProcAddressQueryResult *status)
{
    if (!symbol || !pfn || flags > 2)
        return CUDA_ERROR_INVALID_VALUE;
    CUdriverProcAddressQueryResult found;
    *pfn = sim_entry_lookup(symbol, version, flags == 2, &found);
    if (status)
        *status = found;
    return found && !status ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

CUresult do_cuGetProcAddress(const char *symbol, void **pfn, int version, uint64_t flags)
{
    return get_proc_address(symbol, pfn, version, flags, NULL);
}

CUresult do_cuGetProcAddress_v2(const char *symbol, void **pfn, int version, uint64_t flags,
                                CUdriverProcAddressQueryResult *status)
{
    return get_proc_address(symbol, pfn, version, flags, status);
}

int sim_entry_self_lookup(void)
{
    static const int looked_up[] = {ID_cuMemAlloc_v2, ID_cuMemFree_v2, ID_cuGetProcAddress_v2, ID_cuCtxSynchronize};
    Dl_info self;
    void *handle = dladdr(&info, &self) ? dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    int ok = handle != NULL;
    for (size_t i = 0; handle && i < sizeof looked_up / sizeof *looked_up; i++)
        ok &= dlsym(handle, info[looked_up[i]].name) == info[looked_up[i]].address;
    if (handle)
        dlclose(handle);
    return ok;
}

int sim_entry_fail(const char *entry, unsigned long nth, unsigned long count, int code)
{
    int id = find(entry);
    if (id < 0)
        return -1;
    entries[id].fail_after = nth ? nth - 1 : 0;
    entries[id].fail_count = count;
    entries[id].fail_code = code;
    if (!count)
        entries[id].fail_after = 0;
    return 0;
}

int sim_entry_hide(const char *entry)
{
    int id = find(entry);
    if (id >= 0)
        entries[id].hidden = true;
    return id < 0 ? -1 : 0;
}

const char *sim_entry_name(size_t i, unsigned long *calls)
{
    if (i >= ID_COUNT)
        return NULL;
    *calls = entries[i].calls;
    return info[i].name;
}

/* The control API of sim.h, as far as it is about entries. */
#define CONTROL __attribute__((visibility("default")))

CONTROL unsigned long sim_calls(const char *entry)
{
    sim_lock();
    int id = find(entry);
    unsigned long n = id < 0 ? 0 : entries[id].calls;
    sim_unlock();
    return n;
}

CONTROL unsigned long sim_calls_during_capture(const char *entry)
{
    sim_lock();
    int id = find(entry);
    unsigned long n = id < 0 ? 0 : entries[id].calls_during_capture;
    sim_unlock();
    return n;
}

CONTROL unsigned long sim_calls_total(void)
{
    sim_lock();
    unsigned long n = 0;
    for (int i = 0; i < ID_COUNT; i++)
        if (i != ID_cuGetProcAddress && i != ID_cuGetProcAddress_v2)
            n += entries[i].calls;
    sim_unlock();
    return n;
}

CONTROL void sim_reset_counters(void)
{
    sim_lock();
    for (int i = 0; i < ID_COUNT; i++)
        entries[i].calls = entries[i].calls_during_capture = 0;
    sim.refused_frees = 0;
    sim_unlock();
}

CONTROL int sim_fail(const char *entry, unsigned long nth, unsigned long count, int code)
{
    sim_lock();
    int r = sim_entry_fail(entry, nth, count, code);
    sim_unlock();
    return r;
}

CONTROL int sim_on_call(const char *entry, sim_callback callback, void *arg)
{
    sim_lock();
    int id = find(entry);
    if (id >= 0) {
        entries[id].callback = callback;
        entries[id].callback_arg = arg;
    }
    sim_unlock();
    return id < 0 ? -1 : 0;
}

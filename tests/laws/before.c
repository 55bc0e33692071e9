/* See before.h. */
#include "before.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "vramshim/cuda_abi.h"

enum { MAX = 4096, SCRATCH = 4096 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* over what is registered */
static unsigned long long registered[MAX];
static size_t held;
static bool curious, curious_by_name;
static __thread bool asking;
static size_t last_size;
static jmp_buf *leave_to;

static void *found(const char *name)
{
    static void *handle;
    const char *by = getenv("BEFORE_BY");
    void *p;
    if (by && strcmp(by, "handle") == 0) {
        if (!handle)
            handle = dlopen("libcuda.so.1", RTLD_NOW);
        p = dlsym(handle, name);
    } else {
        p = dlsym(RTLD_NEXT, name);
    }
    __asm__ volatile("" : "+r"(p)); /* this library asks, not its caller */
    return p;
}

static void enter(unsigned long long address)
{
    pthread_mutex_lock(&lock);
    if (held < MAX)
        registered[held++] = address;
    pthread_mutex_unlock(&lock);
}

static void drop(unsigned long long address)
{
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < held; i++) {
        if (registered[i] == address) {
            registered[i] = registered[--held];
            break;
        }
    }
    pthread_mutex_unlock(&lock);
}

enum {
#define VRAM_HOOK(name, parameters, arguments) ENTRY_##name,
#define VRAM_CALL(name)
#include "../../shim/driver/entries.def"
#undef VRAM_HOOK
#undef VRAM_CALL
    ENTRIES
};

static const char *const names[ENTRIES] = {
#define VRAM_HOOK(name, parameters, arguments) #name,
#define VRAM_CALL(name)
#include "../../shim/driver/entries.def"
#undef VRAM_HOOK
#undef VRAM_CALL
};
static unsigned long calls[ENTRIES]; /* accessed atomically */

/* The driver's, looked up at the first call. */
#define VRAM_HOOK(name, parameters, arguments)                                                                         \
    static CUresult forward_##name parameters                                                                          \
    {                                                                                                                  \
        static __typeof__(&name) real;                                                                                 \
        __typeof__(&name) there = __atomic_load_n(&real, __ATOMIC_RELAXED);                                            \
        if (!there)                                                                                                    \
            __atomic_store_n(&real, there = (__typeof__(&name))found(#name), __ATOMIC_RELAXED);                        \
        return there ? there arguments : CUDA_ERROR_NOT_INITIALIZED;                                                   \
    }
#define VRAM_CALL(name)
#include "../../shim/driver/entries.def"
#undef VRAM_HOOK
#undef VRAM_CALL

static void ask_about(CUdeviceptr address)
{
    CUdeviceptr base, scratch;
    bool by_name = __atomic_load_n(&curious_by_name, __ATOMIC_RELAXED);
    if (!__atomic_load_n(&curious, __ATOMIC_RELAXED) || asking)
        return;
    asking = true;
    last_size = 0;
    (by_name ? cuMemGetAddressRange_v2 : forward_cuMemGetAddressRange_v2)(&base, &last_size, address);
    if ((by_name ? cuMemAlloc_v2 : forward_cuMemAlloc_v2)(&scratch, SCRATCH) == CUDA_SUCCESS)
        (by_name ? cuMemFree_v2 : forward_cuMemFree_v2)(scratch);
    asking = false;
}

/* An entry is called, with its first argument. What is freed is forgotten before the driver may give it to others. */
static void goes(int entry, ...)
{
    va_list ap;
    va_start(ap, entry);
    unsigned long long first = va_arg(ap, unsigned long long);
    va_end(ap);
    __atomic_fetch_add(&calls[entry], 1, __ATOMIC_RELAXED);
    if (entry == ENTRY_cuMemFree_v2 || entry == ENTRY_cuMemFreeAsync) {
        jmp_buf *there = leave_to;
        leave_to = NULL;
        if (there)
            longjmp(*there, 1);
        ask_about(first);
        drop(first);
    }
}

static CUresult came(CUresult r, int entry, ...)
{
    va_list ap;
    va_start(ap, entry);
    CUdeviceptr *first = va_arg(ap, CUdeviceptr *);
    va_end(ap);
    if (r == CUDA_SUCCESS && (entry == ENTRY_cuMemAlloc_v2 || entry == ENTRY_cuMemAllocPitch_v2))
        enter(*first);
    return r;
}

#define EXPAND(...) __VA_ARGS__
#define VRAM_HOOK(name, parameters, arguments)                                                                         \
    static CUresult own_##name parameters                                                                              \
    {                                                                                                                  \
        goes(ENTRY_##name, EXPAND arguments);                                                                          \
        return came(forward_##name arguments, ENTRY_##name, EXPAND arguments);                                         \
    }                                                                                                                  \
    __typeof__(own_##name) name __attribute__((alias("own_" #name)));
#define VRAM_CALL(name)
#include "../../shim/driver/entries.def"
#undef VRAM_HOOK
#undef VRAM_CALL

unsigned long before_calls(const char *entry)
{
    for (int i = 0; i < ENTRIES; i++)
        if (strcmp(names[i], entry) == 0)
            return __atomic_load_n(&calls[i], __ATOMIC_RELAXED);
    return 0;
}

size_t before_registered(unsigned long long *ret_addresses, size_t max)
{
    pthread_mutex_lock(&lock);
    size_t n = held;
    memcpy(ret_addresses, registered, (n < max ? n : max) * sizeof(*registered));
    pthread_mutex_unlock(&lock);
    return n;
}

void before_be_curious(bool by_name)
{
    __atomic_store_n(&curious_by_name, by_name, __ATOMIC_RELAXED);
    __atomic_store_n(&curious, true, __ATOMIC_RELAXED);
}
size_t before_last_size(void) { return last_size; }

void before_leave_to(jmp_buf *there) { leave_to = there; }

CUresult before_alloc_and_free(size_t bytes)
{
    static pthread_mutex_t own = PTHREAD_MUTEX_INITIALIZER; /* entered again on one thread, it waits for ever */
    CUdeviceptr p;
    pthread_mutex_lock(&own);
    CUresult r = own_cuMemAlloc_v2(&p, bytes);
    if (r == CUDA_SUCCESS)
        r = own_cuMemFree_v2(p);
    pthread_mutex_unlock(&own);
    return r;
}

static void *ask_by_name(void *unused)
{
    size_t free_bytes, total;
    cuMemGetInfo_v2(&free_bytes, &total);
    return unused;
}

static void __attribute__((constructor)) first(void)
{
    const char *what = getenv("BEFORE_FIRST");
    pthread_t thread;
    if (what && strcmp(what, "look") == 0)
        dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuMemFree_v2");
    if (what && strcmp(what, "wait") == 0 && pthread_create(&thread, NULL, ask_by_name, NULL) == 0)
        pthread_join(thread, NULL);
}

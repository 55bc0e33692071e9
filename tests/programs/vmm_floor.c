/*
 * The floor under every cache of virtual memory: preloaded instead of the shim, it makes the calls with which a program
 * creates, reserves, maps, unmaps and releases memory cost next to nothing, for sizes that were seen before. It checks
 * nothing and accounts for nothing: a measuring instrument for programs that do these calls once for each buffer, in
 * that order, as JAX's platform allocator does; wrong under any other.
 *
 * Interposes dlsym by RTLD_NEXT, which is good enough for that.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vramshim/cuda_abi.h"

enum { SLOTS = 1 << 16 }; /* of each table; a program of more buffers is too large for it */

struct buffer {
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at;
    bool mapped, accessed;
    struct buffer *next; /* spare, of the same size */
};
struct slot {
    uint64_t key;
    struct buffer *buffer;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct slot by_address[SLOTS], spare[SLOTS]; /* spare: by size */
static __thread struct buffer *given;               /* created last by this thread: it asks for its addresses next */

#define ENTRIES(X)                                                                                                     \
    X(cuMemCreate) X(cuMemRelease) X(cuMemAddressReserve) X(cuMemAddressFree) X(cuMemMap) X(cuMemUnmap) X(cuMemSetAccess)

static struct {
#define X(name) __typeof__(&name) name;
    ENTRIES(X)
#undef X
} driver;

static struct slot *slot(struct slot *table, uint64_t key)
{
    for (uint64_t i = (key * 0x9E3779B97F4A7C15u) >> 48, n = 0; n < SLOTS; i = (i + 1) % SLOTS, n++)
        if (!table[i].key || table[i].key == key)
            return &table[i];
    fputs("vmm_floor: too many buffers\n", stderr);
    abort();
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                     unsigned long long flags)
{
    pthread_mutex_lock(&lock);
    struct slot *s = slot(spare, size);
    struct buffer *b = s->buffer;
    if (b)
        s->buffer = b->next;
    pthread_mutex_unlock(&lock);
    if (!b) {
        CUresult r = driver.cuMemCreate(handle, size, prop, flags);
        if (r != CUDA_SUCCESS || !(b = calloc(1, sizeof(*b))))
            return r;
        b->handle = *handle;
    }
    *handle = b->handle;
    given = b;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr, unsigned long long flags)
{
    struct buffer *b = given;
    given = NULL;
    if (b && b->at) {
        *ptr = b->at;
        return CUDA_SUCCESS;
    }
    CUresult r = driver.cuMemAddressReserve(ptr, size, alignment, addr, flags);
    if (r == CUDA_SUCCESS && b) {
        b->at = *ptr;
        pthread_mutex_lock(&lock);
        *slot(by_address, *ptr) = (struct slot){*ptr, b};
        pthread_mutex_unlock(&lock);
    }
    return r;
}

static struct buffer *at(CUdeviceptr ptr)
{
    pthread_mutex_lock(&lock);
    struct buffer *b = slot(by_address, ptr)->buffer;
    pthread_mutex_unlock(&lock);
    return b;
}

CUresult cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags)
{
    struct buffer *b = at(ptr);
    if (b && b->mapped)
        return CUDA_SUCCESS;
    CUresult r = driver.cuMemMap(ptr, size, offset, handle, flags);
    if (b && r == CUDA_SUCCESS)
        b->mapped = true;
    return r;
}

CUresult cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count)
{
    struct buffer *b = at(ptr);
    if (b && b->accessed)
        return CUDA_SUCCESS;
    CUresult r = driver.cuMemSetAccess(ptr, size, desc, count);
    if (b && r == CUDA_SUCCESS)
        b->accessed = true;
    return r;
}

CUresult cuMemUnmap(CUdeviceptr ptr, size_t size)
{
    return at(ptr) ? CUDA_SUCCESS : driver.cuMemUnmap(ptr, size);
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    (void)handle;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr ptr, size_t size)
{
    struct buffer *b = at(ptr);
    if (!b)
        return driver.cuMemAddressFree(ptr, size);
    pthread_mutex_lock(&lock);
    struct slot *s = slot(spare, size);
    b->next = s->buffer;
    *s = (struct slot){size, b};
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

void *dlsym(void *handle, const char *name)
{
    static void *(*next)(void *, const char *);
    if (!next && !(next = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34")))
        next = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    void *p = next(handle, name);
    if (!p || handle == RTLD_NEXT || handle == RTLD_DEFAULT)
        return p;
#define X(entry)                                                                                                       \
    if (strcmp(name, #entry) == 0 && p != (void *)&entry) {                                                            \
        driver.entry = p;                                                                                              \
        return (void *)&entry;                                                                                         \
    }
    ENTRIES(X)
#undef X
    return p;
}

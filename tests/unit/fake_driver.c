#include "fake_driver.h"

#include <pthread.h>
#include <string.h>

#include "base/proc.h"
#include "base/say.h"
#include "driver/driver.h"
#include "heap/life.h"
#include "ledger/block.h"

enum { ALLOCATIONS = 1024, PAGES = 1024, EVENTS = 256, DEPTH = 8 };

struct CUevent_st {
    CUcontext ctx;
    uint64_t work; /* of the context, when it was recorded */
};

struct fake fake;
struct CUctx_st fake_a, fake_b, fake_other = {.device = 1};
struct CUmemPoolHandle_st fake_pools[2], fake_graphs[2], fake_own_pool;

static struct allocation {
    CUdeviceptr addr; /* 0: none */
    uint64_t size;
    CUcontext ctx;
} allocations[ALLOCATIONS];
static struct CUevent_st events[EVENTS];
static unsigned event_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* over all of them, and the contexts */

static __thread CUcontext stack[DEPTH];
static __thread unsigned depth;

CUcontext fake_current(void) { return depth ? stack[depth - 1] : NULL; }

void fake_use(CUcontext ctx)
{
    depth = ctx != NULL;
    stack[0] = ctx;
}

static CUresult context_state(void)
{
    return fake_current() ? fake_current()->failed : CUDA_ERROR_INVALID_CONTEXT;
}

static CUdeviceptr page_address(int device, uint64_t page)
{
    return 0x700000000000 + ((CUdeviceptr)device << 40) + page * VRAM_PAGE;
}

enum page_use { UNUSED, WHOLE, SHARED };

/* What each page is used for; returns how many are used. */
static uint64_t map_pages(int device, enum page_use use[PAGES])
{
    uint64_t used = 0;
    memset(use, 0, PAGES * sizeof(*use));
    for (int i = 0; i < ALLOCATIONS; i++) {
        const struct allocation *a = &allocations[i];
        if (!a->addr || a->ctx->device != device)
            continue;
        uint64_t first = (a->addr - page_address(device, 0)) / VRAM_PAGE;
        for (uint64_t p = first; p <= first + (a->size - 1) / VRAM_PAGE; p++)
            use[p] = vram_is_small(a->size) ? SHARED : WHOLE;
    }
    for (int p = 0; p < PAGES; p++)
        used += use[p] != UNUSED;
    used += fake.others[device] + fake_pools[device].reserved + fake_graphs[device].reserved;
    return used + (device == 0 ? fake_own_pool.reserved : 0);
}

static struct allocation *overlapping(CUdeviceptr addr, uint64_t size)
{
    for (struct allocation *a = allocations; a < allocations + ALLOCATIONS; a++)
        if (a->addr && a->addr < addr + size && addr < a->addr + a->size)
            return a;
    return NULL;
}

/* The lowest address that has room, so that what was freed last is given again. 0: no memory. */
static CUdeviceptr find_room(int device, uint64_t size)
{
    enum page_use use[PAGES];
    uint64_t left = fake.pages[device] - map_pages(device, use), whole = (size + VRAM_PAGE - 1) / VRAM_PAGE, run = 0;
    if (vram_is_small(size)) {
        for (uint64_t p = 0; p < PAGES; p++) {
            CUdeviceptr page = page_address(device, p), addr = page;
            if (use[p] == WHOLE || (use[p] == UNUSED && !left))
                continue;
            for (const struct allocation *a; (a = overlapping(addr, size));)
                addr = a->addr + vram_footprint(a->size);
            if (addr + size <= page + VRAM_PAGE)
                return addr;
        }
        return 0;
    }
    for (uint64_t p = 0; p < PAGES && whole <= left; p++) {
        run = use[p] == UNUSED ? run + 1 : 0;
        if (run == whole)
            return page_address(device, p + 1 - whole);
    }
    return 0;
}

/* Under the lock. */
static CUresult give(CUdeviceptr *dptr, uint64_t size)
{
    struct allocation *a = allocations;
    while (a < allocations + ALLOCATIONS && a->addr)
        a++;
    *dptr = a < allocations + ALLOCATIONS ? find_room(fake_current()->device, size) : 0;
    if (!*dptr)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *a = (struct allocation){*dptr, size, fake_current()};
    return CUDA_SUCCESS;
}

static CUresult do_cuMemAlloc_v2(CUdeviceptr *dptr, size_t size)
{
    if (!dptr || !size)
        return CUDA_ERROR_INVALID_VALUE;
    if (context_state() != CUDA_SUCCESS)
        return context_state();
    pthread_mutex_lock(&lock);
    CUresult r = give(dptr, size);
    pthread_mutex_unlock(&lock);
    return r;
}

static CUresult do_cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pitch, size_t width, size_t height, unsigned element)
{
    if (!dptr || !pitch || !width || !height || (element != 4 && element != 8 && element != 16))
        return CUDA_ERROR_INVALID_VALUE;
    if (context_state() != CUDA_SUCCESS)
        return context_state();
    *pitch = (width + fake.row - 1) / fake.row * fake.row;
    pthread_mutex_lock(&lock);
    CUresult r = give(dptr, *pitch * height);
    pthread_mutex_unlock(&lock);
    return r;
}

static CUresult do_cuMemFree_v2(CUdeviceptr dptr)
{
    if (context_state() != CUDA_SUCCESS)
        return context_state();
    pthread_mutex_lock(&lock);
    struct allocation *a = overlapping(dptr, 1);
    bool known = a && a->addr == dptr;
    if (known)
        a->addr = 0;
    pthread_mutex_unlock(&lock);
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult do_cuMemFreeAsync(CUdeviceptr dptr, CUstream stream)
{
    (void)stream;
    return do_cuMemFree_v2(dptr);
}

static CUresult do_cuMemGetInfo_v2(size_t *free, size_t *total)
{
    enum page_use use[PAGES];
    if (context_state() != CUDA_SUCCESS)
        return context_state();
    int device = fake_current()->device;
    pthread_mutex_lock(&lock);
    *free = (fake.pages[device] - map_pages(device, use)) * VRAM_PAGE;
    *total = fake.pages[device] * VRAM_PAGE;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

static CUresult do_cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr dptr)
{
    pthread_mutex_lock(&lock);
    const struct allocation *a = overlapping(dptr, 1);
    if (a) {
        *base = a->addr;
        *size = a->size;
    }
    pthread_mutex_unlock(&lock);
    return a ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

static CUresult do_cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr ptr)
{
    size_t size;
    if (attribute != CU_POINTER_ATTRIBUTE_RANGE_START_ADDR)
        return CUDA_ERROR_NOT_SUPPORTED;
    return do_cuMemGetAddressRange_v2(data, &size, ptr) == CUDA_SUCCESS ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult do_cuCtxGetCurrent(CUcontext *ctx)
{
    *ctx = fake_current();
    return CUDA_SUCCESS;
}

static CUresult do_cuCtxSetCurrent(CUcontext ctx)
{
    fake_use(ctx);
    return CUDA_SUCCESS;
}

static CUresult do_cuCtxPushCurrent_v2(CUcontext ctx)
{
    if (depth == DEPTH)
        return CUDA_ERROR_UNKNOWN;
    stack[depth++] = ctx;
    return CUDA_SUCCESS;
}

static CUresult do_cuCtxPopCurrent_v2(CUcontext *ctx)
{
    if (!depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    *ctx = stack[--depth];
    return CUDA_SUCCESS;
}

static CUresult do_cuCtxGetDevice(CUdevice *device)
{
    if (!fake_current())
        return CUDA_ERROR_INVALID_CONTEXT;
    *device = fake_current()->device;
    return CUDA_SUCCESS;
}

static CUresult do_cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    (void)least;
    (void)greatest;
    return context_state();
}

static CUresult do_cuCtxSynchronize(void)
{
    CUcontext ctx = fake_current();
    if (context_state() != CUDA_SUCCESS)
        return context_state();
    pthread_mutex_lock(&lock);
    ctx->done = ctx->work;
    ctx->waited_for++;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

static CUresult do_cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    (void)device;
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}

static CUresult do_cuCtxRecordEvent(CUcontext ctx, CUevent event)
{
    if (ctx->failed != CUDA_SUCCESS)
        return ctx->failed;
    pthread_mutex_lock(&lock);
    *event = (struct CUevent_st){ctx, ctx->work};
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

static CUresult do_cuCtxWaitEvent(CUcontext ctx, CUevent event)
{
    pthread_mutex_lock(&lock);
    if (ctx->behind < event->work)
        ctx->behind = event->work;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

static CUresult do_cuEventCreate(CUevent *event, unsigned flags)
{
    (void)flags;
    if (context_state() != CUDA_SUCCESS)
        return context_state();
    pthread_mutex_lock(&lock);
    *event = event_count < EVENTS ? &events[event_count++] : NULL;
    pthread_mutex_unlock(&lock);
    return *event ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult do_cuEventQuery(CUevent event)
{
    pthread_mutex_lock(&lock);
    bool complete = !event->ctx || event->ctx->done >= event->work;
    pthread_mutex_unlock(&lock);
    return complete ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

/* Nobody else does the work: it is done by waiting. */
static CUresult do_cuEventSynchronize(CUevent event)
{
    pthread_mutex_lock(&lock);
    if (event->ctx && event->ctx->done < event->work)
        event->ctx->done = event->work;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

static CUresult do_cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device)
{
    *pool = &fake_pools[device];
    return CUDA_SUCCESS;
}

static CUresult do_cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
    pthread_mutex_lock(&lock);
    *(uint64_t *)value = VRAM_PAGE * (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT ? pool->reserved : pool->used);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

static CUresult do_cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
    pthread_mutex_lock(&lock);
    if (keep / VRAM_PAGE < pool->reserved)
        pool->reserved = pool->used > keep / VRAM_PAGE ? pool->used : keep / VRAM_PAGE;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

static CUresult do_cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attribute, void *value)
{
    return do_cuMemPoolGetAttribute(&fake_graphs[device],
                                    attribute == CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT
                                        ? CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT
                                        : CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
                                    value);
}

static CUresult do_cuDeviceGraphMemTrim(CUdevice device) { return do_cuMemPoolTrimTo(&fake_graphs[device], 0); }

/* Addresses that nobody touches; they are not given twice. */
static CUresult do_cuMemHostAlloc(void **pp, size_t size, unsigned flags)
{
    static uintptr_t next = 0x600000000000;
    (void)flags;
    if (context_state() != CUDA_SUCCESS)
        return context_state();
    *pp = (void *)next;
    next += (size + 4095) & ~(uintptr_t)4095;
    return CUDA_SUCCESS;
}

static CUresult do_cuMemFreeHost(void *p)
{
    return (uintptr_t)p < 0x600000000000 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

static void act(void (*_Atomic *what)(void))
{
    void (*now)(void) = atomic_exchange(what, NULL);
    if (now)
        now();
}

static CUresult enter(struct fake_entry *e)
{
    atomic_fetch_add(&e->calls, 1);
    act(&e->before);
    CUresult r = e->refuse;
    if (r != CUDA_SUCCESS && e->times && --e->times == 0)
        e->refuse = CUDA_SUCCESS;
    return r;
}

#define FAKE_CALL(name, parameters, arguments)                                                                         \
    static CUresult fake_##name parameters                                                                             \
    {                                                                                                                  \
        CUresult r = enter(&fake.name);                                                                                \
        if (r == CUDA_SUCCESS)                                                                                         \
            r = do_##name arguments;                                                                                   \
        act(&fake.name.after);                                                                                         \
        return r;                                                                                                      \
    }
FAKE_ENTRIES(FAKE_CALL)
#undef FAKE_CALL

void fake_start(char *const *environ_strings)
{
    fake.pages[0] = fake.pages[1] = 64;
    fake.row = 512;
#define FAKE_FILL(name, parameters, arguments) vram_driver_table.name = fake_##name;
    FAKE_ENTRIES(FAKE_FILL)
#undef FAKE_FILL
    vram_driver_ready = true;
    vram_options_read(environ_strings);
    vram_proc_record();
    vram_say_adopt();
    fake_use(&fake_a);
    vram_heap.strangers = true; /* fake_a and the others, which we have not seen made */
}

void fake_only_a(void)
{
    vram_heap.strangers = false;
    vram_life_made(&fake_a, fake_a.device);
}

void fake_end(CUcontext ctx)
{
    pthread_mutex_lock(&lock);
    for (int i = 0; i < ALLOCATIONS; i++)
        if (allocations[i].ctx == ctx)
            allocations[i].addr = 0;
    *ctx = (struct CUctx_st){.device = ctx->device};
    pthread_mutex_unlock(&lock);
}

uint64_t fake_blocks(void)
{
    uint64_t n = 0;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < ALLOCATIONS; i++)
        n += allocations[i].addr != 0;
    pthread_mutex_unlock(&lock);
    return n;
}

uint64_t fake_size_of(CUdeviceptr addr)
{
    pthread_mutex_lock(&lock);
    const struct allocation *a = overlapping(addr, 1);
    uint64_t size = a && a->addr == addr ? a->size : 0;
    pthread_mutex_unlock(&lock);
    return size;
}

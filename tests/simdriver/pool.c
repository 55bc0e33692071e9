#include "pool.h"

#include "capture.h"
#include "context.h"
#include "entry.h"
#include "graphmem.h"
#include "judge.h"
#include "stream.h"
#include "work.h"

#include <stdlib.h>

static CUmemoryPool pools;

/* Blocks that were freed in stream order: their memory stays taken until that point has been reached. */
static struct dying {
    struct sim_block *block;
    uint64_t low, high;
    struct vclock at;
} * dying;
static size_t dying_count, dying_size;

static CUmemoryPool pool_create(int device, bool own)
{
    CUmemoryPool p = sim_xcalloc(sizeof *p);
    p->device = device;
    p->own = own;
    for (int i = 1; i <= 3; i++)
        p->attribute[i] = 1;
    p->next = pools;
    pools = p;
    sim_handle_add(p, HANDLE_POOL);
    return p;
}

static CUmemoryPool default_pool(int device)
{
    struct sim_device *d = &sim.device[device];
    if (!d->default_pool)
        d->default_pool = pool_create(device, false);
    if (!d->pool)
        d->pool = d->default_pool;
    return d->default_pool;
}

/* Gives pages back until no more than `keep` bytes are reserved, at most `want` and none that are in use. */
static size_t release(CUmemoryPool p, uint64_t keep, size_t want)
{
    uint64_t n = p->reserved - p->backed;
    if (p->reserved - n < keep)
        n = p->reserved > keep ? (p->reserved - keep) / SIM_PAGE * SIM_PAGE : 0;
    if (n > want)
        n = want;
    p->reserved -= n;
    sim_memory_give(p->device, n);
    return n;
}

CUresult sim_pool_back(CUmemoryPool p, size_t size)
{
    size_t kept = p->reserved - p->backed, more;
    if (kept > size)
        kept = size;
    more = size - kept;
    if (p->max && more > p->max - p->reserved)
        return CUDA_ERROR_OUT_OF_MEMORY;
    p->backed += kept; /* first: what follows may take from all that is not in use */
    CUresult r = sim_memory_take(p->device, more);
    if (r) {
        p->backed -= kept;
        return r;
    }
    p->backed += more;
    p->reserved += more;
    if (p->backed > p->backed_high)
        p->backed_high = p->backed;
    if (p->reserved > p->reserved_high)
        p->reserved_high = p->reserved;
    return CUDA_SUCCESS;
}

void sim_pool_unback(CUmemoryPool p, size_t size)
{
    p->backed -= size;
    if (p->destroyed)
        release(p, 0, SIZE_MAX);
}

void sim_pool_release(CUmemoryPool p)
{
    release(p, 0, SIZE_MAX);
}

CUmemoryPool sim_pool_of_graphs(int device)
{
    struct sim_device *d = &sim.device[device];
    if (!d->graph_pool) {
        d->graph_pool = pool_create(device, false);
        d->graph_pool->attribute[CU_MEMPOOL_ATTR_RELEASE_THRESHOLD] = UINT64_MAX;
    }
    return d->graph_pool;
}

size_t sim_pool_spare(int device, size_t want)
{
    size_t given = 0;
    want = (want + SIM_PAGE - 1) / SIM_PAGE * SIM_PAGE;
    for (CUmemoryPool p = pools; p && given < want; p = p->next)
        if (p->device == device)
            given += release(p, 0, want - given);
    return given;
}

void sim_pool_synchronised(int device)
{
    sim_pool_reclaim(false);
    for (CUmemoryPool p = pools; p; p = p->next)
        if (p->device == device)
            release(p, p->attribute[CU_MEMPOOL_ATTR_RELEASE_THRESHOLD], SIZE_MAX);
}

static uint64_t used_by(const struct sim_block *b)
{
    return (b->size + SIM_GRANULE - 1) / SIM_GRANULE * SIM_GRANULE;
}

void sim_pool_forget(struct sim_block *block)
{
    if (block->pool)
        block->pool->used -= used_by(block);
}

void sim_pool_reclaim(bool wait)
{
    size_t kept = 0;
    sim_graph_memory_reclaim();
    for (size_t i = 0; wait && i < dying_count; i++) {
        struct vclock at = {0};
        sim_vclock_copy(&at, &dying[i].at); /* the wait gives the lock up: the list may move */
        sim_work_wait(&at);
        sim_vclock_clear(&at);
    }
    for (size_t i = 0; i < dying_count; i++) {
        if (!sim_work_done(&dying[i].at)) {
            dying[kept++] = dying[i];
            continue;
        }
        sim_judge_release(dying[i].low, dying[i].high, true);
        sim_memory_release(dying[i].block);
        sim_vclock_clear(&dying[i].at);
    }
    dying_count = kept;
}

CUresult do_cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice dev)
{
    if (!pool)
        return CUDA_ERROR_INVALID_VALUE;
    if (dev < 0 || dev >= sim.config.devices)
        return CUDA_ERROR_INVALID_DEVICE;
    *pool = default_pool(dev);
    return CUDA_SUCCESS;
}

CUresult do_cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice dev)
{
    CUresult r = do_cuDeviceGetDefaultMemPool(pool, dev);
    if (!r)
        *pool = sim.device[dev].pool;
    return r;
}

CUresult do_cuDeviceSetMemPool(CUdevice dev, CUmemoryPool pool)
{
    if (dev < 0 || dev >= sim.config.devices)
        return CUDA_ERROR_INVALID_DEVICE;
    if (!sim_handle_is(pool, HANDLE_POOL) || pool->device != dev)
        return CUDA_ERROR_INVALID_VALUE;
    default_pool(dev);
    sim.device[dev].pool = pool;
    return CUDA_SUCCESS;
}

CUresult do_cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *props)
{
    if (!pool || !props || props->location.type != CU_MEM_LOCATION_TYPE_DEVICE || props->location.id < 0 ||
        props->location.id >= sim.config.devices)
        return CUDA_ERROR_INVALID_VALUE;
    *pool = pool_create(props->location.id, true);
    (*pool)->max = (props->maxSize + SIM_PAGE - 1) / SIM_PAGE * SIM_PAGE;
    return CUDA_SUCCESS;
}

CUresult do_cuMemPoolDestroy(CUmemoryPool pool)
{
    if (!sim_handle_is(pool, HANDLE_POOL) || !pool->own)
        return CUDA_ERROR_INVALID_VALUE;
    if (sim.device[pool->device].pool == pool)
        sim.device[pool->device].pool = sim.device[pool->device].default_pool;
    sim_handle_remove(pool);
    pool->destroyed = true;
    sim_pool_reclaim(false);
    release(pool, 0, SIZE_MAX); /* the rest as it comes back */
    return CUDA_SUCCESS;
}

CUresult do_cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
    if (!sim_handle_is(pool, HANDLE_POOL))
        return CUDA_ERROR_INVALID_VALUE;
    sim_pool_reclaim(false);
    release(pool, keep, SIZE_MAX);
    return CUDA_SUCCESS;
}

CUresult do_cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
    if (!sim_handle_is(pool, HANDLE_POOL) || !value || attribute < 1 || attribute > 8)
        return CUDA_ERROR_INVALID_VALUE;
    sim_pool_reclaim(false);
    const uint64_t amount[9] = {[CU_MEMPOOL_ATTR_RELEASE_THRESHOLD] =
                                    pool->attribute[CU_MEMPOOL_ATTR_RELEASE_THRESHOLD],
                                [CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT] = pool->reserved,
                                [CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH] = pool->reserved_high,
                                [CU_MEMPOOL_ATTR_USED_MEM_CURRENT] = pool->used,
                                [CU_MEMPOOL_ATTR_USED_MEM_HIGH] = pool->used_high};
    if (attribute <= CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES)
        *(int *)value = (int)pool->attribute[attribute];
    else
        *(uint64_t *)value = amount[attribute];
    return CUDA_SUCCESS;
}

CUresult do_cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
    if (!sim_handle_is(pool, HANDLE_POOL) || !value || attribute < 1 || attribute > 8)
        return CUDA_ERROR_INVALID_VALUE;
    if (attribute <= CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES)
        pool->attribute[attribute] = (uint64_t) * (int *)value;
    else if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
        pool->attribute[attribute] = *(uint64_t *)value;
    else if (*(uint64_t *)value) /* high watermarks can be reset, and that is all (documented) */
        return CUDA_ERROR_INVALID_VALUE;
    else if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)
        pool->reserved_high = pool->reserved;
    else if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH)
        pool->used_high = pool->used;
    else
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

CUresult do_cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *map, size_t count)
{
    return sim_handle_is(pool, HANDLE_POOL) && map && count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult do_cuMemAllocFromPoolAsync(CUdeviceptr *dptr, size_t bytes, CUmemoryPool pool, CUstream handle)
{
    CUstream s = sim_stream_resolve(handle);
    if (!s)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!dptr || !bytes || !sim_handle_is(pool, HANDLE_POOL))
        return CUDA_ERROR_INVALID_VALUE;
    if (s->capture)
        return sim_graph_memory_capture_alloc(s, bytes, (uint64_t *)dptr);
    CUcontext ctx = s->ctx;
    struct sim_block *b;
    sim_pool_reclaim(false);
    CUresult r = sim_memory_alloc_pool(ctx, pool, bytes, &b);
    if (r && dying_count) {
        sim_pool_reclaim(true);
        r = sim_handle_is(pool, HANDLE_POOL) ? sim_memory_alloc_pool(ctx, pool, bytes, &b) : CUDA_ERROR_INVALID_VALUE;
    }
    if (r)
        return r;
    pool->used += used_by(b);
    if (pool->used > pool->used_high)
        pool->used_high = pool->used;
    *dptr = b->address;
    return CUDA_SUCCESS;
}

CUresult do_cuMemAllocAsync(CUdeviceptr *dptr, size_t bytes, CUstream handle)
{
    CUstream s = sim_stream_resolve(handle);
    if (!s)
        return CUDA_ERROR_INVALID_HANDLE;
    default_pool(s->ctx->device);
    return do_cuMemAllocFromPoolAsync(dptr, bytes, sim.device[s->ctx->device].pool, handle);
}

CUresult do_cuMemFreeAsync(CUdeviceptr dptr, CUstream handle)
{
    CUstream s = sim_stream_resolve(handle);
    if (!s)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!dptr)
        return CUDA_SUCCESS;
    struct sim_block *b = sim_memory_find(dptr);
    if (!b || b->address != dptr || (b->kind != MEMORY_POOL && b->kind != MEMORY_DEVICE && b->kind != MEMORY_GRAPH))
        return CUDA_ERROR_INVALID_VALUE;
    /* A capture takes graph memory alone (documented). Outside, plain memory is taken too (measured), but not beside a
     * capture that forbids frees. */
    CUresult r = CUDA_SUCCESS;
    if (s->capture)
        return sim_graph_memory_capture_free(s, b);
    if (b->kind == MEMORY_GRAPH)
        return sim_graph_memory_free_async(b, s);
    if (b->kind == MEMORY_DEVICE && (r = sim_capture_check_unsafe()) != CUDA_SUCCESS)
        return r;
    uint64_t high = b->address + b->size;
    /* The free writes the whole block, as far as order goes: what is not before it on its stream races with it. */
    r = sim_work_enqueue(s, &(struct sim_op){.kind = OP_MARK,
                                             .what = "cuMemFreeAsync",
                                             .dst = dptr,
                                             .bytes = b->size,
                                             .rows = 1,
                                             .dst_judged = true,
                                             .frees = true});
    if (r)
        return r;
    sim_pool_forget(b);
    sim_memory_hide(b);
    if (dying_count == dying_size)
        dying = sim_xrealloc(dying, (dying_size = dying_size ? dying_size * 2 : 16) * sizeof *dying);
    dying[dying_count] = (struct dying){.block = b, .low = dptr, .high = high};
    sim_vclock_copy(&dying[dying_count++].at, &s->base);
    return CUDA_SUCCESS;
}

#include "heap/pools.h"

#include "base/compiler.h"
#include "base/futex.h"
#include "base/lock.h"
#include "base/meta.h"
#include "driver/capture.h"
#include "driver/driver.h"
#include "heap/fence.h"
#include "heap/heap.h"
#include "heap/life.h"

static struct vram_pool *find(CUmemoryPool handle)
{
    struct vram_pool *p;
    HASH_FIND(hh, vram_heap.pools, &handle, sizeof(handle), p);
    return p;
}

void vram_pool_made(CUmemoryPool handle, int device)
{
    vram_lock(VRAM_RANK_HEAP);
    struct vram_pool *p = find(handle);
    if (p) { /* the one that had the handle has ended: unseen, or its end has not come back yet */
        p->device = device;
        p->closing = false;
    } else if ((p = vram_meta_alloc(sizeof(*p))) != NULL) {
        *p = (struct vram_pool){.handle = handle, .device = device};
        HASH_ADD(hh, vram_heap.pools, handle, sizeof(handle), p);
        if (!p->hh.tbl)
            vram_meta_free(p, sizeof(*p)); /* then it is not trimmed */
    }
    vram_unlock(VRAM_RANK_HEAP);
}

void vram_pool_end_begin(CUmemoryPool handle)
{
    vram_lock(VRAM_RANK_HEAP);
    struct vram_pool *p = find(handle);
    if (p)
        p->closing = true;
    vram_unlock(VRAM_RANK_HEAP);
    for (unsigned n; p && (n = atomic_load(&p->busy)) != 0;)
        vram_futex_wait(&p->busy, n, VRAM_FOR_EVER);
}

void vram_pool_end(CUmemoryPool handle, bool gone)
{
    vram_lock(VRAM_RANK_HEAP);
    struct vram_pool *p = find(handle);
    if (p && gone && p->closing) { /* else the handle is another pool's by now */
        HASH_DELETE(hh, vram_heap.pools, p);
        vram_meta_free(p, sizeof(*p));
    } else if (p && !gone) {
        p->closing = false;
    }
    vram_unlock(VRAM_RANK_HEAP);
}

int vram_pool_device(CUmemoryPool handle)
{
    vram_lock(VRAM_RANK_HEAP);
    const struct vram_pool *p = find(handle);
    int device = p ? p->device : -1;
    vram_unlock(VRAM_RANK_HEAP);
    return device;
}

/* What a pool holds beyond what is in use. Inside the gate. */
static uint64_t idle_in(CUmemoryPool pool)
{
    uint64_t reserved = 0, in_use = 0;
    const struct vram_driver *drv = vram_driver();
    if (!drv->cuMemPoolGetAttribute ||
        VRAM_DRV(cuMemPoolGetAttribute)(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved) != CUDA_SUCCESS ||
        VRAM_DRV(cuMemPoolGetAttribute)(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &in_use) != CUDA_SUCCESS)
        return 0;
    return reserved > in_use ? reserved - in_use : 0;
}

static uint64_t idle_in_graphs(CUdevice device)
{
    uint64_t reserved = 0, in_use = 0;
    const struct vram_driver *drv = vram_driver();
    if (!drv->cuDeviceGetGraphMemAttribute ||
        VRAM_DRV(cuDeviceGetGraphMemAttribute)(device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &reserved) !=
            CUDA_SUCCESS ||
        VRAM_DRV(cuDeviceGetGraphMemAttribute)(device, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT, &in_use) != CUDA_SUCCESS)
        return 0;
    return reserved > in_use ? reserved - in_use : 0;
}

/* One of two things to do with each pool; both answer in bytes. Inside the gate. */
struct visit {
    uint64_t (*pool)(CUmemoryPool pool);
    uint64_t (*graphs)(CUdevice device);
};

static uint64_t trim(CUmemoryPool pool)
{
    uint64_t before = idle_in(pool), after;
    if (!before || !vram_driver()->cuMemPoolTrimTo || VRAM_DRV(cuMemPoolTrimTo)(pool, 0) != CUDA_SUCCESS)
        return 0;
    after = idle_in(pool);
    return before > after ? before - after : 0;
}

static uint64_t trim_graphs(CUdevice device)
{
    uint64_t before = idle_in_graphs(device), after;
    if (!before || !vram_driver()->cuDeviceGraphMemTrim || VRAM_DRV(cuDeviceGraphMemTrim)(device) != CUDA_SUCCESS)
        return 0;
    after = idle_in_graphs(device);
    return before > after ? before - after : 0;
}

static void pin(struct vram_pool *p) { atomic_fetch_add(&p->busy, 1); }

static void unpin(struct vram_pool *p)
{
    atomic_uint *busy = &p->busy; /* the pool may be gone as soon as this is 0 */
    if (atomic_fetch_sub(busy, 1) == 1)
        vram_futex_wake(busy);
}

/* The next of the program's own pools that this round has not seen, pinned. */
static struct vram_pool *next_pool(int device, uint64_t round)
{
    struct vram_pool *p;
    vram_lock(VRAM_RANK_HEAP);
    for (p = vram_heap.pools; p; p = p->hh.next)
        if (!p->closing && p->visited != round && (device == VRAM_EVERY_DEVICE || p->device == device))
            break;
    if (p) {
        p->visited = round;
        pin(p);
    }
    vram_unlock(VRAM_RANK_HEAP);
    return p;
}

static uint64_t on_device(CUdevice device, const struct visit *visit)
{
    CUmemoryPool pool;
    uint64_t bytes = visit->graphs(device);
    if (vram_driver()->cuDeviceGetDefaultMemPool && VRAM_DRV(cuDeviceGetDefaultMemPool)(&pool, device) == CUDA_SUCCESS)
        bytes += visit->pool(pool);
    return bytes;
}

static uint64_t each(int device, const struct visit *visit, bool *ret_capture)
{
    uint64_t bytes = 0;
    bool kept_out = false;
    vram_lock(VRAM_RANK_HEAP);
    uint64_t round = ++vram_heap.walks;
    vram_unlock(VRAM_RANK_HEAP);
    for (int d = 0; d < VRAM_DEVICES_MAX; d++) {
        if (device != VRAM_EVERY_DEVICE && d != device)
            continue;
        vram_lock(VRAM_RANK_HEAP);
        bool pools = vram_heap.devices[d].figures[VRAM_ASYNC].total_count || vram_heap.devices[d].graph_memory;
        vram_unlock(VRAM_RANK_HEAP);
        if (!pools)
            continue;
        if (!vram_gate_enter()) {
            kept_out = true;
            continue;
        }
        if (!vram_heap_is_exiting())
            bytes += on_device(d, visit);
        vram_gate_leave();
    }
    for (struct vram_pool *p; (p = next_pool(device, round)) != NULL; unpin(p)) {
        if (!vram_gate_enter()) {
            kept_out = true;
            continue;
        }
        if (!vram_heap_is_exiting())
            bytes += visit->pool(p->handle);
        vram_gate_leave();
    }
    if (ret_capture)
        *ret_capture |= kept_out;
    return bytes;
}

uint64_t vram_pools_idle(int device)
{
    return each(device, &(struct visit){idle_in, idle_in_graphs}, NULL);
}

uint64_t vram_pools_trim(int device, bool *ret_capture)
{
    return each(device, &(struct visit){trim, trim_graphs}, ret_capture);
}

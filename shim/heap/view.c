#include "heap/view.h"

#include "base/compiler.h"
#include "base/lock.h"
#include "driver/capture.h"
#include "driver/driver.h"
#include "heap/heap.h"
#include "heap/life.h"
#include "heap/pools.h"

static void part(struct vram_device_view *v, const char *words, uint64_t bytes)
{
    unsigned at = v->count;
    if (!bytes || at == VRAM_VIEW_PARTS)
        return;
    for (; at > 0 && v->parts[at - 1].bytes < bytes; at--)
        v->parts[at] = v->parts[at - 1];
    v->parts[at].words = words;
    v->parts[at].bytes = bytes;
    v->count++;
    v->named += bytes;
}

/* What we know by ourselves, and by the driver's pools. */
static void name_all(int device, struct vram_device_view *v)
{
    uint64_t idle = vram_pools_idle(device);
    vram_lock(VRAM_RANK_HEAP);
    const struct vram_account *books = vram_books(device);
    part(v, "in blocks", (books->held_pages - books->cached_pages) << VRAM_PAGE_SHIFT);
    part(v, "kept by the shim",
         ((books->cached_pages + books->returning_pages) << VRAM_PAGE_SHIFT) + books->virtual_kept);
    part(v, "stream-ordered", books->figures[VRAM_ASYNC].bytes);
    part(v, "virtual", books->figures[VRAM_VIRTUAL].bytes);
    part(v, "in arrays", books->figures[VRAM_ARRAY].bytes);
    part(v, "idle in the driver's pools", idle);
    /* Of that as much as can be there still. */
    uint64_t rest = v->used > v->named ? v->used - v->named : 0;
    part(v, "before the first allocation (contexts, other programs)",
         books->in_use_before < rest ? books->in_use_before : rest);
    v->managed = books->figures[VRAM_MANAGED].bytes;
    vram_unlock(VRAM_RANK_HEAP);
}

/* The driver's own word, in the current context. */
static bool ask(struct vram_device_view *v)
{
    size_t unused, total;
    if (!vram_driver()->cuMemGetInfo_v2 || !vram_gate_enter())
        return false;
    bool told = !vram_heap_is_exiting() && VRAM_DRV(cuMemGetInfo_v2)(&unused, &total) == CUDA_SUCCESS;
    vram_gate_leave();
    if (told) {
        v->total = total;
        v->used = total - unused;
    }
    return told;
}

/* A context of the device that we may use for a moment. Pinned; NULL: there is none. */
static struct vram_life *borrow(int device)
{
    struct vram_life *life;
    vram_lock(VRAM_RANK_HEAP);
    for (life = vram_heap.lives; life; life = life->hh.next)
        if (life->device == device && !life->closing)
            break;
    if (life)
        vram_life_pin(life);
    vram_unlock(VRAM_RANK_HEAP);
    return life;
}

bool vram_view(int device, struct vram_device_view *ret_view)
{
    CUcontext before;
    struct vram_life *life = borrow(device);
    if (!life)
        return false;
    *ret_view = (struct vram_device_view){0};
    bool told = false;
    if (vram_gate_enter()) {
        if (vram_life_enter(life->ctx, &before) == CUDA_SUCCESS) {
            told = ask(ret_view);
            vram_life_leave(life->ctx, before);
        }
        vram_gate_leave();
    }
    vram_life_unpin(life);
    if (told)
        name_all(device, ret_view);
    return told;
}

void vram_view_first(int device)
{
    struct vram_account *books = vram_books(device);
    if (vram_likely(__atomic_load_n(&books->looked, __ATOMIC_RELAXED)) ||
        __atomic_exchange_n(&books->looked, true, __ATOMIC_RELAXED))
        return;
    struct vram_device_view v = {0};
    CUdevice here;
    if (!vram_driver()->cuCtxGetDevice || VRAM_DRV(cuCtxGetDevice)(&here) != CUDA_SUCCESS || here != device || !ask(&v))
        return;
    name_all(device, &v);
    vram_lock(VRAM_RANK_HEAP);
    books->total = v.total;
    books->in_use_before = v.used > v.named ? v.used - v.named : 0;
    vram_unlock(VRAM_RANK_HEAP);
}

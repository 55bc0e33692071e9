#include "heap/fence.h"

#include <stdatomic.h>

#include "base/check.h"
#include "base/compiler.h"
#include "base/lock.h"
#include "base/say.h"
#include "driver/capture.h"
#include "driver/driver.h"
#include "heap/life.h"

enum { LIVES_AT_ONCE = 32, DISABLE_TIMING = 2 };

static CUresult make_event(struct vram_life *life, CUevent *ret_event)
{
    CUcontext before;
    CUresult r = vram_life_enter(life->ctx, &before);
    if (r != CUDA_SUCCESS)
        return r;
    r = VRAM_DRV(cuEventCreate)(ret_event, DISABLE_TIMING);
    vram_life_leave(life->ctx, before);
    return r;
}

static bool have_entries(void)
{
    const struct vram_driver *drv = vram_driver();
    return drv->cuCtxRecordEvent && drv->cuCtxWaitEvent && drv->cuEventCreate && drv->cuEventQuery;
}

/* A first fence, of which only the answer counts. Any answer but "no such thing" may be another one next time. */
static enum vram_fence_events try_events(struct vram_life *life)
{
    static atomic_bool told;
    enum vram_fence_events found = VRAM_EVENTS_UNTRIED;
    CUresult r = have_entries() ? vram_fence_record(life, 0) : CUDA_ERROR_NOT_SUPPORTED;
    if (r == CUDA_SUCCESS)
        found = VRAM_EVENTS_WORK;
    if (r == CUDA_ERROR_NOT_SUPPORTED)
        found = VRAM_EVENTS_LACKING;
    __atomic_store_n(&life->fences.events, found, __ATOMIC_RELEASE);
    if (found == VRAM_EVENTS_LACKING && !atomic_exchange(&told, true))
        vram_say("this driver has no context events (CUDA 12.5 brought them): VRAMSHIM_FREE=%s works as sync",
                 vram_options->free_mode == VRAM_FREE_FENCED ? "fenced" : "ordered");
    return found;
}

enum vram_free_mode vram_fence_mode(struct vram_life *life)
{
    if (vram_options->free_mode == VRAM_FREE_SYNC || __atomic_load_n(&life->peer_count, __ATOMIC_ACQUIRE))
        return VRAM_FREE_SYNC;
    enum vram_fence_events events = __atomic_load_n(&life->fences.events, __ATOMIC_ACQUIRE);
    if (vram_unlikely(events == VRAM_EVENTS_UNTRIED))
        events = try_events(life);
    return events == VRAM_EVENTS_WORK ? vram_options->free_mode : VRAM_FREE_SYNC;
}

bool vram_fence_is_free_of_waits(const struct vram_life *life)
{
    return vram_options->free_mode != VRAM_FREE_SYNC && !__atomic_load_n(&life->peer_count, __ATOMIC_ACQUIRE) &&
           __atomic_load_n(&life->fences.events, __ATOMIC_ACQUIRE) == VRAM_EVENTS_WORK;
}

static bool by_size(void) { return vram_options->free_mode == VRAM_FREE_ORDERED; }

void vram_fence_add(struct vram_block *block)
{
    struct vram_fences *f = &block->life->fences;
    VRAM_CHECK(block->state == VRAM_FREEING);
    block->state = VRAM_PENDING;
    block->fence = f->open;
    block->pending_next = NULL;
    block->pending_prev = f->newest;
    if (f->newest)
        f->newest->pending_next = block;
    else
        f->oldest = block;
    f->newest = block;
    f->pending++;
    f->frees++;
    if (by_size())
        vram_cache_put(&f->by_size, block);
}

static void unlist(struct vram_block *block)
{
    struct vram_fences *f = &block->life->fences;
    VRAM_CHECK(block->state == VRAM_PENDING);
    if (block->pending_prev)
        block->pending_prev->pending_next = block->pending_next;
    else
        f->oldest = block->pending_next;
    if (block->pending_next)
        block->pending_next->pending_prev = block->pending_prev;
    else
        f->newest = block->pending_prev;
    block->pending_prev = block->pending_next = NULL;
    f->pending--;
}

void vram_fence_drop(struct vram_block *block)
{
    unlist(block);
    if (by_size())
        vram_cache_remove(&block->life->fences.by_size, block);
}

/* Fences up to `number` are complete. Under HEAP. */
static void complete(struct vram_life *life, uint64_t number)
{
    struct vram_fences *f = &life->fences;
    VRAM_CHECK(number < f->open);
    if (number <= f->done)
        return;
    f->done = number;
    for (unsigned i = 0; i < VRAM_FENCES; i++)
        if (f->fences[i].recorded && f->fences[i].number <= number)
            f->fences[i] = (struct vram_fence){.event = f->fences[i].event};
    while (f->oldest && f->oldest->fence <= number) {
        struct vram_block *b = f->oldest;
        vram_fence_drop(b);
        b->state = VRAM_CACHED;
        vram_cache_put(&life->cache, b);
    }
}

/* From now on frees wait for a later fence than the one that is about to be made. Under HEAP. */
static uint64_t close_open(struct vram_fences *f, unsigned *ret_frees)
{
    *ret_frees = f->frees;
    f->frees = 0;
    return f->open++;
}

/* One that is not in use; else the newest, whose blocks then wait a little longer. NULL: all are being recorded. */
static struct vram_fence *usable_fence(struct vram_fences *f)
{
    struct vram_fence *newest = NULL;
    for (unsigned i = 0; i < VRAM_FENCES; i++) {
        if (f->fences[i].number == 0)
            return &f->fences[i];
        if (f->fences[i].recorded && (!newest || f->fences[i].number > newest->number))
            newest = &f->fences[i];
    }
    return newest;
}

CUresult vram_fence_record(struct vram_life *life, unsigned at_least)
{
    struct vram_fences *f = &life->fences;
    unsigned frees;
    vram_lock(VRAM_RANK_HEAP);
    struct vram_fence *mine = f->frees >= at_least ? usable_fence(f) : NULL;
    if (!mine) {
        vram_unlock(VRAM_RANK_HEAP);
        return CUDA_SUCCESS;
    }
    mine->number = close_open(f, &frees);
    mine->recorded = false;
    CUevent event = mine->event;
    vram_unlock(VRAM_RANK_HEAP);

    CUresult r = event ? CUDA_SUCCESS : make_event(life, &event);
    if (r == CUDA_SUCCESS)
        r = VRAM_DRV(cuCtxRecordEvent)(life->ctx, event);

    vram_lock(VRAM_RANK_HEAP);
    mine->event = event;
    mine->recorded = r == CUDA_SUCCESS && mine->number > f->done;
    if (!mine->recorded)
        mine->number = 0;
    if (r != CUDA_SUCCESS)
        f->frees += frees; /* the next fence covers them as well */
    vram_unlock(VRAM_RANK_HEAP);
    return r;
}

bool vram_fence_awaits_company(struct vram_life *life, uint64_t size)
{
    enum { SMALL = 64 << 10 }; /* so many of them are less than a page of the card's memory */
    const struct vram_fences *f = &life->fences;
    if (size > SMALL)
        return false;
    vram_lock(VRAM_RANK_HEAP);
    bool few = f->pending < 2 * VRAM_FENCE_EVERY && f->frees < VRAM_FENCE_EVERY;
    vram_unlock(VRAM_RANK_HEAP);
    return few;
}

void vram_fence_poll(struct vram_life *life)
{
    struct vram_fences *f = &life->fences;
    struct vram_fence known[VRAM_FENCES];
    unsigned n = 0;

    vram_lock(VRAM_RANK_HEAP);
    bool look = !f->polling && f->oldest;
    for (unsigned i = 0; look && i < VRAM_FENCES; i++) {
        if (!f->fences[i].recorded)
            continue;
        unsigned at = n++;
        for (; at > 0 && known[at - 1].number > f->fences[i].number; at--)
            known[at] = known[at - 1];
        known[at] = f->fences[i];
    }
    look = n > 0;
    f->polling |= look;
    vram_unlock(VRAM_RANK_HEAP);
    if (!look)
        return;

    /* An event that is recorded again meanwhile speaks of a later fence: then "done" is true of this one as well. */
    uint64_t done = 0;
    for (unsigned i = 0; i < n && VRAM_DRV(cuEventQuery)(known[i].event) == CUDA_SUCCESS; i++)
        done = known[i].number;

    vram_lock(VRAM_RANK_HEAP);
    complete(life, done);
    f->polling = false;
    vram_unlock(VRAM_RANK_HEAP);
}

CUresult vram_fence_settle(struct vram_life *life)
{
    unsigned frees;
    vram_lock(VRAM_RANK_HEAP);
    uint64_t number = close_open(&life->fences, &frees);
    vram_unlock(VRAM_RANK_HEAP);

    CUresult r = vram_life_synchronise(life);

    vram_lock(VRAM_RANK_HEAP);
    if (r == CUDA_SUCCESS)
        complete(life, number);
    else
        life->fences.frees += frees;
    vram_unlock(VRAM_RANK_HEAP);
    return r;
}

void vram_fence_settle_device(int device)
{
    struct vram_life *life, *next, *found[LIVES_AT_ONCE];
    unsigned n = 0;
    if (vram_options->free_mode == VRAM_FREE_SYNC)
        return;
    vram_lock(VRAM_RANK_HEAP);
    HASH_ITER(hh, vram_heap.lives, life, next)
    {
        if (n == LIVES_AT_ONCE || life->closing || !life->fences.oldest || (device >= 0 && life->device != device))
            continue;
        vram_life_pin(life);
        found[n++] = life;
    }
    vram_unlock(VRAM_RANK_HEAP);
    for (unsigned i = 0; i < n; i++) {
        if (vram_gate_enter()) {
            vram_fence_settle(found[i]);
            vram_gate_leave();
        }
        vram_life_unpin(found[i]);
    }
}

/* The first fence at or after `number` whose event can be waited for; NULL: none. Under HEAP. */
static const struct vram_fence *covering(const struct vram_fences *f, uint64_t number)
{
    const struct vram_fence *first = NULL;
    for (unsigned i = 0; i < VRAM_FENCES; i++)
        if (f->fences[i].recorded && f->fences[i].number >= number && (!first || f->fences[i].number < first->number))
            first = &f->fences[i];
    return first;
}

bool vram_fence_await(struct vram_life *life, uint64_t size, uint32_t waste)
{
    struct vram_fences *f = &life->fences;
    if (!vram_driver()->cuEventSynchronize)
        return false;
    vram_lock(VRAM_RANK_HEAP);
    const struct vram_block *b = f->oldest;
    while (b && !vram_cache_fits(b->capacity, size, waste))
        b = b->pending_next;
    const uint64_t wanted = b ? b->fence : 0;
    if (b && !covering(f, wanted)) {
        vram_unlock(VRAM_RANK_HEAP);
        vram_fence_record(life, 0);
        vram_lock(VRAM_RANK_HEAP);
    }
    const struct vram_fence *fence = wanted ? covering(f, wanted) : NULL;
    CUevent event = fence ? fence->event : NULL;
    const uint64_t number = fence ? fence->number : 0, done = f->done;
    vram_unlock(VRAM_RANK_HEAP);
    if (!event)
        return wanted && done >= wanted; /* another thread has seen it complete meanwhile */

    /* Recorded again before we wait, the event is that of a later fence, which covers this one. */
    if (VRAM_DRV(cuEventSynchronize)(event) != CUDA_SUCCESS)
        return false;
    vram_lock(VRAM_RANK_HEAP);
    complete(life, number);
    vram_unlock(VRAM_RANK_HEAP);
    return true;
}

struct vram_block *vram_fence_take(struct vram_life *life, uint64_t size, uint32_t waste)
{
    struct vram_fences *f = &life->fences;
    if (!by_size())
        return NULL;
    vram_lock(VRAM_RANK_HEAP);
    /* Another context could reach the block by a copy between contexts, which is not behind the fence. */
    bool alone = life->peer_count == 0 && HASH_COUNT(vram_heap.lives) == 1;
    struct vram_block *b = alone ? vram_cache_take(&f->by_size, size, waste) : NULL;
    if (b) {
        unlist(b);
        b->state = VRAM_FREEING;
    }
    if (!b || b->fence <= f->ordered) {
        vram_unlock(VRAM_RANK_HEAP);
        return b;
    }
    if (!covering(f, b->fence)) {
        vram_unlock(VRAM_RANK_HEAP);
        vram_fence_record(life, 0);
        vram_lock(VRAM_RANK_HEAP);
    }
    const struct vram_fence *fence = covering(f, b->fence);
    CUevent event = fence ? fence->event : NULL;
    uint64_t number = fence ? fence->number : 0;
    vram_unlock(VRAM_RANK_HEAP);

    /* Recorded again before we wait, the event is that of a later fence, which covers this one. */
    CUresult r = event ? VRAM_DRV(cuCtxWaitEvent)(life->ctx, event) : CUDA_ERROR_NOT_READY;

    vram_lock(VRAM_RANK_HEAP);
    if (r == CUDA_SUCCESS) {
        if (f->ordered < number)
            f->ordered = number;
    } else {
        vram_fence_add(b);
        b = NULL;
    }
    vram_unlock(VRAM_RANK_HEAP);
    return b;
}

bool vram_fence_is_behind(const struct vram_block *block) { return block->fence > block->life->fences.done; }

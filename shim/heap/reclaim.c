#include "heap/reclaim.h"

#include <stdatomic.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/futex.h"
#include "base/lock.h"
#include "base/meta.h"
#include "base/say.h"
#include "base/text.h"
#include "config/options.h"
#include "driver/capture.h"
#include "driver/driver.h"
#include "heap/fence.h"
#include "heap/heap.h"
#include "heap/life.h"
#include "heap/pools.h"
#include "heap/virtual.h"

enum { HOLD_NS = 20000000, RESCUE_NS = 1000000000 };

struct vram_traffic vram_traffic(int device)
{
    const struct vram_account *books = vram_books(device);
    return (struct vram_traffic){books->returned + books->returning_blocks, books->returned};
}

static unsigned arrivals(void) { return atomic_load(&vram_heap.arrivals); }

static void tell_arrival(void)
{
    atomic_fetch_add(&vram_heap.arrivals, 1);
    vram_futex_wake(&vram_heap.arrivals);
}

struct vram_traffic vram_reclaim_await(int device, uint64_t max_ns)
{
    uint64_t end = vram_now() + max_ns, now;
    vram_lock(VRAM_RANK_HEAP);
    struct vram_traffic t = vram_traffic(device);
    uint64_t until = t.departed;
    while (t.arrived < until && (now = vram_now()) < end) {
        unsigned seen = arrivals();
        vram_unlock(VRAM_RANK_HEAP);
        vram_futex_wait(&vram_heap.arrivals, seen, end - now);
        vram_lock(VRAM_RANK_HEAP);
        t = vram_traffic(device);
    }
    vram_unlock(VRAM_RANK_HEAP);
    return t;
}

void vram_reclaim_hold(void) { atomic_fetch_add(&vram_heap.askers, 1); }

void vram_reclaim_release(void)
{
    if (atomic_fetch_sub(&vram_heap.askers, 1) == 1)
        vram_futex_wake(&vram_heap.askers);
}

static void wait_for_askers(void)
{
    uint64_t now, end = 0;
    for (unsigned n; (n = atomic_load(&vram_heap.askers)) && ((now = vram_now()) < end || !end);) {
        if (!end)
            end = now + HOLD_NS;
        vram_futex_wait(&vram_heap.askers, n, end - now);
    }
}

/* A walk over what is cached on a device. A life that refused one block is passed over from then on: what one block of a
 * context meets, all will, be it a sticky error or a driver on its way out. */
struct walk {
    int device;
    uint64_t freed_before;  /* 0: victims as vram_cache_victim has them; else the longest kept first, of those freed before */
    bool idle;              /* only from contexts that have nothing to do */
    uint64_t bytes, blocks; /* still wanted */
    uint64_t number;        /* of the walk; of which life->refused is the last that it refused */
    struct vram_reclaimed *total;
};

/* The life whose cache is to give the next block. */
static struct vram_life *next_to_give(const struct walk *walk)
{
    struct vram_life *life, *next, *best = NULL;
    uint64_t oldest = UINT64_MAX;
    HASH_ITER(hh, vram_heap.lives, life, next)
    {
        if (life->refused == walk->number || life->closing || (walk->device != VRAM_EVERY_DEVICE && life->device != walk->device))
            continue;
        if (walk->freed_before) {
            const struct vram_block *b = vram_cache_oldest(&life->cache, walk->freed_before);
            if (b && b->freed.time < oldest) {
                oldest = b->freed.time;
                best = life;
            }
        } else if (life->cache.bytes > (best ? best->cache.bytes : 0)) {
            best = life;
        }
    }
    return best;
}

static struct vram_block *take_victim(const struct walk *walk, struct vram_cache *cache)
{
    if (!walk->freed_before)
        return vram_cache_victim(cache, walk->bytes);
    struct vram_block *b = vram_cache_oldest(cache, walk->freed_before);
    vram_cache_remove(cache, b);
    return b;
}

/* Takes one victim out of some cache of the device, out of the ledger too (law 16: before the driver gets it), and pins its
 * life. NULL: none is left. It is on its way until arrive(). */
static struct vram_block *depart(const struct walk *walk, uint64_t *ret_pages)
{
    struct vram_block *b = NULL;
    vram_lock(VRAM_RANK_HEAP);
    struct vram_life *best = next_to_give(walk);
    if (best) {
        struct vram_account *books = vram_books(best->device);
        *ret_pages = books->cached_pages;
        b = take_victim(walk, &best->cache);
        vram_block_withdraw(b);
        *ret_pages -= books->cached_pages;
        books->returning_pages += *ret_pages;
        books->returning_blocks++;
        b->pending_prev = NULL;
        if ((b->pending_next = vram_heap.departed))
            b->pending_next->pending_prev = b;
        vram_heap.departed = b;
        vram_life_pin(best);
    }
    vram_unlock(VRAM_RANK_HEAP);
    return b;
}

struct vram_block *vram_reclaim_find(uint64_t addr)
{
    struct vram_block *b = vram_heap.departed;
    while (b && b->addr != addr)
        b = b->pending_next;
    return b && !vram_holding_find(&vram_heap.holdings, (struct vram_key){VRAM_AT_ADDRESS, addr}) ? b : NULL;
}

/* The driver has what depart() took out, or refused it: then it is cached again. */
static void arrive(const struct walk *walk, struct vram_block *b, uint64_t pages, CUresult r)
{
    vram_lock(VRAM_RANK_HEAP);
    struct vram_account *books = vram_books(b->life->device);
    books->returning_pages -= pages;
    books->returning_blocks--;
    books->returned++;
    if (b->pending_prev)
        b->pending_prev->pending_next = b->pending_next;
    else
        vram_heap.departed = b->pending_next;
    if (b->pending_next)
        b->pending_next->pending_prev = b->pending_prev;
    bool kept = false;
    if (r == CUDA_SUCCESS) {
        books->driver_frees++;
        if (walk->freed_before) {
            struct vram_amount *why = walk->idle ? &books->decayed : &books->evicted;
            why->blocks++;
            why->bytes += b->capacity;
        }
    } else {
        b->state = VRAM_LIVE; /* enters as every block does; not if the driver does not know it: somebody else freed it */
        kept = r != CUDA_ERROR_INVALID_VALUE && !vram_ledger_find(&vram_heap.ledger, b->addr) && vram_block_enter(b);
        if (kept) {
            b->state = VRAM_CACHED;
            vram_account_cached(books, b);
            vram_cache_put(&b->life->cache, b);
        }
        books->ended_all += !kept;
    }
    vram_unlock(VRAM_RANK_HEAP);
    if (!kept)
        vram_meta_free(b, sizeof(*b));
    tell_arrival();
}

/* The driver's free, in the block's own context (law 22). */
static CUresult free_in_its_context(const struct vram_block *b)
{
    CUcontext before;
    CUresult r = vram_life_enter(b->life->ctx, &before);
    if (r != CUDA_SUCCESS)
        return r;
    r = VRAM_DRV(cuMemFree_v2)(b->addr);
    vram_life_leave(b->life->ctx, before);
    return r;
}

/* Whether the context from which the next block would come has nothing to do, as far as can be said; else it is passed over.
 * True if there is none. In the gate. */
static bool is_idle(const struct walk *walk)
{
    enum { AT_ONCE_NS = 200000 };
    vram_lock(VRAM_RANK_HEAP);
    struct vram_life *life = next_to_give(walk);
    if (life)
        vram_life_pin(life);
    vram_unlock(VRAM_RANK_HEAP);
    if (!life)
        return true;
    uint64_t start = vram_now();
    bool idle = vram_life_synchronise(life) == CUDA_SUCCESS && vram_now() - start < AT_ONCE_NS;
    vram_lock(VRAM_RANK_HEAP);
    if (!idle)
        life->refused = walk->number;
    vram_life_unpin(life);
    vram_unlock(VRAM_RANK_HEAP);
    return idle;
}

/* One step of a walk; false: it is at its end. */
static bool give_one_back(struct walk *walk)
{
    wait_for_askers();
    /* In the gate before a block leaves the ledger: once a capture has begun, nothing moves. */
    if (!vram_gate_enter()) {
        walk->total->capture = true;
        return false;
    }
    if (walk->idle && !vram_heap_is_exiting() && !is_idle(walk)) {
        vram_gate_leave();
        return true;
    }
    uint64_t pages;
    /* On the way out no driver call is ours any more (law 27); asked inside the gate, which exit drains. */
    struct vram_block *b = vram_heap_is_exiting() ? NULL : depart(walk, &pages);
    if (!b) {
        vram_gate_leave();
        return false;
    }
    struct vram_life *life = b->life;
    uint64_t capacity = b->capacity, footprint = vram_footprint(capacity);
    CUresult r = free_in_its_context(b);
    vram_gate_leave();
    arrive(walk, b, pages, r);
    if (r == CUDA_SUCCESS) {
        walk->bytes -= footprint < walk->bytes ? footprint : walk->bytes;
        walk->blocks--;
        walk->total->blocks++;
        walk->total->bytes += capacity;
    } else {
        walk->total->refused = r;
        vram_lock(VRAM_RANK_HEAP);
        life->refused = walk->number;
        vram_unlock(VRAM_RANK_HEAP);
    }
    vram_life_unpin(life);
    return true;
}

static void go(struct walk walk)
{
    vram_lock(VRAM_RANK_HEAP);
    walk.number = ++vram_heap.walks;
    vram_unlock(VRAM_RANK_HEAP);
    while (walk.bytes && walk.blocks && give_one_back(&walk))
        ;
}

static void reclaim(int device, uint64_t bytes, uint64_t blocks, struct vram_reclaimed *total)
{
    go((struct walk){.device = device, .bytes = bytes, .blocks = blocks, .total = total});
}

bool vram_reclaim_is_beyond_slack(size_t size, int device)
{
    uint64_t allowed;
    return vram_options->slack != VRAM_SLACK_UNLIMITED &&
           vram_account_excess(vram_books(device), size, vram_options->slack, &allowed);
}

void vram_reclaim_within_slack(size_t size, int device)
{
    enum { BATCH = 32 }; /* of what is allowed, one part is given back at once */
    struct vram_reclaimed total = {0};
    uint64_t allowed;
    vram_fence_settle_device(device); /* the driver's free waits for all work in any case */
    vram_lock(VRAM_RANK_HEAP);
    uint64_t excess = vram_account_excess(vram_books(device), size, vram_options->slack, &allowed);
    vram_unlock(VRAM_RANK_HEAP);
    if (!excess)
        return;
    uint64_t bytes = excess > allowed / BATCH ? excess : allowed / BATCH;
    go((struct walk){.device = device, .freed_before = UINT64_MAX, .bytes = bytes, .blocks = UINT64_MAX, .total = &total});
}

/* Blocks kept on every device, and their bytes. */
static void count_kept(uint64_t *ret_blocks, uint64_t *ret_bytes)
{
    *ret_blocks = *ret_bytes = 0;
    vram_lock(VRAM_RANK_HEAP);
    for (int d = 0; d < VRAM_DEVICES_MAX; d++) {
        *ret_blocks += vram_heap.devices[d].cached_blocks;
        *ret_bytes += vram_heap.devices[d].cached_bytes;
    }
    vram_unlock(VRAM_RANK_HEAP);
}

struct vram_reclaimed vram_reclaim_decayed(uint64_t time)
{
    struct vram_reclaimed total = {0};
    vram_fence_settle_device(VRAM_EVERY_DEVICE); /* makes this thread wait and no other (measured) */
    go((struct walk){.device = VRAM_EVERY_DEVICE, .freed_before = time, .idle = true, .bytes = UINT64_MAX, .blocks = UINT64_MAX,
                     .total = &total});
    return total;
}

struct vram_reclaimed vram_reclaim_all(void)
{
    struct vram_reclaimed total = {0};
    vram_fence_settle_device(VRAM_EVERY_DEVICE);
    /* As many as there are now: threads that go on freeing must not keep it going. */
    count_kept(&total.kept_blocks, &total.kept_bytes);
    reclaim(VRAM_EVERY_DEVICE, UINT64_MAX, total.kept_blocks, &total);
    count_kept(&total.kept_blocks, &total.kept_bytes);
    return total;
}

/* Whether all that is cached on the device, and idle in its pools, could make the request fit: a request for more than the
 * card has, as some programs make to find its limit, must not cost them their cache. */
static bool may_help(const struct vram_ladder *ladder, CUcontext ctx)
{
    size_t unused = 0, total = 0;
    vram_lock(VRAM_RANK_HEAP);
    const struct vram_life *life = vram_life_find(ctx);
    const struct vram_account *books = vram_books(ladder->device);
    /* Each small block may be the last of its chunk. */
    uint64_t cached = books->cached_bytes + (books->cached_blocks << VRAM_PAGE_SHIFT) + books->virtual_kept;
    bool here = life && life->device == ladder->device; /* else the driver would answer for another device */
    vram_unlock(VRAM_RANK_HEAP);
    if (!cached || !here)
        return cached != 0;
    if (VRAM_DRV(cuMemGetInfo_v2)(&unused, &total) != CUDA_SUCCESS)
        return true;
    return ladder->size <= total && ladder->size <= unused + cached + vram_pools_idle(ladder->device);
}

/* Whether something has reached the driver since the attempt that failed; what is on its way now is let arrive. */
static bool arrived(struct vram_ladder *ladder)
{
    vram_reclaim_await(ladder->device, RESCUE_NS);
    unsigned now = arrivals();
    bool more = now != ladder->arrivals;
    ladder->arrivals = now;
    return more;
}

struct vram_ladder vram_ladder(size_t size, int device)
{
    return (struct vram_ladder){.size = size, .device = device, .arrivals = arrivals()};
}

bool vram_ladder_climb(struct vram_ladder *ladder, CUcontext ctx)
{
    enum { ENOUGH, ALL, VIRTUAL, POOLS, TOP };
    uint64_t before = ladder->given_back.blocks;
    if (ladder->step == ENOUGH && ladder->device == VRAM_EVERY_DEVICE) {
        vram_lock(VRAM_RANK_HEAP);
        vram_life_settle(ctx);
        const struct vram_life *life = vram_life_of_current(ctx);
        ladder->device = life ? life->device : VRAM_EVERY_DEVICE;
        vram_unlock(VRAM_RANK_HEAP);
    }
    if (arrived(ladder))
        return true;
    if (ladder->step == ENOUGH && !may_help(ladder, ctx))
        ladder->step = POOLS;
    /* A device's worth of steps: enough by the page count, then all, because small blocks may share pages. */
    while (ladder->step < VIRTUAL && ladder->given_back.blocks == before) {
        vram_fence_settle_device(ladder->device);
        reclaim(ladder->device, ladder->step++ == ENOUGH ? vram_footprint(ladder->size) : UINT64_MAX, UINT64_MAX,
                &ladder->given_back);
    }
    uint64_t trimmed = 0;
    if (ladder->step == VIRTUAL && ladder->given_back.blocks == before) {
        ladder->virtual_memory += trimmed = vram_virtual_trim(ladder->device);
        ladder->step = POOLS;
    }
    if (ladder->step == POOLS && !trimmed && ladder->given_back.blocks == before) {
        trimmed = vram_pools_trim(ladder->device, NULL);
        ladder->trimmed += trimmed;
        ladder->step = TOP;
    }
    return arrived(ladder) || trimmed;
}

void vram_ladder_end(const struct vram_ladder *ladder, CUresult result)
{
    char buf[400];
    struct vram_text t = VRAM_TEXT(buf);
    const struct vram_reclaimed *given = &ladder->given_back;

    vram_lock(VRAM_RANK_HEAP);
    struct vram_account *books = vram_books(ladder->device);
    if (result == CUDA_SUCCESS)
        books->oom_rescued++;
    else
        books->oom_failed++;
    uint64_t live = 0;
    for (int f = 0; f < VRAM_FAMILIES; f++)
        live += vram_family_traits[f].where == VRAM_WHERE_DEVICE ? books->figures[f].bytes : 0;
    vram_unlock(VRAM_RANK_HEAP);

    /* Nothing was cached: this is the program's own affair, and its own message will say so. */
    if (given->blocks == 0 && !ladder->trimmed && !ladder->virtual_memory)
        return;
    enum vram_notice kind = VRAM_NOTICE_NOT_RESCUED;
    if (result == CUDA_SUCCESS)
        kind = vram_options->verbose ? VRAM_NOTICE_EACH_RESCUE : VRAM_NOTICE_RESCUED;
    vram_text_add(&t, "out of memory for ");
    vram_text_bytes(&t, ladder->size);
    vram_text_add(&t, " on device %d: gave ", ladder->device);
    vram_text_count(&t, given->blocks, "kept block");
    vram_text_add(&t, " (");
    vram_text_bytes(&t, given->bytes);
    if (ladder->virtual_memory) {
        vram_text_add(&t, ") and ");
        vram_text_bytes(&t, ladder->virtual_memory);
        vram_text_add(&t, " of virtual memory (unmapped");
    }
    if (ladder->trimmed) {
        vram_text_add(&t, ") and ");
        vram_text_bytes(&t, ladder->trimmed);
        vram_text_add(&t, " of the driver's pools (unused");
    }
    if (result == CUDA_SUCCESS) {
        vram_text_add(&t, ") back to the driver, and the allocation succeeded");
    } else {
        vram_text_add(&t, ") back to the driver, and it still failed (error %d); the program itself holds ", result);
        vram_text_bytes(&t, live);
    }
    vram_notice(kind, "%s", buf);
}

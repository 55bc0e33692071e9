#include "steps.h"

#include <criterion/criterion.h>

#include "base/lock.h"
#include "config/options.h"
#include "heap/heap.h"

CUdeviceptr get(size_t size)
{
    CUdeviceptr p = 0;
    cr_assert_eq(vram_heap_alloc(&p, size, 0), CUDA_SUCCESS);
    return p;
}

void give_back(CUdeviceptr p) { cr_assert_eq(vram_heap_free(p, 0), CUDA_SUCCESS); }

struct vram_block *block(CUdeviceptr p)
{
    vram_lock(VRAM_RANK_HEAP);
    struct vram_block *b = vram_ledger_find(&vram_heap.ledger, p);
    vram_unlock(VRAM_RANK_HEAP);
    return b;
}

struct vram_life *life_of(CUcontext ctx)
{
    vram_lock(VRAM_RANK_HEAP);
    struct vram_life *life = vram_life_find(ctx);
    vram_unlock(VRAM_RANK_HEAP);
    return life;
}

static bool shares_page(const struct vram_block *a, const struct vram_block *b)
{
    return vram_is_small(a->capacity) && vram_is_small(b->capacity) &&
           a->addr >> VRAM_PAGE_SHIFT == b->addr >> VRAM_PAGE_SHIFT;
}

/* Pages that this kept block, and no earlier one, gives back to the card. */
static uint64_t pages_of(const struct vram_block *b)
{
    bool first = true, before = true, live = false;
    if (!vram_is_small(b->capacity))
        return vram_footprint(b->capacity) >> VRAM_PAGE_SHIFT;
    for (const struct vram_block *o = vram_ledger_next(&vram_heap.ledger, NULL); o; o = vram_ledger_next(&vram_heap.ledger, o)) {
        before &= o != b;
        if (!shares_page(o, b))
            continue;
        live |= !vram_is_kept(o);
        first &= !(before && vram_is_kept(o));
    }
    return first && !live;
}

static uint64_t large_pages_of(const struct vram_block *b)
{
    return vram_is_small(b->capacity) ? 0 : vram_footprint(b->capacity) >> VRAM_PAGE_SHIFT;
}

/* Chunks of the device, each a page that small blocks share. */
static uint64_t chunks_of(int device)
{
    uint64_t n = 0;
    for (const struct vram_chunk *c = vram_heap.chunks; c; c = c->hh.next) {
        const struct vram_block *b = vram_ledger_next(&vram_heap.ledger, NULL);
        while (b && b->chunk != c)
            b = vram_ledger_next(&vram_heap.ledger, b);
        n += b && b->life->device == device;
    }
    return n;
}

static void the_books(int device)
{
    struct vram_account sum = {.held_pages = chunks_of(device)};
    const struct vram_account *a = vram_books(device);
    for (const struct vram_block *b = vram_ledger_next(&vram_heap.ledger, NULL); b; b = vram_ledger_next(&vram_heap.ledger, b)) {
        if (b->life->device != device)
            continue;
        sum.held_blocks++;
        sum.held_bytes += b->capacity;
        sum.held_pages += large_pages_of(b);
        if (vram_is_kept(b)) {
            sum.cached_blocks++;
            sum.cached_bytes += b->capacity;
            sum.cached_pages += pages_of(b);
        } else {
            sum.live_blocks++;
            sum.live_bytes += b->size;
            sum.live_cost += vram_footprint(b->size);
            sum.wasted_bytes += vram_footprint(b->capacity) - vram_footprint(b->size);
        }
    }
    cr_assert_eq(a->live_bytes, sum.live_bytes);
    cr_assert_eq(a->live_cost, sum.live_cost);
    cr_assert_eq(a->live_blocks, sum.live_blocks);
    cr_assert_eq(a->figures[VRAM_PLAIN].bytes + a->figures[VRAM_PITCH].bytes, sum.live_bytes);
    cr_assert_eq(a->figures[VRAM_PLAIN].count + a->figures[VRAM_PITCH].count, sum.live_blocks);
    cr_assert_eq(a->figures[VRAM_PLAIN].total_count + a->figures[VRAM_PITCH].total_count, a->allocs);
    cr_assert_eq(a->held_pages, sum.held_pages);
    cr_assert_eq(a->held_bytes, sum.held_bytes);
    cr_assert_eq(a->held_blocks, sum.held_blocks);
    cr_assert_eq(a->cached_bytes, sum.cached_bytes);
    cr_assert_eq(a->cached_blocks, sum.cached_blocks);
    cr_assert_eq(a->cached_pages, sum.cached_pages);
    cr_assert_eq(a->wasted_bytes, sum.wasted_bytes);
    cr_assert_eq(a->driver_allocs - a->driver_frees - a->ended_all, a->held_blocks);
    cr_assert_eq(a->allocs, a->hits + a->driver_allocs);
    cr_assert_eq(a->returning_blocks, 0);
    cr_assert_eq(a->returning_pages, 0);
    cr_assert(a->peak_live_bytes >= a->live_bytes && a->peak_held_bytes >= a->held_bytes &&
              a->peak_cached_bytes >= a->cached_bytes && a->peak_wasted_bytes >= a->wasted_bytes);
}

static void the_fences(const struct vram_life *life, uint64_t pending)
{
    const struct vram_fences *f = &life->fences;
    const struct vram_block *last = NULL;
    uint64_t listed = 0;
    cr_assert_lt(f->done, f->open);
    for (const struct vram_block *b = f->oldest; b; last = b, b = b->pending_next) {
        listed++;
        cr_assert_eq(b->state, VRAM_PENDING);
        cr_assert_eq(b->pending_prev, last);
        cr_assert(b->fence > f->done && b->fence <= f->open);
        cr_assert(!last || last->fence <= b->fence, "in ascending order");
    }
    cr_assert_eq(f->newest, last);
    cr_assert_eq(listed, pending);
    cr_assert_eq(f->by_size.count, vram_options->free_mode == VRAM_FREE_ORDERED ? pending : 0);
    for (int i = 0; i < VRAM_FENCES; i++)
        cr_assert(!f->fences[i].recorded || (f->fences[i].number > f->done && f->fences[i].number < f->open));
    cr_assert_not(f->polling);
}

static void the_life(const struct vram_life *life)
{
    uint64_t blocks = 0, cached = 0, cached_bytes = 0, pending = 0, listed = 0;
    for (const struct vram_block *b = vram_ledger_next(&vram_heap.ledger, NULL); b; b = vram_ledger_next(&vram_heap.ledger, b)) {
        if (b->life != life)
            continue;
        blocks++;
        pending += b->state == VRAM_PENDING;
        cached += b->state == VRAM_CACHED;
        cached_bytes += b->state == VRAM_CACHED ? b->capacity : 0;
    }
    for (const struct vram_block *b = life->blocks; b; b = b->life_next)
        listed++;
    cr_assert_eq(listed, blocks);
    cr_assert_eq(life->cache.count, cached);
    cr_assert_eq(life->cache.bytes, cached_bytes);
    cr_assert_eq(life->busy, 0);
    vram_cache_check(&life->cache);
    vram_cache_check(&life->fences.by_size);
    the_fences(life, pending);
}

void invariants(void)
{
    struct vram_life *life, *next;
    vram_lock(VRAM_RANK_HEAP);
    cr_assert_null(vram_heap.departed);
    for (const struct vram_block *b = vram_ledger_next(&vram_heap.ledger, NULL); b; b = vram_ledger_next(&vram_heap.ledger, b)) {
        cr_assert_neq(b->state, VRAM_FREEING);
        cr_assert_leq(b->size, b->capacity);
        cr_assert_eq(fake_size_of(b->addr), b->capacity, "every block is one that the driver gave");
    }
    for (int d = 0; d < 2; d++)
        the_books(d);
    HASH_ITER(hh, vram_heap.lives, life, next)
        the_life(life);
    vram_unlock(VRAM_RANK_HEAP);
}

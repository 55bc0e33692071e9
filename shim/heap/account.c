#include "heap/account.h"

#include "base/check.h"
#include "base/meta.h"

static void raise_peak(uint64_t *peak, uint64_t value)
{
    if (value > *peak)
        *peak = value;
}

static uint64_t waste_of(const struct vram_block *b)
{
    return b->capacity == b->size ? 0 : vram_footprint(b->capacity) - vram_footprint(b->size);
}

enum { SLACK_FLOOR = 64 << 20 }; /* bytes that may be kept however little is live, unless none may */

static void live_more(struct vram_account *a, const struct vram_block *b)
{
    a->live_bytes += b->size;
    a->live_blocks++;
    struct vram_figures *f = &a->figures[b->family];
    f->bytes += b->size;
    f->count++;
    raise_peak(&f->peak_bytes, f->bytes);
    a->live_cost += vram_footprint(b->size);
    raise_peak(&a->peak_live_cost, a->live_cost);
    a->wasted_bytes += waste_of(b);
    raise_peak(&a->peak_live_bytes, a->live_bytes);
    raise_peak(&a->peak_wasted_bytes, a->wasted_bytes);
    if (b->chunk)
        b->chunk->live++;
}

static void live_less(struct vram_account *a, const struct vram_block *b)
{
    VRAM_CHECK(a->live_bytes >= b->size && a->live_blocks > 0);
    a->live_bytes -= b->size;
    a->live_blocks--;
    vram_figures_less(&a->figures[b->family], b->size);
    a->live_cost -= vram_footprint(b->size);
    a->wasted_bytes -= waste_of(b);
    if (b->chunk)
        b->chunk->live--;
}

/* Pages that this cached block alone decides about. */
static uint64_t pages_freed_by(const struct vram_block *b)
{
    if (b->chunk)
        return b->chunk->live == 0;
    return vram_is_small(b->capacity) ? 0 : vram_footprint(b->capacity) >> VRAM_PAGE_SHIFT;
}

/* Pages that are there because of this block alone. */
static uint64_t pages_behind(const struct vram_block *b)
{
    if (b->chunk)
        return b->chunk->blocks == 1;
    return vram_is_small(b->capacity) ? 0 : vram_footprint(b->capacity) >> VRAM_PAGE_SHIFT;
}

void vram_account_born(struct vram_account *a, struct vram_block *b)
{
    /* Where a chunk had only cached blocks, its page counted as free until now. */
    if (b->chunk && b->chunk->live == 0 && b->chunk->blocks > 1)
        a->cached_pages--;
    a->used = true;
    a->held_bytes += b->capacity;
    a->held_blocks++;
    a->held_pages += pages_behind(b);
    raise_peak(&a->peak_held_bytes, a->held_bytes);
    live_more(a, b);
}

void vram_account_cached(struct vram_account *a, struct vram_block *b)
{
    live_less(a, b);
    a->cached_bytes += b->capacity;
    a->cached_blocks++;
    a->cached_pages += pages_freed_by(b);
    raise_peak(&a->peak_cached_bytes, a->cached_bytes);
}

void vram_account_reused(struct vram_account *a, struct vram_block *b)
{
    VRAM_CHECK(a->cached_bytes >= b->capacity && a->cached_blocks > 0);
    a->cached_pages -= pages_freed_by(b);
    a->cached_bytes -= b->capacity;
    a->cached_blocks--;
    live_more(a, b);
}

void vram_account_gone(struct vram_account *a, struct vram_block *b)
{
    VRAM_CHECK(a->held_bytes >= b->capacity && a->held_blocks > 0);
    if (vram_is_kept(b)) {
        a->cached_bytes -= b->capacity;
        a->cached_blocks--;
        /* A chunk's page stops being "free but cached" when its last block goes: then the driver has it. */
        if (!b->chunk)
            a->cached_pages -= pages_freed_by(b);
        else if (b->chunk->live == 0 && b->chunk->blocks == 1)
            a->cached_pages--;
    } else {
        live_less(a, b);
        if (b->chunk && b->chunk->live == 0 && b->chunk->blocks > 1)
            a->cached_pages++;
    }
    a->held_bytes -= b->capacity;
    a->held_blocks--;
    a->held_pages -= pages_behind(b);
}

void vram_account_ended(struct vram_account *a, const struct vram_block *b)
{
    a->ended_blocks++;
    a->ended_bytes += b->size;
    a->figures[b->family].ended_count++;
    a->figures[b->family].ended_bytes += b->size;
}

void vram_account_served(struct vram_account *a, const struct vram_block *b, bool hit)
{
    a->allocs++;
    *(hit ? &a->hits : &a->driver_allocs) += 1;
    a->figures[b->family].total_bytes += b->size;
    a->figures[b->family].total_count++;
}

uint64_t vram_account_excess(const struct vram_account *a, uint64_t size, uint32_t slack, uint64_t *ret_allowed)
{
    const uint64_t cost = vram_footprint(size), held = (a->held_pages << VRAM_PAGE_SHIFT) + cost;
    uint64_t peak = a->live_cost + cost;
    *ret_allowed = UINT64_MAX;
    if (a->total && peak > a->total)
        return 0;
    raise_peak(&peak, a->peak_live_cost);
    const uint64_t extra = peak / 10000 * (slack - 10000), floor = slack > 10000 ? SLACK_FLOOR : 0;
    *ret_allowed = peak + (extra > floor ? extra : floor);
    return held > *ret_allowed ? held - *ret_allowed : 0;
}

struct vram_chunk *vram_chunk_join(struct vram_chunk **chunks, uint64_t addr)
{
    struct vram_chunk *c;
    uint64_t page = addr >> VRAM_PAGE_SHIFT;
    HASH_FIND(hh, *chunks, &page, sizeof(page), c);
    if (!c) {
        c = vram_meta_alloc(sizeof(*c));
        if (!c)
            return NULL;
        *c = (struct vram_chunk){.page = page};
        HASH_ADD(hh, *chunks, page, sizeof(page), c);
        if (!c->hh.tbl) {
            vram_meta_free(c, sizeof(*c));
            return NULL;
        }
    }
    c->blocks++;
    return c;
}

void vram_chunk_leave(struct vram_chunk **chunks, struct vram_chunk *chunk)
{
    if (!chunk || --chunk->blocks > 0)
        return;
    HASH_DELETE(hh, *chunks, chunk);
    vram_meta_free(chunk, sizeof(*chunk));
}

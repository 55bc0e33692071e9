#include "cache/cache.h"

#include <stddef.h>

#include "base/check.h"

/* 512-byte steps up to 4 KiB, then 8 steps to each doubling. */
unsigned vram_cache_bin(uint64_t capacity)
{
    uint64_t units = capacity ? (capacity - 1) / VRAM_SMALL_ALIGN + 1 : 1;
    if (units <= 8)
        return (unsigned)units - 1;
    unsigned log = 63 - (unsigned)__builtin_clzll(units); /* >= 3 */
    return 8 * (log - 2) + (unsigned)((units >> (log - 3)) & 7);
}

/* The first occupied bin from `bin` on, or VRAM_BINS. */
static unsigned next_occupied(const struct vram_cache *cache, unsigned bin)
{
    for (unsigned word = bin / 64; word < VRAM_BINS / 64; word++, bin = word * 64) {
        uint64_t bits = cache->occupied[word] & (UINT64_MAX << (bin % 64));
        if (bits)
            return word * 64 + (unsigned)__builtin_ctzll(bits);
    }
    return VRAM_BINS;
}

/* The last occupied bin, or VRAM_BINS. */
static unsigned last_occupied(const struct vram_cache *cache)
{
    for (unsigned word = VRAM_BINS / 64; word-- > 0;)
        if (cache->occupied[word])
            return word * 64 + 63 - (unsigned)__builtin_clzll(cache->occupied[word]);
    return VRAM_BINS;
}

static struct vram_ages *ages_of(struct vram_cache *cache, const struct vram_block *block)
{
    return vram_is_small(block->capacity) ? &cache->small : &cache->large;
}

/* The block is, or is no more, one of the cache's. */
static void count_in(struct vram_cache *cache, struct vram_block *block)
{
    struct vram_ages *ages = ages_of(cache, block);
    cache->bytes += block->capacity;
    cache->count++;
    block->age_next = NULL;
    block->age_prev = ages->newest;
    if (ages->newest)
        ages->newest->age_next = block;
    else
        ages->oldest = block;
    ages->newest = block;
}

static void count_out(struct vram_cache *cache, struct vram_block *block)
{
    struct vram_ages *ages = ages_of(cache, block);
    cache->bytes -= block->capacity;
    cache->count--;
    if (block->age_prev)
        block->age_prev->age_next = block->age_next;
    else
        ages->oldest = block->age_next;
    if (block->age_next)
        block->age_next->age_prev = block->age_prev;
    else
        ages->newest = block->age_prev;
    block->age_prev = block->age_next = NULL;
}

void vram_cache_put(struct vram_cache *cache, struct vram_block *block)
{
    unsigned bin = vram_cache_bin(block->capacity);
    struct vram_block *prev = NULL, *at = cache->bins[bin];
    while (at && at->capacity < block->capacity) {
        prev = at;
        at = at->size_next;
    }

    VRAM_CHECK(vram_is_kept(block));
    block->same_prev = NULL;
    if (at && at->capacity == block->capacity) { /* on top of its stack */
        block->same_next = at;
        at->same_prev = block;
        block->size_prev = at->size_prev;
        block->size_next = at->size_next;
        at->size_prev = at->size_next = NULL;
    } else {
        block->same_next = NULL;
        block->size_prev = prev;
        block->size_next = at;
    }
    if (block->size_prev)
        block->size_prev->size_next = block;
    else
        cache->bins[bin] = block;
    if (block->size_next)
        block->size_next->size_prev = block;
    cache->occupied[bin / 64] |= (uint64_t)1 << (bin % 64);
    count_in(cache, block);
}

/* Takes the top of a stack. */
static struct vram_block *pop(struct vram_cache *cache, struct vram_block *top)
{
    unsigned bin = vram_cache_bin(top->capacity);
    struct vram_block *below = top->same_next, *prev = top->size_prev, *next = top->size_next;
    if (below) {
        below->size_prev = prev;
        below->size_next = next;
        below->same_prev = NULL;
    }
    struct vram_block *left = below ? below : next, *right = below ? below : prev;
    if (prev)
        prev->size_next = left;
    else
        cache->bins[bin] = left;
    if (next)
        next->size_prev = right;
    if (!cache->bins[bin])
        cache->occupied[bin / 64] &= ~((uint64_t)1 << (bin % 64));
    top->same_next = top->size_prev = top->size_next = NULL;
    count_out(cache, top);
    return top;
}

/* The smallest capacity of at least `size`, or NULL. */
static struct vram_block *best_fit(const struct vram_cache *cache, uint64_t size)
{
    for (unsigned bin = next_occupied(cache, vram_cache_bin(size)); bin < VRAM_BINS; bin = next_occupied(cache, bin + 1))
        for (struct vram_block *b = cache->bins[bin]; b; b = b->size_next)
            if (b->capacity >= size)
                return b;
    return NULL;
}

static uint64_t most_allowed(uint64_t size, uint32_t waste)
{
    uint64_t footprint = vram_footprint(size);
    uint64_t extra = footprint / 10000 * waste + footprint % 10000 * waste / 10000;
    return footprint > UINT64_MAX - extra ? UINT64_MAX : footprint + extra;
}

bool vram_cache_fits(uint64_t capacity, uint64_t size, uint32_t waste)
{
    if (capacity == size)
        return true;
    /* A small request in a block with pages of its own would keep a whole page where it needs a part of a shared one. */
    return capacity >= size && vram_footprint(capacity) <= most_allowed(size, waste) &&
           vram_is_small(size) == vram_is_small(capacity);
}

struct vram_block *vram_cache_take(struct vram_cache *cache, uint64_t size, uint32_t waste)
{
    struct vram_block *b = best_fit(cache, size);
    return b && vram_cache_fits(b->capacity, size, waste) ? pop(cache, b) : NULL;
}

struct vram_block *vram_cache_oldest(const struct vram_cache *cache, uint64_t time)
{
    struct vram_block *large = cache->large.oldest, *small = cache->small.oldest;
    if (large && large->freed.time < time)
        return large;
    return small && small->freed.time < time ? small : NULL;
}

struct vram_block *vram_cache_victim(struct vram_cache *cache, uint64_t wanted)
{
    struct vram_block *b = best_fit(cache, wanted);
    if (!b) {
        unsigned bin = last_occupied(cache);
        if (bin == VRAM_BINS)
            return NULL;
        for (b = cache->bins[bin]; b->size_next; b = b->size_next)
            ;
    }
    return pop(cache, b);
}

void vram_cache_remove(struct vram_cache *cache, struct vram_block *block)
{
    if (!block->same_prev) {
        pop(cache, block);
        return;
    }
    block->same_prev->same_next = block->same_next;
    if (block->same_next)
        block->same_next->same_prev = block->same_prev;
    block->same_prev = block->same_next = NULL;
    count_out(cache, block);
}

void vram_cache_check(const struct vram_cache *cache)
{
#ifdef VRAM_CHECKS
    uint64_t bytes = 0, count = 0;
    for (unsigned bin = 0; bin < VRAM_BINS; bin++) {
        const struct vram_block *prev = NULL;
        VRAM_CHECK(!cache->bins[bin] == !(cache->occupied[bin / 64] >> (bin % 64) & 1));
        for (const struct vram_block *s = cache->bins[bin]; s; prev = s, s = s->size_next) {
            VRAM_CHECK(s->size_prev == prev && (!prev || prev->capacity < s->capacity));
            for (const struct vram_block *b = s; b; b = b->same_next) {
                VRAM_CHECK(vram_is_kept(b) && b->capacity == s->capacity && vram_cache_bin(b->capacity) == bin);
                VRAM_CHECK(b == s ? !b->same_prev : b->same_prev->same_next == b);
                bytes += b->capacity;
                count++;
            }
        }
    }
    VRAM_CHECK(bytes == cache->bytes && count == cache->count);
    uint64_t aged = 0;
    for (int small = 0; small < 2; small++) {
        const struct vram_ages *ages = small ? &cache->small : &cache->large;
        const struct vram_block *last = NULL;
        for (const struct vram_block *b = ages->oldest; b; last = b, b = b->age_next, aged++)
            VRAM_CHECK(b->age_prev == last && vram_is_small(b->capacity) == small);
        VRAM_CHECK(ages->newest == last);
    }
    VRAM_CHECK(aged == cache->count);
#else
    (void)cache;
#endif
}

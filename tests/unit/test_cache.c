#include "cache/cache.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

static struct vram_block *cached(struct vram_cache *cache, uint64_t capacity)
{
    struct vram_block *b = calloc(1, sizeof(*b));
    b->capacity = capacity;
    b->state = VRAM_CACHED;
    vram_cache_put(cache, b);
    return b;
}

static const uint64_t MiB = 1 << 20;

Test(cache, bins_ascend_and_stay_in_range)
{
    unsigned last = 0;
    for (uint64_t size = 1; size && size < UINT64_MAX / 2; size += size / 16 + 1) {
        unsigned bin = vram_cache_bin(size);
        cr_assert_geq(bin, last);
        cr_assert_lt(bin, VRAM_BINS);
        last = bin;
    }
    cr_assert_lt(vram_cache_bin(UINT64_MAX), VRAM_BINS);
    cr_assert_eq(vram_cache_bin(1), vram_cache_bin(512));
    cr_assert_neq(vram_cache_bin(512), vram_cache_bin(513));
}

Test(cache, the_smallest_block_that_is_large_enough)
{
    static struct vram_cache cache;
    cached(&cache, 9 * MiB);
    struct vram_block *best = cached(&cache, 8 * MiB + 512);
    cached(&cache, 8 * MiB - 512);
    cr_assert_eq(vram_cache_take(&cache, 8 * MiB, 10000), best);
}

Test(cache, last_in_first_out_within_a_capacity)
{
    static struct vram_cache cache;
    struct vram_block *first = cached(&cache, 4 * MiB), *second = cached(&cache, 4 * MiB);
    cr_assert_eq(vram_cache_take(&cache, 4 * MiB, 0), second);
    cr_assert_eq(vram_cache_take(&cache, 4 * MiB, 0), first);
    cr_assert_null(vram_cache_take(&cache, 4 * MiB, 0));
}

Test(cache, no_waste_means_no_further_page)
{
    static struct vram_cache cache;
    struct vram_block *b = cached(&cache, 4 * MiB);
    /* 3 MiB would take two pages as well, 2 MiB only one. */
    cr_assert_null(vram_cache_take(&cache, 2 * MiB, 0));
    cr_assert_eq(vram_cache_take(&cache, 3 * MiB, 0), b);
}

Test(cache, waste_is_bounded)
{
    static struct vram_cache cache;
    struct vram_block *b = cached(&cache, 18 * MiB);
    cr_assert_null(vram_cache_take(&cache, 16 * MiB, 1249)); /* two MiB more are 12.5% */
    cr_assert_eq(vram_cache_take(&cache, 16 * MiB, 1250), b);
}

Test(cache, a_small_request_never_takes_whole_pages)
{
    static struct vram_cache cache;
    cached(&cache, 2 * MiB);
    cr_assert_null(vram_cache_take(&cache, 2 * MiB - 512, 10000));
}

Test(cache, victims_are_just_enough_else_the_largest)
{
    static struct vram_cache cache;
    struct vram_block *small = cached(&cache, 2 * MiB), *mid = cached(&cache, 8 * MiB), *big = cached(&cache, 64 * MiB);
    cr_assert_eq(vram_cache_victim(&cache, 6 * MiB), mid);
    cr_assert_eq(vram_cache_victim(&cache, 100 * MiB), big);
    cr_assert_eq(vram_cache_victim(&cache, UINT64_MAX), small);
    cr_assert_null(vram_cache_victim(&cache, 1));
}

static struct vram_block *cached_at(struct vram_cache *cache, uint64_t capacity, uint64_t time)
{
    struct vram_block *b = cached(cache, capacity);
    b->freed.time = time;
    return b;
}

Test(cache, the_oldest_of_the_large_ones_then_of_the_small_ones)
{
    static struct vram_cache cache;
    struct vram_block *small = cached_at(&cache, 512, 1), *first = cached_at(&cache, 8 * MiB, 2);
    struct vram_block *second = cached_at(&cache, 2 * MiB, 3), *third = cached_at(&cache, 8 * MiB, 4);
    cr_assert_eq(vram_cache_take(&cache, 8 * MiB, 0), third);
    vram_cache_put(&cache, third);
    cr_assert_null(vram_cache_oldest(&cache, 1));
    cr_assert_eq(vram_cache_oldest(&cache, 2), small);
    struct vram_block *const in_order[] = {first, second, third, small};
    for (int i = 0; i < 4; i++) {
        cr_assert_eq(vram_cache_oldest(&cache, UINT64_MAX), in_order[i]);
        vram_cache_remove(&cache, in_order[i]);
        vram_cache_check(&cache);
    }
    cr_assert_null(vram_cache_oldest(&cache, UINT64_MAX));
}

/* Against a reference that knows only an array. */
Test(cache, random_operations_agree_with_a_model)
{
    enum { MAX = 300 };
    static struct vram_cache cache;
    struct vram_block *held[MAX];
    unsigned n = 0;
    srand(7);
    for (int i = 0; i < 60000; i++) {
        uint64_t size = rand() % 3 ? 512u * (1 + rand() % 40) : 1u + rand() % (64u << 20);
        switch (rand() % 4) {
        case 0:
        case 1:
            if (n < MAX)
                held[n++] = cached(&cache, size);
            break;
        case 2: {
            uint32_t waste = rand() % 10001, expected = UINT32_MAX;
            for (unsigned k = 0; k < n; k++)
                if (held[k]->capacity >= size && (expected == UINT32_MAX || held[k]->capacity < held[expected]->capacity))
                    expected = k;
            uint64_t best = expected == UINT32_MAX ? 0 : held[expected]->capacity;
            struct vram_block *got = vram_cache_take(&cache, size, waste);
            if (got)
                cr_assert_eq(got->capacity, best);
            else if (best && vram_is_small(best) == vram_is_small(size))
                cr_assert_gt(vram_footprint(best) * 10000, vram_footprint(size) * (10000ull + waste) - 10000);
            for (unsigned k = 0; got && k < n; k++)
                if (held[k] == got)
                    held[k--] = held[--n];
            free(got);
            break;
        }
        default:
            if (n) {
                unsigned k = (unsigned)rand() % n;
                vram_cache_remove(&cache, held[k]);
                free(held[k]);
                held[k] = held[--n];
            }
        }
        if (i % 64 == 0)
            vram_cache_check(&cache);
        cr_assert_eq(cache.count, n);
    }
    uint64_t bytes = 0;
    for (unsigned k = 0; k < n; k++)
        bytes += held[k]->capacity;
    cr_assert_eq(cache.bytes, bytes);
}

/*
 * The block cache: freed blocks of one context's life, by size and by age. Pure policy: no driver call, no lock (heap/ holds HEAP),
 * no clock.
 *
 * Blocks lie in bins of 8 size classes to a doubling. In a bin, blocks of one capacity form a stack (last in, first out:
 * its lines are the warmest), and the stacks are in ascending order. A request is served by the smallest block that is
 * large enough and costs the card at most `waste` more than the request itself would (vram_footprint): within one
 * 2 MiB page nothing is wasted, because the driver would have taken the whole page too.
 *
 * They are in a list by age as well: those that have served nobody for the longest time are the ones to do without. Small
 * blocks are in a list of their own, because they share their chunks, and giving up one of them rarely gains anything.
 *
 *   invariants: bytes = sum of capacities; count = number of blocks; a bit of `occupied` is set exactly if its bin is not
 *   empty; every block is one that the program has freed.
 */
#ifndef VRAM_CACHE_CACHE_H
#define VRAM_CACHE_CACHE_H

#include <stdbool.h>
#include <stdint.h>

#include "ledger/block.h"

enum { VRAM_BINS = 448 };

struct vram_cache {
    struct vram_block *bins[VRAM_BINS]; /* first block of the smallest capacity */
    uint64_t occupied[VRAM_BINS / 64];
    uint64_t bytes, count;
    struct vram_ages {
        struct vram_block *oldest, *newest;
    } large, small;
};

void vram_cache_put(struct vram_cache *cache, struct vram_block *block);

/* Takes the block that serves a request for `size` bytes out of the cache, or returns NULL. `waste` in hundredths of a
 * percent: 0 means that the block must cost the card no more than a fresh one. */
struct vram_block *vram_cache_take(struct vram_cache *cache, uint64_t size, uint32_t waste);

/* Takes the block to give back next when `wanted` bytes are needed: the smallest one that alone is enough, else the largest.
 * Large blocks free whole pages; a small one frees its chunk only with all its neighbours. NULL: the cache is empty. */
struct vram_block *vram_cache_victim(struct vram_cache *cache, uint64_t wanted);

/* The block that was freed first, of the large ones, else of the small ones, if that was before `time`; or NULL. */
struct vram_block *vram_cache_oldest(const struct vram_cache *cache, uint64_t time);

/* Whether a block of that capacity may serve the request. */
bool vram_cache_fits(uint64_t capacity, uint64_t size, uint32_t waste);

/* Takes this block out, wherever it lies. */
void vram_cache_remove(struct vram_cache *cache, struct vram_block *block);

void vram_cache_check(const struct vram_cache *cache); /* the invariants, in builds with checks */

unsigned vram_cache_bin(uint64_t capacity); /* for the tests */

#endif

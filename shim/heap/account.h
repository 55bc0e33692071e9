/*
 * The books of each device: what the program holds, what the cache holds, what was saved. All under HEAP.
 *
 *   live_bytes   = sum of size over live and freeing blocks          (what the program asked for)
 *   held_bytes   = sum of capacity over all blocks                   (what the driver gave)
 *   cached_bytes = sum of capacity over pending and cached blocks, and those on their way from there to the program
 *   driver_allocs - driver_frees - ended_all = number of blocks held
 *   allocs = hits + driver_allocs (successful ones)
 *   figures[plain] + figures[pitch] = what is live; the other families' figures are those of the holdings
 */
#ifndef VRAM_HEAP_ACCOUNT_H
#define VRAM_HEAP_ACCOUNT_H

#include <stdbool.h>
#include <stdint.h>

#include "ledger/block.h"

enum { VRAM_DEVICES_MAX = 64, VRAM_EVERY_DEVICE = -1, VRAM_DOUBLE_FREES_MAX = 16 };

struct vram_account {
    bool used; /* the program allocated here */
    struct vram_figures figures[VRAM_FAMILIES];
    uint64_t live_bytes, live_blocks, peak_live_bytes;
    uint64_t held_bytes, held_blocks, peak_held_bytes;
    uint64_t cached_bytes, cached_blocks, peak_cached_bytes;
    uint64_t held_pages;    /* of 2 MiB, behind all blocks */
    uint64_t cached_pages;  /* of them, those that natively would be free */
    uint64_t virtual_kept;  /* bytes of virtual memory that natively would be free, see heap/virtual.h */
    uint64_t returning_blocks, returning_pages; /* have left the cache for the driver, which may not have them yet */
    uint64_t returned;                          /* that arrived there, or were refused */
    uint64_t wasted_bytes;  /* footprint of live blocks beyond what fresh ones would take */
    uint64_t peak_wasted_bytes;
    uint64_t live_cost, peak_live_cost; /* footprint that fresh blocks for what is live would have */
    uint64_t allocs, hits, driver_allocs;
    uint64_t frees, driver_frees;
    uint64_t double_frees;
    uint64_t ended_blocks, ended_bytes; /* live when their context ended */
    uint64_t ended_all;                 /* the same, with cached ones */
    uint64_t oom_rescued, oom_failed;
    struct vram_amount {
        uint64_t blocks, bytes;
    } evicted, decayed; /* given back to stay within the slack / because they served nobody */
    bool looked;             /* for the next two; accessed atomically */
    uint64_t total;          /* bytes of the card; 0: not known yet */
    uint64_t in_use_before;  /* on the card, when the program got its first memory: contexts, other programs */
    bool graph_memory;       /* the program allocates inside of captures: graphs own memory */
    bool pitch_known;   /* a native call confirmed that rows are rounded up to 512 bytes here */
    bool pitch_foreign; /* a native call showed another rule: pitched requests are never served from the cache */
};

/* A free of memory that was free already: refused, told at exit with both places. */
struct vram_double_free {
    uint64_t addr, size;
    struct vram_site first, second;
};

/* The 2 MiB that small blocks share. */
struct vram_chunk {
    uint64_t page; /* address >> VRAM_PAGE_SHIFT, the key */
    uint32_t blocks, live;
    UT_hash_handle hh;
};

/* Changes of a block's state, each keeping the equations above. `device` is the block's. */
void vram_account_born(struct vram_account *a, struct vram_block *b);    /* the driver gave it; it is live */
void vram_account_cached(struct vram_account *a, struct vram_block *b);  /* live -> pending or cached */
void vram_account_reused(struct vram_account *a, struct vram_block *b);  /* pending or cached -> live; b->size is the new one */
void vram_account_gone(struct vram_account *a, struct vram_block *b);    /* in any state -> no longer ours */

/* Not freed when its context ended; gone() follows. */
void vram_account_ended(struct vram_account *a, const struct vram_block *b);

/* The program asked for a block and got it. */
void vram_account_served(struct vram_account *a, const struct vram_block *b, bool hit);

/* How much more than VRAMSHIM_SLACK allows would be held if the driver gave a block for `size` bytes now, which it will not
 * where that and what is live are more than the card has (then 0); *ret_allowed is what it allows. `slack` in hundredths of a percent of the peak. */
uint64_t vram_account_excess(const struct vram_account *a, uint64_t size, uint32_t slack, uint64_t *ret_allowed);

struct vram_chunk *vram_chunk_join(struct vram_chunk **chunks, uint64_t addr); /* NULL: no memory */
void vram_chunk_leave(struct vram_chunk **chunks, struct vram_chunk *chunk);

#endif

/*
 * A block: one allocation that the driver made, from its birth to the driver's free. It is known to the ledger (by
 * address) for as long as the driver may think it ours, whether the program holds it (live) or the cache does.
 *
 * Pure data: addresses and contexts are plain numbers here, no CUDA type is seen below heap/. All fields are under HEAP,
 * except while a single thread owns the block in state VRAM_FREEING.
 */
#ifndef VRAM_LEDGER_BLOCK_H
#define VRAM_LEDGER_BLOCK_H

#include <stdbool.h>
#include <stdint.h>

#include "base/hash.h"
#include "ledger/family.h"

enum vram_block_state {
    VRAM_LIVE,    /* the program holds it */
    VRAM_FREEING, /* one thread has it: on its way to the cache or the driver, or out of the cache to the program */
    VRAM_PENDING, /* free for the program, but work of before its free may still use it */
    VRAM_CACHED,  /* free for the program, kept for the next request */
};

/* Where a call came from, for the report. */
struct vram_site {
    uint64_t time;    /* ns, monotonic, roughly (base/clock.h) */
    uintptr_t caller; /* return address into whoever called the driver API */
    uint32_t tid;
};

struct vram_life;
struct vram_chunk;

struct vram_block {
    uint64_t addr;     /* the key */
    uint64_t capacity; /* bytes that the driver gave */
    uint64_t size;     /* bytes that the program asked for; size <= capacity */
    struct vram_life *life;
    struct vram_chunk *chunk; /* the 2 MiB that small blocks share; NULL for a block of 2 MiB or more */
    enum vram_block_state state;
    enum vram_family family; /* plain or pitch */
    bool identity_left; /* exported, or given attributes: goes back to the driver when freed (law 19) */
    bool told;          /* a double free of it was reported */
    uint64_t fence;     /* pending: the fence that it waits for; live: the one that it was put behind, or 0 */
    struct vram_site born, freed;

    struct vram_block *life_prev, *life_next; /* all blocks of one life */
    struct vram_block *same_prev, *same_next; /* cache: further blocks of the same capacity */
    struct vram_block *size_prev, *size_next; /* cache: first blocks of neighbouring capacities in a bin */
    struct vram_block *age_prev, *age_next;   /* cache: large blocks, or small ones, by age */
    struct vram_block *pending_prev, *pending_next; /* pending blocks of one life, by fence; those on their way out */

    UT_hash_handle hh; /* ledger */
};

/* Whether the program has freed it and we have it. */
static inline bool vram_is_kept(const struct vram_block *b) { return b->state == VRAM_CACHED || b->state == VRAM_PENDING; }

/*
 * What a block costs the card, as measured (H200, driver 580): from 2 MiB on, whole pages of 2 MiB; below, 512 bytes of a
 * 2 MiB chunk that small blocks share, lying at a multiple of 2 MiB and given back when its last block is freed.
 */
enum { VRAM_PAGE_SHIFT = 21, VRAM_SMALL_ALIGN = 512 };
#define VRAM_PAGE ((uint64_t)1 << VRAM_PAGE_SHIFT)

static inline bool vram_is_small(uint64_t bytes) { return bytes < VRAM_PAGE; }

static inline uint64_t vram_footprint(uint64_t bytes)
{
    uint64_t unit = vram_is_small(bytes) ? VRAM_SMALL_ALIGN : VRAM_PAGE;
    return bytes > UINT64_MAX - unit ? UINT64_MAX : (bytes + unit - 1) & ~(unit - 1);
}

#endif

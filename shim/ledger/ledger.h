/*
 * The ledger: which addresses are ours. uthash tables from address to block. Pure: no driver call, no lock (heap/ holds
 * HEAP), no clock.
 *
 * Many small tables instead of one: a table that grows moves all its entries at once, and one of a million took 30 ms
 * for that (measured), in the middle of some allocation. A table's share takes less than one.
 *
 * An entry is added after the driver gave the address and removed before it is freed to the driver (law 16), so an address
 * never has two entries.
 */
#ifndef VRAM_LEDGER_LEDGER_H
#define VRAM_LEDGER_LEDGER_H

#include <stdbool.h>
#include <stdint.h>

#include "ledger/block.h"

enum { VRAM_LEDGER_SHARDS = 64 };

struct vram_ledger {
    struct vram_block *shards[VRAM_LEDGER_SHARDS]; /* by address */
};

struct vram_block *vram_ledger_find(const struct vram_ledger *ledger, uint64_t addr);

/* False if the host has no memory for the entry; the block is then not in the ledger. */
bool vram_ledger_add(struct vram_ledger *ledger, struct vram_block *block);

void vram_ledger_remove(struct vram_ledger *ledger, struct vram_block *block);

/* All of them, in no order: for (b = vram_ledger_next(l, NULL); b; b = vram_ledger_next(l, b)). */
struct vram_block *vram_ledger_next(const struct vram_ledger *ledger, const struct vram_block *block);

uint64_t vram_ledger_count(const struct vram_ledger *ledger);

#endif

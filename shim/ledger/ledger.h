/*
 * The ledger: which addresses are ours. A uthash table from address to block. Pure: no driver call, no lock (heap/ holds
 * HEAP), no clock.
 *
 * An entry is added after the driver gave the address and removed before it is freed to the driver (law 16), so an address
 * never has two entries.
 */
#ifndef VRAM_LEDGER_LEDGER_H
#define VRAM_LEDGER_LEDGER_H

#include <stdbool.h>
#include <stdint.h>

#include "ledger/block.h"

struct vram_ledger {
    struct vram_block *by_addr;
};

struct vram_block *vram_ledger_find(const struct vram_ledger *ledger, uint64_t addr);

/* False if the host has no memory for the entry; the block is then not in the ledger. */
bool vram_ledger_add(struct vram_ledger *ledger, struct vram_block *block);

void vram_ledger_remove(struct vram_ledger *ledger, struct vram_block *block);

uint64_t vram_ledger_count(const struct vram_ledger *ledger);

#endif

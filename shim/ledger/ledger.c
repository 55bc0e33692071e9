#include "ledger/ledger.h"

#include "base/check.h"

/* Addresses are multiples of 512 and mostly of 2 MiB: multiply so that the high bits reach the low ones that uthash uses. */
#define HASH_ADDR(addr) ((unsigned)(((addr) >> 9) * 0x9E3779B97F4A7C15ull >> 32))

struct vram_block *vram_ledger_find(const struct vram_ledger *ledger, uint64_t addr)
{
    struct vram_block *block;
    HASH_FIND_BYHASHVALUE(hh, ledger->by_addr, &addr, sizeof(addr), HASH_ADDR(addr), block);
    return block;
}

bool vram_ledger_add(struct vram_ledger *ledger, struct vram_block *block)
{
    VRAM_CHECK(!vram_ledger_find(ledger, block->addr));
    HASH_ADD_BYHASHVALUE(hh, ledger->by_addr, addr, sizeof(block->addr), HASH_ADDR(block->addr), block);
    return block->hh.tbl != NULL;
}

void vram_ledger_remove(struct vram_ledger *ledger, struct vram_block *block)
{
    VRAM_CHECK(vram_ledger_find(ledger, block->addr) == block);
    HASH_DELETE(hh, ledger->by_addr, block);
}

uint64_t vram_ledger_count(const struct vram_ledger *ledger) { return HASH_COUNT(ledger->by_addr); }

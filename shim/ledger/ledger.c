#include "ledger/ledger.h"

#include <stddef.h>

#include "base/check.h"

/* Addresses are multiples of 512, mostly of 2 MiB, and neighbours of each other: two rounds, so that each of their bits reaches
 * those that choose the shard (the upper ones) and the bucket (the lower ones). With one round, a million neighbours shared a
 * quarter of the buckets, and uthash stops growing a table then. */
static unsigned hash_of(uint64_t addr)
{
    addr = (addr >> 9) * 0x9E3779B97F4A7C15u;
    addr = (addr ^ addr >> 32) * 0xD6E8FEB86659FD93u;
    return (unsigned)(addr >> 32);
}

static unsigned shard_of(unsigned hash) { return hash / (UINT32_MAX / VRAM_LEDGER_SHARDS + 1); }

struct vram_block *vram_ledger_find(const struct vram_ledger *ledger, uint64_t addr)
{
    struct vram_block *block;
    const unsigned hash = hash_of(addr);
    HASH_FIND_BYHASHVALUE(hh, ledger->shards[shard_of(hash)], &addr, sizeof(addr), hash, block);
    return block;
}

bool vram_ledger_add(struct vram_ledger *ledger, struct vram_block *block)
{
    VRAM_CHECK(!vram_ledger_find(ledger, block->addr));
    const unsigned hash = hash_of(block->addr);
    HASH_ADD_BYHASHVALUE(hh, ledger->shards[shard_of(hash)], addr, sizeof(block->addr), hash, block);
    return block->hh.tbl != NULL;
}

void vram_ledger_remove(struct vram_ledger *ledger, struct vram_block *block)
{
    VRAM_CHECK(vram_ledger_find(ledger, block->addr) == block);
    HASH_DELETE(hh, ledger->shards[shard_of(block->hh.hashv)], block);
}

struct vram_block *vram_ledger_next(const struct vram_ledger *ledger, const struct vram_block *block)
{
    if (block && block->hh.next)
        return block->hh.next;
    for (unsigned shard = block ? shard_of(block->hh.hashv) + 1 : 0; shard < VRAM_LEDGER_SHARDS; shard++)
        if (ledger->shards[shard])
            return ledger->shards[shard];
    return NULL;
}

uint64_t vram_ledger_count(const struct vram_ledger *ledger)
{
    uint64_t count = 0;
    for (unsigned shard = 0; shard < VRAM_LEDGER_SHARDS; shard++)
        count += HASH_COUNT(ledger->shards[shard]);
    return count;
}

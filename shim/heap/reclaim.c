#include "heap/reclaim.h"

#include <stdatomic.h>

#include "base/check.h"
#include "base/lock.h"
#include "base/meta.h"
#include "base/say.h"
#include "base/text.h"
#include "config/options.h"
#include "driver/capture.h"
#include "driver/driver.h"
#include "heap/fence.h"
#include "heap/heap.h"
#include "heap/life.h"

/* Takes one victim out of some cache of the device, out of the ledger too (law 16: before the driver gets it), and pins its
 * life. NULL: none is left. The life `skip` is passed over. */
static struct vram_block *pick(int device, uint64_t wanted, const struct vram_life *skip)
{
    struct vram_life *life, *next, *best = NULL;
    struct vram_block *b = NULL;
    vram_lock(VRAM_RANK_HEAP);
    HASH_ITER(hh, vram_heap.lives, life, next)
    {
        if (life == skip || life->closing || (device != VRAM_EVERY_DEVICE && life->device != device))
            continue;
        if (life->cache.bytes > (best ? best->cache.bytes : 0))
            best = life;
    }
    if (best) {
        b = vram_cache_victim(&best->cache, wanted);
        vram_block_withdraw(b);
        vram_life_pin(best);
    }
    vram_unlock(VRAM_RANK_HEAP);
    return b;
}

/* What pick() took out and the driver does not have back. */
static void put_back(struct vram_block *b)
{
    vram_lock(VRAM_RANK_HEAP);
    struct vram_account *books = vram_books(b->life->device);
    b->state = VRAM_LIVE; /* enters as every block does, then is cached again */
    bool kept = !vram_ledger_find(&vram_heap.ledger, b->addr) && vram_block_enter(b);
    if (kept) {
        b->state = VRAM_CACHED;
        vram_account_cached(books, b);
        vram_cache_put(&b->life->cache, b);
    }
    books->ended_all += !kept;
    vram_unlock(VRAM_RANK_HEAP);
    if (!kept)
        vram_meta_free(b, sizeof(*b));
}

/* The driver's free, in the block's own context (law 22). */
static CUresult free_in_its_context(const struct vram_block *b)
{
    CUcontext before;
    CUresult r = vram_life_enter(b->life->ctx, &before);
    if (r != CUDA_SUCCESS)
        return r;
    r = VRAM_DRV(cuMemFree_v2)(b->addr);
    vram_life_leave(b->life->ctx, before);
    return r;
}

static void reclaim(int device, uint64_t wanted, struct vram_reclaimed *total)
{
    const struct vram_life *refusing = NULL;
    uint64_t got = 0;
    while (got < wanted) {
        /* In the gate before a block leaves the ledger: once a capture has begun, nothing moves. */
        if (!vram_gate_enter()) {
            total->capture = true;
            return;
        }
        if (vram_heap_is_exiting()) { /* no driver call of ours any more (law 27); asked inside the gate, which exit drains */
            vram_gate_leave();
            return;
        }
        struct vram_block *b = pick(device, wanted - got, refusing);
        if (!b) {
            vram_gate_leave();
            return;
        }
        struct vram_life *life = b->life;
        CUresult r = free_in_its_context(b);
        vram_gate_leave();
        if (r == CUDA_SUCCESS) {
            got += vram_footprint(b->capacity);
            total->blocks++;
            total->bytes += b->capacity;
            vram_lock(VRAM_RANK_HEAP);
            vram_books(life->device)->driver_frees++;
            vram_unlock(VRAM_RANK_HEAP);
            vram_meta_free(b, sizeof(*b));
        } else {
            /* What one block of a context meets, all will: a sticky error, or a driver on its way out. */
            put_back(b);
            total->refused = r;
            if (refusing) {
                vram_life_unpin(life);
                return;
            }
            refusing = life;
        }
        vram_life_unpin(life);
    }
}

struct vram_reclaimed vram_reclaim_all(void)
{
    struct vram_reclaimed total = {0};
    vram_fence_settle_device(VRAM_EVERY_DEVICE);
    reclaim(VRAM_EVERY_DEVICE, UINT64_MAX, &total);
    vram_lock(VRAM_RANK_HEAP);
    for (int d = 0; d < VRAM_DEVICES_MAX; d++) {
        total.kept_blocks += vram_heap.devices[d].cached_blocks;
        total.kept_bytes += vram_heap.devices[d].cached_bytes;
    }
    vram_unlock(VRAM_RANK_HEAP);
    return total;
}

/* Whether all that is cached on the device could make the request fit: a request for more than the card has, as some programs
 * make to find its limit, must not cost them their cache. */
static bool may_help(struct vram_ladder *ladder, CUcontext ctx)
{
    size_t unused = 0, total = 0;
    vram_lock(VRAM_RANK_HEAP);
    vram_life_settle(ctx);
    struct vram_life *life = vram_life_of_current(ctx);
    ladder->device = life ? life->device : VRAM_EVERY_DEVICE;
    /* Each small block may be the last of its chunk. */
    uint64_t cached = life ? vram_books(life->device)->cached_bytes +
                                 (vram_books(life->device)->cached_blocks << VRAM_PAGE_SHIFT)
                           : 0;
    vram_unlock(VRAM_RANK_HEAP);
    if (!life || !cached)
        return false;
    if (VRAM_DRV(cuMemGetInfo_v2)(&unused, &total) != CUDA_SUCCESS)
        return true;
    return ladder->size <= total && ladder->size <= unused + cached;
}

bool vram_ladder_climb(struct vram_ladder *ladder, CUcontext ctx)
{
    uint64_t before = ladder->given_back.blocks;
    if (ladder->step == 0 && !may_help(ladder, ctx))
        return false;
    /* A device's worth of steps: enough by the page count, then all, because small blocks may share pages. */
    while (ladder->step < 2 && ladder->given_back.blocks == before)
        reclaim(ladder->device, ladder->step++ == 0 ? vram_footprint(ladder->size) : UINT64_MAX, &ladder->given_back);
    return ladder->given_back.blocks > before;
}

/* How often the story is told: the first three times, then at 10, 100, 1000, ... unless VERBOSE. */
static bool worth_telling(unsigned n)
{
    if (n <= 3 || vram_options->verbose)
        return true;
    while (n % 10 == 0)
        n /= 10;
    return n == 1;
}

void vram_ladder_end(const struct vram_ladder *ladder, CUresult result)
{
    static atomic_uint told;
    char buf[256];
    struct vram_text t = VRAM_TEXT(buf);
    const struct vram_reclaimed *given = &ladder->given_back;

    vram_lock(VRAM_RANK_HEAP);
    struct vram_account *books = vram_books(ladder->device);
    if (result == CUDA_SUCCESS)
        books->oom_rescued++;
    else
        books->oom_failed++;
    uint64_t live = books->live_bytes;
    vram_unlock(VRAM_RANK_HEAP);

    /* Nothing was cached: this is the program's own affair, and its own message will say so. */
    if (given->blocks == 0)
        return;
    unsigned n = atomic_fetch_add(&told, 1) + 1;
    if (!worth_telling(n))
        return;
    vram_text_add(&t, "out of memory for ");
    vram_text_bytes(&t, ladder->size);
    vram_text_add(&t, " on device %d: gave ", ladder->device);
    vram_text_count(&t, given->blocks, "kept block");
    vram_text_add(&t, " (");
    vram_text_bytes(&t, given->bytes);
    if (result == CUDA_SUCCESS) {
        vram_text_add(&t, ") back to the driver, and the allocation succeeded");
    } else {
        vram_text_add(&t, ") back to the driver, and it still failed (error %d); the program itself holds ", result);
        vram_text_bytes(&t, live);
    }
    if (n >= 3 && !vram_options->verbose)
        vram_text_add(&t, " (time %u; further ones are told more rarely)", n);
    vram_say("%s", buf);
}

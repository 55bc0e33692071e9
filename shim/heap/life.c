#include "heap/life.h"

#include <errno.h>
#include <stddef.h>

#include "base/check.h"
#include "base/compiler.h"
#include "base/futex.h"
#include "base/lock.h"
#include "base/meta.h"
#include "driver/driver.h"

struct vram_heap vram_heap;

/* Contexts made from green contexts, by handle: told before their life begins. Few; under HEAP. */
enum { GREEN_MAX = 64 };
static CUcontext green[GREEN_MAX];
static unsigned green_next;

/* The cheapest call that looks: among 29 measured, of the others that answer a failed context with its error none is faster,
 * and cuCtxGetCurrent, cuCtxGetDevice and their kind never do. */
static bool is_refused(void)
{
    /* A driver without it is as good as one that refuses: nothing is kept. */
    return vram_unlikely(!vram_driver()->cuCtxGetStreamPriorityRange) ||
           vram_unlikely(VRAM_DRV(cuCtxGetStreamPriorityRange)(NULL, NULL) != CUDA_SUCCESS);
}

bool vram_life_failed(void)
{
    return is_refused() && (!vram_driver()->cuCtxGetStreamPriorityRange || vram_life_context());
}

CUcontext vram_life_here(bool *ret_failed)
{
    CUcontext only = vram_life_only();
    bool refused = is_refused();
    CUcontext ctx = only && !refused ? only : vram_life_context();
    *ret_failed = refused && (ctx || !vram_driver()->cuCtxGetStreamPriorityRange);
    return ctx;
}

bool vram_life_all_known(void) { return !vram_heap.strangers && !vram_driver_is_younger(); }

/* The lives are others, or in another state. Under HEAP. */
static void look_for_only(void)
{
    const struct vram_life *life = vram_heap.lives;
    bool one = life && !life->hh.next && !life->closing && vram_life_all_known();
    __atomic_store_n(&vram_heap.only, one ? life->ctx : NULL, __ATOMIC_RELEASE);
}

bool vram_life_failed_in(const struct vram_life *life)
{
    CUcontext before;
    if (vram_life_context() == life->ctx)
        return vram_life_failed();
    if (vram_life_enter(life->ctx, &before) != CUDA_SUCCESS)
        return true;
    bool failed = vram_life_failed();
    vram_life_leave(life->ctx, before);
    return failed;
}

struct vram_life *vram_life_find(CUcontext ctx)
{
    struct vram_life *life = vram_heap.recent;
    if (vram_unlikely(!life || life->ctx != ctx)) {
        HASH_FIND(hh, vram_heap.lives, &ctx, sizeof(ctx), life);
        vram_heap.recent = life;
    }
    return life && !life->closing ? life : NULL;
}

static bool exists(CUcontext ctx)
{
    struct vram_life *life;
    HASH_FIND(hh, vram_heap.lives, &ctx, sizeof(ctx), life);
    return life != NULL;
}

bool vram_life_is_closing(CUcontext ctx) { return exists(ctx) && !vram_life_find(ctx); }

/* Under HEAP. */
static struct vram_life *make(CUcontext ctx, int device)
{
    struct vram_life *life = vram_life_find(ctx);
    if (life || !ctx)
        return life;
    HASH_FIND(hh, vram_heap.lives, &ctx, sizeof(ctx), life);
    if (life) {
        life->recurred = true;
        life->next_device = device;
        return NULL;
    }
    life = vram_meta_alloc(sizeof(*life));
    if (!life) {
        vram_heap.strangers = true;
        look_for_only();
        return NULL;
    }
    *life = (struct vram_life){.ctx = ctx, .device = device, .uncached = vram_heap.peers_lost, .fences.open = 1};
    for (unsigned i = 0; i < GREEN_MAX; i++)
        life->uncached |= green[i] == ctx;
    for (int d = 0; d < VRAM_DEVICES_MAX; d++)
        life->primary |= vram_heap.primaries[d] == ctx;
    HASH_ADD(hh, vram_heap.lives, ctx, sizeof(ctx), life);
    bool made = life->hh.tbl;
    vram_heap.strangers |= !made;
    look_for_only();
    if (made)
        return life;
    vram_meta_free(life, sizeof(*life));
    return NULL;
}

CUcontext vram_life_context(void)
{
    CUcontext ctx = NULL;
    if (!vram_driver()->cuCtxGetCurrent || VRAM_DRV(cuCtxGetCurrent)(&ctx) != CUDA_SUCCESS)
        return NULL;
    return ctx;
}

struct vram_life *vram_life_of_current(CUcontext ctx)
{
    CUdevice device;
    struct vram_life *life = vram_life_find(ctx);
    if (life ? vram_likely(life->device >= 0) : exists(ctx))
        return life;
    vram_unlock(VRAM_RANK_HEAP);
    bool known = vram_driver()->cuCtxGetDevice && VRAM_DRV(cuCtxGetDevice)(&device) == CUDA_SUCCESS;
    vram_lock(VRAM_RANK_HEAP);
    life = known ? make(ctx, device) : NULL;
    if (life && life->device < 0)
        life->device = device;
    return life;
}

void vram_life_pin(struct vram_life *life) { atomic_fetch_add(&life->busy, 1); }

static atomic_uint enders; /* threads that wait for a life not to be pinned */

void vram_life_unpin(struct vram_life *life)
{
    /* The life may be freed as soon as the count is seen as zero: wake by address, touch nothing. Nobody is woken where nobody
     * waits, as nearly always: who waits says so before looking at the count, we look at the count before (both seq_cst). */
    atomic_uint *busy = &life->busy;
    if (atomic_fetch_sub(busy, 1) == 1 && vram_unlikely(atomic_load(&enders)))
        vram_futex_wake(busy);
}

CUresult vram_life_enter(CUcontext ctx, CUcontext *ret_before)
{
    const struct vram_driver *drv = vram_driver();
    if (!drv->cuCtxGetCurrent || !drv->cuCtxPushCurrent_v2 || !drv->cuCtxPopCurrent_v2)
        return CUDA_ERROR_NOT_SUPPORTED;
    *ret_before = NULL;
    CUresult r = VRAM_DRV(cuCtxGetCurrent)(ret_before);
    if (r != CUDA_SUCCESS)
        return r;
    return *ret_before != ctx ? VRAM_DRV(cuCtxPushCurrent_v2)(ctx) : CUDA_SUCCESS;
}

void vram_life_leave(CUcontext ctx, CUcontext before)
{
    CUcontext popped;
    if (before == ctx || VRAM_DRV(cuCtxPopCurrent_v2)(&popped) == CUDA_SUCCESS)
        return;
    /* The program must find its own context current, even where the driver does not let go of ours in the right way. */
    if (VRAM_DRV(cuCtxPopCurrent_v2)(&popped) != CUDA_SUCCESS && vram_driver()->cuCtxSetCurrent)
        VRAM_DRV(cuCtxSetCurrent)(before);
}

static CUresult synchronise_one(CUcontext ctx)
{
    bool known = vram_life_only() == ctx; /* to be the current one, if any is */
    CUcontext before = ctx;
    if (!vram_driver()->cuCtxSynchronize)
        return CUDA_ERROR_NOT_SUPPORTED;
    for (;;) {
        CUresult r = known ? CUDA_SUCCESS : vram_life_enter(ctx, &before);
        if (r != CUDA_SUCCESS)
            return r;
        r = VRAM_DRV(cuCtxSynchronize)();
        vram_life_leave(ctx, before);
        if (!known || r != CUDA_ERROR_INVALID_CONTEXT)
            return r;
        known = false;
    }
}

CUresult vram_life_synchronise(struct vram_life *life)
{
    struct vram_life *peers[VRAM_PEERS_MAX];
    unsigned count = 0;
    bool undecided = false; /* a peer may be ending: its work cannot be waited for, so the driver's own free has to */

    if (vram_unlikely(__atomic_load_n(&life->peer_count, __ATOMIC_ACQUIRE))) {
        vram_lock(VRAM_RANK_HEAP);
        for (unsigned i = 0; i < life->peer_count; i++) {
            if (life->peers[i]->closing) {
                undecided = true;
                continue;
            }
            vram_life_pin(life->peers[i]);
            peers[count++] = life->peers[i];
        }
        vram_unlock(VRAM_RANK_HEAP);
    }
    CUresult r = synchronise_one(life->ctx);
    for (unsigned i = 0; i < count; i++) {
        CUresult peer_result = synchronise_one(peers[i]->ctx);
        if (r == CUDA_SUCCESS)
            r = peer_result;
        vram_life_unpin(peers[i]);
    }
    return r == CUDA_SUCCESS && undecided ? CUDA_ERROR_NOT_READY : r;
}

struct vram_life *vram_life_end_begin(CUcontext ctx)
{
    vram_lock(VRAM_RANK_HEAP);
    struct vram_life *life = vram_life_find(ctx);
    if (life)
        life->closing = true;
    look_for_only();
    vram_unlock(VRAM_RANK_HEAP);
    if (!life)
        return NULL;

    int saved = errno;
    unsigned n;
    atomic_fetch_add(&enders, 1);
    while ((n = atomic_load(&life->busy)) != 0)
        vram_futex_wait(&life->busy, n, VRAM_FOR_EVER);
    atomic_fetch_sub(&enders, 1);
    errno = saved;
    return life;
}

static atomic_uint decided; /* counts ends, either way: a futex */

bool vram_life_settle(CUcontext ctx)
{
    enum { TICK_NS = 10000000 };
    bool waited = false;
    for (int i = 0; i < 100 && vram_life_is_closing(ctx); i++) {
        unsigned seen = atomic_load(&decided);
        vram_unlock(VRAM_RANK_HEAP);
        vram_futex_wait(&decided, seen, TICK_NS);
        vram_lock(VRAM_RANK_HEAP);
        waited = true;
    }
    return waited && !vram_life_is_closing(ctx);
}

static void remove_peer(struct vram_life *life, const struct vram_life *peer)
{
    for (unsigned i = 0; i < life->peer_count; i++) {
        if (life->peers[i] == peer) {
            life->peers[i] = life->peers[life->peer_count - 1];
            __atomic_store_n(&life->peer_count, life->peer_count - 1, __ATOMIC_RELEASE);
            return;
        }
    }
}

/* Under HEAP. The driver has freed the context's plain blocks with it: drop ours without freeing (law 21). */
static void drop_blocks(struct vram_life *life)
{
    struct vram_account *books = vram_books(life->device);
    while (life->blocks) {
        struct vram_block *b = life->blocks;
        books->ended_all++;
        if (!vram_is_kept(b)) {
            vram_account_ended(books, b);
        }
        vram_block_withdraw(b);
        vram_meta_free(b, sizeof(*b));
    }
}

void vram_life_end(struct vram_life *life, bool gone)
{
    if (!life)
        return;
    vram_lock(VRAM_RANK_HEAP);
    if (gone) {
        struct vram_life *other, *next;
        CUcontext ctx = life->ctx;
        bool recurred = life->recurred;
        int next_device = life->next_device;
        drop_blocks(life);
        vram_holding_end_life(&vram_heap.holdings, life);
        vram_host_end_life(life);
        HASH_DELETE(hh, vram_heap.lives, life);
        vram_heap.recent = NULL;
        HASH_ITER(hh, vram_heap.lives, other, next)
            remove_peer(other, life);
        for (unsigned i = 0; i < GREEN_MAX; i++)
            if (green[i] == life->ctx)
                green[i] = NULL;
        vram_meta_free(life, sizeof(*life));
        if (recurred)
            make(ctx, next_device);
    } else {
        life->closing = life->recurred = false;
    }
    look_for_only();
    atomic_fetch_add(&decided, 1);
    vram_unlock(VRAM_RANK_HEAP);
    vram_futex_wake(&decided);
}

void vram_life_made(CUcontext ctx, CUdevice device)
{
    vram_lock(VRAM_RANK_HEAP);
    make(ctx, device); /* without host memory for it, it is known from its first allocation on */
    vram_unlock(VRAM_RANK_HEAP);
}

void vram_life_primary(CUdevice device, CUcontext ctx)
{
    if (device < 0 || device >= VRAM_DEVICES_MAX)
        return;
    vram_lock(VRAM_RANK_HEAP);
    vram_heap.primaries[device] = ctx;
    struct vram_life *life = make(ctx, device);
    if (life)
        life->primary = true;
    vram_unlock(VRAM_RANK_HEAP);
}

CUcontext vram_life_primary_of(CUdevice device)
{
    if (device < 0 || device >= VRAM_DEVICES_MAX)
        return NULL;
    vram_lock(VRAM_RANK_HEAP);
    CUcontext ctx = vram_heap.primaries[device];
    vram_unlock(VRAM_RANK_HEAP);
    return ctx;
}

void vram_life_green(CUcontext ctx)
{
    vram_lock(VRAM_RANK_HEAP);
    green[green_next++ % GREEN_MAX] = ctx;
    vram_heap.strangers = true;
    look_for_only();
    struct vram_life *life = vram_life_find(ctx);
    if (life)
        life->uncached = true;
    vram_unlock(VRAM_RANK_HEAP);
}

/* The device of a context that may not be current. No lock held. */
static int device_of(CUcontext ctx)
{
    CUdevice device = -1;
    CUcontext before;
    if (vram_life_enter(ctx, &before) != CUDA_SUCCESS)
        return -1;
    if (!vram_driver()->cuCtxGetDevice || VRAM_DRV(cuCtxGetDevice)(&device) != CUDA_SUCCESS)
        device = -1;
    vram_life_leave(ctx, before);
    return device;
}

void vram_life_peer(CUcontext accessor, CUcontext owner, bool enabled)
{
    int accessor_device = accessor ? device_of(accessor) : -1, owner_device = device_of(owner);
    vram_lock(VRAM_RANK_HEAP);
    struct vram_life *a = make(accessor, accessor_device), *o = make(owner, owner_device);
    if (a && o)
        remove_peer(o, a);
    if (enabled && a && o && o->peer_count < VRAM_PEERS_MAX) {
        o->peers[o->peer_count] = a;
        __atomic_store_n(&o->peer_count, o->peer_count + 1, __ATOMIC_RELEASE);
    } else if (enabled && o) {
        o->uncached = true; /* the driver's own free knows for whom to wait */
    } else if (enabled) {
        vram_heap.peers_lost = true;
    }
    vram_unlock(VRAM_RANK_HEAP);
}

bool vram_block_enter(struct vram_block *b)
{
    if (!vram_ledger_add(&vram_heap.ledger, b))
        return false;
    b->chunk = vram_is_small(b->capacity) ? vram_chunk_join(&vram_heap.chunks, b->addr) : NULL;
    b->life_prev = NULL;
    b->life_next = b->life->blocks;
    if (b->life_next)
        b->life_next->life_prev = b;
    b->life->blocks = b;
    vram_account_born(vram_books(b->life->device), b);
    return true;
}

void vram_block_withdraw(struct vram_block *b)
{
    vram_account_gone(vram_books(b->life->device), b);
    vram_ledger_remove(&vram_heap.ledger, b);
    vram_chunk_leave(&vram_heap.chunks, b->chunk);
    b->chunk = NULL;
    if (b->life_prev)
        b->life_prev->life_next = b->life_next;
    else
        b->life->blocks = b->life_next;
    if (b->life_next)
        b->life_next->life_prev = b->life_prev;
}

uint64_t vram_block_live_size(uint64_t addr)
{
    vram_lock(VRAM_RANK_HEAP);
    const struct vram_block *b = vram_ledger_find(&vram_heap.ledger, addr);
    uint64_t size = b && b->state == VRAM_LIVE ? b->size : 0;
    vram_unlock(VRAM_RANK_HEAP);
    return size;
}

#include "heap/heap.h"

#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"
#include "base/compiler.h"
#include "base/lock.h"
#include "base/meta.h"
#include "base/proc.h"
#include "base/say.h"
#include "config/options.h"
#include "driver/capture.h"
#include "driver/driver.h"
#include "heap/families.h"
#include "heap/fence.h"
#include "heap/host.h"
#include "heap/life.h"
#include "heap/reclaim.h"
#include "heap/view.h"
#include "heap/virtual.h"

static bool exiting; /* accessed atomically */
static bool used;    /* accessed atomically */

void vram_heap_exiting(void) { __atomic_store_n(&exiting, true, __ATOMIC_RELEASE); }
bool vram_heap_is_exiting(void) { return __atomic_load_n(&exiting, __ATOMIC_ACQUIRE); }
void vram_heap_use(void) { __atomic_store_n(&used, true, __ATOMIC_RELEASE); }
bool vram_heap_used(void) { return __atomic_load_n(&used, __ATOMIC_ACQUIRE); }

struct vram_site vram_site_here(uintptr_t caller)
{
    static VRAM_TLS uint32_t tid;
    static VRAM_TLS int tid_pid; /* a forked child's thread has another tid */
    if (vram_unlikely(tid_pid != vram_proc_pid())) {
        tid = (uint32_t)syscall(SYS_gettid);
        tid_pid = vram_proc_pid();
    }
    return (struct vram_site){vram_now_roughly(), caller, tid};
}

/* The cache may serve now. A capture is the program's business alone (law 17). */
static bool serving(void) { return vram_options->cache && !vram_capture_active(); }

/* Calls of our own on the driver may be made for the cache's sake. */
static bool caching(void) { return serving() && !vram_heap_is_exiting(); }

/* What the program asked for, and where it wants the answer. The outputs are the program's own variables: what the driver
 * writes there when it fails (0, measured) belongs to the answer. Of a plain request only `size` and `dptr` mean something. */
struct request {
    enum vram_family family;
    size_t size, width, height;
    unsigned element;
    CUdeviceptr *dptr;
    size_t *pitch;
};

/* Rows are rounded up to 512 bytes on every card that we measured; each native call confirms or refutes that for its
 * device, and only what was confirmed is served from the cache. */
static size_t row_pitch(size_t width) { return width > SIZE_MAX - 511 ? 0 : (width + 511) & ~(size_t)511; }

/* What has become ready of what was pending. */
static struct vram_block *take_complete(struct vram_life *life, const struct request *q)
{
    vram_fence_poll(life);
    vram_lock(VRAM_RANK_HEAP);
    struct vram_block *b = vram_cache_take(&life->cache, q->size, vram_options->waste);
    if (b)
        b->state = VRAM_FREEING;
    vram_unlock(VRAM_RANK_HEAP);
    return b;
}

/* A block of which nothing is ready: perhaps one has become so, or can be put behind its fence. It is then VRAM_FREEING. The
 * life is pinned. */
static struct vram_block *take_pending(struct vram_life *life, const struct request *q)
{
    if (!vram_gate_enter())
        return NULL;
    struct vram_block *b = take_complete(life, q);
    if (!b && !vram_fence_awaits_company(life, q->size)) {
        vram_fence_record(life, 1); /* an idle context is done with it at once; else, there is one later */
        b = take_complete(life, q);
        if (!b)
            b = vram_fence_take(life, q->size, vram_options->waste);
    }
    vram_gate_leave();
    return b;
}

/* Serves a request from the cache, if it can. */
static bool take_cached(CUcontext ctx, const struct request *q, struct vram_site site)
{
    CUdeviceptr addr = 0;
    vram_lock(VRAM_RANK_HEAP);
    struct vram_life *life = vram_life_of_current(ctx);
    if (life && q->family == VRAM_PITCH && !vram_books(life->device)->pitch_known)
        life = NULL;
    struct vram_block *b = life ? vram_cache_take(&life->cache, q->size, vram_options->waste) : NULL;
    if (!b && life && life->fences.oldest) {
        vram_life_pin(life);
        vram_unlock(VRAM_RANK_HEAP);
        b = take_pending(life, q);
        vram_lock(VRAM_RANK_HEAP);
        vram_life_unpin(life);
    }
    if (b) {
        struct vram_account *books = vram_books(life->device);
        VRAM_CHECK(b->state != VRAM_LIVE && b->capacity >= q->size);
        b->state = VRAM_LIVE;
        b->size = q->size;
        b->family = q->family;
        b->told = false;
        b->born = site;
        vram_account_reused(books, b);
        vram_account_served(books, b, true);
        addr = b->addr;
    }
    vram_unlock(VRAM_RANK_HEAP);
    if (!b)
        return false;
    *q->dptr = addr;
    if (q->family == VRAM_PITCH)
        *q->pitch = row_pitch(q->width);
    return true;
}

/* The driver gave an address that we believe to hold already: its context ended without our seeing it. The driver is
 * right. Under HEAP. */
static void forget_stale(uint64_t addr)
{
    struct vram_block *b = vram_ledger_find(&vram_heap.ledger, addr);
    if (!b || b->state == VRAM_FREEING)
        return;
    struct vram_account *books = vram_books(b->life->device);
    books->ended_all++;
    if (b->state == VRAM_CACHED) {
        vram_cache_remove(&b->life->cache, b);
    } else if (b->state == VRAM_PENDING) {
        vram_fence_drop(b);
    } else {
        vram_account_ended(books, b);
    }
    vram_block_withdraw(b);
    vram_meta_free(b, sizeof(*b));
}

/* Enters what the driver gave (law 16: after it came back). Without host memory for the entry, or a context to enter it for,
 * the block is simply unknown to us, and its free goes to the driver like any other. */
static void enter_new(CUcontext ctx, CUdeviceptr addr, size_t size, enum vram_family family, struct vram_site site)
{
    struct vram_block *b = vram_meta_alloc(sizeof(*b));
    bool entered = false;
    int device = -1;
    vram_lock(VRAM_RANK_HEAP);
    bool ended = vram_life_settle(ctx) && !vram_life_find(ctx); /* meanwhile, and the block with its context */
    struct vram_life *life = b && !ended ? vram_life_of_current(ctx) : NULL;
    if (life || !ctx)
        forget_stale(addr);
    if (life) {
        struct vram_account *books = vram_books(life->device);
        *b = (struct vram_block){
            .addr = addr, .capacity = size, .size = size, .life = life, .state = VRAM_LIVE, .family = family, .born = site};
        if (!vram_ledger_find(&vram_heap.ledger, addr) && vram_block_enter(b)) {
            vram_account_served(books, b, false);
            device = life->device;
            entered = true;
        }
    }
    ended |= b && !life && vram_life_is_closing(ctx);
    vram_unlock(VRAM_RANK_HEAP);
    vram_heap_use();
    if (entered)
        vram_view_first(device);
    if (!entered) {
        static atomic_bool told;
        const char *lacking = !b || life ? "no host memory" : "nothing is known of its context";
        vram_meta_free(b, sizeof(*b));
        if (!ended && !atomic_exchange(&told, true)) /* else it was destroyed under the program: its own race */
            vram_say("cannot account for an allocation (%s); it works, but is not cached and not reported", lacking);
    }
}

static void learn_pitch(CUcontext ctx, size_t width, size_t pitch)
{
    vram_lock(VRAM_RANK_HEAP);
    struct vram_life *life = vram_life_of_current(ctx);
    if (life) {
        struct vram_account *books = vram_books(life->device);
        books->pitch_foreign |= pitch != row_pitch(width);
        books->pitch_known = !books->pitch_foreign;
    }
    vram_unlock(VRAM_RANK_HEAP);
}

static CUresult ask_driver(const struct request *q)
{
    if (q->family == VRAM_PLAIN)
        return VRAM_DRV(cuMemAlloc_v2)(q->dptr, q->size);
    return VRAM_DRV(cuMemAllocPitch_v2)(q->dptr, q->pitch, q->width, q->height, q->element);
}

/* The driver's answer, on its way to the program. */
static CUresult answered(const struct request *q, CUcontext ctx, struct vram_site site, CUresult r)
{
    if (r != CUDA_SUCCESS)
        return r;
    if (q->family == VRAM_PITCH)
        learn_pitch(ctx, q->width, *q->pitch);
    enter_new(ctx, *q->dptr, q->family == VRAM_PITCH ? *q->pitch * q->height : q->size, q->family, site);
    return CUDA_SUCCESS;
}

/* Nothing kept serves the request. Where one more block would be more than VRAMSHIM_SLACK allows, a pending one is waited for,
 * if there is one that fits: the driver's free, which would have to make room else, waits for all of them. True: the request is
 * served. False: there is room for the driver's block. */
static bool await_or_make_room(CUcontext ctx, const struct request *q, struct vram_site site)
{
    bool safe;
    do {
        vram_lock(VRAM_RANK_HEAP);
        struct vram_life *life = vram_life_find(ctx);
        bool beyond = life && vram_reclaim_is_beyond_slack(q->size, life->device);
        if (!beyond) {
            vram_unlock(VRAM_RANK_HEAP);
            return false;
        }
        int device = life->device;
        vram_life_pin(life);
        vram_unlock(VRAM_RANK_HEAP);
        safe = vram_gate_enter();
        if (safe) {
            safe = vram_fence_await(life, q->size, vram_options->waste);
            vram_gate_leave();
        }
        if (!safe)
            vram_reclaim_within_slack(q->size, device);
        vram_life_unpin(life);
        if (safe && take_cached(ctx, q, site))
            return true;
    } while (safe); /* somebody else was quicker */
    return false;
}

static CUresult allocate(const struct request *q, CUcontext ctx, bool failed, uintptr_t caller)
{
    struct vram_site site = vram_site_here(caller);
    if (serving() && !failed && take_cached(ctx, q, site))
        return CUDA_SUCCESS;
    if (caching() && await_or_make_room(ctx, q, site))
        return CUDA_SUCCESS;
    struct vram_ladder ladder = vram_ladder(q->size, VRAM_EVERY_DEVICE);
    CUresult r = ask_driver(q);
    /* In a capture that allows allocations nothing can be given back, but a kept block needs no call of ours. */
    if (vram_unlikely(r == CUDA_ERROR_OUT_OF_MEMORY) && vram_options->cache && vram_capture_active() &&
        take_cached(ctx, q, site))
        return CUDA_SUCCESS;
    if (vram_unlikely(r == CUDA_ERROR_OUT_OF_MEMORY) && caching()) {
        /* Natively each free had waited: what is pending counts as free memory, and may be the block that is wanted. */
        vram_fence_settle_device(VRAM_EVERY_DEVICE);
        if (take_cached(ctx, q, site))
            return CUDA_SUCCESS;
        while (r == CUDA_ERROR_OUT_OF_MEMORY && vram_ladder_climb(&ladder, ctx))
            r = ask_driver(q);
        vram_ladder_end(&ladder, r);
    }
    return answered(q, ctx, site, r);
}

/* The current context, and whether it has failed; where that is not asked, because nothing can be served, it counts as failed. */
static CUcontext here(bool *ret_failed)
{
    *ret_failed = true;
    return serving() ? vram_life_here(ret_failed) : vram_life_context();
}

/* A bad call, no context, or a driver that does not say which: its own answer. Memory it gives only in a context, which it may
 * be able to name by then. */
static CUresult allocate_unseen(const struct request *q, uintptr_t caller)
{
    CUresult r = ask_driver(q);
    if (r == CUDA_ERROR_OUT_OF_MEMORY && caching() && vram_reclaim_all().blocks) /* not natively, beside what we keep */
        r = ask_driver(q);
    return answered(q, r == CUDA_SUCCESS ? vram_life_context() : NULL, vram_site_here(caller), r);
}

CUresult vram_heap_alloc(CUdeviceptr *dptr, size_t size, uintptr_t caller)
{
    if (!vram_driver()->cuMemAlloc_v2)
        return CUDA_ERROR_NOT_INITIALIZED;
    const struct request q = {.family = VRAM_PLAIN, .size = size, .dptr = dptr};
    bool failed = true;
    CUcontext ctx = dptr && size ? here(&failed) : NULL;
    return ctx ? allocate(&q, ctx, failed, caller) : allocate_unseen(&q, caller);
}

CUresult vram_heap_alloc_pitch(CUdeviceptr *dptr, size_t *pitch, size_t width, size_t height, unsigned element,
                               uintptr_t caller)
{
    size_t size = 0;
    if (!vram_driver()->cuMemAllocPitch_v2)
        return CUDA_ERROR_NOT_INITIALIZED;
    bool good = dptr && pitch && width && height && (element == 4 || element == 8 || element == 16) &&
                row_pitch(width) && !__builtin_mul_overflow(row_pitch(width), height, &size);
    const struct request q = {VRAM_PITCH, size, width, height, element, dptr, pitch};
    bool failed = true;
    CUcontext ctx = good ? here(&failed) : NULL;
    return ctx ? allocate(&q, ctx, failed, caller) : allocate_unseen(&q, caller);
}

/* A second free: kept from the driver, which owns the block in our cache (laws 8, 9). Under HEAP. */
static void note_double_free(struct vram_block *b, struct vram_site site)
{
    vram_books(b->life->device)->double_frees++;
    if (b->told || vram_heap.double_frees_kept == VRAM_DOUBLE_FREES_MAX)
        return;
    b->told = true;
    vram_heap.double_frees[vram_heap.double_frees_kept++] =
        (struct vram_double_free){b->addr, b->size, b->freed, site};
}

/* What may be kept when it is freed, if there is room: nobody else knows the memory (law 19). */
static bool may_keep(const struct vram_block *b) { return !b->identity_left && !b->life->uncached; }

static bool room_in_cache(const struct vram_block *b)
{
    const struct vram_account *books = vram_books(b->life->device);
    return books->cached_bytes + b->capacity <= vram_options->cache_max;
}

/* A freed block becomes ours, if there is room. Under HEAP. */
static bool enter_cache(struct vram_block *b, enum vram_free_mode mode)
{
    struct vram_account *books = vram_books(b->life->device);
    if (!room_in_cache(b))
        return false;
    books->frees++;
    vram_account_cached(books, b);
    if (mode == VRAM_FREE_SYNC) {
        b->state = VRAM_CACHED;
        vram_cache_put(&b->life->cache, b); /* its work is done: now it may be seen (law 16) */
    } else {
        vram_fence_add(b);
    }
    return true;
}

/* The driver refused the fence that should have covered the block: back to how it was before this free. Under HEAP. False: it
 * is safe by another one's fence, or somebody's already. */
static bool leave_pending(struct vram_block *b, uint64_t fence)
{
    if (b->state != VRAM_PENDING || b->fence != fence)
        return false;
    struct vram_account *books = vram_books(b->life->device);
    vram_fence_drop(b);
    b->state = VRAM_FREEING;
    books->frees--;
    vram_account_reused(books, b);
    return true;
}

/* Keeps a block that is being freed, if that is possible: sees to it that it will be safe to hand out, and puts it where it
 * waits for that. False: the caller's own native free decides, because a capture began, because the cache is full, or because
 * the driver has something to say. */
static bool keep(struct vram_block *b)
{
    struct vram_life *life = b->life;
    if (!vram_gate_enter())
        return false;
    enum vram_free_mode mode = vram_fence_mode(life);
    bool kept = mode == VRAM_FREE_SYNC ? vram_life_synchronise(life) == CUDA_SUCCESS : !vram_life_failed_in(life);
    /* The current context's word comes first, whose block it ever is (measured); it may be one that has ended. */
    kept = kept && !vram_life_failed();
    if (kept) {
        vram_lock(VRAM_RANK_HEAP);
        kept = enter_cache(b, mode);
        uint64_t fence = b->fence;
        vram_unlock(VRAM_RANK_HEAP);
        if (kept && mode != VRAM_FREE_SYNC && vram_fence_record(life, VRAM_FENCE_EVERY) != CUDA_SUCCESS) {
            vram_lock(VRAM_RANK_HEAP);
            kept = !leave_pending(b, fence);
            vram_unlock(VRAM_RANK_HEAP);
        }
    }
    vram_gate_leave();
    return kept;
}

/* The block leaves the ledger because the driver is about to get it (law 16). It is FREEING and its life pinned. */
static void leave_ledger(struct vram_block *b)
{
    vram_lock(VRAM_RANK_HEAP);
    vram_block_withdraw(b);
    vram_unlock(VRAM_RANK_HEAP);
}

/* The driver's answer to the free of a block that left the ledger: gone, or back to the program if the driver refused. `lost`:
 * the driver does not know it, because another thread's second free of it was quicker. */
static CUresult free_answered(struct vram_block *b, CUresult r, bool lost)
{
    vram_lock(VRAM_RANK_HEAP);
    struct vram_account *books = vram_books(b->life->device);
    /* On the way out the driver may be gone already; that is not the program's leak. */
    if (r == CUDA_SUCCESS || r == CUDA_ERROR_DEINITIALIZED) {
        books->frees++;
        books->driver_frees++;
        vram_unlock(VRAM_RANK_HEAP);
        vram_meta_free(b, sizeof(*b));
        return r;
    }
    b->state = VRAM_LIVE;
    bool kept = !lost && !vram_ledger_find(&vram_heap.ledger, b->addr) && vram_block_enter(b);
    books->ended_all += !kept;
    vram_unlock(VRAM_RANK_HEAP);
    if (!kept)
        vram_meta_free(b, sizeof(*b));
    return r;
}

/* The driver's free of a block that we know, with its answer. */
static CUresult free_native(struct vram_block *b)
{
    leave_ledger(b);
    CUresult r = VRAM_DRV(cuMemFree_v2)(b->addr);
    return free_answered(b, r, r == CUDA_ERROR_INVALID_VALUE);
}

/* A free begins: the block that it means, now FREEING and its life pinned. NULL: it means none of the program's; then
 * *ret_forward is what the driver can be asked about: for what is in the cache, an address as unknown to it as that one
 * natively would be. */
static struct vram_block *begin_free(CUdeviceptr dptr, uintptr_t caller, CUdeviceptr *ret_forward)
{
    struct vram_site site = vram_site_here(caller);
    vram_lock(VRAM_RANK_HEAP);
    struct vram_block *b = vram_ledger_find(&vram_heap.ledger, dptr);
    if (b && vram_unlikely(b->life->closing)) {
        vram_life_settle(b->life->ctx); /* gives the lock up */
        b = vram_ledger_find(&vram_heap.ledger, dptr);
    }
    *ret_forward = dptr;
    if (!b)
        b = vram_reclaim_find(dptr);
    if (!b || (b->state == VRAM_LIVE && b->life->closing)) { /* unknown: the driver's word, verbatim (law 8) */
        b = NULL;
    } else if (b->state != VRAM_LIVE) {
        note_double_free(b, site);
        b = NULL;
        *ret_forward = VRAM_NEVER_ALLOCATED;
    } else {
        b->state = VRAM_FREEING;
        b->freed = site;
        vram_life_pin(b->life);
    }
    vram_unlock(VRAM_RANK_HEAP);
    return b;
}

/* Where frees do not wait, nearly every one is of a block of the current context, and is kept at once: one look at the driver,
 * one at the books. NULL and *ret_kept false: nothing was done. Not NULL: the driver refuses the fence, and the block is
 * VRAM_FREEING and its life pinned, as after begin_free. */
static struct vram_block *keep_at_once(CUdeviceptr dptr, uintptr_t caller, bool *ret_kept)
{
    struct vram_life *fence_due = NULL;
    struct vram_block *refused = NULL;
    uint64_t fence = 0;
    bool failed;
    *ret_kept = false;
    if (vram_options->free_mode == VRAM_FREE_SYNC || !caching())
        return NULL;
    struct vram_site site = vram_site_here(caller);
    CUcontext ctx = vram_life_here(&failed);
    if (!ctx || failed)
        return NULL;
    vram_lock(VRAM_RANK_HEAP);
    struct vram_block *b = vram_ledger_find(&vram_heap.ledger, dptr);
    if (b && b->state == VRAM_LIVE && b->life->ctx == ctx && !b->life->closing && vram_fence_is_free_of_waits(b->life) &&
        may_keep(b)) {
        b->state = VRAM_FREEING;
        b->freed = site;
        if (enter_cache(b, vram_options->free_mode)) {
            *ret_kept = true;
            fence = b->fence;
            if (b->life->fences.frees >= VRAM_FENCE_EVERY)
                vram_life_pin(fence_due = b->life);
        } else {
            b->state = VRAM_LIVE;
        }
    }
    vram_unlock(VRAM_RANK_HEAP);
    if (!fence_due)
        return NULL;
    if (vram_gate_enter()) { /* else a capture has begun, and the fence is for later */
        if (vram_fence_record(fence_due, VRAM_FENCE_EVERY) != CUDA_SUCCESS) {
            vram_lock(VRAM_RANK_HEAP);
            refused = leave_pending(b, fence) ? b : NULL;
            vram_unlock(VRAM_RANK_HEAP);
        }
        vram_gate_leave();
    }
    if (!refused)
        vram_life_unpin(fence_due);
    *ret_kept = !refused;
    return refused;
}

/* None of our blocks: of another family, or unknown. The driver's word, verbatim (law 8). */
static CUresult free_other(CUdeviceptr dptr)
{
    struct vram_leaving leaving = vram_family_leave((struct vram_key){VRAM_AT_ADDRESS, dptr});
    CUresult r = VRAM_DRV(cuMemFree_v2)(dptr);
    vram_family_left(&leaving, r);
    return r;
}

CUresult vram_heap_free(CUdeviceptr dptr, uintptr_t caller)
{
    if (!vram_driver()->cuMemFree_v2)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!dptr)
        return VRAM_DRV(cuMemFree_v2)(dptr);

    bool kept;
    CUdeviceptr forward = 0;
    struct vram_block *refused = keep_at_once(dptr, caller, &kept);
    if (kept)
        return CUDA_SUCCESS;
    struct vram_block *b = refused ? refused : begin_free(dptr, caller, &forward);
    if (!b && forward == dptr)
        return free_other(dptr);
    if (!b) /* a second free is answered here, unless even a bad one would be met by something else */
        return vram_capture_active() || vram_life_failed() ? VRAM_DRV(cuMemFree_v2)(forward) : CUDA_ERROR_INVALID_VALUE;

    struct vram_life *life = b->life;
    kept = !refused && caching() && may_keep(b) && keep(b);
    /* Not to be kept, or its work failed: the program gets what the driver says of this free (law 13). */
    CUresult r = kept ? CUDA_SUCCESS : free_native(b);
    vram_life_unpin(life);
    return r;
}

CUresult vram_heap_free_async(CUdeviceptr dptr, CUstream stream, __typeof__(&cuMemFreeAsync) real, uintptr_t caller)
{
    CUdeviceptr forward;
    struct vram_block *b = begin_free(dptr, caller, &forward);
    if (!b) {
        struct vram_leaving leaving = vram_family_leave((struct vram_key){VRAM_AT_ADDRESS, forward});
        CUresult r = real(forward, stream);
        vram_family_left(&leaving, r);
        return r;
    }
    struct vram_life *life = b->life;
    leave_ledger(b);
    CUresult r = free_answered(b, real(dptr, stream), false);
    vram_life_unpin(life);
    return r;
}

/* The device of the current context; false: there is none. */
static bool device_here(CUdevice *ret_device)
{
    CUcontext ctx = vram_life_context();
    vram_lock(VRAM_RANK_HEAP);
    const struct vram_life *life = ctx ? vram_life_find(ctx) : NULL;
    bool known = life && life->device >= 0;
    if (known)
        *ret_device = life->device;
    vram_unlock(VRAM_RANK_HEAP);
    /* Nothing was allocated here, but perhaps in another context of the device. */
    return known || (ctx && vram_driver()->cuCtxGetDevice && VRAM_DRV(cuCtxGetDevice)(ret_device) == CUDA_SUCCESS);
}

CUresult vram_heap_info(size_t *free, size_t *total)
{
    enum { TRIES = 8, AWAIT_NS = 20000000 };
    CUdevice device;
    bool moved = true;
    CUresult r = CUDA_SUCCESS;
    if (!vram_driver()->cuMemGetInfo_v2)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (!free || !vram_heap_used() || !device_here(&device))
        return VRAM_DRV(cuMemGetInfo_v2)(free, total);

    /* What we keep would natively be free (law 12): counted in pages, as the driver does. What is on its way to the driver must
     * not count twice, or not at all. */
    vram_reclaim_hold();
    for (int i = 0; i < TRIES && moved && r == CUDA_SUCCESS; i++) {
        struct vram_traffic before = vram_reclaim_await(device, AWAIT_NS);
        r = VRAM_DRV(cuMemGetInfo_v2)(free, total);
        vram_lock(VRAM_RANK_HEAP);
        const struct vram_account *books = vram_books(device);
        struct vram_traffic after = vram_traffic(device);
        moved = before.departed != after.departed || before.arrived != after.arrived;
        if (r == CUDA_SUCCESS)
            *free += (books->cached_pages + books->returning_pages) << VRAM_PAGE_SHIFT;
        if (r == CUDA_SUCCESS)
            *free += books->virtual_kept;
        vram_unlock(VRAM_RANK_HEAP);
    }
    vram_reclaim_release();
    if (r == CUDA_SUCCESS && total && *free > *total)
        *free = *total;
    return r;
}

/* Finds the block that contains the address: the driver knows the base of every allocation, ours are all its own. The
 * attribute needs no current context, but not every driver has it. No lock held. Returns the base, or 0. */
static CUdeviceptr base_of(CUdeviceptr address)
{
    CUdeviceptr base = 0;
    size_t size;
    const struct vram_driver *drv = vram_driver();
    if (drv->cuPointerGetAttribute &&
        VRAM_DRV(cuPointerGetAttribute)(&base, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address) == CUDA_SUCCESS && base)
        return base;
    if (!drv->cuMemGetAddressRange_v2 || VRAM_DRV(cuMemGetAddressRange_v2)(&base, &size, address) != CUDA_SUCCESS)
        return 0;
    return base;
}

enum vram_view vram_heap_view(CUdeviceptr address, CUdeviceptr *ret_base, size_t *ret_size)
{
    enum vram_view view = VRAM_VIEW_UNKNOWN;
    CUdeviceptr base = address;
    for (int attempt = 0; attempt < 2; attempt++) {
        vram_lock(VRAM_RANK_HEAP);
        const struct vram_block *b = vram_ledger_find(&vram_heap.ledger, base);
        if (!b && attempt == 1)
            b = vram_reclaim_find(base);
        if (b) {
            view = vram_is_kept(b) || address - base >= b->size ? VRAM_VIEW_NOTHING : VRAM_VIEW_LIVE;
            *ret_base = base;
            *ret_size = b->size;
        }
        if (!b && (vram_host_is_kept(base) || (vram_virtual_on() && vram_virtual_is_spare(address)))) {
            view = VRAM_VIEW_NOTHING;
            *ret_base = base;
            *ret_size = 0;
        }
        vram_unlock(VRAM_RANK_HEAP);
        if (view != VRAM_VIEW_UNKNOWN || attempt == 1 || !vram_heap_used() || (base = base_of(address)) == 0)
            break;
    }
    return view;
}

bool vram_heap_host_is_kept(const void *p)
{
    CUdeviceptr base;
    size_t size;
    return vram_options->host_cache &&
           vram_heap_view((uintptr_t)p, &base, &size) == VRAM_VIEW_NOTHING;
}

/* Of pinned host memory or of virtual memory, if that is what it is. */
static void other_identity_left(CUdeviceptr address)
{
    if (vram_virtual_on())
        vram_virtual_shared_at(address);
    if (!vram_options->host_cache)
        return;
    CUdeviceptr base = base_of(address);
    if (!base)
        base = address;
    vram_lock(VRAM_RANK_HEAP);
    vram_host_identity_left(base);
    vram_unlock(VRAM_RANK_HEAP);
}

void vram_heap_identity_left(CUdeviceptr address)
{
    CUdeviceptr base;
    size_t size;
    if (vram_heap_view(address, &base, &size) != VRAM_VIEW_LIVE) {
        other_identity_left(address);
        return;
    }
    vram_lock(VRAM_RANK_HEAP);
    struct vram_block *b = vram_ledger_find(&vram_heap.ledger, base);
    if (b)
        b->identity_left = true;
    vram_unlock(VRAM_RANK_HEAP);
}

/* Waits for the life's work unless a capture forbids it. Pinned here, under HEAP before; gives it up and takes it again. */
static void settle(struct vram_life *life)
{
    vram_life_pin(life);
    vram_unlock(VRAM_RANK_HEAP);
    if (vram_gate_enter()) {
        vram_fence_settle(life);
        vram_gate_leave();
    }
    vram_lock(VRAM_RANK_HEAP);
    vram_life_unpin(life);
}

void vram_heap_settle_block(CUdeviceptr address)
{
    CUdeviceptr base;
    size_t size;
    if (vram_options->free_mode != VRAM_FREE_ORDERED || vram_heap_view(address, &base, &size) != VRAM_VIEW_LIVE)
        return;
    vram_lock(VRAM_RANK_HEAP);
    struct vram_block *b = vram_ledger_find(&vram_heap.ledger, base);
    if (b && vram_fence_is_behind(b) && !b->life->closing)
        settle(b->life);
    vram_unlock(VRAM_RANK_HEAP);
}

void vram_heap_settle_context(CUcontext ctx)
{
    if (vram_options->free_mode != VRAM_FREE_ORDERED)
        return;
    vram_lock(VRAM_RANK_HEAP);
    struct vram_life *life = vram_life_find(ctx);
    if (life)
        settle(life);
    vram_unlock(VRAM_RANK_HEAP);
}

bool vram_heap_summarise(struct vram_heap_summary *ret_summary)
{
    bool locked = vram_lock_at_exit(VRAM_RANK_HEAP);
    for (int d = 0; d < VRAM_DEVICES_MAX; d++)
        ret_summary->devices[d] = vram_heap.devices[d];
    for (unsigned i = 0; i < VRAM_DOUBLE_FREES_MAX; i++)
        ret_summary->double_frees[i] = vram_heap.double_frees[i];
    ret_summary->double_frees_kept = vram_heap.double_frees_kept;
    const struct vram_host_cache *host = &vram_heap.host;
    const struct vram_virtual *virtual_memory = &vram_heap.virtual_memory;
    ret_summary->host = (struct vram_kept){host->bytes, host->hits, host->asked};
    ret_summary->virtual_memory = (struct vram_kept){0, virtual_memory->hits, virtual_memory->asked};
    for (int d = 0; d < VRAM_DEVICES_MAX; d++)
        ret_summary->virtual_memory.bytes += vram_heap.devices[d].virtual_kept;
    if (locked)
        vram_unlock(VRAM_RANK_HEAP);
    return locked;
}

/* Insertion into the few largest; of equal sizes, the oldest first. */
static bool ranks_before(const struct vram_held *a, const struct vram_held *b)
{
    return a->size > b->size || (a->size == b->size && a->born.time < b->born.time);
}

static void rank(struct vram_held *held, unsigned *n, unsigned max, struct vram_held one)
{
    unsigned at = *n;
    while (at > 0 && ranks_before(&one, &held[at - 1]))
        at--;
    if (at == max)
        return;
    for (unsigned i = *n < max ? *n : max - 1; i > at; i--)
        held[i] = held[i - 1];
    held[at] = one;
    *n += *n < max;
}

/* Whether it is the device's own memory, and seen for the first time: a holding has several names. */
static bool is_next(struct vram_holding *h, const struct vram_account *books, uint64_t walk)
{
    if (h->visited == walk || h->figures != &books->figures[h->family] || !h->counted)
        return false;
    h->visited = walk;
    return vram_family_traits[h->family].where == VRAM_WHERE_DEVICE;
}

unsigned vram_heap_largest(int device, struct vram_held *ret_held, unsigned max)
{
    unsigned n = 0;
    if (max == 0 || !vram_lock_at_exit(VRAM_RANK_HEAP))
        return 0;
    for (const struct vram_block *b = vram_ledger_next(&vram_heap.ledger, NULL); b; b = vram_ledger_next(&vram_heap.ledger, b))
        if (!vram_is_kept(b) && b->life->device == device)
            rank(ret_held, &n, max, (struct vram_held){b->family, b->addr, b->size, b->born});
    uint64_t walk = ++vram_heap.walks;
    for (const struct vram_name *name = vram_heap.holdings.names; name; name = name->hh.next)
        if (is_next(name->holding, vram_books(device), walk))
            rank(ret_held, &n, max,
                 (struct vram_held){name->holding->family, name->key.value, name->holding->bytes, name->holding->born});
    vram_unlock(VRAM_RANK_HEAP);
    return n;
}

void vram_heap_forget(void)
{
    vram_heap = (struct vram_heap){0};
    __atomic_store_n(&used, false, __ATOMIC_RELEASE);
    vram_meta_forget();
}

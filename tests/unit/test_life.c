/* heap/life.h: a cache belongs to the life of a context, which ends when nobody has it pinned. */
#include "heap/life.h"

#include <criterion/criterion.h>
#include <pthread.h>
#include <time.h>

#include "base/lock.h"
#include "driver/driver.h"
#include "heap/heap.h"
#include "heap/reclaim.h"
#include "heard.h"
#include "steps.h"

static void end(CUcontext ctx, bool gone)
{
    struct vram_life *life = vram_life_end_begin(ctx);
    if (gone)
        fake_end(ctx);
    vram_life_end(life, gone);
}

static void moment(void) { nanosleep(&(const struct timespec){0, 1000000}, NULL); }

Test(life, a_recurring_handle_is_another_life)
{
    FAKE_START();
    CUdeviceptr cached = get(4 * MiB), live = get(6 * MiB);
    give_back(cached);
    end(&fake_a, true);
    cr_assert_null(block(cached));
    cr_assert_null(block(live));
    cr_assert_eq(fake.cuMemFree_v2.calls, 0, "the driver has freed them with the context");
    cr_assert_eq(vram_books(0)->ended_all, 2);
    cr_assert_eq(vram_books(0)->ended_blocks, 1);
    cr_assert_eq(vram_books(0)->ended_bytes, 6 * MiB);
    get(4 * MiB);
    cr_assert_eq(fake.cuMemAlloc_v2.calls, 3, "nothing of the life before is served");
    cr_assert_eq(vram_heap_free(live, 0), CUDA_ERROR_INVALID_VALUE);
    cr_assert_eq(fake.cuMemFree_v2.calls, 1, "that is the driver's word");
    invariants();
}

Test(life, a_context_that_does_not_end_goes_on)
{
    FAKE_START();
    CUdeviceptr p = get(4 * MiB);
    give_back(p);
    struct vram_life *life = vram_life_end_begin(&fake_a);
    cr_assert_null(life_of(&fake_a));
    vram_life_end(life, false);
    cr_assert_eq(life_of(&fake_a), life);
    cr_assert_eq(get(4 * MiB), p);
    invariants();
}

Test(life, what_never_allocated_has_no_life)
{
    FAKE_START();
    cr_assert_null(vram_life_end_begin(&fake_a));
    cr_assert_null(vram_life_end_begin(NULL));
    vram_life_end(NULL, true);
}

Test(life, other_contexts_are_not_touched)
{
    FAKE_START();
    CUdeviceptr p = get(4 * MiB);
    give_back(p);
    fake_use(&fake_b);
    get(4 * MiB);
    end(&fake_b, true);
    fake_use(&fake_a);
    cr_assert_eq(get(4 * MiB), p);
    invariants();
}

static pthread_t ender;
static atomic_bool ended;
static unsigned pins_at_end;

static void *end_it(void *unused)
{
    struct vram_life *life = vram_life_end_begin(&fake_a);
    pins_at_end = life->busy;
    atomic_store(&ended, true);
    fake_end(&fake_a);
    vram_life_end(life, true);
    return unused;
}

static bool is_closing(CUcontext ctx)
{
    vram_lock(VRAM_RANK_HEAP);
    bool closing = vram_life_is_closing(ctx);
    vram_unlock(VRAM_RANK_HEAP);
    return closing;
}

static void begin_to_end(void)
{
    pthread_create(&ender, NULL, end_it, NULL);
    while (!is_closing(&fake_a))
        moment();
    /* It has begun, and must not get further however long it is given. */
    for (int i = 0; i < 50 && !atomic_load(&ended); i++)
        moment();
    cr_assert_not(atomic_load(&ended));
}

Test(life, an_end_waits_for_who_has_it_pinned, .timeout = 60)
{
    FAKE_START();
    CUdeviceptr p = get(4 * MiB);
    fake.cuCtxSynchronize.before = begin_to_end; /* in the middle of a free */
    give_back(p);
    pthread_join(ender, NULL);
    cr_assert_eq(pins_at_end, 0);
    cr_assert_null(vram_heap.lives);
    cr_assert_eq(vram_books(0)->held_blocks, 0);
    invariants();
}

static bool gone;

static void *decide(void *life)
{
    vram_life_end(life, gone); /* takes HEAP, so it comes to it when the other gives that up */
    return NULL;
}

static bool settle_while(bool really_gone)
{
    pthread_t decider;
    gone = really_gone;
    struct vram_life *life = vram_life_end_begin(&fake_a);
    vram_lock(VRAM_RANK_HEAP);
    pthread_create(&decider, NULL, decide, life);
    bool settled = vram_life_settle(&fake_a);
    vram_unlock(VRAM_RANK_HEAP);
    pthread_join(decider, NULL);
    return settled;
}

Test(life, settling_waits_for_the_decision, .timeout = 60)
{
    FAKE_START();
    get(4 * MiB);
    cr_assert(settle_while(false));
    cr_assert_not_null(life_of(&fake_a));
    cr_assert(settle_while(true));
    cr_assert_null(vram_heap.lives);
}

Test(life, settling_gives_up)
{
    FAKE_START();
    get(4 * MiB);
    vram_lock(VRAM_RANK_HEAP);
    cr_assert_not(vram_life_settle(&fake_a), "nothing was closing");
    vram_unlock(VRAM_RANK_HEAP);
    vram_life_end_begin(&fake_a);
    vram_lock(VRAM_RANK_HEAP);
    cr_assert_not(vram_life_settle(&fake_a), "nobody decides");
    vram_unlock(VRAM_RANK_HEAP);
}

static void *end_a_little_later(void *life)
{
    for (int i = 0; i < 30 && !fake.cuMemFree_v2.calls; i++)
        moment();
    vram_life_end(life, gone);
    return NULL;
}

static CUresult free_while(CUdeviceptr p, bool really_gone)
{
    pthread_t decider;
    gone = really_gone;
    struct vram_life *life = vram_life_end_begin(&fake_a);
    if (gone)
        fake_end(&fake_a);
    pthread_create(&decider, NULL, end_a_little_later, life);
    CUresult r = vram_heap_free(p, 0);
    pthread_join(decider, NULL);
    return r;
}

Test(life, a_free_waits_for_the_decision, .timeout = 60)
{
    FAKE_START();
    CUdeviceptr p = get(4 * MiB), q = get(4 * MiB);
    cr_assert_eq(free_while(p, false), CUDA_SUCCESS);
    cr_assert_eq(block(p)->state, VRAM_CACHED);
    cr_assert_eq(fake.cuMemFree_v2.calls, 0);
    invariants();
    cr_assert_eq(free_while(q, true), CUDA_ERROR_INVALID_VALUE, "the driver's word: it has freed it");
    cr_assert_eq(fake.cuMemFree_v2.calls, 1);
    invariants();
}

static void *allocate(void *unused)
{
    fake_use(&fake_a);
    get(4 * MiB);
    return unused;
}

/* Whether the driver gave the block to the old context or a new one, nobody knows before it is decided. */
Test(life, an_allocation_beside_the_end_is_entered_when_that_is_decided, .timeout = 60)
{
    pthread_t thread;
    FAKE_START();
    give_back(get(4 * MiB));
    struct vram_life *life = vram_life_end_begin(&fake_a);
    pthread_create(&thread, NULL, allocate, NULL);
    while (fake.cuMemAlloc_v2.calls < 2)
        moment();
    cr_assert_eq(vram_books(0)->driver_allocs, 1);
    vram_life_end(life, false);
    pthread_join(thread, NULL);
    cr_assert_eq(vram_books(0)->driver_allocs, 2);
    cr_assert_eq(vram_books(0)->hits, 0, "an ending cache serves nobody");
    invariants();
}

Test(life, an_ending_life_gives_nothing_back)
{
    FAKE_START();
    give_back(get(4 * MiB));
    struct vram_life *life = vram_life_end_begin(&fake_a);
    cr_assert_eq(vram_reclaim_all().blocks, 0);
    vram_life_end(life, false);
    cr_assert_eq(vram_reclaim_all().blocks, 1);
    invariants();
}

Test(life, a_block_is_freed_in_its_own_context)
{
    FAKE_START();
    CUdeviceptr p = get(4 * MiB), q = get(4 * MiB);
    fake_use(&fake_b);
    give_back(p);
    cr_assert_eq(fake_a.waited_for, 1);
    cr_assert_eq(fake_b.waited_for, 0);
    cr_assert_eq(fake_current(), &fake_b);
    fake_use(NULL);
    give_back(q);
    cr_assert_eq(block(q)->state, VRAM_CACHED);
    cr_assert_null(fake_current());
    invariants();
}

Test(life, the_programs_context_is_current_again_whatever_the_driver_does)
{
    CUcontext before;
    FAKE_START();
    fake_use(&fake_b);
    cr_assert_eq(vram_life_enter(&fake_a, &before), CUDA_SUCCESS);
    cr_assert_eq(fake_current(), &fake_a);
    fake.cuCtxPopCurrent_v2.refuse = CUDA_ERROR_UNKNOWN;
    vram_life_leave(&fake_a, before);
    cr_assert_eq(fake_current(), &fake_b);
    unsigned pushes = fake.cuCtxPushCurrent_v2.calls;
    cr_assert_eq(vram_life_enter(&fake_b, &before), CUDA_SUCCESS);
    vram_life_leave(&fake_b, before);
    cr_assert_eq(fake.cuCtxPushCurrent_v2.calls, pushes, "it was current already");
    fake.cuCtxPushCurrent_v2.refuse = CUDA_ERROR_INVALID_CONTEXT;
    cr_assert_eq(vram_life_enter(&fake_a, &before), CUDA_ERROR_INVALID_CONTEXT);
    cr_assert_eq(fake_current(), &fake_b);
}

Test(life, a_failed_context_is_known_from_another)
{
    FAKE_START();
    get(4 * MiB);
    const struct vram_life *a = life_of(&fake_a);
    fake_a.failed = CUDA_ERROR_ILLEGAL_ADDRESS;
    cr_assert(vram_life_failed());
    fake_use(&fake_b);
    cr_assert_not(vram_life_failed());
    cr_assert(vram_life_failed_in(a));
    cr_assert_eq(fake_current(), &fake_b);
    fake_use(NULL);
    cr_assert_not(vram_life_failed(), "no context is no failed one");
    vram_driver_table.cuCtxGetStreamPriorityRange = NULL;
    cr_assert(vram_life_failed(), "who cannot ask keeps nothing");
}

Test(life, a_free_waits_for_peers_of_the_owner)
{
    FAKE_START();
    CUdeviceptr p = get(4 * MiB);
    vram_life_peer(&fake_b, &fake_a, true);
    vram_life_peer(&fake_b, &fake_a, true); /* said twice, it is one peer */
    cr_assert_eq(life_of(&fake_a)->peer_count, 1);
    give_back(p);
    cr_assert_eq(fake_a.waited_for, 1);
    cr_assert_eq(fake_b.waited_for, 1);
    fake_use(&fake_b);
    give_back(get(4 * MiB));
    cr_assert_eq(fake_b.waited_for, 2);
    cr_assert_eq(fake_a.waited_for, 1, "access has a direction");
    vram_life_peer(&fake_b, &fake_a, false);
    fake_use(&fake_a);
    give_back(get(4 * MiB));
    cr_assert_eq(fake_b.waited_for, 2);
    invariants();
}

Test(life, a_peers_error_is_the_drivers_to_tell)
{
    FAKE_START();
    CUdeviceptr p = get(4 * MiB);
    vram_life_peer(&fake_b, &fake_a, true);
    fake_b.failed = CUDA_ERROR_ILLEGAL_ADDRESS;
    give_back(p);
    cr_assert_null(block(p));
    cr_assert_eq(fake.cuMemFree_v2.calls, 1);
    invariants();
}

Test(life, a_peer_that_ends_leaves_frees_to_the_driver_until_it_has)
{
    FAKE_START();
    CUdeviceptr p = get(4 * MiB), q = get(4 * MiB);
    vram_life_peer(&fake_b, &fake_a, true);
    struct vram_life *b = vram_life_end_begin(&fake_b);
    give_back(p);
    cr_assert_null(block(p), "its work may still use the block");
    fake_end(&fake_b);
    vram_life_end(b, true);
    cr_assert_eq(life_of(&fake_a)->peer_count, 0);
    give_back(q);
    cr_assert_eq(block(q)->state, VRAM_CACHED);
    invariants();
}

Test(life, peers_that_cannot_be_followed_keep_frees_native)
{
    static struct CUctx_st many[VRAM_PEERS_MAX + 1];
    FAKE_START();
    for (int i = 0; i <= VRAM_PEERS_MAX; i++) {
        cr_assert(i == 0 || !life_of(&fake_a)->uncached);
        vram_life_peer(&many[i], &fake_a, true);
    }
    cr_assert(life_of(&fake_a)->uncached);
    CUdeviceptr p = get(4 * MiB);
    give_back(p);
    cr_assert_null(block(p));
    vram_life_peer(NULL, &fake_b, true); /* the driver did not say who */
    cr_assert(life_of(&fake_b)->uncached);
    invariants();
}

Test(life, a_peer_that_cannot_be_noted_keeps_all_later_lives_native)
{
    FAKE_START();
    get(4 * MiB);
    struct vram_life *a = vram_life_end_begin(&fake_a);
    vram_life_peer(&fake_b, &fake_a, true);
    fake_end(&fake_a);
    vram_life_end(a, true);
    get(4 * MiB);
    cr_assert(life_of(&fake_a)->uncached);
}

Test(life, a_context_of_a_green_one_is_not_cached)
{
    FAKE_START();
    CUdeviceptr p = get(4 * MiB);
    vram_life_green(&fake_a);
    give_back(p);
    cr_assert_null(block(p));
    vram_life_green(&fake_b); /* told before its life begins */
    fake_use(&fake_b);
    CUdeviceptr q = get(4 * MiB);
    give_back(q);
    cr_assert_null(block(q));
    end(&fake_b, true); /* the handle recurs for another */
    q = get(4 * MiB);
    give_back(q);
    cr_assert_eq(block(q)->state, VRAM_CACHED);
    invariants();
}

Test(life, primary_contexts_are_known_by_device)
{
    FAKE_START();
    get(4 * MiB);
    vram_life_primary(0, &fake_a);
    vram_life_primary(1, &fake_other);
    vram_life_primary(-1, &fake_b);
    vram_life_primary(VRAM_DEVICES_MAX, &fake_b);
    cr_assert_eq(vram_life_primary_of(0), &fake_a);
    cr_assert_eq(vram_life_primary_of(1), &fake_other);
    cr_assert_null(vram_life_primary_of(2));
    cr_assert_null(vram_life_primary_of(-1));
    cr_assert_null(vram_life_primary_of(VRAM_DEVICES_MAX));
    cr_assert(life_of(&fake_a)->primary);
    fake_use(&fake_other);
    get(4 * MiB);
    cr_assert(life_of(&fake_other)->primary);
    cr_assert_eq(vram_books(1)->live_bytes, 4 * MiB);
    invariants();
}

Test(life, a_device_that_the_driver_did_not_say_is_learnt_at_the_first_allocation)
{
    FAKE_START();
    fake.cuCtxGetDevice.refuse = CUDA_ERROR_UNKNOWN;
    vram_life_peer(&fake_b, &fake_other, true);
    cr_assert_eq(life_of(&fake_other)->device, -1);
    fake_use(&fake_other);
    CUdeviceptr p = get(4 * MiB);
    cr_assert_null(block(p), "for which device?");
    fake.cuCtxGetDevice.refuse = CUDA_SUCCESS;
    p = get(4 * MiB);
    cr_assert_eq(block(p)->life->device, 1);
    cr_assert_eq(vram_books(1)->live_bytes, 4 * MiB);
    invariants();
}

/* heap/fence.h: a freed block is handed out again when the work of before its free is done, or will be waited for. */
#include "heap/fence.h"

#include <criterion/criterion.h>
#include <stdlib.h>

#include "base/lock.h"
#include "driver/capture.h"
#include "driver/driver.h"
#include "heap/heap.h"
#include "heard.h"
#include "steps.h"

static struct vram_life *life;

/* The first free of a life finds out whether events work. After it: nothing pending, no fence in use, 2 MiB cached. */
static void warm_up(void)
{
    give_back(get(2 * MiB));
    life = life_of(&fake_a);
    vram_fence_record(life, 1);
    vram_fence_poll(life);
    fake.cuCtxRecordEvent.calls = fake.cuEventQuery.calls = fake.cuCtxSynchronize.calls = 0;
}

/* A block whose last work is the newest one of its context. */
static CUdeviceptr freed(size_t size)
{
    CUdeviceptr p = get(size);
    fake_a.work++;
    give_back(p);
    return p;
}

static enum vram_block_state state(CUdeviceptr p) { return block(p)->state; }

Test(fence, a_block_waits_for_the_work_of_before_its_free)
{
    FAKE_START("VRAMSHIM_FREE=fenced");
    CUdeviceptr p = freed(4 * MiB);
    cr_assert_eq(state(p), VRAM_PENDING);
    cr_assert_neq(get(4 * MiB), p);
    fake_a.work++; /* of after the free */
    fake_a.done = 1;
    cr_assert_eq(get(4 * MiB), p);
    cr_assert_eq(fake.cuCtxSynchronize.calls, 0);
    invariants();
}

Test(fence, one_fence_is_recorded_for_many_frees)
{
    CUdeviceptr p[VRAM_FENCE_EVERY];
    FAKE_START("VRAMSHIM_FREE=fenced");
    warm_up();
    for (int i = 0; i < VRAM_FENCE_EVERY; i++)
        p[i] = get(4 * MiB);
    for (int i = 0; i < VRAM_FENCE_EVERY; i++) {
        cr_assert_eq(fake.cuCtxRecordEvent.calls, 0);
        give_back(p[i]);
        cr_assert_eq(block(p[i])->fence, block(p[0])->fence);
    }
    cr_assert_eq(fake.cuCtxRecordEvent.calls, 1);
    vram_fence_poll(life);
    cr_assert_eq(fake.cuEventQuery.calls, 1);
    for (int i = 0; i < VRAM_FENCE_EVERY; i++)
        cr_assert_eq(state(p[i]), VRAM_CACHED);
    invariants();
}

static CUdeviceptr late;
static void free_late(void)
{
    fake_a.work++;
    give_back(late);
}

/* Law 16: the number is closed before the event is recorded, so what is freed meanwhile waits for the next. */
Test(fence, a_fence_covers_what_was_freed_before_it_was_recorded)
{
    FAKE_START("VRAMSHIM_FREE=fenced");
    warm_up();
    late = get(4 * MiB);
    CUdeviceptr p = freed(4 * MiB);
    fake.cuCtxRecordEvent.after = free_late;
    cr_assert_eq(vram_fence_record(life, 1), CUDA_SUCCESS);
    cr_assert_gt(block(late)->fence, block(p)->fence);
    fake_a.done = 1;
    vram_fence_poll(life);
    cr_assert_eq(state(p), VRAM_CACHED);
    cr_assert_eq(state(late), VRAM_PENDING);
    invariants();
}

Test(fence, settling_covers_what_was_freed_before_the_wait)
{
    FAKE_START("VRAMSHIM_FREE=fenced");
    warm_up();
    late = get(4 * MiB);
    CUdeviceptr p = freed(4 * MiB);
    fake.cuCtxSynchronize.after = free_late;
    cr_assert_eq(vram_fence_settle(life), CUDA_SUCCESS);
    cr_assert_eq(state(p), VRAM_CACHED);
    cr_assert_eq(state(late), VRAM_PENDING);
    invariants();
    cr_assert_eq(vram_fence_settle(life), CUDA_SUCCESS);
    cr_assert_eq(state(late), VRAM_CACHED);
    invariants();
}

Test(fence, a_refused_wait_settles_nothing)
{
    FAKE_START("VRAMSHIM_FREE=fenced");
    warm_up();
    CUdeviceptr p = freed(4 * MiB);
    fake.cuCtxSynchronize.refuse = CUDA_ERROR_LAUNCH_FAILED;
    cr_assert_eq(vram_fence_settle(life), CUDA_ERROR_LAUNCH_FAILED);
    cr_assert_eq(state(p), VRAM_PENDING);
    invariants();
    /* The block waits for a closed number without a fence: the next one covers it. */
    cr_assert_eq(vram_fence_record(life, 1), CUDA_SUCCESS);
    cr_assert_eq(fake.cuCtxRecordEvent.calls, 1);
    fake_a.done = fake_a.work;
    vram_fence_poll(life);
    cr_assert_eq(state(p), VRAM_CACHED);
    invariants();
}

Test(fence, blocks_become_ready_in_the_order_of_their_fences)
{
    CUdeviceptr p[4];
    FAKE_START("VRAMSHIM_FREE=fenced");
    warm_up();
    for (int i = 0; i < 4; i++)
        p[i] = get(4 * MiB);
    for (int i = 0; i < 4; i++) {
        fake_a.work++;
        give_back(p[i]);
        vram_fence_record(life, 1);
    }
    fake_a.done = 2;
    vram_fence_poll(life);
    cr_assert_eq(fake.cuEventQuery.calls, 3, "up to the first that is not complete");
    for (int i = 0; i < 4; i++)
        cr_assert_eq(state(p[i]), i < 2 ? VRAM_CACHED : VRAM_PENDING);
    invariants();
}

static void poll_too(void) { vram_fence_poll(life); }

Test(fence, one_thread_looks_at_a_time)
{
    FAKE_START("VRAMSHIM_FREE=fenced");
    warm_up();
    CUdeviceptr p = freed(4 * MiB);
    vram_fence_record(life, 1);
    fake.cuEventQuery.before = poll_too;
    vram_fence_poll(life);
    cr_assert_eq(fake.cuEventQuery.calls, 1);
    cr_assert_eq(state(p), VRAM_PENDING);
    fake_a.done = 1;
    vram_fence_poll(life);
    cr_assert_eq(state(p), VRAM_CACHED);
}

Test(fence, nothing_pending_is_not_asked_about)
{
    FAKE_START("VRAMSHIM_FREE=fenced");
    warm_up();
    vram_fence_record(life, 0);
    vram_fence_poll(life);
    cr_assert_eq(fake.cuEventQuery.calls, 0);
}

/* The newest fence is recorded again: older ones keep their word. */
Test(fence, more_fences_than_events_make_the_newest_wait)
{
    enum { N = VRAM_FENCES + 6 };
    CUdeviceptr p[N];
    FAKE_START("VRAMSHIM_FREE=fenced");
    warm_up();
    for (int i = 0; i < N; i++) {
        p[i] = freed(4 * MiB);
        vram_fence_record(life, 1);
    }
    cr_assert_leq(fake.cuEventCreate.calls, VRAM_FENCES);
    for (int done = 1; done <= N; done++) {
        fake_a.done = (uint64_t)done;
        vram_fence_poll(life);
        for (int i = 0; i < N; i++) {
            cr_assert(state(p[i]) == VRAM_PENDING || i < done, "too early");
            cr_assert(state(p[i]) == VRAM_CACHED || i >= done || i >= VRAM_FENCES - 1, "an older one waits too");
        }
        invariants();
    }
    for (int i = 0; i < N; i++)
        cr_assert_eq(state(p[i]), VRAM_CACHED);
}

Test(fence, a_refused_fence_gives_that_free_to_the_driver)
{
    CUdeviceptr p[VRAM_FENCE_EVERY + 1];
    FAKE_START("VRAMSHIM_FREE=fenced");
    warm_up();
    for (int i = 0; i <= VRAM_FENCE_EVERY; i++)
        p[i] = get(4 * MiB);
    fake.cuCtxRecordEvent.refuse = CUDA_ERROR_UNKNOWN;
    fake.cuCtxRecordEvent.times = 1;
    for (int i = 0; i < VRAM_FENCE_EVERY; i++)
        give_back(p[i]);
    cr_assert_null(block(p[VRAM_FENCE_EVERY - 1]));
    cr_assert_eq(fake.cuMemFree_v2.calls, 1);
    cr_assert_eq(state(p[0]), VRAM_PENDING);
    cr_assert_eq(vram_books(0)->frees, VRAM_FENCE_EVERY + 1, "each free is counted once");
    invariants();
    /* The next fence covers those as well, and is due. */
    give_back(p[VRAM_FENCE_EVERY]);
    cr_assert_eq(fake.cuCtxRecordEvent.calls, 2);
    vram_fence_poll(life);
    cr_assert_eq(state(p[0]), VRAM_CACHED);
    cr_assert_eq(state(p[VRAM_FENCE_EVERY]), VRAM_CACHED);
    invariants();
}

static void settle_it(void) { cr_assert_eq(vram_fence_settle(life), CUDA_SUCCESS); }

/* Another thread's wait has made the block safe meanwhile: it is in the cache and stays there. */
Test(fence, a_refused_fence_leaves_what_is_safe_already)
{
    CUdeviceptr p[VRAM_FENCE_EVERY];
    FAKE_START("VRAMSHIM_FREE=fenced");
    warm_up();
    for (int i = 0; i < VRAM_FENCE_EVERY; i++)
        p[i] = get(4 * MiB);
    fake.cuCtxRecordEvent.refuse = CUDA_ERROR_UNKNOWN;
    fake.cuCtxRecordEvent.before = settle_it;
    for (int i = 0; i < VRAM_FENCE_EVERY; i++)
        give_back(p[i]);
    cr_assert_eq(fake.cuMemFree_v2.calls, 0);
    for (int i = 0; i < VRAM_FENCE_EVERY; i++)
        cr_assert_eq(state(p[i]), VRAM_CACHED);
    invariants();
}

Test(fence, a_driver_without_context_events_waits_in_the_free)
{
    FAKE_START("VRAMSHIM_FREE=fenced");
    listen_to_it();
    fake.cuCtxRecordEvent.refuse = CUDA_ERROR_NOT_SUPPORTED;
    cr_assert_eq(state(freed(4 * MiB)), VRAM_CACHED);
    cr_assert_eq(state(freed(4 * MiB)), VRAM_CACHED);
    cr_assert_eq(fake.cuCtxSynchronize.calls, 2);
    cr_assert_eq(fake.cuCtxRecordEvent.calls, 1, "once is enough");
    fake_use(&fake_b);
    give_back(get(8 * MiB));
    cr_assert_eq(times_heard("has no context events"), 1);
    cr_assert_eq(times_heard("VRAMSHIM_FREE=fenced works as sync"), 1);
    invariants();
}

Test(fence, a_driver_without_the_entries_waits_in_the_free)
{
    FAKE_START("VRAMSHIM_FREE=ordered");
    listen_to_it();
    vram_driver_table.cuCtxWaitEvent = NULL;
    cr_assert_eq(state(freed(4 * MiB)), VRAM_CACHED);
    cr_assert_eq(fake.cuCtxRecordEvent.calls, 0);
    cr_assert_eq(times_heard("VRAMSHIM_FREE=ordered works as sync"), 1);
}

Test(fence, any_other_refusal_is_tried_again)
{
    FAKE_START("VRAMSHIM_FREE=fenced");
    listen_to_it();
    fake.cuEventCreate.refuse = CUDA_ERROR_OUT_OF_MEMORY;
    cr_assert_eq(state(freed(4 * MiB)), VRAM_CACHED);
    fake.cuEventCreate.refuse = CUDA_SUCCESS;
    cr_assert_eq(state(freed(4 * MiB)), VRAM_PENDING);
    cr_assert_str_empty(heard());
    invariants();
}

Test(fence, peers_have_work_that_no_fence_of_ours_covers)
{
    FAKE_START("VRAMSHIM_FREE=fenced");
    warm_up();
    vram_life_peer(&fake_b, &fake_a, true);
    cr_assert_eq(vram_fence_mode(life), VRAM_FREE_SYNC);
    cr_assert_eq(state(freed(4 * MiB)), VRAM_CACHED);
    cr_assert_eq(fake_b.waited_for, 1);
    vram_life_peer(&fake_b, &fake_a, false);
    cr_assert_eq(vram_fence_mode(life), VRAM_FREE_FENCED);
}

Test(fence, a_failed_context_keeps_nothing)
{
    FAKE_START("VRAMSHIM_FREE=fenced");
    warm_up();
    CUdeviceptr p = get(4 * MiB);
    fake_a.failed = CUDA_ERROR_ILLEGAL_ADDRESS;
    fake_use(&fake_b);
    give_back(p);
    cr_assert_null(block(p));
    cr_assert_eq(fake_current(), &fake_b);
    invariants();
}

Test(fence, events_belong_to_the_blocks_context)
{
    FAKE_START("VRAMSHIM_FREE=fenced");
    CUdeviceptr p = get(4 * MiB);
    fake_b.failed = CUDA_ERROR_UNKNOWN; /* an event made there would be refused */
    fake_use(NULL);
    give_back(p);
    cr_assert_eq(state(p), VRAM_PENDING);
    cr_assert_null(fake_current());
}

Test(fence, pending_blocks_end_with_their_context)
{
    FAKE_START("VRAMSHIM_FREE=ordered");
    warm_up();
    CUdeviceptr p = freed(4 * MiB);
    struct vram_life *ending = vram_life_end_begin(&fake_a);
    fake_end(&fake_a);
    vram_life_end(ending, true);
    cr_assert_null(block(p));
    cr_assert_eq(fake.cuMemFree_v2.calls, 0);
    cr_assert_eq(vram_books(0)->ended_all, 2);
    cr_assert_eq(vram_books(0)->ended_blocks, 0);
    invariants();
}

/* The driver gives the address of a pending block: its context ended without our seeing it. */
Test(fence, a_stale_pending_block_leaves_the_list)
{
    FAKE_START("VRAMSHIM_FREE=ordered");
    warm_up();
    CUdeviceptr p = freed(4 * MiB), q = freed(6 * MiB), r = freed(8 * MiB);
    fake_end(&fake_a);
    fake_use(&fake_b);
    get(2 * MiB);
    get(4 * MiB);
    cr_assert_eq(get(6 * MiB), q);
    cr_assert_eq(block(q)->life->ctx, &fake_b);
    cr_assert_eq(block(p)->life->ctx, &fake_b);
    cr_assert_eq(life->fences.oldest, block(r));
    cr_assert_eq(life->fences.newest, block(r));
    cr_assert_eq(life->fences.by_size.count, 1);
}

Test(fence, every_life_of_a_device_is_settled)
{
    FAKE_START("VRAMSHIM_FREE=fenced");
    CUdeviceptr p = get(4 * MiB);
    fake_use(&fake_b);
    CUdeviceptr q = get(4 * MiB);
    fake_use(&fake_other);
    CUdeviceptr r = get(4 * MiB);
    give_back(p);
    give_back(q);
    give_back(r);
    vram_capture_announce();
    vram_fence_settle_device(VRAM_EVERY_DEVICE);
    vram_capture_not_begun();
    cr_assert_eq(fake.cuCtxSynchronize.calls, 0, "not in a capture");
    vram_fence_settle_device(0);
    cr_assert_eq(state(p), VRAM_CACHED);
    cr_assert_eq(state(q), VRAM_CACHED);
    cr_assert_eq(state(r), VRAM_PENDING);
    vram_fence_settle_device(VRAM_EVERY_DEVICE);
    cr_assert_eq(state(r), VRAM_CACHED);
    cr_assert_eq(fake.cuCtxSynchronize.calls, 3, "where nothing is pending, nothing is waited for");
    invariants();
}

Test(ordered, a_pending_block_is_handed_out_behind_its_fence)
{
    FAKE_START("VRAMSHIM_FREE=ordered");
    warm_up();
    CUdeviceptr p = get(4 * MiB), q = freed(4 * MiB);
    vram_fence_record(life, 1);
    fake_a.work++;
    give_back(p);
    cr_assert_gt(block(p)->fence, block(q)->fence);
    cr_assert_eq(get(4 * MiB), p);
    cr_assert_eq(fake_a.behind, 2);
    cr_assert_eq(get(4 * MiB), q);
    cr_assert_eq(fake.cuCtxWaitEvent.calls, 1, "behind one fence is behind all earlier ones");
    cr_assert_eq(fake.cuCtxSynchronize.calls, 0);
    cr_assert_eq(fake.cuMemAlloc_v2.calls, 3);
    invariants();
}

Test(ordered, a_refused_wait_leaves_the_block_pending)
{
    FAKE_START("VRAMSHIM_FREE=ordered");
    warm_up();
    CUdeviceptr p = freed(4 * MiB);
    fake.cuCtxWaitEvent.refuse = CUDA_ERROR_UNKNOWN;
    cr_assert_neq(get(4 * MiB), p);
    cr_assert_eq(state(p), VRAM_PENDING);
    invariants();
    fake.cuCtxWaitEvent.refuse = CUDA_SUCCESS;
    cr_assert_eq(get(4 * MiB), p);
    cr_assert_eq(fake_a.behind, 1);
    invariants();
}

Test(ordered, a_refused_fence_leaves_the_block_pending)
{
    FAKE_START("VRAMSHIM_FREE=ordered");
    warm_up();
    CUdeviceptr p = freed(4 * MiB);
    fake.cuCtxRecordEvent.refuse = CUDA_ERROR_UNKNOWN;
    cr_assert_neq(get(4 * MiB), p);
    cr_assert_eq(state(p), VRAM_PENDING);
    cr_assert_eq(fake.cuCtxWaitEvent.calls, 0);
    invariants();
}

/* A copy between contexts would not be behind the fence. */
Test(ordered, with_another_context_blocks_wait_for_completion)
{
    FAKE_START("VRAMSHIM_FREE=ordered");
    warm_up();
    fake_use(&fake_b);
    get(2 * MiB);
    fake_use(&fake_a);
    CUdeviceptr p = freed(4 * MiB);
    cr_assert_neq(get(4 * MiB), p);
    fake_a.done = fake_a.work;
    cr_assert_eq(get(4 * MiB), p);
    cr_assert_eq(fake.cuCtxWaitEvent.calls, 0);
    invariants();
}

Test(ordered, a_block_that_is_too_large_is_not_taken)
{
    FAKE_START("VRAMSHIM_FREE=ordered", "VRAMSHIM_WASTE=0");
    warm_up();
    CUdeviceptr p = freed(8 * MiB);
    cr_assert_neq(get(4 * MiB), p);
    cr_assert_eq(state(p), VRAM_PENDING);
    invariants();
}

Test(ordered, what_is_shown_to_others_is_settled_first)
{
    FAKE_START("VRAMSHIM_FREE=ordered");
    warm_up();
    CUdeviceptr fresh = get(4 * MiB), p = freed(6 * MiB);
    cr_assert_eq(get(6 * MiB), p);
    vram_heap_settle_block(fresh);
    cr_assert_eq(fake.cuCtxSynchronize.calls, 0, "it was put behind nothing");
    vram_capture_announce();
    vram_heap_settle_block(p);
    vram_capture_not_begun();
    cr_assert_eq(fake.cuCtxSynchronize.calls, 0, "not in a capture");
    vram_heap_settle_block(p + 5);
    cr_assert_eq(fake.cuCtxSynchronize.calls, 1);
    vram_heap_settle_block(p);
    cr_assert_eq(fake.cuCtxSynchronize.calls, 1, "it is settled");
    vram_heap_settle_context(&fake_a);
    cr_assert_eq(fake.cuCtxSynchronize.calls, 2);
    vram_heap_settle_context(&fake_b);
    cr_assert_eq(fake.cuCtxSynchronize.calls, 2);
    invariants();
}

/*
 * Against a model that knows only when each address was freed: none is handed out before the work of before that is
 * done, or the context's later work waits for it. Whatever the driver refuses.
 */
enum { HELD = 24, FREED = 256 };
static struct {
    CUdeviceptr addr;
    uint64_t work;
} was_freed[FREED];
static unsigned freed_count;

static void forget_what_the_driver_has(void)
{
    for (unsigned i = 0; i < freed_count; i++)
        if (!block(was_freed[i].addr))
            was_freed[i--] = was_freed[--freed_count];
}

static void judge(CUdeviceptr p)
{
    for (unsigned i = 0; i < freed_count; i++) {
        if (was_freed[i].addr != p)
            continue;
        cr_assert(fake_a.done >= was_freed[i].work || fake_a.behind >= was_freed[i].work, "handed out too early");
        was_freed[i--] = was_freed[--freed_count];
    }
}

static void refuse_something(void)
{
    struct fake_entry *const entries[] = {&fake.cuCtxRecordEvent, &fake.cuCtxWaitEvent, &fake.cuEventQuery,
                                          &fake.cuEventCreate,    &fake.cuMemFree_v2,   &fake.cuCtxSynchronize};
    struct fake_entry *e = entries[(size_t)rand() % VRAM_LENGTH(entries)];
    e->times = 1;
    e->refuse = CUDA_ERROR_UNKNOWN;
}

static void random_steps(void)
{
    static const size_t sizes[] = {1000, 2 * MiB, 4 * MiB, 5 * MiB, 12 * MiB};
    CUdeviceptr held[HELD], p;
    unsigned n = 0;
    srand(5);
    listen_to_it();
    warm_up();
    for (int step = 0; step < 4000; step++) {
        unsigned k = n ? (unsigned)rand() % n : 0;
        switch (rand() % 12) {
        case 0:
        case 1:
        case 2:
        case 3:
            forget_what_the_driver_has();
            if (n < HELD && vram_heap_alloc(&p, sizes[rand() % 5], 0) == CUDA_SUCCESS) {
                judge(p);
                held[n++] = p;
            }
            break;
        case 4:
        case 5:
        case 6:
            fake_a.work++;
            if (n && vram_heap_free(held[k], 0) == CUDA_SUCCESS) {
                if (block(held[k]) && freed_count < FREED) {
                    was_freed[freed_count].addr = held[k];
                    was_freed[freed_count++].work = fake_a.work;
                }
                held[k] = held[--n];
            }
            break;
        case 7:
            fake_a.work++;
            break;
        case 8:
            fake_a.done += (uint64_t)rand() % (fake_a.work - fake_a.done + 1);
            break;
        case 9:
            refuse_something();
            break;
        case 10:
            vram_fence_poll(life);
            break;
        default:
            if (rand() % 8 == 0)
                vram_fence_settle(life);
            else
                vram_fence_record(life, (unsigned)rand() % 3);
        }
        invariants();
    }
    cr_assert_gt(vram_books(0)->hits, 100);
}

Test(fence, random_steps_hand_nothing_out_too_early)
{
    FAKE_START("VRAMSHIM_FREE=fenced");
    random_steps();
}

Test(ordered, random_steps_hand_nothing_out_too_early)
{
    FAKE_START("VRAMSHIM_FREE=ordered");
    random_steps();
    cr_assert_gt(fake.cuCtxWaitEvent.calls, 20);
}

/* heap/reclaim.h: giving blocks back to the driver, because somebody asked or because memory ran out. */
#include "heap/reclaim.h"

#include <criterion/criterion.h>
#include <pthread.h>
#include <semaphore.h>
#include <time.h>

#include "base/clock.h"
#include "base/lock.h"
#include "driver/capture.h"
#include "driver/driver.h"
#include "heap/families.h"
#include "heap/fence.h"
#include "heap/heap.h"
#include "heard.h"
#include "steps.h"

static void moment(void) { nanosleep(&(const struct timespec){0, 1000000}, NULL); }

static CUdeviceptr in(CUcontext ctx, size_t size)
{
    fake_use(ctx);
    return get(size);
}

static struct vram_traffic traffic(void)
{
    vram_lock(VRAM_RANK_HEAP);
    struct vram_traffic t = vram_traffic(0);
    vram_unlock(VRAM_RANK_HEAP);
    return t;
}

Test(flush, everything_kept_goes_and_what_is_live_stays)
{
    FAKE_START();
    CUdeviceptr live = in(&fake_a, 4 * MiB), a = in(&fake_a, 6 * MiB), b = in(&fake_b, 1000);
    CUdeviceptr o = in(&fake_other, 8 * MiB);
    give_back(a);
    give_back(b);
    give_back(o);
    struct vram_reclaimed r = vram_reclaim_all();
    cr_assert_eq(r.blocks, 3);
    cr_assert_eq(r.bytes, 14 * MiB + 1000);
    cr_assert_eq(r.kept_blocks, 0);
    cr_assert_eq(r.kept_bytes, 0);
    cr_assert_eq(r.refused, CUDA_SUCCESS);
    cr_assert_not(r.capture);
    cr_assert_eq(block(live)->state, VRAM_LIVE);
    cr_assert_eq(fake_blocks(), 1);
    cr_assert_eq(fake_current(), &fake_other, "each is freed in its own context, and the program's is current again");
    invariants();
}

Test(flush, what_is_pending_is_waited_for)
{
    FAKE_START("VRAMSHIM_FREE=fenced");
    CUdeviceptr p = get(4 * MiB);
    fake_a.work++;
    give_back(p);
    cr_assert_eq(vram_reclaim_all().blocks, 1);
    cr_assert_eq(fake_a.done, 1);
    cr_assert_eq(fake_blocks(), 0);
    invariants();
}

Test(flush, nothing_kept_is_nothing_to_do)
{
    FAKE_START();
    get(4 * MiB);
    struct vram_reclaimed r = vram_reclaim_all();
    cr_assert_eq(r.blocks, 0);
    cr_assert_eq(fake.cuMemFree_v2.calls, 0);
}

static CUdeviceptr subject;

static void free_the_subject(void) { give_back(subject); }

/* Threads that go on freeing must not keep it going for ever. */
Test(flush, as_much_goes_as_there_was_when_it_began)
{
    FAKE_START();
    CUdeviceptr p = get(4 * MiB);
    subject = get(4 * MiB);
    give_back(p);
    fake.cuMemFree_v2.before = free_the_subject;
    struct vram_reclaimed r = vram_reclaim_all();
    cr_assert_eq(r.blocks, 1);
    cr_assert_eq(r.kept_blocks, 1);
    cr_assert_eq(r.kept_bytes, 4 * MiB);
    invariants();
}

Test(flush, a_context_that_refuses_is_passed_over)
{
    CUdeviceptr a[3], b[3];
    FAKE_START();
    for (int i = 0; i < 3; i++) {
        a[i] = in(&fake_a, 8 * MiB);
        b[i] = in(&fake_b, 4 * MiB);
    }
    for (int i = 0; i < 3; i++) {
        give_back(a[i]);
        give_back(b[i]);
    }
    fake_a.failed = CUDA_ERROR_ILLEGAL_ADDRESS;
    struct vram_reclaimed r = vram_reclaim_all();
    cr_assert_eq(r.blocks, 3);
    cr_assert_eq(r.bytes, 12 * MiB);
    cr_assert_eq(r.kept_blocks, 3);
    cr_assert_eq(r.refused, CUDA_ERROR_ILLEGAL_ADDRESS);
    cr_assert_eq(fake.cuMemFree_v2.calls, 4, "what one block of a context meets, all will");
    for (int i = 0; i < 3; i++)
        cr_assert_eq(block(a[i])->state, VRAM_CACHED);
    invariants();
    cr_assert_eq(vram_reclaim_all().blocks, 0);
    cr_assert_eq(fake.cuMemFree_v2.calls, 5, "the next time it is asked again, once");
    fake_a.failed = CUDA_SUCCESS;
    cr_assert_eq(vram_reclaim_all().blocks, 3);
    invariants();
}

Test(flush, a_refused_block_is_handed_out_as_before)
{
    FAKE_START();
    CUdeviceptr p = get(4 * MiB);
    give_back(p);
    fake.cuMemFree_v2.refuse = CUDA_ERROR_NOT_PERMITTED;
    vram_reclaim_all();
    cr_assert_eq(vram_books(0)->frees, 1);
    cr_assert_eq(get(4 * MiB), p);
    cr_assert_eq(vram_books(0)->allocs, 2);
    invariants();
}

Test(flush, a_block_that_the_driver_does_not_know_is_not_kept)
{
    FAKE_START();
    CUdeviceptr p = get(4 * MiB);
    give_back(p);
    fake_end(&fake_a); /* unseen by us */
    struct vram_reclaimed r = vram_reclaim_all();
    cr_assert_eq(r.refused, CUDA_ERROR_INVALID_VALUE);
    cr_assert_eq(r.kept_blocks, 0);
    cr_assert_null(block(p));
    cr_assert_eq(vram_books(0)->ended_all, 1);
    invariants();
}

static void allocate_it_anew(void) { cr_assert_eq(get(4 * MiB), subject); }

/* The driver may give the address to another thread before its answer has reached us: two blocks, one after another. */
Test(flush, an_address_that_is_given_again_at_once_is_another_block)
{
    FAKE_START();
    subject = get(4 * MiB);
    give_back(subject);
    fake.cuMemFree_v2.after = allocate_it_anew;
    cr_assert_eq(vram_reclaim_all().blocks, 1);
    cr_assert_eq(block(subject)->state, VRAM_LIVE);
    invariants();
    give_back(subject);
    cr_assert_eq(block(subject)->state, VRAM_CACHED);
    cr_assert_eq(vram_books(0)->double_frees, 0);
    invariants();
}

static void allocate_it_otherwise(void)
{
    CUdeviceptr p;
    cr_assert_eq(vram_driver_table.cuMemAlloc_v2(&p, 4 * MiB), CUDA_SUCCESS);
    cr_assert_eq(p, subject);
    vram_family_born(VRAM_ASYNC, VRAM_DEVICE_OF_CONTEXT, (struct vram_key){VRAM_AT_ADDRESS, p}, 4 * MiB, 0);
    cr_assert_eq(vram_heap_free_async(p, NULL, vram_driver_table.cuMemFreeAsync, 0), CUDA_SUCCESS);
}

Test(flush, an_address_that_is_given_again_at_once_is_memory_of_another_kind)
{
    FAKE_START();
    subject = get(4 * MiB);
    give_back(subject);
    fake.cuMemFree_v2.after = allocate_it_otherwise;
    cr_assert_eq(vram_reclaim_all().blocks, 1);
    cr_assert_null(fake.cuMemFree_v2.after);
    cr_assert_eq(vram_books(0)->double_frees, 0);
    invariants();
}

static void free_it_and_allocate_it_anew(void)
{
    cr_assert_eq(vram_driver_table.cuMemFree_v2(subject), CUDA_SUCCESS);
    allocate_it_anew();
    fake.cuMemFree_v2.refuse = CUDA_ERROR_LAUNCH_FAILED;
}

/* The same with a driver that frees and yet answers with the error of a kernel before. */
Test(flush, an_address_that_is_given_again_is_not_put_back)
{
    FAKE_START();
    subject = get(4 * MiB);
    give_back(subject);
    fake.cuMemFree_v2.before = free_it_and_allocate_it_anew;
    cr_assert_eq(vram_reclaim_all().refused, CUDA_ERROR_LAUNCH_FAILED);
    cr_assert_eq(block(subject)->state, VRAM_LIVE);
    cr_assert_eq(vram_books(0)->cached_blocks, 0);
    cr_assert_eq(vram_books(0)->held_blocks, 1);
    invariants();
}

static pthread_t capturer;
static void *capture(void *unused)
{
    vram_capture_announce(); /* waits for the call of ours that is under way */
    return unused;
}

static void begin_a_capture(void)
{
    pthread_create(&capturer, NULL, capture, NULL);
    while (!vram_capture_active())
        moment();
}

Test(flush, a_capture_stops_it_where_it_is, .timeout = 60)
{
    FAKE_START();
    CUdeviceptr p = get(4 * MiB);
    give_back(get(4 * MiB));
    give_back(p);
    fake.cuMemFree_v2.before = begin_a_capture;
    struct vram_reclaimed r = vram_reclaim_all();
    pthread_join(capturer, NULL);
    cr_assert(r.capture);
    cr_assert_eq(r.blocks, 1);
    cr_assert_eq(r.kept_blocks, 1);
    cr_assert_eq(vram_reclaim_all().blocks, 0);
    vram_capture_not_begun();
    cr_assert_eq(vram_reclaim_all().blocks, 1);
    invariants();
}

Test(flush, on_the_way_out_nothing_is_given_back)
{
    FAKE_START();
    give_back(get(4 * MiB));
    vram_heap_exiting();
    cr_assert_eq(vram_reclaim_all().blocks, 0);
    cr_assert_eq(fake.cuMemFree_v2.calls, 0);
    invariants();
}

static void look_on_its_way(void)
{
    vram_lock(VRAM_RANK_HEAP);
    const struct vram_block *b = vram_reclaim_find(subject);
    bool known = vram_ledger_find(&vram_heap.ledger, subject);
    bool other = vram_reclaim_find(subject + 512);
    vram_unlock(VRAM_RANK_HEAP);
    cr_assert(b && b->addr == subject);
    cr_assert_not(known);
    cr_assert_not(other);
    cr_assert_eq(traffic().departed, traffic().arrived + 1);
    cr_assert_eq(vram_books(0)->returning_blocks, 1);
    cr_assert_eq(vram_books(0)->returning_pages, 2);
    cr_assert_eq(vram_books(0)->cached_pages, 0);
}

Test(flush, a_block_is_out_of_the_ledger_before_the_driver_has_it)
{
    FAKE_START();
    subject = get(4 * MiB);
    give_back(subject);
    fake.cuMemFree_v2.before = look_on_its_way;
    vram_reclaim_all();
    cr_assert_null(fake.cuMemFree_v2.before);
    cr_assert_eq(traffic().departed, 1);
    cr_assert_eq(traffic().arrived, 1);
    vram_lock(VRAM_RANK_HEAP);
    cr_assert_null(vram_reclaim_find(subject));
    vram_unlock(VRAM_RANK_HEAP);
}

static sem_t go_on;
static void stay(void) { sem_wait(&go_on); }

static void *flush_all(void *unused)
{
    vram_reclaim_all();
    return unused;
}

/* A flush by another thread that stays in the driver's free, with one block on its way. */
static pthread_t stay_in_a_flush(void)
{
    pthread_t thread;
    sem_init(&go_on, 0, 0);
    fake.cuMemFree_v2.before = stay;
    pthread_create(&thread, NULL, flush_all, NULL);
    while (traffic().departed == traffic().arrived)
        moment();
    return thread;
}

static void *let_it_go_on(void *unused)
{
    moment();
    sem_post(&go_on);
    return unused;
}

Test(traffic, awaiting_ends_when_what_was_on_its_way_has_arrived, .timeout = 60)
{
    pthread_t other;
    FAKE_START();
    give_back(get(4 * MiB));
    struct vram_traffic t = vram_reclaim_await(0, UINT64_MAX / 2);
    cr_assert_eq(t.departed, 0, "nothing is on its way");
    pthread_t flush = stay_in_a_flush();
    t = vram_reclaim_await(0, 1000000);
    cr_assert_eq(t.departed, 1);
    cr_assert_eq(t.arrived, 0, "it takes too long");
    pthread_create(&other, NULL, let_it_go_on, NULL);
    t = vram_reclaim_await(0, UINT64_MAX / 2);
    cr_assert_eq(t.arrived, 1);
    cr_assert_eq(vram_reclaim_await(1, UINT64_MAX / 2).arrived, 0, "of another device");
    pthread_join(flush, NULL);
    pthread_join(other, NULL);
    invariants();
}

Test(traffic, nothing_sets_out_while_somebody_asks, .timeout = 60)
{
    enum { HOLD_NS = 20000000 };
    pthread_t flush;
    FAKE_START();
    give_back(get(4 * MiB));
    uint64_t since = vram_now();
    vram_reclaim_hold();
    pthread_create(&flush, NULL, flush_all, NULL);
    while (!fake.cuMemFree_v2.calls)
        moment();
    cr_assert_geq(vram_now(), since + HOLD_NS, "unless it takes too long"); /* a lower bound: never early */
    pthread_join(flush, NULL);
    vram_reclaim_release();
    invariants();
}

/* The card holds 64 pages. */
static void fill(size_t first, size_t second, size_t third)
{
    CUdeviceptr p = get(first), q = get(second), r = get(third);
    give_back(p);
    give_back(q);
    give_back(r);
}

Test(rescue, just_enough_is_given_back)
{
    FAKE_START();
    get(50 * MiB);
    fill(10 * MiB, 20 * MiB, 40 * MiB);
    get(14 * MiB);
    cr_assert_eq(fake.cuMemFree_v2.calls, 1);
    cr_assert_eq(vram_books(0)->cached_bytes, 50 * MiB, "the smallest that alone is enough");
    cr_assert_eq(vram_books(0)->oom_rescued, 1);
    cr_assert_eq(vram_books(0)->oom_failed, 0);
    invariants();
}

Test(rescue, then_everything)
{
    FAKE_START();
    get(50 * MiB);
    fill(10 * MiB, 20 * MiB, 40 * MiB);
    fake.cuMemAlloc_v2.refuse = CUDA_ERROR_OUT_OF_MEMORY;
    fake.cuMemAlloc_v2.times = 2; /* the first attempt, and the one after just enough */
    get(14 * MiB);
    cr_assert_eq(fake.cuMemAlloc_v2.calls, 4 + 3);
    cr_assert_eq(vram_books(0)->cached_blocks, 0);
    cr_assert_eq(vram_books(0)->oom_rescued, 1);
    invariants();
}

Test(rescue, then_the_native_error)
{
    FAKE_START();
    CUdeviceptr p = 0;
    fill(10 * MiB, 20 * MiB, 40 * MiB);
    fake.cuMemAlloc_v2.refuse = CUDA_ERROR_OUT_OF_MEMORY;
    cr_assert_eq(vram_heap_alloc(&p, 14 * MiB, 0), CUDA_ERROR_OUT_OF_MEMORY);
    cr_assert_eq(fake.cuMemAlloc_v2.calls, 3 + 3);
    cr_assert_eq(vram_books(0)->oom_failed, 1);
    cr_assert_eq(vram_books(0)->oom_rescued, 0);
    cr_assert_eq(vram_books(0)->live_blocks, 0, "nothing of it is left behind");
    cr_assert_eq(fake_blocks(), 0);
    invariants();
}

Test(rescue, another_error_is_not_about_memory)
{
    FAKE_START();
    CUdeviceptr p;
    fill(10 * MiB, 20 * MiB, 40 * MiB);
    fake.cuMemAlloc_v2.refuse = CUDA_ERROR_NOT_PERMITTED;
    cr_assert_eq(vram_heap_alloc(&p, 14 * MiB, 0), CUDA_ERROR_NOT_PERMITTED);
    cr_assert_eq(vram_books(0)->cached_blocks, 3);
    cr_assert_eq(vram_books(0)->oom_failed, 0);
}

/* Programs find a card's limit by asking for more than it has. */
Test(rescue, what_can_never_fit_costs_nothing)
{
    FAKE_START();
    CUdeviceptr p;
    fill(10 * MiB, 20 * MiB, 40 * MiB);
    cr_assert_eq(vram_heap_alloc(&p, 130 * (size_t)MiB, 0), CUDA_ERROR_OUT_OF_MEMORY);
    cr_assert_eq(vram_books(0)->cached_blocks, 3);
    get(100 * MiB); /* on which the program then settles */
    give_back(get(10 * MiB));
    cr_assert_eq(vram_heap_alloc(&p, 40 * MiB, 0), CUDA_ERROR_OUT_OF_MEMORY, "beyond what is free and kept together");
    cr_assert_eq(vram_books(0)->cached_blocks, 1);
    invariants();
}

Test(rescue, only_the_devices_own_blocks_help)
{
    FAKE_START();
    give_back(in(&fake_other, 40 * MiB));
    give_back(in(&fake_b, 40 * MiB)); /* another context of the same device does */
    in(&fake_a, 120 * (size_t)MiB);
    cr_assert_eq(vram_books(0)->cached_blocks, 0);
    cr_assert_eq(vram_books(1)->cached_blocks, 1);
    invariants();
}

Test(rescue, what_is_pending_serves_before_anything_is_given_back)
{
    FAKE_START("VRAMSHIM_FREE=fenced");
    CUdeviceptr p = get(60 * MiB), q = get(60 * MiB);
    fake_a.work++;
    give_back(p);
    cr_assert_eq(get(60 * MiB), p);
    cr_assert_eq(fake.cuMemFree_v2.calls, 0);
    give_back(q);
    get(64 * MiB);
    cr_assert_eq(fake.cuMemFree_v2.calls, 1, "it is given back as well");
    invariants();
}

static void free_with_work(void)
{
    fake_a.work++;
    give_back(subject);
}

Test(rescue, what_is_freed_meanwhile_is_waited_for_and_given_back)
{
    FAKE_START("VRAMSHIM_FREE=fenced");
    CUdeviceptr p;
    subject = get(60 * MiB);
    give_back(get(10 * MiB));
    fake.cuMemGetInfo_v2.before = free_with_work; /* when it is decided to give blocks back */
    fake.cuMemAlloc_v2.refuse = CUDA_ERROR_OUT_OF_MEMORY;
    cr_assert_eq(vram_heap_alloc(&p, 14 * MiB, 0), CUDA_ERROR_OUT_OF_MEMORY);
    cr_assert_null(fake.cuMemGetInfo_v2.before);
    cr_assert_eq(fake_blocks(), 0);
    invariants();
}

Test(rescue, a_context_that_refuses_is_passed_over)
{
    FAKE_START();
    give_back(in(&fake_b, 60 * MiB));
    give_back(in(&fake_a, 40 * MiB));
    fake_b.failed = CUDA_ERROR_ILLEGAL_ADDRESS;
    get(60 * MiB);
    cr_assert_eq(vram_books(0)->cached_blocks, 1);
    cr_assert_eq(vram_books(0)->oom_rescued, 1);
    invariants();
}

static void let_the_flush_go_on(void) { sem_post(&go_on); }

/* The memory is neither the cache's nor the driver's when the attempt fails. */
Test(rescue, what_another_thread_is_giving_back_is_let_arrive, .timeout = 60)
{
    FAKE_START();
    give_back(get(120 * (size_t)MiB));
    pthread_t flush = stay_in_a_flush();
    fake.cuMemAlloc_v2.after = let_the_flush_go_on; /* that is, of the attempt that fails */
    get(100 * MiB);
    pthread_join(flush, NULL);
    cr_assert_eq(vram_books(0)->oom_rescued, 1);
    invariants();
}

Test(rescue, without_a_context_all_is_given_back)
{
    FAKE_START();
    CUdeviceptr p;
    fill(10 * MiB, 20 * MiB, 40 * MiB);
    fake_use(NULL);
    fake.cuMemAlloc_v2.refuse = CUDA_ERROR_OUT_OF_MEMORY; /* the driver says so before it looks for a context */
    cr_assert_eq(vram_heap_alloc(&p, 14 * MiB, 0), CUDA_ERROR_OUT_OF_MEMORY);
    cr_assert_eq(vram_books(0)->cached_blocks, 0);
    cr_assert_eq(fake.cuMemAlloc_v2.calls, 3 + 2);
    invariants();
}

Test(rescue, is_told_three_times_and_then_more_rarely)
{
    FAKE_START();
    listen_to_it();
    for (int i = 0; i < 12; i++) {
        give_back(get(100 * MiB));
        give_back(get(50 * MiB));
    }
    cr_assert_eq(vram_books(0)->oom_rescued, 23);
    cr_assert_eq(times_heard("vramshim: out of memory"), 4);
    cr_assert_eq(times_heard("out of memory for 50.0 MiB on device 0: gave 1 kept block (100.0 MiB) back to "
                             "the driver, and the allocation succeeded\n"),
                 1);
    cr_assert_eq(times_heard("(time 10; further ones are told more rarely)"), 1);
}

Test(rescue, nothing_to_give_is_the_programs_own_affair)
{
    FAKE_START();
    CUdeviceptr p;
    listen_to_it();
    get(100 * MiB);
    cr_assert_eq(vram_heap_alloc(&p, 50 * MiB, 0), CUDA_ERROR_OUT_OF_MEMORY);
    cr_assert_eq(vram_books(0)->oom_failed, 1);
    cr_assert_str_empty(heard());
}

/* A new shape each time: nothing kept serves, and without a bound all of it would be held. */
Test(slack, what_is_held_is_bounded_by_what_was_live)
{
    FAKE_START("VRAMSHIM_SLACK=1.5");
    fake.pages[0] = 4096;
    CUdeviceptr live = get(400 * MiB);
    for (size_t i = 0; i < 40; i++)
        give_back(get((20 + 2 * i) * MiB));
    const struct vram_account *books = vram_books(0);
    cr_assert_eq(books->peak_live_cost, 498 * MiB);
    cr_assert_leq(books->held_pages << VRAM_PAGE_SHIFT, 747 * MiB);
    cr_assert_leq(books->peak_held_bytes, 747 * MiB);
    cr_assert_gt(books->cached_blocks, 0);
    cr_assert_eq(books->evicted.blocks + books->cached_blocks, 40 - books->hits);
    cr_assert_eq(block(live)->state, VRAM_LIVE);
    invariants();
}

Test(slack, a_floor_is_always_allowed)
{
    FAKE_START("VRAMSHIM_SLACK=1.01");
    fake.pages[0] = 4096;
    for (size_t i = 0; i < 4; i++)
        give_back(get((2 + 2 * i) * MiB)); /* 20 MiB in all, 8 live at once */
    cr_assert_eq(vram_books(0)->evicted.blocks, 0);
    cr_assert_eq(vram_books(0)->cached_blocks, 4);
}

Test(slack, the_longest_kept_go_first)
{
    FAKE_START("VRAMSHIM_SLACK=1.01");
    fake.pages[0] = 4096;
    CUdeviceptr first = get(40 * MiB), second = get(50 * MiB), third = get(60 * MiB);
    give_back(second);
    give_back(third);
    give_back(first);
    get(150 * MiB); /* 300 MiB would be held, 214 are allowed */
    cr_assert_eq(vram_books(0)->evicted.blocks, 2);
    cr_assert_eq(vram_books(0)->evicted.bytes, 110 * MiB);
    cr_assert_eq(block(first)->state, VRAM_CACHED);
    invariants();
}

Test(slack, of_one_keeps_nothing_beyond_the_peak)
{
    FAKE_START("VRAMSHIM_SLACK=1");
    fake.pages[0] = 4096;
    for (size_t i = 0; i < 10; i++)
        give_back(get((2 + 2 * i) * MiB));
    cr_assert_eq(vram_books(0)->peak_live_cost, 20 * MiB);
    cr_assert_eq(vram_books(0)->held_pages, 10);
    invariants();
}

Test(slack, unlimited_is_no_bound)
{
    FAKE_START("VRAMSHIM_SLACK=unlimited");
    fake.pages[0] = 4096;
    for (size_t i = 0; i < 20; i++)
        give_back(get((10 + 2 * i) * MiB));
    cr_assert_eq(vram_books(0)->cached_blocks + vram_books(0)->hits, 20);
    invariants();
}

Test(slack, a_pending_block_that_fits_is_waited_for_instead)
{
    FAKE_START("VRAMSHIM_FREE=fenced", "VRAMSHIM_SLACK=1");
    fake.pages[0] = 4096;
    CUdeviceptr p = get(100 * MiB), other = get(90 * MiB);
    fake_a.work++;
    give_back(other);
    give_back(p);
    cr_assert_eq(get(100 * MiB), p);
    cr_assert_eq(fake.cuEventSynchronize.calls, 1);
    cr_assert_eq(fake.cuCtxSynchronize.calls, 0);
    cr_assert_eq(fake.cuMemFree_v2.calls, 0);
    cr_assert_eq(vram_books(0)->evicted.blocks, 0);
    invariants();
}

Test(slack, pending_blocks_that_do_not_fit_make_room)
{
    FAKE_START("VRAMSHIM_FREE=fenced", "VRAMSHIM_SLACK=1");
    fake.pages[0] = 4096;
    CUdeviceptr p = get(100 * MiB);
    fake_a.work++;
    give_back(p);
    get(120 * MiB);
    cr_assert_eq(fake.cuEventSynchronize.calls, 0);
    cr_assert_eq(vram_books(0)->evicted.blocks, 1);
    cr_assert_eq(vram_books(0)->cached_blocks, 0);
    invariants();
}

/* The driver refuses: then more is held than was asked for, and the program gets its memory. */
Test(slack, what_the_driver_does_not_take_back_stays)
{
    FAKE_START("VRAMSHIM_SLACK=1");
    fake.pages[0] = 4096;
    CUdeviceptr p = get(100 * MiB);
    give_back(p);
    fake.cuMemFree_v2.refuse = CUDA_ERROR_UNKNOWN;
    get(120 * MiB);
    cr_assert_eq(block(p)->state, VRAM_CACHED);
    cr_assert_eq(vram_books(0)->evicted.blocks, 0);
    invariants();
}

Test(slack, nothing_is_given_back_during_a_capture)
{
    FAKE_START("VRAMSHIM_SLACK=1");
    fake.pages[0] = 4096;
    give_back(get(100 * MiB));
    vram_capture_announce();
    get(120 * MiB);
    vram_capture_not_begun();
    cr_assert_eq(fake.cuMemFree_v2.calls, 0);
    invariants();
}

/* What has decayed goes, in so many walks as it takes until `blocks` have gone: a context that answers slowly, as any may under
 * an emulator or on a busy machine, is taken to be at work and left for the next walk. */
static struct vram_reclaimed decay(uint64_t time, uint64_t blocks)
{
    struct vram_reclaimed all = {0};
    for (int walk = 0; walk < 1000 && all.blocks < blocks; walk++) {
        struct vram_reclaimed r = vram_reclaim_decayed(time);
        all.blocks += r.blocks;
        all.bytes += r.bytes;
    }
    return all;
}

Test(decay, what_was_freed_before_goes)
{
    FAKE_START();
    CUdeviceptr old = get(4 * MiB), small = get(1000), young = get(8 * MiB), live = get(2 * MiB);
    give_back(old);
    give_back(small);
    uint64_t before = vram_now_roughly();
    while (vram_now_roughly() == before) /* what was freed has its time from this clock */
        moment();
    uint64_t between = before + 1;
    give_back(young);
    struct vram_reclaimed r = decay(between, 2);
    cr_assert_eq(r.blocks, 2);
    cr_assert_eq(r.bytes, 4 * MiB + 1000);
    cr_assert_eq(vram_reclaim_decayed(between).blocks, 0);
    cr_assert_eq(vram_books(0)->decayed.blocks, 2);
    cr_assert_eq(block(young)->state, VRAM_CACHED);
    cr_assert_eq(block(live)->state, VRAM_LIVE);
    invariants();
}

static void a_takes_long(void)
{
    if (fake_current() == &fake_a)
        nanosleep(&(const struct timespec){0, 5000000}, NULL);
    fake.cuCtxSynchronize.before = a_takes_long; /* in the next call too */
}

Test(decay, a_context_at_work_is_left_alone)
{
    FAKE_START();
    CUdeviceptr busy = in(&fake_a, 4 * MiB), idle = in(&fake_b, 6 * MiB);
    give_back(busy);
    give_back(idle);
    fake.cuCtxSynchronize.before = a_takes_long;
    cr_assert_eq(decay(UINT64_MAX, 1).blocks, 1);
    cr_assert_eq(block(busy)->state, VRAM_CACHED);
    cr_assert_null(block(idle));
    fake.cuCtxSynchronize.before = NULL;
    cr_assert_eq(decay(UINT64_MAX, 1).blocks, 1);
    invariants();
}

Test(decay, what_is_pending_counts)
{
    FAKE_START("VRAMSHIM_FREE=fenced");
    give_back(get(4 * MiB));
    cr_assert_eq(decay(UINT64_MAX, 1).blocks, 1);
    invariants();
}

Test(decay, not_during_a_capture)
{
    FAKE_START();
    give_back(get(4 * MiB));
    vram_capture_announce();
    cr_assert_eq(vram_reclaim_decayed(UINT64_MAX).blocks, 0);
    vram_capture_not_begun();
    cr_assert_eq(decay(UINT64_MAX, 1).blocks, 1);
    invariants();
}

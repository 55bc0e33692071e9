/* heap/heap.h: a block's way from the driver to the program, into the cache and back, and what the books say of it. */
#include "heap/heap.h"

#include <criterion/criterion.h>

#include "base/clock.h"
#include "base/lock.h"
#include "driver/capture.h"
#include "driver/driver.h"
#include "fake_driver.h"
#include "heap/reclaim.h"
#include "heard.h"
#include "steps.h"

static const struct vram_account *books(void) { return vram_books(0); }

static size_t free_bytes(void)
{
    size_t unused = 0, total = 0;
    cr_assert_eq(vram_heap_info(&unused, &total), CUDA_SUCCESS);
    return unused;
}

/* A callback in the middle of a driver's call knows only this. */
static CUdeviceptr subject;

Test(heap, a_block_goes_from_live_to_cached_and_back)
{
    FAKE_START();
    CUdeviceptr p = get(4 * MiB);
    cr_assert_eq(block(p)->state, VRAM_LIVE);
    invariants();
    give_back(p);
    cr_assert_eq(block(p)->state, VRAM_CACHED);
    cr_assert_eq(fake_a.waited_for, 1);
    invariants();
    cr_assert_eq(get(3 * MiB), p);
    cr_assert_eq(block(p)->state, VRAM_LIVE);
    cr_assert_eq(block(p)->size, 3 * MiB);
    invariants();
    cr_assert_eq(fake.cuMemAlloc_v2.calls, 1);
    cr_assert_eq(fake.cuMemFree_v2.calls, 0);
    cr_assert_eq(books()->hits, 1);
    cr_assert_eq(books()->frees, 1);
}

static void look_while_it_waits(void)
{
    cr_assert_eq(block(subject)->state, VRAM_FREEING);
    cr_assert_eq(books()->live_bytes, 4 * MiB);
    cr_assert_eq(books()->cached_bytes, 0);
    cr_assert_neq(get(4 * MiB), subject, "it is handed out when its work is done, not before");
}

static void look_while_a_free_waits(void)
{
    subject = get(4 * MiB);
    fake.cuCtxSynchronize.before = look_while_it_waits;
    give_back(subject);
    cr_assert_null(fake.cuCtxSynchronize.before);
    cr_assert_eq(block(subject)->state, VRAM_CACHED);
    invariants();
}

Test(heap, while_the_free_waits_the_block_is_nobodys)
{
    FAKE_START();
    look_while_a_free_waits();
}

Test(heap, a_free_whose_wait_is_refused_is_the_drivers)
{
    FAKE_START();
    CUdeviceptr p = get(4 * MiB), q = get(4 * MiB);
    fake.cuCtxSynchronize.refuse = CUDA_ERROR_LAUNCH_FAILED;
    give_back(p);
    cr_assert_null(block(p));
    cr_assert_eq(fake_blocks(), 1);
    invariants();
    fake_a.failed = CUDA_ERROR_LAUNCH_FAILED;
    cr_assert_eq(vram_heap_free(q, 0), CUDA_ERROR_LAUNCH_FAILED, "the driver's answer is the program's");
    cr_assert_eq(block(q)->state, VRAM_LIVE);
    invariants();
}

Test(heap, a_second_free_of_a_cached_block_is_refused)
{
    FAKE_START();
    CUdeviceptr p = get(4 * MiB);
    cr_assert_eq(vram_heap_free(p, 0x111), CUDA_SUCCESS);
    cr_assert_eq(vram_heap_free(p, 0x222), CUDA_ERROR_INVALID_VALUE);
    cr_assert_eq(vram_heap_free(p, 0x333), CUDA_ERROR_INVALID_VALUE);
    cr_assert_eq(fake.cuMemFree_v2.calls, 0);
    cr_assert_eq(block(p)->state, VRAM_CACHED);
    cr_assert_eq(books()->double_frees, 2);
    cr_assert_eq(books()->frees, 1);
    invariants();
    /* Both places are kept, once for a block until it is handed out again. */
    cr_assert_eq(vram_heap.double_frees_kept, 1);
    cr_assert_eq(vram_heap.double_frees[0].addr, p);
    cr_assert_eq(vram_heap.double_frees[0].first.caller, 0x111);
    cr_assert_eq(vram_heap.double_frees[0].second.caller, 0x222);
    cr_assert_eq(get(4 * MiB), p);
    give_back(p);
    cr_assert_eq(vram_heap_free(p, 0), CUDA_ERROR_INVALID_VALUE);
    cr_assert_eq(vram_heap.double_frees_kept, 2);
}

static void free_it_again(void)
{
    cr_assert_eq(vram_heap_free(subject, 0), CUDA_ERROR_INVALID_VALUE);
    cr_assert_eq(books()->double_frees, 1);
}

Test(heap, a_second_free_while_the_first_waits_is_refused)
{
    FAKE_START();
    subject = get(4 * MiB);
    fake.cuCtxSynchronize.before = free_it_again;
    give_back(subject);
    cr_assert_eq(fake.cuMemFree_v2.calls, 0);
    cr_assert_eq(block(subject)->state, VRAM_CACHED);
    invariants();
}

Test(heap, a_second_free_of_a_pending_block_is_refused)
{
    FAKE_START("VRAMSHIM_FREE=fenced");
    subject = get(4 * MiB);
    fake_a.work++;
    give_back(subject);
    cr_assert_eq(block(subject)->state, VRAM_PENDING);
    free_it_again();
    cr_assert_eq(fake.cuMemFree_v2.calls, 0);
    cr_assert_eq(block(subject)->state, VRAM_PENDING);
    invariants();
}

Test(heap, a_second_free_of_a_block_on_its_way_to_the_driver_is_refused)
{
    FAKE_START();
    subject = get(4 * MiB);
    give_back(subject);
    fake.cuMemFree_v2.before = free_it_again;
    cr_assert_eq(vram_reclaim_all().blocks, 1);
    cr_assert_eq(fake.cuMemFree_v2.calls, 1);
    cr_assert_eq(books()->double_frees, 1);
    invariants();
}

/* In a capture even the refusal is the driver's to give: it may invalidate the capture (law 17). */
Test(heap, a_second_free_in_a_capture_reaches_the_driver_as_an_unknown_address)
{
    FAKE_START();
    CUdeviceptr p = get(4 * MiB);
    give_back(p);
    vram_capture_announce();
    cr_assert_eq(vram_heap_free(p, 0), CUDA_ERROR_INVALID_VALUE);
    vram_capture_not_begun();
    cr_assert_eq(fake.cuMemFree_v2.calls, 1);
    cr_assert_eq(fake_blocks(), 1, "the driver was not asked for the cached block");
    invariants();
}

Test(heap, only_so_many_double_frees_are_kept_and_all_are_counted)
{
    FAKE_START();
    CUdeviceptr p[VRAM_DOUBLE_FREES_MAX + 3];
    for (size_t i = 0; i < VRAM_LENGTH(p); i++)
        p[i] = get(2 * MiB);
    for (size_t i = 0; i < VRAM_LENGTH(p); i++) {
        give_back(p[i]);
        cr_assert_eq(vram_heap_free(p[i], 0), CUDA_ERROR_INVALID_VALUE);
    }
    cr_assert_eq(vram_heap.double_frees_kept, VRAM_DOUBLE_FREES_MAX);
    cr_assert_eq(books()->double_frees, VRAM_LENGTH(p));
}

Test(heap, a_refused_free_leaves_the_block_with_the_program)
{
    FAKE_START();
    CUdeviceptr p = get(4 * MiB);
    vram_heap_identity_left(p); /* so that its free is the driver's */
    struct vram_account before = *books();
    fake.cuMemFree_v2.refuse = CUDA_ERROR_NOT_PERMITTED;
    cr_assert_eq(vram_heap_free(p, 0), CUDA_ERROR_NOT_PERMITTED);
    cr_assert_eq(block(p)->state, VRAM_LIVE);
    cr_assert(block(p)->identity_left);
    cr_assert_eq(books()->frees, before.frees);
    cr_assert_eq(books()->driver_frees, before.driver_frees);
    cr_assert_eq(books()->live_bytes, before.live_bytes);
    invariants();
    fake.cuMemFree_v2.refuse = CUDA_SUCCESS;
    give_back(p);
    cr_assert_null(block(p));
    cr_assert_eq(fake_blocks(), 0);
    invariants();
}

static void free_it_quicker(void) { cr_assert_eq(vram_heap_free(subject, 0), CUDA_SUCCESS); }

/* Law 16: from before the driver's free on the address is not ours, so another thread's free of it is the driver's. */
Test(heap, a_block_that_the_driver_does_not_know_is_not_put_back)
{
    FAKE_START();
    subject = get(4 * MiB);
    vram_heap_identity_left(subject);
    fake.cuMemFree_v2.before = free_it_quicker;
    cr_assert_eq(vram_heap_free(subject, 0), CUDA_ERROR_INVALID_VALUE);
    cr_assert_null(block(subject));
    cr_assert_eq(books()->held_blocks, 0);
    cr_assert_eq(books()->double_frees, 0);
    invariants();
}

Test(heap, an_unknown_address_is_the_drivers)
{
    FAKE_START();
    CUdeviceptr p = get(4 * MiB);
    fake.cuMemFree_v2.refuse = CUDA_ERROR_NOT_PERMITTED;
    cr_assert_eq(vram_heap_free(p + 512, 0), CUDA_ERROR_NOT_PERMITTED);
    cr_assert_eq(vram_heap_free(0, 0), CUDA_ERROR_NOT_PERMITTED);
    cr_assert_eq(fake.cuMemFree_v2.calls, 2);
    cr_assert_eq(block(p)->state, VRAM_LIVE);
    invariants();
}

Test(heap, what_left_by_its_identity_goes_to_the_driver)
{
    FAKE_START();
    CUdeviceptr p = get(4 * MiB), q = get(4 * MiB);
    vram_heap_identity_left(p + 100); /* any address inside */
    give_back(p);
    give_back(q);
    cr_assert_null(block(p));
    cr_assert_eq(block(q)->state, VRAM_CACHED);
    cr_assert_eq(fake.cuMemFree_v2.calls, 1);
    invariants();
}

Test(heap, the_cache_has_a_limit_for_each_device)
{
    FAKE_START("VRAMSHIM_CACHE_MAX=8M");
    CUdeviceptr p = get(4 * MiB), q = get(4 * MiB), r = get(2 * MiB);
    fake_use(&fake_other);
    CUdeviceptr s = get(4 * MiB);
    fake_use(&fake_a);
    give_back(p);
    give_back(q);
    give_back(r);
    give_back(s);
    cr_assert_eq(block(q)->state, VRAM_CACHED, "the limit itself is allowed");
    cr_assert_null(block(r));
    cr_assert_eq(block(s)->state, VRAM_CACHED);
    invariants();
}

Test(heap, without_a_cache_all_is_accounted_for)
{
    FAKE_START("VRAMSHIM_CACHE=0");
    CUdeviceptr p = get(4 * MiB);
    cr_assert_eq(books()->live_bytes, 4 * MiB);
    give_back(p);
    cr_assert_null(block(p));
    cr_assert_eq(fake_blocks(), 0);
    cr_assert_eq(books()->frees, 1);
    cr_assert_eq(fake.cuCtxSynchronize.calls, 0);
    invariants();
}

Test(heap, a_capture_keeps_the_cache_out)
{
    FAKE_START();
    CUdeviceptr p = get(4 * MiB), q = get(4 * MiB);
    give_back(p);
    vram_capture_announce();
    vram_capture_begun((CUstream)0x100, false, &fake_a);
    unsigned waits = fake.cuCtxSynchronize.calls;
    cr_assert_neq(get(4 * MiB), p);
    give_back(q);
    cr_assert_eq(fake.cuMemFree_v2.calls, 1);
    cr_assert_eq(fake.cuCtxSynchronize.calls, waits);
    /* Handing out what is there needs no call of ours, so a capture need not run out of memory beside it. */
    fake.cuMemAlloc_v2.refuse = CUDA_ERROR_OUT_OF_MEMORY;
    cr_assert_eq(get(4 * MiB), p);
    cr_assert_eq(fake.cuMemFree_v2.calls, 1);
    vram_capture_ended((CUstream)0x100, false, &fake_a);
    invariants();
}

Test(heap, on_the_way_out_frees_pass_through)
{
    FAKE_START();
    CUdeviceptr p = get(4 * MiB), q = get(4 * MiB);
    vram_heap_exiting();
    give_back(p);
    cr_assert_eq(fake.cuCtxSynchronize.calls, 0);
    fake.cuMemFree_v2.refuse = CUDA_ERROR_DEINITIALIZED;
    cr_assert_eq(vram_heap_free(q, 0), CUDA_ERROR_DEINITIALIZED);
    cr_assert_null(block(q));
    cr_assert_eq(books()->live_blocks, 0, "the driver was gone before the free: no leak of the program's");
    cr_assert_eq(books()->frees, 2);
}

Test(heap, a_failed_context_gets_nothing_from_the_cache)
{
    FAKE_START();
    CUdeviceptr p = get(4 * MiB), none = 1;
    give_back(p);
    fake_a.failed = CUDA_ERROR_ILLEGAL_ADDRESS;
    cr_assert_eq(vram_heap_alloc(&none, 4 * MiB, 0), CUDA_ERROR_ILLEGAL_ADDRESS);
    cr_assert_eq(vram_heap_free(p, 0), CUDA_ERROR_ILLEGAL_ADDRESS, "nor does a second free hide the error");
    cr_assert_eq(block(p)->state, VRAM_CACHED);
    invariants();
}

Test(heap, a_failed_allocation_leaves_nothing_behind)
{
    FAKE_START();
    CUdeviceptr p = 1;
    fake.cuMemAlloc_v2.refuse = CUDA_ERROR_NOT_PERMITTED;
    cr_assert_eq(vram_heap_alloc(&p, 4 * MiB, 0), CUDA_ERROR_NOT_PERMITTED);
    cr_assert_eq(p, 1, "the output is the driver's to write");
    cr_assert_not(vram_heap_used());
    cr_assert_eq(books()->allocs, 0);
    cr_assert_eq(vram_ledger_count(&vram_heap.ledger), 0);
    fake.cuMemAlloc_v2.refuse = CUDA_SUCCESS;
    cr_assert_eq(vram_heap_alloc(NULL, 4 * MiB, 0), CUDA_ERROR_INVALID_VALUE);
    cr_assert_eq(vram_heap_alloc(&p, 0, 0), CUDA_ERROR_INVALID_VALUE);
    fake_use(NULL);
    cr_assert_eq(vram_heap_alloc(&p, 4 * MiB, 0), CUDA_ERROR_INVALID_CONTEXT);
    cr_assert_eq(fake.cuMemAlloc_v2.calls, 4);
    cr_assert_not(vram_heap_used());
}

/* The context ended without our seeing it, and the driver gives its address again: the driver is right. */
Test(heap, what_the_driver_gives_twice_was_stale)
{
    FAKE_START();
    CUdeviceptr live = get(4 * MiB), cached = get(8 * MiB);
    give_back(cached);
    fake_end(&fake_a);
    cr_assert_eq(get(4 * MiB), live);
    cr_assert_eq(books()->live_blocks, 1);
    cr_assert_eq(books()->ended_blocks, 1);
    cr_assert_eq(books()->ended_bytes, 4 * MiB);
    fake_use(&fake_b); /* where nothing is cached */
    cr_assert_eq(get(8 * MiB), cached);
    cr_assert_eq(block(cached)->life->ctx, &fake_b);
    cr_assert_eq(books()->ended_all, 2);
    cr_assert_eq(books()->ended_blocks, 1, "a cached one was not the program's");
    invariants();
}

Test(heap, memory_info_counts_what_is_cached)
{
    FAKE_START();
    size_t all = free_bytes();
    CUdeviceptr p = get(6 * MiB), q = get(5 * MiB);
    cr_assert_eq(free_bytes(), all - 12 * MiB);
    give_back(p);
    cr_assert_eq(free_bytes(), all - 6 * MiB);
    give_back(q);
    cr_assert_eq(free_bytes(), all);
    cr_assert_eq(fake_blocks(), 2);
}

Test(heap, memory_info_counts_a_shared_page_when_the_last_block_in_it_is_free)
{
    FAKE_START();
    size_t all = free_bytes();
    CUdeviceptr p = get(1000), q = get(1000);
    give_back(p);
    cr_assert_eq(free_bytes(), all - 2 * MiB);
    give_back(q);
    cr_assert_eq(free_bytes(), all);
    cr_assert_eq(get(1000), q);
    cr_assert_eq(free_bytes(), all - 2 * MiB);
    invariants();
}

Test(heap, memory_info_counts_what_is_pending)
{
    FAKE_START("VRAMSHIM_FREE=fenced");
    size_t all = free_bytes();
    CUdeviceptr p = get(6 * MiB);
    fake_a.work++;
    give_back(p);
    cr_assert_eq(block(p)->state, VRAM_PENDING);
    cr_assert_eq(free_bytes(), all);
}

static size_t expected;
static void ask_on_its_way(void) { cr_assert_eq(free_bytes(), expected); }

Test(heap, memory_info_counts_what_is_on_its_way_to_the_driver)
{
    FAKE_START();
    expected = free_bytes();
    give_back(get(6 * MiB));
    fake.cuMemFree_v2.before = ask_on_its_way;
    cr_assert_eq(vram_reclaim_all().blocks, 1);
    cr_assert_null(fake.cuMemFree_v2.before);
    cr_assert_eq(free_bytes(), expected);
}

Test(heap, memory_info_is_of_the_current_device)
{
    FAKE_START();
    give_back(get(6 * MiB));
    fake_use(&fake_b); /* of the same device, without a life of its own */
    cr_assert_eq(free_bytes(), 128 * MiB);
    fake_use(&fake_other);
    fake.pages[1] = 10;
    cr_assert_eq(free_bytes(), 20 * MiB);
    fake_use(NULL);
    cr_assert_eq(vram_heap_info(&expected, &expected), CUDA_ERROR_INVALID_CONTEXT);
}

Test(heap, an_address_is_to_the_program_what_it_asked_for)
{
    FAKE_START();
    CUdeviceptr p = get(4 * MiB), base;
    size_t size;
    cr_assert_eq(vram_heap_view(p + 4 * MiB - 1, &base, &size), VRAM_VIEW_LIVE);
    cr_assert_eq(base, p);
    give_back(p);
    cr_assert_eq(vram_heap_view(p, &base, &size), VRAM_VIEW_NOTHING);
    cr_assert_eq(vram_heap_view(p + 1, &base, &size), VRAM_VIEW_NOTHING);
    cr_assert_eq(get(3 * MiB), p);
    cr_assert_eq(vram_heap_view(p + 3 * MiB - 1, &base, &size), VRAM_VIEW_LIVE);
    cr_assert_eq(size, 3 * MiB);
    cr_assert_eq(vram_heap_view(p + 3 * MiB, &base, &size), VRAM_VIEW_NOTHING, "the tail was not asked for");
    cr_assert_eq(vram_heap_view(p + 4 * MiB, &base, &size), VRAM_VIEW_UNKNOWN);
    /* Not every driver has the attribute. */
    fake.cuPointerGetAttribute.refuse = CUDA_ERROR_NOT_SUPPORTED;
    cr_assert_eq(vram_heap_view(p + 1, &base, &size), VRAM_VIEW_LIVE);
}

static void look_at_it(void)
{
    CUdeviceptr base;
    size_t size;
    cr_assert_eq(vram_heap_view(subject, &base, &size), VRAM_VIEW_NOTHING);
    cr_assert_eq(vram_heap_view(subject + 1, &base, &size), VRAM_VIEW_NOTHING);
}

Test(heap, an_address_on_its_way_to_the_driver_is_nothing_to_the_program)
{
    FAKE_START();
    subject = get(4 * MiB);
    give_back(subject);
    fake.cuMemFree_v2.before = look_at_it;
    vram_reclaim_all();
    cr_assert_null(fake.cuMemFree_v2.before);
}

static CUresult free_async(CUdeviceptr p) { return vram_heap_free_async(p, NULL, vram_driver()->cuMemFreeAsync, 0); }

Test(heap, an_asynchronous_free_takes_the_block_from_us)
{
    FAKE_START();
    CUdeviceptr p = get(4 * MiB);
    fake.cuMemFreeAsync.refuse = CUDA_ERROR_NOT_SUPPORTED;
    cr_assert_eq(free_async(p), CUDA_ERROR_NOT_SUPPORTED);
    cr_assert_eq(block(p)->state, VRAM_LIVE);
    invariants();
    fake.cuMemFreeAsync.refuse = CUDA_ERROR_INVALID_VALUE; /* of the stream, so the block is the program's still */
    cr_assert_eq(free_async(p), CUDA_ERROR_INVALID_VALUE);
    cr_assert_eq(block(p)->state, VRAM_LIVE);
    fake.cuMemFreeAsync.refuse = CUDA_SUCCESS;
    cr_assert_eq(free_async(p), CUDA_SUCCESS);
    cr_assert_null(block(p));
    cr_assert_eq(fake_blocks(), 0);
    cr_assert_eq(fake.cuMemFree_v2.calls, 0);
    invariants();
}

Test(heap, an_asynchronous_free_of_a_cached_block_meets_an_unknown_address)
{
    FAKE_START();
    CUdeviceptr p = get(4 * MiB);
    give_back(p);
    cr_assert_eq(free_async(p), CUDA_ERROR_INVALID_VALUE);
    cr_assert_eq(block(p)->state, VRAM_CACHED);
    cr_assert_eq(fake_blocks(), 1);
    cr_assert_eq(books()->double_frees, 1);
    invariants();
}

static CUdeviceptr get_rows(size_t width, size_t height, size_t *ret_pitch)
{
    CUdeviceptr p;
    cr_assert_eq(vram_heap_alloc_pitch(&p, ret_pitch, width, height, 4, 0), CUDA_SUCCESS);
    return p;
}

Test(heap, rows_are_served_where_the_drivers_rule_is_known)
{
    size_t pitch;
    FAKE_START();
    give_back(get(4 * MiB));
    CUdeviceptr p = get_rows(1000, 4096, &pitch);
    cr_assert_eq(fake.cuMemAllocPitch_v2.calls, 1, "nothing was known");
    give_back(p);
    pitch = 0;
    cr_assert_eq(get_rows(1001, 4096, &pitch), p);
    cr_assert_eq(pitch, 1024);
    cr_assert_eq(fake.cuMemAllocPitch_v2.calls, 1);
    invariants();
}

Test(heap, rows_by_another_rule_are_never_served)
{
    size_t pitch;
    FAKE_START();
    fake.row = 256;
    give_back(get_rows(1024, 4096, &pitch)); /* the same by both rules */
    give_back(get_rows(256, 4096 * 4, &pitch));
    fake.row = 512;
    give_back(get_rows(1024, 8192, &pitch));
    get_rows(1024, 8192, &pitch);
    cr_assert_eq(fake.cuMemAllocPitch_v2.calls, 4);
    invariants();
}

Test(heap, the_largest_live_blocks_largest_first)
{
    struct vram_held found[3];
    FAKE_START();
    CUdeviceptr a = get(2 * MiB), b = get(8 * MiB), c = get(4 * MiB);
    for (uint64_t before = vram_now_roughly(); vram_now_roughly() == before;)
        ;
    CUdeviceptr d = get(4 * MiB), e = get(16 * MiB);
    give_back(e);
    cr_assert_eq(vram_heap_largest(0, found, 3), 3);
    cr_assert_eq(found[0].name, b);
    cr_assert_eq(found[1].name, c, "of equal size, the older");
    cr_assert_eq(found[2].name, d);
    give_back(b);
    give_back(c);
    cr_assert_eq(vram_heap_largest(0, found, 3), 2);
    cr_assert_eq(found[1].name, a);
    cr_assert_eq(vram_heap_largest(1, found, 3), 0);
    cr_assert_eq(vram_heap_largest(0, found, 0), 0);
}

Test(heap, a_summary_is_taken_without_the_lock_too)
{
    static struct vram_heap_summary summary;
    FAKE_START();
    CUdeviceptr p = get(4 * MiB);
    give_back(p);
    vram_heap_free(p, 0);
    vram_lock(VRAM_RANK_HEAP);
    cr_assert_not(vram_heap_summarise(&summary), "not exact");
    vram_unlock(VRAM_RANK_HEAP);
    cr_assert_eq(summary.devices[0].cached_bytes, 4 * MiB);
    cr_assert_eq(summary.double_frees_kept, 1);
    cr_assert(vram_heap_summarise(&summary));
}

Test(heap, a_forked_child_has_nothing)
{
    FAKE_START();
    CUdeviceptr live = get(4 * MiB);
    give_back(get(8 * MiB));
    vram_heap_forget();
    cr_assert_not(vram_heap_used());
    cr_assert_eq(books()->held_bytes, 0);
    give_back(live);
    cr_assert_eq(fake.cuMemFree_v2.calls, 1, "its parent's addresses are the driver's business");
    get(8 * MiB);
    cr_assert_eq(fake.cuMemAlloc_v2.calls, 3);
    invariants();
}

/* Where the process has one context, one call of the driver says which is current, and whether it has failed. */
Test(only, it_is_asked_once_for_each_call)
{
    FAKE_START("VRAMSHIM_FREE=fenced");
    fake_only_a();
    CUdeviceptr p = get(4 * MiB), q = get(4 * MiB);
    give_back(p); /* tries whether the driver has fences */
    fake.cuCtxGetCurrent.calls = fake.cuCtxGetStreamPriorityRange.calls = 0;
    give_back(q);
    cr_assert_eq(block(q)->state, VRAM_PENDING);
    cr_assert_eq(fake.cuCtxGetCurrent.calls, 0);
    cr_assert_eq(fake.cuCtxGetStreamPriorityRange.calls, 1);
    vram_fence_settle_device(0);
    fake.cuCtxGetCurrent.calls = 0;
    get(4 * MiB);
    cr_assert_eq(fake.cuMemAlloc_v2.calls, 2);
    cr_assert_eq(fake.cuCtxGetCurrent.calls, 0);
    cr_assert_eq(fake.cuCtxGetStreamPriorityRange.calls, 2);
    invariants();
}

Test(only, a_free_that_waits_asks_one_thing_more)
{
    FAKE_START();
    fake_only_a();
    CUdeviceptr p = get(4 * MiB);
    fake.cuCtxGetCurrent.calls = fake.cuCtxGetStreamPriorityRange.calls = 0;
    give_back(p);
    cr_assert_eq(block(p)->state, VRAM_CACHED);
    cr_assert_eq(fake_a.waited_for, 1);
    cr_assert_eq(fake.cuCtxGetCurrent.calls, 0);
    cr_assert_eq(fake.cuCtxGetStreamPriorityRange.calls, 1, "the current context may be one that has ended");
    invariants();
}

Test(only, while_the_free_waits_the_block_is_nobodys)
{
    FAKE_START();
    fake_only_a();
    look_while_a_free_waits();
}

Test(only, what_failed_is_told)
{
    FAKE_START();
    fake_only_a();
    CUdeviceptr p = get(4 * MiB), q = get(4 * MiB), r;
    give_back(q);
    fake_a.failed = CUDA_ERROR_LAUNCH_FAILED;
    cr_assert_eq(vram_heap_free(p, 0), CUDA_ERROR_LAUNCH_FAILED);
    cr_assert_eq(vram_heap_alloc(&r, 4 * MiB, 0), CUDA_ERROR_LAUNCH_FAILED);
    cr_assert_eq(block(p)->state, VRAM_LIVE);
    invariants();
}

Test(only, a_thread_without_a_context_gets_the_native_answer)
{
    CUdeviceptr q;
    FAKE_START();
    fake_only_a();
    CUdeviceptr p = get(4 * MiB);
    fake_use(NULL);
    cr_assert_eq(vram_heap_alloc(&q, 4 * MiB, 0), CUDA_ERROR_INVALID_CONTEXT);
    give_back(p);
    cr_assert_eq(block(p)->state, VRAM_CACHED);
    cr_assert_eq(vram_heap_alloc(&q, 4 * MiB, 0), CUDA_ERROR_INVALID_CONTEXT);
    invariants();
}

/* Once there are two, or may be, each thread has its own. */
static void two_contexts(void)
{
    CUdeviceptr p = get(4 * MiB);
    give_back(p);
    fake_use(&fake_b);
    cr_assert_neq(get(4 * MiB), p);
    cr_assert_eq(block(p)->state, VRAM_CACHED);
    fake_use(&fake_a);
    cr_assert_eq(get(4 * MiB), p);
    invariants();
}

Test(only, a_second_context)
{
    FAKE_START();
    fake_only_a();
    vram_life_made(&fake_b, 0);
    two_contexts();
}

Test(only, a_context_of_a_green_one)
{
    FAKE_START();
    fake_only_a();
    vram_life_green(&fake_b);
    two_contexts();
}

/* Handles recur, and another thread may have the next context of the same one before the end of the first is known. */
Test(only, a_handle_that_recurs_before_its_end_is_decided)
{
    FAKE_START();
    fake_only_a();
    vram_life_primary(1, &fake_other);
    get(4 * MiB);
    struct vram_life *ending = vram_life_end_begin(&fake_other);
    vram_life_primary(1, &fake_other);
    vram_life_end(ending, true);
    cr_assert_null(vram_life_only(), "there is the new one");
    vram_lock(VRAM_RANK_HEAP);
    const struct vram_life *life = vram_life_find(&fake_other);
    vram_unlock(VRAM_RANK_HEAP);
    cr_assert(life && life->device == 1 && life->primary);
    vram_life_end(vram_life_end_begin(&fake_other), true);
    cr_assert_eq(vram_life_only(), &fake_a);
}

Test(only, when_one_of_two_ends_the_other_is)
{
    FAKE_START();
    fake_only_a();
    vram_life_made(&fake_b, 0);
    cr_assert_null(vram_life_only());
    vram_life_end(vram_life_end_begin(&fake_a), false);
    cr_assert_null(vram_life_only(), "it has not ended");
    vram_life_end(vram_life_end_begin(&fake_a), true);
    cr_assert_eq(vram_life_only(), &fake_b);
    struct vram_life *b = vram_life_end_begin(&fake_b);
    cr_assert_null(vram_life_only(), "nor is it one while it is ending");
    vram_life_end(b, true);
    cr_assert_null(vram_life_only());
}

Test(heap, without_a_driver_there_is_an_answer)
{
    CUdeviceptr p;
    size_t n;
    vram_driver_ready = true; /* and the table empty: an old driver */
    cr_assert_eq(vram_heap_alloc(&p, 1, 0), CUDA_ERROR_NOT_INITIALIZED);
    cr_assert_eq(vram_heap_alloc_pitch(&p, &n, 1, 1, 4, 0), CUDA_ERROR_NOT_INITIALIZED);
    cr_assert_eq(vram_heap_free(1, 0), CUDA_ERROR_NOT_INITIALIZED);
    cr_assert_eq(vram_heap_info(&n, &n), CUDA_ERROR_NOT_INITIALIZED);
}

Test(heap, what_cannot_be_accounted_for_works_and_is_told_once)
{
    FAKE_START();
    listen_to_it();
    fake.cuCtxGetDevice.refuse = CUDA_ERROR_UNKNOWN;
    CUdeviceptr p = get(4 * MiB), q = get(4 * MiB);
    cr_assert_null(block(p));
    give_back(p);
    give_back(q);
    cr_assert_eq(fake.cuMemFree_v2.calls, 2);
    cr_assert_eq(times_heard("cannot account for an allocation (nothing is known of its context)"), 1);
    fake.cuCtxGetDevice.refuse = CUDA_SUCCESS;
    cr_assert_not_null(block(get(4 * MiB)));
    invariants();
}

/* heap/host.h: pinned host memory that is kept. */
#include "heap/host.h"

#include <criterion/criterion.h>
#include <pthread.h>

#include "base/lock.h"
#include "driver/capture.h"
#include "driver/driver.h"
#include "heap/families.h"
#include "heap/heap.h"
#include "steps.h"

static struct vram_key at(const void *p) { return (struct vram_key){VRAM_AT_HOST, (uintptr_t)p}; }

/* What the hooks do. */
static void *get_host(size_t size, unsigned flags)
{
    void *p = vram_host_take(fake_current(), size, flags);
    if (!p)
        cr_assert_eq(vram_driver()->cuMemHostAlloc(&p, size, flags), CUDA_SUCCESS);
    vram_family_pinned(at(p), size, flags, 0);
    return p;
}

static CUresult free_host(void *p)
{
    if (vram_host_keep(p))
        return CUDA_SUCCESS;
    struct vram_leaving leaving = vram_family_leave(at(p));
    CUresult r = vram_driver()->cuMemFreeHost(p);
    vram_family_left(&leaving, r);
    return r;
}

static uint64_t held(void)
{
    const struct vram_figures *f = &vram_books(0)->figures[VRAM_HOST];
    return f->bytes + vram_books(1)->figures[VRAM_HOST].bytes;
}

Test(host, is_not_kept_by_default)
{
    FAKE_START();
    fake_only_a();
    void *p = get_host(1000, 0);
    cr_assert_eq(free_host(p), CUDA_SUCCESS);
    cr_assert_eq(fake.cuMemFreeHost.calls, 1);
    cr_assert_eq(fake.cuCtxSynchronize.calls, 0);
}

Test(host, serves_the_same_size_and_flags_of_the_same_context)
{
    FAKE_START("VRAMSHIM_HOST_CACHE=1M");
    fake_only_a();
    void *p = get_host(1000, 1);
    cr_assert_eq(held(), 1000);
    cr_assert_eq(free_host(p), CUDA_SUCCESS);
    cr_assert_eq(held(), 0);
    cr_assert_eq(fake.cuMemFreeHost.calls, 0);
    cr_assert_neq(get_host(1001, 1), p);
    cr_assert_neq(get_host(999, 1), p);
    cr_assert_neq(get_host(1000, 0), p);
    cr_assert_neq(get_host(1000, VRAM_HOST_PLAIN), p);
    fake_use(&fake_b);
    cr_assert_neq(get_host(1000, 1), p);
    fake_use(&fake_a);
    cr_assert_eq(get_host(1000, 1), p);
    cr_assert_neq(get_host(1000, 1), p, "once");
    fake_use(NULL);
    cr_assert_null(vram_host_take(NULL, 1000, 1));
}

Test(host, a_free_waits_for_all_work_of_every_context)
{
    FAKE_START("VRAMSHIM_HOST_CACHE=1M", "VRAMSHIM_FREE=fenced");
    fake_only_a();
    void *p = get_host(1000, 0);
    vram_life_made(&fake_other, 1);
    fake_a.work++;
    fake_other.work++;
    cr_assert_eq(free_host(p), CUDA_SUCCESS);
    cr_assert_eq(fake_a.done, fake_a.work);
    cr_assert_eq(fake_other.done, fake_other.work, "a context that never allocated uses it as well");
    cr_assert_eq(fake.cuMemFreeHost.calls, 0);
    cr_assert_eq(fake_current(), &fake_a);
}

Test(host, is_not_kept_beside_a_context_that_cannot_be_waited_for)
{
    FAKE_START("VRAMSHIM_HOST_CACHE=1M");
    fake_only_a();
    void *p = get_host(1000, 0), *q = get_host(1000, 0), *r = get_host(1000, 0);
    vram_life_made(&fake_b, 0);
    fake_b.failed = CUDA_ERROR_ILLEGAL_ADDRESS;
    cr_assert_eq(free_host(p), CUDA_SUCCESS);
    cr_assert_eq(fake.cuMemFreeHost.calls, 1);
    fake_b.failed = CUDA_SUCCESS;
    vram_capture_announce();
    cr_assert_eq(free_host(q), CUDA_SUCCESS);
    vram_capture_not_begun();
    cr_assert_eq(fake.cuMemFreeHost.calls, 2);
    vram_life_green(&fake_other);
    cr_assert_eq(free_host(r), CUDA_SUCCESS);
    cr_assert_eq(fake.cuMemFreeHost.calls, 3);
    cr_assert_eq(held(), 0);
}

Test(host, keeps_no_more_than_its_limit)
{
    FAKE_START("VRAMSHIM_HOST_CACHE=10K");
    fake_only_a();
    void *p = get_host(6000, 0), *q = get_host(6000, 0), *r = get_host(4000, 0);
    free_host(p);
    free_host(q);
    free_host(r);
    cr_assert_eq(vram_heap.host.count, 2);
    cr_assert_eq(vram_heap.host.bytes, 10000);
    cr_assert_eq(fake.cuMemFreeHost.calls, 1);
}

Test(host, is_free_to_the_program_while_it_is_kept)
{
    FAKE_START("VRAMSHIM_HOST_CACHE=1M");
    fake_only_a();
    void *p = get_host(1000, 0), *q = get_host(1000, 0);
    cr_assert_not(vram_heap_host_is_kept(p));
    free_host(p);
    cr_assert(vram_heap_host_is_kept(p));
    cr_assert_not(vram_host_keep(p), "a second free");
    cr_assert_not(vram_heap_host_is_kept(q));
    cr_assert_not(vram_host_keep((char *)q + 8), "inside");
    cr_assert_eq(vram_heap.host.count, 1);
}

Test(host, what_was_given_attributes_is_not_kept)
{
    FAKE_START("VRAMSHIM_HOST_CACHE=1M");
    fake_only_a();
    void *p = get_host(1000, 0);
    vram_heap_identity_left((uintptr_t)p);
    free_host(p);
    cr_assert_eq(fake.cuMemFreeHost.calls, 1);
}

Test(host, is_given_back_when_asked_and_before_its_context_ends)
{
    FAKE_START("VRAMSHIM_HOST_CACHE=1M");
    fake_only_a();
    void *p = get_host(1000, 0), *q = get_host(2000, 0);
    fake_use(&fake_b);
    void *r = get_host(4000, 0);
    free_host(p);
    free_host(q);
    free_host(r);
    cr_assert_eq(vram_host_trim(&fake_b), 4000);
    cr_assert_eq(vram_heap.host.bytes, 3000);
    cr_assert_eq(vram_host_trim(NULL), 3000);
    cr_assert_eq(vram_heap.host.count, 0);
    cr_assert_eq(fake.cuMemFreeHost.calls, 3);
    cr_assert_eq(fake_current(), &fake_b);
    cr_assert_eq(vram_host_trim(NULL), 0);
}

Test(host, ends_with_its_context)
{
    FAKE_START("VRAMSHIM_HOST_CACHE=1M");
    fake_only_a();
    void *p = get_host(1000, 0);
    free_host(p);
    vram_life_end(vram_life_end_begin(&fake_a), true);
    cr_assert_eq(vram_heap.host.count, 0);
    cr_assert_eq(vram_heap.host.bytes, 0);
    cr_assert_null(vram_host_take(&fake_a, 1000, 0));
}

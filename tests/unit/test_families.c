/* heap/families.h and heap/pools.h, where the simulated driver cannot go: host memory by handle, handles that recur. */
#include "heap/families.h"

#include <criterion/criterion.h>

#include "heap/pools.h"
#include "steps.h"

static struct vram_figures *figures(enum vram_family family)
{
    return &vram_books(0)->figures[family];
}

Test(families, host_memory_with_a_handle_outlives_the_context_that_was_current)
{
    FAKE_START();
    give_back(get(1000)); /* the life begins */
    vram_family_born(VRAM_HOST, VRAM_DEVICE_OF_CONTEXT, (struct vram_key){VRAM_BY_HANDLE, 5}, MiB, 0);
    vram_family_born(VRAM_HOST, VRAM_DEVICE_OF_CONTEXT, (struct vram_key){VRAM_AT_HOST, 5}, 3 * MiB, 0);
    cr_assert_eq(figures(VRAM_HOST)->count, 2);
    vram_life_end(vram_life_end_begin(&fake_a), true);
    cr_assert_eq(figures(VRAM_HOST)->count, 1);
    cr_assert_eq(figures(VRAM_HOST)->bytes, MiB);
    struct vram_leaving leaving = vram_family_leave((struct vram_key){VRAM_BY_HANDLE, 5});
    vram_family_left(&leaving, CUDA_SUCCESS);
    cr_assert_eq(figures(VRAM_HOST)->count, 0);
    cr_assert_eq(figures(VRAM_HOST)->ended_count, 1);
}

Test(pools, a_handle_is_given_out_again_before_its_end_came_back)
{
    char handle[8];
    CUmemoryPool pool = (CUmemoryPool)(void *)handle;
    FAKE_START();
    vram_pool_made(pool, 0);
    vram_pool_end_begin(pool);
    vram_pool_made(pool, 1); /* by another thread: the driver has ended the first */
    vram_pool_end(pool, true);
    cr_assert(vram_heap.pools, "the second is known");
    cr_assert_eq(vram_heap.pools->device, 1);
    cr_assert_not(vram_heap.pools->closing);
    vram_pool_end_begin(pool);
    vram_pool_end(pool, true);
    cr_assert_not(vram_heap.pools);
}

Test(pools, one_whose_end_is_refused_is_known_as_before)
{
    char handle[8];
    CUmemoryPool pool = (CUmemoryPool)(void *)handle;
    FAKE_START();
    vram_pool_made(pool, 0);
    vram_pool_end_begin(pool);
    vram_pool_end(pool, false);
    cr_assert(vram_heap.pools && !vram_heap.pools->closing);
}

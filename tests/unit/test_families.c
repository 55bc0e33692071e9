/* heap/families.h, heap/pools.h and heap/view.h: memory that is accounted for, what the driver's pools keep, and the sum. */
#include <criterion/criterion.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "base/compiler.h"
#include "base/lock.h"
#include "driver/capture.h"
#include "driver/driver.h"
#include "heap/families.h"
#include "heap/heap.h"
#include "heap/pools.h"
#include "heap/view.h"
#include "steps.h"

enum { PAGE = 2 * MiB };

static struct vram_key at(uint64_t address) { return (struct vram_key){VRAM_AT_ADDRESS, address}; }
static struct vram_key handle(uint64_t h) { return (struct vram_key){VRAM_BY_HANDLE, h}; }
static const struct vram_figures *figures(int device, enum vram_family f) { return &vram_books(device)->figures[f]; }

static void born(enum vram_family family, struct vram_key key, uint64_t bytes)
{
    vram_family_born(family, VRAM_DEVICE_OF_CONTEXT, key, bytes, 0);
}

static void freed(struct vram_key key, CUresult r)
{
    struct vram_leaving leaving = vram_family_leave(key);
    vram_family_left(&leaving, r);
}

static uint64_t part(const struct vram_device_view *v, const char *words)
{
    for (unsigned i = 0; i < v->count; i++)
        if (strstr(v->parts[i].words, words))
            return v->parts[i].bytes;
    return 0;
}

Test(families, of_the_device_of_the_context_or_the_one_that_is_named)
{
    FAKE_START();
    born(VRAM_MANAGED, at(0x1000), 100);
    fake_use(&fake_other);
    born(VRAM_MANAGED, at(0x2000), 200);
    vram_family_born(VRAM_VIRTUAL, 0, handle(7), 300, 0);
    cr_assert_eq(figures(0, VRAM_MANAGED)->bytes, 100);
    cr_assert_eq(figures(1, VRAM_MANAGED)->bytes, 200);
    cr_assert_eq(figures(0, VRAM_VIRTUAL)->bytes, 300);
    fake_use(NULL);
    freed(at(0x2000), CUDA_SUCCESS);
    cr_assert_eq(figures(1, VRAM_MANAGED)->count, 0, "whatever context is current");
    freed(at(0x1000), CUDA_ERROR_DEINITIALIZED);
    cr_assert_eq(figures(0, VRAM_MANAGED)->count, 0, "on the way out the driver is gone already");
    freed(handle(7), CUDA_ERROR_INVALID_VALUE);
    cr_assert_eq(figures(0, VRAM_VIRTUAL)->count, 1);
}

Test(families, without_a_context_it_is_nobodys_but_counted)
{
    FAKE_START();
    fake_use(NULL);
    vram_family_born(VRAM_VIRTUAL, 1, handle(7), 300, 0);
    cr_assert_eq(figures(1, VRAM_VIRTUAL)->count, 1);
    cr_assert(vram_heap_used());
    freed(handle(7), CUDA_SUCCESS);
    cr_assert_eq(figures(1, VRAM_VIRTUAL)->count, 0);
}

Test(families, what_ends_with_its_context)
{
    FAKE_START();
    born(VRAM_MANAGED, at(0x1000), 100);
    born(VRAM_ASYNC, at(0x2000), 200);
    vram_family_born(VRAM_VIRTUAL, 0, handle(7), 300, 0);
    fake_use(&fake_b);
    born(VRAM_ARRAY, (struct vram_key){VRAM_BY_ARRAY, 1}, 400);
    fake_end(&fake_a);
    vram_life_end(vram_life_end_begin(&fake_a), true);
    cr_assert_eq(figures(0, VRAM_MANAGED)->count, 0);
    cr_assert_eq(figures(0, VRAM_MANAGED)->ended_bytes, 100);
    cr_assert_eq(figures(0, VRAM_ASYNC)->count, 1);
    cr_assert_eq(figures(0, VRAM_VIRTUAL)->count, 1);
    cr_assert_eq(figures(0, VRAM_ARRAY)->count, 1);
}

Test(families, an_opened_handle_is_opened_once_and_closed_as_often)
{
    FAKE_START();
    born(VRAM_IPC, at(0x1000), 100);
    born(VRAM_IPC, at(0x1000), 100);
    cr_assert_eq(figures(0, VRAM_IPC)->count, 1);
    freed(at(0x1000), CUDA_SUCCESS);
    cr_assert_eq(figures(0, VRAM_IPC)->count, 1);
    freed(at(0x1000), CUDA_SUCCESS);
    cr_assert_eq(figures(0, VRAM_IPC)->count, 0);
}

Test(families, handles_that_are_retained)
{
    FAKE_START();
    vram_family_born(VRAM_VIRTUAL, 0, handle(7), PAGE, 0);
    vram_family_map_end(vram_family_map_begin(7), 0x100000, PAGE, CUDA_SUCCESS);
    vram_family_map_end(vram_family_map_begin(7), 0x900000, PAGE, CUDA_ERROR_INVALID_VALUE);
    cr_assert_null(vram_family_map_begin(8), "a handle that nobody gave");
    vram_family_retained(7, 0x100000 + 5);
    vram_family_retained(9, 0x100000);
    vram_family_retained(11, 0x900000);
    freed(handle(7), CUDA_SUCCESS);
    freed(handle(7), CUDA_SUCCESS);
    freed(handle(9), CUDA_SUCCESS);
    cr_assert_eq(figures(0, VRAM_VIRTUAL)->count, 1, "it is still mapped");
    vram_family_unmap_end(vram_family_unmap_begin(0x100000, PAGE), CUDA_SUCCESS);
    cr_assert_eq(figures(0, VRAM_VIRTUAL)->count, 0);
    vram_family_unmap_end(vram_family_unmap_begin(0x100000, PAGE), CUDA_ERROR_INVALID_VALUE);
}

Test(families, bytes_of_an_array)
{
    CUDA_ARRAY3D_DESCRIPTOR d = {.Width = 1024, .Height = 1024, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4};
    cr_assert_eq(vram_family_array_bytes(&d, 1), 16 * MiB);
    d.Depth = 3;
    cr_assert_eq(vram_family_array_bytes(&d, 1), 48 * MiB);
    d.Depth = 0;
    cr_assert_eq(vram_family_array_bytes(&d, 2), 20 * MiB);
    d.Height = 0;
    cr_assert_eq(vram_family_array_bytes(&d, 1), 16 * 1024);
    d.Flags = CUDA_ARRAY3D_SPARSE;
    cr_assert_eq(vram_family_array_bytes(&d, 1), 0);
    d = (CUDA_ARRAY3D_DESCRIPTOR){.Width = SIZE_MAX, .Height = SIZE_MAX, .Format = CU_AD_FORMAT_HALF, .NumChannels = 4};
    cr_assert_eq(vram_family_array_bytes(&d, 1), UINT64_MAX);
}

/* An allocation of another family that finds no room beside what is kept. */
static unsigned tries;
static CUresult take_pages(uint64_t pages)
{
    size_t unused, total;
    tries++;
    CUresult r = vram_driver()->cuMemGetInfo_v2(&unused, &total);
    return r == CUDA_SUCCESS && unused < pages * PAGE ? CUDA_ERROR_OUT_OF_MEMORY : r;
}

Test(rescue, just_enough_of_what_is_kept)
{
    FAKE_START();
    CUdeviceptr p[4];
    for (int i = 0; i < 4; i++)
        p[i] = get(16 * PAGE);
    for (int i = 0; i < 4; i++)
        give_back(p[i]);
    cr_assert_eq(VRAM_RESCUED(20 * PAGE, VRAM_DEVICE_OF_CONTEXT, take_pages(20)), CUDA_SUCCESS);
    cr_assert_eq(fake_blocks(), 2);
    cr_assert_eq(vram_books(0)->oom_rescued, 1);
    cr_assert_eq(VRAM_RESCUED(64 * PAGE, 0, take_pages(64)), CUDA_SUCCESS, "and all of it");
    cr_assert_eq(fake_blocks(), 0);
    invariants();
}

Test(rescue, nothing_for_what_the_card_has_not)
{
    FAKE_START();
    give_back(get(16 * PAGE));
    cr_assert_eq(VRAM_RESCUED(65 * PAGE, VRAM_DEVICE_OF_CONTEXT, take_pages(65)), CUDA_ERROR_OUT_OF_MEMORY);
    cr_assert_eq(fake_blocks(), 1);
    cr_assert_eq(vram_books(0)->oom_failed, 1);
}

Test(rescue, of_another_device_than_the_current_one)
{
    FAKE_START();
    fake_use(&fake_other);
    give_back(get(16 * PAGE));
    fake_use(&fake_a);
    give_back(get(16 * PAGE));
    tries = 0;
    fake_use(&fake_a);
    cr_assert_eq(VRAM_RESCUED(PAGE, 1, tries++ ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY), CUDA_SUCCESS);
    cr_assert_eq(vram_books(1)->held_blocks, 0);
    cr_assert_eq(vram_books(0)->held_blocks, 1);
    cr_assert_eq(fake_current(), &fake_a);
}

Test(rescue, what_the_pools_do_not_use_comes_last)
{
    FAKE_START();
    born(VRAM_ASYNC, at(0x1000), PAGE);
    fake_pools[0] = (struct CUmemPoolHandle_st){.reserved = 40, .used = 1};
    give_back(get(4 * PAGE));
    cr_assert_eq(VRAM_RESCUED(22 * PAGE, VRAM_DEVICE_OF_CONTEXT, take_pages(22)), CUDA_SUCCESS);
    cr_assert_eq(fake_pools[0].reserved, 40, "the cache was enough");
    cr_assert_eq(VRAM_RESCUED(60 * PAGE, VRAM_DEVICE_OF_CONTEXT, take_pages(60)), CUDA_SUCCESS);
    cr_assert_eq(fake_pools[0].reserved, 1);
    cr_assert_eq(VRAM_RESCUED(64 * PAGE, VRAM_DEVICE_OF_CONTEXT, take_pages(64)), CUDA_ERROR_OUT_OF_MEMORY);
}

Test(pools, are_trimmed_to_what_is_in_use)
{
    FAKE_START();
    fake_pools[0] = (struct CUmemPoolHandle_st){.reserved = 10, .used = 3};
    cr_assert_eq(vram_pools_trim(VRAM_EVERY_DEVICE, NULL), 0, "a program that uses none");
    cr_assert_eq(fake.cuDeviceGetDefaultMemPool.calls, 0);
    born(VRAM_ASYNC, at(0x1000), PAGE);
    fake_own_pool = (struct CUmemPoolHandle_st){.reserved = 20, .used = 20};
    vram_pool_made(&fake_own_pool, 0);
    cr_assert_eq(vram_pools_idle(VRAM_EVERY_DEVICE), 7 * PAGE);
    cr_assert_eq(vram_pools_idle(1), 0);
    fake_own_pool.used = 5;
    cr_assert_eq(vram_pools_idle(0), 22 * PAGE);
    cr_assert_eq(vram_pools_trim(1, NULL), 0);
    cr_assert_eq(vram_pools_trim(0, NULL), 22 * PAGE);
    cr_assert_eq(fake_own_pool.reserved, 5);
    cr_assert_eq(fake_pools[0].reserved, 3);
    fake_own_pool.reserved = 9;
    vram_pool_end_begin(&fake_own_pool);
    cr_assert_eq(vram_pools_trim(0, NULL), 0, "it is being destroyed");
    vram_pool_end(&fake_own_pool, false);
    cr_assert_eq(vram_pools_trim(0, NULL), 4 * PAGE, "no, it is not");
    vram_pool_end_begin(&fake_own_pool);
    vram_pool_end(&fake_own_pool, true);
    fake_own_pool.reserved = 9;
    cr_assert_eq(vram_pools_trim(0, NULL), 0);
}

Test(pools, of_graphs_where_the_program_allocates_in_captures)
{
    FAKE_START();
    fake_graphs[0] = (struct CUmemPoolHandle_st){.reserved = 4, .used = 1};
    cr_assert_eq(vram_pools_trim(0, NULL), 0);
    vram_family_graph_memory();
    cr_assert_eq(vram_pools_trim(0, NULL), 3 * PAGE);
    cr_assert_eq(fake_graphs[0].reserved, 1);
}

Test(pools, a_driver_that_refuses_or_lacks_it)
{
    FAKE_START();
    born(VRAM_ASYNC, at(0x1000), PAGE);
    fake_pools[0] = (struct CUmemPoolHandle_st){.reserved = 10, .used = 3};
    fake.cuMemPoolTrimTo.refuse = CUDA_ERROR_INVALID_VALUE;
    cr_assert_eq(vram_pools_trim(0, NULL), 0);
    fake.cuMemPoolGetAttribute.refuse = CUDA_ERROR_INVALID_VALUE;
    cr_assert_eq(vram_pools_trim(0, NULL), 0);
    vram_driver_table.cuMemPoolGetAttribute = NULL;
    vram_driver_table.cuDeviceGetDefaultMemPool = NULL;
    vram_driver_table.cuDeviceGetGraphMemAttribute = NULL;
    cr_assert_eq(vram_pools_trim(0, NULL), 0);
}

Test(pools, not_during_a_capture)
{
    FAKE_START();
    born(VRAM_ASYNC, at(0x1000), PAGE);
    fake_pools[0] = (struct CUmemPoolHandle_st){.reserved = 10, .used = 3};
    vram_capture_announce();
    cr_assert_eq(vram_pools_trim(0, NULL), 0);
    vram_capture_not_begun();
    cr_assert_eq(vram_pools_trim(0, NULL), 7 * PAGE);
}

/* The destruction of a pool waits for the trim that is at the driver. */
static atomic_bool destroyed;
static void *destroy(void *unused)
{
    vram_pool_end_begin(&fake_own_pool);
    atomic_store(&destroyed, true);
    vram_pool_end(&fake_own_pool, true);
    return unused;
}

static pthread_t destroyer;
static void destroy_meanwhile(void)
{
    pthread_create(&destroyer, NULL, destroy, NULL);
    nanosleep(&(const struct timespec){0, 20000000}, NULL);
    cr_assert_not(atomic_load(&destroyed));
}

Test(pools, are_not_destroyed_under_a_trim)
{
    FAKE_START();
    fake_own_pool = (struct CUmemPoolHandle_st){.reserved = 9, .used = 5};
    vram_pool_made(&fake_own_pool, 0);
    atomic_store(&fake.cuMemPoolTrimTo.before, destroy_meanwhile);
    cr_assert_eq(vram_pools_trim(0, NULL), 4 * PAGE);
    pthread_join(destroyer, NULL);
    cr_assert(atomic_load(&destroyed));
}

Test(view, the_parts_and_the_remainder_are_what_is_in_use)
{
    struct vram_device_view v;
    FAKE_START();
    fake.others[0] = 5;
    cr_assert_not(vram_view(0, &v), "no context of the program's is known");
    CUdeviceptr a = get(4 * PAGE), b = get(3 * PAGE);
    get(1000);
    give_back(b);
    fake_pools[0] = (struct CUmemPoolHandle_st){.reserved = 10, .used = 4};
    born(VRAM_ASYNC, at(0x1000), 4 * PAGE);
    fake.others[0] += 2 + 6; /* by the driver, and what follows: */
    vram_family_born(VRAM_VIRTUAL, 0, handle(7), 6 * PAGE, 0);
    born(VRAM_MANAGED, at(0x2000), 100 * PAGE);
    born(VRAM_HOST, (struct vram_key){VRAM_AT_HOST, 0x2000}, 100 * PAGE);
    cr_assert(vram_view(0, &v));
    cr_assert_eq(v.total, 64 * (uint64_t)PAGE);
    cr_assert_eq(v.used, (5 + 4 + 3 + 1 + 10 + 2 + 6) * (uint64_t)PAGE);
    cr_assert_eq(part(&v, "in blocks"), 5 * PAGE);
    cr_assert_eq(part(&v, "kept"), 3 * PAGE);
    cr_assert_eq(part(&v, "stream-ordered"), 4 * PAGE);
    cr_assert_eq(part(&v, "idle"), 6 * PAGE);
    cr_assert_eq(part(&v, "virtual"), 6 * PAGE);
    cr_assert_eq(part(&v, "before"), 5 * PAGE);
    cr_assert_eq(v.used - v.named, 2 * PAGE);
    cr_assert_eq(v.managed, 100 * (uint64_t)PAGE);
    for (unsigned i = 1; i < v.count; i++)
        cr_assert(v.parts[i - 1].bytes >= v.parts[i].bytes && v.parts[i].bytes);
    give_back(a);
    cr_assert(vram_view(0, &v));
    cr_assert_eq(part(&v, "in blocks"), PAGE);
    cr_assert_not(vram_view(1, &v));
    cr_assert_eq(fake_current(), &fake_a);
}

Test(view, is_not_taken_where_the_driver_must_not_be_asked)
{
    struct vram_device_view v;
    FAKE_START();
    get(PAGE);
    vram_capture_announce();
    cr_assert_not(vram_view(0, &v));
    vram_capture_not_begun();
    fake.cuMemGetInfo_v2.refuse = CUDA_ERROR_UNKNOWN;
    cr_assert_not(vram_view(0, &v));
    fake.cuMemGetInfo_v2.refuse = CUDA_SUCCESS;
    cr_assert(vram_view(0, &v));
    vram_heap_exiting();
    cr_assert_not(vram_view(0, &v));
}

Test(families, host_memory_with_a_handle_outlives_the_context_that_was_current)
{
    FAKE_START();
    give_back(get(1000)); /* the life begins */
    vram_family_born(VRAM_HOST, VRAM_DEVICE_OF_CONTEXT, (struct vram_key){VRAM_BY_HANDLE, 5}, MiB, 0);
    vram_family_born(VRAM_HOST, VRAM_DEVICE_OF_CONTEXT, (struct vram_key){VRAM_AT_HOST, 5}, 3 * MiB, 0);
    cr_assert_eq(figures(0, VRAM_HOST)->count, 2);
    vram_life_end(vram_life_end_begin(&fake_a), true);
    cr_assert_eq(figures(0, VRAM_HOST)->count, 1);
    cr_assert_eq(figures(0, VRAM_HOST)->bytes, MiB);
    struct vram_leaving leaving = vram_family_leave((struct vram_key){VRAM_BY_HANDLE, 5});
    vram_family_left(&leaving, CUDA_SUCCESS);
    cr_assert_eq(figures(0, VRAM_HOST)->count, 0);
    cr_assert_eq(figures(0, VRAM_HOST)->ended_count, 1);
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

/*
 * Out of memory in each family: what the shim keeps, and what the driver's pools keep, gives way, as natively
 * everything that the program has freed would be free. A device of 1 GiB, so that it can be filled. Law 11 for the
 * other families.
 */
#include "family.h"

enum { CAPACITY_MIB = 1024, NEARLY_ALL_MIB = 960 };

static void __attribute__((constructor)) small_devices(void)
{
    setenv("SIMCUDA_CAPACITY", "1G", 1);
    setenv("SIMCUDA_DEVICES", "2", 1);
    setenv("VRAMSHIM_SLACK", "unlimited", 1); /* nothing is given back before the ladder is climbed */
}

/* One way to ask for memory of the device, and to give it up. */
struct way {
    const char *entry;
    CUresult (*get)(uint64_t *name, size_t size);
    CUresult (*give)(uint64_t name);
};

static CUmemoryPool own_pool(void)
{
    static CUmemoryPool pool;
    if (!pool)
        pool = pool_on(0);
    return pool;
}

static CUresult get_managed(uint64_t *name, size_t size)
{
    return cu.cuMemAllocManaged((CUdeviceptr *)name, size, 1);
}
static CUresult get_async(uint64_t *name, size_t size)
{
    return cu.cuMemAllocAsync((CUdeviceptr *)name, size, NULL);
}
static CUresult get_from_pool(uint64_t *name, size_t size)
{
    return cu.cuMemAllocFromPoolAsync((CUdeviceptr *)name, size, own_pool(), NULL);
}
static CUresult get_plain(uint64_t *name, size_t size)
{
    return cu.cuMemAlloc_v2((CUdeviceptr *)name, size);
}
static CUresult give_address(uint64_t name)
{
    return cu.cuMemFree_v2(name);
}

static CUresult get_piece(uint64_t *name, size_t size)
{
    const CUmemAllocationProp prop = on_device(0);
    return cu.cuMemCreate((CUmemGenericAllocationHandle *)name, size, &prop, 0);
}
static CUresult give_piece(uint64_t name)
{
    return cu.cuMemRelease(name);
}

static CUresult get_flat(uint64_t *name, size_t size)
{
    /* Rows of 128 KiB: the height of an array is limited. */
    const CUDA_ARRAY_DESCRIPTOR d = {
        .Width = 8192, .Height = size >> 17, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4};
    return cu.cuArrayCreate_v2((CUarray *)name, &d);
}
static CUresult get_deep(uint64_t *name, size_t size)
{
    const CUDA_ARRAY3D_DESCRIPTOR d = deep(size);
    return cu.cuArray3DCreate_v2((CUarray *)name, &d);
}
static CUresult give_array(uint64_t name)
{
    return cu.cuArrayDestroy((CUarray)(uintptr_t)name);
}
static CUresult get_levels(uint64_t *name, size_t size)
{
    const CUDA_ARRAY3D_DESCRIPTOR d = deep(size);
    return cu.cuMipmappedArrayCreate((CUmipmappedArray *)name, &d, 1);
}
static CUresult give_levels(uint64_t name)
{
    return cu.cuMipmappedArrayDestroy((CUmipmappedArray)(uintptr_t)name);
}

static const struct way ways[] = {
    {"cuMemAllocManaged", get_managed, give_address},
    {"cuMemAllocAsync", get_async, give_address},
    {"cuMemAllocFromPoolAsync", get_from_pool, give_address},
    {"cuMemCreate", get_piece, give_piece},
    {"cuArrayCreate_v2", get_flat, give_array},
    {"cuArray3DCreate_v2", get_deep, give_array},
    {"cuMipmappedArrayCreate", get_levels, give_levels},
    {"cuMemAlloc_v2", get_plain, give_address},
};
enum { WAYS = sizeof(ways) / sizeof(*ways) };

#define BY(way, call)                                                                                                  \
    do {                                                                                                               \
        CUresult by_ = (call);                                                                                         \
        if (by_ != CUDA_SUCCESS)                                                                                       \
            law_fail(__FILE__, __LINE__, "%s: %d", (way)->entry, by_);                                                 \
    } while (0)

/* All of the device, in blocks that the program has freed. */
static void fill_cache(void)
{
    CUdeviceptr p[16];
    for (int i = 0; i < 16; i++)
        OK(cu.cuMemAlloc_v2(&p[i], 64 * MIB));
    for (int i = 0; i < 16; i++)
        OK(cu.cuMemFree_v2(p[i]));
    CHECK_EQ(SIM(sim_used)(0), under_shim() ? (uint64_t)CAPACITY_MIB * MIB : 0);
}

LAW_CASE_SIM(the_cache_gives_way)
{
    uint64_t name;
    law_context();
    own_pool();
    for (int i = 0; i < WAYS; i++) {
        fill_cache();
        BY(&ways[i], ways[i].get(&name, (size_t)NEARLY_ALL_MIB * MIB));
        BY(&ways[i], ways[i].give(name));
        CHECK_EQ(cu.cuStreamSynchronize(NULL), CUDA_SUCCESS);
    }
}

/* No more of it than is needed. */
LAW_CASE_SIM(enough_and_no_more)
{
    uint64_t name;
    law_context();
    own_pool();
    for (int i = 0; i < WAYS; i++) {
        fill_cache();
        if (ways[i].get == get_plain)
            continue; /* served from the cache */
        BY(&ways[i], ways[i].get(&name, 96 * MIB));
        CHECK(!under_shim() || SIM(sim_used)(0) == (uint64_t)(CAPACITY_MIB - 32) * MIB);
        BY(&ways[i], ways[i].give(name));
        if (!under_shim())
            continue;
        raise(SIGUSR1);
        WAIT_UNTIL(SIM(sim_used)(0) == 0);
    }
}

/* What could never be there costs nobody his cache. */
LAW_CASE_SIM(more_than_there_is)
{
    uint64_t name;
    CUdeviceptr held, cached;
    law_context();
    own_pool();
    OK(cu.cuMemAlloc_v2(&held, 256 * MIB));
    cached = cached_block(512 * MIB);
    for (int i = 0; i < WAYS; i++) {
        for (size_t mib = 800; mib <= 1600; mib += 800)
            CHECK_EQ(ways[i].get(&name, mib * MIB), CUDA_ERROR_OUT_OF_MEMORY);
        CHECK_EQ(SIM(sim_is_allocated)(cached), under_shim());
    }
    for (int i = 0; i < WAYS; i++) {
        BY(&ways[i], ways[i].get(&name, 768 * MIB));
        BY(&ways[i], ways[i].give(name));
        OK(cu.cuStreamSynchronize(NULL));
    }
}

/* Another error is not this one. */
LAW_CASE_SIM(other_errors)
{
    uint64_t name;
    law_context();
    own_pool();
    CUdeviceptr cached = cached_block(512 * MIB);
    for (int i = 0; i < WAYS; i++) {
        CHECK(SIM(sim_fail)(ways[i].entry, 1, 1, CUDA_ERROR_UNKNOWN) == 0);
        unsigned long before = driver_calls(ways[i].entry);
        CHECK_EQ(ways[i].get(&name, 768 * MIB), CUDA_ERROR_UNKNOWN);
        CHECK_EQ(driver_calls(ways[i].entry), before + 1);
        CHECK_EQ(SIM(sim_is_allocated)(cached), under_shim());
    }
}

/* Physical memory names its device, whichever is current, and needs no context. */
LAW_CASE_SIM(of_the_device_that_is_named)
{
    CUcontext first = law_context(), second;
    const CUmemAllocationProp prop = on_device(1);
    CUmemGenericAllocationHandle handle;
    OK(cu.cuDevicePrimaryCtxRetain(&second, 1));
    for (int with_context = 0; with_context < 2; with_context++) {
        OK(cu.cuCtxSetCurrent(second));
        CUdeviceptr there = cached_block(900 * MIB);
        OK(cu.cuCtxSetCurrent(first));
        CUdeviceptr here = cached_block(900 * MIB);
        OK(cu.cuCtxSetCurrent(with_context ? first : NULL));
        OK(cu.cuMemCreate(&handle, (size_t)NEARLY_ALL_MIB * MIB, &prop, 0));
        CHECK(!SIM(sim_is_allocated)(there));
        CHECK_EQ(SIM(sim_is_allocated)(here), under_shim());
        OK(cu.cuMemRelease(handle));
    }
}

/* A pool may be another device's than the stream. */
LAW_CASE_SIM(of_the_device_of_the_pool)
{
    CUcontext first = law_context(), second;
    OK(cu.cuDevicePrimaryCtxRetain(&second, 1));
    OK(cu.cuCtxSetCurrent(second));
    cached_block(900 * MIB);
    OK(cu.cuCtxSetCurrent(first));
    CUdeviceptr here = cached_block(900 * MIB);
    in_order_from(pool_on(1), (size_t)NEARLY_ALL_MIB * MIB);
    CHECK_EQ(SIM(sim_used)(1), (uint64_t)NEARLY_ALL_MIB * MIB);
    CHECK_EQ(SIM(sim_is_allocated)(here), under_shim());
}

/* What pools keep and do not use is free as well: beside blocks that are kept, or alone. */
LAW_CASE_SIM(pools_give_way)
{
    uint64_t name;
    CUmemoryPool pools[2];
    law_context();
    pools[0] = default_pool();
    pools[1] = own_pool();
    for (int i = 0; i < WAYS; i++) {
        if (ways[i].get == get_async || ways[i].get == get_from_pool)
            continue; /* from one of these pools itself */
        for (int beside = 0; beside < 2; beside++) {
            idle_in(pools[0], 300 * MIB);
            idle_in(pools[1], 300 * MIB);
            if (beside)
                cached_block(300 * MIB);
            BY(&ways[i], ways[i].get(&name, (size_t)NEARLY_ALL_MIB * MIB));
            BY(&ways[i], ways[i].give(name));
        }
    }
}

/* A driver that says no before it has looked into its pools: natively that would be the end of it. */
LAW_CASE_SIM(a_driver_that_does_not_ask_its_pools)
{
    uint64_t name;
    CUmemoryPool pool;
    law_context();
    pool = own_pool();
    CUdeviceptr held = in_order_from(pool, 2 * MIB);
    for (int i = 0; under_shim() && i < WAYS; i++) {
        if (ways[i].get == get_from_pool)
            continue;
        for (int beside = 0; beside < 2; beside++) {
            if (beside)
                cached_block(400 * MIB);
            idle_in(pool, 400 * MIB);
            CUdeviceptr other = in_order(beside ? 20 * MIB : 420 * MIB); /* 202 MiB are free */
            CHECK(SIM(sim_fail)(ways[i].entry, 1, 1, CUDA_ERROR_OUT_OF_MEMORY) == 0);
            unsigned long trims = driver_calls("cuMemPoolTrimTo");
            BY(&ways[i], ways[i].get(&name, (beside ? 900 : 500) * MIB));
            if (!beside)
                CHECK(driver_calls("cuMemPoolTrimTo") > trims);
            BY(&ways[i], ways[i].give(name));
            OK(cu.cuMemFree_v2(other));
        }
    }
    OK(cu.cuMemFree_v2(held));
}

/* In a capture the shim does nothing of its own; what is forbidden there fails natively. */
LAW_CASE_SIM(not_in_a_capture)
{
    CUstream stream;
    CUgraph graph;
    uint64_t name;
    law_context();
    idle_in(own_pool(), 100 * MIB);
    cached_block(800 * MIB);
    OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    if (!under_shim())
        return; /* there is no cache in the way */
    OK(cu.cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    for (int i = 0; i < WAYS; i++)
        if (ways[i].get == get_managed || ways[i].get == get_piece || ways[i].get == get_deep)
            CHECK_EQ(ways[i].get(&name, (size_t)NEARLY_ALL_MIB * MIB), CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_EQ(SIM(sim_calls_during_capture)("cuMemFree_v2"), 0);
    CHECK_EQ(SIM(sim_calls_during_capture)("cuMemPoolTrimTo"), 0);
    CHECK_EQ(SIM(sim_calls_during_capture)("cuMemPoolGetAttribute"), 0);
    CHECK_EQ(SIM(sim_calls_during_capture)("cuMemGetInfo_v2"), 0);
    OK(cu.cuStreamEndCapture(stream, &graph));
    OK(get_piece(&name, (size_t)NEARLY_ALL_MIB * MIB));
}

/* What was rescued, and what was not, is told at exit. */
LAW_CHILD(is_rescued)
{
    uint64_t name;
    if (!under_shim())
        return;
    law_context();
    own_pool();
    for (int i = 0; i < WAYS - 1; i++) {
        fill_cache();
        BY(&ways[i], ways[i].get(&name, (size_t)NEARLY_ALL_MIB * MIB));
        BY(&ways[i], ways[i].give(name));
        OK(cu.cuStreamSynchronize(NULL));
        CHECK_EQ(ways[i].get(&name, (size_t)2 * CAPACITY_MIB * MIB), CUDA_ERROR_OUT_OF_MEMORY);
    }
    /* Given back, and still not enough: what the program holds itself is told, of whichever family. */
    raise(SIGUSR1);
    WAIT_UNTIL(SIM(sim_used)(0) == 0);
    managed(300 * MIB);
    piece(200 * MIB);
    pinned(50 * MIB);
    cached_block(64 * MIB);
    CHECK(SIM(sim_fail)("cuMemCreate", 1, 9, CUDA_ERROR_OUT_OF_MEMORY) == 0);
    CHECK_EQ(get_piece(&name, 10 * MIB), CUDA_ERROR_OUT_OF_MEMORY);
}

LAW_CASE_SIM(told_at_exit)
{
    setenv("VRAMSHIM_VERBOSE", "1", 1);
    run("is_rescued");
    reported("out of memory", "7 rescued, 8 failed");
    summary_says("back to the driver, and the allocation succeeded");
    summary_says("still failed (error 2); the program itself holds 500.0 MiB");
}

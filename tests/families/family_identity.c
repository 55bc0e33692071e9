/*
 * What the program may ask about memory of each family, alive and freed, is answered as natively: these expectations
 * are the driver's own answers, and the cache lies beside. Law 10 for the other families.
 */
#include "family.h"

/* One attribute, with cuPointerGetAttribute and among others. */
static uint64_t asked(CUdeviceptr p, CUpointer_attribute attribute)
{
    uint64_t alone = 0, together = 0, ordinal = 0;
    CUpointer_attribute attributes[] = {attribute, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
    void *data[] = {&together, &ordinal};
    OK(cu.cuPointerGetAttribute(&alone, attribute, p));
    OK(cu.cuPointerGetAttributes(2, attributes, data, p));
    CHECK_EQ(alone, together);
    CHECK_EQ(ordinal, 0);
    return alone;
}

static void is_a_range(CUdeviceptr p, size_t size)
{
    const CUdeviceptr places[] = {p, p + size / 2, p + size - 1};
    for (int i = 0; i < 3; i++) {
        CUdeviceptr base = 0;
        size_t n = 0;
        OK(cu.cuMemGetAddressRange_v2(&base, &n, places[i]));
        CHECK_EQ(base, p);
        CHECK_EQ(n, size);
        CHECK_EQ(asked(places[i], CU_POINTER_ATTRIBUTE_RANGE_START_ADDR), p);
        CHECK_EQ(asked(places[i], CU_POINTER_ATTRIBUTE_RANGE_SIZE), size);
        CHECK_EQ(asked(places[i], CU_POINTER_ATTRIBUTE_DEVICE_POINTER), places[i]);
    }
}

static void is_nothing(CUdeviceptr p)
{
    CUdeviceptr base = 0x5a5a;
    size_t n = 0x5a5a;
    uint64_t value = 0x5a5a;
    CHECK_EQ(cu.cuMemGetAddressRange_v2(&base, &n, p), CUDA_ERROR_NOT_FOUND);
    CHECK_EQ(base, 0);
    CHECK_EQ(n, 0);
    CHECK_EQ(cu.cuPointerGetAttribute(&value, CU_POINTER_ATTRIBUTE_RANGE_SIZE, p), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(value, 0x5a5a);
}

/* Blocks in the cache on both sides of what comes. */
static CUcontext beside_a_cache(void)
{
    CUcontext ctx = law_context();
    CUdeviceptr p[3];
    for (int i = 0; i < 3; i++)
        OK(cu.cuMemAlloc_v2(&p[i], 8 * MIB));
    OK(cu.cuMemFree_v2(p[0]));
    OK(cu.cuMemFree_v2(p[2]));
    return ctx;
}

LAW_CASE_SIM(managed_memory)
{
    CUcontext ctx = beside_a_cache();
    CUdeviceptr p = managed(3 * MIB + 100), small = managed(700);
    is_a_range(p, 3 * MIB + 100);
    is_a_range(small, 700);
    CHECK_EQ(asked(p, CU_POINTER_ATTRIBUTE_IS_MANAGED), 1);
    CHECK_EQ(asked(p, CU_POINTER_ATTRIBUTE_CONTEXT), (uintptr_t)ctx);
    CHECK_EQ(cu.cuMemFree_v2(p + 512), CUDA_ERROR_INVALID_VALUE);
    is_a_range(p, 3 * MIB + 100);
    OK(cu.cuMemFree_v2(p));
    OK(cu.cuMemFree_v2(small));
    is_nothing(p);
    is_nothing(small);
}

LAW_CASE_SIM(stream_ordered_memory)
{
    beside_a_cache();
    CUmemoryPool pool = pool_on(0);
    CUdeviceptr p = in_order_from(pool, 3 * MIB + 100), other = in_order(700);
    is_a_range(p, 3 * MIB + 100);
    is_a_range(other, 700);
    CHECK_EQ(asked(p, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE), (uintptr_t)pool);
    CHECK_EQ(asked(other, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE), (uintptr_t)default_pool());
    CHECK_EQ(asked(p, CU_POINTER_ATTRIBUTE_IS_MANAGED), 0);
    OK(cu.cuMemFreeAsync(p, NULL));
    OK(cu.cuMemFree_v2(other));
    OK(cu.cuStreamSynchronize(NULL));
    is_nothing(p);
    is_nothing(other);
}

LAW_CASE_SIM(physical_memory)
{
    beside_a_cache();
    CUmemGenericAllocationHandle one = piece(4 * MIB), retained = 0;
    CUdeviceptr place = reserve(16 * MIB);
    OK(cu.cuMemMap(place, 4 * MIB, 0, one, 0));
    OK(cu.cuMemMap(place + 4 * MIB, 4 * MIB, 0, one, 0));
    is_a_range(place, 4 * MIB);
    is_a_range(place + 4 * MIB, 4 * MIB);
    is_nothing(place + 8 * MIB);
    OK(cu.cuMemRetainAllocationHandle(&retained, (void *)(uintptr_t)(place + 5 * MIB)));
    CHECK_EQ(retained, one);
    CHECK_EQ(cu.cuMemRetainAllocationHandle(&retained, (void *)(uintptr_t)(place + 8 * MIB)), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemFree_v2(place), CUDA_ERROR_INVALID_VALUE);
    OK(cu.cuMemRelease(one));
    OK(cu.cuMemRelease(one)); /* as often as it was given */
    CHECK_EQ(cu.cuMemRelease(one), CUDA_ERROR_INVALID_VALUE);
    is_a_range(place, 4 * MIB);
    OK(cu.cuMemUnmap(place, 8 * MIB));
    is_nothing(place);
    CHECK_EQ(cu.cuMemRetainAllocationHandle(&retained, (void *)(uintptr_t)place), CUDA_ERROR_INVALID_VALUE);
}

/* A plain block is none: it has no handle to retain, in use or in the cache. */
LAW_CASE_SIM(plain_memory_has_no_handle)
{
    CUmemGenericAllocationHandle handle;
    CUdeviceptr p;
    beside_a_cache();
    OK(cu.cuMemAlloc_v2(&p, 4 * MIB));
    CHECK_EQ(cu.cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)p), CUDA_ERROR_INVALID_VALUE);
    OK(cu.cuMemFree_v2(p));
    CHECK_EQ(cu.cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)p), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemUnmap(p, 4 * MIB), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuIpcCloseMemHandle(p), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemFreeHost((void *)(uintptr_t)p), CUDA_ERROR_INVALID_VALUE);
}

LAW_CASE_SIM(host_memory)
{
    static char own[8192];
    unsigned flags = 77;
    void *p;
    beside_a_cache();
    OK(cu.cuMemHostAlloc(&p, 5000, 6));
    is_a_range((uintptr_t)p, 5000);
    OK(cu.cuMemHostGetFlags(&flags, (char *)p + 100));
    CHECK_EQ(flags, 6);
    CHECK_EQ(asked((uintptr_t)p, CU_POINTER_ATTRIBUTE_HOST_POINTER), (uintptr_t)p);
    CHECK_EQ((unsigned)asked((uintptr_t)p, CU_POINTER_ATTRIBUTE_MEMORY_TYPE), CU_MEMORYTYPE_HOST);
    OK(cu.cuMemFreeHost(p));
    is_nothing((uintptr_t)p);
    CHECK_EQ(cu.cuMemHostGetFlags(&flags, p), CUDA_ERROR_INVALID_VALUE);

    OK(cu.cuMemHostRegister_v2(own, sizeof(own), 1));
    is_a_range((uintptr_t)own, sizeof(own));
    OK(cu.cuMemHostGetFlags(&flags, own));
    CHECK_EQ(flags, 1);
    OK(cu.cuMemHostUnregister(own));
    is_nothing((uintptr_t)own);
}

LAW_CASE_SIM(memory_of_others)
{
    CUipcMemHandle handle = donated(), again;
    CUdeviceptr p, twice;
    beside_a_cache();
    OK(cu.cuIpcOpenMemHandle_v2(&p, handle, 1));
    OK(cu.cuIpcOpenMemHandle_v2(&twice, handle, 1));
    CHECK_EQ(p, twice);
    is_a_range(p, 3 * MIB);
    CHECK_EQ(cu.cuIpcGetMemHandle(&again, p), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemFree_v2(p), CUDA_ERROR_INVALID_VALUE);
    OK(cu.cuIpcCloseMemHandle(p));
    is_a_range(p, 3 * MIB);
    OK(cu.cuIpcCloseMemHandle(p));
    is_nothing(p);
    CHECK_EQ(cu.cuIpcCloseMemHandle(p), CUDA_ERROR_INVALID_VALUE);

    CUmemGenericAllocationHandle one = piece(4 * MIB), import = imported(one);
    CUdeviceptr place = reserve(4 * MIB);
    CHECK(import != one);
    OK(cu.cuMemMap(place, 4 * MIB, 0, import, 0));
    is_a_range(place, 4 * MIB);
    OK(cu.cuMemRelease(one));
    OK(cu.cuMemRelease(import));
    is_a_range(place, 4 * MIB);
    OK(cu.cuMemUnmap(place, 4 * MIB));
    CHECK_EQ(SIM(sim_used)(0), under_shim() ? 24 * MIB : 8 * MIB);
}

/* An address goes from family to family, by way of the cache. */
LAW_CASE_SIM(one_address_in_many_families)
{
    CUdeviceptr p, q;
    law_context();
    for (int round = 0; round < 3; round++) {
        OK(cu.cuMemAlloc_v2(&p, 4 * MIB));
        is_a_range(p, 4 * MIB);
        OK(cu.cuMemFree_v2(p));
        is_nothing(p);
        if (under_shim()) {
            raise(SIGUSR1);
            WAIT_UNTIL(!SIM(sim_is_allocated)(p));
        }
        q = managed(3 * MIB);
        is_a_range(q, 3 * MIB);
        OK(cu.cuMemFree_v2(q));
        is_nothing(q);
        q = in_order(2 * MIB);
        is_a_range(q, 2 * MIB);
        OK(cu.cuMemFree_v2(q));
        OK(cu.cuStreamSynchronize(NULL));
        is_nothing(q);
    }
}

/*
 * Law 10: a block handed out for n bytes answers n, whatever the size of the block behind it; an address that is free
 * but cached answers as a natively freed one does. The native answers were measured on an
 * H200.
 */
#include <string.h>

#include "law.h"
#include "sim.h"
#include "world.h"

enum { MIB = 1 << 20 };

/* Every way to ask for the range, from every part of the block. */
static void check_range(CUdeviceptr p, size_t n)
{
    const size_t offsets[] = {0, n > 1, n / 2, n - 1};
    CHECK_EQ(p % 512, 0);
    for (size_t i = 0; i < sizeof(offsets) / sizeof(*offsets); i++) {
        CUdeviceptr at = p + offsets[i], base = 1, start = 1;
        size_t size = 1;
        OK(cu.cuMemGetAddressRange_v2(&base, &size, at));
        CHECK_EQ(base, p);
        CHECK_EQ(size, n);
        size = start = 1;
        OK(cu.cuPointerGetAttribute(&start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, at));
        OK(cu.cuPointerGetAttribute(&size, CU_POINTER_ATTRIBUTE_RANGE_SIZE, at));
        CHECK_EQ(start, p);
        CHECK_EQ(size, n);
        unsigned type = 0;
        size = start = 1;
        CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_RANGE_SIZE, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                            CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE};
        size_t again = 1;
        void *data[] = {&size, &type, &start, &again};
        OK(cu.cuPointerGetAttributes(4, attributes, data, at));
        CHECK_EQ(start, p);
        CHECK_EQ(size, n);
        CHECK_EQ(again, n);
        CHECK_EQ(type, CU_MEMORYTYPE_DEVICE);
    }
}

/* The address is nobody's. `ptr` must be no block's: freed, or behind the end of what was asked for. */
static void check_nothing(CUdeviceptr ptr)
{
    CUdeviceptr base = 0x5a5a;
    size_t size = 0x5a5a;
    unsigned char data[21][64];
    CHECK_EQ(cu.cuMemGetAddressRange_v2(&base, &size, ptr), CUDA_ERROR_NOT_FOUND);
    CHECK_EQ(base, 0);
    CHECK_EQ(size, 0);
    for (int a = 1; a <= 20; a++) {
        memset(data[a], 0xaa, sizeof(data[a]));
        CHECK_EQ(cu.cuPointerGetAttribute(data[a], (CUpointer_attribute)a, ptr), CUDA_ERROR_INVALID_VALUE);
        for (size_t i = 0; i < sizeof(data[a]); i++)
            CHECK_EQ(data[a][i], 0xaa); /* nothing written */
    }
    /* All at once it succeeds, and what is written was measured. */
    CUpointer_attribute attributes[] = {
        CU_POINTER_ATTRIBUTE_CONTEXT,      CU_POINTER_ATTRIBUTE_MEMORY_TYPE,    CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
        CU_POINTER_ATTRIBUTE_HOST_POINTER, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS,    CU_POINTER_ATTRIBUTE_BUFFER_ID,
        CU_POINTER_ATTRIBUTE_IS_MANAGED,   CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        CU_POINTER_ATTRIBUTE_RANGE_SIZE,   CU_POINTER_ATTRIBUTE_MAPPED,
    };
    enum { N = sizeof(attributes) / sizeof(*attributes) };
    const unsigned long long expected[N] = {
        0,
        0xaaaaaaaa00000000,
        0,
        ptr,
        0xaaaaaaaa00000000,
        0,
        0xaaaaaaaa00000000,
        0xaaaaaaaafffffffe,
        0xaaaaaaaaaaaaaaaa,
        0xaaaaaaaaaaaaaaaa,
        0xaaaaaaaa00000000,
    };
    unsigned long long words[N];
    void *out[N];
    memset(words, 0xaa, sizeof(words));
    for (int i = 0; i < N; i++)
        out[i] = &words[i];
    OK(cu.cuPointerGetAttributes(N, attributes, out, ptr));
    for (int i = 0; i < N; i++) {
        if (words[i] != expected[i])
            law_fail(__FILE__, __LINE__, "attribute %d of 0x%llx is %llx, not %llx", attributes[i], ptr, words[i],
                     expected[i]);
    }
}

LAW_CASE(a_fresh_block)
{
    static const size_t sizes[] = {1, 511, 512, 513, 1000, 65536, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 5 * MIB};
    law_context();
    for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
        CUdeviceptr p;
        OK(cu.cuMemAlloc_v2(&p, sizes[i]));
        check_range(p, sizes[i]);
    }
}

/* From a block that was larger: the size of the new request, and nothing of the old one. */
/* Frees as many blocks as it takes for the next request to be served by one of them, in whatever mode. */
enum { FREED = 20 };
static void cached_blocks(CUdeviceptr *ret_blocks, size_t bytes)
{
    for (int i = 0; i < FREED; i++)
        OK(cu.cuMemAlloc_v2(&ret_blocks[i], bytes));
    for (int i = 0; i < FREED; i++)
        OK(cu.cuMemFree_v2(ret_blocks[i]));
}

static bool is_among(CUdeviceptr p, const CUdeviceptr *blocks)
{
    int i = 0;
    while (i < FREED && blocks[i] != p)
        i++;
    return i < FREED;
}

LAW_CASE(a_block_behind_which_there_is_more)
{
    static const size_t pairs[][2] = {
        {4 * MIB, 4 * MIB - 1},
        {4 * MIB, 3 * MIB},
        {4 * MIB, 4 * MIB},
        {36 * MIB, 33 * MIB},
        {512, 1}, /* of the small ones, what is left of one pair is too small for the next */
        {1024, 513},
        {1500, 1400},
    };
    law_context();
    for (size_t i = 0; i < sizeof(pairs) / sizeof(*pairs); i++) {
        CUdeviceptr old[FREED], p;
        cached_blocks(old, pairs[i][0]);
        unsigned long before = driver_calls("cuMemAlloc_v2");
        OK(cu.cuMemAlloc_v2(&p, pairs[i][1]));
        if (under_shim() && simulated()) {
            CHECK_EQ(driver_calls("cuMemAlloc_v2"), before); /* or this case shows nothing */
            CHECK(is_among(p, old));
        }
        check_range(p, pairs[i][1]);
        if (pairs[i][1] < pairs[i][0]) {
            check_nothing(p + pairs[i][1]);
            check_nothing(p + pairs[i][0] - 1);
        }
        OK(cu.cuMemFree_v2(p));
        /* And up again: the block has not shrunk with the request. */
        OK(cu.cuMemAlloc_v2(&p, pairs[i][0]));
        check_range(p, pairs[i][0]);
        if (under_shim() && simulated())
            CHECK_EQ(driver_calls("cuMemAlloc_v2"), before);
        /* Not freed, and the others taken as well: the next pair shall find no block but its own. */
        for (int n = 1; n < FREED && pairs[i][0] >= MIB; n++)
            OK(cu.cuMemAlloc_v2(&p, pairs[i][0]));
    }
}

/* The attributes need no current context, cuMemGetAddressRange does. */
LAW_CASE(asked_without_a_context)
{
    law_context();
    CUdeviceptr old = cached_block(4 * MIB), p, start = 1;
    size_t size = 1;
    OK(cu.cuMemAlloc_v2(&p, 4 * MIB - 1000));
    if (under_shim() && simulated())
        CHECK_EQ(p, old);
    OK(cu.cuCtxSetCurrent(NULL));
    CHECK_EQ(cu.cuMemGetAddressRange_v2(&start, &size, p + 5000), CUDA_ERROR_INVALID_CONTEXT);
    OK(cu.cuPointerGetAttribute(&size, CU_POINTER_ATTRIBUTE_RANGE_SIZE, p + 5000));
    CHECK_EQ(size, 4 * MIB - 1000);
    OK(cu.cuPointerGetAttribute(&start, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, p + 5000));
    CHECK_EQ(start, p);
    CHECK_EQ(cu.cuPointerGetAttribute(&size, CU_POINTER_ATTRIBUTE_RANGE_SIZE, p + 4 * MIB - 1000),
             CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemFree_v2(p + 5000), CUDA_ERROR_INVALID_VALUE);
    OK(cu.cuMemFree_v2(p));
    CHECK_EQ(cu.cuPointerGetAttribute(&size, CU_POINTER_ATTRIBUTE_RANGE_SIZE, p + 5000), CUDA_ERROR_INVALID_VALUE);
}

LAW_CASE(pitched_memory)
{
    static const size_t shapes[][3] = {{1, 3, 512},     {153, 3, 512},     {1084, 3, 1536},
                                       {7601, 3, 7680}, {53220, 3, 53248}, {1000, 100, 1024}};
    law_context();
    for (size_t i = 0; i < sizeof(shapes) / sizeof(*shapes); i++) {
        for (int round = 0; round < 3; round++) {
            CUdeviceptr p;
            size_t pitch;
            OK(cu.cuMemAllocPitch_v2(&p, &pitch, shapes[i][0], shapes[i][1], 4 << round));
            CHECK_EQ(pitch, shapes[i][2]);
            check_range(p, pitch * shapes[i][1]);
            OK(cu.cuMemFree_v2(p));
        }
    }
}

LAW_CASE(a_freed_block)
{
    static const size_t sizes[] = {1, 1000, 65536, 2 * MIB, 5 * MIB};
    law_context();
    for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
        CUdeviceptr keep, p;
        OK(cu.cuMemAlloc_v2(&p, sizes[i]));
        OK(cu.cuMemAlloc_v2(&keep, 1000)); /* a neighbour */
        OK(cu.cuMemFree_v2(p));
        check_nothing(p);
        check_nothing(p + sizes[i] - 1);
        check_nothing(p + sizes[i] / 2);
        check_range(keep, 1000);
        CHECK_EQ(cu.cuMemFree_v2(p), CUDA_ERROR_INVALID_VALUE); /* asking has changed nothing */
    }
}

LAW_CASE(what_was_never_allocated)
{
    int here;
    law_context();
    check_nothing(0x10);
    check_nothing(0);
    check_nothing((uintptr_t)&here);
    CUdeviceptr p;
    OK(cu.cuMemAlloc_v2(&p, 1000));
    check_nothing(0x10);
    check_nothing(p + 1004); /* in the 512 bytes that the driver rounds up to */
    OK(cu.cuMemFree_v2(p));
    check_nothing((uintptr_t)&here);
}

/* One output alone, and none. */
LAW_CASE(a_part_of_the_answer)
{
    CUdeviceptr base = 1, p;
    size_t size = 1;
    law_context();
    cached_block(4 * MIB);
    OK(cu.cuMemAlloc_v2(&p, 3 * MIB));
    OK(cu.cuMemGetAddressRange_v2(NULL, &size, p + 5));
    CHECK_EQ(size, 3 * MIB);
    OK(cu.cuMemGetAddressRange_v2(&base, NULL, p + 5));
    CHECK_EQ(base, p);
    OK(cu.cuMemFree_v2(p));
    CHECK_EQ(cu.cuMemGetAddressRange_v2(&base, NULL, p + 5), CUDA_ERROR_NOT_FOUND);
    CHECK_EQ(base, 0);
    base = 1;
    CHECK_EQ(cu.cuMemGetAddressRange_v2(NULL, &size, p + 5), CUDA_ERROR_NOT_FOUND);
    CHECK_EQ(size, 0);
}

/* Other attributes of a recycled block are those of a block: its context, its device, its own address. */
LAW_CASE(other_attributes_of_a_recycled_block)
{
    CUcontext ctx = law_context(), of = NULL;
    CUdeviceptr p, device_pointer = 0;
    unsigned type = 0, managed = 9;
    int ordinal = 9;
    cached_block(4 * MIB);
    OK(cu.cuMemAlloc_v2(&p, 3 * MIB));
    OK(cu.cuPointerGetAttribute(&of, CU_POINTER_ATTRIBUTE_CONTEXT, p + 7));
    CHECK_EQ((uintptr_t)of, (uintptr_t)ctx);
    OK(cu.cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, p + 7));
    CHECK_EQ(type, CU_MEMORYTYPE_DEVICE);
    OK(cu.cuPointerGetAttribute(&device_pointer, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, p + 7));
    CHECK_EQ(device_pointer, p + 7);
    OK(cu.cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, p));
    CHECK_EQ(managed, 0);
    OK(cu.cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, p));
    CHECK_EQ(ordinal, 0);
    CHECK_EQ(cu.cuPointerGetAttribute(&device_pointer, CU_POINTER_ATTRIBUTE_HOST_POINTER, p), CUDA_ERROR_INVALID_VALUE);
}

/* Memory that is not ours answers for itself. */
LAW_CASE_SIM(memory_of_other_families)
{
    __typeof__(&cuMemAllocManaged) managed = (__typeof__(managed))law_sim("cuMemAllocManaged");
    __typeof__(&cuMemAllocAsync) async = (__typeof__(async))law_sim("cuMemAllocAsync");
    CUdeviceptr p;
    law_context();
    cached_block(4 * MIB);
    OK(managed(&p, 3 * MIB, 1));
    check_range(p, 3 * MIB);
    OK(cu.cuMemFree_v2(p));
    OK(async(&p, 3 * MIB, NULL));
    check_range(p, 3 * MIB);
}

/* Alignment is never less than native, whatever was freed before. */
LAW_CASE(alignment)
{
    enum { N = 40 };
    CUdeviceptr p[N];
    law_context();
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < N; i++) {
            OK(cu.cuMemAlloc_v2(&p[i], (size_t)(i + 1) * (round % 2 ? 300 : 70000) + (size_t)round));
            CHECK_EQ(p[i] % 512, 0);
        }
        for (int i = 0; i < N; i++)
            OK(cu.cuMemFree_v2(p[i]));
    }
}

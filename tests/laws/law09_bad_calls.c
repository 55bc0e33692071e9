/*
 * Law 9: bad calls get the native answer, and leave nothing behind. HAMi-core 321 and 333 (NULL outputs), 187 and 290
 * (no current context).
 */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "law.h"
#include "sim.h"
#include "world.h"

enum { MIB = 1 << 20 };

static uint64_t used(void)
{
    return simulated() ? SIM(sim_used)(0) : 0;
}

LAW_CASE(allocations)
{
    CUdeviceptr p = 0x5a5a;
    size_t pitch = 0x5a5a;
    law_context();
    cached_block(4 * MIB);
    cached_block(512);
    uint64_t before = used();
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(cu.cuMemAlloc_v2(&p, 0), CUDA_ERROR_INVALID_VALUE);
        CHECK_EQ(cu.cuMemAlloc_v2(NULL, 512), CUDA_ERROR_INVALID_VALUE);
        CHECK_EQ(cu.cuMemAlloc_v2(NULL, 4 * MIB), CUDA_ERROR_INVALID_VALUE); /* one of that size is at hand */
        CHECK_EQ(cu.cuMemAlloc_v2(NULL, 0), CUDA_ERROR_INVALID_VALUE);
        CHECK_EQ(cu.cuMemAllocPitch_v2(&p, &pitch, 0, 10, 4), CUDA_ERROR_INVALID_VALUE);
        CHECK_EQ(cu.cuMemAllocPitch_v2(&p, &pitch, 10, 0, 4), CUDA_ERROR_INVALID_VALUE);
        CHECK_EQ(cu.cuMemAllocPitch_v2(&p, &pitch, 10, 10, 3), CUDA_ERROR_INVALID_VALUE);
        CHECK_EQ(cu.cuMemAllocPitch_v2(&p, &pitch, 10, 10, 0), CUDA_ERROR_INVALID_VALUE);
        CHECK_EQ(cu.cuMemAllocPitch_v2(NULL, &pitch, 10, 10, 4), CUDA_ERROR_INVALID_VALUE);
        CHECK_EQ(cu.cuMemAllocPitch_v2(&p, NULL, 10, 10, 4), CUDA_ERROR_INVALID_VALUE);
        /* In the second round a block for these is at hand. */
        CHECK_EQ(cu.cuMemAllocPitch_v2(&p, NULL, 4096, 1024, 4), CUDA_ERROR_INVALID_VALUE);
        CHECK_EQ(cu.cuMemAllocPitch_v2(NULL, &pitch, 4096, 1024, 4), CUDA_ERROR_INVALID_VALUE);
        CHECK_EQ(cu.cuMemAllocPitch_v2(&p, &pitch, 4096, 1024, 3), CUDA_ERROR_INVALID_VALUE);
        CHECK_EQ(cu.cuMemAllocPitch_v2(&p, &pitch, 4096, 1024, 32), CUDA_ERROR_INVALID_VALUE);
        CUdeviceptr good;
        size_t good_pitch;
        OK(cu.cuMemAllocPitch_v2(&good, &good_pitch, 4096, 1024, 4));
        OK(cu.cuMemFree_v2(good));
    }
    CHECK(used() == before || (under_shim() && used() == before + 4 * MIB) || !simulated());
}

/* A call that fails leaves 0 in the program's variable; a pitched one that only lacked the memory, its pitch (measured). */
static void leaves_nothing(CUresult expected, size_t bytes)
{
    CUdeviceptr p = 0x5a5a;
    CHECK_EQ(cu.cuMemAlloc_v2(&p, bytes), expected);
    CHECK_EQ(p, 0);
}

static void leaves_pitch(CUresult expected, size_t width, size_t height, unsigned element, size_t expected_pitch)
{
    CUdeviceptr p = 0x5a5a;
    size_t pitch = 0x5a5a;
    CHECK_EQ(cu.cuMemAllocPitch_v2(&p, &pitch, width, height, element), expected);
    CHECK_EQ(p, 0);
    CHECK_EQ(pitch, expected_pitch);
}

LAW_CASE(what_a_failure_leaves_in_the_outputs)
{
    size_t unused_bytes = 0x5a5a, total = 0x5a5a;
    CUcontext context = law_context(), popped;
    CUstream stream;
    CUgraph graph;
    cached_block(4 * MIB);
    leaves_nothing(CUDA_ERROR_INVALID_VALUE, 0);
    leaves_nothing(CUDA_ERROR_OUT_OF_MEMORY, (size_t)1 << 42);
    leaves_pitch(CUDA_ERROR_INVALID_VALUE, 0, 10, 4, 0);
    leaves_pitch(CUDA_ERROR_INVALID_VALUE, 1000, 10, 3, 0);
    leaves_pitch(CUDA_ERROR_OUT_OF_MEMORY, ((size_t)1 << 32) - 1, 1 << 20, 4, (size_t)1 << 32);
    leaves_pitch(CUDA_ERROR_INVALID_VALUE, (size_t)1 << 40, (size_t)1 << 40, 4, (size_t)1 << 40);

    OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cu.cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    leaves_pitch(CUDA_ERROR_INVALID_VALUE, 0, 10, 4, 0); /* looked at before the capture is */
    leaves_pitch(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, 1000, 10, 4, 1024);
    leaves_nothing(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, 0);
    leaves_nothing(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, 4 * MIB);
    CHECK_EQ(cu.cuStreamEndCapture(stream, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);

    OK(cu.cuCtxPopCurrent_v2(&popped));
    CHECK(popped == context);
    leaves_nothing(CUDA_ERROR_INVALID_CONTEXT, 4 * MIB);
    leaves_nothing(CUDA_ERROR_INVALID_CONTEXT, 0);
    leaves_pitch(CUDA_ERROR_INVALID_CONTEXT, 1000, 10, 4, 0);
    CHECK_EQ(cu.cuMemGetInfo_v2(&unused_bytes, &total), CUDA_ERROR_INVALID_CONTEXT);
    CHECK_EQ(unused_bytes, 0);
    CHECK_EQ(total, 0);
}

/* More than there is, more than the address space has: out of memory, not an overflow. */
LAW_CASE(absurd_sizes)
{
    CUdeviceptr p = 0x5a5a;
    law_context();
    cached_block(4 * MIB);
    CHECK_EQ(cu.cuMemAlloc_v2(&p, (size_t)1 << 50), CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_EQ(cu.cuMemAlloc_v2(&p, (size_t)1 << 63), CUDA_ERROR_OUT_OF_MEMORY);
    if (simulated()) {
        size_t pitch;
        CHECK_EQ(cu.cuMemAlloc_v2(&p, SIZE_MAX), CUDA_ERROR_OUT_OF_MEMORY);
        CHECK_EQ(cu.cuMemAlloc_v2(&p, SIZE_MAX - 511), CUDA_ERROR_OUT_OF_MEMORY);
        CHECK_EQ(cu.cuMemAllocPitch_v2(&p, &pitch, SIZE_MAX, 1, 4), CUDA_ERROR_INVALID_VALUE);
    }
}

LAW_CASE(frees)
{
    CUdeviceptr p, q;
    law_context();
    CHECK_EQ(cu.cuMemFree_v2(0), CUDA_SUCCESS);
    CHECK_EQ(cu.cuMemFree_v2(0), CUDA_SUCCESS);
    OK(cu.cuMemAlloc_v2(&p, 4 * MIB));
    OK(cu.cuMemAlloc_v2(&q, 1000));
    CHECK_EQ(cu.cuMemFree_v2(p + 1), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemFree_v2(p + 512), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemFree_v2(p + 2 * MIB), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemFree_v2(q + 512), CUDA_ERROR_INVALID_VALUE);
    OK(cu.cuMemsetD8_v2(p, 1, 4 * MIB)); /* intact */
    OK(cu.cuMemsetD8_v2(q, 1, 1000));
    OK(cu.cuMemFree_v2(p));
    OK(cu.cuMemFree_v2(q));
    CHECK_EQ(cu.cuMemFree_v2(p), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemFree_v2(p), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemFree_v2(q), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemFree_v2(p + 512), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemFree_v2(0), CUDA_SUCCESS);
}

/* After a double free the block serves one request, not two. */
LAW_CASE(a_block_freed_twice_is_handed_out_once)
{
    law_context();
    CUdeviceptr p = cached_block(4 * MIB), a, b;
    CHECK_EQ(cu.cuMemFree_v2(p), CUDA_ERROR_INVALID_VALUE);
    OK(cu.cuMemAlloc_v2(&a, 4 * MIB));
    OK(cu.cuMemAlloc_v2(&b, 4 * MIB));
    CHECK(a != b);
    OK(cu.cuMemsetD8_v2(a, 1, 4 * MIB));
    OK(cu.cuMemsetD8_v2(b, 2, 4 * MIB));
    unsigned char byte;
    OK(cu.cuMemcpyDtoH_v2(&byte, a + 4 * MIB - 1, 1));
    CHECK_EQ(byte, 1);
    OK(cu.cuMemFree_v2(a));
    OK(cu.cuMemFree_v2(b));
    if (under_shim() && simulated())
        CHECK_EQ(driver_calls("cuMemAlloc_v2"), 2);
}

LAW_CASE(no_current_context)
{
    CUcontext current;
    CUdeviceptr p, q, fresh = 0x5a5a;
    size_t size, total, pitch;
    law_context();
    OK(cu.cuMemAlloc_v2(&p, 4 * MIB));
    OK(cu.cuMemAlloc_v2(&q, 4 * MIB));
    cached_block(8 * MIB);
    OK(cu.cuCtxSetCurrent(NULL));
    CHECK_EQ(cu.cuMemAlloc_v2(&fresh, 4 * MIB), CUDA_ERROR_INVALID_CONTEXT);
    CHECK_EQ(cu.cuMemAlloc_v2(&fresh, 8 * MIB), CUDA_ERROR_INVALID_CONTEXT);
    CHECK_EQ(cu.cuMemAlloc_v2(&fresh, 0), CUDA_ERROR_INVALID_CONTEXT);
    CHECK_EQ(cu.cuMemAlloc_v2(NULL, 512), CUDA_ERROR_INVALID_CONTEXT);
    if (simulated())
        CHECK_EQ(cu.cuMemAllocPitch_v2(&fresh, &pitch, 4096, 1024, 4), CUDA_ERROR_INVALID_CONTEXT);
    CHECK_EQ(cu.cuMemGetInfo_v2(&size, &total), CUDA_ERROR_INVALID_CONTEXT);
    CHECK_EQ(cu.cuMemGetAddressRange_v2(&fresh, &size, p), CUDA_ERROR_INVALID_CONTEXT);
    CHECK_EQ(cu.cuMemFree_v2(p), CUDA_SUCCESS);
    CHECK_EQ(cu.cuMemFree_v2(p), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemFree_v2(q + 512), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemFree_v2(q), CUDA_SUCCESS);
    CHECK_EQ(cu.cuMemFree_v2(512), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemFree_v2(0), CUDA_SUCCESS);
    OK(cu.cuCtxGetCurrent(&current)); /* and there is none now either */
    CHECK(current == NULL);
    law_context();
    OK(cu.cuMemAlloc_v2(&p, 4 * MIB));
    if (under_shim() && simulated())
        CHECK_EQ(driver_calls("cuMemFree_v2"), 3); /* of inside a block, of 512 and of 0; the others are kept */
}

LAW_CASE(memory_info_without_outputs)
{
    size_t free_bytes = 1, total = 1, both_free, both_total;
    law_context();
    cached_block(64 * MIB);
    OK(cu.cuMemGetInfo_v2(NULL, NULL));
    OK(cu.cuMemGetInfo_v2(&free_bytes, NULL));
    OK(cu.cuMemGetInfo_v2(NULL, &total));
    OK(cu.cuMemGetInfo_v2(&both_free, &both_total));
    CHECK_EQ(free_bytes, both_free);
    CHECK_EQ(total, both_total);
}

LAW_CASE(queries_without_outputs)
{
    CUdeviceptr p, base;
    size_t size;
    law_context();
    cached_block(4 * MIB);
    OK(cu.cuMemAlloc_v2(&p, 4 * MIB - 512));
    OK(cu.cuMemGetAddressRange_v2(NULL, NULL, p));
    OK(cu.cuMemGetAddressRange_v2(&base, NULL, p + 100));
    CHECK_EQ(base, p);
    OK(cu.cuMemGetAddressRange_v2(NULL, &size, p + 100));
    CHECK_EQ(size, 4 * MIB - 512);
    CHECK_EQ(cu.cuPointerGetAttribute(NULL, CU_POINTER_ATTRIBUTE_RANGE_SIZE, p), CUDA_ERROR_INVALID_VALUE);
}

/* One block, freed four times, reported once, with the first free and the second. */
LAW_CHILD(frees_twice)
{
    CUdeviceptr p, q;
    law_context();
    OK(cu.cuMemAlloc_v2(&p, 4 * MIB));
    OK(cu.cuMemAlloc_v2(&q, 6 * MIB));
    OK(cu.cuMemFree_v2(p));
    OK(cu.cuMemFree_v2(q));
    for (int i = 0; i < 3; i++)
        CHECK_EQ(cu.cuMemFree_v2(p), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemFree_v2(q), CUDA_ERROR_INVALID_VALUE);
    fprintf(stderr, "the blocks: %llx and %llx\n", p, q);
}

LAW_CASE(a_double_free_is_reported_once)
{
    char err[16384], text[64];
    unsigned long long p, q;
    CHECK_EQ(law_run_child("frees_twice", ENV("VRAMSHIM_REPORT=stderr"), err, sizeof(err)), 0);
    if (!under_shim())
        return;
    const char *blocks = strstr(err, "the blocks: ");
    CHECK(blocks && sscanf(blocks, "the blocks: %llx and %llx", &p, &q) == 2);
    const unsigned long long both[] = {p, q};
    for (int i = 0; i < 2; i++) {
        snprintf(text, sizeof(text), "0x%llx", both[i]);
        CHECK_EQ(count_of(err, text), 1);
        const char *line = strstr(err, text);
        char copy[512];
        snprintf(copy, sizeof(copy), "%.*s", (int)strcspn(line, "\n"), line);
        CHECK(strstr(copy, "freed by"));
        CHECK(strstr(copy, "again by"));
        CHECK_EQ(count_of(copy, "called from"), 2); /* both places */
    }
    CHECK(strstr(err, "double frees: 4"));
    CHECK(strstr(err, "nothing leaked"));
}

/* cuMemFreeAsync takes plain memory too (measured): what it frees is no longer ours, and what is in the cache it must not
 * free. */
LAW_CASE(stream_ordered_frees)
{
    CUstream stream;
    CUgraph graph;
    CUdeviceptr p, q;
    law_context();
    OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CUdeviceptr freed = cached_block(4 * MIB);
    CHECK_EQ(cu.cuMemFreeAsync(freed, stream), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemFreeAsync(freed + 512, stream), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemFreeAsync(0x10, stream), CUDA_ERROR_INVALID_VALUE);
    OK(cu.cuMemFreeAsync(0, stream));
    OK(cu.cuMemAlloc_v2(&p, 4 * MIB)); /* served with what was in the cache, unharmed */
    OK(cu.cuMemsetD8_v2(p, 1, 4 * MIB));
    CHECK_EQ(cu.cuMemFreeAsync(p + 512, stream), CUDA_ERROR_INVALID_VALUE);

    OK(cu.cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    CHECK_EQ(cu.cuMemFreeAsync(p, stream), CUDA_ERROR_INVALID_VALUE); /* only pool memory may go so in a capture */
    OK(cu.cuStreamEndCapture(stream, &graph));
    OK(cu.cuGraphDestroy(graph));

    /* The refused ones left it the program's, and known to the shim: a plain free keeps it. */
    unsigned long frees = driver_calls("cuMemFree_v2");
    OK(cu.cuMemFree_v2(p));
    if (under_shim())
        CHECK_EQ(driver_calls("cuMemFree_v2"), frees);
    OK(cu.cuMemAlloc_v2(&p, 4 * MIB));

    OK(cu.cuMemFreeAsync(p, stream));
    OK(cu.cuStreamSynchronize(stream));
    CHECK_EQ(cu.cuMemFreeAsync(p, stream), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemFree_v2(p), CUDA_ERROR_INVALID_VALUE);
    OK(cu.cuMemAlloc_v2(&q, 4 * MIB));
    OK(cu.cuMemsetD8_v2(q, 1, 4 * MIB));
    OK(cu.cuMemFree_v2(q));
}

/* Freed, kept, and just now on its way from the cache to the driver, which still has it: freed all the same. */
static pthread_t first_thread;
static atomic_bool inside;

static void hold_the_others(const char *entry, void *unused)
{
    (void)entry, (void)unused;
    if (pthread_equal(pthread_self(), first_thread) || atomic_exchange(&inside, true))
        return;
    usleep(100000);
}

LAW_CASE_SIM(while_memory_is_on_its_way_to_the_driver)
{
    CUdeviceptr base = 0x5a5a, again;
    size_t size = 0x5a5a;
    first_thread = pthread_self();
    law_context();
    CUdeviceptr p = cached_block(4 * MIB);
    if (under_shim()) {
        CHECK(SIM(sim_on_call)("cuMemFree_v2", hold_the_others, NULL) == 0);
        raise(SIGUSR1);
        WAIT_UNTIL(atomic_load(&inside));
    }
    CHECK_EQ(cu.cuMemFree_v2(p), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemFree_v2(p + 512), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemGetAddressRange_v2(&base, &size, p + 512), CUDA_ERROR_NOT_FOUND);
    CHECK_EQ(cu.cuPointerGetAttribute(&size, CU_POINTER_ATTRIBUTE_RANGE_SIZE, p), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemFree_v2(p), CUDA_ERROR_INVALID_VALUE);
    WAIT_UNTIL(!SIM(sim_is_allocated)(p));
    for (int i = 0; i < 50; i++) { /* and nothing comes of it */
        OK(cu.cuMemAlloc_v2(&again, 4 * MIB));
        CHECK(SIM(sim_is_allocated)(again));
        OK(cu.cuMemFree_v2(again));
    }
    if (under_shim())
        CHECK_EQ(SIM(sim_refused_frees)(), 1); /* the one inside the block; none was forwarded twice */
}

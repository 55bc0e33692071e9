/*
 * Law 13: errors of earlier kernels are not swallowed. Once an H200 knows that a kernel has failed (by a wait, or 150 to
 * 220 ms later by itself), it answers 700 to each allocation, free and query in that context, whatever the arguments.
 */
#include <string.h>

#include "law.h"
#include "sim.h"
#include "world.h"

enum { MIB = 1 << 20 };

static CUdeviceptr allocate(size_t bytes)
{
    CUdeviceptr p;
    OK(cu.cuMemAlloc_v2(&p, bytes));
    return p;
}

/* A kernel that fails; nobody has been told yet. */
static void fault(CUstream stream)
{
    OK(cu.cuLaunchKernel(kernel("vram_fault"), 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL));
}

/* All that was measured, in a context of which the failure is known. */
static void check_sticky(CUdeviceptr live, CUdeviceptr other, CUdeviceptr cached, size_t cached_size)
{
    CUdeviceptr p = 0x5a5a, base;
    size_t size, pitch;
    CHECK_EQ(cu.cuMemFree_v2(live), CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK_EQ(cu.cuMemFree_v2(live), CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK_EQ(cu.cuCtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK_EQ(cu.cuMemAlloc_v2(&p, 512), CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK_EQ(cu.cuMemAlloc_v2(&p, cached_size), CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK_EQ(cu.cuMemAllocPitch_v2(&p, &pitch, 512, cached_size / 512, 4), CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK_EQ(p, 0);
    CHECK_EQ(cu.cuMemFree_v2(other), CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK_EQ(cu.cuMemFree_v2(cached), CUDA_ERROR_ILLEGAL_ADDRESS); /* a second free */
    CHECK_EQ(cu.cuMemFree_v2(512), CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK_EQ(cu.cuMemFree_v2(0), CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK_EQ(cu.cuMemGetInfo_v2(&size, NULL), CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK_EQ(cu.cuMemGetAddressRange_v2(&base, &size, live), CUDA_ERROR_ILLEGAL_ADDRESS);
}

/* The free is the first to hear of it. */
LAW_CASE_SIM(told_by_a_free)
{
    law_context();
    CUdeviceptr live = allocate(4 * MIB), other = allocate(8 * MIB);
    CUdeviceptr cached = cached_block(16 * MIB);
    fault(NULL);
    check_sticky(live, other, cached, 16 * MIB);
}

LAW_CASE_SIM(told_by_a_free_of_a_kernel_on_another_stream)
{
    CUstream stream;
    law_context();
    OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CUdeviceptr live = allocate(4 * MIB), other = allocate(1000);
    CUdeviceptr cached = cached_block(16 * MIB);
    fault(stream);
    check_sticky(live, other, cached, 16 * MIB);
}

/* Nobody has been told, but the driver knows: natively the allocation is the first to hear. */
LAW_CASE_SIM(told_by_an_allocation)
{
    CUdeviceptr p;
    CUstream stream;
    law_context();
    OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CUdeviceptr live = allocate(4 * MIB), other = allocate(8 * MIB);
    CUdeviceptr cached = cached_block(16 * MIB);
    fault(stream);
    WAIT_UNTIL(cu.cuMemAlloc_v2(&p, 16 * MIB) != CUDA_SUCCESS || cu.cuMemFree_v2(p) != CUDA_SUCCESS);
    check_sticky(live, other, cached, 16 * MIB);
}

/* The program has heard of it from a call that the shim has no part in: a block at hand must not hide it now. */
LAW_CASE_SIM(told_by_a_synchronisation)
{
    CUdeviceptr p;
    law_context();
    CUdeviceptr live = allocate(4 * MIB), other = allocate(8 * MIB);
    CUdeviceptr cached = cached_block(16 * MIB);
    fault(NULL);
    CHECK_EQ(cu.cuStreamSynchronize(NULL), CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK_EQ(cu.cuMemAlloc_v2(&p, 16 * MIB), CUDA_ERROR_ILLEGAL_ADDRESS);
    check_sticky(live, other, cached, 16 * MIB);
}

/* A free after a failed kernel, in a program that tells nobody: the report counts the block as the program's. */
LAW_CHILD(ends_with_a_failed_kernel)
{
    law_context();
    CUdeviceptr p = allocate(4 * MIB);
    fault(NULL);
    CHECK_EQ(cu.cuMemFree_v2(p), CUDA_ERROR_ILLEGAL_ADDRESS);
}

LAW_CASE_SIM(a_refused_free_leaves_the_block)
{
    char err[8192];
    CHECK_EQ(law_run_child("ends_with_a_failed_kernel", ENV("VRAMSHIM_REPORT=stderr"), err, sizeof(err)), 0);
    if (under_shim())
        CHECK(strstr(err, "4.0 MiB in 1 block never freed"));
}

/* An error of the wait alone, which native free would not have met: then its own answer counts. */
LAW_CASE_SIM(an_error_of_our_own_wait)
{
    if (!frees_wait())
        law_skip("frees do not wait in this mode");
    law_context();
    CUdeviceptr p = allocate(4 * MIB);
    CHECK(SIM(sim_fail)("cuCtxSynchronize", 1, 1, CUDA_ERROR_UNKNOWN) == 0);
    OK(cu.cuMemFree_v2(p));
    CHECK(!SIM(sim_is_allocated)(p)); /* waited for by nobody else: not to be kept */
    CHECK(SIM(sim_fail)("cuCtxSynchronize", 1, 0, 0) == 0);
    p = allocate(4 * MIB);
    OK(cu.cuMemFree_v2(p));
    if (under_shim())
        CHECK(SIM(sim_is_allocated)(p)); /* it is over */
}

/* After a reset the device is as new where the driver lets it be; until then the error stays. */
LAW_CASE_SIM(until_the_context_ends)
{
    CUdeviceptr p;
    CUcontext ctx, mine;
    CUdevice device;
    ctx = law_context();
    OK(cu.cuDeviceGet(&device, 0));
    OK(cu.cuCtxCreate_v2(&mine, 0, device));
    CUdeviceptr live = allocate(4 * MIB);
    cached_block(16 * MIB);
    fault(NULL);
    CHECK_EQ(cu.cuMemFree_v2(live), CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK_EQ(cu.cuMemAlloc_v2(&p, 16 * MIB), CUDA_ERROR_ILLEGAL_ADDRESS);
    cu.cuCtxDestroy_v2(mine);
    OK(cu.cuCtxSetCurrent(ctx));
    CHECK_EQ(cu.cuMemFree_v2(live), CUDA_ERROR_INVALID_VALUE);
    /* What another context of the device says is the driver's affair. */
    CUresult r = cu.cuMemAlloc_v2(&p, 4 * MIB);
    CHECK(r == CUDA_SUCCESS || r == CUDA_ERROR_ILLEGAL_ADDRESS);
}

/* Known in one context of two: of the current one's failure the driver tells first, then of the block's own. */
LAW_CASE_SIM(known_in_one_of_two_contexts)
{
    CUcontext ctx, mine, popped;
    CUdevice device;
    ctx = law_context();
    CUdeviceptr healthy = allocate(4 * MIB);
    OK(cu.cuDeviceGet(&device, 0));
    OK(cu.cuCtxCreate_v2(&mine, 0, device));
    CUdeviceptr failed = allocate(4 * MIB);
    cached_block(8 * MIB); /* what the shim had to learn of the context, it has learnt */
    fault(NULL);
    CHECK_EQ(cu.cuCtxSynchronize(), CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK_EQ(cu.cuMemFree_v2(healthy), CUDA_ERROR_ILLEGAL_ADDRESS);
    OK(cu.cuCtxPopCurrent_v2(&popped));
    OK(cu.cuCtxSetCurrent(ctx));
    CHECK_EQ(cu.cuMemFree_v2(failed), CUDA_ERROR_ILLEGAL_ADDRESS);
    OK(cu.cuMemFree_v2(healthy));
}

/*
 * Law 20: every block is a real cuMemAlloc of the driver, so that IPC, peer access, GPUDirect and registration caches
 * keep working. torch_memory_saver 36 (memory that was no longer IPC's).
 */
#include <string.h>

#include "law.h"
#include "next.h"
#include "sim.h"
#include "world.h"

enum { MIB = 1 << 20 };

static CUdeviceptr allocate(size_t bytes)
{
    CUdeviceptr p;
    OK(cu.cuMemAlloc_v2(&p, bytes));
    return p;
}

/* What the driver itself knows of an address, past the shim. */
static void real_range(CUdeviceptr p, CUdeviceptr *base, size_t *size)
{
    __typeof__(&cuMemGetAddressRange_v2) range = (__typeof__(range))second_next("cuMemGetAddressRange_v2");
    OK(range(base, size, p));
}

/* One block of the program, one of the driver's, made by the same entry, of exactly the size asked for. */
LAW_CASE_SIM(one_block_one_allocation)
{
    static const size_t sizes[] = {1, 512, 513, 1000, 65536, MIB, 2 * MIB, 2 * MIB + 1, 5 * MIB, 100 * MIB};
    enum { N = sizeof(sizes) / sizeof(*sizes) };
    CUdeviceptr p[N];
    law_context();
    for (size_t i = 0; i < N; i++) {
        CUdeviceptr base;
        size_t size;
        p[i] = allocate(sizes[i]);
        CHECK_EQ(driver_calls("cuMemAlloc_v2"), i + 1);
        real_range(p[i], &base, &size);
        CHECK_EQ(base, p[i]);
        CHECK_EQ(size, sizes[i]);
    }
    static const char *const others[] = {
        "cuMemCreate",       "cuMemMap",       "cuMemAddressReserve", "cuMemAllocAsync", "cuMemAllocFromPoolAsync",
        "cuMemAllocManaged", "cuMemHostAlloc", "cuMemAllocPitch_v2"};
    for (size_t i = 0; i < sizeof(others) / sizeof(*others); i++)
        CHECK_EQ(driver_calls(others[i]), 0);
    for (size_t i = 0; i < N; i++)
        OK(cu.cuMemFree_v2(p[i]));
}

LAW_CASE_SIM(pitched_memory_is_the_drivers_too)
{
    CUdeviceptr p, base;
    size_t pitch, size;
    law_context();
    OK(cu.cuMemAllocPitch_v2(&p, &pitch, 1000, 100, 4));
    CHECK_EQ(driver_calls("cuMemAllocPitch_v2"), 1);
    CHECK_EQ(driver_calls("cuMemAlloc_v2"), 0);
    real_range(p, &base, &size);
    CHECK_EQ(base, p);
    CHECK_EQ(size, 102400);
}

/* Two blocks are two to the driver: what is exported of one says nothing of the other. */
LAW_CASE_SIM(blocks_have_numbers_of_their_own)
{
    enum { N = 20 };
    unsigned long long id[N];
    CUdeviceptr p[N];
    law_context();
    for (int i = 0; i < N; i++)
        p[i] = allocate(i % 2 ? 1000 : 4 * MIB);
    for (int i = 0; i < N; i++) {
        OK(cu.cuPointerGetAttribute(&id[i], CU_POINTER_ATTRIBUTE_BUFFER_ID, p[i]));
        for (int j = 0; j < i; j++)
            CHECK(id[i] != id[j]);
    }
}

/* Fresh or recycled, a block can be exported in every way; nothing has to be moved for it. */
LAW_CASE_SIM(every_export_works)
{
    law_context();
    for (int round = 0; round < 4; round++) {
        CUipcMemHandle handle, again;
        int fd = -1, capable = 0;
        unsigned on = 1;
        unsigned long long tokens[8];
        CUdeviceptr p = allocate(4 * MIB);
        OK(cu.cuPointerGetAttribute(&capable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, p));
        CHECK_EQ(capable, 1);
        capable = 0;
        OK(cu.cuPointerGetAttribute(&capable, CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE, p));
        CHECK_EQ(capable, 1);
        if (round % 2) {
            OK(cu.cuMemFree_v2(p)); /* the next round's is recycled */
            continue;
        }
        OK(cu.cuIpcGetMemHandle(&handle, p));
        OK(cu.cuIpcGetMemHandle(&again, p));
        CHECK(memcmp(&handle, &again, sizeof(handle)) == 0);
        OK(cu.cuMemGetHandleForAddressRange(&fd, p, 4 * MIB, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
        close(fd);
        OK(cu.cuPointerSetAttribute(&on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, p));
        OK(cu.cuPointerGetAttribute(tokens, CU_POINTER_ATTRIBUTE_P2P_TOKENS, p));
        OK(cu.cuMemFree_v2(p));
    }
}

/* A registration cache (UCX, libfabric) keys by address and buffer number: as long as both stay, its mapping must be
 * the same memory. A recycled block keeps its number, and what lies behind the address has not been exchanged. */
LAW_CASE_SIM(a_registration_stays_valid)
{
    unsigned long long id, then;
    law_context();
    CUdeviceptr p = allocate(4 * MIB);
    OK(cu.cuPointerGetAttribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, p));
    for (int i = 0; i < 10; i++) {
        OK(cu.cuMemFree_v2(p));
        CUdeviceptr q = allocate(4 * MIB - (size_t)i * 512);
        OK(cu.cuPointerGetAttribute(&then, CU_POINTER_ATTRIBUTE_BUFFER_ID, q));
        if (under_shim()) {
            CHECK_EQ(q, p);
            CHECK_EQ(then, id);
            CHECK(SIM(sim_is_allocated)(p + 4 * MIB - 1));
        } else {
            CHECK(then != id); /* natively a new allocation has a new number, also at the same address */
        }
        p = q;
    }
}

/* It is plain memory to whoever asks: no mapping that the program could retain, release or unmap. */
LAW_CASE_SIM(it_is_not_mapped_memory)
{
    __typeof__(&cuMemRetainAllocationHandle) retain = (__typeof__(retain))law_sim("cuMemRetainAllocationHandle");
    __typeof__(&cuMemUnmap) unmap = (__typeof__(unmap))law_sim("cuMemUnmap");
    CUmemGenericAllocationHandle handle;
    law_context();
    for (int i = 0; i < 2; i++) {
        CUdeviceptr p = allocate(4 * MIB);
        CHECK_EQ(retain(&handle, (void *)(uintptr_t)p), CUDA_ERROR_INVALID_VALUE);
        CHECK(unmap(p, 4 * MIB) != CUDA_SUCCESS);
        OK(cu.cuMemsetD8_v2(p, 1, 4 * MIB));
        OK(cu.cuMemFree_v2(p));
    }
}

/* A peer reaches it: also a block that was made, freed and recycled before the peer came. */
static void __attribute__((constructor)) two_devices(void)
{
    setenv("SIMCUDA_DEVICES", "2", 1);
}

LAW_CASE_SIM(a_peer_reaches_it)
{
    CUcontext owner = law_context(), peer;
    cached_block(4 * MIB);
    CUdeviceptr p = allocate(4 * MIB);
    OK(cu.cuDevicePrimaryCtxRetain(&peer, 1));
    OK(cu.cuCtxSetCurrent(peer));
    OK(cu.cuCtxEnablePeerAccess(owner, 0));
    OK(cu.cuMemsetD8_v2(p, 5, 4 * MIB));
    unsigned char byte = 0;
    OK(cu.cuMemcpyDtoH_v2(&byte, p + 4 * MIB - 1, 1));
    CHECK_EQ(byte, 5);
}

/*
 * Law 19: an address that the world outside knows goes back to the driver on free, never into the cache; and only plain
 * memory is recycled at all. torch_memory_saver 36 (IPC).
 */
#include "law.h"
#include "sim.h"
#include "world.h"

enum { MIB = 1 << 20 };

static unsigned long frees(void) { return driver_calls("cuMemFree_v2"); }

/* Frees and tells whether the driver has the block back. */
static bool goes_back(CUdeviceptr p)
{
    unsigned long before = frees();
    OK(cu.cuMemFree_v2(p));
    return frees() == before + 1 && !SIM(sim_is_allocated)(p);
}

static CUdeviceptr allocate(size_t bytes)
{
    CUdeviceptr p;
    OK(cu.cuMemAlloc_v2(&p, bytes));
    return p;
}

/* From the cache or from the driver: the identity counts the same, at the start of the block and inside it. */
static void exported_goes_back(void (*share)(CUdeviceptr p))
{
    law_context();
    for (int i = 0; i < 4; i++) {
        CUdeviceptr p = allocate(4 * MIB);
        share(p + (i % 2 ? 2 * MIB : 0));
        CHECK(goes_back(p));
        p = cached_block(4 * MIB); /* the next round starts with a recycled block */
    }
    /* Nothing of it sticks to the address or to the size. */
    if (under_shim()) {
        CUdeviceptr p = allocate(4 * MIB);
        CHECK(!goes_back(p));
    }
}

static void ipc(CUdeviceptr p)
{
    CUipcMemHandle handle;
    OK(cu.cuIpcGetMemHandle(&handle, p));
}

static void dma_buf(CUdeviceptr p)
{
    int fd = -1;
    OK(cu.cuMemGetHandleForAddressRange(&fd, p, 2 * MIB, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
    close(fd);
}

static void sync_memops(CUdeviceptr p)
{
    unsigned on = 1;
    OK(cu.cuPointerSetAttribute(&on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, p));
}

static void p2p_tokens(CUdeviceptr p)
{
    unsigned long long tokens[8];
    OK(cu.cuPointerGetAttribute(tokens, CU_POINTER_ATTRIBUTE_P2P_TOKENS, p));
}

static void p2p_tokens_among_others(CUdeviceptr p)
{
    unsigned long long tokens[8];
    size_t size = 0;
    CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_RANGE_SIZE, CU_POINTER_ATTRIBUTE_P2P_TOKENS};
    void *data[] = {&size, tokens};
    OK(cu.cuPointerGetAttributes(2, attributes, data, p));
    CHECK_EQ(size, 4 * MIB);
}

LAW_CASE_SIM(exported_by_ipc) { exported_goes_back(ipc); }
LAW_CASE_SIM(exported_as_dma_buf) { exported_goes_back(dma_buf); }
LAW_CASE_SIM(sync_memops_set) { exported_goes_back(sync_memops); }
LAW_CASE_SIM(p2p_tokens_asked) { exported_goes_back(p2p_tokens); }
LAW_CASE_SIM(p2p_tokens_asked_among_others) { exported_goes_back(p2p_tokens_among_others); }

/* Asking for anything else leaves the identity at home. */
LAW_CASE_SIM(harmless_questions)
{
    static const CUpointer_attribute harmless[] = {
        CU_POINTER_ATTRIBUTE_CONTEXT,     CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
        CU_POINTER_ATTRIBUTE_BUFFER_ID,   CU_POINTER_ATTRIBUTE_IS_MANAGED,  CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        CU_POINTER_ATTRIBUTE_MAPPED,      CU_POINTER_ATTRIBUTE_RANGE_SIZE,  CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        CU_POINTER_ATTRIBUTE_SYNC_MEMOPS,
    };
    unsigned long long answer[8];
    law_context();
    CUdeviceptr p = allocate(4 * MIB);
    for (size_t i = 0; i < sizeof(harmless) / sizeof(*harmless); i++)
        OK(cu.cuPointerGetAttribute(answer, harmless[i], p));
    if (under_shim())
        CHECK(!goes_back(p));
}

/* What the driver refused has exported nothing. */
LAW_CASE_SIM(exports_that_failed)
{
    CUipcMemHandle handle;
    unsigned long long tokens[8];
    unsigned on = 1;
    int fd;
    law_context();
    CUdeviceptr p = allocate(4 * MIB);
    CHECK(SIM(sim_fail)("cuIpcGetMemHandle", 1, 1, CUDA_ERROR_NOT_SUPPORTED) == 0);
    CHECK_EQ(cu.cuIpcGetMemHandle(&handle, p), CUDA_ERROR_NOT_SUPPORTED);
    CHECK_EQ(cu.cuIpcGetMemHandle(NULL, p), CUDA_ERROR_INVALID_VALUE);
    CHECK(SIM(sim_fail)("cuMemGetHandleForAddressRange", 1, 1, CUDA_ERROR_NOT_SUPPORTED) == 0);
    CHECK_EQ(cu.cuMemGetHandleForAddressRange(&fd, p, 2 * MIB, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0),
             CUDA_ERROR_NOT_SUPPORTED);
    CHECK(SIM(sim_fail)("cuPointerSetAttribute", 1, 1, CUDA_ERROR_NOT_SUPPORTED) == 0);
    CHECK_EQ(cu.cuPointerSetAttribute(&on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, p), CUDA_ERROR_NOT_SUPPORTED);
    CHECK(SIM(sim_fail)("cuPointerGetAttribute", 1, 1, CUDA_ERROR_NOT_SUPPORTED) == 0);
    CHECK_EQ(cu.cuPointerGetAttribute(tokens, CU_POINTER_ATTRIBUTE_P2P_TOKENS, p), CUDA_ERROR_NOT_SUPPORTED);
    if (under_shim())
        CHECK(!goes_back(p));
}

/* An address that was freed cannot be exported, although a shim may still hold it. */
LAW_CASE_SIM(exporting_freed_memory)
{
    CUipcMemHandle handle;
    unsigned on = 1;
    int fd;
    law_context();
    CUdeviceptr p = cached_block(4 * MIB);
    CHECK_EQ(cu.cuIpcGetMemHandle(&handle, p), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuPointerSetAttribute(&on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, p), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemGetHandleForAddressRange(&fd, p, 2 * MIB, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0),
             CUDA_ERROR_INVALID_VALUE);
    if (under_shim()) { /* and the attempt has not made it an export */
        unsigned long before = driver_calls("cuMemAlloc_v2");
        CHECK_EQ(allocate(4 * MIB), p);
        CHECK_EQ(driver_calls("cuMemAlloc_v2"), before);
        CHECK(!goes_back(p));
    }
}

/* A refused free of an exported block: it is still exported. */
LAW_CASE_SIM(exported_and_refused)
{
    law_context();
    CUdeviceptr p = allocate(4 * MIB);
    ipc(p);
    CHECK(SIM(sim_fail)("cuMemFree_v2", 1, 1, CUDA_ERROR_UNKNOWN) == 0);
    CHECK_EQ(cu.cuMemFree_v2(p), CUDA_ERROR_UNKNOWN);
    CHECK(goes_back(p));
}

/* Other families pass through, both ways, one driver call for each of the program's. */
#define FAMILY(name) ((__typeof__(&name))law_sim(#name))

LAW_CASE_SIM(other_families_pass_through)
{
    enum { N = 4 };
    law_context();
    unsigned long before = frees();
    for (int i = 0; i < N; i++) {
        CUdeviceptr p;
        void *host;
        OK(FAMILY(cuMemAllocManaged)(&p, 4 * MIB, 1));
        OK(cu.cuMemFree_v2(p));
        CHECK(!SIM(sim_is_allocated)(p));
        OK(FAMILY(cuMemAllocAsync)(&p, 4 * MIB, NULL));
        OK(FAMILY(cuMemFreeAsync)(p, NULL));
        OK(FAMILY(cuMemAllocAsync)(&p, 4 * MIB, NULL));
        OK(cu.cuMemFree_v2(p)); /* allowed: a pool's memory freed by the plain entry */
        OK(FAMILY(cuMemHostAlloc)(&host, 4 * MIB, 0));
        OK(FAMILY(cuMemFreeHost)(host));
    }
    CHECK_EQ(driver_calls("cuMemAllocManaged"), N);
    CHECK_EQ(driver_calls("cuMemAllocAsync"), 2 * N);
    CHECK_EQ(driver_calls("cuMemFreeAsync"), N);
    CHECK_EQ(driver_calls("cuMemHostAlloc"), N);
    CHECK_EQ(driver_calls("cuMemFreeHost"), N);
    CHECK_EQ(frees(), before + 2 * N);
    CHECK_EQ(driver_calls("cuMemAlloc_v2"), 0);
}

/* Managed memory is never handed out for a plain request, nor plain memory for a managed one. */
LAW_CASE_SIM(families_do_not_mix)
{
    CUdeviceptr plain, managed;
    unsigned is_managed = 9;
    law_context();
    OK(FAMILY(cuMemAllocManaged)(&managed, 4 * MIB, 1));
    OK(cu.cuMemFree_v2(managed));
    cached_block(4 * MIB);
    OK(cu.cuMemAlloc_v2(&plain, 4 * MIB));
    OK(FAMILY(cuMemAllocManaged)(&managed, 4 * MIB, 1));
    CHECK(plain != managed);
    OK(cu.cuPointerGetAttribute(&is_managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, plain));
    CHECK_EQ(is_managed, 0);
    is_managed = 0;
    OK(cu.cuPointerGetAttribute(&is_managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, managed));
    CHECK_EQ(is_managed, 1);
}

/* Both plain families are recycled, and for each other. */
LAW_CASE_SIM(plain_and_pitched_memory_is_recycled)
{
    CUdeviceptr p;
    size_t pitch;
    law_context();
    OK(cu.cuMemAllocPitch_v2(&p, &pitch, 4096, 1024, 4));
    CHECK_EQ(pitch, 4096);
    unsigned long before = frees();
    OK(cu.cuMemFree_v2(p));
    OK(cu.cuMemAlloc_v2(&p, 4 * MIB));
    OK(cu.cuMemFree_v2(p));
    OK(cu.cuMemAllocPitch_v2(&p, &pitch, 4000, 1024, 4));
    CHECK_EQ(pitch, 4096);
    OK(cu.cuMemFree_v2(p));
    if (under_shim()) {
        CHECK_EQ(frees(), before);
        CHECK_EQ(driver_calls("cuMemAlloc_v2") + driver_calls("cuMemAllocPitch_v2"), 1);
    }
}

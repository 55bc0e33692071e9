/*
 * Law 8: of a pointer that is not known, the driver's word, verbatim; and never an exit. An address in the cache is
 * known. HAMi-core 93 and 257 (unknown pointers: an invented error, an abort).
 */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "law.h"
#include "next.h"
#include "sim.h"
#include "world.h"

enum { MIB = 1 << 20 };

static unsigned long frees(void)
{
    return driver_calls("cuMemFree_v2");
}

/* Forwarded, once, and the answer is the driver's. */
static void forwarded(CUdeviceptr p, CUresult expected)
{
    unsigned long before = frees();
    CHECK_EQ(cu.cuMemFree_v2(p), expected);
    if (simulated())
        CHECK_EQ(frees(), before + 1);
}

LAW_CASE(addresses_that_were_never_allocated)
{
    int on_the_stack;
    void *on_the_heap = malloc(512);
    law_context();
    CUdeviceptr p = cached_block(4 * MIB); /* something is known */
    forwarded(0x10, CUDA_ERROR_INVALID_VALUE);
    forwarded((uintptr_t)&on_the_stack, CUDA_ERROR_INVALID_VALUE);
    forwarded((uintptr_t)on_the_heap, CUDA_ERROR_INVALID_VALUE);
    forwarded((uintptr_t)&cu, CUDA_ERROR_INVALID_VALUE);
    forwarded(~(CUdeviceptr)0, CUDA_ERROR_INVALID_VALUE);
    forwarded(p + 512 * (CUdeviceptr)MIB, CUDA_ERROR_INVALID_VALUE);
    forwarded(p + 1, CUDA_ERROR_INVALID_VALUE); /* inside a block, whoever holds it: not its address */
    forwarded(0, CUDA_SUCCESS);
    free(on_the_heap);
}

LAW_CASE(before_initialisation)
{
    CHECK_EQ(cu.cuMemFree_v2(0), CUDA_ERROR_NOT_INITIALIZED);
    CHECK_EQ(cu.cuMemFree_v2(512), CUDA_ERROR_NOT_INITIALIZED);
    CUdeviceptr p;
    CHECK_EQ(cu.cuMemAlloc_v2(&p, 512), CUDA_ERROR_NOT_INITIALIZED);
    OK(cu.cuInit(0));
    CHECK_EQ(cu.cuMemFree_v2(512), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemFree_v2(0), CUDA_SUCCESS);
}

/* Whatever the driver says, also what we have no name for. */
LAW_CASE_SIM(every_code_goes_back)
{
    static const int codes[] = {1, 2, 3, 4, 201, 214, 400, 700, 709, 719, 900, 999, 12345};
    law_context();
    for (size_t i = 0; i < sizeof(codes) / sizeof(*codes); i++) {
        CHECK(SIM(sim_fail)("cuMemFree_v2", 1, 1, codes[i]) == 0);
        forwarded(0x1000, (CUresult)codes[i]);
    }
}

/* Memory that came past us, by an entry that is not hooked or by the driver's own, is freed through us. */
LAW_CASE_SIM(memory_that_came_past_us)
{
    __typeof__(&cuMemAlloc_v2) real = (__typeof__(real))second_next("cuMemAlloc_v2");
    __typeof__(&cuMemAllocManaged) managed = (__typeof__(managed))second_next("cuMemAllocManaged");
    CUdeviceptr p;
    law_context();
    for (int i = 0; i < 3; i++) {
        OK(real(&p, 4 * MIB));
        forwarded(p, CUDA_SUCCESS);
        CHECK(!SIM(sim_is_allocated)(p));
        forwarded(p, CUDA_ERROR_INVALID_VALUE); /* gone: not ours to answer for */
        OK(managed(&p, MIB, 1));
        forwarded(p, CUDA_SUCCESS);
        forwarded(p, CUDA_ERROR_INVALID_VALUE);
    }
}

/* A block in the cache is the driver's still: forwarding a second free of it would pull it from under its next owner.
 */
LAW_CASE_SIM(a_cached_address_is_never_forwarded)
{
    law_context();
    CUdeviceptr p = cached_block(4 * MIB), q;
    unsigned long before = frees(), refused = SIM(sim_refused_frees)();
    for (int i = 0; i < 3; i++)
        CHECK_EQ(cu.cuMemFree_v2(p), CUDA_ERROR_INVALID_VALUE);
    if (under_shim()) {
        CHECK_EQ(frees(), before);
        CHECK_EQ(SIM(sim_refused_frees)(), refused);
        CHECK(SIM(sim_is_allocated)(p));
    }
    OK(cu.cuMemAlloc_v2(&q, 4 * MIB));
    CHECK_EQ(q, p);
    CHECK(SIM(sim_is_allocated)(q));
    OK(cu.cuMemsetD8_v2(q, 1, 4 * MIB));
    OK(cu.cuMemFree_v2(q));
    CHECK_EQ(cu.cuMemFree_v2(q), CUDA_ERROR_INVALID_VALUE);
}

/* A block of which the driver refused the free is the program's still. */
LAW_CASE_SIM(a_free_that_the_driver_refuses)
{
    CUdeviceptr p;
    law_context();
    OK(cu.cuMemAlloc_v2(&p, 4 * MIB));
    CUipcMemHandle handle;
    OK(cu.cuIpcGetMemHandle(&handle, p)); /* so that its free goes to the driver in any case */
    CHECK(SIM(sim_fail)("cuMemFree_v2", 1, 2, CUDA_ERROR_UNKNOWN) == 0);
    forwarded(p, CUDA_ERROR_UNKNOWN);
    forwarded(p, CUDA_ERROR_UNKNOWN);
    OK(cu.cuMemsetD8_v2(p, 1, 4 * MIB));
    forwarded(p, CUDA_SUCCESS);
    forwarded(p, CUDA_ERROR_INVALID_VALUE);
}

/* A program that frees whatever comes its way ends as it wants to. */
LAW_CHILD(frees_whatever_comes)
{
    law_context();
    CUdeviceptr p = cached_block(4 * MIB);
    uint64_t x = 88172645463325252ull;
    for (int i = 0; i < 2000; i++) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        CHECK_EQ(cu.cuMemFree_v2(i % 2 ? x | 1 : p + 1 + x % (4 * MIB - 1)), CUDA_ERROR_INVALID_VALUE);
    }
    exit(42);
}

LAW_CASE(no_exit_and_no_abort)
{
    char err[8192];
    int status = law_run_child("frees_whatever_comes", ENV("LAW=8"), err, sizeof(err));
    CHECK(WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), 42);
    if (under_shim())
        CHECK(strstr(err, "nothing leaked"));
}

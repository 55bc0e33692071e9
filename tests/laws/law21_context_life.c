/*
 * Law 21: a cache belongs to a context's life, not to a handle. A destroyed, reset or released context takes its blocks
 * with it; handles and addresses recur afterwards. The results are those of a real GPU (H200).
 */
#include <pthread.h>
#include <stdatomic.h>

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

/* The memory is there and is this context's. */
static void works(CUdeviceptr p, size_t bytes, CUcontext owner)
{
    CUcontext said = NULL;
    unsigned char last = 0;
    if (simulated())
        CHECK(SIM(sim_is_allocated)(p) && SIM(sim_is_allocated)(p + bytes - 1));
    OK(cu.cuPointerGetAttribute(&said, CU_POINTER_ATTRIBUTE_CONTEXT, p));
    CHECK_EQ(said, owner);
    OK(cu.cuMemsetD8_v2(p, 0x5a, bytes));
    OK(cu.cuMemcpyDtoH_v2(&last, p + bytes - 1, 1));
    CHECK_EQ(last, 0x5a);
}

static CUcontext create(void)
{
    CUcontext ctx;
    OK(cu.cuCtxCreate_v2(&ctx, 0, 0));
    return ctx;
}

LAW_CASE(destroyed)
{
    CUcontext primary = law_context();
    CUcontext first = create();
    CUdeviceptr kept = cached_block(4 * MIB), live = allocate(4 * MIB);
    OK(cu.cuCtxDestroy_v2(first));
    CHECK_EQ(cu.cuMemFree_v2(live), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemFree_v2(kept), CUDA_ERROR_INVALID_VALUE);
    CUcontext second = create();
    for (int i = 0; i < 3; i++)
        works(allocate(4 * MIB), 4 * MIB, second);
    OK(cu.cuCtxDestroy_v2(second));
    works(allocate(4 * MIB), 4 * MIB, primary);
    if (simulated())
        CHECK_EQ(SIM(sim_hazards)(), 0);
}

/* Handles and addresses recur: the new life knows nothing of the old one's blocks, and owns what it is given. */
LAW_CASE_SIM(addresses_recur)
{
    law_context();
    uint64_t used = SIM(sim_used)(0);
    for (int i = 0; i < 20; i++) {
        CUcontext ctx = create();
        CUdeviceptr a = allocate(4 * MIB), b = allocate(1000), c = allocate(6 * MIB);
        works(a, 4 * MIB, ctx);
        works(b, 1000, ctx);
        works(c, 6 * MIB, ctx);
        OK(cu.cuMemFree_v2(i % 2 ? a : b));
        OK(cu.cuMemFree_v2(c));
        CHECK_EQ(cu.cuMemFree_v2(c), CUDA_ERROR_INVALID_VALUE);
        OK(cu.cuCtxDestroy_v2(ctx));
        CHECK_EQ(SIM(sim_used)(0), used);
    }
    CHECK_EQ(SIM(sim_hazards)(), 0);
}

LAW_CASE(reset)
{
    CUcontext before = law_context(), after;
    CUdeviceptr live = allocate(4 * MIB);
    cached_block(6 * MIB);
    OK(cu.cuDevicePrimaryCtxReset_v2(0));
    CHECK_EQ(cu.cuMemFree_v2(live), CUDA_ERROR_CONTEXT_IS_DESTROYED);
    OK(cu.cuDevicePrimaryCtxRetain(&after, 0));
    CHECK_EQ(after, before); /* the same handle, another life */
    OK(cu.cuCtxSetCurrent(after));
    for (int i = 0; i < 3; i++) {
        works(allocate(6 * MIB), 6 * MIB, after);
        works(allocate(4 * MIB), 4 * MIB, after);
    }
    if (simulated())
        CHECK_EQ(SIM(sim_hazards)(), 0);
}

/* Only the last release ends the context: until then the cache serves, afterwards it holds nothing. */
LAW_CASE(released)
{
    CUcontext ctx = law_context(), again;
    OK(cu.cuDevicePrimaryCtxRetain(&again, 0));
    CHECK_EQ(again, ctx);
    CUdeviceptr live = allocate(2 * MIB);
    cached_block(4 * MIB);
    OK(cu.cuDevicePrimaryCtxRelease_v2(0));
    unsigned long before = driver_calls("cuMemAlloc_v2");
    CUdeviceptr p = allocate(4 * MIB);
    if (under_shim() && simulated())
        CHECK_EQ(driver_calls("cuMemAlloc_v2"), before);
    works(p, 4 * MIB, ctx);
    works(live, 2 * MIB, ctx);
    OK(cu.cuMemFree_v2(p));
    OK(cu.cuDevicePrimaryCtxRelease_v2(0));
    CHECK_EQ(cu.cuDevicePrimaryCtxRelease_v2(0), CUDA_ERROR_INVALID_CONTEXT);
    OK(cu.cuDevicePrimaryCtxRetain(&again, 0));
    CHECK_EQ(again, ctx);
    OK(cu.cuCtxSetCurrent(again));
    for (int i = 0; i < 3; i++)
        works(allocate(4 * MIB), 4 * MIB, again);
    if (simulated())
        CHECK_EQ(SIM(sim_hazards)(), 0);
}

/* An end that the driver refuses ends nothing: cache and ledger are as they were. */
LAW_CASE_SIM(refused_ends)
{
    static const struct {
        const char *entry;
        bool primary;
    } ends[] = {
        {"cuCtxDestroy_v2", false}, {"cuDevicePrimaryCtxReset_v2", true}, {"cuDevicePrimaryCtxRelease_v2", true}};
    CUcontext primary = law_context();
    for (int i = 0; i < 3; i++) {
        CUcontext ctx = ends[i].primary ? primary : create();
        CUdeviceptr live = allocate(2 * MIB), kept = cached_block(4 * MIB);
        CHECK(SIM(sim_fail)(ends[i].entry, 1, 1, CUDA_ERROR_UNKNOWN) == 0);
        CUresult r = i == 0   ? cu.cuCtxDestroy_v2(ctx)
                     : i == 1 ? cu.cuDevicePrimaryCtxReset_v2(0)
                              : cu.cuDevicePrimaryCtxRelease_v2(0);
        CHECK_EQ(r, CUDA_ERROR_UNKNOWN);
        unsigned long before = driver_calls("cuMemAlloc_v2");
        CUdeviceptr p = allocate(4 * MIB);
        works(p, 4 * MIB, ctx);
        if (under_shim()) {
            CHECK_EQ(p, kept);
            CHECK_EQ(driver_calls("cuMemAlloc_v2"), before);
        }
        OK(cu.cuMemFree_v2(live));
        OK(cu.cuMemFree_v2(p));
        if (!ends[i].primary)
            OK(cu.cuCtxDestroy_v2(ctx));
    }
}

/* The other entries that end a context. */
LAW_CASE_SIM(ended_by_other_entries)
{
    __typeof__(&cuCtxDestroy) destroy = (__typeof__(destroy))law_sim("cuCtxDestroy");
    __typeof__(&cuCtxDetach) detach = (__typeof__(detach))law_sim("cuCtxDetach");
    __typeof__(&cuDevicePrimaryCtxReset) old_reset = (__typeof__(old_reset))law_sim("cuDevicePrimaryCtxReset");
    __typeof__(&cuDevicePrimaryCtxRelease) old_release = (__typeof__(old_release))law_sim("cuDevicePrimaryCtxRelease");
    law_context();
    for (int i = 0; i < 4; i++) {
        CUcontext ctx = i < 2 ? create() : law_context();
        cached_block(4 * MIB);
        if (i == 0)
            OK(destroy(ctx));
        else if (i == 1)
            OK(detach(ctx));
        else if (i == 2)
            OK(old_reset(0));
        else
            while (old_release(0) == CUDA_SUCCESS)
                ;
        CHECK_EQ(SIM(sim_used)(0), 0);
        CUcontext next = law_context();
        works(allocate(4 * MIB), 4 * MIB, next);
        OK(cu.cuDevicePrimaryCtxReset_v2(0));
        law_context();
    }
    CHECK_EQ(SIM(sim_hazards)(), 0);
}

/* Nothing of a dead context is handed out of the cache of another, nor flushed, nor freed. */
LAW_CASE_SIM(a_dead_cache_is_not_given_back)
{
    law_context();
    CUcontext ctx = create();
    cached_block(4 * MIB);
    cached_block(6 * MIB);
    OK(cu.cuCtxDestroy_v2(ctx));
    cached_block(8 * MIB);
    unsigned long before = driver_calls("cuMemFree_v2");
    if (under_shim()) {
        raise(SIGUSR1);
        WAIT_UNTIL(driver_calls("cuMemFree_v2") > before);
        LINGER(driver_calls("cuMemFree_v2") > before + 1);
        CHECK_EQ(driver_calls("cuMemFree_v2"), before + 1);
    }
    CHECK_EQ(SIM(sim_refused_frees)(), 0);
    CHECK_EQ(SIM(sim_hazards)(), 0);
}

/* What the program had not freed ended with its context: it is counted so, and is not a leak. */
LAW_CHILD(leaves_blocks_in_a_context)
{
    law_context();
    CUcontext ctx = create();
    allocate(3 * MIB);
    allocate(1 * MIB);
    cached_block(8 * MIB);
    OK(cu.cuCtxDestroy_v2(ctx));
    law_context();
    cached_block(8 * MIB);
}

LAW_CASE_SIM(ended_with_its_context)
{
    static char text[16384];
    CHECK_EQ(law_run_child("leaves_blocks_in_a_context", NULL, text, sizeof(text)), 0);
    if (under_shim()) {
        CHECK(strstr(text, "nothing leaked"));
        CHECK(strstr(text, "ended with its context  4.0 MiB in 2 blocks"));
    }
}

/* A thread frees in a context while another ends contexts: nobody waits for ever, nothing is mixed up. */
static CUcontext working;
static atomic_bool stop;
static atomic_uint failures;
static void *pairs(void *unused)
{
    (void)unused;
    failures += cu.cuCtxSetCurrent(working) != CUDA_SUCCESS;
    while (!stop) {
        CUdeviceptr p;
        failures += cu.cuMemAlloc_v2(&p, 4 * MIB) != CUDA_SUCCESS;
        failures += cu.cuMemFree_v2(p) != CUDA_SUCCESS;
    }
    return NULL;
}

LAW_CASE_SIM(contexts_come_and_go_beside_working_threads)
{
    pthread_t threads[2];
    working = law_context();
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&threads[i], NULL, pairs, NULL) == 0);
    for (int i = 0; i < 40; i++) {
        CUcontext ctx = create();
        cached_block(4 * MIB);
        works(allocate(4 * MIB), 4 * MIB, ctx);
        OK(cu.cuCtxDestroy_v2(ctx));
    }
    stop = true;
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    CHECK_EQ(failures, 0);
    CHECK_EQ(SIM(sim_refused_frees)(), 0);
    CHECK_EQ(SIM(sim_hazards)(), 0);
}

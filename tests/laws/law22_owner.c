/*
 * Law 22: context and device of a block are those at its allocation, never those current when it is freed. Simulated
 * time stands still until a host call waits (SIMCUDA_CLOCK=lazy), so that who was waited for can be seen.
 */
#include "law.h"
#include "sim.h"
#include "world.h"

enum { MIB = 1 << 20, WORK_NS = 1000000 };

static void __attribute__((constructor)) two_devices(void)
{
    setenv("SIMCUDA_DEVICES", "2", 1);
    setenv("SIMCUDA_CLOCK", "lazy", 1);
}

struct place {
    CUcontext ctx;
    CUstream stream;
    CUevent done;
};

static struct place place_of(CUcontext ctx)
{
    struct place p = {.ctx = ctx};
    OK(cu.cuCtxSetCurrent(ctx));
    OK(cu.cuStreamCreate(&p.stream, CU_STREAM_NON_BLOCKING));
    OK(cu.cuEventCreate(&p.done, 0));
    return p;
}

/* Gives the place work that nobody has waited for. It is current afterwards. */
static void busy(struct place *p, CUdeviceptr memory)
{
    OK(cu.cuCtxSetCurrent(p->ctx));
    OK(cu.cuMemsetD8Async(memory, 1, 4096, p->stream));
    OK(cu.cuEventRecord(p->done, p->stream));
    CHECK_EQ(cu.cuEventQuery(p->done), CUDA_ERROR_NOT_READY);
}

static CUresult finished(struct place *p)
{
    OK(cu.cuCtxSetCurrent(p->ctx));
    return cu.cuEventQuery(p->done);
}

static CUdeviceptr allocate(size_t bytes)
{
    CUdeviceptr p;
    OK(cu.cuMemAlloc_v2(&p, bytes));
    return p;
}

static CUcontext owner_of(CUdeviceptr p)
{
    CUcontext ctx = NULL;
    OK(cu.cuPointerGetAttribute(&ctx, CU_POINTER_ATTRIBUTE_CONTEXT, p));
    return ctx;
}

static CUcontext current(void)
{
    CUcontext ctx;
    OK(cu.cuCtxGetCurrent(&ctx));
    return ctx;
}

/* Contexts on one device, and on two. */
static CUcontext other_context(int device)
{
    CUcontext ctx, popped;
    OK(cu.cuCtxCreate_v2(&ctx, 0, device));
    OK(cu.cuCtxPopCurrent_v2(&popped));
    return ctx;
}

static void freed_elsewhere(int device)
{
    CUcontext a = law_context(), b = other_context(device);
    OK(cu.cuCtxSetCurrent(b));
    cached_block(1000); /* B has blocks of its own, so there is a cache that p could get into by mistake */
    OK(cu.cuCtxSetCurrent(a));
    CUdeviceptr p = allocate(4 * MIB);
    OK(cu.cuCtxSetCurrent(b));
    OK(cu.cuMemFree_v2(p));
    CHECK_EQ(current(), b);
    /* Not B's now. */
    CUdeviceptr in_b = allocate(4 * MIB);
    CHECK_EQ(owner_of(in_b), b);
    CHECK(!under_shim() || in_b != p);
    OK(cu.cuCtxSetCurrent(a));
    unsigned long before = driver_calls("cuMemAlloc_v2");
    CUdeviceptr in_a = allocate(4 * MIB);
    CHECK_EQ(owner_of(in_a), a);
    if (under_shim()) {
        CHECK_EQ(in_a, p);
        CHECK_EQ(driver_calls("cuMemAlloc_v2"), before);
    }
    OK(cu.cuMemFree_v2(in_b));
    CHECK_EQ(current(), a);
    OK(cu.cuMemFree_v2(in_a));
}

LAW_CASE_SIM(freed_in_another_context) { freed_elsewhere(0); }
LAW_CASE_SIM(freed_on_another_device) { freed_elsewhere(1); }

/* The owner's work is waited for, the current context's is not. */
LAW_CASE_SIM(the_owners_work_is_waited_for)
{
    CUcontext ctx_a = law_context();
    struct place b = place_of(other_context(0)), a = place_of(ctx_a);
    CUdeviceptr in_a = allocate(4 * MIB);
    OK(cu.cuCtxSetCurrent(b.ctx));
    CUdeviceptr in_b = allocate(4 * MIB);
    busy(&a, in_a);
    busy(&b, in_b);
    OK(cu.cuMemFree_v2(in_a));
    CHECK_EQ(current(), b.ctx);
    CHECK_EQ(finished(&b), CUDA_ERROR_NOT_READY);
    CHECK_EQ(finished(&a), frees_wait() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
    OK(cu.cuMemFree_v2(in_b));
    CHECK_EQ(current(), a.ctx);
    CHECK_EQ(finished(&b), frees_wait() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
    CHECK_EQ(SIM(sim_hazards)(), 0);
}

/* No context is current: a free works, and none is current afterwards. HAMi-core 187 and 290. */
LAW_CASE_SIM(freed_without_a_context)
{
    CUcontext ctx = law_context(), popped;
    struct place a = place_of(ctx);
    CUdeviceptr p = allocate(4 * MIB);
    busy(&a, p);
    OK(cu.cuCtxPopCurrent_v2(&popped));
    CHECK_EQ(current(), NULL);
    OK(cu.cuMemFree_v2(p));
    CHECK_EQ(current(), NULL);
    CHECK_EQ(cu.cuCtxPopCurrent_v2(&popped), CUDA_ERROR_INVALID_CONTEXT);
    CHECK_EQ(finished(&a), frees_wait() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
    if (under_shim() && frees_wait()) {
        unsigned long before = driver_calls("cuMemAlloc_v2");
        CHECK_EQ(allocate(4 * MIB), p);
        CHECK_EQ(driver_calls("cuMemAlloc_v2"), before);
    }
}

/* The stack of contexts is the program's. */
LAW_CASE_SIM(the_stack_is_as_it_was)
{
    CUcontext a = law_context(), b = other_context(0), c = other_context(1), popped;
    CUdeviceptr in_a = allocate(4 * MIB);
    OK(cu.cuCtxPushCurrent_v2(b));
    CUdeviceptr in_b = allocate(4 * MIB);
    OK(cu.cuCtxPushCurrent_v2(c));
    CUdeviceptr in_c = allocate(4 * MIB);
    OK(cu.cuMemFree_v2(in_a));
    OK(cu.cuMemFree_v2(in_b));
    OK(cu.cuMemFree_v2(in_c));
    OK(cu.cuCtxPopCurrent_v2(&popped));
    CHECK_EQ(popped, c);
    OK(cu.cuCtxPopCurrent_v2(&popped));
    CHECK_EQ(popped, b);
    OK(cu.cuCtxPopCurrent_v2(&popped));
    CHECK_EQ(popped, a);
    CHECK_EQ(cu.cuCtxPopCurrent_v2(&popped), CUDA_ERROR_INVALID_CONTEXT);
}

/* Each device's free memory counts what is cached of its own. */
LAW_CASE_SIM(free_memory_of_each_device)
{
    size_t before[2], after[2], total;
    CUcontext a = law_context(), b;
    OK(cu.cuDevicePrimaryCtxRetain(&b, 1));
    OK(cu.cuMemGetInfo_v2(&before[0], &total));
    CUdeviceptr in_a = allocate(6 * MIB);
    OK(cu.cuCtxSetCurrent(b));
    OK(cu.cuMemGetInfo_v2(&before[1], &total));
    CUdeviceptr in_b = allocate(10 * MIB);
    OK(cu.cuMemFree_v2(in_a));
    OK(cu.cuMemGetInfo_v2(&after[1], &total));
    CHECK_EQ(before[1] - after[1], 10 * MIB);
    OK(cu.cuCtxSetCurrent(a));
    OK(cu.cuMemFree_v2(in_b));
    OK(cu.cuMemGetInfo_v2(&after[0], &total));
    CHECK_EQ(after[0], before[0]);
    OK(cu.cuCtxSetCurrent(b));
    OK(cu.cuMemGetInfo_v2(&after[1], &total));
    CHECK_EQ(after[1], before[1]);
}

/* A flush gives back what every context had, each in its own, while the program's threads keep theirs. */
LAW_CASE_SIM(flushed_in_its_own_context)
{
    CUcontext a = law_context(), b = other_context(0), c = other_context(1);
    const CUcontext all[] = {a, b, c};
    uint64_t used[2] = {SIM(sim_used)(0), SIM(sim_used)(1)};
    CUdeviceptr p[3];
    for (int i = 0; i < 3; i++) {
        OK(cu.cuCtxSetCurrent(all[i]));
        p[i] = allocate(4 * MIB);
    }
    for (int i = 0; i < 3; i++)
        OK(cu.cuMemFree_v2(p[i]));
    if (under_shim()) {
        CHECK(SIM(sim_used)(0) != used[0] && SIM(sim_used)(1) != used[1]);
        raise(SIGUSR1);
        WAIT_UNTIL(driver_calls("cuMemFree_v2") == 3);
    }
    WAIT_UNTIL(SIM(sim_used)(0) == used[0] && SIM(sim_used)(1) == used[1]);
    CHECK_EQ(current(), c);
    CHECK_EQ(SIM(sim_refused_frees)(), 0);
}

/* The report names the device where the block is, wherever it was that the program forgot it. */
LAW_CHILD(forgets_on_the_second_device)
{
    CUcontext a = law_context(), b = other_context(1);
    cached_block(2 * MIB);
    OK(cu.cuCtxSetCurrent(b));
    CUdeviceptr p = allocate(4 * MIB);
    allocate(6 * MIB);
    OK(cu.cuCtxSetCurrent(a));
    OK(cu.cuMemFree_v2(p));
}

LAW_CASE_SIM(reported_where_it_is)
{
    static char text[16384];
    CHECK_EQ(law_run_child("forgets_on_the_second_device", NULL, text, sizeof(text)), 0);
    if (!under_shim())
        return;
    const char *zero = strstr(text, "  device 0\n"), *one = strstr(text, "  device 1\n");
    CHECK(zero && one && zero < one);
    CHECK(strstr(one, "never freed             6.0 MiB in 1 block\n"));
    CHECK(strstr(one, "kept at exit            4.0 MiB in 1 block\n"));
    const char *kept = strstr(zero, "kept at exit            2.0 MiB in 1 block\n");
    CHECK(kept && kept < one);
}

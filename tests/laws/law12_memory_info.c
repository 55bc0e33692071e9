/*
 * Law 12: free memory is what the driver says and all that is cached, because natively that would be free. HAMi-core
 * 200 (unsigned underflow); programs size their own caches by it, as JAX does (0.75 of what is free).
 */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "law.h"
#include "sim.h"
#include "world.h"

enum { MIB = 1 << 20, CAPACITY_MIB = 1024 };

static void __attribute__((constructor)) small_devices(void)
{
    setenv("SIMCUDA_CAPACITY", "1G", 1);
    setenv("SIMCUDA_DEVICES", "2", 1);
}

static size_t free_mib(void)
{
    size_t free_bytes = 1, total = 1;
    OK(cu.cuMemGetInfo_v2(&free_bytes, &total));
    CHECK_EQ(total, (size_t)CAPACITY_MIB * MIB);
    CHECK(free_bytes <= total);
    CHECK_EQ(free_bytes % (2 * MIB), 0); /* the driver counts pages */
    size_t alone = 1;
    OK(cu.cuMemGetInfo_v2(&alone, NULL));
    CHECK_EQ(alone, free_bytes);
    return free_bytes / MIB;
}

static CUdeviceptr allocate(size_t bytes)
{
    CUdeviceptr p;
    OK(cu.cuMemAlloc_v2(&p, bytes));
    return p;
}

/* Large blocks: whole pages, at each step. */
LAW_CASE_SIM(large_blocks)
{
    law_context();
    CHECK_EQ(free_mib(), 1024);
    CUdeviceptr a = allocate(4 * MIB);
    CHECK_EQ(free_mib(), 1020);
    CUdeviceptr b = allocate(5 * MIB); /* takes 6 */
    CHECK_EQ(free_mib(), 1014);
    OK(cu.cuMemFree_v2(a));
    CHECK_EQ(free_mib(), 1018);
    OK(cu.cuMemFree_v2(b));
    CHECK_EQ(free_mib(), 1024);
    if (under_shim())
        CHECK_EQ(SIM(sim_used)(0), 10 * MIB); /* or this case shows nothing */
    a = allocate(4 * MIB);
    CHECK_EQ(free_mib(), 1020);
    b = allocate(6 * MIB); /* fits behind what was 5 MiB only natively */
    CHECK_EQ(free_mib(), 1014);
    OK(cu.cuMemFree_v2(b));
    OK(cu.cuMemFree_v2(a));
    CHECK_EQ(free_mib(), 1024);
    CHECK_EQ(cu.cuMemFree_v2(a), CUDA_ERROR_INVALID_VALUE); /* a double free frees nothing twice */
    CHECK_EQ(free_mib(), 1024);
}

/* A page of small blocks is free when the last of them is. */
LAW_CASE_SIM(small_blocks)
{
    law_context();
    CUdeviceptr a = allocate(1000), b = allocate(1000), c = allocate(MIB);
    CHECK_EQ(free_mib(), 1022);
    OK(cu.cuMemFree_v2(a));
    CHECK_EQ(free_mib(), 1022);
    OK(cu.cuMemFree_v2(c));
    CHECK_EQ(free_mib(), 1022);
    OK(cu.cuMemFree_v2(b));
    CHECK_EQ(free_mib(), 1024);
    for (int i = 0; i < 3; i++) {
        a = allocate(1000);
        CHECK_EQ(free_mib(), 1022);
        b = allocate(MIB);
        CHECK_EQ(free_mib(), 1022);
        OK(cu.cuMemFree_v2(a));
        CHECK_EQ(free_mib(), 1022);
        OK(cu.cuMemFree_v2(b));
        CHECK_EQ(free_mib(), 1024);
    }
    /* The page with only freed blocks in it takes a new size in: natively it is the same page or a fresh one. */
    CUdeviceptr d = allocate(3000);
    CHECK_EQ(free_mib(), 1022);
    OK(cu.cuMemFree_v2(d));
    CHECK_EQ(free_mib(), 1024);
    if (under_shim())
        CHECK_EQ(SIM(sim_used)(0), 2 * MIB);
}

/* Many sizes, at random, each its own page count natively; sizes recur, so that the cache serves some exactly. */
LAW_CASE_SIM(random_large_blocks)
{
    enum { N = 24 };
    static const unsigned sizes[] = {2, 4, 6, 10, 16, 34};
    CUdeviceptr p[N] = {0};
    unsigned size[N] = {0}, held = 0;
    uint32_t x = 2463534242u;
    law_context();
    for (int i = 0; i < 3000; i++) {
        x ^= x << 13;
        x ^= x >> 17;
        x ^= x << 5;
        unsigned at = x % N;
        if (p[at]) {
            OK(cu.cuMemFree_v2(p[at]));
            held -= size[at];
            p[at] = 0;
        } else {
            size[at] = sizes[x / N % 6];
            p[at] = allocate((size_t)size[at] * MIB);
            held += size[at];
        }
        CHECK_EQ(free_mib(), CAPACITY_MIB - held);
    }
    if (under_shim())
        CHECK(driver_calls("cuMemAlloc_v2") < 500);
}

/* What is reported as free can be had, in one piece and to the last byte. */
LAW_CASE_SIM(what_is_free_can_be_had)
{
    CUdeviceptr p[9];
    law_context();
    CUdeviceptr held = allocate(100 * MIB);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 9; i++)
            p[i] = allocate((size_t)(80 + 2 * i) * MIB);
        for (int i = 0; i < 9; i++)
            OK(cu.cuMemFree_v2(p[i]));
        CHECK_EQ(free_mib(), 924);
        CUdeviceptr all = allocate((size_t)924 * MIB);
        CHECK_EQ(free_mib(), 0);
        CUdeviceptr more;
        CHECK_EQ(cu.cuMemAlloc_v2(&more, 1), CUDA_ERROR_OUT_OF_MEMORY);
        CHECK_EQ(free_mib(), 0);
        OK(cu.cuMemFree_v2(all));
        CHECK_EQ(free_mib(), 924);
    }
    OK(cu.cuMemFree_v2(held));
    CHECK_EQ(free_mib(), 1024);
}

/* Each device answers for itself. */
LAW_CASE_SIM(two_devices)
{
    CUcontext first = law_context(), second;
    OK(cu.cuDevicePrimaryCtxRetain(&second, 1));
    CUdeviceptr a = allocate(100 * MIB);
    OK(cu.cuCtxSetCurrent(second));
    CHECK_EQ(free_mib(), 1024);
    CUdeviceptr b = allocate(200 * MIB);
    CHECK_EQ(free_mib(), 824);
    OK(cu.cuMemFree_v2(a)); /* the other device's */
    CHECK_EQ(free_mib(), 824);
    OK(cu.cuCtxSetCurrent(first));
    CHECK_EQ(free_mib(), 1024);
    OK(cu.cuMemFree_v2(b));
    CHECK_EQ(free_mib(), 1024);
    OK(cu.cuCtxSetCurrent(second));
    CHECK_EQ(free_mib(), 1024);
    if (under_shim()) {
        CHECK_EQ(SIM(sim_used)(0), 100 * MIB);
        CHECK_EQ(SIM(sim_used)(1), 200 * MIB);
    }
}

/* Two contexts of a device, of which one keeps blocks: its device has them. */
LAW_CASE_SIM(two_contexts_of_a_device)
{
    CUcontext primary = law_context(), other;
    size_t before = free_mib();
    OK(cu.cuCtxCreate_v2(&other, 0, 0));
    CHECK_EQ(free_mib(), before);
    CUdeviceptr p = allocate(100 * MIB);
    OK(cu.cuCtxSetCurrent(primary));
    CHECK_EQ(free_mib(), before - 100);
    OK(cu.cuMemFree_v2(p));
    CHECK_EQ(free_mib(), before);
    OK(cu.cuCtxDestroy_v2(other));
    CHECK_EQ(free_mib(), before); /* gone with its context, counted once */
    CHECK_EQ(SIM(sim_used)(0), 0);
}

/* Memory of other families is the driver's to count. */
LAW_CASE_SIM(other_families)
{
    __typeof__(&cuMemAllocManaged) managed = (__typeof__(managed))law_sim("cuMemAllocManaged");
    CUdeviceptr p;
    law_context();
    CUdeviceptr q = allocate(4 * MIB);
    OK(managed(&p, 10 * MIB, 1));
    CHECK_EQ(free_mib(), 1010);
    OK(cu.cuMemFree_v2(q));
    CHECK_EQ(free_mib(), 1014);
    OK(cu.cuMemFree_v2(p));
    CHECK_EQ(free_mib(), 1024);
}

/* A block that goes back to the driver on free is not counted a second time. */
LAW_CASE_SIM(blocks_that_are_not_kept)
{
    CUipcMemHandle handle;
    law_context();
    CUdeviceptr p = allocate(10 * MIB);
    OK(cu.cuIpcGetMemHandle(&handle, p));
    OK(cu.cuMemFree_v2(p));
    CHECK_EQ(free_mib(), 1024);
    CHECK_EQ(SIM(sim_used)(0), 0);
}

/* When the driver does not answer, nobody does. */
LAW_CASE_SIM(a_driver_that_fails)
{
    size_t free_bytes = 0x5a5a, total = 0x5a5a;
    law_context();
    cached_block(4 * MIB);
    CHECK(SIM(sim_fail)("cuMemGetInfo_v2", 1, 1, CUDA_ERROR_UNKNOWN) == 0);
    CHECK_EQ(cu.cuMemGetInfo_v2(&free_bytes, &total), CUDA_ERROR_UNKNOWN);
    CHECK_EQ(free_bytes, 0);
    CHECK_EQ(total, 0);
}

/* Holds another thread than the first one that asks: the one that gives memory back. */
static pthread_t first_thread;
static atomic_uint held;

static void hold(const char *entry, void *microseconds)
{
    (void)entry;
    if (pthread_equal(pthread_self(), first_thread))
        return;
    atomic_fetch_add(&held, 1);
    usleep(*(const unsigned *)microseconds);
}

/* A flush is under way: whether the driver has the block already or not, it is free. */
static void give_back_while(const char *entry, unsigned microseconds)
{
    first_thread = pthread_self();
    law_context();
    for (int i = 1; i <= 8; i++)
        cached_block((size_t)i * 2 * MIB);
    CHECK_EQ(free_mib(), 1024);
    if (!under_shim())
        return;
    CHECK(SIM(sim_on_call)(entry, hold, &microseconds) == 0);
    raise(SIGUSR1);
    WAIT_UNTIL(atomic_load(&held) > 0);
    while (SIM(sim_used)(0) > 0)
        CHECK_EQ(free_mib(), 1024);
    CHECK_EQ(free_mib(), 1024);
}

LAW_CASE_SIM(while_memory_is_on_its_way_to_the_driver) { give_back_while("cuMemFree_v2", 3000); }

/* ...also where its free takes long, because it waits for a kernel: then nobody waits for that. */
LAW_CASE_SIM(while_memory_stays_on_its_way)
{
    unsigned microseconds = 300000;
    first_thread = pthread_self();
    law_context();
    cached_block((size_t)10 * MIB);
    if (under_shim()) {
        CHECK(SIM(sim_on_call)("cuMemFree_v2", hold, &microseconds) == 0);
        raise(SIGUSR1);
        WAIT_UNTIL(atomic_load(&held) > 0);
        CHECK_EQ(SIM(sim_used)(0), 10 * MIB);
    }
    CHECK_EQ(free_mib(), 1024);
}

/* ...and has just arrived there, in a context that has to be made current for it. */
LAW_CASE_SIM(while_memory_arrives_at_the_driver) { give_back_while("cuCtxPopCurrent_v2", 1000); }

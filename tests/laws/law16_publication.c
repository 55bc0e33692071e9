/*
 * Law 16: a block is seen in the cache only after its work is known to be done, leaves the ledger before the driver
 * gets it back and enters it after the driver gave it; a free that the driver refuses puts it back. cub 373: published
 * before its event. HAMi-core 306: books wrong after a failed call.
 */
#include <pthread.h>
#include <stdatomic.h>

#include "law.h"
#include "sim.h"
#include "world.h"

enum { MIB = 1 << 20 };

static CUcontext context;
static CUdeviceptr given_back;
static CUdeviceptr allocated_meanwhile;
static CUresult meanwhile_result;

/* Another thread asks for the same size while the first one's free is at the driver. */
static void *allocate_meanwhile(void *unused)
{
    (void)unused;
    meanwhile_result = cu.cuCtxSetCurrent(context);
    if (meanwhile_result == CUDA_SUCCESS)
        meanwhile_result = cu.cuMemAlloc_v2(&allocated_meanwhile, 4 * MIB);
    return NULL;
}

static void during_free(const char *entry, void *unused)
{
    pthread_t thread;
    (void)unused;
    SIM(sim_on_call)(entry, NULL, NULL);
    CHECK(pthread_create(&thread, NULL, allocate_meanwhile, NULL) == 0);
    pthread_join(thread, NULL);
}

/* Whatever the driver is called for to make a free safe, the block is nobody else's before that call is back. */
LAW_CASE_SIM(not_seen_before_its_work_is_done)
{
    if (!frees_wait())
        law_skip("frees do not wait in this mode");
    context = law_context();
    OK(cu.cuMemAlloc_v2(&given_back, 4 * MIB));
    CHECK(SIM(sim_on_call)("cuMemFree_v2", during_free, NULL) == 0);
    CHECK(SIM(sim_on_call)("cuCtxSynchronize", during_free, NULL) == 0);
    OK(cu.cuMemFree_v2(given_back));
    CHECK(SIM(sim_on_call)("cuMemFree_v2", NULL, NULL) == 0);
    CHECK(SIM(sim_on_call)("cuCtxSynchronize", NULL, NULL) == 0);
    OK(meanwhile_result);
    CHECK(allocated_meanwhile != 0);
    CHECK(allocated_meanwhile != given_back);
    OK(cu.cuMemFree_v2(allocated_meanwhile));
    if (under_shim())
        CHECK_EQ(driver_calls("cuMemFree_v2"), 0);
}

/* Many threads, one size, kernels still running at each free: no two of them ever hold one address, and the judge finds
 * no work that touches a block of somebody else's. */
enum { THREADS = 6, ROUNDS = 150, HELD = 3 };
static CUdeviceptr holders[THREADS * HELD];
static pthread_mutex_t holders_lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_uint collisions, failures;
static CUfunction fill;

static void hold(int slot, CUdeviceptr p)
{
    pthread_mutex_lock(&holders_lock);
    for (int i = 0; p && i < THREADS * HELD; i++)
        if (holders[i] == p)
            collisions++;
    holders[slot] = p;
    pthread_mutex_unlock(&holders_lock);
}

static void *churn(void *arg)
{
    int first = (int)(intptr_t)arg * HELD;
    CUstream stream;
    CUdeviceptr mine[HELD] = {0};
    failures += cu.cuCtxSetCurrent(context) != CUDA_SUCCESS;
    failures += cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS;
    for (int round = 0; round < ROUNDS; round++) {
        int i = round % HELD;
        if (mine[i]) {
            SIM(sim_note_free)(mine[i]);
            hold(first + i, 0);
            failures += cu.cuMemFree_v2(mine[i]) != CUDA_SUCCESS;
        }
        failures += cu.cuMemAlloc_v2(&mine[i], 2 * MIB) != CUDA_SUCCESS;
        hold(first + i, mine[i]);
        SIM(sim_note_alloc)(mine[i], 2 * MIB);
        launch_fill(fill, stream, mine[i], 4096, 100000);
    }
    for (int i = 0; i < HELD; i++) {
        SIM(sim_note_free)(mine[i]);
        hold(first + i, 0);
        failures += cu.cuMemFree_v2(mine[i]) != CUDA_SUCCESS;
    }
    return NULL;
}

LAW_CASE_SIM(no_two_threads_own_one_address)
{
    pthread_t threads[THREADS];
    context = law_context();
    fill = kernel("vram_fill");
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, churn, (void *)(intptr_t)i) == 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    CHECK_EQ(collisions, 0);
    CHECK_EQ(failures, 0);
    CHECK_EQ(SIM(sim_hazards)(), 0);
    CHECK_EQ(SIM(sim_refused_frees)(), 0);
    if (under_shim() && (frees_wait() || frees_order()))
        CHECK(driver_calls("cuMemAlloc_v2") <= THREADS * ROUNDS / 2);
}

/* The driver hands an address to the next thread the moment it has it back: by then the books must have let it go. */
enum { PAIRS = 3000 };
static void *pairs(void *unused)
{
    (void)unused;
    failures += cu.cuCtxSetCurrent(context) != CUDA_SUCCESS;
    for (int i = 0; i < PAIRS; i++) {
        CUdeviceptr p;
        failures += cu.cuMemAlloc_v2(&p, 2 * MIB) != CUDA_SUCCESS;
        failures += cu.cuMemFree_v2(p) != CUDA_SUCCESS;
    }
    return NULL;
}

LAW_CHILD(addresses_recur_at_the_driver)
{
    pthread_t threads[THREADS];
    context = law_context();
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, pairs, NULL) == 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    CHECK_EQ(failures, 0);
}

LAW_CASE_SIM(leaves_the_ledger_before_the_driver_has_it)
{
    static char text[16384];
    CHECK_EQ(law_run_child("addresses_recur_at_the_driver", ENV("VRAMSHIM_CACHE=0"), text, sizeof(text)), 0);
    if (under_shim()) {
        char expected[80];
        snprintf(expected, sizeof(expected), "%d allocations, %d frees\n", THREADS * PAIRS, THREADS * PAIRS);
        CHECK(strstr(text, expected));
        CHECK(strstr(text, "nothing leaked"));
        CHECK(!strstr(text, "no host memory"));
    }
}

/* The driver says no to a free, once: the block is still the program's, with all that belongs to it. */
LAW_CASE_SIM(refused_free_leaves_the_block_with_its_owner)
{
    CUdeviceptr p, base, q;
    size_t size;
    if (!frees_wait())
        law_skip("frees do not wait in this mode");
    law_context();
    OK(cu.cuMemAlloc_v2(&p, 1000));
    /* Whichever way the free is made safe, this one ends in the driver's own refusal. */
    CHECK(SIM(sim_fail)("cuCtxSynchronize", 1, 1, CUDA_ERROR_UNKNOWN) == 0);
    CHECK(SIM(sim_fail)("cuMemFree_v2", 1, 1, CUDA_ERROR_UNKNOWN) == 0);
    CHECK_EQ(cu.cuMemFree_v2(p), CUDA_ERROR_UNKNOWN);
    CHECK(SIM(sim_fail)("cuCtxSynchronize", 0, 0, 0) == 0);
    OK(cu.cuMemGetAddressRange_v2(&base, &size, p + 999));
    CHECK_EQ(base, p);
    CHECK_EQ(size, 1000);
    OK(cu.cuMemAlloc_v2(&q, 1000));
    CHECK(q != p);
    OK(cu.cuMemFree_v2(p));
    CHECK_EQ(cu.cuMemFree_v2(p), CUDA_ERROR_INVALID_VALUE);
    OK(cu.cuMemFree_v2(q));
    if (under_shim()) {
        CUdeviceptr again;
        unsigned long before = driver_calls("cuMemAlloc_v2");
        OK(cu.cuMemAlloc_v2(&again, 1000)); /* it was known again when it was freed: it is in the cache now */
        OK(cu.cuMemAlloc_v2(&q, 1000));
        CHECK_EQ(driver_calls("cuMemAlloc_v2"), before);
    }
}

LAW_CHILD(refused_and_then_forgotten)
{
    CUdeviceptr p;
    law_context();
    OK(cu.cuMemAlloc_v2(&p, 3 * MIB));
    CHECK(SIM(sim_fail)("cuCtxSynchronize", 1, 1, CUDA_ERROR_UNKNOWN) == 0);
    CHECK(SIM(sim_fail)("cuMemFree_v2", 1, 1, CUDA_ERROR_UNKNOWN) == 0);
    CHECK_EQ(cu.cuMemFree_v2(p), CUDA_ERROR_UNKNOWN);
}

LAW_CASE_SIM_ONCE(refused_free_is_still_reported_as_a_leak)
{
    if (!frees_wait())
        law_skip("frees do not wait in this mode");
    static char text[16384];
    CHECK_EQ(law_run_child("refused_and_then_forgotten", NULL, text, sizeof(text)), 0);
    if (under_shim())
        CHECK(strstr(text, "3.0 MiB in 1 block never freed"));
}

/* The same where the shim itself gives a block back: a refusal there leaves the cache as it was. */
LAW_CHILD(full_card)
{
    CUdeviceptr p, q, again;
    law_context();
    OK(cu.cuMemAlloc_v2(&p, 40 * MIB));
    OK(cu.cuMemFree_v2(p));
    if (under_shim()) {
        CHECK(SIM(sim_fail)("cuMemFree_v2", 1, 2, CUDA_ERROR_UNKNOWN) == 0); /* it may try twice */
        CHECK_EQ(cu.cuMemAlloc_v2(&q, 50 * MIB), CUDA_ERROR_OUT_OF_MEMORY);
        unsigned long before = driver_calls("cuMemAlloc_v2");
        OK(cu.cuMemAlloc_v2(&again, 40 * MIB));
        CHECK_EQ(again, p);
        CHECK_EQ(driver_calls("cuMemAlloc_v2"), before);
        OK(cu.cuMemFree_v2(again));
        CHECK(SIM(sim_fail)("cuMemFree_v2", 0, 0, 0) == 0);
    }
    OK(cu.cuMemAlloc_v2(&q, 50 * MIB));
    OK(cu.cuMemFree_v2(q));
}

LAW_CASE_SIM_ONCE(refused_reclaim_leaves_the_cache_as_it_was)
{
    static char text[16384];
    CHECK_EQ(law_run_child("full_card", ENV("SIMCUDA_CAPACITY=64M"), text, sizeof(text)), 0);
    if (under_shim())
        CHECK(strstr(text, "nothing leaked"));
}

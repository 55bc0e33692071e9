/*
 * Law 28: no lock, no once, no allocation held across a call of the driver. Whatever entry the driver is in, the same
 * thread may come back through a callback, and another thread may have to finish first: neither may wait for the other.
 * A build with checks also stops where a lock is held across a call.
 */
#include <pthread.h>
#include <stdatomic.h>

#include "law.h"
#include "sim.h"
#include "world.h"

enum { MIB = 1 << 20, DEADLOCK_SECONDS = 40 };

static CUcontext primary;
static atomic_int rounds;

static void handler(int sig) { (void)sig; }

/* A bit of everything that takes a lock of the shim's. No begin of a capture: that one waits for calls under way (law
 * 17). */
static void everything(void)
{
    CUdeviceptr p, q, base;
    CUcontext before, ctx, popped;
    CUstream stream;
    size_t size, pitch;
    struct sigaction act;
    OK(cu.cuCtxGetCurrent(&before));
    OK(cu.cuCtxPushCurrent_v2(primary));
    OK(cu.cuMemAlloc_v2(&p, 3 * MIB));
    OK(cu.cuMemAllocPitch_v2(&q, &pitch, 1000, 100, 4));
    OK(cu.cuMemGetAddressRange_v2(&base, &size, p + MIB));
    CHECK_EQ(base, p);
    CHECK_EQ(size, 3 * MIB);
    OK(cu.cuMemGetInfo_v2(&size, &size));
    OK(cu.cuMemFree_v2(q));
    OK(cu.cuMemFree_v2(p));
    CHECK_EQ(cu.cuMemFree_v2(p), CUDA_ERROR_INVALID_VALUE);
    OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cu.cuStreamDestroy_v2(stream));
    CHECK(signal(SIGUSR1, handler) != SIG_ERR && sigaction(SIGUSR1, NULL, &act) == 0);
    OK(cu.cuCtxCreate_v2(&ctx, 0, 0));
    OK(cu.cuMemAlloc_v2(&p, MIB));
    OK(cu.cuCtxDestroy_v2(ctx));
    OK(cu.cuCtxPopCurrent_v2(&popped));
    CHECK_EQ(popped, primary);
    OK(cu.cuCtxGetCurrent(&ctx));
    CHECK_EQ(ctx, before);
    rounds++;
}

static void *everything_on_a_thread(void *unused)
{
    everything();
    return unused;
}

static void here(const char *entry, void *unused)
{
    (void)entry;
    (void)unused;
    everything();
}

static void elsewhere(const char *entry, void *unused)
{
    pthread_t thread;
    (void)unused;
    SIM(sim_on_call)(entry, NULL, NULL);
    CHECK(pthread_create(&thread, NULL, everything_on_a_thread, NULL) == 0);
    pthread_join(thread, NULL);
}

/* Every entry that the shim calls, or stands in front of. */
static const char *const entries[] = {
    "cuMemAlloc_v2",
    "cuMemAllocPitch_v2",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemGetAddressRange_v2",
    "cuPointerGetAttribute",
    "cuPointerGetAttributes",
    "cuPointerSetAttribute",
    "cuIpcGetMemHandle",
    "cuMemGetHandleForAddressRange",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxGetState",
    "cuCtxGetCurrent",
    "cuCtxGetDevice",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuCtxSynchronize",
    "cuCtxEnablePeerAccess",
    "cuCtxDisablePeerAccess",
    "cuCtxDestroy_v2",
    "cuStreamDestroy_v2",
};

/* Calls all of those, with and without something for the cache to do. */
static void call_them_all(void)
{
    CUdeviceptr p, base;
    CUcontext other, ctx;
    CUstream stream;
    CUipcMemHandle handle;
    CUdevice device;
    size_t size, pitch;
    unsigned on = 1;
    int fd = -1;
    CUpointer_attribute attribute = CU_POINTER_ATTRIBUTE_RANGE_SIZE;
    void *data = &size;
    OK(cu.cuDevicePrimaryCtxRetain(&ctx, 0));
    OK(cu.cuDevicePrimaryCtxRelease_v2(0));
    OK(cu.cuCtxGetDevice(&device));
    OK(cu.cuMemAllocPitch_v2(&p, &pitch, 5 * MIB, 1, 4));
    OK(cu.cuMemFree_v2(p));
    OK(cu.cuMemAlloc_v2(&p, 4 * MIB));
    OK(cu.cuMemGetInfo_v2(&size, &size));
    OK(cu.cuMemGetAddressRange_v2(&base, &size, p + 1));
    OK(cu.cuPointerGetAttribute(&size, CU_POINTER_ATTRIBUTE_RANGE_SIZE, p + 1));
    OK(cu.cuPointerGetAttributes(1, &attribute, &data, p));
    OK(cu.cuCtxCreate_v2(&other, 0, 0));
    OK(cu.cuMemFree_v2(p)); /* of another context: pushed and popped */
    OK(cu.cuMemAlloc_v2(&p, 4 * MIB));
    OK(cu.cuPointerSetAttribute(&on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, p));
    OK(cu.cuMemFree_v2(p)); /* natively */
    cached_block(8 * MIB);
    OK(cu.cuCtxDestroy_v2(other));
    OK(cu.cuMemAlloc_v2(&p, 4 * MIB));
    OK(cu.cuIpcGetMemHandle(&handle, p));
    OK(cu.cuMemGetHandleForAddressRange(&fd, p, 2 * MIB, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
    close(fd);
    OK(cu.cuMemFree_v2(p));
    CHECK_EQ(cu.cuMemFree_v2(0x10), CUDA_ERROR_INVALID_VALUE);
    CHECK(cu.cuCtxEnablePeerAccess(primary, 0) != CUDA_SUCCESS);
    CHECK(cu.cuCtxDisablePeerAccess(primary) != CUDA_SUCCESS);
    OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cu.cuStreamDestroy_v2(stream));
    OK(cu.cuCtxPushCurrent_v2(primary));
    OK(cu.cuCtxPopCurrent_v2(&ctx));
}

static void come_back_in(sim_callback callback)
{
    alarm(DEADLOCK_SECONDS);
    primary = law_context();
    everything();
    for (size_t i = 0; i < sizeof(entries) / sizeof(*entries); i++) {
        int before = rounds;
        unsigned long calls = driver_calls(entries[i]);
        CHECK(SIM(sim_on_call)(entries[i], callback, NULL) == 0);
        call_them_all();
        CHECK(SIM(sim_on_call)(entries[i], NULL, NULL) == 0);
        CHECK(rounds > before || driver_calls(entries[i]) == calls); /* not all are called with and without the shim */
    }
    CHECK_EQ(SIM(sim_hazards)(), 0);
}

LAW_CASE_SIM_ONCE(on_the_same_thread) { come_back_in(here); }
LAW_CASE_SIM_ONCE(on_another_thread_that_must_finish) { come_back_in(elsewhere); }

/* Out of memory: the ladder calls the driver too. */
LAW_CHILD(full_card)
{
    CUdeviceptr p;
    alarm(DEADLOCK_SECONDS);
    primary = law_context();
    cached_block(30 * MIB);
    cached_block(20 * MIB);
    CHECK(SIM(sim_on_call)("cuMemFree_v2", elsewhere, NULL) == 0);
    CHECK(SIM(sim_on_call)("cuMemAlloc_v2", elsewhere, NULL) == 0);
    OK(cu.cuMemAlloc_v2(&p, 50 * MIB));
    CHECK(rounds > 0);
    CHECK(SIM(sim_on_call)("cuMemFree_v2", elsewhere, NULL) == 0);
    CHECK_EQ(cu.cuMemAlloc_v2(&p, 100 * MIB), CUDA_ERROR_OUT_OF_MEMORY);
}

LAW_CASE_SIM_ONCE(while_memory_is_short)
{
    char text[8192];
    CHECK_EQ(law_run_child("full_card", ENV("SIMCUDA_CAPACITY=64M"), text, sizeof(text)), 0);
}

/* The thread behind the signal calls the driver: everybody else goes on. */
static atomic_bool came_back;
static void note_and_do(const char *entry, void *unused)
{
    elsewhere(entry, unused);
    came_back = true;
}

LAW_CASE_SIM_ONCE(while_memory_is_given_back)
{
    alarm(DEADLOCK_SECONDS);
    primary = law_context();
    cached_block(4 * MIB);
    if (!under_shim())
        return;
    CHECK(SIM(sim_on_call)("cuMemFree_v2", note_and_do, NULL) == 0);
    raise(SIGUSR1);
    WAIT_UNTIL(came_back);
    everything();
}

/* A begin and an end of a capture. */
LAW_CASE_SIM(around_a_capture)
{
    static const char *const around[] = {"cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuStreamDestroy_v2"};
    alarm(DEADLOCK_SECONDS);
    primary = law_context();
    cached_block(4 * MIB);
    for (int i = 0; i < 6; i++) {
        CUstream stream;
        CUgraph graph;
        OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        CHECK(SIM(sim_on_call)(around[i % 3], i < 3 ? here : elsewhere, NULL) == 0);
        int before = rounds;
        OK(cu.cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
        if (i % 3 != 2) {
            OK(cu.cuStreamEndCapture(stream, &graph));
            OK(cu.cuGraphDestroy(graph));
        }
        OK(cu.cuStreamDestroy_v2(stream));
        CHECK(SIM(sim_on_call)(around[i % 3], NULL, NULL) == 0);
        CHECK(rounds > before);
    }
}

/* A context ends: others are used meanwhile, and the one that ends is asked for memory by its own callback. */
static CUcontext ending;
static CUresult inside_result;
static void use_the_ending_one(const char *entry, void *unused)
{
    CUdeviceptr p;
    (void)entry;
    (void)unused;
    everything();
    inside_result = cu.cuCtxPushCurrent_v2(ending);
    if (inside_result == CUDA_SUCCESS) {
        CUcontext popped;
        inside_result = cu.cuMemAlloc_v2(&p, 2 * MIB);
        OK(cu.cuCtxPopCurrent_v2(&popped));
    }
}

LAW_CASE_SIM_ONCE(while_a_context_ends)
{
    CUcontext popped;
    alarm(DEADLOCK_SECONDS);
    primary = law_context();
    OK(cu.cuCtxCreate_v2(&ending, 0, 0));
    cached_block(4 * MIB);
    OK(cu.cuCtxPopCurrent_v2(&popped));
    CHECK(SIM(sim_on_call)("cuCtxDestroy_v2", use_the_ending_one, NULL) == 0);
    OK(cu.cuCtxDestroy_v2(ending));
    OK(inside_result); /* natively it is still alive at this point */
    CHECK(SIM(sim_on_call)("cuCtxDestroy_v2", NULL, NULL) == 0);
    everything();
}

/* A free waits for a host function, and the host function for another thread's allocation. */
static atomic_bool in_host_function, other_has_allocated;
static void wait_for_the_other(void *unused)
{
    (void)unused;
    in_host_function = true;
    WAIT_UNTIL(other_has_allocated);
}

static void *allocate_meanwhile(void *unused)
{
    CUdeviceptr p, base;
    size_t size;
    WAIT_UNTIL(in_host_function);
    OK(cu.cuCtxSetCurrent(primary));
    for (int i = 0; i < 20; i++)
        nap(); /* the free is at its wait by now */
    OK(cu.cuMemAlloc_v2(&p, 4 * MIB));
    OK(cu.cuMemGetAddressRange_v2(&base, &size, p));
    OK(cu.cuMemGetInfo_v2(&size, &size));
    other_has_allocated = true;
    return unused;
}

LAW_CASE_SIM(a_free_that_waits_for_a_host_function)
{
    pthread_t thread;
    CUstream stream;
    CUdeviceptr p;
    __typeof__(&cuLaunchHostFunc) launch = (__typeof__(launch))law_sim("cuLaunchHostFunc");
    alarm(DEADLOCK_SECONDS);
    primary = law_context();
    cached_block(4 * MIB);
    OK(cu.cuMemAlloc_v2(&p, 2 * MIB));
    OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CHECK(pthread_create(&thread, NULL, allocate_meanwhile, NULL) == 0);
    OK(launch(stream, wait_for_the_other, NULL));
    OK(cu.cuMemFree_v2(p));
    CHECK(other_has_allocated || !frees_wait()); /* it was waited for, as natively */
    pthread_join(thread, NULL);
}

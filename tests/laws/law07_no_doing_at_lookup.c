/*
 * Law 7: a lookup resolves and returns. HAMi-core 52 and 59 (work done at lookup), 326 and 215 (the driver's own
 * lookups came back hooked).
 */
#include <dlfcn.h>
#include <string.h>

#include "law.h"
#include "sim.h"
#include "world.h"

enum { MIB = 1 << 20 };

typedef __typeof__(&cuGetProcAddress_v2) get2;

static const char *const names[] = {
    "cuInit",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemAllocPitch_v2",
    "cuMemGetAddressRange_v2",
    "cuPointerGetAttribute",
    "cuIpcGetMemHandle",
    "cuDevicePrimaryCtxRetain",
    "cuCtxDestroy_v2",
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuGetProcAddress",
    "cuGetProcAddress_v2",
    "cuLaunchKernel",
    "cuNoSuchEntry",
};

static void look_everything_up(void *handle)
{
    get2 get = (get2)dlsym(handle, "cuGetProcAddress_v2");
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        CUdriverProcAddressQueryResult status;
        char symbol[64];
        void *p;
        dlsym(handle, names[i]);
        dlsym(RTLD_DEFAULT, names[i]);
        dlsym(RTLD_NEXT, names[i]);
        snprintf(symbol, sizeof(symbol), "%s", names[i]);
        if (strlen(symbol) > 3 && strcmp(symbol + strlen(symbol) - 3, "_v2") == 0)
            symbol[strlen(symbol) - 3] = 0;
        get(symbol, &p, 12000, 0, &status);
    }
}

/* The driver is told nothing, no thread appears, nothing is said, and the driver is not initialised by it. */
LAW_CHILD(only_lookups)
{
    void *handle = dlopen("libcuda.so.1", RTLD_NOW);
    int count;
    CHECK(handle);
    look_everything_up(handle);
    CHECK_EQ(thread_count(), 1);
    if (simulated()) {
        CHECK_EQ(SIM(sim_calls_total)(), 0);
        CHECK_EQ(SIM(sim_self_lookup_ok)(), (unsigned long long)-1);
    }
    CHECK_EQ(cu.cuDeviceGetCount(&count), CUDA_ERROR_NOT_INITIALIZED);
}

LAW_CASE(lookups_before_the_driver_is_initialised)
{
    char err[4096];
    int status = law_run_child("only_lookups", ENV("VRAMSHIM_VERBOSE=1", "VRAMSHIM_WAST=1"), err, sizeof(err));
    CHECK_EQ(status, 0);
    if (*err)
        law_fail(__FILE__, __LINE__, "said: %s", err);
}

LAW_CASE_SIM(lookups_after_it)
{
    law_context();
    unsigned threads = thread_count();
    SIM(sim_reset_counters)();
    look_everything_up(dlopen("libcuda.so.1", RTLD_NOW));
    CHECK_EQ(SIM(sim_calls_total)(), 0);
    CHECK_EQ(thread_count(), threads);
}

/* The driver finds itself when it looks itself up. */
LAW_CASE_SIM(the_driver_finds_itself)
{
    OK(cu.cuInit(0));
    CHECK_EQ(SIM(sim_self_lookup_ok)(), 1);
}

/* Also when the shim had every opportunity to find the driver first, and when the program initialises twice. */
LAW_CASE_SIM(the_driver_finds_itself_after_lookups)
{
    look_everything_up(dlopen("libcuda.so.1", RTLD_NOW));
    OK(cu.cuInit(0));
    OK(cu.cuInit(0));
    CHECK_EQ(SIM(sim_self_lookup_ok)(), 1);
    law_context();
    CUdeviceptr p = cached_block(4 * MIB);
    OK(cu.cuMemAlloc_v2(&p, 4 * MIB));
    CHECK_EQ(driver_calls("cuMemAlloc_v2"), under_shim() ? 1 : 2); /* and the program still finds the shim */
}

static void look_up_inside(const char *entry, void *handle)
{
    (void)entry;
    look_everything_up(handle);
}

/* In the middle of a call of the driver, as one made by a callback or by a library that loads lazily. */
LAW_CASE_SIM(a_lookup_inside_a_call)
{
    void *handle = dlopen("libcuda.so.1", RTLD_NOW);
    CUdeviceptr p;
    law_context();
    static const char *const entries[] = {"cuMemAlloc_v2", "cuMemFree_v2", "cuCtxSynchronize", "cuMemGetInfo_v2"};
    for (int i = 0; i < 4; i++)
        CHECK(SIM(sim_on_call)(entries[i], look_up_inside, handle) == 0);
    for (int i = 0; i < 3; i++) {
        size_t free_bytes;
        OK(cu.cuMemAlloc_v2(&p, 4 * MIB));
        OK(cu.cuMemGetInfo_v2(&free_bytes, NULL));
        OK(cu.cuMemFree_v2(p));
    }
}

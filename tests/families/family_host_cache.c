/* VRAMSHIM_HOST_CACHE: freed pinned host memory comes back at once, idle, and the program cannot tell. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "law.h"
#include "sim.h"
#include "world.h"

enum { KIB = 1 << 10, MIB = 1 << 20 };

static void __attribute__((constructor)) options(void)
{
    setenv("VRAMSHIM_HOST_CACHE", "64M", 0);
}

static void *pin(size_t size, unsigned flags)
{
    void *p;
    OK(cuMemHostAlloc(&p, size, flags));
    return p;
}

LAW_CASE_SIM_ONCE(served_without_the_driver)
{
    law_context();
    void *p = pin(MIB, 0), *q;
    OK(cuMemAllocHost_v2(&q, MIB));
    OK(cuMemFreeHost(p));
    OK(cuMemFreeHost(q));
    unsigned long calls = driver_calls("cuMemHostAlloc") + driver_calls("cuMemAllocHost_v2") + driver_calls("cuMemFreeHost");
    for (int i = 0; i < 10; i++) {
        void *again = pin(MIB, 0), *plain;
        OK(cuMemAllocHost_v2(&plain, MIB));
        memset(again, i, MIB);
        memset(plain, i, MIB);
        OK(cuMemFreeHost(again));
        OK(cuMemFreeHost(plain));
        if (under_shim())
            CHECK(again == p && plain == q);
    }
    calls = driver_calls("cuMemHostAlloc") + driver_calls("cuMemAllocHost_v2") + driver_calls("cuMemFreeHost") - calls;
    CHECK_EQ(calls, under_shim() ? 0 : 40);
}

/* What still uses it, on any stream of any context, is done before anybody gets it. */
LAW_CASE_SIM_ONCE(idle_when_it_is_handed_out)
{
    CUstream stream, of_another;
    CUcontext first = law_context(), other;
    CUfunction fill = kernel("vram_fill");
    OK(cu.cuStreamCreate(&stream, 1));
    for (int round = 0; round < 20; round++) {
        void *p = pin(64 * KIB, 0);
        launch_fill(fill, stream, (uintptr_t)p, 64 * KIB, 2000000);
        OK(cuMemFreeHost(p));
        void *next = pin(64 * KIB, 0);
        OK(cu.cuMemsetD8_v2((uintptr_t)next, 1, 64 * KIB));
        OK(cuMemFreeHost(next));
    }
    /* A context that has allocated nothing. */
    OK(cu.cuCtxCreate_v2(&other, 0, 0));
    CUfunction of_other = kernel("vram_fill");
    OK(cu.cuStreamCreate(&of_another, 1));
    OK(cu.cuCtxSetCurrent(first));
    void *p = pin(64 * KIB, 1);
    OK(cu.cuCtxSetCurrent(other));
    launch_fill(of_other, of_another, (uintptr_t)p, 64 * KIB, 5000000);
    OK(cu.cuCtxSetCurrent(first));
    OK(cuMemFreeHost(p));
    void *next = pin(64 * KIB, 1);
    OK(cu.cuMemsetD8_v2((uintptr_t)next, 1, 64 * KIB));
    CHECK_EQ(SIM(sim_hazards)(), 0);
}

LAW_CASE_SIM_ONCE(nothing_is_there_to_ask_about)
{
    unsigned flags;
    CUdeviceptr device;
    unsigned type;
    law_context();
    void *p = pin(MIB, 1);
    OK(cuMemHostGetFlags(&flags, p));
    OK(cuMemHostGetDevicePointer_v2(&device, p, 0));
    OK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (uintptr_t)p));
    CHECK_EQ(type, CU_MEMORYTYPE_HOST);
    OK(cuMemFreeHost(p));
    CHECK(cuMemHostGetFlags(&flags, p) != CUDA_SUCCESS);
    CHECK(cuMemHostGetDevicePointer_v2(&device, p, 0) != CUDA_SUCCESS);
    CHECK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (uintptr_t)p) != CUDA_SUCCESS);
    CHECK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (uintptr_t)p + 4096) != CUDA_SUCCESS);
    CHECK(cuMemFreeHost(p) != CUDA_SUCCESS);
    CHECK(cuMemFreeHost((char *)p + 64) != CUDA_SUCCESS);
    void *q = pin(MIB, 1);
    OK(cuMemHostGetFlags(&flags, q));
    OK(cuMemFreeHost(q));
}

LAW_CASE_SIM_ONCE(of_the_flags_that_were_asked_for)
{
    enum { WRITE_COMBINED = 4 };
    unsigned flags;
    law_context();
    for (int i = 0; i < 4; i++) {
        void *p = pin(MIB, i % 2 ? WRITE_COMBINED : 0);
        OK(cuMemHostGetFlags(&flags, p));
        CHECK_EQ(flags & WRITE_COMBINED, i % 2 ? WRITE_COMBINED : 0);
        OK(cuMemFreeHost(p));
    }
}

LAW_CASE_SIM_ONCE(ends_with_its_context_or_before)
{
    CUcontext ctx;
    law_context();
    for (int i = 0; i < 3; i++) {
        OK(cu.cuCtxCreate_v2(&ctx, 0, 0));
        void *p = pin(MIB, 0);
        OK(cuMemFreeHost(pin(MIB, 0)));
        memset(p, 1, MIB);
        OK(cu.cuCtxDestroy_v2(ctx));
        CHECK(cuMemFreeHost(p) != CUDA_SUCCESS);
        CHECK_EQ(driver_calls("cuMemFreeHost"), 2 * (i + 1)); /* what was kept, by then, and the refused one */
    }
    CHECK_EQ(SIM(sim_hazards)(), 0);
}

LAW_CASE_SIM_ONCE(given_back_at_the_signal)
{
    if (!under_shim())
        law_skip("natively nothing is kept");
    law_context();
    OK(cuMemFreeHost(pin(MIB, 0)));
    CHECK_EQ(driver_calls("cuMemFreeHost"), 0);
    raise(SIGUSR1);
    WAIT_UNTIL(driver_calls("cuMemFreeHost") == 1);
    OK(cuMemFreeHost(pin(MIB, 0)));
}

static CUcontext context;
static void *churn(void *seed)
{
    unsigned state = (unsigned)(uintptr_t)seed;
    OK(cuCtxSetCurrent(context));
    for (int i = 0; i < 500; i++) {
        size_t size = (1 + ((state = state * 1103515245 + 12345) >> 16) % 4) * KIB;
        unsigned char *p = pin(size, 0);
        memset(p, (int)(uintptr_t)seed, size);
        if (i % 16 == 0)
            nap();
        CHECK_EQ(p[size - 1], (unsigned char)(uintptr_t)seed);
        OK(cuMemFreeHost(p));
    }
    return NULL;
}

LAW_CASE_SIM_ONCE(threads)
{
    enum { THREADS = 4 };
    pthread_t threads[THREADS];
    context = law_context();
    if (!under_shim())
        signal(SIGUSR1, SIG_IGN);
    for (uintptr_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, churn, (void *)(i + 1)) == 0);
    for (int i = 0; i < 20; i++) {
        nap();
        raise(SIGUSR1);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
}

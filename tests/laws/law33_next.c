/*
 * Law 33: who stood before the driver still does. This program is linked against a library that defines the driver's entries (before.c),
 * as some message-passing libraries do. Natively it sees what is called by name; under the shim it sees all that reaches the driver, by
 * whatever route the program came, and so never holds a buffer for registered that the driver has back.
 */
#include <dlfcn.h>
#include <pthread.h>

#include "before.h"
#include "family.h"

static const char *const entries[] = {
#define VRAM_HOOK(name, parameters, arguments) #name,
#define VRAM_LAUNCH(name, parameters, arguments)
#define VRAM_CALL(name)
#include "../../shim/driver/entries.def"
#undef VRAM_HOOK
#undef VRAM_CALL
};
enum { ENTRIES = sizeof(entries) / sizeof(*entries), KEPT = 8 };

/* Natively only what is called by name passes the library. */
static void seen_as_by_the_driver(void)
{
    for (int i = 0; i < ENTRIES && (under_shim() || law_route == ROUTE_DIRECT); i++) {
        unsigned long there = driver_calls(entries[i]), seen = before_calls(entries[i]);
        if (strncmp(entries[i], "cuGetProcAddress", 16) != 0 && seen != there) /* the frame looks up by a handle */
            law_fail(__FILE__, __LINE__, "%s: the driver was called %lu times, the library saw %lu", entries[i], there, seen);
    }
}

/* What the library holds for registered, the driver has not got back. */
static size_t registered_is_allocated(void)
{
    static unsigned long long addresses[4096];
    size_t n = before_registered(addresses, 4096);
    CHECK(n <= 4096);
    for (size_t i = 0; i < n; i++)
        if (!SIM(sim_is_allocated)(addresses[i]))
            law_fail(__FILE__, __LINE__, "0x%llx is registered, but the driver has it back", addresses[i]);
    return n;
}

/* What waits for the shim's thread gives up after some seconds: a library that is not told may wait for ever. */
#define SOON(condition)                                                                                                \
    do {                                                                                                               \
        for (int soon_ = 0; soon_ < 5000 && !(condition); soon_++)                                                     \
            nap();                                                                                                     \
        CHECK(condition);                                                                                              \
    } while (0)

static void flush(void)
{
    if (!under_shim())
        return;
    unsigned long before = driver_calls("cuMemFree_v2");
    raise(SIGUSR1);
    SOON(driver_calls("cuMemFree_v2") >= before + KEPT);
}

static void give_cause_to_keep(size_t size)
{
    CUdeviceptr p[KEPT];
    for (int i = 0; i < KEPT; i++)
        OK(cu.cuMemAlloc_v2(&p[i], size));
    for (int i = 0; i < KEPT; i++)
        OK(cu.cuMemFree_v2(p[i]));
}

LAW_CASE_SIM(ten_allocations_and_frees)
{
    CUdeviceptr p;
    law_context();
    for (int i = 0; i < 10; i++) {
        OK(cu.cuMemAlloc_v2(&p, (size_t)(i + 1) * MIB));
        OK(cu.cuMemFree_v2(p));
        registered_is_allocated();
    }
    seen_as_by_the_driver();
    if (!under_shim())
        CHECK_EQ(before_calls("cuMemFree_v2"), law_route == ROUTE_DIRECT ? 10 : 0);
}

/* What is kept is, to it, not freed; what is really given back, it is told of. */
LAW_CASE_SIM(what_is_given_back_on_the_signal)
{
    law_context();
    give_cause_to_keep(4 * MIB);
    if (under_shim())
        CHECK_EQ(registered_is_allocated(), KEPT);
    flush();
    CHECK_EQ(registered_is_allocated(), 0);
    seen_as_by_the_driver();
}

LAW_CASE_SIM(what_is_given_back_for_another_allocation)
{
    CUdeviceptr p;
    size_t free_bytes, total;
    law_context();
    give_cause_to_keep(512 * MIB);
    OK(cu.cuMemGetInfo_v2(&free_bytes, &total));
    OK(cu.cuMemAlloc_v2(&p, free_bytes - 64 * MIB)); /* finds no memory beside what is kept */
    registered_is_allocated();
    OK(cu.cuMemFree_v2(p));
    registered_is_allocated();
    seen_as_by_the_driver();
}

LAW_CHILD(uses_every_family)
{
    const CUmemAccessDesc access = {.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}, .flags = 3};
    static char registered[1 << 16] __attribute__((aligned(4096)));
    CUmipmappedArray levels;
    CUDA_ARRAY3D_DESCRIPTOR d3 = deep(4 * MIB);
    CUmemGenericAllocationHandle handle, again;
    CUdeviceptr p, place;
    CUarray arrays[2];
    size_t pitch;
    unsigned flags;
    void *host[2];
    CUipcMemHandle donation;
    law_context();
    CUmemoryPool pool = pool_on(0);

    OK(cu.cuMemAllocPitch_v2(&p, &pitch, 1000, 1000, 4));
    OK(cu.cuMemFree_v2(p));
    OK(cu.cuMemAlloc_v2(&p, 3 * MIB));
    OK(cu.cuIpcGetMemHandle(&donation, p)); /* such a block goes back when it is freed */
    OK(cu.cuMemFree_v2(p));
    OK(cu.cuMemFree_v2(0));
    OK(cu.cuMemFree_v2(managed(3 * MIB)));
    OK(cu.cuMemFreeAsync(in_order(3 * MIB), NULL));
    OK(cu.cuMemFreeAsync(in_order_from(pool, 3 * MIB), NULL));
    OK(cu.cuMemFree_v2(in_order(3 * MIB)));
    OK(cu.cuMemAlloc_v2(&p, 3 * MIB));
    OK(cu.cuMemFreeAsync(p, NULL));
    OK(cuMemAllocAsync_ptsz(&p, 3 * MIB, NULL));
    OK(cuMemFreeAsync_ptsz(p, NULL));
    OK(cuMemAllocFromPoolAsync_ptsz(&p, 3 * MIB, pool, NULL));
    OK(cuMemFreeAsync_ptsz(p, NULL));
    OK(cu.cuStreamSynchronize(NULL));
    OK(cuStreamSynchronize_ptsz(NULL));
    OK(cu.cuMemPoolDestroy(pool));
    for (int i = 0; i < 3; i++) {
        handle = piece(4 * MIB);
        place = reserve(4 * MIB);
        OK(cu.cuMemMap(place, 4 * MIB, 0, handle, 0));
        OK(cuMemSetAccess(place, 4 * MIB, &access, 1));
        if (i == 0) { /* what somebody else holds is not kept */
            OK(cu.cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)place));
            OK(cu.cuMemRelease(again));
        }
        OK(cu.cuMemUnmap(place, 4 * MIB));
        OK(cu.cuMemRelease(handle));
        OK(cuMemAddressFree(place, 4 * MIB));
    }
    handle = piece(2 * MIB);
    cuMulticastBindMem(0, 0, handle, 0, 2 * MIB, 0); /* whatever it answers */
    OK(cu.cuMemRelease(imported(handle)));
    OK(cu.cuMemRelease(handle));
    arrays[0] = array(4 * MIB);
    OK(cu.cuArray3DCreate_v2(&arrays[1], &d3));
    OK(cu.cuMipmappedArrayCreate(&levels, &d3, 3));
    OK(cu.cuArrayDestroy(arrays[0]));
    OK(cu.cuArrayDestroy(arrays[1]));
    OK(cu.cuMipmappedArrayDestroy(levels));
    for (int i = 0; i < 3; i++) {
        host[0] = pinned(MIB);
        OK(cu.cuMemAllocHost_v2(&host[1], MIB));
        OK(cu.cuMemHostGetFlags(&flags, host[0]));
        OK(cuMemHostGetDevicePointer_v2(&p, host[0], 0));
        OK(cu.cuMemFreeHost(host[0]));
        OK(cu.cuMemFreeHost(host[1]));
    }
    OK(cu.cuMemHostRegister_v2(registered, sizeof(registered), 0));
    OK(cu.cuMemHostUnregister(registered));
    OK(cuMemHostRegister(registered, sizeof(registered), 0));
    OK(cu.cuMemHostUnregister(registered));
    donation = donated();
    OK(cu.cuIpcOpenMemHandle_v2(&p, donation, 1));
    OK(cu.cuIpcCloseMemHandle(p));
    OK(cuIpcOpenMemHandle(&p, donation, 1));
    OK(cu.cuIpcCloseMemHandle(p));
    OK(cu.cuDestroyExternalMemory(external(2 * MIB)));
    give_cause_to_keep(4 * MIB);
    flush();
    LINGER(false);
    registered_is_allocated();
    seen_as_by_the_driver();
}

/* Every family once, alive, freed and given back; with the caches of all that have one, and without. */
LAW_CASE_SIM(every_family)
{
    CHECK_EQ(run_child_apart("uses_every_family", NULL, NULL, NULL, 0), 0);
    CHECK_EQ(run_child_apart("uses_every_family", ENV("VRAMSHIM_HOST_CACHE=64M", "VRAMSHIM_VIRTUAL_CACHE=64M"), NULL, NULL, 0), 0);
}

/* How it finds the driver is its own affair: a stub that looks it up on a handle gets our wrappers, and these the driver. */
LAW_CASE_SIM(a_stub_that_looks_the_driver_up)
{
    CHECK_EQ(run_child_apart("uses_every_family", ENV("BEFORE_BY=handle"), NULL, NULL, 0), 0);
    CHECK_EQ(run_child_apart("uses_every_family", ENV("BEFORE_BY=handle", "VRAMSHIM_HOST_CACHE=64M", "VRAMSHIM_VIRTUAL_CACHE=64M"), NULL,
                             NULL, 0),
             0);
}

/* What it asks and allocates while it is told of a free is between it and the driver. */
static void is_asked_back(bool by_name)
{
    enum { SIZE = 4 * MIB };
    CUdeviceptr p;
    law_context();
    before_be_curious(by_name);
    OK(cu.cuMemAlloc_v2(&p, SIZE));
    OK(cu.cuMemFree_v2(p));
    give_cause_to_keep(SIZE);
    flush();
    SOON(registered_is_allocated() == 0); /* the flush counted its own frees as well */
    if (under_shim() || law_route == ROUTE_DIRECT)
        CHECK_EQ(before_last_size(), SIZE);
    /* each free of a block was accompanied by one of its own; of these it is told natively, where it makes them by name */
    unsigned of_its_own = by_name && !under_shim() ? 1 : 2;
    if (under_shim() || law_route == ROUTE_DIRECT)
        SOON(driver_calls("cuMemFree_v2") == of_its_own * before_calls("cuMemFree_v2"));
}

LAW_CHILD(is_asked_back_at_the_driver) { is_asked_back(false); }
LAW_CHILD(is_asked_back_by_name) { is_asked_back(true); }

LAW_CASE_SIM(what_it_does_meanwhile)
{
    static char text_[65536];
    static const char *const by[] = {"BEFORE_BY=next", "BEFORE_BY=handle"};
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(run_child_apart(i < 2 ? "is_asked_back_at_the_driver" : "is_asked_back_by_name", ENV(by[i % 2]), NULL, text_,
                                 sizeof(text_)),
                 0);
        if (under_shim() && !strstr(text_, "nothing leaked"))
            law_fail(__FILE__, __LINE__, "its own memory is not ours to report: %s", text_);
    }
}

/* Its own calls of its own definitions end at the driver, and do not come to it a second time by way of our cache. */
LAW_CHILD(calls_itself)
{
    law_context();
    for (unsigned long i = 1; i <= 3; i++) {
        OK(before_alloc_and_free(4 * MIB));
        CHECK_EQ(before_calls("cuMemAlloc_v2"), i);
        CHECK_EQ(driver_calls("cuMemAlloc_v2"), i);
        CHECK_EQ(before_calls("cuMemFree_v2"), i);
        CHECK_EQ(driver_calls("cuMemFree_v2"), i);
    }
}

LAW_CASE_SIM(what_it_does_for_itself)
{
    CHECK_EQ(run_child_apart("calls_itself", ENV("BEFORE_BY=next"), NULL, NULL, 0), 0);
    CHECK_EQ(run_child_apart("calls_itself", ENV("BEFORE_BY=handle"), NULL, NULL, 0), 0);
}

/* A call that it leaves by longjmp is over: what the thread does afterwards is the program's again. */
LAW_CASE_SIM(left_by_longjmp)
{
    CUipcMemHandle handle;
    CUdeviceptr p;
    jmp_buf here;
    if (!under_shim() && law_route != ROUTE_DIRECT)
        law_skip("natively it is not called");
    law_context();
    OK(cu.cuMemAlloc_v2(&p, MIB));
    OK(cu.cuIpcGetMemHandle(&handle, p)); /* goes back to the driver when it is freed */
    before_leave_to(&here);
    if (setjmp(here) == 0) {
        cu.cuMemFree_v2(p);
        CHECK(false);
    }
    unsigned long before = driver_calls("cuMemAlloc_v2");
    for (int i = 0; i < 3; i++)
        cached_block(4 * MIB);
    CHECK_EQ(driver_calls("cuMemAlloc_v2") - before, under_shim() ? 1 : 3);
}

/* Bad calls pass it as all others, and get the driver's answer. */
LAW_CASE_SIM(bad_calls)
{
    CUdeviceptr p;
    law_context();
    OK(cu.cuMemAlloc_v2(&p, MIB));
    CHECK_EQ(cu.cuMemAlloc_v2(NULL, MIB), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemAlloc_v2(&p, 0), CUDA_ERROR_INVALID_VALUE);
    OK(cu.cuMemAlloc_v2(&p, MIB));
    CHECK_EQ(cu.cuMemFree_v2(p + 512), CUDA_ERROR_INVALID_VALUE);
    OK(cu.cuMemFree_v2(0));
    OK(cu.cuMemFree_v2(p));
    CHECK_EQ(cu.cuMemFree_v2(p), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemAlloc_v2(&p, (size_t)1 << 60), CUDA_ERROR_OUT_OF_MEMORY);
    if (!under_shim())
        seen_as_by_the_driver();
}

static void *churn(void *ctx)
{
    CUdeviceptr p[4];
    OK(cu.cuCtxSetCurrent(ctx));
    for (int i = 0; i < 200; i++) {
        for (int j = 0; j < 4; j++)
            OK(cu.cuMemAlloc_v2(&p[j], (size_t)(1 + (i + j) % 5) * MIB));
        for (int j = 0; j < 4; j++)
            OK(cu.cuMemFree_v2(p[j]));
    }
    return NULL;
}

LAW_CASE_SIM(threads_and_flushes)
{
    enum { THREADS = 4 };
    pthread_t threads[THREADS];
    CUcontext ctx = law_context();
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, churn, ctx) == 0);
    for (int i = 0; under_shim() && i < 20; i++) {
        raise(SIGUSR1);
        nap();
    }
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    give_cause_to_keep(6 * MIB); /* something for the last flush in any case */
    flush();
    SOON(registered_is_allocated() == 0);
    seen_as_by_the_driver();
}

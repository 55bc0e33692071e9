/*
 * Law 11: out of memory stays code 2 and leaves nothing behind. A device of 1 GiB, so that it can be filled. HAMi-core
 * 306 (a leak after a failed call), 200 (a counter that went below zero).
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

/* Before the driver reads its options; the cases' processes inherit it. */
static void __attribute__((constructor)) small_device(void)
{
    setenv("SIMCUDA_CAPACITY", "1G", 1);
    setenv("SIMCUDA_DEVICES", "2", 1);
    setenv("VRAMSHIM_SLACK", "unlimited", 1); /* nothing is given back before the ladder is climbed */
}

static CUdeviceptr allocate(size_t bytes)
{
    CUdeviceptr p;
    OK(cu.cuMemAlloc_v2(&p, bytes));
    CHECK(SIM(sim_is_allocated)(p) && SIM(sim_is_allocated)(p + bytes - 1));
    return p;
}

static size_t free_memory(void)
{
    size_t free_bytes;
    OK(cu.cuMemGetInfo_v2(&free_bytes, NULL));
    return free_bytes;
}

LAW_CASE_SIM(a_full_device)
{
    CUdeviceptr p[8], more = 0x5a5a;
    size_t pitch = 0x5a5a;
    law_context();
    for (int i = 0; i < 8; i++)
        p[i] = allocate(128 * MIB);
    CHECK_EQ(free_memory(), 0);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(cu.cuMemAlloc_v2(&more, 512), CUDA_ERROR_OUT_OF_MEMORY);
        CHECK_EQ(cu.cuMemAlloc_v2(&more, 4 * MIB), CUDA_ERROR_OUT_OF_MEMORY);
        CHECK_EQ(cu.cuMemAllocPitch_v2(&more, &pitch, 4096, 1024, 4), CUDA_ERROR_OUT_OF_MEMORY);
    }
    CHECK_EQ(more, 0); /* what the driver leaves there (measured) */
    CHECK_EQ(pitch, 4096);
    CHECK_EQ(SIM(sim_used)(0), (uint64_t)CAPACITY_MIB * MIB);
    CHECK_EQ(free_memory(), 0);
    for (int i = 0; i < 8; i++)
        OK(cu.cuMemFree_v2(p[i]));
    CHECK_EQ(free_memory(), (size_t)CAPACITY_MIB * MIB);
    for (int i = 0; i < 8; i++)
        p[i] = allocate(128 * MIB);
}

/* Natively everything would be free again: a request for it must succeed, whatever sizes are in the cache. */
LAW_CASE_SIM(the_cache_gives_way)
{
    CUdeviceptr p[128], whole;
    law_context();
    for (int round = 0; round < 3; round++) {
        unsigned n = 0;
        for (size_t size = (round + 1) * MIB, sum = 0; n < 128 && sum + size <= (size_t)CAPACITY_MIB * MIB;
             size += 2 * MIB) {
            if (cu.cuMemAlloc_v2(&p[n], size) != CUDA_SUCCESS)
                break;
            sum += size;
            n++;
        }
        CHECK(n > 20);
        while (n > 0)
            OK(cu.cuMemFree_v2(p[--n]));
        whole = allocate((size_t)CAPACITY_MIB * MIB);
        CHECK_EQ(free_memory(), 0);
        CHECK_EQ(cu.cuMemAlloc_v2(&p[0], 1), CUDA_ERROR_OUT_OF_MEMORY);
        OK(cu.cuMemFree_v2(whole));
        CHECK_EQ(free_memory(), (size_t)CAPACITY_MIB * MIB);
    }
}

/* Small blocks hold whole pages that only the last one of a page gives back. */
LAW_CASE_SIM(the_cache_of_small_blocks_gives_way)
{
    enum { N = 2000 };
    static CUdeviceptr p[N];
    law_context();
    for (int i = 0; i < N; i++)
        p[i] = allocate(100000);
    for (int i = 0; i < N; i++)
        OK(cu.cuMemFree_v2(p[i]));
    CUdeviceptr whole = allocate((size_t)CAPACITY_MIB * MIB);
    OK(cu.cuMemFree_v2(whole));
    for (int i = 0; i < N; i++)
        p[i] = allocate(100000);
}

/* Freed crosswise, so that the last ones of many pages were freed last: giving back as many bytes as are wanted gives
 * back no page at all. */
LAW_CASE_SIM(small_blocks_spread_over_many_pages)
{
    enum { PAGES = 32, EACH = 20 };
    static CUdeviceptr p[PAGES * EACH];
    law_context();
    CUdeviceptr held = allocate((size_t)(CAPACITY_MIB - 2 * PAGES) * MIB);
    for (int i = 0; i < PAGES * EACH; i++)
        p[i] = allocate(100000);
    CHECK_EQ(free_memory(), 0);
    for (int i = 0; i < EACH; i++)
        for (int page = 0; page < PAGES; page++)
            OK(cu.cuMemFree_v2(p[page * EACH + i]));
    CHECK_EQ(free_memory(), (size_t)2 * PAGES * MIB);
    allocate(2 * MIB);
    CHECK_EQ(free_memory(), (size_t)2 * (PAGES - 1) * MIB);
    allocate((size_t)2 * (PAGES - 1) * MIB);
    CHECK_EQ(free_memory(), 0);
    OK(cu.cuMemFree_v2(held));
}

/* What does not fit even into an empty device fails as it does natively, and the cache may be gone: nothing else is. */
LAW_CASE_SIM(more_than_there_is)
{
    CUdeviceptr held, p = 0x5a5a;
    law_context();
    held = allocate(256 * MIB);
    OK(cu.cuMemsetD8_v2(held + 256 * MIB - 4096, 7, 4096));
    for (int i = 0; i < 3; i++) {
        cached_block(512 * MIB);
        cached_block(4 * MIB);
        CHECK_EQ(cu.cuMemAlloc_v2(&p, (size_t)800 * MIB), CUDA_ERROR_OUT_OF_MEMORY);
        CHECK_EQ(cu.cuMemAlloc_v2(&p, (size_t)2000 * MIB), CUDA_ERROR_OUT_OF_MEMORY);
        CHECK_EQ(p, 0);
        CHECK_EQ(free_memory(), (size_t)768 * MIB);
    }
    unsigned char last;
    OK(cu.cuMemcpyDtoH_v2(&last, held + 256 * MIB - 1, 1));
    CHECK_EQ(last, 7);
    OK(cu.cuMemFree_v2(held));
    CHECK_EQ(free_memory(), (size_t)CAPACITY_MIB * MIB);
}

/* A rescue takes what it needs, leaves the program's blocks alone, and the cache of another device too. */
LAW_CASE_SIM(a_rescue)
{
    CUdeviceptr held[4], p;
    CUcontext first = law_context(), second;
    OK(cu.cuDevicePrimaryCtxRetain(&second, 1));
    OK(cu.cuCtxSetCurrent(second));
    CUdeviceptr other = cached_block(512 * MIB);
    OK(cu.cuCtxSetCurrent(first));
    for (int i = 0; i < 4; i++)
        held[i] = allocate(128 * MIB);
    for (int i = 0; i < 4; i++)
        OK(cu.cuMemsetD8_v2(held[i], (unsigned char)(i + 1), 4096));
    CUdeviceptr a = allocate(256 * MIB), b = allocate(256 * MIB);
    OK(cu.cuMemFree_v2(a));
    OK(cu.cuMemFree_v2(b));
    p = allocate(300 * MIB); /* needs both */
    CHECK_EQ(free_memory(), (size_t)212 * MIB);
    for (int i = 0; i < 4; i++) {
        unsigned char byte;
        CHECK(SIM(sim_is_allocated)(held[i]));
        OK(cu.cuMemcpyDtoH_v2(&byte, held[i], 1));
        CHECK_EQ(byte, i + 1);
    }
    OK(cu.cuMemFree_v2(p));
    if (under_shim()) {
        CHECK(SIM(sim_is_allocated)(other));
        CHECK_EQ(SIM(sim_used)(1), (uint64_t)512 * MIB);
    }
    OK(cu.cuCtxSetCurrent(second));
    CHECK_EQ(free_memory(), (size_t)CAPACITY_MIB * MIB);
    allocate((size_t)CAPACITY_MIB * MIB);
}

/* The pitched entry is rescued as well, with the pitch that belongs to it. */
LAW_CASE_SIM(a_rescue_of_pitched_memory)
{
    CUdeviceptr p;
    size_t pitch;
    law_context();
    cached_block(900 * MIB);
    OK(cu.cuMemAllocPitch_v2(&p, &pitch, 4000, (size_t)200 * 256, 4));
    CHECK_EQ(pitch, 4096);
    CHECK_EQ(free_memory(), (size_t)824 * MIB);
    OK(cu.cuMemFree_v2(p));
    CHECK_EQ(free_memory(), (size_t)CAPACITY_MIB * MIB);
}

/* A driver that says "out of memory" once, at a moment of its own: natively the program would have been told. It may be
 * told less often, never something else, and nothing is counted that was not given. */
LAW_CASE_SIM(a_refusal_out_of_the_blue)
{
    CUdeviceptr p = 0x5a5a;
    law_context();
    CHECK(SIM(sim_fail)("cuMemAlloc_v2", 1, 10, CUDA_ERROR_OUT_OF_MEMORY) == 0);
    CHECK_EQ(cu.cuMemAlloc_v2(&p, 4 * MIB), CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_EQ(driver_calls("cuMemAlloc_v2"), 1); /* nothing to give back: no use asking again */
    CHECK_EQ(p, 0);
    CHECK(SIM(sim_fail)("cuMemAlloc_v2", 1, 0, 0) == 0);
    cached_block(8 * MIB);
    CHECK(SIM(sim_fail)("cuMemAlloc_v2", 1, 10, CUDA_ERROR_OUT_OF_MEMORY) == 0);
    CHECK_EQ(cu.cuMemAlloc_v2(&p, 4 * MIB), CUDA_ERROR_OUT_OF_MEMORY);
    CHECK(SIM(sim_fail)("cuMemAlloc_v2", 1, 0, 0) == 0);
    CHECK_EQ(p, 0);
    CHECK_EQ(free_memory(), (size_t)CAPACITY_MIB * MIB);
    /* Another error is not this one: no rescue is tried for it, and it goes back as it is. */
    cached_block(8 * MIB);
    unsigned long before = driver_calls("cuMemAlloc_v2"), frees = driver_calls("cuMemFree_v2");
    CHECK(SIM(sim_fail)("cuMemAlloc_v2", 1, 1, CUDA_ERROR_UNKNOWN) == 0);
    CHECK_EQ(cu.cuMemAlloc_v2(&p, 4 * MIB), CUDA_ERROR_UNKNOWN);
    CHECK_EQ(driver_calls("cuMemAlloc_v2"), before + 1);
    CHECK_EQ(driver_calls("cuMemFree_v2"), frees);
}

/* Nothing of a failed allocation is in the books at the end. */
LAW_CHILD(fails_often)
{
    CUdeviceptr p;
    size_t pitch;
    law_context();
    for (int i = 0; i < 50; i++) {
        CHECK_EQ(cu.cuMemAlloc_v2(&p, (size_t)2 * CAPACITY_MIB * MIB), CUDA_ERROR_OUT_OF_MEMORY);
        CHECK_EQ(cu.cuMemAllocPitch_v2(&p, &pitch, 1 << 20, 4096, 4), CUDA_ERROR_OUT_OF_MEMORY);
        cached_block(700 * MIB);
        cached_block(400 * MIB);
    }
    OK(cu.cuMemAlloc_v2(&p, 600 * MIB));
    OK(cu.cuMemFree_v2(p));
    CHECK_EQ(SIM(sim_used)(0), under_shim() ? 1000 * MIB : 0); /* and the last 400 */
}

LAW_CASE_SIM(the_books_after_failures)
{
    static char err[1 << 16];
    CHECK_EQ(law_run_child("fails_often", ENV("VRAMSHIM_REPORT=stderr"), err, sizeof(err)), 0);
    if (!under_shim())
        return;
    CHECK(strstr(err, "nothing leaked"));
    CHECK(strstr(err, "700.0 MiB in use by the program"));
    CHECK(strstr(err, "of 101 allocations"));
    CHECK(strstr(err, " rescued, 100 failed"));
}

/* What another thread is giving back just now is neither in the cache nor free yet; natively it would be. */
static pthread_t first_thread;
static atomic_bool inside;

static void hold_the_others(const char *entry, void *unused)
{
    (void)entry, (void)unused;
    if (pthread_equal(pthread_self(), first_thread))
        return;
    atomic_store(&inside, true);
    usleep(100000);
}

LAW_CASE_SIM(while_memory_is_on_its_way_to_the_driver)
{
    first_thread = pthread_self();
    law_context();
    cached_block((size_t)1000 * MIB);
    if (under_shim()) {
        CHECK(SIM(sim_on_call)("cuMemFree_v2", hold_the_others, NULL) == 0);
        raise(SIGUSR1);
        WAIT_UNTIL(atomic_load(&inside));
    }
    CUdeviceptr p = allocate((size_t)900 * MIB);
    OK(cu.cuMemFree_v2(p));
}

/* What is kept in some contexts cannot be had: what is in another one still can. */
LAW_CASE_SIM(contexts_that_take_nothing_back)
{
    CUdevice device;
    CUcontext ctx[3];
    law_context();
    OK(cu.cuDeviceGet(&device, 0));
    for (int i = 0; i < 3; i++) {
        OK(cu.cuCtxCreate_v2(&ctx[i], 0, device));
        cached_block((size_t)(310 - 10 * i) * MIB); /* the fullest is asked first */
    }
    CHECK(SIM(sim_fail)("cuMemFree_v2", 1, 2, CUDA_ERROR_UNKNOWN) == 0);
    allocate((size_t)400 * MIB);
}

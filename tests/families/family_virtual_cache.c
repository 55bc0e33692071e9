/*
 * VRAMSHIM_VIRTUAL_CACHE: what a program creates, maps and gives up for every buffer comes back mapped, and it cannot tell. A
 * device of 1 GiB, of which all may be kept.
 */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "law.h"
#include "sim.h"
#include "world.h"

enum { MIB = 1 << 20, PAGE = 2 * MIB, CAPACITY = 1024 * MIB };

/* Before the shim and the driver read their options; the cases' processes inherit it. */
static void __attribute__((constructor)) options(void)
{
    setenv("SIMCUDA_CAPACITY", "1G", 1);
    setenv("VRAMSHIM_VIRTUAL_CACHE", "unlimited", 0);
}

static const CUmemAllocationProp plain = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                          .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
static const CUmemAccessDesc writable = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};

struct buffer {
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at;
    size_t size;
};

static CUmemGenericAllocationHandle create(size_t size)
{
    CUmemGenericAllocationHandle handle;
    OK(cuMemCreate(&handle, size, &plain, 0));
    return handle;
}

static CUdeviceptr reserve(size_t size)
{
    CUdeviceptr at;
    OK(cuMemAddressReserve(&at, size, 0, 0, 0));
    return at;
}

static void map(CUdeviceptr at, size_t size, CUmemGenericAllocationHandle handle)
{
    OK(cuMemMap(at, size, 0, handle, 0));
    OK(cuMemSetAccess(at, size, &writable, 1));
}

static struct buffer make(size_t size)
{
    struct buffer b = {create(size), reserve(size), size};
    map(b.at, size, b.handle);
    return b;
}

static void drop(struct buffer b)
{
    OK(cuMemUnmap(b.at, b.size));
    OK(cuMemRelease(b.handle));
    OK(cuMemAddressFree(b.at, b.size));
}

static void fill(CUdeviceptr at, unsigned char value, size_t size) { OK(cuMemsetD8_v2(at, value, size)); }

static unsigned char first_byte(CUdeviceptr at)
{
    unsigned char value;
    OK(cuMemcpyDtoH_v2(&value, at, 1));
    return value;
}

static size_t free_memory(void)
{
    size_t unused;
    OK(cuMemGetInfo_v2(&unused, NULL));
    return unused;
}

static unsigned long calls_of_the_driver(void)
{
    static const char *const entries[] = {"cuMemCreate",    "cuMemAddressReserve", "cuMemMap",        "cuMemSetAccess",
                                          "cuMemUnmap",     "cuMemRelease",        "cuMemAddressFree"};
    unsigned long n = 0;
    for (size_t i = 0; i < sizeof(entries) / sizeof(*entries); i++)
        n += driver_calls(entries[i]);
    return n;
}

LAW_CASE_SIM_ONCE(served_without_the_driver)
{
    law_context();
    struct buffer b = make(2 * PAGE), other = make(PAGE);
    drop(b);
    unsigned long calls = calls_of_the_driver();
    for (int i = 0; i < 10; i++) {
        struct buffer again = make(2 * PAGE);
        fill(again.at, (unsigned char)i, again.size);
        CHECK_EQ(first_byte(again.at), i);
        if (under_shim())
            CHECK(again.at == b.at && again.handle == b.handle);
        drop(again);
    }
    CHECK_EQ(calls_of_the_driver() - calls, under_shim() ? 0 : 70);
    drop(other);
}

LAW_CASE_SIM_ONCE(as_free_as_natively)
{
    law_context();
    CHECK_EQ(free_memory(), CAPACITY);
    struct buffer b = make(16 * PAGE);
    CHECK_EQ(free_memory(), CAPACITY - 16 * PAGE);
    OK(cuMemUnmap(b.at, b.size));
    CHECK_EQ(free_memory(), CAPACITY - 16 * PAGE);
    OK(cuMemRelease(b.handle));
    CHECK_EQ(free_memory(), CAPACITY);
    OK(cuMemAddressFree(b.at, b.size));
    CHECK_EQ(free_memory(), CAPACITY);
}

LAW_CASE_SIM_ONCE(gives_way)
{
    CUdeviceptr whole;
    struct buffer b[8];
    law_context();
    for (int i = 0; i < 8; i++)
        b[i] = make(64 * PAGE);
    for (int i = 0; i < 8; i++)
        drop(b[i]);
    OK(cuMemAlloc_v2(&whole, CAPACITY));
    OK(cuMemFree_v2(whole));
    /* And the other way round: a block in the cache, and virtual memory for the whole device. */
    drop(make(CAPACITY));
    drop(make(CAPACITY / 2));
    CHECK_EQ(cuMemAlloc_v2(&whole, 2ull * CAPACITY), CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_EQ(free_memory(), CAPACITY);
}

/* The handle first, as programs do that need it no more once it is mapped. */
LAW_CASE_SIM_ONCE(released_before_it_is_unmapped)
{
    law_context();
    for (int i = 0; i < 3; i++) {
        struct buffer b = make(4 * PAGE);
        OK(cuMemRelease(b.handle));
        CHECK_EQ(free_memory(), CAPACITY - 4 * PAGE);
        fill(b.at, 3, b.size);
        CHECK_EQ(cuMemRelease(b.handle), CUDA_ERROR_INVALID_VALUE);
        CHECK_EQ(cuMemAddressFree(b.at, b.size), CUDA_ERROR_INVALID_VALUE);
        OK(cuMemUnmap(b.at, b.size));
        CHECK_EQ(free_memory(), CAPACITY);
        CHECK_EQ(cuMemUnmap(b.at, b.size), CUDA_ERROR_INVALID_VALUE);
        OK(cuMemAddressFree(b.at, b.size));
        CHECK_EQ(cuMemAddressFree(b.at, b.size), CUDA_ERROR_INVALID_VALUE);
    }
}

/* Two memories take turns behind one address; each keeps its bytes. */
LAW_CASE_SIM_ONCE(another_memory_at_the_address)
{
    law_context();
    struct buffer b = make(PAGE);
    CUmemGenericAllocationHandle other = create(PAGE);
    fill(b.at, 1, PAGE);
    for (int i = 0; i < 3; i++) {
        OK(cuMemUnmap(b.at, PAGE));
        map(b.at, PAGE, other);
        fill(b.at, 2, PAGE);
        OK(cuMemUnmap(b.at, PAGE));
        map(b.at, PAGE, b.handle);
        CHECK_EQ(first_byte(b.at), 1);
    }
    /* Released, but its addresses go on with the other. */
    OK(cuMemUnmap(b.at, PAGE));
    OK(cuMemRelease(b.handle));
    map(b.at, PAGE, other);
    CHECK_EQ(first_byte(b.at), 2);
    CHECK_EQ(free_memory(), CAPACITY - PAGE);
    OK(cuMemUnmap(b.at, PAGE));
    OK(cuMemRelease(other));
    OK(cuMemAddressFree(b.at, PAGE));
    CHECK_EQ(free_memory(), CAPACITY);
}

/* One memory at one address after the other. */
LAW_CASE_SIM_ONCE(at_another_address)
{
    law_context();
    for (int i = 0; i < 2; i++) {
        struct buffer b = make(PAGE);
        CUdeviceptr elsewhere = reserve(4 * PAGE);
        fill(b.at, 1, PAGE);
        OK(cuMemUnmap(b.at, PAGE));
        map(elsewhere + PAGE, PAGE, b.handle);
        CHECK_EQ(first_byte(elsewhere + PAGE), 1);
        if (i == 0)
            CHECK_EQ(cuMemSetAccess(b.at, PAGE, &writable, 1), CUDA_ERROR_INVALID_VALUE);
        OK(cuMemUnmap(elsewhere + PAGE, PAGE));
        OK(cuMemAddressFree(b.at, PAGE));
        map(elsewhere, PAGE, b.handle);
        CHECK_EQ(first_byte(elsewhere), 1);
        OK(cuMemUnmap(elsewhere, PAGE));
        OK(cuMemRelease(b.handle));
        OK(cuMemAddressFree(elsewhere, 4 * PAGE));
        CHECK_EQ(free_memory(), CAPACITY);
        if (i == 1)
            CHECK_EQ(driver_calls("cuMemUnmap"), 6); /* nothing stayed behind where it was at first */
    }
}

LAW_CASE_SIM_ONCE(served_from_its_new_address)
{
    law_context();
    struct buffer b = make(PAGE);
    CUdeviceptr second = reserve(PAGE);
    OK(cuMemUnmap(b.at, PAGE));
    map(second, PAGE, b.handle);
    OK(cuMemAddressFree(b.at, PAGE));
    b.at = second;
    drop(b);
    unsigned long calls = calls_of_the_driver();
    drop(make(PAGE));
    CHECK_EQ(calls_of_the_driver() - calls, under_shim() ? 0 : 7);
}

/* At two addresses at once: both show the same bytes, and it goes when both are gone. */
LAW_CASE_SIM_ONCE(at_two_addresses)
{
    law_context();
    for (int i = 0; i < 2; i++) {
        struct buffer b = make(PAGE);
        CUdeviceptr second = reserve(PAGE);
        map(second, PAGE, b.handle);
        fill(b.at, 5, PAGE);
        CHECK_EQ(first_byte(second), 5);
        drop(b);
        CHECK_EQ(first_byte(second), 5);
        CHECK_EQ(free_memory(), CAPACITY - PAGE);
        OK(cuMemUnmap(second, PAGE));
        OK(cuMemAddressFree(second, PAGE));
        CHECK_EQ(free_memory(), CAPACITY);
    }
}

/* Several mappings in one reservation, and one unmapping for all of them. */
LAW_CASE_SIM_ONCE(a_row_of_mappings)
{
    law_context();
    for (int round = 0; round < 2; round++) {
        CUdeviceptr at = reserve(4 * PAGE);
        for (int i = 0; i < 4; i++) {
            CUmemGenericAllocationHandle handle = create(PAGE);
            map(at + (CUdeviceptr)i * PAGE, PAGE, handle);
            OK(cuMemRelease(handle));
        }
        fill(at, 1, 4 * PAGE);
        CHECK_EQ(cuMemUnmap(at, PAGE / 2), CUDA_ERROR_INVALID_VALUE);
        OK(cuMemUnmap(at, PAGE));
        OK(cuMemUnmap(at + PAGE, 3 * PAGE));
        OK(cuMemAddressFree(at, 4 * PAGE));
        CHECK_EQ(free_memory(), CAPACITY);
    }
}

/* Somebody else may still use what was shared. */
LAW_CASE_SIM_ONCE(what_was_shared_is_not_kept)
{
    CUmemGenericAllocationHandle second;
    law_context();
    struct buffer b = make(PAGE);
    OK(cuMemRetainAllocationHandle(&second, (void *)(uintptr_t)b.at));
    drop(b);
    CHECK_EQ(free_memory(), CAPACITY - PAGE);
    struct buffer next = make(PAGE);
    CHECK(next.handle != second);
    drop(next);
    OK(cuMemRelease(second));
    CHECK_EQ(free_memory(), CAPACITY);

    CUmemAllocationProp exportable = plain;
    int fd = -1;
    exportable.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    struct buffer e = {0, reserve(PAGE), PAGE};
    OK(cuMemCreate(&e.handle, PAGE, &exportable, 0));
    map(e.at, PAGE, e.handle);
    OK(cuMemExportToShareableHandle(&fd, e.handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    unsigned long unmapped = driver_calls("cuMemUnmap"), released = driver_calls("cuMemRelease");
    drop(e);
    CHECK_EQ(driver_calls("cuMemUnmap") - unmapped, 1);
    CHECK_EQ(driver_calls("cuMemRelease") - released, 1);
    close(fd);
}

/* Released and then retained by its address: released again, it is gone. */
LAW_CASE_SIM_ONCE(retained_after_its_release)
{
    law_context();
    struct buffer b = make(PAGE);
    CUmemGenericAllocationHandle again;
    OK(cuMemRelease(b.handle));
    OK(cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)b.at));
    OK(cuMemUnmap(b.at, PAGE));
    CHECK_EQ(free_memory(), CAPACITY - PAGE);
    OK(cuMemRelease(again));
    CHECK_EQ(free_memory(), CAPACITY);
    CHECK_EQ(cuMemRelease(again), CUDA_ERROR_INVALID_VALUE);
    OK(cuMemAddressFree(b.at, PAGE));
}

/* Access that was given in another way is not the access that the next owner asked for. */
LAW_CASE_SIM_ONCE(access_of_another_kind)
{
    const CUmemAccessDesc readable = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READ};
    law_context();
    struct buffer b = make(PAGE);
    OK(cuMemSetAccess(b.at, PAGE, &readable, 1));
    drop(b);
    struct buffer c = {create(PAGE), reserve(PAGE), PAGE};
    OK(cuMemMap(c.at, PAGE, 0, c.handle, 0));
    OK(cuMemSetAccess(c.at, PAGE, &readable, 1));
    drop(c);
    unsigned long given = driver_calls("cuMemSetAccess");
    struct buffer d = make(PAGE);
    CHECK_EQ(driver_calls("cuMemSetAccess") - given, 1);
    fill(d.at, 1, PAGE);
    drop(d);
    CHECK_EQ(free_memory(), CAPACITY);
}

/* What is given up answers as it would natively. */
LAW_CASE_SIM_ONCE(nothing_is_there_to_ask_about)
{
    CUdeviceptr base;
    size_t size;
    CUmemGenericAllocationHandle handle;
    law_context();
    struct buffer b = make(PAGE);
    OK(cuMemGetAddressRange_v2(&base, &size, b.at + 5));
    CHECK_EQ(base, b.at);
    CHECK_EQ(size, PAGE);
    drop(b);
    CHECK(cuMemGetAddressRange_v2(&base, &size, b.at + 5) != CUDA_SUCCESS);
    CHECK(cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)b.at) != CUDA_SUCCESS);
    CHECK_EQ(cuMemMap(b.at, PAGE, 0, b.handle, 0), CUDA_ERROR_INVALID_VALUE);
}

LAW_CHILD(leaves_with_some_given_up)
{
    law_context();
    struct buffer b = make(4 * PAGE);
    drop(make(8 * PAGE));
    OK(cuMemRelease(b.handle));
    exit(0);
}

LAW_CASE_SIM_ONCE(the_report_counts_what_the_program_holds)
{
    static char text[8192];
    int status = law_run_child("leaves_with_some_given_up", NULL, text, sizeof(text));
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    if (!under_shim())
        return;
    CHECK(strstr(text, "8.0 MiB in 1 block never freed"));
    CHECK(strstr(text, "virtual                 8.0 MiB in 1 at exit, peak 24.0 MiB; in all 24.0 MiB in 2"));
    CHECK(strstr(text, "kept at exit            16.0 MiB"));
}

LAW_CHILD(keeps_little)
{
    law_context();
    struct buffer a = make(PAGE), b = make(2 * PAGE);
    drop(a);
    drop(b);
    CHECK_EQ(SIM(sim_used)(0), under_shim() ? PAGE : 0);
    CHECK_EQ(free_memory(), CAPACITY);
    OK(cuMemGetInfo_v2(&(size_t){0}, NULL));
}

LAW_CASE_SIM_ONCE(no_more_than_the_limit)
{
    static char text[8192];
    int status = law_run_child("keeps_little", ENV("VRAMSHIM_VIRTUAL_CACHE=5M"), text, sizeof(text));
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

LAW_CASE_SIM_ONCE(given_back_at_the_signal)
{
    if (!under_shim())
        law_skip("natively nothing is kept");
    law_context();
    drop(make(16 * PAGE));
    CHECK_EQ(SIM(sim_used)(0), 16 * PAGE);
    raise(SIGUSR1);
    WAIT_UNTIL(SIM(sim_used)(0) == 0);
    struct buffer b = make(16 * PAGE);
    fill(b.at, 1, b.size);
    drop(b);
}

/* Threads whose sizes cross, and one that gives back all the time. */
static CUcontext context;
static void *churn(void *seed)
{
    unsigned state = (unsigned)(uintptr_t)seed;
    struct buffer held[4] = {{0}};
    OK(cuCtxSetCurrent(context));
    for (int i = 0; i < 400; i++) {
        struct buffer *b = &held[(state = state * 1103515245 + 12345) >> 16 & 3];
        if (b->size) {
            CHECK_EQ(first_byte(b->at), (unsigned char)(uintptr_t)b);
            drop(*b);
            b->size = 0;
        } else {
            *b = make((1 + (state >> 20 & 3)) * PAGE);
            fill(b->at, (unsigned char)(uintptr_t)b, b->size);
        }
    }
    for (int i = 0; i < 4; i++)
        if (held[i].size)
            drop(held[i]);
    return NULL;
}

LAW_CASE_SIM_ONCE(threads_that_cross)
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
    WAIT_UNTIL(free_memory() == CAPACITY);
    CHECK_EQ(SIM(sim_hazards)(), 0);
}

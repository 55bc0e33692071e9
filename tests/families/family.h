/*
 * What the scenarios of the families share: memory of each of them in one line, and the report's line about it.
 */
#ifndef TESTS_FAMILIES_FAMILY_H
#define TESTS_FAMILIES_FAMILY_H

#include <signal.h>
#include <sys/mman.h>

#include "law.h"
#include "sim.h"
#include "world.h"

enum { MIB = 1 << 20 };

static inline CUdeviceptr managed(size_t size)
{
    CUdeviceptr p;
    OK(cu.cuMemAllocManaged(&p, size, 1));
    return p;
}

static inline CUdeviceptr in_order(size_t size)
{
    CUdeviceptr p;
    OK(cu.cuMemAllocAsync(&p, size, NULL));
    return p;
}

static inline CUdeviceptr in_order_from(CUmemoryPool pool, size_t size)
{
    CUdeviceptr p;
    OK(cu.cuMemAllocFromPoolAsync(&p, size, pool, NULL));
    return p;
}

/* A pool that keeps what was freed. */
static inline void keep_all(CUmemoryPool pool)
{
    uint64_t threshold = UINT64_MAX;
    OK(cu.cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
}

static inline CUmemoryPool pool_on(int device)
{
    const CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                  .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
    CUmemoryPool pool;
    OK(cu.cuMemPoolCreate(&pool, &props));
    keep_all(pool);
    return pool;
}

static inline CUmemoryPool default_pool(void)
{
    CUmemoryPool pool;
    OK(cu.cuDeviceGetDefaultMemPool(&pool, 0));
    keep_all(pool);
    return pool;
}

static inline uint64_t attribute(CUmemoryPool pool, CUmemPool_attribute which)
{
    uint64_t value;
    OK(cu.cuMemPoolGetAttribute(pool, which, &value));
    return value;
}
static inline uint64_t reserved(CUmemoryPool pool)
{
    return attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
}

/* The pool keeps that much, and nobody uses it. */
static inline void idle_in(CUmemoryPool pool, size_t size)
{
    OK(cu.cuMemFreeAsync(in_order_from(pool, size), NULL));
    OK(cu.cuStreamSynchronize(NULL));
    CHECK(reserved(pool) >= size);
}

static inline CUmemAllocationProp on_device(int device)
{
    return (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                 .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                 .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
}

static inline CUmemGenericAllocationHandle piece(size_t size)
{
    const CUmemAllocationProp prop = on_device(0);
    CUmemGenericAllocationHandle handle;
    OK(cu.cuMemCreate(&handle, size, &prop, 0));
    return handle;
}

static inline CUdeviceptr reserve(size_t size)
{
    CUdeviceptr p;
    OK(cu.cuMemAddressReserve(&p, size, 0, 0, 0));
    return p;
}

static inline CUmemGenericAllocationHandle imported(CUmemGenericAllocationHandle handle)
{
    CUmemGenericAllocationHandle import;
    int fd;
    OK(cu.cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    OK(cu.cuMemImportFromShareableHandle(&import, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    close(fd);
    return import;
}

/* Rows of 4 KiB. */
static inline CUDA_ARRAY_DESCRIPTOR flat(size_t size)
{
    return (CUDA_ARRAY_DESCRIPTOR){
        .Width = 1024, .Height = size / 4096, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
}

/* Slices of 1 MiB. */
static inline CUDA_ARRAY3D_DESCRIPTOR deep(size_t size)
{
    return (CUDA_ARRAY3D_DESCRIPTOR){
        .Width = 1024, .Height = 256, .Depth = size / MIB, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 1};
}

static inline CUarray array(size_t size)
{
    const CUDA_ARRAY_DESCRIPTOR d = flat(size);
    CUarray a;
    OK(cu.cuArrayCreate_v2(&a, &d));
    return a;
}

static inline void *pinned(size_t size)
{
    void *p;
    OK(cu.cuMemHostAlloc(&p, size, 0));
    return p;
}

static inline CUexternalMemory external(size_t size)
{
    CUDA_EXTERNAL_MEMORY_HANDLE_DESC d = {.type = CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD, .size = size};
    CUexternalMemory m;
    d.handle.fd = memfd_create("external", MFD_CLOEXEC);
    CHECK(d.handle.fd >= 0);
    OK(cu.cuImportExternalMemory(&m, &d));
    return m;
}

/* A handle of 3 MiB of another process, which has no shim. */
LAW_CHILD(donor)
{
    CUdeviceptr p;
    CUipcMemHandle handle;
    law_context();
    OK(cu.cuMemAlloc_v2(&p, 3 * MIB));
    OK(cu.cuIpcGetMemHandle(&handle, p));
    CHECK(fwrite(&handle, sizeof(handle), 1, stdout) == 1);
}

static inline CUipcMemHandle donated(void)
{
    char out[sizeof(CUipcMemHandle) + 1];
    CUipcMemHandle handle;
    CHECK_EQ(run_child_apart("donor", ENV("LD_PRELOAD="), out, NULL, sizeof(out)), 0);
    memcpy(&handle, out, sizeof(handle));
    return handle;
}

/* Runs a child of the scenario; its standard error, with the shim's report, is in `text`. */
static char text[1 << 16];
static inline void run(const char *child)
{
    int status = law_run_child(child, ENV("VRAMSHIM_REPORT=stderr"), text, sizeof(text));
    if (status != 0)
        law_fail(__FILE__, __LINE__, "%s: status %d: %s", child, status, text);
}

/* The report says this, at the start of a line. */
static inline void reported(const char *label, const char *what)
{
    char line[256];
    snprintf(line, sizeof(line), "\n    %-24s%s\n", label, what);
    if (under_shim() && !strstr(text, line))
        law_fail(__FILE__, __LINE__, "not \"%s\": %s", line + 1, text);
}

static inline void not_reported(const char *label)
{
    char line[64];
    snprintf(line, sizeof(line), "\n    %-24s", label);
    if (strstr(text, line))
        law_fail(__FILE__, __LINE__, "\"%s\": %s", line + 1, text);
}

static inline void summary_says(const char *what)
{
    if (under_shim() && !strstr(text, what))
        law_fail(__FILE__, __LINE__, "not \"%s\": %s", what, text);
}

#endif

/* cuMemAlloc, cuMemFree, cuMemGetInfo and their 32-bit ancestors, with what they cost on a real device if wanted. */
#include "capture.h"
#include "context.h"
#include "entry.h"
#include "memory.h"
#include "pool.h"
#include "vmm.h"

/* Measured on an H200 (FACTS.md): microseconds by size; in between, on a straight line. */
static const struct cost {
    uint64_t size;
    unsigned int alloc, free;
} costs[] = {{0, 30, 26},
             {(uint64_t)20 << 20, 30, 35},
             {(uint64_t)256 << 20, 40, 94},
             {(uint64_t)1 << 30, 118, 302},
             {(uint64_t)8 << 30, 478, 2586},
             {(uint64_t)32 << 30, 1500, 17000}};
#define COST_OF_A_REFUSAL 300000 /* ns */

/* Passes the time without the lock. */
static void pay(uint64_t size, bool is_free)
{
    if (!sim.config.native_cost)
        return;
    size_t i = 1;
    while (i + 1 < sizeof costs / sizeof *costs && costs[i].size < size)
        i++;
    const struct cost *a = &costs[i - 1], *b = &costs[i];
    double from = is_free ? a->free : a->alloc, to = is_free ? b->free : b->alloc;
    double part = (double)(size - a->size) / (double)(b->size - a->size);
    sim_unlock();
    sim_spin((uint64_t)(1000 * (from + part * (to - from))));
    sim_lock();
}

static CUresult alloc(size_t size, enum sim_memory_kind kind, bool low, uint64_t *address)
{
    struct sim_block *b;
    CUcontext ctx = sim_context_current();
    sim_pool_reclaim(false);
    CUresult r = sim_memory_alloc(ctx, size, kind, low, &b);
    if (!r) {
        *address = b->address; /* nobody else knows the block yet: it cannot go while we pass the time */
        pay(size, false);
    } else if (sim.config.native_cost) {
        sim_unlock();
        sim_spin(COST_OF_A_REFUSAL);
        sim_lock();
    }
    return r;
}

CUresult do_cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytes)
{
    uint64_t address;
    if (!dptr || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult r = alloc(bytes, MEMORY_DEVICE, false, &address);
    if (!r)
        *dptr = address;
    return r;
}

CUresult do_cuMemAlloc(CUdeviceptr_v1 *dptr, unsigned int bytes)
{
    uint64_t address;
    if (!dptr || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult r = alloc(bytes, MEMORY_DEVICE, true, &address);
    if (!r)
        *dptr = (CUdeviceptr_v1)address;
    return r;
}

CUresult do_cuMemAllocManaged(CUdeviceptr *dptr, size_t bytes, unsigned int flags)
{
    uint64_t address;
    if (!dptr || !bytes || (flags != 1 && flags != 2))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult r = alloc(bytes, MEMORY_MANAGED, false, &address);
    if (!r)
        *dptr = address;
    return r;
}

/* 0: the arguments are bad; else the size, and *pitch. Rows are 512 bytes apart, as measured. */
static size_t pitched(size_t width, size_t height, unsigned int element, size_t *pitch)
{
    size_t size;
    if (!width || !height || (element != 4 && element != 8 && element != 16))
        return 0;
    if (__builtin_add_overflow(width, SIM_GRANULE - 1, pitch))
        return SIZE_MAX;
    *pitch -= *pitch % SIM_GRANULE;
    return __builtin_mul_overflow(*pitch, height, &size) ? SIZE_MAX : size;
}

CUresult do_cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pitch, size_t width, size_t height, unsigned int element)
{
    size_t row, size = pitched(width, height, element, &row);
    uint64_t address;
    if (!dptr || !pitch || !size)
        return CUDA_ERROR_INVALID_VALUE;
    *pitch = row; /* also when what follows fails (measured) */
    if (size == SIZE_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult r = sim_capture_check_unsafe();
    if (!r)
        r = alloc(size, MEMORY_DEVICE, false, &address);
    if (!r)
        *dptr = address;
    return r;
}

CUresult do_cuMemAllocPitch(CUdeviceptr_v1 *dptr, unsigned int *pitch, unsigned int width, unsigned int height,
                            unsigned int element)
{
    size_t row, size = pitched(width, height, element, &row);
    uint64_t address;
    if (!dptr || !pitch || !size)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult r = alloc(size, MEMORY_DEVICE, true, &address);
    if (r)
        return r;
    *dptr = (CUdeviceptr_v1)address;
    *pitch = (unsigned int)row;
    return CUDA_SUCCESS;
}

CUresult do_cuMemFree_v2(CUdeviceptr dptr)
{
    struct sim_block *b = sim_memory_find(dptr);
    size_t size = b ? b->size : 0;
    CUresult r = sim_memory_free(dptr, false);
    if (!r && dptr)
        pay(size, true);
    return r;
}

CUresult do_cuMemFree(CUdeviceptr_v1 dptr)
{
    return do_cuMemFree_v2(dptr);
}

CUresult do_cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    sim_pool_reclaim(false);
    sim_vmm_reclaim();
    if (free_bytes)
        *free_bytes = sim.config.capacity - sim.device[sim_context_current()->device].used;
    if (total)
        *total = sim.config.capacity;
    return CUDA_SUCCESS;
}

CUresult do_cuMemGetInfo(unsigned int *free_bytes, unsigned int *total)
{
    size_t f, t;
    do_cuMemGetInfo_v2(&f, &t);
    if (free_bytes)
        *free_bytes = f > UINT32_MAX ? UINT32_MAX : (unsigned int)f;
    if (total)
        *total = t > UINT32_MAX ? UINT32_MAX : (unsigned int)t;
    return CUDA_SUCCESS;
}

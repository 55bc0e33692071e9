/* Pinned and registered host memory. The device sees it under the host's address, as measured. */
#include "context.h"
#include "entry.h"
#include "judge.h"
#include "memory.h"

#include <sys/mman.h>

#define ERROR_ALREADY_REGISTERED ((CUresult)712)
#define ERROR_NOT_REGISTERED ((CUresult)713)

static struct sim_block *host_block(const void *p)
{
    struct sim_block *b = sim_memory_find((uint64_t)(uintptr_t)p);
    return b && (b->kind == MEMORY_HOST || b->kind == MEMORY_REGISTERED) ? b : NULL;
}

CUresult do_cuMemHostAlloc(void **pp, size_t bytes, unsigned int flags)
{
    if (!pp || !bytes || flags > 7)
        return CUDA_ERROR_INVALID_VALUE;
    size_t size = (bytes + 4095) & ~(size_t)4095;
    void *p = size < bytes ? MAP_FAILED : mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct sim_block *b = sim_memory_adopt(sim_context_current(), (uint64_t)(uintptr_t)p, bytes, MEMORY_HOST);
    b->map_size = size;
    b->host_flags = flags;
    *pp = p;
    return CUDA_SUCCESS;
}

CUresult do_cuMemAllocHost_v2(void **pp, size_t bytes)
{
    return do_cuMemHostAlloc(pp, bytes, 0);
}

CUresult do_cuMemAllocHost(void **pp, unsigned int bytes)
{
    return do_cuMemHostAlloc(pp, bytes, 0);
}

CUresult do_cuMemFreeHost(void *p)
{
    return sim_memory_free((uint64_t)(uintptr_t)p, true);
}

CUresult do_cuMemHostRegister_v2(void *p, size_t bytes, unsigned int flags)
{
    uint64_t address = (uint64_t)(uintptr_t)p;
    if (!p || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (host_block(p) || host_block((char *)p + bytes - 1))
        return ERROR_ALREADY_REGISTERED;
    if (sim_memory_is_device(address))
        return CUDA_ERROR_INVALID_VALUE;
    sim_memory_adopt(sim_context_current(), address, bytes, MEMORY_REGISTERED)->host_flags = flags;
    return CUDA_SUCCESS;
}

CUresult do_cuMemHostRegister(void *p, size_t bytes, unsigned int flags)
{
    return do_cuMemHostRegister_v2(p, bytes, flags);
}

CUresult do_cuMemHostUnregister(void *p)
{
    struct sim_block *b = host_block(p);
    if (!b || b->kind != MEMORY_REGISTERED || b->address != (uint64_t)(uintptr_t)p)
        return ERROR_NOT_REGISTERED;
    uint64_t low = b->address, high = low + b->size;
    CUcontext owner = b->ctx;
    sim_memory_hide(b);
    sim_memory_wait_owner(owner);
    sim_judge_release(low, high, false);
    sim_memory_release(b);
    return CUDA_SUCCESS;
}

CUresult do_cuMemHostGetDevicePointer_v2(CUdeviceptr *dptr, void *p, unsigned int flags)
{
    if (!dptr || flags || !host_block(p))
        return CUDA_ERROR_INVALID_VALUE;
    *dptr = (uint64_t)(uintptr_t)p;
    return CUDA_SUCCESS;
}

CUresult do_cuMemHostGetDevicePointer(CUdeviceptr_v1 *dptr, void *p, unsigned int flags)
{
    CUdeviceptr d;
    CUresult r = dptr ? do_cuMemHostGetDevicePointer_v2(&d, p, flags) : CUDA_ERROR_INVALID_VALUE;
    if (!r && d > UINT32_MAX)
        r = CUDA_ERROR_INVALID_VALUE;
    if (!r)
        *dptr = (CUdeviceptr_v1)d;
    return r;
}

CUresult do_cuMemHostGetFlags(unsigned int *flags, void *p)
{
    struct sim_block *b = host_block(p);
    if (!flags || !b)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = b->host_flags;
    return CUDA_SUCCESS;
}

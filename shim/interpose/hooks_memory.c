/* Allocation, free, and what the program asks about its memory. */
#include "control/thread.h"
#include "heap/heap.h"
#include "interpose/hooks.h"
#include "observe/trace.h"

CUresult hook_cuMemAlloc_v2(uintptr_t caller, CUdeviceptr *dptr, size_t bytesize)
{
    CUresult r = vram_heap_alloc(dptr, bytesize, caller);
    if (vram_trace_on())
        vram_trace_allocated(r, r == CUDA_SUCCESS ? *dptr : 0, bytesize);
    if (r == CUDA_SUCCESS)
        vram_control_start();
    return r;
}

CUresult hook_cuMemAllocPitch_v2(uintptr_t caller, CUdeviceptr *dptr, size_t *pitch, size_t width_bytes, size_t height,
                                 unsigned int element_bytes)
{
    CUresult r = vram_heap_alloc_pitch(dptr, pitch, width_bytes, height, element_bytes, caller);
    if (vram_trace_on())
        vram_trace_allocated(r, r == CUDA_SUCCESS ? *dptr : 0, (r == CUDA_SUCCESS ? *pitch : width_bytes) * height);
    if (r == CUDA_SUCCESS)
        vram_control_start();
    return r;
}

CUresult hook_cuMemFree_v2(uintptr_t caller, CUdeviceptr dptr)
{
    if (vram_trace_on())
        vram_trace_freeing(dptr);
    return vram_heap_free(dptr, caller);
}

CUresult hook_cuMemFreeAsync(uintptr_t caller, CUdeviceptr dptr, CUstream stream)
{
    if (vram_trace_on())
        vram_trace_freeing(dptr);
    return vram_heap_free_async(dptr, stream, VRAM_DRV(cuMemFreeAsync), caller);
}

CUresult hook_cuMemFreeAsync_ptsz(uintptr_t caller, CUdeviceptr dptr, CUstream stream)
{
    if (vram_trace_on())
        vram_trace_freeing(dptr);
    return vram_heap_free_async(dptr, stream, VRAM_DRV(cuMemFreeAsync_ptsz), caller);
}

CUresult hook_cuMemGetInfo_v2(uintptr_t caller, size_t *free, size_t *total)
{
    (void)caller;
    return vram_heap_info(free, total);
}

/*
 * Queries (law 10). A block answers with what the program asked for, not with what lies behind it; what the program has
 * freed, or never asked for, answers as an address that the driver has never given: that was measured to be the same.
 */
static CUdeviceptr as_native(CUdeviceptr ptr, enum vram_view *ret_view, CUdeviceptr *ret_base, size_t *ret_size)
{
    *ret_view = vram_heap_view(ptr, ret_base, ret_size);
    return *ret_view == VRAM_VIEW_NOTHING ? VRAM_NEVER_ALLOCATED : ptr;
}

CUresult hook_cuMemGetAddressRange_v2(uintptr_t caller, CUdeviceptr *base, size_t *size, CUdeviceptr dptr)
{
    (void)caller;
    enum vram_view view;
    CUdeviceptr our_base;
    size_t our_size;
    CUdeviceptr asked = as_native(dptr, &view, &our_base, &our_size);
    CUresult r = VRAM_DRV(cuMemGetAddressRange_v2)(base, size, asked);
    if (r == CUDA_SUCCESS && view == VRAM_VIEW_LIVE && size)
        *size = our_size;
    return r;
}

CUresult hook_cuPointerGetAttribute(uintptr_t caller, void *data, CUpointer_attribute attribute, CUdeviceptr ptr)
{
    (void)caller;
    enum vram_view view;
    CUdeviceptr base;
    size_t size;
    if (attribute == CU_POINTER_ATTRIBUTE_P2P_TOKENS)
        vram_heap_settle_block(ptr);
    CUdeviceptr asked = as_native(ptr, &view, &base, &size);
    CUresult r = VRAM_DRV(cuPointerGetAttribute)(data, attribute, asked);
    if (r != CUDA_SUCCESS || view != VRAM_VIEW_LIVE)
        return r;
    if (attribute == CU_POINTER_ATTRIBUTE_RANGE_SIZE)
        *(size_t *)data = size;
    if (attribute == CU_POINTER_ATTRIBUTE_P2P_TOKENS)
        vram_heap_identity_left(ptr);
    return r;
}

CUresult hook_cuPointerGetAttributes(uintptr_t caller, unsigned int count, CUpointer_attribute *attributes, void **data,
                                     CUdeviceptr ptr)
{
    (void)caller;
    enum vram_view view;
    CUdeviceptr base;
    size_t size;
    for (unsigned i = 0; attributes && i < count; i++)
        if (attributes[i] == CU_POINTER_ATTRIBUTE_P2P_TOKENS)
            vram_heap_settle_block(ptr);
    CUdeviceptr asked = as_native(ptr, &view, &base, &size);
    CUresult r = VRAM_DRV(cuPointerGetAttributes)(count, attributes, data, asked);
    if (r != CUDA_SUCCESS || view == VRAM_VIEW_UNKNOWN)
        return r;
    for (unsigned i = 0; i < count; i++) {
        if (view == VRAM_VIEW_LIVE && attributes[i] == CU_POINTER_ATTRIBUTE_RANGE_SIZE)
            *(size_t *)data[i] = size;
        if (view == VRAM_VIEW_LIVE && attributes[i] == CU_POINTER_ATTRIBUTE_P2P_TOKENS)
            vram_heap_identity_left(ptr);
        /* Of an unknown address the driver gives the address itself as its host pointer. */
        if (view == VRAM_VIEW_NOTHING && attributes[i] == CU_POINTER_ATTRIBUTE_HOST_POINTER &&
            *(CUdeviceptr *)data[i] == asked)
            *(CUdeviceptr *)data[i] = ptr;
    }
    return r;
}

/* What gives an address an identity outside (law 19): nothing of before may still use it (law 14), and from success on, the
 * block is the driver's again once it is freed. */
static CUresult leaves(CUresult r, CUdeviceptr ptr)
{
    if (r == CUDA_SUCCESS)
        vram_heap_identity_left(ptr);
    return r;
}

static CUdeviceptr if_native(CUdeviceptr ptr)
{
    vram_heap_settle_block(ptr);
    enum vram_view view;
    CUdeviceptr base;
    size_t size;
    return as_native(ptr, &view, &base, &size);
}

CUresult hook_cuPointerSetAttribute(uintptr_t caller, const void *value, CUpointer_attribute attribute, CUdeviceptr ptr)
{
    (void)caller;
    return leaves(VRAM_DRV(cuPointerSetAttribute)(value, attribute, if_native(ptr)), ptr);
}

CUresult hook_cuIpcGetMemHandle(uintptr_t caller, CUipcMemHandle *handle, CUdeviceptr dptr)
{
    (void)caller;
    return leaves(VRAM_DRV(cuIpcGetMemHandle)(handle, if_native(dptr)), dptr);
}

CUresult hook_cuMemGetHandleForAddressRange(uintptr_t caller, void *handle, CUdeviceptr dptr, size_t size,
                                            CUmemRangeHandleType type, unsigned long long flags)
{
    (void)caller;
    return leaves(VRAM_DRV(cuMemGetHandleForAddressRange)(handle, if_native(dptr), size, type, flags), dptr);
}

CUresult hook_cuMulticastBindAddr(uintptr_t caller, CUmemGenericAllocationHandle multicast, size_t multicast_offset,
                                  CUdeviceptr dptr, size_t size, unsigned long long flags)
{
    (void)caller;
    return leaves(VRAM_DRV(cuMulticastBindAddr)(multicast, multicast_offset, if_native(dptr), size, flags), dptr);
}

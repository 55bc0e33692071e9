/*
 * The families of memory that are not kept (heap/families.h). Each hook makes the program's call as it is; what it
 * notes, it notes after memory was given and before it is given up (law 16).
 */
#include "base/compiler.h"
#include "control/thread.h"
#include "driver/capture.h"
#include "heap/families.h"
#include "heap/heap.h"
#include "heap/host.h"
#include "heap/life.h"
#include "heap/pools.h"
#include "heap/virtual.h"
#include "interpose/hooks.h"

static struct vram_key key(enum vram_space space, uint64_t value)
{
    return (struct vram_key){space, value};
}
static struct vram_key key_at(enum vram_space space, const void *value)
{
    return key(space, (uintptr_t)value);
}

static CUresult born(CUresult r, enum vram_family family, int device, struct vram_key name, uint64_t bytes,
                     uintptr_t caller)
{
    if (r == CUDA_SUCCESS) {
        vram_family_born(family, device, name, bytes, caller);
        vram_control_start();
    }
    return r;
}

/* GIVEN_UP(name, call): the result of `call`, which gives the name up. */
#define GIVEN_UP(name, call)                                                                                           \
    __extension__({                                                                                                    \
        struct vram_leaving leaving_ = vram_family_leave(name);                                                        \
        CUresult given_ = (call);                                                                                      \
        vram_family_left(&leaving_, given_);                                                                           \
        given_;                                                                                                        \
    })

/* Managed memory. */
CUresult hook_cuMemAllocManaged(uintptr_t caller, CUdeviceptr *dptr, size_t bytes, unsigned int flags)
{
    CUresult r = VRAM_RESCUED(bytes, VRAM_DEVICE_OF_CONTEXT, VRAM_DRV(cuMemAllocManaged)(dptr, bytes, flags));
    return born(r, VRAM_MANAGED, VRAM_DEVICE_OF_CONTEXT, key(VRAM_AT_ADDRESS, r ? 0 : *dptr), bytes, caller);
}

/* Stream-ordered memory. What is allocated while a stream captures may become the graph's own, which the driver
 * accounts for by itself: it is not entered, and its free is then one of an unknown address. */
static CUresult born_in_order(CUresult r, int device, const CUdeviceptr *dptr, size_t bytes, uintptr_t caller)
{
    if (r == CUDA_SUCCESS && vram_unlikely(vram_capture_active())) {
        vram_family_graph_memory();
        return r;
    }
    return born(r, VRAM_ASYNC, device, key(VRAM_AT_ADDRESS, r ? 0 : *dptr), bytes, caller);
}

#define ALLOC_ASYNC(name)                                                                                              \
    CUresult hook_##name(uintptr_t caller, CUdeviceptr *dptr, size_t bytes, CUstream stream)                           \
    {                                                                                                                  \
        int device = vram_family_device_in_order(NULL, stream);                                                        \
        CUresult r = VRAM_RESCUED(bytes, device, VRAM_DRV(name)(dptr, bytes, stream));                                 \
        return born_in_order(r, device, dptr, bytes, caller);                                                          \
    }
ALLOC_ASYNC(cuMemAllocAsync)
ALLOC_ASYNC(cuMemAllocAsync_ptsz)

#define ALLOC_FROM_POOL(name)                                                                                          \
    CUresult hook_##name(uintptr_t caller, CUdeviceptr *dptr, size_t bytes, CUmemoryPool pool, CUstream stream)        \
    {                                                                                                                  \
        int device = vram_family_device_in_order(pool, stream);                                                        \
        CUresult r = VRAM_RESCUED(bytes, device, VRAM_DRV(name)(dptr, bytes, pool, stream));                           \
        return born_in_order(r, device, dptr, bytes, caller);                                                          \
    }
ALLOC_FROM_POOL(cuMemAllocFromPoolAsync)
ALLOC_FROM_POOL(cuMemAllocFromPoolAsync_ptsz)

CUresult hook_cuMemPoolCreate(uintptr_t caller, CUmemoryPool *pool, const CUmemPoolProps *props)
{
    (void)caller;
    CUresult r = VRAM_DRV(cuMemPoolCreate)(pool, props);
    if (r == CUDA_SUCCESS && props->location.type == CU_MEM_LOCATION_TYPE_DEVICE)
        vram_pool_made(*pool, props->location.id);
    return r;
}

CUresult hook_cuMemPoolDestroy(uintptr_t caller, CUmemoryPool pool)
{
    (void)caller;
    vram_pool_end_begin(pool);
    CUresult r = VRAM_DRV(cuMemPoolDestroy)(pool);
    vram_pool_end(pool, r == CUDA_SUCCESS);
    return r;
}

/*
 * Physical memory and its mappings. Where virtual memory is kept (heap/virtual.h), many of these calls find done
 * already what they are to do; the books of the families see the same either way.
 */
CUresult hook_cuMemCreate(uintptr_t caller, CUmemGenericAllocationHandle *handle, size_t size,
                          const CUmemAllocationProp *prop, unsigned long long flags)
{
    bool on_device = prop && prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    int device = on_device ? prop->location.id : VRAM_DEVICE_OF_CONTEXT;
    CUresult r = CUDA_SUCCESS;
    if (!vram_virtual_on() || !vram_virtual_create(handle, size, prop, flags)) {
        r = VRAM_RESCUED(size, device, VRAM_DRV(cuMemCreate)(handle, size, prop, flags));
        if (r == CUDA_SUCCESS && vram_virtual_on())
            vram_virtual_created(*handle, size, prop, flags);
    }
    return born(r, on_device ? VRAM_VIRTUAL : VRAM_HOST, device, key(VRAM_BY_HANDLE, r ? 0 : *handle), size, caller);
}

static CUresult release_handle(CUmemGenericAllocationHandle handle)
{
    CUresult r;
    if (vram_virtual_on() && vram_virtual_release(handle, &r))
        return r;
    return VRAM_DRV(cuMemRelease)(handle);
}

CUresult hook_cuMemRelease(uintptr_t caller, CUmemGenericAllocationHandle handle)
{
    (void)caller;
    return GIVEN_UP(key(VRAM_BY_HANDLE, handle), release_handle(handle));
}

CUresult hook_cuMemAddressReserve(uintptr_t caller, CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr,
                                  unsigned long long flags)
{
    (void)caller;
    if (vram_virtual_on() && !addr && !flags && vram_virtual_reserve(ptr, size, alignment))
        return CUDA_SUCCESS;
    CUresult r = VRAM_DRV(cuMemAddressReserve)(ptr, size, alignment, addr, flags);
    if (r == CUDA_SUCCESS && vram_virtual_on())
        vram_virtual_reserved(*ptr, size);
    return r;
}

CUresult hook_cuMemAddressFree(uintptr_t caller, CUdeviceptr ptr, size_t size)
{
    CUresult r;
    bool taken_out = false;
    (void)caller;
    if (vram_virtual_on() && vram_virtual_free(ptr, size, &r, &taken_out))
        return r;
    r = VRAM_DRV(cuMemAddressFree)(ptr, size);
    if (r != CUDA_SUCCESS && taken_out)
        vram_virtual_not_freed(ptr, size);
    return r;
}

CUresult hook_cuMemMap(uintptr_t caller, CUdeviceptr ptr, size_t size, size_t offset,
                       CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    (void)caller;
    CUresult r = CUDA_SUCCESS;
    struct vram_holding *holding = vram_family_map_begin(handle);
    if (!vram_virtual_on() || !vram_virtual_map(ptr, size, offset, handle, flags)) {
        r = VRAM_DRV(cuMemMap)(ptr, size, offset, handle, flags);
        if (r == CUDA_SUCCESS && vram_virtual_on())
            vram_virtual_mapped(ptr, size, offset, handle);
    }
    vram_family_map_end(holding, ptr, size, r);
    return r;
}

CUresult hook_cuMemSetAccess(uintptr_t caller, CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count)
{
    (void)caller;
    if (vram_virtual_on() && vram_virtual_access(ptr, size, desc, count))
        return CUDA_SUCCESS;
    CUresult r = VRAM_DRV(cuMemSetAccess)(ptr, size, desc, count);
    if (r == CUDA_SUCCESS && vram_virtual_on())
        vram_virtual_accessed(ptr, size, desc, count);
    return r;
}

CUresult hook_cuMemUnmap(uintptr_t caller, CUdeviceptr ptr, size_t size)
{
    (void)caller;
    CUresult r = CUDA_SUCCESS;
    struct vram_name *chain = vram_family_unmap_begin(ptr, size);
    if (!vram_virtual_on() || !vram_virtual_unmap(ptr, size)) {
        r = VRAM_DRV(cuMemUnmap)(ptr, size);
        if (r == CUDA_SUCCESS && vram_virtual_on())
            vram_virtual_unmapped(ptr, size);
    }
    vram_family_unmap_end(chain, r);
    return r;
}

CUresult hook_cuMemRetainAllocationHandle(uintptr_t caller, CUmemGenericAllocationHandle *handle, void *addr)
{
    (void)caller;
    CUdeviceptr base;
    size_t size;
    bool spare = vram_virtual_on() && vram_heap_view((uintptr_t)addr, &base, &size) == VRAM_VIEW_NOTHING;
    CUresult r = VRAM_DRV(cuMemRetainAllocationHandle)(handle, spare ? (void *)(uintptr_t)VRAM_NEVER_ALLOCATED : addr);
    if (r == CUDA_SUCCESS) {
        vram_family_retained(*handle, (uintptr_t)addr);
        if (vram_virtual_on())
            vram_virtual_retained(*handle, (uintptr_t)addr);
    }
    return r;
}

/* Before the call: from its success on somebody else knows the memory, and by then it must not be kept. */
static void handle_leaves(CUmemGenericAllocationHandle handle)
{
    if (vram_virtual_on())
        vram_virtual_shared(handle);
}

CUresult hook_cuMemExportToShareableHandle(uintptr_t caller, void *shareable, CUmemGenericAllocationHandle handle,
                                           CUmemAllocationHandleType type, unsigned long long flags)
{
    (void)caller;
    handle_leaves(handle);
    return VRAM_DRV(cuMemExportToShareableHandle)(shareable, handle, type, flags);
}

CUresult hook_cuMulticastBindMem(uintptr_t caller, CUmemGenericAllocationHandle multicast, size_t multicast_offset,
                                 CUmemGenericAllocationHandle handle, size_t offset, size_t size,
                                 unsigned long long flags)
{
    (void)caller;
    handle_leaves(handle);
    return VRAM_DRV(cuMulticastBindMem)(multicast, multicast_offset, handle, offset, size, flags);
}

CUresult hook_cuMemImportFromShareableHandle(uintptr_t caller, CUmemGenericAllocationHandle *handle, void *os_handle,
                                             CUmemAllocationHandleType type)
{
    CUresult r = VRAM_DRV(cuMemImportFromShareableHandle)(handle, os_handle, type);
    /* How large it is shows when it is mapped. */
    return born(r, VRAM_IMPORTED, VRAM_DEVICE_OF_CONTEXT, key(VRAM_BY_HANDLE, r ? 0 : *handle), 0, caller);
}

/* Arrays. */
CUresult hook_cuArrayCreate_v2(uintptr_t caller, CUarray *array, const CUDA_ARRAY_DESCRIPTOR *descriptor)
{
    CUDA_ARRAY3D_DESCRIPTOR d = {0};
    if (descriptor)
        d = (CUDA_ARRAY3D_DESCRIPTOR){.Width = descriptor->Width,
                                      .Height = descriptor->Height,
                                      .Format = descriptor->Format,
                                      .NumChannels = descriptor->NumChannels};
    uint64_t bytes = vram_family_array_bytes(&d, 1);
    CUresult r = VRAM_RESCUED(bytes, VRAM_DEVICE_OF_CONTEXT, VRAM_DRV(cuArrayCreate_v2)(array, descriptor));
    return born(r, VRAM_ARRAY, VRAM_DEVICE_OF_CONTEXT, key_at(VRAM_BY_ARRAY, r ? NULL : *array), bytes, caller);
}

CUresult hook_cuArray3DCreate_v2(uintptr_t caller, CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *descriptor)
{
    uint64_t bytes = descriptor ? vram_family_array_bytes(descriptor, 1) : 0;
    CUresult r = VRAM_RESCUED(bytes, VRAM_DEVICE_OF_CONTEXT, VRAM_DRV(cuArray3DCreate_v2)(array, descriptor));
    return born(r, VRAM_ARRAY, VRAM_DEVICE_OF_CONTEXT, key_at(VRAM_BY_ARRAY, r ? NULL : *array), bytes, caller);
}

CUresult hook_cuArrayDestroy(uintptr_t caller, CUarray array)
{
    (void)caller;
    return GIVEN_UP(key_at(VRAM_BY_ARRAY, array), VRAM_DRV(cuArrayDestroy)(array));
}

CUresult hook_cuMipmappedArrayCreate(uintptr_t caller, CUmipmappedArray *array,
                                     const CUDA_ARRAY3D_DESCRIPTOR *descriptor, unsigned int levels)
{
    uint64_t bytes = descriptor ? vram_family_array_bytes(descriptor, levels) : 0;
    CUresult r =
        VRAM_RESCUED(bytes, VRAM_DEVICE_OF_CONTEXT, VRAM_DRV(cuMipmappedArrayCreate)(array, descriptor, levels));
    return born(r, VRAM_ARRAY, VRAM_DEVICE_OF_CONTEXT, key_at(VRAM_BY_ARRAY, r ? NULL : *array), bytes, caller);
}

CUresult hook_cuMipmappedArrayDestroy(uintptr_t caller, CUmipmappedArray array)
{
    (void)caller;
    return GIVEN_UP(key_at(VRAM_BY_ARRAY, array), VRAM_DRV(cuMipmappedArrayDestroy)(array));
}

/* Host memory: of what we keep, only pinned memory helps when there is none. */
static CUresult pinned(CUresult r, void *const *pp, size_t bytes, unsigned kind, uintptr_t caller)
{
    if (r == CUDA_SUCCESS) {
        vram_family_pinned(key_at(VRAM_AT_HOST, *pp), bytes, kind, caller);
        vram_control_start();
    }
    return r;
}

CUresult hook_cuMemAllocHost_v2(uintptr_t caller, void **pp, size_t bytes)
{
    void *kept = pp ? vram_host_take(vram_life_context(), bytes, VRAM_HOST_PLAIN) : NULL;
    CUresult r = CUDA_SUCCESS;
    if (kept)
        *pp = kept;
    else
        r = VRAM_DRV(cuMemAllocHost_v2)(pp, bytes);
    if (vram_unlikely(r == CUDA_ERROR_OUT_OF_MEMORY) && vram_host_trim(NULL))
        r = VRAM_DRV(cuMemAllocHost_v2)(pp, bytes);
    return pinned(r, pp, bytes, VRAM_HOST_PLAIN, caller);
}

CUresult hook_cuMemHostAlloc(uintptr_t caller, void **pp, size_t bytes, unsigned int flags)
{
    void *kept = pp && flags < VRAM_HOST_PLAIN ? vram_host_take(vram_life_context(), bytes, flags) : NULL;
    CUresult r = CUDA_SUCCESS;
    if (kept)
        *pp = kept;
    else
        r = VRAM_DRV(cuMemHostAlloc)(pp, bytes, flags);
    if (vram_unlikely(r == CUDA_ERROR_OUT_OF_MEMORY) && vram_host_trim(NULL))
        r = VRAM_DRV(cuMemHostAlloc)(pp, bytes, flags);
    return pinned(r, pp, bytes, flags, caller);
}

/* What is kept is free to the program: the driver is asked about an address that it never gave, as in hooks_memory.c.
 */
static void *host_as_native(void *p)
{
    return vram_heap_host_is_kept(p) ? (void *)(uintptr_t)VRAM_NEVER_ALLOCATED : p;
}

CUresult hook_cuMemFreeHost(uintptr_t caller, void *p)
{
    (void)caller;
    if (vram_host_keep(p))
        return CUDA_SUCCESS;
    p = host_as_native(p);
    return GIVEN_UP(key_at(VRAM_AT_HOST, p), VRAM_DRV(cuMemFreeHost)(p));
}

CUresult hook_cuMemHostGetFlags(uintptr_t caller, unsigned int *flags, void *p)
{
    (void)caller;
    return VRAM_DRV(cuMemHostGetFlags)(flags, host_as_native(p));
}

CUresult hook_cuMemHostGetDevicePointer_v2(uintptr_t caller, CUdeviceptr *dptr, void *p, unsigned int flags)
{
    (void)caller;
    return VRAM_DRV(cuMemHostGetDevicePointer_v2)(dptr, host_as_native(p), flags);
}

CUresult hook_cuMemHostRegister(uintptr_t caller, void *p, size_t bytes, unsigned int flags)
{
    return born(VRAM_DRV(cuMemHostRegister)(p, bytes, flags), VRAM_REGISTERED, VRAM_DEVICE_OF_CONTEXT,
                key_at(VRAM_AT_HOST, p), bytes, caller);
}

CUresult hook_cuMemHostRegister_v2(uintptr_t caller, void *p, size_t bytes, unsigned int flags)
{
    return born(VRAM_DRV(cuMemHostRegister_v2)(p, bytes, flags), VRAM_REGISTERED, VRAM_DEVICE_OF_CONTEXT,
                key_at(VRAM_AT_HOST, p), bytes, caller);
}

CUresult hook_cuMemHostUnregister(uintptr_t caller, void *p)
{
    (void)caller;
    return GIVEN_UP(key_at(VRAM_AT_HOST, p), VRAM_DRV(cuMemHostUnregister)(p));
}

/* What belongs to others. */
static CUresult opened(CUresult r, const CUdeviceptr *dptr, uintptr_t caller)
{
    CUdeviceptr base;
    size_t size = 0;
    if (r != CUDA_SUCCESS)
        return r;
    if (vram_gate_enter()) { /* the handle does not say how large it is */
        if (!vram_driver()->cuMemGetAddressRange_v2 ||
            VRAM_DRV(cuMemGetAddressRange_v2)(&base, &size, *dptr) != CUDA_SUCCESS)
            size = 0;
        vram_gate_leave();
    }
    return born(r, VRAM_IPC, VRAM_DEVICE_OF_CONTEXT, key(VRAM_AT_ADDRESS, *dptr), size, caller);
}

CUresult hook_cuIpcOpenMemHandle(uintptr_t caller, CUdeviceptr *dptr, CUipcMemHandle handle, unsigned int flags)
{
    return opened(VRAM_DRV(cuIpcOpenMemHandle)(dptr, handle, flags), dptr, caller);
}

CUresult hook_cuIpcOpenMemHandle_v2(uintptr_t caller, CUdeviceptr *dptr, CUipcMemHandle handle, unsigned int flags)
{
    return opened(VRAM_DRV(cuIpcOpenMemHandle_v2)(dptr, handle, flags), dptr, caller);
}

CUresult hook_cuIpcCloseMemHandle(uintptr_t caller, CUdeviceptr dptr)
{
    (void)caller;
    return GIVEN_UP(key(VRAM_AT_ADDRESS, dptr), VRAM_DRV(cuIpcCloseMemHandle)(dptr));
}

CUresult hook_cuImportExternalMemory(uintptr_t caller, CUexternalMemory *memory,
                                     const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *descriptor)
{
    CUresult r = VRAM_DRV(cuImportExternalMemory)(memory, descriptor);
    return born(r, VRAM_EXTERNAL, VRAM_DEVICE_OF_CONTEXT, key_at(VRAM_BY_EXTERNAL, r ? NULL : *memory),
                r ? 0 : descriptor->size, caller);
}

CUresult hook_cuDestroyExternalMemory(uintptr_t caller, CUexternalMemory memory)
{
    (void)caller;
    return GIVEN_UP(key_at(VRAM_BY_EXTERNAL, memory), VRAM_DRV(cuDestroyExternalMemory)(memory));
}

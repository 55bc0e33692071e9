/* What can be asked about an address: ranges, attributes, exports. The answers are as measured. */
#include "context.h"
#include "entry.h"
#include "memory.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

CUresult do_cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr dptr)
{
    if (!base && !size)
        return CUDA_SUCCESS;
    struct sim_block *b = sim_memory_find(dptr);
    if (base)
        *base = b ? b->address : 0; /* written for an unknown address, too */
    if (size)
        *size = b ? b->size : 0;
    return b ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult do_cuMemGetAddressRange(CUdeviceptr_v1 *base, unsigned int *size, CUdeviceptr_v1 dptr)
{
    CUdeviceptr b;
    size_t s;
    CUresult r = do_cuMemGetAddressRange_v2(&b, &s, dptr);
    if (base)
        *base = (CUdeviceptr_v1)b;
    if (size)
        *size = (unsigned int)s;
    return r;
}

static void put(void *data, const void *value, size_t size)
{
    memcpy(data, value, size);
}

static void put_int(void *data, int value)
{
    put(data, &value, sizeof value);
}

static void put_word(void *data, uint64_t value)
{
    put(data, &value, sizeof value);
}

/* For a known address. False: this attribute has no value here. */
static bool known(void *data, CUpointer_attribute attribute, uint64_t ptr, const struct sim_block *b)
{
    bool host = b->kind == MEMORY_HOST || b->kind == MEMORY_REGISTERED;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        put(data, &b->ctx, sizeof b->ctx);
        return true;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        put_int(data, host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE);
        return true;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        put_word(data, ptr);
        return true;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        if (!host && b->kind != MEMORY_MANAGED)
            return false;
        put_word(data, ptr);
        return true;
    case CU_POINTER_ATTRIBUTE_P2P_TOKENS:
        if (host)
            return false;
        memset(data, 0, 12);
        return true;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
        put_int(data, 1); /* set or not: measured */
        return true;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        put_word(data, b->buffer_id);
        return true;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        put_int(data, b->kind == MEMORY_MANAGED);
        return true;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        put_int(data, b->device);
        return true;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
        put_int(data, b->kind == MEMORY_DEVICE);
        return true;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        put_word(data, b->address);
        return true;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        put_word(data, b->size);
        return true;
    case CU_POINTER_ATTRIBUTE_MAPPED:
        put_int(data, 1);
        return true;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        put_word(data, attribute == CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE ? (uint64_t)(uintptr_t)b->pool : 0);
        return true;
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
        put_int(data, b->no_access ? 0 : 3);
        return true;
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
        put_word(data, b->map_size);
        return true;
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
        put_word(data, b->map_address);
        return true;
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
        put_word(data, b->map_address / SIM_PAGE);
        return true;
    }
    return false;
}

/* cuPointerGetAttributes answers for an address that is unknown; what it does not write stays. */
static void unknown(void *data, CUpointer_attribute attribute, uint64_t ptr)
{
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        put_word(data, ptr);
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        put_int(data, -2);
        break;
    case CU_POINTER_ATTRIBUTE_P2P_TOKENS:
        memset(data, 0, 12);
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
        break;
    case CU_POINTER_ATTRIBUTE_CONTEXT:
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
        put_word(data, 0);
        break;
    default:
        put_int(data, 0);
    }
}

CUresult do_cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr ptr)
{
    struct sim_block *b = sim_memory_find(ptr);
    return data && b && known(data, attribute, ptr, b) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult do_cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **data, CUdeviceptr ptr)
{
    struct sim_block *b = sim_memory_find(ptr);
    if (!count || !attributes || !data)
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned int i = 0; i < count; i++)
        if (attributes[i] < 1 || attributes[i] > CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID || !data[i])
            return CUDA_ERROR_INVALID_VALUE;
    for (unsigned int i = 0; i < count; i++) {
        if (!b)
            unknown(data[i], attributes[i], ptr);
        else if (!known(data[i], attributes[i], ptr, b))
            put_word(data[i], 0); /* the host pointer of device memory: an error alone, 0 among others (measured) */
    }
    return CUDA_SUCCESS;
}

CUresult do_cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr ptr)
{
    struct sim_block *b = sim_memory_find(ptr);
    if (!value || !b || attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS)
        return CUDA_ERROR_INVALID_VALUE;
    b->sync_memops = *(const int *)value != 0;
    return CUDA_SUCCESS;
}

/* What a handle says. The buffer's number makes it differ after a free and a new allocation at the address. */
struct ipc {
    uint64_t magic, owner[3]; /* process, address, number */
    uint64_t size;
};
#define IPC_MAGIC 0x76726d7368696d75

CUresult do_cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr dptr)
{
    struct sim_block *b = sim_memory_find(dptr);
    if (!handle || !b || b->kind != MEMORY_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
    struct ipc content = {IPC_MAGIC, {(uint64_t)getpid(), b->address, b->buffer_id}, b->size};
    memset(handle, 0, sizeof *handle);
    memcpy(handle->reserved, &content, sizeof content);
    return CUDA_SUCCESS;
}

/* The context's, opened before; a context opens a block once, and closes it as often as it was asked (documented). */
static struct sim_block *opened(CUcontext ctx, const struct ipc *content)
{
    struct sim_block *b = ctx->blocks;
    while (b && (b->kind != MEMORY_IPC || memcmp(b->owner, content->owner, sizeof b->owner)))
        b = b->next;
    return b;
}

/* The devices of two processes are separate: what is opened has the right size, and bytes of its own. */
CUresult do_cuIpcOpenMemHandle_v2(CUdeviceptr *dptr, CUipcMemHandle handle, unsigned int flags)
{
    struct ipc content;
    CUcontext ctx = sim_context_current();
    memcpy(&content, handle.reserved, sizeof content);
    if (!dptr || flags > 1 || content.magic != IPC_MAGIC)
        return CUDA_ERROR_INVALID_VALUE;
    if (content.owner[0] == (uint64_t)getpid())
        return CUDA_ERROR_INVALID_CONTEXT;
    struct sim_block *b = opened(ctx, &content);
    if (!b) {
        size_t size = (content.size + SIM_PAGE - 1) / SIM_PAGE * SIM_PAGE;
        void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED)
            return CUDA_ERROR_OUT_OF_MEMORY;
        b = sim_memory_adopt(ctx, (uint64_t)(uintptr_t)p, content.size, MEMORY_IPC);
        b->map_size = size;
        memcpy(b->owner, content.owner, sizeof b->owner);
    }
    b->opened++;
    *dptr = b->address;
    return CUDA_SUCCESS;
}

CUresult do_cuIpcOpenMemHandle(CUdeviceptr *dptr, CUipcMemHandle handle, unsigned int flags)
{
    return do_cuIpcOpenMemHandle_v2(dptr, handle, flags);
}

CUresult do_cuIpcCloseMemHandle(CUdeviceptr dptr)
{
    struct sim_block *b = sim_memory_find(dptr);
    if (!b || b->kind != MEMORY_IPC || b->address != dptr)
        return CUDA_ERROR_INVALID_VALUE;
    return --b->opened ? CUDA_SUCCESS : sim_memory_retire(b);
}

CUresult do_cuMemGetHandleForAddressRange(void *handle, CUdeviceptr dptr, size_t size, CUmemRangeHandleType type,
                                          unsigned long long flags)
{
    const uint64_t page = 4096;
    struct sim_block *b = sim_memory_find(dptr);
    if (!handle || !b || type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD || flags > 1 || dptr % page || !size ||
        size % page || dptr + size > b->map_address + b->map_size)
        return CUDA_ERROR_INVALID_VALUE;
    put_int(handle, open("/dev/null", O_RDWR | O_CLOEXEC)); /* a descriptor that the program may close */
    return CUDA_SUCCESS;
}

/*
 * Virtual memory management: reserved addresses, physical handles, mappings. A handle is a stretch of one memory file
 * of its device, so that two mappings of it show the same bytes and a mapping that is gone leaves them alone.
 */
#include "context.h"
#include "entry.h"
#include "judge.h"
#include "memory.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

struct vmm_handle {
    int device;
    size_t size;
    off_t offset;            /* in the device's file */
    unsigned int references; /* by the program and by mappings */
    unsigned int held;       /* by the program alone */
    struct vmm_handle *next; /* of the device, by rising offset */
};
static struct vmm_handle *handles[SIM_MAX_DEVICES];
static int files[SIM_MAX_DEVICES]; /* descriptor + 1 */

static struct reservation {
    uint64_t address;
    size_t size;
    void *base; /* of the host mapping, which is larger by the alignment */
    size_t base_size;
    struct reservation *next;
} * reservations;

static bool valid(const CUmemAllocationProp *p)
{
    return p && p->type == CU_MEM_ALLOCATION_TYPE_PINNED && p->location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
           p->location.id >= 0 && p->location.id < sim.config.devices;
}

CUresult do_cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                          CUmemAllocationGranularity_flags option)
{
    if (!granularity || !valid(prop) || option > CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)
        return CUDA_ERROR_INVALID_VALUE;
    *granularity = SIM_PAGE;
    return CUDA_SUCCESS;
}

CUresult do_cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr,
                                unsigned long long flags)
{
    (void)addr; /* a wish, not an order */
    if (!ptr || !size || size % SIM_PAGE || flags || (alignment & (alignment - 1)))
        return CUDA_ERROR_INVALID_VALUE;
    if (alignment < SIM_PAGE)
        alignment = SIM_PAGE;
    if (size > SIZE_MAX - alignment)
        return CUDA_ERROR_OUT_OF_MEMORY;
    void *p = mmap(NULL, size + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct reservation *r = sim_xcalloc(sizeof *r);
    *r = (struct reservation){.size = size, .base = p, .base_size = size + alignment, .next = reservations};
    r->address = ((uint64_t)(uintptr_t)p + alignment - 1) & ~(uint64_t)(alignment - 1);
    reservations = r;
    *ptr = r->address;
    return CUDA_SUCCESS;
}

static bool mapped_in(uint64_t low, uint64_t high)
{
    for (uint64_t a = low; a < high; a += SIM_PAGE)
        if (sim_memory_find(a))
            return true;
    return false;
}

CUresult do_cuMemAddressFree(CUdeviceptr ptr, size_t size)
{
    for (struct reservation **at = &reservations; *at; at = &(*at)->next) {
        struct reservation *r = *at;
        if (r->address != ptr || r->size != size)
            continue;
        if (mapped_in(ptr, ptr + size))
            return CUDA_ERROR_INVALID_VALUE;
        *at = r->next;
        munmap(r->base, r->base_size);
        free(r);
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

static struct vmm_handle *handle_of(CUmemGenericAllocationHandle handle)
{
    void *p = (void *)(uintptr_t)handle;
    return sim_handle_is(p, HANDLE_MEMORY) ? p : NULL;
}

CUresult do_cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                        unsigned long long flags)
{
    if (!handle || !size || size % SIM_PAGE || !valid(prop) || flags)
        return CUDA_ERROR_INVALID_VALUE;
    int device = prop->location.id;
    if (!files[device]) {
        int fd = memfd_create("simdriver", MFD_CLOEXEC);
        /* Larger than the device: holes between handles must not refuse what fits. The file is sparse. */
        if (fd < 0 || ftruncate(fd, (off_t)(sim.config.capacity * 4)))
            return CUDA_ERROR_OUT_OF_MEMORY;
        files[device] = fd + 1;
    }
    CUresult r = sim_memory_take(device, size);
    if (r)
        return r;
    off_t offset = 0;
    struct vmm_handle **at = &handles[device];
    for (; *at && (size_t)((*at)->offset - offset) < size; at = &(*at)->next)
        offset = (*at)->offset + (off_t)(*at)->size;
    struct vmm_handle *h = sim_xcalloc(sizeof *h);
    *h = (struct vmm_handle){.device = device, .size = size, .offset = offset, .references = 1, .held = 1, .next = *at};
    *at = h;
    sim_handle_add(h, HANDLE_MEMORY);
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)h;
    return CUDA_SUCCESS;
}

static void unreference(struct vmm_handle *h)
{
    if (--h->references)
        return;
    struct vmm_handle **at = &handles[h->device];
    while (*at != h)
        at = &(*at)->next;
    *at = h->next;
    fallocate(files[h->device] - 1, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, h->offset, (off_t)h->size);
    sim_memory_give(h->device, h->size);
    sim_handle_remove(h);
    free(h);
}

CUresult do_cuMemRelease(CUmemGenericAllocationHandle handle)
{
    struct vmm_handle *h = handle_of(handle);
    if (!h || !h->held)
        return CUDA_ERROR_INVALID_VALUE;
    h->held--;
    unreference(h);
    return CUDA_SUCCESS;
}

CUresult do_cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                     unsigned long long flags)
{
    struct vmm_handle *h = handle_of(handle);
    struct reservation *r = reservations;
    while (r && (ptr < r->address || ptr + size > r->address + r->size))
        r = r->next;
    if (!h || !r || !size || flags || ptr % SIM_PAGE || size % SIM_PAGE || offset || size > h->size ||
        mapped_in(ptr, ptr + size))
        return CUDA_ERROR_INVALID_VALUE;
    void *p = mmap((void *)(uintptr_t)ptr, size, PROT_NONE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE,
                   files[h->device] - 1, h->offset);
    if (p == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct sim_block *b = sim_memory_adopt(NULL, ptr, size, MEMORY_MAPPED);
    b->device = h->device;
    b->no_access = true;
    b->handle = h;
    h->references++;
    return CUDA_SUCCESS;
}

/* Every mapping in [ptr, ptr + size), which they must fill exactly; 0 when they do. */
static CUresult each_mapping(CUdeviceptr ptr, size_t size, void (*visit)(struct sim_block *))
{
    uint64_t end = ptr + size;
    if (!size)
        return CUDA_ERROR_INVALID_VALUE;
    for (uint64_t a = ptr; a < end;) {
        struct sim_block *b = sim_memory_find(a);
        if (!b || b->kind != MEMORY_MAPPED || b->address != a || a + b->size > end)
            return CUDA_ERROR_INVALID_VALUE;
        a += b->size;
    }
    for (uint64_t a = ptr; a < end;) {
        struct sim_block *b = sim_memory_find(a);
        a += b->size;
        visit(b);
    }
    return CUDA_SUCCESS;
}

/* Does not wait for work that runs (measured): work that still uses the range is a hazard of its own. */
static void unmap(struct sim_block *b)
{
    mmap((void *)(uintptr_t)b->address, b->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
         0);
    sim_judge_release(b->address, b->address + b->size, true);
    struct vmm_handle *h = b->handle;
    sim_memory_hide(b);
    sim_memory_release(b);
    unreference(h);
}

CUresult do_cuMemUnmap(CUdeviceptr ptr, size_t size)
{
    return each_mapping(ptr, size, unmap);
}

static void allow(struct sim_block *b)
{
    b->no_access = mprotect((void *)(uintptr_t)b->address, b->size, PROT_READ | PROT_WRITE) != 0;
}

static void forbid(struct sim_block *b)
{
    b->no_access = true;
    mprotect((void *)(uintptr_t)b->address, b->size, PROT_NONE);
}

CUresult do_cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count)
{
    if (!desc || !count)
        return CUDA_ERROR_INVALID_VALUE;
    return each_mapping(ptr, size, desc[0].flags == CU_MEM_ACCESS_FLAGS_PROT_NONE ? forbid : allow);
}

CUresult do_cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr)
{
    struct sim_block *b = sim_memory_find((uint64_t)(uintptr_t)addr);
    if (!handle || !b || b->kind != MEMORY_MAPPED)
        return CUDA_ERROR_INVALID_VALUE;
    b->handle->references++;
    b->handle->held++;
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)b->handle;
    return CUDA_SUCCESS;
}

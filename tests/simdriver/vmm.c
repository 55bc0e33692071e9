/*
 * Virtual memory management: reserved addresses, physical memory, handles, mappings. Memory is a stretch of one memory
 * file of its device, so that two mappings of it show the same bytes and a mapping that is gone leaves them alone.
 * Memory that can be shared is a memory file of its own, whose last page says what it is: another process that gets a
 * descriptor of it can map it.
 */
#include "vmm.h"

#include "context.h"
#include "entry.h"
#include "judge.h"
#include "memory.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct vmm_memory {
    int device;
    size_t size;
    CUmemAllocationProp prop;
    int fd;
    off_t offset; /* in the device's file; 0 in a file of its own */
    bool own_file;
    bool imported;           /* another process has it: it does not count here */
    bool exported;           /* some descriptor that was given out may still be open */
    unsigned int references; /* handles + exported */
    struct vmm_memory *next; /* of the device, by rising offset; or of those with a file of their own */
};
static struct vmm_memory *memories[SIM_MAX_DEVICES], *shareable;
static int files[SIM_MAX_DEVICES]; /* descriptor + 1 */

struct vmm_handle {
    struct vmm_memory *memory;
    unsigned int references; /* by the program and by mappings */
    unsigned int held;       /* by the program alone */
};

/* The last page of a file of its own. */
#define TAIL 4096
struct tail {
    char magic[16];
    int device;
    CUmemAllocationProp prop;
};
static const char magic[16] = "simdriver memory";

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

/* A file of its own, with its tail. */
static int shareable_file(const struct vmm_memory *m)
{
    struct tail tail = {.device = m->device, .prop = m->prop};
    memcpy(tail.magic, magic, sizeof tail.magic);
    int fd = memfd_create("simdriver", MFD_CLOEXEC);
    if (fd >= 0 && (ftruncate(fd, (off_t)(m->size + TAIL)) ||
                    pwrite(fd, &tail, sizeof tail, (off_t)m->size) != (ssize_t)sizeof tail)) {
        close(fd);
        fd = -1;
    }
    return fd;
}

static int device_file(int device)
{
    if (!files[device]) {
        int fd = memfd_create("simdriver", MFD_CLOEXEC);
        /* Larger than the device: holes between handles must not refuse what fits. The file is sparse. */
        if (fd < 0 || ftruncate(fd, (off_t)(sim.config.capacity * 4)))
            return -1;
        files[device] = fd + 1;
    }
    return files[device] - 1;
}

static CUmemGenericAllocationHandle handle_create(struct vmm_memory *m)
{
    struct vmm_handle *h = sim_xcalloc(sizeof *h);
    *h = (struct vmm_handle){.memory = m, .references = 1, .held = 1};
    m->references++;
    sim_handle_add(h, HANDLE_MEMORY);
    return (CUmemGenericAllocationHandle)(uintptr_t)h;
}

CUresult do_cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                        unsigned long long flags)
{
    if (!handle || !size || size % SIM_PAGE || !valid(prop) || flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (prop->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED;
    struct vmm_memory new = {.device = prop->location.id, .size = size, .prop = *prop}, **at = &memories[new.device];
    CUresult r = sim_memory_take(new.device, size);
    if (r)
        return r;
    new.own_file = prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    new.fd = new.own_file ? shareable_file(&new) : device_file(new.device);
    if (new.fd < 0) {
        sim_memory_give(new.device, size);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (new.own_file)
        at = &shareable;
    else
        for (; *at && (size_t)((*at)->offset - new.offset) < size; at = &(*at)->next)
            new.offset = (*at)->offset + (off_t)(*at)->size;
    struct vmm_memory *m = sim_xcalloc(sizeof *m);
    new.next = *at;
    *m = new;
    *at = m;
    *handle = handle_create(m);
    return CUDA_SUCCESS;
}

static void unreference_memory(struct vmm_memory *m)
{
    if (--m->references)
        return;
    struct vmm_memory **at = m->own_file ? &shareable : &memories[m->device];
    while (*at != m)
        at = &(*at)->next;
    *at = m->next;
    if (m->own_file)
        close(m->fd);
    else
        fallocate(m->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, m->offset, (off_t)m->size);
    if (!m->imported)
        sim_memory_give(m->device, m->size);
    free(m);
}

static void unreference(struct vmm_handle *h)
{
    if (--h->references)
        return;
    struct vmm_memory *m = h->memory;
    sim_handle_remove(h);
    free(h);
    unreference_memory(m);
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
    if (!h || !r || !size || flags || ptr % SIM_PAGE || size % SIM_PAGE || offset || size > h->memory->size ||
        mapped_in(ptr, ptr + size))
        return CUDA_ERROR_INVALID_VALUE;
    void *p = mmap((void *)(uintptr_t)ptr, size, PROT_NONE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, h->memory->fd,
                   h->memory->offset);
    if (p == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct sim_block *b = sim_memory_adopt(NULL, ptr, size, MEMORY_MAPPED);
    b->device = h->memory->device;
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

CUresult do_cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)
{
    struct vmm_handle *h = handle_of(handle);
    if (!prop || !h)
        return CUDA_ERROR_INVALID_VALUE;
    *prop = h->memory->prop;
    return CUDA_SUCCESS;
}

/*
 * A descriptor given out keeps the memory, wherever it goes: in this process, in another, in a message between them.
 * The kernel knows when the last one is closed: each carries a lock that ends with it.
 */
CUresult do_cuMemExportToShareableHandle(void *shareable_handle, CUmemGenericAllocationHandle handle,
                                         CUmemAllocationHandleType type, unsigned long long flags)
{
    struct vmm_handle *h = handle_of(handle);
    if (!shareable_handle || !h || flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (!(h->memory->prop.requestedHandleTypes & type))
        return CUDA_ERROR_INVALID_VALUE;
    char path[40];
    snprintf(path, sizeof path, "/proc/self/fd/%d", h->memory->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC); /* a description of its own, as a duplicate would not have */
    if (fd < 0)
        return CUDA_ERROR_NOT_SUPPORTED;
    flock(fd, LOCK_SH);
    if (!h->memory->exported) {
        h->memory->exported = true;
        h->memory->references++;
    }
    memcpy(shareable_handle, &fd, sizeof fd);
    return CUDA_SUCCESS;
}

void sim_vmm_reclaim(void)
{
    for (struct vmm_memory *m = shareable, *next; m; m = next) {
        next = m->next;
        if (!m->exported || m->imported || flock(m->fd, LOCK_EX | LOCK_NB))
            continue;
        flock(m->fd, LOCK_UN);
        m->exported = false;
        unreference_memory(m);
    }
}

/* Memory of another process, by a descriptor that came from there. */
static struct vmm_memory *adopt(int fd, const struct stat *st)
{
    struct tail tail;
    off_t size = st->st_size - TAIL;
    if (size <= 0 || pread(fd, &tail, sizeof tail, size) != (ssize_t)sizeof tail ||
        memcmp(tail.magic, magic, sizeof magic) || tail.device < 0 || tail.device >= sim.config.devices)
        return NULL;
    struct vmm_memory *m = sim_xcalloc(sizeof *m);
    *m = (struct vmm_memory){.device = tail.device,
                             .size = (size_t)size,
                             .prop = tail.prop,
                             .fd = fcntl(fd, F_DUPFD_CLOEXEC, 0), /* and so with the lock: the owner waits for us */
                             .own_file = true,
                             .imported = true,
                             .next = shareable};
    shareable = m;
    return m;
}

CUresult do_cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *os_handle,
                                           CUmemAllocationHandleType type)
{
    struct stat st, own;
    int fd = (int)(intptr_t)os_handle;
    if (!handle)
        return CUDA_ERROR_INVALID_VALUE;
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (fstat(fd, &st) || !S_ISREG(st.st_mode))
        return CUDA_ERROR_INVALID_VALUE;
    struct vmm_memory *m = shareable;
    while (m && (fstat(m->fd, &own) || own.st_dev != st.st_dev || own.st_ino != st.st_ino))
        m = m->next;
    if (!m && !(m = adopt(fd, &st)))
        return CUDA_ERROR_INVALID_VALUE;
    *handle = handle_create(m);
    return CUDA_SUCCESS;
}

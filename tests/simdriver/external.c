/*
 * Memory of another API (Vulkan, OpenGL), imported by descriptor. It is that API's memory: nothing here counts. A
 * buffer shows the file's content if the descriptor is of a file that holds as much, and else memory that only we see.
 */
#include "context.h"
#include "entry.h"
#include "memory.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define DEDICATED 1u /* CUDA_EXTERNAL_MEMORY_DEDICATED */
#define HOST_PAGE ((uint64_t)4096)

struct CUextMemory_st {
    int fd; /* ours since the import (documented) */
    uint64_t size;
};

CUresult do_cuImportExternalMemory(CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *d)
{
    if (!memory || !d || (int)d->type < 1 || (int)d->type > 9)
        return CUDA_ERROR_INVALID_VALUE;
    if (d->type != CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (!d->size || d->flags & ~DEDICATED || fcntl(d->handle.fd, F_GETFD) < 0)
        return CUDA_ERROR_INVALID_VALUE;
    CUexternalMemory m = sim_xcalloc(sizeof *m);
    *m = (struct CUextMemory_st){.fd = d->handle.fd, .size = d->size};
    sim_handle_add(m, HANDLE_EXTERNAL);
    *memory = m;
    return CUDA_SUCCESS;
}

CUresult do_cuExternalMemoryGetMappedBuffer(CUdeviceptr *ptr, CUexternalMemory m,
                                            const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *d)
{
    struct stat st;
    if (!ptr || !d)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_handle_is(m, HANDLE_EXTERNAL))
        return CUDA_ERROR_INVALID_HANDLE;
    if (d->flags || !d->size || d->offset > m->size || d->size > m->size - d->offset)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t before = d->offset % HOST_PAGE;
    size_t size = (d->size + before + HOST_PAGE - 1) / HOST_PAGE * HOST_PAGE;
    bool shown = !fstat(m->fd, &st) && S_ISREG(st.st_mode) && (uint64_t)st.st_size >= d->offset + d->size;
    void *p = MAP_FAILED;
    if (shown)
        p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, m->fd, (off_t)(d->offset - before));
    if (p == MAP_FAILED)
        p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    uint64_t address = (uint64_t)(uintptr_t)p;
    struct sim_block *b = sim_memory_adopt(sim_context_current(), address + before, d->size, MEMORY_EXTERNAL);
    b->map_address = address;
    b->map_size = size;
    *ptr = b->address;
    return CUDA_SUCCESS;
}

/* Its buffers stay, for cuMemFree (documented). */
CUresult do_cuDestroyExternalMemory(CUexternalMemory m)
{
    if (!sim_handle_is(m, HANDLE_EXTERNAL))
        return CUDA_ERROR_INVALID_HANDLE;
    sim_handle_remove(m);
    close(m->fd);
    free(m);
    return CUDA_SUCCESS;
}

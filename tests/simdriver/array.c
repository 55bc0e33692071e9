#include "array.h"

#include "context.h"
#include "entry.h"
#include "memory.h"

#include <stdlib.h>

/* Extents that the documentation allows a device of compute capability 9.0. */
#define MAX_WIDTH 131072
#define MAX_HEIGHT 65536
#define MAX_DEPTH 16384

/* Behind CUarray and CUmipmappedArray alike. */
struct array {
    CUcontext ctx;
    struct sim_block *block; /* NULL: its memory is for the program to map */
    struct array *next;
};
static struct array *arrays;

static size_t element_size(CUarray_format format)
{
    switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
        return 1;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
        return 2;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT:
        return 4;
    }
    return 0;
}

static bool valid(const CUDA_ARRAY3D_DESCRIPTOR *d)
{
    bool layered = d->Flags & CUDA_ARRAY3D_LAYERED;
    if (!element_size(d->Format) || (d->NumChannels != 1 && d->NumChannels != 2 && d->NumChannels != 4))
        return false;
    if (!d->Width || d->Width > MAX_WIDTH || d->Height > MAX_HEIGHT || d->Depth > MAX_DEPTH)
        return false;
    if (d->Flags & CUDA_ARRAY3D_CUBEMAP)
        return d->Width == d->Height && (layered ? d->Depth && d->Depth % 6 == 0 : d->Depth == 6);
    return layered ? d->Depth != 0 : d->Height || !d->Depth;
}

static size_t or_1(size_t n)
{
    return n ? n : 1;
}

/* Bytes of all levels. The extents are bounded: nothing overflows. */
static size_t size_of(const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned int levels)
{
    bool layers = d->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP);
    size_t width = d->Width, height = or_1(d->Height), depth = or_1(d->Depth), size = 0;
    for (unsigned int i = 0; i < levels; i++) {
        size += width * height * depth * d->NumChannels * element_size(d->Format);
        if (width == 1 && height == 1 && (layers || depth == 1))
            break; /* more levels than the extents have are not made (documented) */
        width = or_1(width / 2);
        height = or_1(height / 2);
        depth = layers ? depth : or_1(depth / 2);
    }
    return size;
}

static CUresult create(const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned int levels, enum sim_handle kind, struct array **ret)
{
    CUcontext ctx = sim_context_current();
    struct sim_block *b = NULL;
    if (!valid(d))
        return CUDA_ERROR_INVALID_VALUE;
    if (!(d->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING))) {
        CUresult r = sim_memory_alloc(ctx, size_of(d, levels), MEMORY_ARRAY, false, &b);
        if (r)
            return r;
    }
    struct array *a = sim_xcalloc(sizeof *a);
    *a = (struct array){.ctx = ctx, .block = b, .next = arrays};
    arrays = a;
    sim_handle_add(a, kind);
    *ret = a;
    return CUDA_SUCCESS;
}

static void forget(struct array **at)
{
    struct array *a = *at;
    *at = a->next;
    sim_handle_remove(a);
    free(a);
}

static CUresult destroy(struct array *a, enum sim_handle kind)
{
    CUcontext current = sim_context_current();
    if (current && current->alive && current->error)
        return current->error;
    if (!sim_handle_is(a, kind))
        return CUDA_ERROR_INVALID_HANDLE;
    struct sim_block *b = a->block;
    struct array **at = &arrays;
    if (a->ctx->error)
        return a->ctx->error;
    while (*at != a)
        at = &(*at)->next;
    forget(at); /* before the wait gives the lock up, as in sim_memory_retire */
    return b ? sim_memory_retire(b) : CUDA_SUCCESS;
}

void sim_array_end_context(CUcontext ctx)
{
    for (struct array **at = &arrays; *at;)
        if ((*at)->ctx == ctx)
            forget(at);
        else
            at = &(*at)->next;
}

CUresult do_cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *descriptor)
{
    struct array *a;
    CUresult r = array && descriptor ? create(descriptor, 1, HANDLE_ARRAY, &a) : CUDA_ERROR_INVALID_VALUE;
    if (!r)
        *array = (CUarray)(void *)a;
    return r;
}

CUresult do_cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *d)
{
    if (!d)
        return CUDA_ERROR_INVALID_VALUE;
    CUDA_ARRAY3D_DESCRIPTOR full = {
        .Width = d->Width, .Height = d->Height, .Format = d->Format, .NumChannels = d->NumChannels};
    return do_cuArray3DCreate_v2(array, &full);
}

CUresult do_cuArrayDestroy(CUarray array)
{
    return destroy((void *)array, HANDLE_ARRAY);
}

CUresult do_cuMipmappedArrayCreate(CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *descriptor,
                                   unsigned int levels)
{
    struct array *a;
    CUresult r =
        array && descriptor ? create(descriptor, levels ? levels : 1, HANDLE_MIPMAPPED, &a) : CUDA_ERROR_INVALID_VALUE;
    if (!r)
        *array = (CUmipmappedArray)(void *)a;
    return r;
}

CUresult do_cuMipmappedArrayDestroy(CUmipmappedArray array)
{
    return destroy((void *)array, HANDLE_MIPMAPPED);
}

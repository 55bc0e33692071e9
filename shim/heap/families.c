#include "heap/families.h"

#include <stdatomic.h>

#include "base/compiler.h"
#include "base/lock.h"
#include "base/say.h"
#include "config/options.h"
#include "driver/capture.h"
#include "driver/driver.h"
#include "heap/heap.h"
#include "heap/life.h"
#include "heap/pools.h"
#include "heap/view.h"

bool vram_family_may_rescue(void)
{
    return vram_options->cache && vram_heap_used() && !vram_capture_active() && !vram_heap_is_exiting();
}

/* Opened a second time: the driver gives the same name, and wants it closed as often. */
static bool opened_before(enum vram_family family, struct vram_key key)
{
    struct vram_name *n = vram_holding_find(&vram_heap.holdings, key);
    if (!n || vram_family_traits[family].where != VRAM_WHERE_FOREIGN)
        return false;
    n->references++;
    return true;
}

static void enter(enum vram_family family, int device, struct vram_key key, uint64_t bytes, uint32_t kind, uintptr_t caller)
{
    struct vram_site site = vram_site_here(caller);
    CUcontext ctx = vram_life_context();
    vram_lock(VRAM_RANK_HEAP);
    bool ended = ctx && vram_life_settle(ctx) && !vram_life_find(ctx); /* meanwhile, by another thread */
    struct vram_life *life = ctx && !ended ? vram_life_of_current(ctx) : NULL;
    ended |= ctx && !life && vram_life_is_closing(ctx);
    if (device == VRAM_DEVICE_OF_CONTEXT)
        device = life ? life->device : -1;
    bool noted = false;
    if (device >= 0) { /* else what becomes of it with its context would not be seen either */
        struct vram_account *books = vram_books(device);
        /* What has a handle ends with its last one, on the host as well. */
        bool ends = vram_family_traits[family].ends == VRAM_ENDS_CONTEXT && key.space != VRAM_BY_HANDLE;
        struct vram_holding what = {
            .family = family,
            .figures = &books->figures[family],
            .bytes = bytes,
            .kind = kind,
            .born = site,
            .life = ends ? life : NULL,
        };
        noted = opened_before(family, key) || vram_holding_born(&vram_heap.holdings, key, &what);
        books->used |= noted;
    }
    vram_unlock(VRAM_RANK_HEAP);
    if (!noted) {
        static atomic_bool told;
        const char *lacking = device >= 0 ? "no host memory" : "nothing is known of its context";
        if (!ended && !atomic_exchange(&told, true))
            vram_say("cannot account for %s memory (%s); it works, but is not reported",
                     vram_family_traits[family].words, lacking);
    }
    vram_heap_use();
    if (device >= 0)
        vram_view_first(device);
}

void vram_family_born(enum vram_family family, int device, struct vram_key key, uint64_t bytes, uintptr_t caller)
{
    enter(family, device, key, bytes, 0, caller);
}

void vram_family_pinned(struct vram_key key, uint64_t bytes, uint32_t kind, uintptr_t caller)
{
    enter(VRAM_HOST, VRAM_DEVICE_OF_CONTEXT, key, bytes, kind, caller);
}

struct vram_leaving vram_family_leave(struct vram_key key)
{
    vram_lock(VRAM_RANK_HEAP);
    struct vram_leaving leaving = vram_holding_leave(&vram_heap.holdings, key);
    vram_unlock(VRAM_RANK_HEAP);
    return leaving;
}

/* On the way out the driver may be gone already; that is not the program's leak. */
static bool refused(CUresult r)
{
    return r != CUDA_SUCCESS && r != CUDA_ERROR_DEINITIALIZED;
}

void vram_family_left(const struct vram_leaving *leaving, CUresult result)
{
    if (!leaving->holding)
        return;
    vram_lock(VRAM_RANK_HEAP);
    vram_holding_left(&vram_heap.holdings, leaving, refused(result));
    vram_unlock(VRAM_RANK_HEAP);
}

struct vram_holding *vram_family_map_begin(CUmemGenericAllocationHandle handle)
{
    vram_lock(VRAM_RANK_HEAP);
    struct vram_name *n = vram_holding_find(&vram_heap.holdings, (struct vram_key){VRAM_BY_HANDLE, handle});
    struct vram_holding *holding = n ? n->holding : NULL;
    if (holding)
        vram_holding_pin(holding);
    vram_unlock(VRAM_RANK_HEAP);
    return holding;
}

void vram_family_map_end(struct vram_holding *holding, uint64_t address, uint64_t size, CUresult result)
{
    if (!holding)
        return;
    vram_lock(VRAM_RANK_HEAP);
    if (result == CUDA_SUCCESS) {
        /* Without host memory for the mapping, the holding goes when its handle is released: early, never twice. */
        vram_holding_name(&vram_heap.holdings, (struct vram_key){VRAM_MAPPED_AT, address}, size, holding);
        if (holding->family == VRAM_IMPORTED)
            vram_holding_grow(holding, size);
    }
    vram_holding_unpin(holding);
    vram_unlock(VRAM_RANK_HEAP);
}

struct vram_name *vram_family_unmap_begin(uint64_t address, uint64_t size)
{
    vram_lock(VRAM_RANK_HEAP);
    struct vram_name *chain = vram_holding_unmap(&vram_heap.holdings, address, size);
    vram_unlock(VRAM_RANK_HEAP);
    return chain;
}

void vram_family_unmap_end(struct vram_name *chain, CUresult result)
{
    if (!chain)
        return;
    vram_lock(VRAM_RANK_HEAP);
    vram_holding_unmapped(&vram_heap.holdings, chain, refused(result));
    vram_unlock(VRAM_RANK_HEAP);
}

void vram_family_retained(CUmemGenericAllocationHandle handle, uint64_t address)
{
    struct vram_key key = {VRAM_BY_HANDLE, handle};
    vram_lock(VRAM_RANK_HEAP);
    struct vram_name *mapping = vram_holding_mapping(&vram_heap.holdings, address);
    struct vram_name *known = vram_holding_find(&vram_heap.holdings, key);
    if (mapping)
        vram_holding_name(&vram_heap.holdings, key, 0, mapping->holding);
    else if (known)
        known->references++;
    vram_unlock(VRAM_RANK_HEAP);
}

/* The context of a stream that has one of its own. NULL: the driver does not say, or it is whichever is current. */
static CUcontext context_of(CUstream stream)
{
    CUcontext ctx = NULL;
    bool named = stream && stream != CU_STREAM_LEGACY && stream != CU_STREAM_PER_THREAD;
    if (!named || !vram_driver()->cuStreamGetCtx || VRAM_DRV(cuStreamGetCtx)(stream, &ctx) != CUDA_SUCCESS)
        return NULL;
    return ctx;
}

int vram_family_device_in_order(CUmemoryPool pool, CUstream stream)
{
    int device = pool ? vram_pool_device(pool) : VRAM_DEVICE_OF_CONTEXT;
    CUcontext ctx = device < 0 ? context_of(stream) : NULL;
    if (ctx) {
        vram_lock(VRAM_RANK_HEAP);
        const struct vram_life *life = vram_life_find(ctx);
        device = life ? life->device : VRAM_DEVICE_OF_CONTEXT;
        vram_unlock(VRAM_RANK_HEAP);
    }
    return device;
}

void vram_family_graph_memory(void)
{
    CUcontext ctx = vram_life_context();
    vram_lock(VRAM_RANK_HEAP);
    struct vram_life *life = ctx ? vram_life_of_current(ctx) : NULL;
    if (life)
        vram_books(life->device)->graph_memory = true;
    vram_unlock(VRAM_RANK_HEAP);
}

/* Bytes of one element; of formats with blocks or planes, the most that they can be. */
static uint64_t element_bytes(CUarray_format format, unsigned channels)
{
    switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
        return channels;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
        return 2 * (uint64_t)channels;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT:
        return 4 * (uint64_t)channels;
    }
    return 4;
}

static uint64_t at_least_one(uint64_t n)
{
    return n ? n : 1;
}

uint64_t vram_family_array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned levels)
{
    if (d->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING))
        return 0;
    bool layered =
        d->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP); /* layers do not shrink from level to level */
    uint64_t width = d->Width, height = at_least_one(d->Height), depth = at_least_one(d->Depth), sum = 0;
    for (unsigned level = 0; level < at_least_one(levels); level++) {
        uint64_t bytes = element_bytes(d->Format, d->NumChannels);
        if (__builtin_mul_overflow(bytes, width, &bytes) || __builtin_mul_overflow(bytes, height, &bytes) ||
            __builtin_mul_overflow(bytes, depth, &bytes) || __builtin_add_overflow(sum, bytes, &sum))
            return UINT64_MAX;
        if (width == 1 && height == 1 && (layered || depth == 1))
            break; /* there are no more levels, however many were asked for (documented) */
        width = at_least_one(width / 2);
        height = at_least_one(height / 2);
        depth = layered ? depth : at_least_one(depth / 2);
    }
    return vram_footprint(sum);
}

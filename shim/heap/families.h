/*
 * The families that are accounted for and not kept (ledger/holding.h): what the program allocates and frees of them,
 * and the same ladder for them as for blocks when memory runs out. The calls themselves are the program's and reach the
 * driver as they are. No lock held by callers; all take HEAP.
 */
#ifndef VRAM_HEAP_FAMILIES_H
#define VRAM_HEAP_FAMILIES_H

#include <stdbool.h>
#include <stdint.h>

#include "heap/reclaim.h"
#include "ledger/holding.h"
#include "vramshim/cuda_abi.h"

enum { VRAM_DEVICE_OF_CONTEXT = -1 };

/* The driver gave `bytes` of the family under this name, on the current context's device or the one named. A name that
 * an opened handle has already (the driver opens it once) becomes one reference more. Nothing is noted without host
 * memory, or without knowing the device. */
void vram_family_born(enum vram_family family, int device, struct vram_key key, uint64_t bytes, uintptr_t caller);

/* The same of pinned host memory of the current context; `kind`: its flags, see heap/host.h. */
void vram_family_pinned(struct vram_key key, uint64_t bytes, uint32_t kind, uintptr_t caller);

/* Around a call of the program that gives a name up: before and after it. */
struct vram_leaving vram_family_leave(struct vram_key key);
void vram_family_left(const struct vram_leaving *leaving, CUresult result);

/* Physical memory: around the driver's mapping and unmapping, and after a handle was retained. */
struct vram_holding *vram_family_map_begin(CUmemGenericAllocationHandle handle);
void vram_family_map_end(struct vram_holding *holding, uint64_t address, uint64_t size, CUresult result);
struct vram_name *vram_family_unmap_begin(uint64_t address, uint64_t size);
void vram_family_unmap_end(struct vram_name *chain, CUresult result);
void vram_family_retained(CUmemGenericAllocationHandle handle, uint64_t address);

/* The device of what is allocated in stream order: of the pool (NULL: none is named), or else of the stream, whose context
 * need not be the current one; VRAM_DEVICE_OF_CONTEXT where that is not known. */
int vram_family_device_in_order(CUmemoryPool pool, CUstream stream);

/* The program allocates in stream order while it captures: graphs own memory on the current device. */
void vram_family_graph_memory(void);

/* Whether an allocation that failed may be helped by what we keep. */
bool vram_family_may_rescue(void);

/* VRAM_RESCUED(size, device, call): the result of `call`, an expression that is tried again after each step of the
 * ladder. */
#define VRAM_RESCUED(size, device, call)                                                                               \
    __extension__({                                                                                                    \
        struct vram_ladder ladder_ = vram_ladder(size, device);                                                        \
        CUresult result_ = (call);                                                                                     \
        if (vram_unlikely(result_ == CUDA_ERROR_OUT_OF_MEMORY) && vram_family_may_rescue()) {                          \
            while (result_ == CUDA_ERROR_OUT_OF_MEMORY && vram_ladder_climb(&ladder_, vram_life_context()))            \
                result_ = (call);                                                                                      \
            vram_ladder_end(&ladder_, result_);                                                                        \
        }                                                                                                              \
        result_;                                                                                                       \
    })

/* Bytes of an array as its descriptor says, in the driver's units; 0: it takes none of its own (sparse, deferred). */
uint64_t vram_family_array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *descriptor, unsigned levels);

#endif

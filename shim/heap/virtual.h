/*
 * The cache of virtual memory: programs that create, reserve, map, unmap and release for every buffer (JAX with its
 * platform allocator) get what they gave up, still mapped, and the driver is not called. With VRAMSHIM_VIRTUAL_CACHE,
 * which says how much may be kept on a device; off by default.
 *
 *   physical     what cuMemCreate gave, known by its handle
 *   reservation  addresses that cuMemAddressReserve gave
 *   pair         a physical memory that is mapped, as a whole and nowhere else, at the beginning of a reservation
 *
 * What the program gives up of a pair (the mapping, the handle, the addresses, in any order) is only noted. The pair is
 * *kept* when nothing of the physical memory is the program's any more: natively it would be free. A request for the
 * same size and properties gets the handle back, one for the same size of addresses the reservation, and mapping and
 * access find themselves done. Whatever the program does otherwise with a handle or with addresses first undoes the
 * pair at the driver, so that the driver is in the state that it would be in natively. What was shared (exported,
 * retained, bound, given attributes) is never kept.
 *
 * The driver's unmapping does not wait for work (measured), and work that still runs would fault there: the program has
 * waited before. So there is nothing to wait for here.
 *
 *   invariants: a pair's two halves name each other; kept = the program holds neither handle nor mapping of a pair that
 * may be kept; such a one is in the list of its class, and the books' virtual_kept is the sum of their sizes.
 *
 * No lock held by callers; all take HEAP unless said otherwise. Nothing of this is used unless vram_virtual_on().
 */
#ifndef VRAM_HEAP_VIRTUAL_H
#define VRAM_HEAP_VIRTUAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/hash.h"
#include "config/options.h"
#include "vramshim/cuda_abi.h"

enum { VRAM_ACCESS_MAX = 4 };

struct vram_physical {
    CUmemGenericAllocationHandle handle; /* the key */
    struct vram_physical_class *of;
    bool held;                   /* by the program */
    bool shared;                 /* or mapped elsewhere: never kept */
    bool kept;                   /* it is in the list of its class */
    struct vram_reservation *at; /* where it is mapped as a pair, or NULL */
    struct vram_physical *kept_prev, *kept_next;
    UT_hash_handle hh;
};

/* Physical memory that serves the same requests. Never freed: they are few. */
struct vram_physical_class {
    struct vram_physical_key {
        CUmemAllocationProp prop; /* has no padding: it is hashed */
        uint64_t size, flags;
    } key;
    struct vram_physical *kept; /* the last one first */
    UT_hash_handle hh;
};

struct vram_reservation {
    uint64_t addr; /* the key */
    uint64_t size;
    bool held;                    /* by the program */
    bool mapped;                  /* the program has it mapped */
    bool odd;                     /* other mappings lie or lay in it: no pair is made here */
    struct vram_physical *behind; /* of the pair, or NULL */
    unsigned access_count;        /* 0: none was given yet, or more than we remember */
    CUmemAccessDesc access[VRAM_ACCESS_MAX];
    bool access_forgotten; /* not the same as what is remembered: never kept */
    UT_hash_handle hh;
};

struct vram_virtual {
    struct vram_physical *physical;        /* by handle */
    struct vram_physical_class *classes;   /* by key */
    struct vram_reservation *reservations; /* by address */
    unsigned undoing;                      /* pairs that are at the driver just now */
    uint64_t hits, asked;
};

static inline bool vram_virtual_on(void)
{
    return vram_options->virtual_cache && vram_options->cache;
}

/* Each pair of functions goes around the program's call: the first says whether it is answered here (then *ret_result,
 * or success), else has cleared the way for the driver's; the second notes what the driver answered. */
bool vram_virtual_create(CUmemGenericAllocationHandle *ret_handle, size_t size, const CUmemAllocationProp *prop,
                         unsigned long long flags);
void vram_virtual_created(CUmemGenericAllocationHandle handle, size_t size, const CUmemAllocationProp *prop,
                          unsigned long long flags);

/* Where the driver refuses what was not answered here, the handle is not known any more, and not kept when released. */
bool vram_virtual_release(CUmemGenericAllocationHandle handle, CUresult *ret_result);

bool vram_virtual_reserve(CUdeviceptr *ret_ptr, size_t size, size_t alignment);
void vram_virtual_reserved(CUdeviceptr ptr, size_t size);

/* *ret_taken_out: the reservation is not known any more; not_freed puts it back where the driver refuses. */
bool vram_virtual_free(CUdeviceptr ptr, size_t size, CUresult *ret_result, bool *ret_taken_out);
void vram_virtual_not_freed(CUdeviceptr ptr, size_t size);

bool vram_virtual_map(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                      unsigned long long flags);
void vram_virtual_mapped(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle);

bool vram_virtual_unmap(CUdeviceptr ptr, size_t size);
void vram_virtual_unmapped(CUdeviceptr ptr, size_t size);

bool vram_virtual_access(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count);
void vram_virtual_accessed(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count);

/* Somebody else may know it from now on. An address means the mapping that contains it. */
void vram_virtual_shared(CUmemGenericAllocationHandle handle);
void vram_virtual_shared_at(uint64_t address);
/* The program got this handle for the mapping at the address: it is the program's, also where its release was only noted. */
void vram_virtual_retained(CUmemGenericAllocationHandle handle, uint64_t address);

/* Whether the address lies in a mapping that the program has given up: to it, nothing is there. Under HEAP. */
bool vram_virtual_is_spare(uint64_t address);

/* Gives what is kept on a device back, or on all; returns the bytes. */
uint64_t vram_virtual_trim(int device);

#endif

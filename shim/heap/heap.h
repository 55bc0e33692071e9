/*
 * The heap: where the ledger, the caches and the driver meet. It owns the lock HEAP, the lives of contexts and the books,
 * and is the only layer that decides about a block.
 *
 * Every function here may call the driver, with no lock held; none may be called with one. Results are the driver's own
 * (CUresult) where the program will see them.
 *
 * A block's way:
 *
 *      driver gives                 program frees           in sync: work is done
 *   ----------------->  VRAM_LIVE  -------------->  VRAM_FREEING ------------------> VRAM_CACHED
 *                         ^   ^                       |      |   fence is complete   ^   |    |
 *                         |   |         not cacheable |      +----> VRAM_PENDING ----+   |    | flush, out of memory
 *                         |   |                       v                  |               |    v
 *                         |   |                 driver's free            |               |  driver's free
 *                         |   +------ serves a request, in ordered ------+               |
 *                         +--------------------- serves a request -----------------------+
 */
#ifndef VRAM_HEAP_HEAP_H
#define VRAM_HEAP_HEAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "heap/account.h"
#include "vramshim/cuda_abi.h"

/* The program's calls (interpose/). `caller`: its return address, for the report. */
CUresult vram_heap_alloc(CUdeviceptr *dptr, size_t size, uintptr_t caller);
CUresult vram_heap_alloc_pitch(CUdeviceptr *dptr, size_t *pitch, size_t width, size_t height, unsigned element,
                               uintptr_t caller);
CUresult vram_heap_free(CUdeviceptr dptr, uintptr_t caller);
CUresult vram_heap_info(size_t *free, size_t *total);

/* cuMemFreeAsync, `real` being the one that was called, takes plain memory too (measured), and gives it to its pool: the
 * block leaves us. */
CUresult vram_heap_free_async(CUdeviceptr dptr, CUstream stream, __typeof__(&cuMemFreeAsync) real, uintptr_t caller);

/* An address that no driver ever gives: it answers every query and free of this one as those of a freed one (measured). */
#define VRAM_NEVER_ALLOCATED ((CUdeviceptr)0x10)

/* What an address is to the program. */
enum vram_view {
    VRAM_VIEW_UNKNOWN,  /* not ours: the driver's word goes */
    VRAM_VIEW_LIVE,     /* inside a block that the program holds: *ret_base and *ret_size are the program's */
    VRAM_VIEW_NOTHING,  /* inside a cached block, or in the tail of a live one that the program did not ask for */
};
enum vram_view vram_heap_view(CUdeviceptr address, CUdeviceptr *ret_base, size_t *ret_size);

/* Whether the address lies in pinned host memory that the program has freed and that is kept. */
bool vram_heap_host_is_kept(const void *p);

/* The identity of the block that contains the address has left us: it goes back to the driver when freed (law 19). */
void vram_heap_identity_left(CUdeviceptr address);

/* Before a live block is shown to somebody whom a fence on its context does not bind (IPC, a network card, a peer), or a
 * context's blocks are: waits for whatever may still use them (law 14). Nothing to do unless VRAM_FREE_ORDERED is at work. */
void vram_heap_settle_block(CUdeviceptr address);
void vram_heap_settle_context(CUcontext ctx);

/* Set when the process is on its way out: from then on no driver call is ours, calls of the program pass through. */
void vram_heap_exiting(void);
bool vram_heap_is_exiting(void);

/* The program has used GPU memory in this process / does from now on. */
bool vram_heap_used(void);
void vram_heap_use(void);

/* Where and when the program made the call that is being served. */
struct vram_site vram_site_here(uintptr_t caller);

/* A copy of the books for the report, taken even when the lock cannot be had within 200 ms (false then: it may be torn). */
struct vram_heap_summary {
    struct vram_account devices[VRAM_DEVICES_MAX];
    struct vram_double_free double_frees[VRAM_DOUBLE_FREES_MAX];
    unsigned double_frees_kept;
    struct vram_kept {
        uint64_t bytes, hits, asked;
    } host, virtual_memory; /* what is kept of them, see heap/host.h and heap/virtual.h */
};
bool vram_heap_summarise(struct vram_heap_summary *ret_summary);

/* What the program holds: a block, or a holding by one of its names. */
struct vram_held {
    enum vram_family family;
    uint64_t name, size;
    struct vram_site born;
};
/* The `max` largest that were never freed of a device's memory, largest first; returns how many. At exit only. */
unsigned vram_heap_largest(int device, struct vram_held *ret_held, unsigned max);

/* In a forked child: nothing of the parent is ours (law 25). */
void vram_heap_forget(void);

#endif

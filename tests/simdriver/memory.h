/*
 * Memory: who has which addresses, and how much of a device is taken. Device addresses are host mappings, so that
 * copies and kernels are plain memory accesses. All under the state lock.
 *
 * As measured: a block below 2 MiB lies in a 2 MiB chunk that the small blocks of its context share, 512 bytes apart; a
 * larger one takes whole pages of 2 MiB; a pool has chunks and pages of its own, and may hold more than these take.
 *
 *   used = 2 MiB * (chunks + pages outside pools) + reserved by pools + VMM handles + SIMCUDA_CTX_COST * contexts
 */
#ifndef SIMDRIVER_MEMORY_H
#define SIMDRIVER_MEMORY_H

#include "state.h"

enum sim_memory_kind {
    MEMORY_DEVICE,
    MEMORY_MANAGED,
    MEMORY_POOL,
    MEMORY_GRAPH,    /* an address alone; graphmem.c puts memory behind it */
    MEMORY_EXTERNAL, /* a buffer of an imported object; up to here cuMemFree takes it */
    MEMORY_HOST,
    MEMORY_REGISTERED,
    MEMORY_MAPPED,
    MEMORY_ARRAY,
    MEMORY_IPC /* another process's, opened here */
};

struct sim_block {
    uint64_t address;
    size_t size; /* as requested */
    enum sim_memory_kind kind;
    CUcontext ctx; /* that it ends with, but MEMORY_POOL and MEMORY_GRAPH outlive it; NULL for MEMORY_MAPPED */
    int device;
    uint64_t buffer_id;   /* new at each allocation */
    uint64_t map_address; /* what lies behind it: the chunk or the pages */
    size_t map_size;
    struct sim_chunk *chunk; /* of a small block */
    struct sim_arena *arena; /* NULL: not device memory */
    bool sync_memops;
    bool no_access; /* MEMORY_MAPPED before cuMemSetAccess */
    unsigned int host_flags;
    CUmemoryPool pool;              /* of MEMORY_POOL */
    struct vmm_handle *handle;      /* of MEMORY_MAPPED */
    struct sim_graph_memory *graph; /* of MEMORY_GRAPH */
    unsigned int opened;            /* MEMORY_IPC: how often */
    uint64_t owner[3];              /* of MEMORY_IPC: process, address and number there */
    struct sim_block *prev, *next;  /* in ctx->blocks */
};

/* Alignment and size checks are the caller's. `low`: below 4 GiB, for the 32-bit entries. */
CUresult sim_memory_alloc(CUcontext ctx, size_t size, enum sim_memory_kind kind, bool low, struct sim_block **ret);
CUresult sim_memory_alloc_pool(CUcontext ctx, CUmemoryPool pool, size_t size, struct sim_block **ret);
/* Host, registered, mapped or external memory that exists already. Not accounted. */
struct sim_block *sim_memory_adopt(CUcontext ctx, uint64_t address, size_t size, enum sim_memory_kind kind);

/* From now on nobody finds the block, but its memory stays taken until sim_memory_release. */
void sim_memory_hide(struct sim_block *block);
void sim_memory_release(struct sim_block *block);
void sim_memory_end_context(CUcontext ctx);

/* Hides it, waits as a free does, releases it. The owner's sticky error, if it has one by then. */
CUresult sim_memory_retire(struct sim_block *block);

struct sim_block *sim_memory_find(uint64_t address);    /* the block that contains it, or NULL */
bool sim_memory_is_device(uint64_t address);            /* whether it lies where device addresses are taken from */
bool sim_memory_covers(uint64_t low, uint64_t high);    /* all of it allocated and accessible */
bool sim_memory_reachable(uint64_t low, uint64_t high); /* touching it does not crash the process */

CUresult sim_memory_take(int device, size_t size); /* accounting alone; what does not fit takes what pools can spare */
void sim_memory_give(int device, size_t size);

/* The current context's free of any plain address, with its wait: cuMemFree, cuMemFreeHost. */
CUresult sim_memory_free(uint64_t address, bool host);
void sim_memory_wait_owner(CUcontext owner); /* its work, and that of contexts that may access its memory */

#endif

/*
 * The driver's stream-ordered pools, and its memory for graphs: what they keep of memory that the program has freed is
 * given back with the shim's own cache. No lock held by callers.
 *
 * Pools that the program makes are known by their creation; a device's default pool is asked for once the program has
 * allocated from some pool there. A pool is pinned while we call the driver for it, and its destruction waits for that.
 */
#ifndef VRAM_HEAP_POOLS_H
#define VRAM_HEAP_POOLS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/hash.h"
#include "vramshim/cuda_abi.h"

struct vram_pool {
    CUmemoryPool handle; /* the key */
    int device;
    bool closing;     /* its destruction was begun */
    uint64_t visited; /* by the last round */
    atomic_uint busy; /* calls of ours; a futex, also read without the lock */
    UT_hash_handle hh;
};

void vram_pool_made(CUmemoryPool pool, int device);
/* Around the program's destruction of it. */
void vram_pool_end_begin(CUmemoryPool pool);
void vram_pool_end(CUmemoryPool pool, bool gone);

/* On which device it takes memory; -1: it is none of the program's own that we know, and the current context's will
 * do. */
int vram_pool_device(CUmemoryPool pool);

/* What pools and graphs of the device keep unused, of every device with VRAM_EVERY_DEVICE; in bytes, as the driver
 * says. */
uint64_t vram_pools_idle(int device);
/* Gives that back; returns how much the driver took out of them. *ret_capture becomes true if a capture kept us out of some
 * (NULL: nobody asks). */
uint64_t vram_pools_trim(int device, bool *ret_capture);

#endif

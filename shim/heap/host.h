/*
 * The cache of pinned host memory: what the program frees by cuMemFreeHost is kept, up to VRAMSHIM_HOST_CACHE bytes,
 * and handed out again to a request of the same context, size and flags. The driver takes milliseconds for a new one,
 * and its free waits for the GPU (measured). Off by default: pinned memory is taken from the whole machine.
 *
 * Work of any context may use pinned memory, so a free waits for all work of every context that we know, in every free
 * mode: what is in the cache is idle. Where a context may be unknown to us (green contexts), or has failed, or a
 * capture is active, the free is native. Sizes are matched exactly: what the program may ask about a block stays
 * native.
 *
 *   invariants: every kept block is in the table of addresses and in the stack of its class; bytes = sum of their
 * sizes.
 *
 * A kept block belongs to the life of its context, whose end gives it back before. No lock held by callers; all take
 * HEAP.
 */
#ifndef VRAM_HEAP_HOST_H
#define VRAM_HEAP_HOST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/hash.h"
#include "vramshim/cuda_abi.h"

enum { VRAM_HOST_PLAIN = 0x100 }; /* beside the flags of cuMemHostAlloc: made by cuMemAllocHost */

struct vram_life;
struct vram_host_class;

struct vram_host_block {
    uint64_t addr; /* the key */
    struct vram_host_class *of;
    struct vram_host_block *next; /* in the stack */
    UT_hash_handle hh;
};

/* Blocks that serve the same requests. Made when the first of them is kept, and then there until its context ends. */
struct vram_host_class {
    struct vram_host_key {
        const struct vram_life *life;
        uint64_t size;
        uint64_t flags;
    } key;
    struct vram_host_block *top;
    UT_hash_handle hh;
};

/* In the heap, under HEAP. */
struct vram_host_cache {
    struct vram_host_block *blocks; /* by address */
    struct vram_host_class *classes;
    uint64_t bytes, count, peak_bytes;
    uint64_t hits, asked; /* requests while the cache is on */
};

/* Serves a request of the current context. NULL: it does not, and the driver has to be asked. */
void *vram_host_take(CUcontext ctx, size_t size, unsigned flags);

/* Keeps what the program is freeing. False: the native free decides. */
bool vram_host_keep(void *p);

/* Whether a block that begins there is kept: to the program it is free. Under HEAP. */
bool vram_host_is_kept(uint64_t base);

/* The block that begins there was exported or given attributes: it is not kept when freed (law 19). Under HEAP. */
void vram_host_identity_left(uint64_t base);

/* The context has ended, and what was kept there with it. Under HEAP. */
void vram_host_end_life(const struct vram_life *life);

/* Gives kept blocks back: all, or those of a context that is about to end. Returns their bytes. */
uint64_t vram_host_trim(CUcontext ctx);

#endif

/*
 * The life of a context: from the first allocation that we see in it to its destruction or reset. A cache belongs to a
 * life, never to a handle, because handles recur (law 21). Inside heap/ only; everything under HEAP unless said otherwise.
 *
 * A thread that will call the driver for a life without the lock pins it first (`busy`); the end of a life announces
 * itself (`closing`), then waits until nobody has it pinned, and only then lets the driver destroy the context.
 */
#ifndef VRAM_HEAP_LIFE_H
#define VRAM_HEAP_LIFE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "cache/cache.h"
#include "heap/account.h"
#include "heap/fence.h"
#include "heap/host.h"
#include "heap/pools.h"
#include "heap/virtual.h"
#include "ledger/block.h"
#include "ledger/holding.h"
#include "ledger/ledger.h"
#include "vramshim/cuda_abi.h"

enum { VRAM_PEERS_MAX = 16 };

struct vram_life {
    CUcontext ctx; /* the key; constant */
    int device;    /* constant; -1 before the first allocation, where the driver did not say */
    bool primary;
    bool uncached; /* made from a green context, or with peers that we do not follow: frees stay native */
    bool closing;
    bool recurred;   /* a context of the same handle was made while the end of this one was undecided, */
    int next_device; /* on this device */
    uint64_t refused; /* the last walk in which the driver took no block of it back, see reclaim.c */
    atomic_uint busy; /* pins; also read without the lock; a futex */
    struct vram_cache cache;
    struct vram_fences fences;
    struct vram_block *blocks; /* every block of this life */
    struct vram_life *peers[VRAM_PEERS_MAX]; /* lives whose work may touch our memory (law 18) */
    unsigned peer_count;
    UT_hash_handle hh;
};

/* The heap's shared state, under HEAP. */
struct vram_heap {
    struct vram_life *lives; /* by context */
    struct vram_life *recent; /* that was asked for last, or NULL */
    struct vram_ledger ledger;
    struct vram_chunk *chunks;
    struct vram_account devices[VRAM_DEVICES_MAX];
    struct vram_double_free double_frees[VRAM_DOUBLE_FREES_MAX];
    unsigned double_frees_kept;
    struct vram_holdings holdings;
    struct vram_pool *pools; /* made by the program, by handle */
    struct vram_host_cache host;
    struct vram_virtual virtual_memory;
    CUcontext primaries[VRAM_DEVICES_MAX]; /* handles that cuDevicePrimaryCtxRetain gave */
    uint64_t walks;              /* to give blocks back, since the start */
    struct vram_block *departed; /* on their way to the driver; linked as pending blocks are */
    atomic_uint arrivals; /* not under HEAP; a futex: blocks that were on their way to the driver, and are not any more */
    atomic_uint askers;   /* not under HEAP; a futex: who asks for the free memory, so that none sets out meanwhile */
    bool strangers;  /* there may be contexts that are not among the lives */
    CUcontext only;  /* the one context that the process has, or NULL; written under HEAP, accessed atomically */
    bool peers_lost; /* somebody has access to a context that there was no memory to note it for */
};
extern struct vram_heap vram_heap;

static inline struct vram_account *vram_books(int device)
{
    return &vram_heap.devices[device >= 0 && device < VRAM_DEVICES_MAX ? device : VRAM_DEVICES_MAX - 1];
}

struct vram_life *vram_life_find(CUcontext ctx); /* NULL: none, or closing */
bool vram_life_is_closing(CUcontext ctx);

/* The calling thread's current context, or NULL. No lock held. */
CUcontext vram_life_context(void);

/* The one context that the process has; NULL: there is none, or there may be others. No lock held. */
static inline CUcontext vram_life_only(void) { return __atomic_load_n(&vram_heap.only, __ATOMIC_ACQUIRE); }

/* The current context of a thread that we are about to serve, or NULL; *ret_failed is vram_life_failed. Where there is but one context in
 * the process, both are known by one call of the driver: one that it answers in a context is answered in that one. */
CUcontext vram_life_here(bool *ret_failed);

/* Whether the driver would refuse whatever is asked of it in the current context, because it knows that a kernel there has
 * failed: the cache must not hide that (law 13). False without a context. No lock held; 0.012 us (H200). */
bool vram_life_failed(void);
bool vram_life_failed_in(const struct vram_life *life); /* the same of a life's context; pinned */

/* The life of `ctx`, which is the calling thread's current context; made if it is new. Under HEAP, which it may give up and
 * take again. NULL: the life is closing, its device is not known, or there is no memory. */
struct vram_life *vram_life_of_current(CUcontext ctx);

void vram_life_pin(struct vram_life *life);   /* under HEAP */
void vram_life_unpin(struct vram_life *life); /* with or without HEAP */

/* Makes `ctx` current around a call of ours; does nothing if it is already. Returns the driver's result; vram_life_leave
 * only after success. No lock held. */
CUresult vram_life_enter(CUcontext ctx, CUcontext *ret_before);
void vram_life_leave(CUcontext ctx, CUcontext before);

/* Waits for all work of the life's context and of the contexts with peer access to it. Pinned; no lock held. */
CUresult vram_life_synchronise(struct vram_life *life);

/* Around a driver call that ends a context (takes HEAP). begin: the life stops being used, NULL if there is none. end:
 * `gone` says whether the context has really ended; if not, the life goes on as before. */
struct vram_life *vram_life_end_begin(CUcontext ctx);
void vram_life_end(struct vram_life *life, bool gone);

/* While `ctx`'s life is closing, gives HEAP up and waits until it is decided whether the context ends, at most about a second
 * (a callback of the ending itself may be what waits). Under HEAP. False: nothing was closing, or it takes too long. */
bool vram_life_settle(CUcontext ctx);

/* What the program told the driver about contexts (interpose/). A context is known from when it was made. */
void vram_life_made(CUcontext ctx, CUdevice device);
void vram_life_primary(CUdevice device, CUcontext ctx);
CUcontext vram_life_primary_of(CUdevice device); /* NULL: never retained */
void vram_life_green(CUcontext ctx);
bool vram_life_all_known(void); /* no context is missing among the lives; under HEAP */
void vram_life_peer(CUcontext accessor, CUcontext owner, bool enabled); /* accessor NULL: the driver did not say who */

/* Adds a block to its life, the ledger and the books / takes it out of all of them. Of the cache, a cached block is taken out
 * by the caller, before. The block's memory stays the caller's. enter: false if there is no host memory for the entry. */
bool vram_block_enter(struct vram_block *block);
void vram_block_withdraw(struct vram_block *block);

/* What the program asked for and holds at this address; 0: no block of its own. Takes HEAP. */
uint64_t vram_block_live_size(uint64_t addr);

#endif

/*
 * Fences: when a block that the program freed may be handed out again, in the free modes that do not wait at the free
 * (law 14). Inside heap/ only.
 *
 * A freed block is VRAM_PENDING until work that was submitted before the free is known to be done. A fence is a context event
 * (cuCtxRecordEvent, CUDA 12.5), which covers all work of the context on every stream, or a synchronisation of the host.
 * Fences of a life are numbered; a block waits for the number that the next fence will get, so one fence covers all frees
 * since the one before (law 16: the number is closed before the event is recorded).
 *
 *   invariants: done < open; a pending block's fence is <= open; the list is in ascending order of it; in `ordered` by_size
 *   holds the same blocks as the list, else none; no pending block has fence <= done.
 *
 * A fence costs the driver as much as several allocations from the cache (0.19 us to record one, 0.20 to ask for it, measured).
 * So blocks of 64 KiB and less are not asked for one by one: until there are enough of them for a fence to serve several, the driver is asked
 * for fresh ones, which are kept then.
 *
 * Completion is monotonic even where two threads record at one time: fence n is closed before n+1 is closed, which is before
 * n+1 is recorded, so what waits for n was freed before n+1 was recorded.
 *
 * With VRAM_FREE_ORDERED a pending block may be handed out once cuCtxWaitEvent has put all later work of the context behind
 * its fence. That orders the device and nobody else, so whatever shows a block to another context, process or device settles
 * its life first.
 *
 * Fields are under HEAP. Functions that call the driver want no lock held, the life pinned, and the gate of captures
 * entered (driver/capture.h); they are marked "calls".
 */
#ifndef VRAM_HEAP_FENCE_H
#define VRAM_HEAP_FENCE_H

#include <stdbool.h>
#include <stdint.h>

#include "cache/cache.h"
#include "config/options.h"
#include "vramshim/cuda_abi.h"

enum { VRAM_FENCES = 16, VRAM_FENCE_EVERY = 8 };

struct vram_life;

struct vram_fence {
    CUevent event;   /* made when first used; the context's end destroys it */
    uint64_t number; /* 0: not in use */
    bool recorded;   /* false: a thread is about to record it, and what the event says is about an older fence */
};

struct vram_fences {
    struct vram_block *oldest, *newest; /* pending blocks */
    uint64_t pending;                   /* how many those are */
    struct vram_cache by_size;
    uint64_t open;    /* the number of the next fence; from 1 on */
    uint64_t done;    /* complete up to this one */
    uint64_t ordered; /* all later work of the context comes after this one */
    unsigned frees;   /* that wait for `open` */
    bool polling;     /* one thread looks at a time */
    enum vram_fence_events { VRAM_EVENTS_UNTRIED, VRAM_EVENTS_WORK, VRAM_EVENTS_LACKING } events; /* accessed atomically */
    struct vram_fence fences[VRAM_FENCES];
};

/* How frees of the life are made safe: the option, or sync where the driver has no context events (said once) and where
 * contexts with peer access have work of their own. Calls. */
enum vram_free_mode vram_fence_mode(struct vram_life *life);

/* Whether it is known already that they are made safe without waiting, as the option says. */
bool vram_fence_is_free_of_waits(const struct vram_life *life);

/* A freed block becomes pending / stops being pending because something else becomes of it. Under HEAP. */
void vram_fence_add(struct vram_block *block);
void vram_fence_drop(struct vram_block *block);

/* Records a fence for what is pending without one, if that is at least so many blocks. Calls. */
CUresult vram_fence_record(struct vram_life *life, unsigned at_least);

/* Whether a request of that size had better be the driver's than have a fence recorded for it. */
bool vram_fence_awaits_company(struct vram_life *life, uint64_t size);

/* Puts the blocks whose fence is complete into the cache. Calls. */
void vram_fence_poll(struct vram_life *life);

/* Waits until everything that is pending now is safe, and puts it into the cache. The driver's answer. Calls. */
CUresult vram_fence_settle(struct vram_life *life);

/* The same for every life of a device, or VRAM_EVERY_DEVICE. Enters the gate itself; does nothing during a capture. */
void vram_fence_settle_device(int device);

/* Takes a pending block for a request of `size` bytes, after putting the life's context, the calling thread's current
 * one, behind its fence. It is then VRAM_FREEING and the caller's. NULL: none fits, or the mode forbids it. Calls. */
struct vram_block *vram_fence_take(struct vram_life *life, uint64_t size, uint32_t waste);

/* Waits until a pending block that fits such a request is safe, and puts it into the cache with all that is safe by then: the
 * one that was freed first, of those that fit. False: none fits, or the driver refuses. Calls. */
bool vram_fence_await(struct vram_life *life, uint64_t size, uint32_t waste);

/* Whether a live block's memory may still be in use by work of before its last free. Under HEAP. */
bool vram_fence_is_behind(const struct vram_block *block);

#endif

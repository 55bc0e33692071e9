/*
 * Giving blocks back to the driver: because someone asked (a flush), or because an allocation ran out of memory (the
 * ladder). No lock held by callers.
 */
#ifndef VRAM_HEAP_RECLAIM_H
#define VRAM_HEAP_RECLAIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "vramshim/cuda_abi.h"

struct vram_reclaimed {
    uint64_t blocks, bytes;                 /* given back */
    uint64_t kept_blocks, kept_bytes;       /* still cached afterwards, on every device */
    bool capture;                           /* a capture began: stopped there */
    CUresult refused;                       /* the driver's answer where it refused one, else CUDA_SUCCESS */
};

/*
 * Blocks on their way from the cache to the driver are in neither. Natively they would be free since long: who asks for the free
 * memory, or has found none, lets them arrive first.
 */
struct vram_traffic {
    uint64_t departed, arrived; /* since the start */
};
/* Waits for what is on its way on the device now, at most max_ns: a free may wait for a kernel, and then the driver still has
 * the block. Returns the traffic afterwards. */
struct vram_traffic vram_reclaim_await(int device, uint64_t max_ns);
struct vram_traffic vram_traffic(int device); /* under HEAP */
/* The block on its way, or NULL: to the program it is free like any other. To be asked after the ledger, which may know the
 * block that the driver has made of it since; or it has made memory of another kind of it. Under HEAP. */
struct vram_block *vram_reclaim_find(uint64_t addr);
/* Between the two nothing new sets out, unless it takes some 20 ms: whoever gives back does not wait for ever. */
void vram_reclaim_hold(void);
void vram_reclaim_release(void);

/*
 * Before the driver is asked for one more block: sees to it that no more is held on the device than VRAMSHIM_SLACK times what
 * was live at most, counting the block. What serves least, having been kept for the longest time, goes, and a little more than
 * has to, because the first free waits for all work and stalls its launches, those after it do not (measured).
 */
void vram_reclaim_within_slack(size_t size, int device);
/* Whether it would have something to do. Under HEAP. */
bool vram_reclaim_is_beyond_slack(size_t size, int device);

/*
 * Gives back what was freed before `time` and has served nobody since. Makes no call of the program wait: a context that has
 * work under way is left alone, because a free waits for it and stalls further launches (measured).
 */
struct vram_reclaimed vram_reclaim_decayed(uint64_t time);

/* Gives every cached block back. */
struct vram_reclaimed vram_reclaim_all(void);

/*
 * The ladder of one allocation of any family, begun before it is tried (law 11): if it fails for lack of memory, first what
 * another thread is giving back arrives, then just enough of the device's cached blocks is given back, then all of them, then
 * what the driver's stream-ordered pools keep unused. climb returns true when it is worth trying again; end says once what came
 * of it. Nothing of a failed attempt is left behind.
 */
struct vram_ladder {
    size_t size; /* bytes that the program asked for */
    unsigned step, arrivals; /* arrivals: at the driver, as of the last attempt */
    int device;
    struct vram_reclaimed given_back;
    uint64_t virtual_memory, trimmed; /* bytes, from kept mappings and from pools */
};
struct vram_ladder vram_ladder(size_t size, int device); /* VRAM_EVERY_DEVICE: the device of the context of the climb */
bool vram_ladder_climb(struct vram_ladder *ladder, CUcontext ctx);
void vram_ladder_end(const struct vram_ladder *ladder, CUresult result);

#endif

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

/* Gives every cached block back. */
struct vram_reclaimed vram_reclaim_all(void);

/*
 * The ladder of one allocation that failed for lack of memory (law 11): the first step gives back just enough of the
 * device's cached blocks, the second all of them. climb returns true when it is worth trying again; end says once what
 * came of it. Nothing of a failed attempt is left behind.
 */
struct vram_ladder {
    size_t size; /* bytes that the program asked for */
    unsigned step;
    int device;
    struct vram_reclaimed given_back;
};
bool vram_ladder_climb(struct vram_ladder *ladder, CUcontext ctx);
void vram_ladder_end(const struct vram_ladder *ladder, CUresult result);

#endif

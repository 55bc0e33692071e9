/*
 * What the tests of heap/ do all the time, and the equations of heap/account.h, heap/fence.h and cache/cache.h, each
 * worked out again from the ledger alone.
 */
#ifndef VRAM_TESTS_STEPS_H
#define VRAM_TESTS_STEPS_H

#include "fake_driver.h"
#include "heap/life.h"

enum { MiB = 1 << 20 };

CUdeviceptr get(size_t size);            /* allocates, which has to succeed */
void give_back(CUdeviceptr p);           /* frees, which has to succeed */
struct vram_block *block(CUdeviceptr p); /* NULL: not in the ledger */
struct vram_life *life_of(CUcontext ctx);

/* To be asked while no call of the heap is under way: then no block is VRAM_FREEING or on its way to the driver. */
void invariants(void);

#endif

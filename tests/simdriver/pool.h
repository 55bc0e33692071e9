/*
 * Stream-ordered pools. All under the state lock.
 *
 * A pool takes memory from its device in pages and keeps those that its blocks do not need any more, as reserved memory
 * for later blocks. They go back to the device
 *   - at a synchronise, as far as the pool holds more than its release threshold (documented);
 *   - by cuMemPoolTrimTo (documented), and when the pool is destroyed and a block comes back to it;
 *   - when another allocation of the device, of any family, would not fit (an assumption).
 * Which page lies behind which address does not matter to anybody: a pool maps its pages where they are needed, so that
 * addresses are taken and given back as everywhere, and pages are only counted.
 */
#ifndef SIMDRIVER_POOL_H
#define SIMDRIVER_POOL_H

#include "memory.h"

struct CUmemPoolHandle_st {
    int device;
    bool own; /* made by cuMemPoolCreate */
    bool destroyed;
    uint64_t attribute[5];
    uint64_t max;                     /* 0: as much as there is */
    uint64_t reserved, reserved_high; /* taken from the device: backed + what is kept for later */
    uint64_t backed;                  /* behind chunks and large blocks, those included whose free was not reached */
    uint64_t backed_high;
    uint64_t used, used_high; /* by blocks that are not freed, in granules of 512 bytes */
    struct sim_chunk *chunks; /* where its small blocks live, by rising address */
    CUmemoryPool next;        /* of all that ever were: blocks may name a pool that is destroyed */
};

CUresult sim_pool_back(CUmemoryPool pool, size_t size); /* pages behind a chunk or a large block, reserved ones first */
void sim_pool_unback(CUmemoryPool pool, size_t size);   /* they are reserved from now on */
size_t sim_pool_spare(int device, size_t want);         /* gives that much of what is kept back; how much it was */
void sim_pool_synchronised(int device);                 /* the host has waited for something on the device */

CUmemoryPool sim_pool_of_graphs(int device); /* keeps all until sim_pool_release */
void sim_pool_release(CUmemoryPool pool);

void sim_pool_forget(struct sim_block *block); /* freed, by the program's word: no longer used */
void sim_pool_reclaim(bool wait);              /* takes back what stream-ordered frees have let go of */

#endif

/*
 * What the scenarios of law 14 share: memory that the judge knows of, and work on it that takes its time.
 *
 * Simulated time stands still until a host call waits (SIMCUDA_CLOCK=lazy): what a call waited for is complete afterwards,
 * and nothing else is.
 */
#ifndef TESTS_LAWS_WORK_H
#define TESTS_LAWS_WORK_H

#include "law.h"
#include "sim.h"
#include "world.h"

enum { MIB = 1 << 20, WORK_NS = 1000000 };

static void __attribute__((constructor)) lazy_clock(void) { setenv("SIMCUDA_CLOCK", "lazy", 1); }

static CUfunction fill, copy;

static inline CUstream stream_of_its_own(void)
{
    CUstream s;
    OK(cu.cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
    return s;
}

static inline void start(void)
{
    law_context();
    fill = kernel("vram_fill");
    copy = kernel("vram_copy");
}

static inline CUdeviceptr allocate(size_t bytes)
{
    CUdeviceptr p;
    OK(cu.cuMemAlloc_v2(&p, bytes));
    SIM(sim_note_alloc)(p, bytes);
    return p;
}

static inline void release(CUdeviceptr p)
{
    SIM(sim_note_free)(p);
    OK(cu.cuMemFree_v2(p));
}

static inline CUevent record(CUstream s)
{
    CUevent e;
    OK(cu.cuEventCreate(&e, 0));
    OK(cu.cuEventRecord(e, s));
    return e;
}

static inline void launch_copy(CUstream s, CUdeviceptr to, CUdeviceptr from, unsigned long long bytes)
{
    unsigned long long ns = WORK_NS;
    void *params[] = {&to, &from, &bytes, &ns};
    OK(cu.cuLaunchKernel(copy, 1, 1, 1, 1, 1, 1, 0, s, params, NULL));
}

static inline void no_hazard(void)
{
    if (SIM(sim_hazards)())
        law_fail(__FILE__, __LINE__, "%s", SIM(sim_hazard_text)(0));
}

#endif

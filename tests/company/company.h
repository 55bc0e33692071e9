/* What the programs of this folder need of the driver, found in one of two ways. */
#ifndef TESTS_COMPANY_COMPANY_H
#define TESTS_COMPANY_COMPANY_H

#include <stdbool.h>

#include "vramshim/cuda_abi.h"

struct runtime {
    void *library;
    __typeof__(&cuInit) init;
    __typeof__(&cuDevicePrimaryCtxRetain) retain;
    __typeof__(&cuCtxSetCurrent) set_current;
    __typeof__(&cuMemAlloc_v2) mem_alloc;
    __typeof__(&cuMemFree_v2) mem_free;
};

bool runtime_from(struct runtime *ret_runtime, void *library); /* by dlsym */
bool runtime_load(struct runtime *ret_runtime);                /* as cudart does: everything from cuGetProcAddress */

#endif

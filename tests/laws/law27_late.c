/*
 * Law 27, a library of the program: it keeps a block until its destructor, or until a function that it registers for
 * quick_exit when it is loaded. Linked into law27_exit, and loaded by it a second time under another name.
 */
#include <stdio.h>
#include <stdlib.h>

#include "vramshim/cuda_abi.h"

void late_keep(CUresult (*release)(CUdeviceptr), CUdeviceptr p);

static CUresult (*release_function)(CUdeviceptr);
static CUdeviceptr kept;

__attribute__((visibility("default"))) void late_keep(CUresult (*release)(CUdeviceptr), CUdeviceptr p)
{
    release_function = release;
    kept = p;
}

static void let_go(void)
{
    /* The driver may have shut down before: then this is its answer, natively too. */
    CUresult r = kept ? release_function(kept) : CUDA_SUCCESS;
    if (r != CUDA_SUCCESS && r != CUDA_ERROR_DEINITIALIZED)
        fprintf(stderr, "a library's late free: %d\n", r);
    kept = 0;
}

static void __attribute__((destructor)) finish(void) { let_go(); }
static void __attribute__((constructor)) start(void) { at_quick_exit(let_go); }

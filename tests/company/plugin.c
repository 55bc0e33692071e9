/* A plugin that uses the driver by itself. Its constructor may take its time and allocates, as static initialisers do. */
#include "company.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>

static struct runtime cuda;
static void *kept;

int plugin_run(void *library);
CUresult plugin_alloc(CUdeviceptr *dptr, size_t size);
CUresult plugin_free(CUdeviceptr dptr);

static void __attribute__((constructor)) start(void)
{
    kept = malloc(1000);
    if (getenv("COMPANY_SLOW_CONSTRUCTOR"))
        nanosleep(&(struct timespec){0, 200000000}, NULL);
    free(kept);
    kept = calloc(10, 100);
}

static void __attribute__((destructor)) stop(void) { free(kept); }

int plugin_run(void *library)
{
    CUdeviceptr p;
    return !(runtime_from(&cuda, library) && cuda.mem_alloc(&p, 4096) == CUDA_SUCCESS && cuda.mem_free(p) == CUDA_SUCCESS);
}

CUresult plugin_alloc(CUdeviceptr *dptr, size_t size) { return cuda.mem_alloc(dptr, size); }
CUresult plugin_free(CUdeviceptr dptr) { return cuda.mem_free(dptr); }

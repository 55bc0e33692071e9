/*
 * Lookups: cuGetProcAddress and dlsym (laws 1 to 3, 7). Ask the real one first; replace its answer only when it is the
 * address of an entry that we hook. Nothing else happens at lookup.
 */
#include "interpose/lookup.h"

#include "base/libc.h"
#include "interpose/hooks.h"

static void substitute(void **pfn)
{
    void *wrapper = vram_hook_for(*pfn);
    if (wrapper)
        *pfn = wrapper;
}

CUresult hook_cuGetProcAddress(uintptr_t caller, const char *symbol, void **pfn, int cuda_version, uint64_t flags)
{
    CUresult r = VRAM_DRV(cuGetProcAddress)(symbol, pfn, cuda_version, flags);
    if (r == CUDA_SUCCESS && pfn && !vram_lookup_is_behind_us((void *)caller))
        substitute(pfn);
    return r;
}

CUresult hook_cuGetProcAddress_v2(uintptr_t caller, const char *symbol, void **pfn, int cuda_version, uint64_t flags,
                                  CUdriverProcAddressQueryResult *status)
{
    CUresult r = VRAM_DRV(cuGetProcAddress_v2)(symbol, pfn, cuda_version, flags, status);
    if (r == CUDA_SUCCESS && pfn && !vram_lookup_is_behind_us((void *)caller))
        substitute(pfn);
    return r;
}

void *vram_dlsym_substitute(void *handle, const char *name)
{
    void *p = vram_libc_dlsym()(handle, name);
    substitute(&p);
    return p;
}

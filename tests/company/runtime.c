/* Linked statically into the program, as cudart_static is: finds the driver by itself, and all entries through
 * cuGetProcAddress, which it asks for itself first. */
#include "company.h"

#include <dlfcn.h>
#include <stddef.h>

bool runtime_from(struct runtime *r, void *library)
{
    if (!library)
        return false;
    r->library = library;
    r->init = (__typeof__(r->init))dlsym(library, "cuInit");
    r->retain = (__typeof__(r->retain))dlsym(library, "cuDevicePrimaryCtxRetain");
    r->set_current = (__typeof__(r->set_current))dlsym(library, "cuCtxSetCurrent");
    r->mem_alloc = (__typeof__(r->mem_alloc))dlsym(library, "cuMemAlloc_v2");
    r->mem_free = (__typeof__(r->mem_free))dlsym(library, "cuMemFree_v2");
    return r->init && r->retain && r->set_current && r->mem_alloc && r->mem_free;
}

bool runtime_load(struct runtime *r)
{
    CUdriverProcAddressQueryResult status;
    r->library = dlopen("libcuda.so.1", RTLD_NOW);
    __typeof__(&cuGetProcAddress_v2) get = r->library ? (__typeof__(get))dlsym(r->library, "cuGetProcAddress_v2") : NULL;
    if (!get || get("cuGetProcAddress", (void **)&get, 12000, 0, &status) || !get)
        return false;
    return !get("cuInit", (void **)&r->init, 2000, 0, &status) &&
           !get("cuDevicePrimaryCtxRetain", (void **)&r->retain, 7000, 0, &status) &&
           !get("cuCtxSetCurrent", (void **)&r->set_current, 4000, 0, &status) &&
           !get("cuMemAlloc", (void **)&r->mem_alloc, 3020, 0, &status) &&
           !get("cuMemFree", (void **)&r->mem_free, 3020, 0, &status);
}

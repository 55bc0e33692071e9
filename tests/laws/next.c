/*
 * A library that a program is linked against, between itself and libcuda: it looks names up as wrappers do, from its
 * own place in the search order. Built twice (NEXT is first or second), so that RTLD_NEXT has something to tell apart;
 * the first one also wraps malloc.
 */
#include <dlfcn.h>
#include <stddef.h>

#include "next.h"
#include "vramshim/cuda_abi.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)

/* The lookups must be made by this library: were the call the last thing that the function does, the compiler would
 * make a jump of it, and natively too dlsym would take our caller for the one who asks. */
#define STAY(p) __asm__ volatile("" : "+r"(p))

/* Defined by both: each one's RTLD_NEXT finds another. */
const char *next_who(void)
{
    return TEXT(NEXT);
}

void *JOIN(NEXT, _next)(const char *name)
{
    void *p = dlsym(RTLD_NEXT, name);
    STAY(p);
    return p;
}

void *JOIN(NEXT, _default)(const char *name)
{
    void *p = dlsym(RTLD_DEFAULT, name);
    STAY(p);
    return p;
}

void *JOIN(NEXT, _next_version)(const char *name, const char *version)
{
    void *p = dlvsym(RTLD_NEXT, name, version);
    STAY(p);
    return p;
}

#ifdef NEEDS_DRIVER
/* So that a handle of this library leads to the driver's symbols, too. */
int driver_version(void)
{
    int version = 0;
    return cuDriverGetVersion(&version) ? 0 : version;
}
#endif

#ifdef WRAPS_MALLOC
static unsigned long mallocs;

unsigned long first_mallocs(void)
{
    return __atomic_load_n(&mallocs, __ATOMIC_RELAXED);
}

void *malloc(size_t size)
{
    static void *(*real)(size_t);
    __atomic_fetch_add(&mallocs, 1, __ATOMIC_RELAXED);
    if (!real)
        real = (void *(*)(size_t))dlsym(RTLD_NEXT, "malloc");
    return real(size);
}
#endif

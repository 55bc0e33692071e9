/* Another library in front of dlsym, as profilers and recorders are: counts, and passes on to the next one, which it finds by
 * RTLD_NEXT. */
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>

static atomic_uint lookups;

void *dlsym(void *restrict handle, const char *restrict name)
{
    static void *(*next)(void *, const char *);
    if (!next)
        next = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    if (!next)
        next = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    lookups++;
    return next ? next(handle, name) : NULL;
}

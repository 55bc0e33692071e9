/*
 * A malloc replacement, to be preloaded: like most of them it finds libc's functions by dlsym in its first call, before
 * any constructor has run, when it has nothing to allocate from yet. An allocation inside that lookup would come back
 * to it; it serves it from a small buffer and remembers.
 */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "early_malloc.h"

static char buffer[1 << 16] __attribute__((aligned(16)));
static size_t used;
static unsigned long reentered, errors;
static int looking;

static void *(*real_malloc)(size_t);
static void *(*real_calloc)(size_t, size_t);
static void *(*real_realloc)(void *, size_t);
static void (*real_free)(void *);

unsigned long early_malloc_reentered(void)
{
    return reentered;
}
unsigned long early_malloc_errors(void)
{
    return errors;
}
int early_malloc_works(void)
{
    return real_malloc && real_calloc && real_realloc && real_free;
}

static void *from_buffer(size_t size)
{
    void *p = buffer + used;
    reentered++;
    used += (size + 15) & ~(size_t)15;
    return used <= sizeof(buffer) ? p : NULL;
}

static int is_ours(const void *p)
{
    return (uintptr_t)p - (uintptr_t)buffer < sizeof(buffer);
}

/* dlerror after each lookup: an error that is left pending is told to whoever asks next, about something else. */
static void *look_up(const char *name)
{
    void *p = dlsym(RTLD_NEXT, name);
    errors += dlerror() != NULL;
    return p;
}

static void find(void)
{
    looking = 1;
    real_malloc = (void *(*)(size_t))look_up("malloc");
    real_calloc = (void *(*)(size_t, size_t))look_up("calloc");
    real_realloc = (void *(*)(void *, size_t))look_up("realloc");
    real_free = (void (*)(void *))look_up("free");
    looking = 0;
}

void *malloc(size_t size)
{
    if (looking)
        return from_buffer(size);
    if (!real_malloc)
        find();
    return real_malloc(size);
}

void *calloc(size_t n, size_t size)
{
    if (looking)
        return from_buffer(n * size); /* zero: never handed out before */
    if (!real_calloc)
        find();
    return real_calloc(n, size);
}

void *realloc(void *p, size_t size)
{
    if (looking || is_ours(p)) {
        void *q = looking ? from_buffer(size) : malloc(size);
        if (p && q)
            memcpy(q, p, size);
        return q;
    }
    if (!real_realloc)
        find();
    return real_realloc(p, size);
}

void free(void *p)
{
    if (!p || is_ours(p))
        return;
    if (!real_free)
        find();
    real_free(p);
}

/* At the latest here: a program may come so far without an allocation. */
static void __attribute__((constructor)) load(void)
{
    if (!real_malloc)
        find();
}

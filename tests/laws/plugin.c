/* A library that is loaded with RTLD_LOCAL: only a lookup that it makes itself sees its symbols by RTLD_DEFAULT. */
#include <dlfcn.h>

int plugin_only;
void *plugin_own_info(void);
int cuMemGetInfo_v2(unsigned long *free, unsigned long *total);
void *plugin_default(const char *name);
void *plugin_next(const char *name);

int plugin_only = 42;

void *plugin_default(const char *name)
{
    void *p = dlsym(RTLD_DEFAULT, name);
    __asm__ volatile("" : "+r"(p)); /* a call, not a jump: see next.c */
    return p;
}

void *plugin_next(const char *name)
{
    void *p = dlsym(RTLD_NEXT, name);
    __asm__ volatile("" : "+r"(p));
    return p;
}

/* A function that has a driver entry's name and is none: whoever asks this library for it shall get it. */
static int own_info(unsigned long *free, unsigned long *total)
{
    *free = *total = 42;
    return 0;
}
int cuMemGetInfo_v2(unsigned long *free, unsigned long *total) __attribute__((alias("own_info")));

void *plugin_own_info(void)
{
    return (void *)own_info;
}

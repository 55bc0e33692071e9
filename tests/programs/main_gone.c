/*
 * A program whose main thread ends by pthread_exit while another one goes on for half a second: it ends with that one,
 * with status 0, unless a thread that somebody else started keeps it alive.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "vramshim/cuda_abi.h"

static CUcontext context;
static __typeof__(&cuCtxSetCurrent) set_current;
static __typeof__(&cuMemAlloc_v2) alloc;
static __typeof__(&cuMemFree_v2) release;

static void *entry(void *library, const char *name)
{
    void *p = library ? dlsym(library, name) : NULL;
    if (!p) {
        fprintf(stderr, "main_gone: %s\n", dlerror());
        exit(2);
    }
    return p;
}

static void check(CUresult result, const char *what)
{
    if (result == CUDA_SUCCESS)
        return;
    fprintf(stderr, "main_gone: %s: error %d\n", what, result);
    exit(1);
}

static void *rest(void *unused)
{
    (void)unused;
    check(set_current(context), "cuCtxSetCurrent");
    for (int i = 0; i < 50; i++) {
        CUdeviceptr p;
        check(alloc(&p, 4 << 20), "cuMemAlloc");
        check(release(p), "cuMemFree");
        nanosleep(&(struct timespec){0, 10000000}, NULL);
    }
    puts("the last thread ends");
    fflush(stdout);
    return NULL;
}

int main(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    __typeof__(&cuInit) init = entry(library, "cuInit");
    __typeof__(&cuDevicePrimaryCtxRetain) retain = entry(library, "cuDevicePrimaryCtxRetain");
    pthread_t thread;
    set_current = entry(library, "cuCtxSetCurrent");
    alloc = entry(library, "cuMemAlloc_v2");
    release = entry(library, "cuMemFree_v2");
    check(init(0), "cuInit");
    check(retain(&context, 0), "cuDevicePrimaryCtxRetain");
    if (pthread_create(&thread, NULL, rest, NULL) != 0)
        return 2;
    pthread_detach(thread);
    pthread_exit(NULL);
}

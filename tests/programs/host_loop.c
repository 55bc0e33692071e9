/*
 * Pinned host memory for every transfer: allocates it, copies from it to the device and back, and frees it, as programs do
 * that stage their data. Prints one JSON line: the milliseconds of each round, and a sum of what came back.
 *
 *   host_loop BYTES [ROUNDS]     (default 100)
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "vramshim/cuda_abi.h"

#define ENTRIES(X)                                                                                                     \
    X(cuInit) X(cuDevicePrimaryCtxRetain) X(cuCtxSetCurrent) X(cuMemAlloc_v2) X(cuMemFree_v2) X(cuMemHostAlloc)          \
    X(cuMemFreeHost) X(cuMemcpyHtoD_v2) X(cuMemcpyDtoH_v2)

static struct {
#define X(name) __typeof__(&name) name;
    ENTRIES(X)
#undef X
} cu;

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        CUresult result_ = (call);                                                                                     \
        if (result_ != CUDA_SUCCESS) {                                                                                 \
            fprintf(stderr, "host_loop: %s: error %d\n", #call, result_);                                              \
            exit(2);                                                                                                   \
        }                                                                                                              \
    } while (0)

static double now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

int main(int argc, char **argv)
{
    size_t bytes = argc > 1 ? strtoull(argv[1], NULL, 10) : 0;
    int rounds = argc > 2 ? atoi(argv[2]) : 100;
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    CUcontext context;
    CUdeviceptr device;
    unsigned long sum = 0;
    if (!library || bytes < 1 || rounds < 1) {
        fprintf(stderr, "host_loop: %s\n", library ? "usage: host_loop BYTES [ROUNDS]" : dlerror());
        return 2;
    }
#define X(name)                                                                                                        \
    if (!(cu.name = (__typeof__(&name))dlsym(library, #name))) {                                                       \
        fprintf(stderr, "host_loop: the driver has no %s\n", #name);                                                   \
        return 2;                                                                                                      \
    }
    ENTRIES(X)
#undef X
    CHECK(cu.cuInit(0));
    CHECK(cu.cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(cu.cuCtxSetCurrent(context));
    CHECK(cu.cuMemAlloc_v2(&device, bytes));
    printf("{\"ms\": [");
    for (int i = 0; i < rounds; i++) {
        unsigned char *host;
        double start = now_ms();
        CHECK(cu.cuMemHostAlloc((void **)&host, bytes, 0));
        host[0] = (unsigned char)i;
        host[bytes - 1] = (unsigned char)(i + 1);
        CHECK(cu.cuMemcpyHtoD_v2(device, host, bytes));
        host[0] = host[bytes - 1] = 0;
        CHECK(cu.cuMemcpyDtoH_v2(host, device, bytes));
        sum = sum * 31 + host[0] + host[bytes - 1];
        CHECK(cu.cuMemFreeHost(host));
        printf("%s%.5f", i ? ", " : "", now_ms() - start);
    }
    printf("], \"result\": \"%lx\"}\n", sum);
    CHECK(cu.cuMemFree_v2(device));
    return 0;
}

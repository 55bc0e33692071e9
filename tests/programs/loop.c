/*
 * A small unmodified CUDA program: allocates and frees a few blocks over and over, prints a checksum and how long a pair
 * took, and forgets one block. The demo's program, and the first thing that ever ran under the shim. It knows nothing of
 * the shim: it finds the driver as ctypes and cudart do, by dlopen and dlsym.
 *
 *   loop [--seconds S | --iterations N] [--size BYTES] [--blocks N] [--idle S] [--then PERCENT] [--forget] [--quiet]
 *
 * --idle: afterwards do nothing for S seconds, holding no memory. --then: afterwards allocate one block of so much of the
 * device's memory. --forget: leave one block behind. --quiet: print nothing that depends on the time.
 */
#include <dlfcn.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "vramshim/cuda_abi.h"

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void *library;

static void *entry(const char *name)
{
    void *p = dlsym(library, name);
    if (!p) {
        fprintf(stderr, "loop: %s\n", dlerror());
        exit(2);
    }
    return p;
}

static size_t bytes(const char *s)
{
    char *end;
    size_t n = strtoull(s, &end, 0);
    return *end == 'G' ? n << 30 : *end == 'M' ? n << 20 : *end == 'K' ? n << 10 : n;
}

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        CUresult result_ = (call);                                                                                     \
        if (result_ != CUDA_SUCCESS) {                                                                                 \
            fprintf(stderr, "loop: %s: error %d\n", #call, result_);                                                   \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

enum { BLOCKS_MAX = 1024 };

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"seconds", required_argument, NULL, 's'}, {"size", required_argument, NULL, 'b'},
        {"blocks", required_argument, NULL, 'n'},  {"iterations", required_argument, NULL, 'i'},
        {"idle", required_argument, NULL, 'd'},    {"then", required_argument, NULL, 't'},
        {"forget", no_argument, NULL, 'f'},        {"quiet", no_argument, NULL, 'q'},
        {NULL, 0, NULL, 0},
    };
    double seconds = 0, idle = 0, then = 0;
    size_t size = 20 << 20;
    unsigned blocks = 16;
    unsigned long iterations = 1000;
    int forget = 0, quiet = 0, option;
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (option) {
        case 's': seconds = atof(optarg); break;
        case 'b': size = bytes(optarg); break;
        case 'n': blocks = (unsigned)strtoul(optarg, NULL, 0); break;
        case 'i': iterations = strtoul(optarg, NULL, 0); break;
        case 'd': idle = atof(optarg); break;
        case 't': then = atof(optarg); break;
        case 'f': forget = 1; break;
        case 'q': quiet = 1; break;
        default: return 2;
        }
    }
    if (blocks == 0 || blocks > BLOCKS_MAX) {
        fprintf(stderr, "loop: --blocks takes 1 to %d\n", BLOCKS_MAX);
        return 2;
    }

    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "loop: %s\n", dlerror());
        return 2;
    }
    __typeof__(&cuInit) init = entry("cuInit");
    __typeof__(&cuDeviceGet) device_get = entry("cuDeviceGet");
    __typeof__(&cuDevicePrimaryCtxRetain) retain = entry("cuDevicePrimaryCtxRetain");
    __typeof__(&cuCtxSetCurrent) set_current = entry("cuCtxSetCurrent");
    __typeof__(&cuMemAlloc_v2) alloc = entry("cuMemAlloc_v2");
    __typeof__(&cuMemFree_v2) release = entry("cuMemFree_v2");
    __typeof__(&cuMemsetD8_v2) set = entry("cuMemsetD8_v2");
    __typeof__(&cuMemcpyDtoH_v2) copy = entry("cuMemcpyDtoH_v2");
    __typeof__(&cuMemGetInfo_v2) info = entry("cuMemGetInfo_v2");

    CUdevice device;
    CUcontext context;
    CHECK(init(0));
    CHECK(device_get(&device, 0));
    CHECK(retain(&context, device));
    CHECK(set_current(context));

    static CUdeviceptr block[BLOCKS_MAX];
    unsigned long checksum = 0, pairs = 0, round = 0;
    double start = now(), spent = 0;
    while (seconds > 0 ? now() - start < seconds : round < iterations) {
        double before = now();
        for (unsigned i = 0; i < blocks; i++)
            CHECK(alloc(&block[i], size));
        spent += now() - before;

        unsigned char value = (unsigned char)(round * 31 + 7), back = 0;
        CHECK(set(block[round % blocks], value, size));
        CHECK(copy(&back, block[round % blocks] + size - 1, 1));
        checksum = checksum * 131 + back;

        before = now();
        for (unsigned i = 0; i < blocks; i++)
            CHECK(release(block[i]));
        spent += now() - before;
        pairs += blocks;
        round++;
    }
    if (!quiet)
        printf("%lu pairs of cuMemAlloc and cuMemFree, %.3f us a pair\n", pairs, spent * 1e6 / (double)pairs);
    fflush(stdout);
    for (double until = now() + idle; now() < until;)
        nanosleep(&(struct timespec){0, 10000000}, NULL);
    if (then > 0) {
        size_t unused, total;
        CUdeviceptr big;
        CHECK(info(&unused, &total));
        CHECK(alloc(&big, (size_t)((double)total * then / 100)));
        CHECK(release(big));
        if (!quiet)
            printf("one block of %.1f GiB: allocated and freed\n", (double)total * then / 100 / (1 << 30));
    }
    if (forget)
        CHECK(alloc(&block[0], size));
    if (seconds > 0)
        checksum = 0; /* depends on how far it came */
    printf("checksum %lx\n", checksum);
    return 0;
}

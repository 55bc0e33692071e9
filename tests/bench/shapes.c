/*
 * A small unmodified CUDA program whose blocks are seldom as large as the last ones: what a cache of whole blocks finds hard.
 * The traces in tests/bench/traces/ are its (VRAMSHIM_TRACE). Same calls in each run.
 *
 *   shapes kv|batches [STEPS]     (default 150)
 *
 * kv: text generation; each step makes a layer's keys and values anew, one token longer, and frees the old ones. batches:
 * training; each step has a batch and a length of its own, activations live until the way back, weights for ever.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "vramshim/cuda_abi.h"

enum { LAYERS = 4, WIDTH = 1024, PARTS = 3 };

static __typeof__(&cuMemAlloc_v2) alloc;
static __typeof__(&cuMemFree_v2) release;

static void check(CUresult r, const char *what)
{
    if (r != CUDA_SUCCESS) {
        fprintf(stderr, "shapes: %s: error %d\n", what, r);
        exit(1);
    }
}

static CUdeviceptr get(size_t bytes)
{
    CUdeviceptr p;
    check(alloc(&p, bytes), "cuMemAlloc");
    return p;
}

static void give_back(CUdeviceptr p) { check(release(p), "cuMemFree"); }

/* The same in each run, on each machine. */
static unsigned below(unsigned n)
{
    static unsigned long long state = 20261203;
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)(state >> 33) % n;
}

static void kv(unsigned steps)
{
    CUdeviceptr keys[LAYERS] = {0}, values[LAYERS] = {0};
    for (unsigned step = 0; step < steps; step++) {
        size_t tokens = 96 + step;
        for (int i = 0; i < LAYERS; i++) {
            CUdeviceptr *both[] = {&keys[i], &values[i]};
            CUdeviceptr scores = get(16 * tokens * sizeof(float));
            for (int k = 0; k < 2; k++) {
                CUdeviceptr longer = get(tokens * WIDTH * 2 * 4);
                if (*both[k])
                    give_back(*both[k]);
                *both[k] = longer;
            }
            give_back(scores);
        }
    }
    for (int i = 0; i < LAYERS; i++) {
        give_back(keys[i]);
        give_back(values[i]);
    }
}

static void batches(unsigned steps)
{
    CUdeviceptr weights[LAYERS], activations[LAYERS][PARTS];
    for (int i = 0; i < LAYERS; i++)
        weights[i] = get(WIDTH * WIDTH * 4 * sizeof(float));
    for (unsigned step = 0; step < steps; step++) {
        size_t rows = (4 + below(13)) * (size_t)(32 + below(225));
        for (int i = 0; i < LAYERS; i++) {
            activations[i][0] = get(rows * WIDTH * 2);
            activations[i][1] = get(rows * WIDTH * 4 * 2);
            activations[i][2] = get(rows * sizeof(float));
        }
        for (int i = LAYERS - 1; i >= 0; i--) {
            CUdeviceptr gradient = get(rows * WIDTH * 2);
            for (int k = PARTS - 1; k >= 0; k--)
                give_back(activations[i][k]);
            give_back(gradient);
        }
    }
    for (int i = 0; i < LAYERS; i++)
        give_back(weights[i]);
}

static void *library;

static void *entry(const char *name)
{
    void *p = dlsym(library, name);
    if (!p) {
        fprintf(stderr, "shapes: %s\n", dlerror());
        exit(2);
    }
    return p;
}

int main(int argc, char **argv)
{
    unsigned steps = argc > 2 ? (unsigned)strtoul(argv[2], NULL, 10) : 150;
    void (*run)(unsigned) = argc < 2 ? NULL : strcmp(argv[1], "kv") == 0 ? kv : strcmp(argv[1], "batches") == 0 ? batches : NULL;
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!run || !library) {
        fprintf(stderr, "shapes: %s\n", run ? dlerror() : "usage: shapes kv|batches [STEPS]");
        return 2;
    }
    __typeof__(&cuInit) init = entry("cuInit");
    __typeof__(&cuDevicePrimaryCtxRetain) retain = entry("cuDevicePrimaryCtxRetain");
    __typeof__(&cuCtxSetCurrent) set_current = entry("cuCtxSetCurrent");
    alloc = entry("cuMemAlloc_v2");
    release = entry("cuMemFree_v2");
    CUcontext context;
    check(init(0), "cuInit");
    check(retain(&context, 0), "cuDevicePrimaryCtxRetain");
    check(set_current(context), "cuCtxSetCurrent");
    run(steps);
    return 0;
}

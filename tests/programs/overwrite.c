/*
 * What a careless cache of GPU memory corrupts: a long kernel on a stream of its own is still writing a block when the block
 * is freed, and the next allocation is filled from another stream. Checked on the host, round after round; natively nothing
 * is ever wrong, because cuMemFree waits.
 *
 *   overwrite [ROUNDS]     (default 200)
 *
 * Prints how many rounds were wrong and how often the address came back; status 1 if any was wrong.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "vramshim/cuda_abi.h"

enum { WORDS_MAX = 1 << 20, WORK_NS = 3000000 };

/* Writes `value` over n words again and again until ns have passed. */
static const char ptx[] =
    ".version 7.0\n.target sm_50\n.address_size 64\n"
    ".visible .entry scribble(.param .u64 address, .param .u32 n, .param .u32 value, .param .u64 ns)\n"
    "{\n"
    "    .reg .u64 %a, %p, %start, %now, %ns;\n"
    "    .reg .u32 %n, %v, %i, %step;\n"
    "    .reg .pred %q;\n"
    "    ld.param.u64 %a, [address];\n"
    "    ld.param.u32 %n, [n];\n"
    "    ld.param.u32 %v, [value];\n"
    "    ld.param.u64 %ns, [ns];\n"
    "    mov.u32 %step, %ntid.x;\n"
    "    mov.u64 %start, %globaltimer;\n"
    "again:\n"
    "    mov.u32 %i, %tid.x;\n"
    "next:\n"
    "    mad.wide.u32 %p, %i, 4, %a;\n"
    "    st.global.u32 [%p], %v;\n"
    "    add.u32 %i, %i, %step;\n"
    "    setp.lt.u32 %q, %i, %n;\n"
    "    @%q bra next;\n"
    "    mov.u64 %now, %globaltimer;\n"
    "    sub.u64 %now, %now, %start;\n"
    "    setp.lt.u64 %q, %now, %ns;\n"
    "    @%q bra again;\n"
    "    ret;\n"
    "}\n";

#define ENTRIES(X)                                                                                                     \
    X(cuInit) X(cuDevicePrimaryCtxRetain) X(cuCtxSetCurrent) X(cuCtxSynchronize) X(cuMemAlloc_v2) X(cuMemFree_v2)      \
    X(cuMemsetD32Async) X(cuMemcpyDtoH_v2) X(cuModuleLoadData) X(cuModuleGetFunction) X(cuLaunchKernel)                \
    X(cuStreamCreate) X(cuStreamSynchronize)

static struct {
#define X(name) __typeof__(&name) name;
    ENTRIES(X)
#undef X
} cu;

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        CUresult result_ = (call);                                                                                     \
        if (result_ != CUDA_SUCCESS) {                                                                                 \
            fprintf(stderr, "overwrite: %s: error %d\n", #call, result_);                                              \
            exit(2);                                                                                                   \
        }                                                                                                              \
    } while (0)

int main(int argc, char **argv)
{
    static unsigned host[WORDS_MAX];
    int rounds = argc > 1 ? atoi(argv[1]) : 200, wrong = 0, same = 0;
    CUcontext context;
    CUmodule module;
    CUfunction scribble;
    CUstream writer, filler;
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "overwrite: %s\n", dlerror());
        return 2;
    }
#define X(name)                                                                                                        \
    cu.name = (__typeof__(&name))dlsym(library, #name);                                                                \
    if (!cu.name) {                                                                                                    \
        fprintf(stderr, "overwrite: the driver has no %s\n", #name);                                                   \
        return 2;                                                                                                      \
    }
    ENTRIES(X)
#undef X
    CHECK(cu.cuInit(0));
    CHECK(cu.cuDevicePrimaryCtxRetain(&context, 0));
    CHECK(cu.cuCtxSetCurrent(context));
    CHECK(cu.cuModuleLoadData(&module, ptx));
    CHECK(cu.cuModuleGetFunction(&scribble, module, "scribble"));
    CHECK(cu.cuStreamCreate(&writer, CU_STREAM_NON_BLOCKING));
    CHECK(cu.cuStreamCreate(&filler, CU_STREAM_NON_BLOCKING));
    for (int round = 0; round < rounds; round++) {
        unsigned words = round % 2 ? WORDS_MAX : 16384, bad = 0xdead0000u + (unsigned)round, good = (unsigned)round + 1;
        unsigned long long ns = WORK_NS;
        CUdeviceptr p, q;
        void *arguments[] = {&p, &words, &bad, &ns};
        CHECK(cu.cuMemAlloc_v2(&p, words * sizeof(unsigned)));
        CHECK(cu.cuLaunchKernel(scribble, 1, 1, 1, 1024, 1, 1, 0, writer, arguments, NULL));
        CHECK(cu.cuMemFree_v2(p));
        CHECK(cu.cuMemAlloc_v2(&q, words * sizeof(unsigned)));
        CHECK(cu.cuMemsetD32Async(q, good, words, filler));
        CHECK(cu.cuStreamSynchronize(filler));
        CHECK(cu.cuCtxSynchronize());
        CHECK(cu.cuMemcpyDtoH_v2(host, q, words * sizeof(unsigned)));
        unsigned i = 0;
        while (i < words && host[i] == good)
            i++;
        wrong += i < words;
        same += q == p;
        CHECK(cu.cuMemFree_v2(q));
    }
    printf("%d rounds, %d wrong, %d with the same address\n", rounds, wrong, same);
    return wrong != 0;
}

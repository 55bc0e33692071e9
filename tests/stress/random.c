/*
 * A random program, the same for the same seed whatever lies below it: threads that allocate, free, misuse, query, launch,
 * capture, and make and destroy contexts. It prints what it saw (result codes, sizes, contents; never addresses), so the
 * output with and without the shim must be equal, and it tells the simulated driver's judge what it owns, so that memory
 * handed out too early is found whether or not it happened to hurt.
 *
 *   random --seed N --operations N --threads N [--strict] [--log]
 *
 * --strict, one thread only: also out of memory and the reported free memory, with blocks of 2 MiB and more, whose place
 * does not decide how many pages are taken. Ends with status 1 if the judge found a hazard, or contents were wrong.
 */
#include <dlfcn.h>
#include <getopt.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim.h"
#include "vramshim/cuda_abi.h"

#define ENTRIES(X)                                                                                                     \
    X(cuInit) X(cuDeviceGet) X(cuDevicePrimaryCtxRetain) X(cuCtxCreate_v2) X(cuCtxDestroy_v2) X(cuCtxSetCurrent)       \
    X(cuCtxSynchronize) X(cuMemAlloc_v2) X(cuMemAllocPitch_v2) X(cuMemFree_v2) X(cuMemGetInfo_v2)                      \
    X(cuMemGetAddressRange_v2) X(cuPointerGetAttribute) X(cuPointerGetAttributes) X(cuPointerSetAttribute)             \
    X(cuIpcGetMemHandle) X(cuMemcpyDtoH_v2) X(cuMemsetD8_v2) X(cuMemsetD8Async) X(cuStreamCreate)                      \
    X(cuStreamDestroy_v2) X(cuStreamSynchronize) X(cuStreamWaitEvent) X(cuStreamBeginCapture_v2)                       \
    X(cuStreamEndCapture) X(cuGraphDestroy) X(cuEventCreate) X(cuEventDestroy_v2) X(cuEventRecord)                     \
    X(cuModuleLoadData) X(cuModuleGetFunction) X(cuLaunchKernel)

static struct {
#define X(name) __typeof__(&name) name;
    ENTRIES(X)
#undef X
    __typeof__(&sim_note_alloc) note_alloc;
    __typeof__(&sim_note_free) note_free;
    __typeof__(&sim_hazards) hazards;
    __typeof__(&sim_hazard_text) hazard_text;
} cu;

enum { BLOCKS = 48, STREAMS = 3, CONTEXTS = 3 };

struct block {
    CUdeviceptr ptr;
    size_t size;
    int context; /* index of the context it lies in */
    unsigned char value;
    bool filled;
    int stream; /* that filled it, within its context */
};

struct context {
    CUcontext ctx;
    CUstream streams[STREAMS];
    CUevent event;
    CUfunction fill, check;
    CUdeviceptr result; /* 4 bytes for vram_check */
};

struct worker {
    unsigned index;
    uint64_t random, seen; /* seen: a hash of everything that came back */
    unsigned long operations, wrong;
    struct block blocks[BLOCKS];
    struct context contexts[CONTEXTS]; /* 0 is the primary context */
    int current;
};

static bool strict, logging;
static unsigned threads = 1;
static CUdevice device;

static uint64_t draw(struct worker *w)
{
    w->random ^= w->random << 13;
    w->random ^= w->random >> 7;
    w->random ^= w->random << 17;
    return w->random;
}

static unsigned below(struct worker *w, unsigned n) { return (unsigned)((draw(w) >> 20) % n); }

static void saw(struct worker *w, const char *what, uint64_t value)
{
    for (const char *c = what; *c; c++)
        w->seen = (w->seen ^ (unsigned char)*c) * 0x100000001b3u;
    for (int i = 0; i < 8; i++)
        w->seen = (w->seen ^ (value >> (8 * i) & 255)) * 0x100000001b3u;
    if (logging)
        printf("%u %lu %s %llu\n", w->index, w->operations, what, (unsigned long long)value);
}

static void must(CUresult r, const char *what)
{
    if (r != CUDA_SUCCESS) {
        fprintf(stderr, "random: %s: error %d\n", what, r);
        exit(2);
    }
}

static size_t draw_size(struct worker *w)
{
    if (strict) {
        /* a few sizes come again and again, as in programs; the others never do */
        static const size_t usual[] = {2 << 20, 3 << 20, 4 << 20, (4 << 20) + 512, 12 << 20};
        return below(w, 3) ? usual[below(w, 5)] : (2 << 20) + (size_t)(draw(w) % (16 << 20));
    }
    static const size_t usual[] = {1, 512, 1000, 4096, 100000, 1 << 20, 2 << 20, 3 << 20, 8 << 20};
    switch (below(w, 4)) {
    case 0: return 1 + below(w, 5000);
    case 1: return 1 + below(w, 3 << 20);
    default: return usual[below(w, 9)];
    }
}

static struct block *pick(struct worker *w, bool used)
{
    unsigned start = below(w, BLOCKS);
    for (unsigned i = 0; i < BLOCKS; i++) {
        struct block *b = &w->blocks[(start + i) % BLOCKS];
        if ((b->ptr != 0) == used)
            return b;
    }
    return NULL;
}

static void make_current(struct worker *w, int context)
{
    w->current = context;
    must(cu.cuCtxSetCurrent(w->contexts[context].ctx), "cuCtxSetCurrent");
}

static void furnish(struct context *c)
{
    CUmodule module;
    for (int i = 0; i < STREAMS; i++)
        must(cu.cuStreamCreate(&c->streams[i], i ? CU_STREAM_NON_BLOCKING : CU_STREAM_DEFAULT), "cuStreamCreate");
    must(cu.cuEventCreate(&c->event, 0), "cuEventCreate");
    must(cu.cuModuleLoadData(&module, ".version 7.0"), "cuModuleLoadData");
    must(cu.cuModuleGetFunction(&c->fill, module, "vram_fill"), "cuModuleGetFunction");
    must(cu.cuModuleGetFunction(&c->check, module, "vram_check"), "cuModuleGetFunction");
    must(cu.cuMemAlloc_v2(&c->result, 4), "cuMemAlloc");
    cu.note_alloc(c->result, 4);
}

static CUresult launch_fill(struct worker *w, struct block *b, int stream)
{
    struct context *c = &w->contexts[b->context];
    unsigned long long size = b->size, ns = below(w, 2) ? 0 : 20000;
    unsigned value = b->value = (unsigned char)(1 + below(w, 255));
    void *params[] = {&b->ptr, &size, &value, &ns};
    CUresult r = cu.cuLaunchKernel(c->fill, 1, 1, 1, 1, 1, 1, 0, c->streams[stream], params, NULL);
    b->filled = r == CUDA_SUCCESS;
    b->stream = stream;
    return r;
}

/* A program that is correct natively: contents are looked at only after the filling stream. */
static void look(struct worker *w, struct block *b)
{
    struct context *c = &w->contexts[b->context];
    unsigned long long size = b->size;
    unsigned value = b->value, wrong = 0;
    if (!b->filled)
        return;
    make_current(w, b->context);
    must(cu.cuMemsetD8Async(c->result, 0, 4, c->streams[b->stream]), "cuMemsetD8Async");
    void *params[] = {&b->ptr, &size, &value, &c->result};
    must(cu.cuLaunchKernel(c->check, 1, 1, 1, 1, 1, 1, 0, c->streams[b->stream], params, NULL), "vram_check");
    must(cu.cuStreamSynchronize(c->streams[b->stream]), "cuStreamSynchronize");
    must(cu.cuMemcpyDtoH_v2(&wrong, c->result, 4), "cuMemcpyDtoH");
    w->wrong += wrong != 0;
    saw(w, "wrong bytes", wrong);
}

/* What only holds for one thread: nobody else can have been given the address meanwhile. */
static void misuse_freed(struct worker *w, CUdeviceptr ptr, size_t size)
{
    CUdeviceptr base = 1;
    size_t range = 2;
    unsigned long long data[4] = {0};
    CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_RANGE_SIZE,
                                        CU_POINTER_ATTRIBUTE_IS_MANAGED, CU_POINTER_ATTRIBUTE_HOST_POINTER};
    unsigned long long many[4] = {7, 7, 7, 7};
    void *outputs[] = {&many[0], &many[1], &many[2], &many[3]};
    CUipcMemHandle ipc;
    switch (below(w, 7)) {
    case 0: saw(w, "double free", cu.cuMemFree_v2(ptr)); break;
    case 1: saw(w, "free inside freed", cu.cuMemFree_v2(ptr + size / 2)); break;
    case 2:
        saw(w, "range of freed", cu.cuMemGetAddressRange_v2(&base, &range, ptr + size / 2));
        saw(w, "its base", base);
        break;
    case 3: saw(w, "attribute of freed", cu.cuPointerGetAttribute(data, attributes[below(w, 3)], ptr)); break;
    case 4:
        saw(w, "attributes of freed", cu.cuPointerGetAttributes(4, attributes, outputs, ptr));
        saw(w, "their values", many[0] ^ many[1] << 8 ^ many[2] << 16 ^ (uint64_t)(many[3] == ptr) << 32);
        break;
    case 5: saw(w, "export of freed", cu.cuIpcGetMemHandle(&ipc, ptr)); break;
    default: saw(w, "two more frees", cu.cuMemFree_v2(ptr) * 10u + cu.cuMemFree_v2(ptr)); break;
    }
}

static void free_block(struct worker *w, struct block *b)
{
    CUdeviceptr ptr = b->ptr;
    size_t size = b->size;
    if (below(w, 3) == 0)
        look(w, b);
    if (below(w, 3) == 0) { /* with work outstanding: the driver's free waits for it */
        make_current(w, b->context);
        saw(w, "launch before free", launch_fill(w, b, b->filled ? b->stream : (int)below(w, STREAMS)));
    }
    if (below(w, 4) == 0)
        make_current(w, (int)below(w, CONTEXTS)); /* of another context, or with none current */
    bool none = below(w, 8) == 0;
    if (none)
        must(cu.cuCtxSetCurrent(NULL), "cuCtxSetCurrent");
    cu.note_free(ptr);
    saw(w, "free", cu.cuMemFree_v2(ptr));
    b->ptr = 0;
    if (threads == 1)
        misuse_freed(w, ptr, size);
    if (none)
        make_current(w, w->current);
}

static void allocate(struct worker *w)
{
    struct block *b = pick(w, false);
    if (!b) {
        free_block(w, pick(w, true));
        return;
    }
    CUdeviceptr ptr = 0xdead;
    size_t size = draw_size(w), pitch = 0;
    CUresult r;
    if (!strict && below(w, 8) == 0) {
        size_t width = 1 + below(w, 5000), height = 1 + below(w, 64);
        r = cu.cuMemAllocPitch_v2(&ptr, &pitch, width, height, 4u << below(w, 3));
        saw(w, "pitch", pitch);
        size = pitch * height;
    } else {
        r = cu.cuMemAlloc_v2(&ptr, size);
    }
    saw(w, "alloc", r);
    if (r != CUDA_SUCCESS) {
        saw(w, "output left alone", ptr == 0xdead);
        return;
    }
    saw(w, "alignment", ptr % 512);
    cu.note_alloc(ptr, size);
    *b = (struct block){.ptr = ptr, .size = size, .context = w->current};
    if (below(w, 2))
        saw(w, "fill", launch_fill(w, b, (int)below(w, STREAMS)));
}

static void query(struct worker *w, const struct block *b)
{
    CUdeviceptr base = 0;
    size_t size = 0, offset = below(w, 2) ? 0 : (size_t)(draw(w) % b->size);
    unsigned long long data[4] = {0};
    switch (below(w, 5)) {
    case 0:
        saw(w, "range", cu.cuMemGetAddressRange_v2(&base, &size, b->ptr + offset));
        saw(w, "range size", size);
        saw(w, "range base", b->ptr - base);
        break;
    case 1:
        saw(w, "range, one output", cu.cuMemGetAddressRange_v2(NULL, &size, b->ptr + offset));
        saw(w, "range size", size);
        break;
    case 2:
        saw(w, "attribute", cu.cuPointerGetAttribute(data, CU_POINTER_ATTRIBUTE_RANGE_SIZE, b->ptr + offset));
        saw(w, "attribute value", data[0]);
        break;
    case 3: {
        CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_RANGE_SIZE, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR};
        void *outputs[] = {&data[0], &data[1]};
        saw(w, "attributes", cu.cuPointerGetAttributes(2, attributes, outputs, b->ptr + offset));
        saw(w, "attribute values", data[0] ^ (b->ptr - data[1]));
        break;
    }
    default:
        saw(w, "device of", cu.cuPointerGetAttribute(data, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, b->ptr));
        saw(w, "device", (unsigned)data[0]);
    }
}

static void misuse(struct worker *w)
{
    CUdeviceptr ptr = 0xdead;
    size_t pitch = 0, bytes = 0;
    int on_stack;
    struct block *b = pick(w, true);
    switch (below(w, 10)) {
    case 0: saw(w, "alloc 0", cu.cuMemAlloc_v2(&ptr, 0)); break;
    case 1: saw(w, "alloc NULL", cu.cuMemAlloc_v2(NULL, 512)); break;
    case 2: saw(w, "alloc huge", cu.cuMemAlloc_v2(&ptr, (size_t)1 << (40 + below(w, 23)))); break;
    case 3: saw(w, "free 0", cu.cuMemFree_v2(0)); break;
    case 4: saw(w, "free unknown", cu.cuMemFree_v2((CUdeviceptr)(uintptr_t)&on_stack)); break;
    case 5:
        if (b)
            saw(w, "free inside", cu.cuMemFree_v2(b->ptr + 1 + below(w, 511)));
        break;
    case 6:
        saw(w, "pitch bad", cu.cuMemAllocPitch_v2(&ptr, &pitch, below(w, 2), below(w, 2), 3 + 8 * below(w, 2)));
        break;
    case 7:
        must(cu.cuCtxSetCurrent(NULL), "cuCtxSetCurrent");
        saw(w, "alloc without context", cu.cuMemAlloc_v2(&ptr, 512));
        saw(w, "info without context", cu.cuMemGetInfo_v2(&bytes, NULL));
        saw(w, "free 0 without context", cu.cuMemFree_v2(0));
        make_current(w, w->current);
        break;
    case 8: saw(w, "info NULL", cu.cuMemGetInfo_v2(NULL, NULL)); break;
    default: saw(w, "attribute of stack", cu.cuPointerGetAttribute(&bytes, CU_POINTER_ATTRIBUTE_CONTEXT, 0x40)); break;
    }
    saw(w, "output left alone", ptr == 0xdead);
}

/* Other threads must not feel it: a global capture would forbid their allocations too, and one in the context that all share
 * would be invalidated when another thread synchronises. */
static void capture(struct worker *w)
{
    if (threads > 1 && w->current == 0)
        return;
    struct context *c = &w->contexts[w->current];
    CUstream stream = c->streams[1 + below(w, STREAMS - 1)];
    CUstreamCaptureMode mode = threads == 1 ? (CUstreamCaptureMode)below(w, 3)
                                            : (CUstreamCaptureMode)(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL + below(w, 2));
    CUgraph graph = NULL;
    CUdeviceptr ptr = 0;
    saw(w, "begin capture", cu.cuStreamBeginCapture_v2(stream, mode));
    struct block *b = pick(w, true);
    if (b && b->context == w->current && below(w, 2))
        saw(w, "captured memset", cu.cuMemsetD8Async(b->ptr, 1, 1, stream));
    switch (below(w, 5)) {
    case 0: saw(w, "alloc in capture", cu.cuMemAlloc_v2(&ptr, 4096)); break;
    case 1: {
        struct block *victim = pick(w, true);
        if (!victim)
            break;
        cu.note_free(victim->ptr);
        CUresult r = cu.cuMemFree_v2(victim->ptr);
        saw(w, "free in capture", r);
        if (r == CUDA_SUCCESS)
            victim->ptr = 0;
        else
            cu.note_alloc(victim->ptr, victim->size);
        break;
    }
    case 2: saw(w, "bad free in capture", cu.cuMemFree_v2(0x40)); break;
    case 3: saw(w, "begin twice", cu.cuStreamBeginCapture_v2(stream, mode)); break;
    default: break;
    }
    saw(w, "end capture", cu.cuStreamEndCapture(stream, &graph));
    saw(w, "graph", graph != NULL);
    if (graph)
        saw(w, "graph destroy", cu.cuGraphDestroy(graph));
    if (ptr)
        saw(w, "free of captured", cu.cuMemFree_v2(ptr));
}

static void renew_context(struct worker *w)
{
    int i = 1 + (int)below(w, CONTEXTS - 1);
    struct context *c = &w->contexts[i];
    /* Its blocks end with it, live ones too. */
    for (int k = 0; k < BLOCKS; k++) {
        if (w->blocks[k].ptr && w->blocks[k].context == i) {
            cu.note_free(w->blocks[k].ptr);
            w->blocks[k].ptr = 0;
        }
    }
    cu.note_free(c->result);
    must(cu.cuCtxSetCurrent(NULL), "cuCtxSetCurrent");
    saw(w, "destroy context", cu.cuCtxDestroy_v2(c->ctx));
    must(cu.cuCtxCreate_v2(&c->ctx, 0, device), "cuCtxCreate");
    furnish(c);
    make_current(w, i);
}

static void step(struct worker *w)
{
    struct block *b = pick(w, true);
    struct context *c = &w->contexts[w->current];
    unsigned kind = below(w, 100);
    if (kind < 34) {
        allocate(w);
    } else if (kind < 62) {
        if (b)
            free_block(w, b);
    } else if (kind < 74) {
        if (b)
            query(w, b);
    } else if (kind < 82) {
        misuse(w);
    } else if (kind < 86) {
        make_current(w, (int)below(w, CONTEXTS));
    } else if (kind < 90) {
        if (b)
            look(w, b);
    } else if (kind < 92) {
        CUstream s = c->streams[below(w, STREAMS)];
        saw(w, "record", cu.cuEventRecord(c->event, s));
        saw(w, "wait", cu.cuStreamWaitEvent(c->streams[below(w, STREAMS)], c->event, 0));
    } else if (kind < 94) {
        saw(w, "synchronise", cu.cuCtxSynchronize());
    } else if (kind < 96) {
        if (b) {
            CUipcMemHandle handle;
            int one = 1;
            saw(w, "export", cu.cuIpcGetMemHandle(&handle, b->ptr));
            saw(w, "attribute set", cu.cuPointerSetAttribute(&one, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, b->ptr));
        }
    } else if (kind < 98) {
        capture(w);
    } else if (kind < 99 && draw(w) % 4 == 0) {
        renew_context(w);
    }
    if (strict) {
        size_t free_bytes = 0, total = 0;
        saw(w, "info", cu.cuMemGetInfo_v2(&free_bytes, &total));
        saw(w, "free bytes", free_bytes);
        saw(w, "total bytes", total);
    }
}

static void *work(void *arg)
{
    struct worker *w = arg;
    for (int i = 0; i < CONTEXTS; i++) {
        if (i == 0)
            must(cu.cuDevicePrimaryCtxRetain(&w->contexts[0].ctx, device), "cuDevicePrimaryCtxRetain");
        else
            must(cu.cuCtxCreate_v2(&w->contexts[i].ctx, 0, device), "cuCtxCreate");
        make_current(w, i);
        furnish(&w->contexts[i]);
    }
    unsigned long operations = w->operations;
    for (w->operations = 0; w->operations < operations; w->operations++)
        step(w);
    for (int i = 0; i < BLOCKS; i++)
        if (w->blocks[i].ptr)
            free_block(w, &w->blocks[i]);
    return NULL;
}

static void find_entries(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "random: %s\n", dlerror());
        exit(2);
    }
#define X(name)                                                                                                        \
    if (!(cu.name = (__typeof__(cu.name))dlsym(library, #name))) {                                                     \
        fprintf(stderr, "random: no %s\n", #name);                                                                     \
        exit(2);                                                                                                       \
    }
    ENTRIES(X)
#undef X
    cu.note_alloc = (__typeof__(cu.note_alloc))dlsym(library, "sim_note_alloc");
    cu.note_free = (__typeof__(cu.note_free))dlsym(library, "sim_note_free");
    cu.hazards = (__typeof__(cu.hazards))dlsym(library, "sim_hazards");
    cu.hazard_text = (__typeof__(cu.hazard_text))dlsym(library, "sim_hazard_text");
    if (!cu.note_alloc || !cu.hazards) {
        fprintf(stderr, "random: this is not the simulated driver\n");
        exit(2);
    }
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"seed", required_argument, NULL, 's'},    {"operations", required_argument, NULL, 'n'},
        {"threads", required_argument, NULL, 't'}, {"strict", no_argument, NULL, 'x'},
        {"log", no_argument, NULL, 'l'},           {NULL, 0, NULL, 0},
    };
    static struct worker workers[64];
    pthread_t ids[64];
    unsigned long operations = 10000;
    uint64_t seed = 1;
    int option;
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (option) {
        case 's': seed = strtoull(optarg, NULL, 0); break;
        case 'n': operations = strtoul(optarg, NULL, 0); break;
        case 't': threads = (unsigned)strtoul(optarg, NULL, 0); break;
        case 'x': strict = true; break;
        case 'l': logging = true; break;
        default: return 2;
        }
    }
    if (threads < 1 || threads > 64 || (strict && threads != 1)) {
        fprintf(stderr, "random: --threads takes 1 to 64, and --strict one thread\n");
        return 2;
    }
    find_entries();
    must(cu.cuInit(0), "cuInit");
    must(cu.cuDeviceGet(&device, 0), "cuDeviceGet");
    for (unsigned i = 0; i < threads; i++) {
        workers[i] = (struct worker){.index = i, .operations = operations / threads};
        workers[i].random = (seed + 1) * 0x9E3779B97F4A7C15u + i * 0xD1B54A32D192ED03u;
        if (pthread_create(&ids[i], NULL, work, &workers[i]) != 0) {
            perror("random: pthread_create");
            return 2;
        }
    }
    unsigned long wrong = 0;
    for (unsigned i = 0; i < threads; i++) {
        pthread_join(ids[i], NULL);
        printf("thread %u: %lu operations, saw %016llx\n", i, workers[i].operations,
               (unsigned long long)workers[i].seen);
        wrong += workers[i].wrong;
    }
    unsigned hazards = cu.hazards();
    printf("%lu wrong contents, %u hazards\n", wrong, hazards);
    for (unsigned i = 0; i < hazards && i < 10; i++)
        fprintf(stderr, "hazard: %s\n", cu.hazard_text(i));
    return wrong || hazards;
}

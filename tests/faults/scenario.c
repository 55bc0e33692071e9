/*
 * A program for fault injection: an unmodified CUDA program that writes down the answer to each call it makes, so that
 * two runs can be compared, and goes on whatever the answer is. It knows nothing of the shim.
 *
 *   scenario NAME
 *
 * Standard output: one line a call, "ENTRY#K CODE" (the K-th call of this entry by the program), and what the program
 * saw
 * ("name VALUE"); never addresses. Lines that begin with # are for `inject`, not for comparison: what the program holds
 * by its own count, and what the driver holds.
 *
 * FAULTS_REPLAY="ENTRY#K=CODE,..." lets exactly those calls of the program fail at the driver: what a run under the
 * shim saw of an injected failure can so be repeated without the shim.
 */
#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "sim.h"
#include "vramshim/cuda_abi.h"

enum { KIB = 1 << 10, MIB = 1 << 20, BLOCKS = 64, GIVEN = 4096, NAMES = 96, WATCHDOG_SECONDS = 30 };

/* Calls. */

static struct {
    const char *name;
    unsigned calls;
} counts[NAMES];

static unsigned next_call(const char *entry)
{
    int i = 0;
    while (counts[i].name && strcmp(counts[i].name, entry) != 0)
        i++;
    counts[i].name = entry;
    return ++counts[i].calls;
}

static unsigned before(const char *entry)
{
    char wanted[96];
    unsigned k = next_call(entry);
    const char *replay = getenv("FAULTS_REPLAY");
    snprintf(wanted, sizeof(wanted), "%s#%u=", entry, k);
    for (const char *at = replay; at && (at = strstr(at, wanted)) != NULL; at++)
        if (at == replay || at[-1] == ',')
            sim_fail(entry, 1, 1, atoi(at + strlen(wanted)));
    return k;
}

static CUresult after(const char *entry, unsigned k, CUresult r)
{
    printf("%s#%u %d\n", entry, k, r);
    return r;
}

#define CALL(entry, ...)                                                                                               \
    ({                                                                                                                 \
        unsigned k_ = before(#entry);                                                                                  \
        after(#entry, k_, entry(__VA_ARGS__));                                                                         \
    })

static void saw(const char *what, unsigned long long value)
{
    printf("%s %llu\n", what, value);
}

/* What the scenario needs and nobody lets fail. */
static void must(CUresult r, const char *what)
{
    if (r == CUDA_SUCCESS)
        return;
    printf("%s failed: %d\n", what, r);
    exit(3);
}
#define MUST(call) must(call, #call)

static CUcontext current;

static void set_current(CUcontext ctx)
{
    MUST(cuCtxSetCurrent(ctx));
    current = ctx;
}


/* What the program holds, by its own count. */

struct block {
    CUdeviceptr p;
    size_t size;
    unsigned char fill;
    CUcontext ctx;
};
static struct block blocks[BLOCKS];
static struct given {
    CUdeviceptr p;
    size_t size;
} given[GIVEN]; /* what the driver has given and may still hold */
static unsigned given_count;
static unsigned long allocs, frees, ended;
static bool only_kernels; /* write to blocks */

/* What lay across these bytes is gone: the driver would not have given them otherwise. */
static void forget_given(CUdeviceptr p, size_t size)
{
    unsigned n = 0;
    for (unsigned i = 0; i < given_count; i++)
        if (given[i].p >= p + size || given[i].p + given[i].size <= p)
            given[n++] = given[i];
    given_count = n;
}

static void note_given(CUdeviceptr p, size_t size)
{
    forget_given(p, size);
    given[given_count++] = (struct given){p, size};
}

static struct block *find_block(CUdeviceptr p)
{
    for (int i = 0; i < BLOCKS; i++)
        if (p && blocks[i].p == p)
            return &blocks[i];
    return NULL;
}

static void got(CUdeviceptr p, size_t size)
{
    static unsigned char last;
    int at = 0;
    for (int i = 0; i < BLOCKS; i++) {
        if (!blocks[i].p)
            at = i;
        else if (p < blocks[i].p + blocks[i].size && blocks[i].p < p + size)
            saw("overlaps a block of", blocks[i].size);
    }
    allocs++;
    note_given(p, size);
    sim_note_alloc(p, size);
    last = (unsigned char)(last % 250 + 1);
    unsigned char fill = sim_capturing() || only_kernels ? 0 : last; /* a captured fill would be none */
    blocks[at] = (struct block){p, size, fill, current};
    if (fill) {
        MUST(cuMemsetD8_v2(p, fill, 1));
        MUST(cuMemsetD8_v2(p + size - 1, fill, 1));
    }
}

static CUdeviceptr alloc(size_t size)
{
    CUdeviceptr p = 0xdead;
    if (CALL(cuMemAlloc_v2, &p, size) == CUDA_SUCCESS) {
        got(p, size);
        return p;
    }
    saw("left alone", p == 0xdead);
    return 0;
}

static CUdeviceptr alloc_pitch(size_t width, size_t height)
{
    CUdeviceptr p = 0xdead;
    size_t pitch = 4711;
    CUresult r = CALL(cuMemAllocPitch_v2, &p, &pitch, width, height, 4);
    if (r == CUDA_SUCCESS) {
        saw("pitch", pitch); /* a refusal for lack of memory leaves the pitch there, an injected one nothing: see law 9 */
        got(p, pitch * height);
        return p;
    }
    saw("left alone", p == 0xdead);
    return 0;
}

static bool intact(const struct block *b)
{
    unsigned char first = 0, last = 0;
    MUST(cuMemcpyDtoH_v2(&first, b->p, 1));
    MUST(cuMemcpyDtoH_v2(&last, b->p + b->size - 1, 1));
    return first == b->fill && last == b->fill;
}

static CUresult release(CUdeviceptr p)
{
    struct block *b = find_block(p);
    if (b)
        sim_note_free(p);
    CUresult r = CALL(cuMemFree_v2, p);
    if (b && r == CUDA_SUCCESS) {
        frees++;
        *b = (struct block){0};
    } else if (b) {
        sim_note_alloc(p, b->size);
    }
    return r;
}

/* Whatever was refused is freed by the second attempt, as a program with patience would. */
static void release_surely(CUdeviceptr p)
{
    struct block *b = find_block(p);
    if (b && b->ctx == current && b->fill && !sim_capturing())
        saw("intact", intact(b));
    if (release(p) != CUDA_SUCCESS && b)
        release(p);
}

static void families_end(CUcontext ctx);
static void tell_families(void);

static void context_ended(CUcontext ctx)
{
    families_end(ctx);
    for (int i = 0; i < BLOCKS; i++) {
        if (blocks[i].p && blocks[i].ctx == ctx) {
            ended++;
            blocks[i] = (struct block){0};
        }
    }
}

static void range(CUdeviceptr p, size_t offset)
{
    CUdeviceptr base = 0;
    size_t size = 0;
    if (CALL(cuMemGetAddressRange_v2, &base, &size, p + offset) == CUDA_SUCCESS) {
        saw("base", p - base);
        saw("size", size);
    }
}

static void memory_info(void)
{
    size_t unused = 0, total = 0;
    CALL(cuMemGetInfo_v2, &unused, &total);
    saw("free", unused);
    saw("total", total);
}

static void expect_current(CUcontext expected)
{
    CUcontext now = NULL;
    if (CALL(cuCtxGetCurrent, &now) == CUDA_SUCCESS)
        saw("current as it was", now == expected);
}

static void tell(void)
{
    unsigned held_blocks = 0;
    for (unsigned i = 0; i < given_count; i++)
        held_blocks += sim_is_allocated(given[i].p) != 0;
    printf("# allocs %lu\n# frees %lu\n# ended %lu\n# held %u\n", allocs, frees, ended, held_blocks);
    tell_families();
    for (unsigned i = 0; i < sim_hazards(); i++)
        printf("hazard: %s\n", sim_hazard_text(i));
}

/* The primary context, whatever happens to its entry: a program tries again. */
/* By each entry in turn that makes one. What fails is tried again; without a context there is nothing to go on with. */
static CUcontext create(void)
{
    static unsigned made;
    CUcontext ctx = NULL;
    for (int i = 0; i < 2 && !ctx; i++) {
        switch (made++ % 3) {
        case 0:
            CALL(cuCtxCreate_v2, &ctx, 0, 0);
            break;
        case 1:
            CALL(cuCtxCreate, &ctx, 0, 0);
            break;
        default:
            CALL(cuCtxCreate_v4, &ctx, NULL, 0, 0);
        }
    }
    if (!ctx) {
        tell();
        exit(0);
    }
    return current = ctx;
}

static CUcontext primary(CUdevice device)
{
    CUcontext ctx = NULL;
    for (int i = 0; i < 2 && !ctx; i++)
        CALL(cuDevicePrimaryCtxRetain, &ctx, device);
    if (!ctx) {
        tell();
        exit(0);
    }
    set_current(ctx);
    return ctx;
}

static void nap(void)
{
    nanosleep(&(struct timespec){0, 300000}, NULL);
}

static bool shim_sleeps(void)
{
    DIR *tasks = opendir("/proc/self/task");
    bool asleep = true;
    for (struct dirent *e; tasks && (e = readdir(tasks)) != NULL;) {
        char path[300], stat[512] = "";
        snprintf(path, sizeof(path), "/proc/self/task/%s/stat", e->d_name);
        FILE *f = e->d_name[0] != '.' ? fopen(path, "re") : NULL;
        if (f && fgets(stat, sizeof(stat), f) && strstr(stat, "(vramshim)"))
            asleep &= strstr(stat, "(vramshim) S") != NULL;
        if (f)
            fclose(f);
    }
    if (tasks)
        closedir(tasks);
    return asleep;
}

static volatile sig_atomic_t signals;
static void count(int sig)
{
    (void)sig;
    signals++;
}

/* Asks for a flush, and waits until whoever serves it sleeps again. */
static void wait_for_flush(void)
{
    for (int asleep = 0; asleep < 3; nap())
        asleep = shim_sleeps() ? asleep + 1 : 0;
}

static void flush(void)
{
    raise(SIGUSR1);
    saw("signals", (unsigned long long)signals);
    wait_for_flush();
}

/* The scenarios. */

static void scenario_reuse(void)
{
    CUdeviceptr p[8];
    static const size_t sizes[8] = {1, 512, 4 * KIB, 100 * KIB, 2 * MIB, 2 * MIB + 512, 3 * MIB, 8 * MIB};
    primary(0);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 8; i++)
            p[i] = alloc(sizes[i]);
        for (int i = 0; i < 8; i++)
            release_surely(p[i]);
    }
    release(p[5]); /* twice */
    release(0);
    release(0x40);
    p[0] = alloc(3 * MIB);
    if (p[0])
        release(p[0] + 512);
    alloc(0);
    alloc((size_t)1 << 50);
    CALL(cuMemAlloc_v2, NULL, 512);
    release_surely(p[0]);
    alloc(700); /* never freed */
}

static void scenario_pitch(void)
{
    CUdeviceptr p[4];
    primary(0);
    for (int round = 0; round < 3; round++) {
        p[0] = alloc_pitch(1000, 300);
        p[1] = alloc_pitch(5000, 1000);
        p[2] = alloc(1024 * 300);
        p[3] = alloc_pitch(1 + (size_t)round * 512, 64);
        if (p[1])
            range(p[1], 4096);
        for (int i = 0; i < 4; i++)
            release_surely(p[i]);
    }
    alloc_pitch(0, 4);
    size_t pitch = 0;
    CUdeviceptr bad = 0;
    CALL(cuMemAllocPitch_v2, &bad, &pitch, 16, 16, 3);
    CALL(cuMemAllocPitch_v2, &bad, NULL, 16, 16, 4);
}

static void scenario_flush(void)
{
    CUdeviceptr p[6];
    CUcontext first = primary(0), second = create();
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 6; i++) {
            set_current(i & 1 ? second : first);
            p[i] = alloc((size_t)(i + 1) * MIB);
        }
        for (int i = 0; i < 6; i++)
            release_surely(p[i]);
        memory_info();
        flush();
        memory_info();
    }
}

/* 64 MiB a device: the cached blocks are in the way of what comes next. */
static void scenario_full(void)
{
    CUdeviceptr p[4] = {0}, big;
    primary(0);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < 4; i++)
            p[i] = alloc((size_t)(10 + 2 * i) * MIB);
        memory_info();
        for (int i = 0; i < 4; i++)
            release_surely(p[i]);
        big = alloc(40 * MIB);
        alloc(40 * MIB);
        memory_info();
        release_surely(big);
        big = alloc_pitch(1 << 14, 3 << 10);
        release_surely(big);
    }
    alloc(65 * MIB);
    memory_info();
}

static void destroy(CUcontext ctx, int how)
{
    for (int attempt = 0; attempt < 2; attempt++) {
        CUresult r = how == 0   ? CALL(cuCtxDestroy_v2, ctx)
                     : how == 1 ? CALL(cuCtxDestroy, ctx)
                                : CALL(cuCtxDetach, ctx);
        if (r == CUDA_SUCCESS) {
            context_ended(ctx);
            return;
        }
    }
}

static void scenario_contexts(void)
{
    CUcontext main_context = primary(0), other[3] = {0};
    CUdeviceptr live, freed;
    CUgreenCtx green = NULL;
    CUcontext of_green = NULL;
    CALL(cuCtxFromGreenCtx, &of_green, green);
    CALL(cuCtxCreate_v3, &of_green, NULL, 0, 0, 0);
    CALL(cuGLCtxCreate, &of_green, 0, 0);
    CALL(cuGLCtxCreate_v2, &of_green, 0, 0);
    CALL(cuVDPAUCtxCreate, &of_green, 0, 0, 0, NULL);
    CALL(cuVDPAUCtxCreate_v2, &of_green, 0, 0, 0, NULL);
    for (int i = 0; i < 3; i++) {
        other[i] = create();
        live = alloc((size_t)(2 + i) * MIB);
        freed = alloc((size_t)(4 + i) * MIB);
        release_surely(freed);
        freed = alloc(5000);
        set_current(main_context);
        release_surely(freed); /* of a context that is not current */
        expect_current(main_context);
        CALL(cuCtxSynchronize);
        set_current(other[i]);
        destroy(other[i], i);
        if (!find_block(live))
            release(live); /* it ended with its context */
        else
            release_surely(live);
        set_current(main_context);
    }
    live = alloc(3 * MIB);
    release_surely(alloc(7 * MIB));
    set_current(NULL);
    release_surely(live); /* none is current */
    set_current(main_context);
    live = alloc(3 * MIB);
    CUcontext again = NULL;
    bool twice = CALL(cuDevicePrimaryCtxRetain, &again, 0) == CUDA_SUCCESS;
    if (twice)
        CALL(cuDevicePrimaryCtxRelease, 0); /* not the last */
    release_surely(live);
    live = alloc(9 * MIB);
    if (CALL(cuDevicePrimaryCtxReset_v2, 0) == CUDA_SUCCESS)
        context_ended(main_context);
    main_context = primary(0);
    live = alloc(9 * MIB);
    if (CALL(cuDevicePrimaryCtxReset, 0) == CUDA_SUCCESS)
        context_ended(main_context);
    main_context = primary(0);
    live = alloc(9 * MIB);
    release_surely(alloc(11 * MIB));
    /* One retain may be left where a call failed: until the driver says that there is none. */
    unsigned flags;
    int active = 1;
    for (int i = 0; i < 4 && active; i++) {
        CUresult r = CALL(cuDevicePrimaryCtxRelease_v2, 0);
        CALL(cuDevicePrimaryCtxGetState, 0, &flags, &active);
        active = active && r != CUDA_ERROR_INVALID_CONTEXT;
    }
    if (!active)
        context_ended(main_context);
    primary(0);
    release_surely(alloc(9 * MIB));
}

static void scenario_peers(void)
{
    CUcontext one = primary(0), two;
    CUdeviceptr p;
    two = primary(1);
    for (int round = 0; round < 2; round++) {
        set_current(two);
        bool on = CALL(cuCtxEnablePeerAccess, one, 0) == CUDA_SUCCESS;
        CALL(cuCtxEnablePeerAccess, one, 7);
        for (int i = 0; i < 2; i++) {
            set_current(one);
            p = alloc(2 * MIB);
            set_current(two);
            release_surely(p);
            release_surely(alloc(2 * MIB));
            expect_current(two);
        }
        if (on)
            CALL(cuCtxDisablePeerAccess, one);
        set_current(one);
        release_surely(alloc(2 * MIB));
    }
    flush();
}

/* Ends whatever the begin began, and looks at what came out. */
static void end_capture(CUstream stream, bool begun, bool per_thread)
{
    CUgraph graph = NULL;
    for (int i = 0; i < 2 && begun; i++) {
        CUresult r =
            per_thread ? CALL(cuStreamEndCapture_ptsz, stream, &graph) : CALL(cuStreamEndCapture, stream, &graph);
        saw("graph", graph != NULL);
        begun = r != CUDA_SUCCESS && sim_capturing() > 0;
    }
    if (graph)
        MUST(cuGraphDestroy(graph));
}

static void scenario_capture(void)
{
    CUstream stream, other;
    CUgraph graph;
    CUdeviceptr p, q;
    CUresult r;
    primary(0);
    MUST(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    MUST(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
    p = alloc(2 * MIB);
    release_surely(alloc(3 * MIB));
    for (int way = 0; way < 8; way++) {
        const CUstreamCaptureMode relaxed = CU_STREAM_CAPTURE_MODE_RELAXED;
        bool per_thread = way == 1 || way == 3 || way == 5;
        MUST(cuGraphCreate(&graph, 0));
        switch (way) {
        case 0:
            r = CALL(cuStreamBeginCapture, stream);
            break;
        case 1:
            r = CALL(cuStreamBeginCapture_ptsz, stream);
            break;
        case 2:
            r = CALL(cuStreamBeginCapture_v2, stream, relaxed);
            break;
        case 3:
            r = CALL(cuStreamBeginCapture_v2_ptsz, stream, relaxed);
            break;
        case 4:
            r = CALL(cuStreamBeginCaptureToGraph, stream, graph, NULL, NULL, 0, relaxed);
            break;
        case 5:
            r = CALL(cuStreamBeginCaptureToGraph_ptsz, stream, graph, NULL, NULL, 0, relaxed);
            break;
        case 6:
            r = CALL(cuStreamBeginCapture_v2, CU_STREAM_PER_THREAD, relaxed);
            break;
        default:
            r = CALL(cuStreamBeginCapture_v2, stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
            break;
        }
        CUstream captured = way == 6 ? CU_STREAM_PER_THREAD : stream;
        bool begun = r == CUDA_SUCCESS;
        if (begun && way % 3 == 0)
            raise(SIGUSR1);                          /* it waits */
        q = alloc((size_t)(way == 7 ? 9 : 3) * MIB); /* nothing kept fits where it is forbidden */
        if (q && release(q) != CUDA_SUCCESS)
            saw("kept", 1);
        end_capture(captured, begun, per_thread);
        if (q && find_block(q))
            release_surely(q);
        release_surely(alloc(3 * MIB));
        wait_for_flush();
        if (way != 4 && way != 5)
            MUST(cuGraphDestroy(graph));
    }
    /* A stream that ends while it captures. */
    bool begun = CALL(cuStreamBeginCapture_v2, stream, CU_STREAM_CAPTURE_MODE_RELAXED) == CUDA_SUCCESS;
    if (CALL(cuStreamDestroy_v2, stream) != CUDA_SUCCESS)
        end_capture(stream, begun, false);
    release_surely(alloc(3 * MIB));
    CALL(cuStreamDestroy, other);
    release_surely(p);
    flush();
}

/* Plain memory freed in stream order; what is refused is the program's still. */
static void release_in_order(CUdeviceptr p, bool per_thread)
{
    struct block *b = find_block(p);
    if (!b)
        return;
    CUresult r = per_thread ? CALL(cuMemFreeAsync_ptsz, p, NULL) : CALL(cuMemFreeAsync, p, NULL);
    if (r != CUDA_SUCCESS) {
        release_surely(p);
        return;
    }
    sim_note_free(p); /* afterwards: the free itself counts as work on the block, in its stream's order */
    frees++;
    *b = (struct block){0};
    MUST(cuStreamSynchronize(per_thread ? CU_STREAM_PER_THREAD : NULL));
}

static void scenario_questions(void)
{
    CUcontext ctx = primary(0);
    CUstream stream;
    CUevent event;
    primary(0);
    MUST(cuStreamCreate(&stream, 0));
    bool have_event = CALL(cuEventCreate, &event, 0) == CUDA_SUCCESS;
    memory_info();
    CALL(cuMemGetInfo_v2, NULL, NULL);
    for (int round = 0; round < 2; round++) {
        CUdeviceptr p = alloc(3 * MIB), small = alloc(600), cached = alloc(5 * MIB);
        CUpointer_attribute asked[3] = {CU_POINTER_ATTRIBUTE_RANGE_SIZE, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                        CU_POINTER_ATTRIBUTE_HOST_POINTER};
        unsigned long long values[3] = {7, 7, 7}, tokens[2];
        void *outputs[3] = {&values[0], &values[1], &values[2]};
        CUipcMemHandle ipc;
        int fd = -1, on = 1;
        if (!p || !small || !cached) {
            release(p);
            release(small);
            release(cached);
            continue;
        }
        release_surely(cached);
        memory_info();
        range(p, 0);
        range(p, MIB);
        range(small, 100);
        range(cached, MIB);
        const CUdeviceptr about[4] = {p, p + MIB, small, cached + MIB};
        for (int i = 0; i < 4; i++) {
            CUresult r = CALL(cuPointerGetAttributes, 3, asked, outputs, about[i]);
            if (r == CUDA_SUCCESS) {
                saw("range", values[0]);
                saw("type", (unsigned)values[1]);
                saw("host", values[2] == about[i]);
            }
            r = CALL(cuPointerGetAttribute, &values[0], CU_POINTER_ATTRIBUTE_RANGE_SIZE, about[i]);
            if (r == CUDA_SUCCESS)
                saw("range", values[0]);
        }
        CALL(cuPointerGetAttribute, tokens, CU_POINTER_ATTRIBUTE_P2P_TOKENS, small);
        CALL(cuPointerSetAttribute, &on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, small);
        CALL(cuIpcGetMemHandle, &ipc, p);
        CALL(cuIpcGetMemHandle, &ipc, cached);
        CALL(cuMemGetHandleForAddressRange, &fd, p, 2 * MIB, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
        if (fd >= 0)
            close(fd);
        CALL(cuMulticastBindAddr, 0, 0, p, 2 * MIB, 0);
        CALL(cuMulticastBindMem, 0, 0, 0, 0, 2 * MIB, 0);
        CALL(cuStreamSynchronize, stream);
        CALL(cuStreamSynchronize_ptsz, NULL);
        if (have_event) {
            MUST(cuEventRecord(event, stream));
            CALL(cuEventSynchronize, event);
        }
        CALL(cuCtxSynchronize);
        expect_current(ctx);
        release_surely(p);
        release_surely(small);
        memory_info();
    }
    release_in_order(alloc(4 * MIB), false);
    release_in_order(alloc(1000), true);
}

/* Frees while the device still works on the block; nothing is ever done by itself here (SIMCUDA_CLOCK=lazy). */
static void scenario_work(void)
{
    CUcontext ctx = primary(0);
    CUstream streams[2];
    CUmodule module;
    CUfunction fill;
    only_kernels = true;
    MUST(cuStreamCreate(&streams[0], CU_STREAM_NON_BLOCKING));
    MUST(cuStreamCreate(&streams[1], CU_STREAM_NON_BLOCKING));
    MUST(cuModuleLoadData(&module, ".version 7.0"));
    MUST(cuModuleGetFunction(&fill, module, "vram_fill"));
    for (int i = 0; i < 6; i++) {
        CUdeviceptr p = alloc(2 * MIB);
        unsigned long long bytes = 4096, ns = 1000000;
        unsigned value = 7;
        void *params[] = {&p, &bytes, &value, &ns};
        if (!p)
            continue;
        MUST(cuLaunchKernel(fill, 1, 1, 1, 1, 1, 1, 0, streams[i % 2], params, NULL));
        if (i == 3)
            set_current(NULL);
        release_surely(p);
        set_current(ctx);
    }
    flush();
}

/* More records than fit into what the shim asks of the host at once. For `inject host`. */
static void scenario_many(void)
{
    enum { MANY = 3000 };
    static CUdeviceptr p[MANY];
    unsigned long failed = 0;
    primary(0);
    for (int round = 0; round < 2; round++) {
        for (int i = 0; i < MANY; i++) {
            failed += cuMemAlloc_v2(&p[i], 512) != CUDA_SUCCESS;
            note_given(p[i], 512);
            allocs++;
        }
        for (int i = 0; i < MANY; i++) {
            failed += cuMemFree_v2(p[i]) != CUDA_SUCCESS;
            frees++;
        }
    }
    saw("failed", failed);
}

static void scenario_lookup(void)
{
    static const char *const names[] = {"cuMemAlloc", "cuMemFree", "cuCtxSynchronize", "cuNoSuchEntry"};
    __typeof__(&cuMemAlloc_v2) lookedup_alloc = NULL;
    __typeof__(&cuMemFree_v2) lookedup_free = NULL;
    CUdeviceptr p = 0;
    primary(0);
    for (int version = 1; version <= 2; version++) {
        for (int i = 0; i < 4; i++) {
            void *found = NULL;
            CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SUCCESS;
            if (version == 1)
                CALL(cuGetProcAddress, names[i], &found, 12000, 0);
            else
                CALL(cuGetProcAddress_v2, names[i], &found, 12000, 0, &status);
            saw(names[i], found != NULL);
            saw("status", status);
            if (i == 0)
                lookedup_alloc = (__typeof__(lookedup_alloc))found;
            if (i == 1)
                lookedup_free = (__typeof__(lookedup_free))found;
        }
        if (!lookedup_alloc || !lookedup_free)
            continue;
        for (int i = 0; i < 2; i++) {
            unsigned k = before("cuMemAlloc_v2");
            if (after("cuMemAlloc_v2", k, lookedup_alloc(&p, 2 * MIB)) != CUDA_SUCCESS)
                continue;
            got(p, 2 * MIB);
            sim_note_free(p);
            k = before("cuMemFree_v2");
            if (after("cuMemFree_v2", k, lookedup_free(p)) == CUDA_SUCCESS) {
                frees++;
                *find_block(p) = (struct block){0};
            } else {
                sim_note_alloc(p, 2 * MIB);
                release_surely(p);
            }
        }
    }
}

/* The child is the one that uses CUDA: its lines are the run's. */
static void scenario_child(void)
{
    int status = -1;
    fflush(stdout);
    pid_t pid = fork();
    if (pid != 0) {
        while (waitpid(pid, &status, 0) < 0)
            ;
        _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
    }
    alarm(WATCHDOG_SECONDS);
    MUST(cuInit(0));
    scenario_reuse();
    flush();
}

/* Several threads: who meets the failure is not determined, so answers are not compared but judged one by one. */
static CUcontext shared;
static int injected;
static pthread_mutex_t books = PTHREAD_MUTEX_INITIALIZER;
static unsigned long odd;

static void *work(void *unused)
{
    CUdeviceptr p[4] = {0};
    (void)unused;
    MUST(cuCtxSetCurrent(shared));
    for (int i = 0; i < 40; i++) {
        CUdeviceptr *slot = &p[i % 4];
        size_t size = (size_t)(1 + i % 4) * MIB;
        bool taking = !*slot;
        if (!taking)
            sim_note_free(*slot);
        CUresult r = taking ? cuMemAlloc_v2(slot, size) : cuMemFree_v2(*slot);
        if (taking == (r == CUDA_SUCCESS))
            sim_note_alloc(*slot, size);
        pthread_mutex_lock(&books);
        odd += r != CUDA_SUCCESS && (int)r != injected;
        if (r == CUDA_SUCCESS) {
            note_given(*slot, size);
            *(taking ? &allocs : &frees) += 1;
        }
        pthread_mutex_unlock(&books);
        if (!taking && r == CUDA_SUCCESS)
            *slot = 0;
        if (i == 20)
            raise(SIGUSR1);
    }
    return NULL;
}

static void scenario_threads(void)
{
    pthread_t threads[4];
    shared = primary(0);
    release_surely(alloc(MIB));
    injected = getenv("FAULTS_CODE") ? atoi(getenv("FAULTS_CODE")) : 0;
    for (int i = 0; i < 4; i++)
        if (pthread_create(&threads[i], NULL, work, NULL) != 0)
            exit(3);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    saw("answers that nobody gave", odd);
    wait_for_flush();
}

#include "families.h"

/* One failure is not the end: blocks are kept and given back as before. */
static void tell_recovery(void)
{
    const char *entry = getenv("FAULTS_ENTRY"), *nth = getenv("FAULTS_NTH");
    const char *mode = getenv("VRAMSHIM_FREE") ? getenv("VRAMSHIM_FREE") : "sync";
    CUdevice device;
    CUcontext ctx;
    CUdeviceptr p = 0;
    bool past = entry && nth && sim_calls(entry) >= strtoul(nth, NULL, 10);
    if (!past || cuDeviceGet(&device, 0) != CUDA_SUCCESS || cuDevicePrimaryCtxRetain(&ctx, device) != CUDA_SUCCESS)
        return;
    MUST(cuCtxSetCurrent(ctx));
    unsigned long asked = 0, refused = sim_refused_frees();
    for (int i = 0; i < 2; i++) {
        asked = sim_calls("cuMemAlloc_v2");
        MUST(cuMemAlloc_v2(&p, 6 * MIB));
        sim_note_alloc(p, 6 * MIB);
        note_given(p, 6 * MIB);
        allocs++;
        sim_note_free(p);
        MUST(cuMemFree_v2(p));
        frees++;
        if (strcmp(mode, "sync") != 0)
            MUST(cuCtxSynchronize()); /* simulated work may stand still until somebody waits */
    }
    printf("# kept %d\n", sim_calls("cuMemAlloc_v2") == asked);
    raise(SIGUSR1);
    wait_for_flush();
    printf("# given_back %d\n", !sim_is_allocated(p));
    printf("# refused_later %lu\n", sim_refused_frees() - refused);
}

/* A program that never uses CUDA. For `inject host`. */
static void scenario_nothing(void) { saw("calls", 0); }

static const struct {
    const char *name;
    void (*run)(void);
} scenarios[] = {
    {"reuse", scenario_reuse},     {"pitch", scenario_pitch},         {"flush", scenario_flush},
    {"full", scenario_full},       {"contexts", scenario_contexts},   {"peers", scenario_peers},
    {"capture", scenario_capture}, {"questions", scenario_questions}, {"lookup", scenario_lookup},
    {"work", scenario_work},       {"many", scenario_many},           {"child", scenario_child},
    {"threads", scenario_threads}, {"nothing", scenario_nothing},     {"families", scenario_families},
    {"pools", scenario_pools},     {"scarce", scenario_scarce},
};

int main(int argc, char **argv)
{
    alarm(WATCHDOG_SECONDS);
    signal(SIGUSR1, count);
    if (argc == 2 && strcmp(argv[1], "donor") == 0) {
        donate();
        return 0;
    }
    for (size_t i = 0; argc == 2 && i < sizeof(scenarios) / sizeof(*scenarios); i++) {
        if (strcmp(argv[1], scenarios[i].name) != 0)
            continue;
        if (strcmp(argv[1], "child") != 0 && strcmp(argv[1], "nothing") != 0 && strcmp(argv[1], "families") != 0)
            MUST(cuInit(0));
        scenarios[i].run();
        tell_recovery();
        tell();
        return 0;
    }
    fprintf(stderr, "usage: scenario NAME\n");
    return 2;
}

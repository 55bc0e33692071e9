/*
 * The simulated driver by itself: its answers (as measured on an H200), its time, and that its judge finds what
 * it must and nothing else. Links against it. Criterion runs each test in a child of its own, so each one initialises.
 */
#include "sim.h"
#include "vramshim/cuda_abi.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define OK(call) cr_assert_eq((call), CUDA_SUCCESS, #call)
#define IS(call, code) cr_assert_eq((int)(call), (int)(code), #call)

static CUcontext ctx;
static CUmodule module;

static void begin(void)
{
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&ctx, 0));
    OK(cuCtxSetCurrent(ctx));
    OK(cuModuleLoadData(&module, "x"));
}

static CUfunction function(const char *name)
{
    CUfunction f;
    OK(cuModuleGetFunction(&f, module, name));
    return f;
}

static CUresult launch(const char *name, CUstream stream, void **params)
{
    return cuLaunchKernel(function(name), 1, 1, 1, 1, 1, 1, 0, stream, params, NULL);
}

static void spin(CUstream stream, unsigned long long ms)
{
    unsigned long long ns = ms * 1000000;
    OK(launch("vram_spin", stream, (void *[]){&ns}));
}

static void fill(CUstream stream, CUdeviceptr p, unsigned long long bytes, unsigned int value, unsigned long long ms)
{
    unsigned long long ns = ms * 1000000;
    OK(launch("vram_fill", stream, (void *[]){&p, &bytes, &value, &ns}));
}

static CUdeviceptr alloc(size_t bytes)
{
    CUdeviceptr p;
    OK(cuMemAlloc_v2(&p, bytes));
    return p;
}

static CUstream stream(unsigned int flags)
{
    CUstream s;
    OK(cuStreamCreate(&s, flags));
    return s;
}

static double ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec / 1e6;
}

Test(simdriver, before_init)
{
    CUdeviceptr p;
    size_t f, t;
    IS(cuMemAlloc_v2(&p, 100), 3);
    IS(cuMemFree_v2(0), 3);
    IS(cuMemGetInfo_v2(&f, &t), 3);
    cr_assert_eq(sim_self_lookup_ok(), -1);
    OK(cuInit(0));
    cr_assert_eq(sim_self_lookup_ok(), 1);
    IS(cuMemAlloc_v2(&p, 0), 201);
    IS(cuMemFree_v2(512), 1);
    OK(cuMemFree_v2(0));
    IS(cuMemGetInfo_v2(&f, &t), 201);
}

Test(simdriver, accounting)
{
    begin();
    CUdeviceptr a = alloc(1048576), b = alloc(512), c = alloc(1048576);
    cr_assert_eq(b, a + 1048576);
    cr_assert_eq(sim_used(0), 2u * 2097152, "the second megabyte does not fit beside the small block");
    OK(cuMemFree_v2(a));
    OK(cuMemFree_v2(c));
    cr_assert_eq(sim_used(0), 2097152);
    cr_assert_eq(alloc(1000), a, "lowest address first");
    OK(cuMemFree_v2(a));
    OK(cuMemFree_v2(b));
    cr_assert_eq(sim_used(0), 0);
    CUdeviceptr big = alloc(2097153);
    cr_assert_eq(sim_used(0), 4194304);
    CUdeviceptr base;
    size_t size, avail, total;
    OK(cuMemGetAddressRange_v2(&base, &size, big + 2097152));
    cr_assert(base == big && size == 2097153);
    OK(cuMemGetInfo_v2(&avail, &total));
    cr_assert_eq(total - avail, 4194304);
    IS(cuMemAlloc_v2(&base, total), 2);
    IS(cuMemAlloc_v2(&base, 1ull << 63), 2);
    CUdeviceptr rest = alloc(total - 4194304);
    IS(cuMemAlloc_v2(&base, 1), 2);
    OK(cuMemFree_v2(rest));
}

Test(simdriver, bad_calls)
{
    begin();
    CUdeviceptr p = alloc(1000), q;
    size_t pitch;
    IS(cuMemAlloc_v2(&q, 0), 1);
    IS(cuMemAlloc_v2(NULL, 10), 1);
    IS(cuMemAllocPitch_v2(&q, &pitch, 10, 10, 3), 1);
    OK(cuMemAllocPitch_v2(&q, &pitch, 1000, 100, 4));
    cr_assert_eq(pitch, 1024);
    IS(cuMemFree_v2(p + 16), 1);
    IS(cuMemsetD8_v2(0x10, 0, 1), 1);
    OK(cuMemFree_v2(p));
    IS(cuMemFree_v2(p), 1);
    IS(cuMemGetAddressRange_v2(&q, &pitch, p), 500);
    OK(cuMemGetAddressRange_v2(NULL, NULL, p));
    cr_assert_eq(sim_refused_frees(), 2);
    unsigned long long data[2] = {7, 7};
    IS(cuPointerGetAttribute(data, CU_POINTER_ATTRIBUTE_CONTEXT, p), 1);
    CUpointer_attribute which[] = {CU_POINTER_ATTRIBUTE_HOST_POINTER, CU_POINTER_ATTRIBUTE_RANGE_SIZE};
    OK(cuPointerGetAttributes(2, which, (void *[]){&data[0], &data[1]}, p));
    cr_assert(data[0] == p && data[1] == 7);
}

Test(simdriver, context_life)
{
    begin();
    CUcontext a, b, again;
    OK(cuCtxCreate_v2(&a, 0, 0));
    CUdeviceptr p = alloc(4096), q = alloc(4096);
    OK(cuCtxSetCurrent(ctx));
    OK(cuMemFree_v2(p));
    OK(cuCtxDestroy_v2(a));
    IS(cuMemFree_v2(q), 1);
    OK(cuCtxCreate_v2(&b, 0, 0));
    cr_assert_neq(a, b);
    OK(cuCtxDestroy_v2(b));
    OK(cuCtxSetCurrent(ctx));
    p = alloc(4096);
    OK(cuDevicePrimaryCtxReset_v2(0));
    IS(cuMemFree_v2(p), 709);
    OK(cuDevicePrimaryCtxRetain(&again, 0));
    cr_assert_eq(again, ctx);
    IS(cuMemFree_v2(p), 1);
    OK(cuDevicePrimaryCtxRelease_v2(0));
    IS(cuDevicePrimaryCtxRelease_v2(0), 201);
    cr_assert_eq(sim_hazards(), 0);
    IS(cuCtxSetCurrent(b), 709);
    cr_assert_eq(sim_hazards(), 1);
}

Test(simdriver, free_waits_and_alloc_does_not)
{
    begin();
    CUstream s = stream(CU_STREAM_NON_BLOCKING);
    CUdeviceptr p = alloc(4096);
    double start = ms();
    spin(s, 60);
    CUdeviceptr q = alloc(4096);
    cr_assert_lt(ms() - start, 40);
    IS(cuStreamQuery(s), 600);
    OK(cuMemFree_v2(p));
    cr_assert_geq(ms() - start, 60);
    OK(cuStreamQuery(s));
    CUcontext other;
    OK(cuCtxCreate_v2(&other, 0, 0));
    start = ms();
    spin(NULL, 60);
    OK(cuMemFree_v2(q));
    cr_assert_lt(ms() - start, 40, "another context's work is not waited for");
}

Test(simdriver, lazy_clock)
{
    setenv("SIMCUDA_CLOCK", "lazy", 1);
    begin();
    CUstream s = stream(CU_STREAM_NON_BLOCKING), t = stream(CU_STREAM_NON_BLOCKING);
    CUevent e;
    OK(cuEventCreate(&e, 0));
    spin(s, 0);
    OK(cuEventRecord(e, s));
    OK(cuStreamWaitEvent(t, e, 0));
    spin(t, 0);
    spin(s, 0);
    usleep(2000);
    IS(cuEventQuery(e), 600);
    OK(cuStreamSynchronize(t));
    OK(cuEventQuery(e));
    IS(cuStreamQuery(s), 600);
    OK(cuCtxSynchronize());
    OK(cuStreamQuery(s));
    cr_assert_eq(sim_pending(), 0);
}

static void count(void *p)
{
    __atomic_add_fetch((int *)p, 1, __ATOMIC_SEQ_CST);
}

static void host_functions(void)
{
    begin();
    CUstream s = stream(CU_STREAM_NON_BLOCKING), t = stream(CU_STREAM_NON_BLOCKING);
    CUevent e;
    int calls = 0;
    OK(cuEventCreate(&e, 0));
    spin(s, 5);
    OK(cuLaunchHostFunc(s, count, &calls));
    spin(s, 1);
    OK(cuLaunchHostFunc(s, count, &calls));
    OK(cuEventRecord(e, s));
    OK(cuStreamWaitEvent(t, e, 0));
    spin(t, 1);
    OK(cuStreamSynchronize(t));
    cr_assert_eq(__atomic_load_n(&calls, __ATOMIC_SEQ_CST), 2);
}

Test(simdriver, host_functions_real, .timeout = 20)
{
    host_functions();
}

Test(simdriver, host_functions_lazy, .timeout = 20)
{
    setenv("SIMCUDA_CLOCK", "lazy", 1);
    host_functions();
}

Test(simdriver, effects_and_legacy_order)
{
    begin();
    CUstream s = stream(CU_STREAM_DEFAULT);
    CUdeviceptr p = alloc(1000), q = alloc(1000), result = alloc(4);
    unsigned long long n = 1000, zero = 0;
    unsigned int value = 5, wrong = 9;
    OK(cuMemsetD8_v2(result, 0, 4));
    fill(s, p, 1000, 5, 1);
    /* The legacy stream comes after every blocking stream, and they after it: no hazard anywhere. */
    OK(launch("vram_copy", NULL, (void *[]){&q, &p, &n, &zero}));
    OK(launch("vram_check", s, (void *[]){&q, &n, &value, &result}));
    OK(cuMemcpyDtoH_v2(&wrong, result, 4));
    cr_assert_eq(wrong, 0);
    value = 6;
    OK(launch("vram_check", s, (void *[]){&q, &n, &value, &result}));
    OK(cuMemcpyDtoH_v2(&wrong, result, 4));
    cr_assert_eq(wrong, 1000);
    cr_assert_eq(sim_hazards(), 0);
}

Test(simdriver, sticky_error)
{
    begin();
    CUdeviceptr p = alloc(4096), q;
    CUstream s = stream(CU_STREAM_NON_BLOCKING);
    OK(launch("vram_fault", s, NULL));
    IS(cuCtxSynchronize(), 700);
    IS(cuMemFree_v2(p), 700);
    IS(cuMemAlloc_v2(&q, 1), 700);
    IS(cuMemFree_v2(512), 700);
    IS(cuMemFree_v2(0), 700);
    size_t n;
    IS(cuMemGetInfo_v2(&n, NULL), 700);
    IS(cuMemGetAddressRange_v2(&q, &n, p), 700);
    IS(cuCtxGetStreamPriorityRange(NULL, NULL), 700);
    OK(cuCtxGetDevice(&(CUdevice){0}));
    OK(cuDevicePrimaryCtxReset_v2(0));
    IS(cuDevicePrimaryCtxRetain(&ctx, 0), 700);
}

/* One prohibited or permitted call inside a capture of each mode: the call's answer and the end's. */
static void in_capture(CUresult (*call)(void), const int expected[3])
{
    CUgraph g;
    CUstream s = stream(CU_STREAM_NON_BLOCKING);
    for (unsigned int mode = 0; mode < 3; mode++) {
        OK(cuStreamBeginCapture_v2(s, (CUstreamCaptureMode)mode));
        CUstreamCaptureStatus status;
        IS(call(), expected[mode]);
        OK(cuStreamIsCapturing(s, &status));
        cr_assert_eq((int)status, expected[mode] == 900 ? 2 : 1);
        IS(cuStreamEndCapture(s, &g), expected[mode] == 900 ? 901 : 0);
        cr_assert_eq(g == NULL, expected[mode] == 900);
        if (g)
            OK(cuGraphDestroy(g));
    }
}

static CUresult call_alloc(void)
{
    CUdeviceptr p;
    return cuMemAlloc_v2(&p, 4096);
}

static CUresult call_free_0(void)
{
    return cuMemFree_v2(0);
}

static CUresult call_free_bad(void)
{
    return cuMemFree_v2(512);
}

static CUevent event;

static CUresult call_query(void)
{
    return cuEventQuery(event);
}

static CUresult call_record(void)
{
    return cuCtxRecordEvent(ctx, event);
}

static CUresult call_info(void)
{
    size_t n;
    return cuMemGetInfo_v2(&n, NULL);
}

static CUresult call_alloc_relaxed(void)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    cuThreadExchangeStreamCaptureMode(&mode);
    CUresult r = call_alloc();
    cuThreadExchangeStreamCaptureMode(&mode);
    return r;
}

Test(simdriver, capture_rules)
{
    begin();
    OK(cuEventCreate(&event, 0));
    in_capture(call_alloc, (int[]){900, 900, 0});
    in_capture(call_free_0, (int[]){900, 900, 0});
    in_capture(call_free_bad, (int[]){900, 900, 1});
    in_capture(call_query, (int[]){900, 900, 0});
    in_capture(call_record, (int[]){900, 900, 900});
    in_capture(cuCtxSynchronize, (int[]){900, 900, 900});
    in_capture(call_info, (int[]){0, 0, 0});
    in_capture(call_alloc_relaxed, (int[]){0, 0, 0});
    cr_assert_eq(sim_capturing(), 0);
}

static void *other_thread(void *arg)
{
    CUresult (*call)(void) = *(CUresult(**)(void))arg;
    cuCtxSetCurrent(ctx);
    return (void *)(uintptr_t)call();
}

static int on_thread(CUresult (*call)(void))
{
    pthread_t t;
    void *r;
    cr_assert_eq(pthread_create(&t, NULL, other_thread, &call), 0);
    pthread_join(t, &r);
    return (int)(uintptr_t)r;
}

static CUstream captured;

static CUresult call_end(void)
{
    CUgraph g;
    return cuStreamEndCapture(captured, &g);
}

Test(simdriver, capture_threads)
{
    begin();
    CUgraph g;
    CUstream s = captured = stream(CU_STREAM_NON_BLOCKING);
    OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
    cr_assert_eq(sim_capturing(), 1);
    IS(on_thread(call_end), 908);
    IS(on_thread(call_alloc), 900);
    cr_assert_eq(sim_calls_during_capture("cuMemAlloc_v2"), 1);
    IS(cuStreamEndCapture(s, &g), 901);
    OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    OK(on_thread(call_alloc));
    IS(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_RELAXED), 401);
    OK(cuStreamEndCapture(s, &g));
    IS(cuStreamEndCapture(s, &g), 401);
    IS(cuStreamBeginCapture(NULL), 906);
    OK(cuStreamBeginCapture(s));
    OK(cuStreamDestroy_v2(s));
    cr_assert_eq(sim_capturing(), 0);
    OK(call_alloc());
    s = stream(CU_STREAM_NON_BLOCKING);
    OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_RELAXED));
    captured = s;
    OK(on_thread(call_end));
}

Test(simdriver, capture_fork_join_and_replay)
{
    begin();
    CUstream s = stream(CU_STREAM_NON_BLOCKING), t = stream(CU_STREAM_NON_BLOCKING);
    CUevent e, f;
    CUgraph g;
    CUgraphExec x;
    CUdeviceptr p = alloc(100);
    unsigned char byte = 0;
    size_t nodes;
    OK(cuEventCreate(&e, 0));
    OK(cuEventCreate(&f, 0));
    OK(cuMemsetD8_v2(p, 1, 100));
    for (int join = 0; join < 2; join++) {
        OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        OK(cuEventRecord(e, s));
        OK(cuStreamWaitEvent(t, e, 0));
        OK(cuMemsetD8Async(p, 7, 100, t));
        OK(cuEventRecord(f, t));
        if (join)
            OK(cuStreamWaitEvent(s, f, 0));
        IS(cuStreamEndCapture(s, &g), join ? 0 : 904);
    }
    OK(cuGraphGetNodes(g, NULL, &nodes));
    cr_assert_eq(nodes, 1);
    OK(cuMemcpyDtoH_v2(&byte, p, 1));
    cr_assert_eq(byte, 1, "captured work does not run");
    OK(cuGraphInstantiateWithFlags(&x, g, 0));
    OK(cuGraphDestroy(g));
    OK(cuGraphLaunch(x, s));
    OK(cuStreamSynchronize(s));
    OK(cuMemcpyDtoH_v2(&byte, p, 1));
    cr_assert_eq(byte, 7);
    OK(cuGraphExecDestroy(x));
    cr_assert_eq(sim_hazards(), 0);
}

Test(simdriver, lookup)
{
    begin();
    void *p;
    CUdriverProcAddressQueryResult status;
    OK(cuGetProcAddress_v2("cuMemAlloc", &p, 12000, 0, &status));
    cr_assert_eq(p, (void *)cuMemAlloc_v2);
    OK(cuGetProcAddress_v2("cuMemAlloc", &p, 3000, 0, &status));
    cr_assert(p && p != (void *)cuMemAlloc_v2);
    OK(cuGetProcAddress_v2("cuStreamBeginCapture", &p, 10000, 2, &status));
    cr_assert_eq(p, (void *)cuStreamBeginCapture_ptsz);
    OK(cuGetProcAddress_v2("cuStreamBeginCapture", &p, 13000, 2, &status));
    cr_assert_eq(p, (void *)cuStreamBeginCapture_v2_ptsz);
    OK(cuGetProcAddress_v2("cuMemAlloc_v2", &p, 12000, 0, &status));
    cr_assert(!p && status == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
    OK(cuGetProcAddress_v2("cuCtxRecordEvent", &p, 11000, 0, &status));
    cr_assert(!p && status == CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
    IS(cuGetProcAddress_v2("cuNope", &p, 12000, 0, NULL), 500);
    OK(cuGetProcAddress("cuGetProcAddress", &p, 11030, 0));
    cr_assert_eq(p, (void *)cuGetProcAddress);
    OK(cuGetProcAddress("cuGetProcAddress", &p, 12000, 0));
    cr_assert_eq(p, (void *)cuGetProcAddress_v2);
}

Test(simdriver, hidden_entries)
{
    setenv("SIMCUDA_HIDE", "cuCtxRecordEvent", 1);
    setenv("SIMCUDA_VERSION", "12040", 1);
    begin();
    void *p;
    CUdriverProcAddressQueryResult status;
    OK(cuGetProcAddress_v2("cuCtxRecordEvent", &p, 13000, 0, &status));
    cr_assert(!p && status == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
    OK(cuEventCreate(&event, 0));
    IS(cuCtxRecordEvent(ctx, event), 801);
    IS(cuCtxWaitEvent(ctx, event), 801);
}

static void free_it(const char *entry, void *p)
{
    (void)entry;
    cuMemFree_v2(*(CUdeviceptr *)p);
}

Test(simdriver, failure_and_callback)
{
    begin();
    CUdeviceptr p;
    cr_assert_eq(sim_fail("cuMemAlloc_v2", 2, 1, 2), 0);
    cr_assert_eq(sim_fail("cuNope", 1, 1, 2), -1);
    p = alloc(512);
    IS(cuMemAlloc_v2(&p, 512), 2);
    OK(cuMemFree_v2(p));
    p = alloc(512);
    cr_assert_eq(sim_on_call("cuMemFree_v2", free_it, &p), 0);
    IS(cuMemFree_v2(p), 1);
    cr_assert_eq(sim_calls("cuMemFree_v2"), 3);
}

Test(simdriver, judge_unordered)
{
    begin();
    CUstream s = stream(CU_STREAM_NON_BLOCKING), t = stream(CU_STREAM_NON_BLOCKING);
    CUdeviceptr p = alloc(4096);
    CUevent e;
    OK(cuEventCreate(&e, 0));
    fill(s, p, 2048, 1, 0);
    fill(t, p + 2048, 2048, 2, 0);
    cr_assert_eq(sim_hazards(), 0, "they do not overlap");
    OK(cuEventRecord(e, s));
    OK(cuStreamWaitEvent(t, e, 0));
    fill(t, p, 2048, 3, 0);
    cr_assert_eq(sim_hazards(), 0, "ordered by the event");
    usleep(2000);
    fill(s, p, 1, 4, 0);
    cr_assert_eq(sim_hazards(), 1, "complete in time, but nobody looked");
    cr_assert_not_null(sim_hazard_text(0));
    OK(cuCtxSynchronize());
    fill(s, p, 4096, 4, 0);
    cr_assert_eq(sim_hazards(), 1, "the host has waited");
    OK(cuEventCreate(&event, 0));
    OK(cuCtxRecordEvent(ctx, event));
    fill(s, p, 4096, 4, 0);
    OK(cuCtxWaitEvent(ctx, event));
    fill(t, p, 4096, 4, 0);
    cr_assert_eq(sim_hazards(), 2, "the second fill came after the record");
    OK(cuCtxRecordEvent(ctx, event));
    OK(cuCtxWaitEvent(ctx, event));
    fill(stream(CU_STREAM_NON_BLOCKING), p, 4096, 4, 0);
    cr_assert_eq(sim_hazards(), 2, "also for streams made later");
}

Test(simdriver, judge_ownership)
{
    begin();
    CUdeviceptr p = alloc(4096), q = alloc(4096);
    sim_note_alloc(p, 4096);
    fill(NULL, p, 4096, 1, 0);
    cr_assert_eq(sim_hazards(), 0);
    fill(NULL, p, 4097, 1, 0);
    cr_assert_eq(sim_hazards(), 1, "past the end");
    OK(cuMemFree_v2(p));
    cr_assert_eq(sim_hazards(), 2, "the driver freed what the program still uses");
    sim_note_alloc(q, 4096);
    sim_note_free(q);
    fill(NULL, q, 1, 1, 0);
    cr_assert_eq(sim_hazards(), 3, "freed by the program, kept by a shim");
    sim_note_alloc(q, 100);
    fill(NULL, q, 100, 1, 0);
    cr_assert_eq(sim_hazards(), 3);
    sim_note_alloc(q + 50, 10);
    cr_assert_eq(sim_hazards(), 4, "handed out twice");
    sim_clear_hazards();
    sim_note_free(q + 50);
    OK(cuMemFree_v2(q));
    cr_assert_eq(sim_hazards(), 0);
}

Test(simdriver, judge_recycled_by_the_driver)
{
    begin();
    CUstream s = stream(CU_STREAM_NON_BLOCKING), t = stream(CU_STREAM_NON_BLOCKING);
    for (int i = 0; i < 50; i++) {
        CUdeviceptr p = alloc(4096);
        sim_note_alloc(p, 4096);
        fill(i & 1 ? s : t, p, 4096, 1, 0);
        sim_note_free(p);
        OK(cuMemFree_v2(p));
    }
    cr_assert_eq(sim_hazards(), 0);
}

Test(simdriver, other_memory)
{
    begin();
    void *h;
    CUdeviceptr d;
    unsigned int flags;
    OK(cuMemHostAlloc(&h, 1000, 2));
    OK(cuMemHostGetDevicePointer_v2(&d, h, 0));
    cr_assert_eq(d, (CUdeviceptr)(uintptr_t)h);
    OK(cuMemHostGetFlags(&flags, h));
    cr_assert_eq(flags, 2);
    fill(NULL, d, 1000, 3, 0);
    OK(cuMemFreeHost(h));
    IS(cuMemFreeHost(h), 1);
    static char mine[100];
    OK(cuMemHostRegister_v2(mine, sizeof mine, 0));
    IS(cuMemHostRegister_v2(mine, sizeof mine, 0), 712);
    OK(cuMemHostUnregister(mine));
    IS(cuMemHostUnregister(mine), 713);
    OK(cuMemAllocManaged(&d, 100, 1));
    *(volatile char *)(uintptr_t)d = 1;
    OK(cuMemFree_v2(d));
    CUstream s = stream(CU_STREAM_NON_BLOCKING);
    for (int i = 0; i < 10; i++) {
        OK(cuMemAllocAsync(&d, 100000, s));
        fill(s, d, 100000, 1, 0);
        OK(cuMemFreeAsync(d, s));
    }
    OK(cuStreamSynchronize(s));
    size_t avail, total;
    OK(cuMemGetInfo_v2(&avail, &total));
    cr_assert_eq(avail, total);
    cr_assert_eq(sim_hazards(), 0);
}

Test(simdriver, virtual_memory)
{
    begin();
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    CUmemAccessDesc access = {prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle h;
    CUdeviceptr va;
    size_t g;
    unsigned char byte = 0;
    OK(cuMemGetAllocationGranularity(&g, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    OK(cuMemAddressReserve(&va, 2 * g, 0, 0, 0));
    OK(cuMemCreate(&h, g, &prop, 0));
    cr_assert_eq(sim_used(0), g);
    OK(cuMemMap(va, g, 0, h, 0));
    OK(cuMemMap(va + g, g, 0, h, 0));
    OK(cuMemSetAccess(va, 2 * g, &access, 1));
    OK(cuMemsetD8_v2(va, 9, g));
    OK(cuMemcpyDtoH_v2(&byte, va + g, 1));
    cr_assert_eq(byte, 9, "two mappings of one handle");
    OK(cuMemRelease(h));
    IS(cuMemFree_v2(va), 1);
    OK(cuMemUnmap(va, 2 * g));
    cr_assert_eq(sim_used(0), 0);
    OK(cuMemAddressFree(va, 2 * g));
}

static uint64_t amount(CUmemoryPool pool, CUmemPool_attribute attribute)
{
    uint64_t n;
    OK(cuMemPoolGetAttribute(pool, attribute, &n));
    return n;
}

#define MIB ((size_t)1 << 20)
#define RESERVED(pool) amount(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)
#define USED(pool) amount(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT)

static CUmemoryPool pool_create(size_t max)
{
    CUmemoryPool pool;
    CUmemPoolProps props = {
        .allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}, .maxSize = max};
    OK(cuMemPoolCreate(&pool, &props));
    return pool;
}

static CUdeviceptr pool_alloc(CUmemoryPool pool, size_t bytes, CUstream s)
{
    CUdeviceptr p;
    OK(cuMemAllocFromPoolAsync(&p, bytes, pool, s));
    return p;
}

Test(simdriver, pool_releases_at_a_synchronise)
{
    setenv("SIMCUDA_CLOCK", "lazy", 1);
    begin();
    CUstream s = stream(CU_STREAM_NON_BLOCKING);
    CUmemoryPool pool = pool_create(0);
    CUdeviceptr p = pool_alloc(pool, 4 * MIB, s), q = pool_alloc(pool, 1000, s);
    cr_assert(RESERVED(pool) == 6 * MIB && USED(pool) == 4 * MIB + 1024 && sim_used(0) == 6 * MIB);
    spin(s, 1);
    OK(cuMemFreeAsync(p, s));
    cr_assert(RESERVED(pool) == 6 * MIB && USED(pool) == 1024);
    OK(cuStreamSynchronize(s));
    cr_assert(RESERVED(pool) == 2 * MIB && sim_used(0) == 2 * MIB);
    uint64_t threshold = 8 * MIB;
    OK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
    p = pool_alloc(pool, 12 * MIB, s);
    OK(cuMemFreeAsync(p, s));
    CUevent e;
    OK(cuEventCreate(&e, 0));
    OK(cuEventRecord(e, s));
    OK(cuEventSynchronize(e));
    cr_assert(RESERVED(pool) == 8 * MIB && sim_used(0) == 8 * MIB);
    p = pool_alloc(pool, 6 * MIB, s);
    cr_assert_eq(sim_used(0), 8 * MIB, "from what was kept");
    cr_assert_eq(amount(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH), 14 * MIB);
    cr_assert_eq(amount(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH), 12 * MIB + 1024);
    uint64_t zero = 0, one = 1;
    OK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, &zero));
    IS(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH, &one), 1);
    IS(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &zero), 1);
    cr_assert_eq(amount(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH), 8 * MIB);
    OK(cuMemFree_v2(p));
    cr_assert_eq(RESERVED(pool), 8 * MIB);
    OK(cuMemPoolTrimTo(pool, 3 * MIB));
    cr_assert_eq(RESERVED(pool), 4 * MIB, "no less than what shall be kept");
    OK(cuMemPoolTrimTo(pool, 0));
    cr_assert_eq(RESERVED(pool), 2 * MIB, "a block is not freed");
    OK(cuMemFreeAsync(q, s));
    OK(cuCtxSynchronize());
    cr_assert_eq(sim_used(0), 2 * MIB, "below the threshold");
    OK(cuMemPoolDestroy(pool));
    cr_assert_eq(sim_used(0), 0);
    IS(cuMemPoolDestroy(pool), 1);
    cr_assert_eq(sim_hazards(), 0);
}

Test(simdriver, pool_without_room)
{
    setenv("SIMCUDA_CAPACITY", "64M", 1);
    begin();
    CUstream s = stream(CU_STREAM_NON_BLOCKING);
    CUmemoryPool pool = pool_create(0), other = pool_create(8 * MIB);
    CUdeviceptr p;
    uint64_t threshold = UINT64_MAX;
    OK(cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
    p = pool_alloc(pool, 40 * MIB, s);
    IS(cuMemAllocFromPoolAsync(&p, 10 * MIB, other, s), 2);
    OK(cuMemFreeAsync(p, s));
    OK(cuStreamSynchronize(s));
    cr_assert_eq(sim_used(0), 40 * MIB);
    CUdeviceptr q = alloc(30 * MIB);
    cr_assert(RESERVED(pool) == 34 * MIB && sim_used(0) == 64 * MIB, "a pool gives what it only keeps");
    OK(cuMemAllocFromPoolAsync(&p, 8 * MIB, other, s));
    cr_assert(RESERVED(pool) == 26 * MIB && RESERVED(other) == 8 * MIB, "also to another pool");
    IS(cuMemAlloc_v2(&p, 27 * MIB), 2);
    OK(cuMemFree_v2(q));
}

Test(simdriver, pool_destroyed_first_and_context_ended)
{
    begin();
    CUcontext other;
    OK(cuCtxCreate_v2(&other, 0, 0));
    CUstream s = stream(CU_STREAM_NON_BLOCKING);
    CUmemoryPool pool = pool_create(0), now, standard;
    OK(cuDeviceSetMemPool(0, pool));
    CUdeviceptr p, q;
    OK(cuMemAllocAsync(&p, 4 * MIB, s));
    OK(cuMemAllocAsync(&q, 100, s));
    OK(cuCtxDestroy_v2(other));
    cr_assert_eq(sim_used(0), 6 * MIB, "pool memory is the device's, not the context's");
    OK(cuCtxSetCurrent(ctx));
    fill(NULL, p, 4 * MIB, 1, 0);
    OK(cuMemPoolDestroy(pool));
    OK(cuDeviceGetMemPool(&now, 0));
    OK(cuDeviceGetDefaultMemPool(&standard, 0));
    cr_assert_eq(now, standard);
    IS(cuMemPoolDestroy(standard), 1);
    cr_assert_eq(sim_used(0), 6 * MIB);
    OK(cuMemFree_v2(p));
    cr_assert_eq(sim_used(0), 2 * MIB);
    OK(cuMemFreeAsync(q, NULL));
    OK(cuCtxSynchronize());
    cr_assert_eq(sim_used(0), 0);
    cr_assert_eq(sim_hazards(), 0);
}

static CUarray array_2d(size_t width, size_t height)
{
    CUarray a;
    CUDA_ARRAY_DESCRIPTOR d = {width, height, CU_AD_FORMAT_FLOAT, 4};
    OK(cuArrayCreate_v2(&a, &d));
    return a;
}

static CUresult call_array(void)
{
    CUarray a;
    CUDA_ARRAY_DESCRIPTOR d = {8, 8, CU_AD_FORMAT_FLOAT, 1};
    return cuArrayCreate_v2(&a, &d);
}

Test(simdriver, arrays)
{
    begin();
    CUarray a = array_2d(1024, 256), b = array_2d(16, 0), c = NULL;
    cr_assert_eq(sim_used(0), 3u * 2097152, "4 MiB in pages of their own, 256 bytes among small blocks");
    CUDA_ARRAY3D_DESCRIPTOR d = {64, 64, 64, CU_AD_FORMAT_HALF, 2, 0};
    OK(cuArray3DCreate_v2(&c, &d));
    cr_assert_eq(sim_used(0), 3u * 2097152, "1 MiB beside the small one");
    IS(cuMipmappedArrayDestroy((CUmipmappedArray)(void *)a), 400);
    OK(cuArrayDestroy(a));
    IS(cuArrayDestroy(a), 400);
    OK(cuArrayDestroy(b));
    OK(cuArrayDestroy(c));
    cr_assert_eq(sim_used(0), 0);
    CUmipmappedArray m;
    d = (CUDA_ARRAY3D_DESCRIPTOR){1024, 1024, 0, CU_AD_FORMAT_FLOAT, 1, 0};
    OK(cuMipmappedArrayCreate(&m, &d, 99));
    cr_assert_eq(sim_used(0), 3u * 2097152, "a third more than the first level");
    OK(cuMipmappedArrayDestroy(m));
    d.Flags = CUDA_ARRAY3D_SPARSE;
    OK(cuMipmappedArrayCreate(&m, &d, 1));
    d.Flags = CUDA_ARRAY3D_DEFERRED_MAPPING;
    OK(cuArray3DCreate_v2(&a, &d));
    cr_assert_eq(sim_used(0), 0);
    OK(cuArrayDestroy(a));
    OK(cuMipmappedArrayDestroy(m));
}

Test(simdriver, arrays_bad_calls_and_waiting)
{
    begin();
    CUarray a = array_2d(16, 16);
    CUDA_ARRAY3D_DESCRIPTOR d = {131072, 65536, 0, CU_AD_FORMAT_FLOAT, 4, 0};
    IS(cuArray3DCreate_v2(&a, &d), 2);
    d.NumChannels = 3;
    IS(cuArray3DCreate_v2(&a, &d), 1);
    d = (CUDA_ARRAY3D_DESCRIPTOR){16, 0, 16, CU_AD_FORMAT_FLOAT, 1, 0};
    IS(cuArray3DCreate_v2(&a, &d), 1);
    d = (CUDA_ARRAY3D_DESCRIPTOR){0, 16, 0, CU_AD_FORMAT_FLOAT, 1, 0};
    IS(cuArray3DCreate_v2(&a, &d), 1);
    d = (CUDA_ARRAY3D_DESCRIPTOR){16, 16, 0, (CUarray_format)77, 1, 0};
    IS(cuArray3DCreate_v2(&a, &d), 1);
    d = (CUDA_ARRAY3D_DESCRIPTOR){16, 16, 5, CU_AD_FORMAT_FLOAT, 1, CUDA_ARRAY3D_CUBEMAP};
    IS(cuArray3DCreate_v2(&a, &d), 1);
    IS(cuArray3DCreate_v2(&a, NULL), 1);
    IS(cuArrayCreate_v2(NULL, &(CUDA_ARRAY_DESCRIPTOR){8, 8, CU_AD_FORMAT_FLOAT, 1}), 1);
    in_capture(call_array, (int[]){900, 900, 0});
    double start = ms();
    spin(stream(CU_STREAM_NON_BLOCKING), 60);
    OK(cuArrayDestroy(a));
    cr_assert_geq(ms() - start, 60);
}

#define FD CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
static const CUmemAllocationProp shareable = {
    .type = CU_MEM_ALLOCATION_TYPE_PINNED, .requestedHandleTypes = FD, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};

static CUdeviceptr map(CUmemGenericAllocationHandle h, size_t size)
{
    CUmemAccessDesc access = {shareable.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr va;
    OK(cuMemAddressReserve(&va, size, 0, 0, 0));
    OK(cuMemMap(va, size, 0, h, 0));
    OK(cuMemSetAccess(va, size, &access, 1));
    return va;
}

static CUmemGenericAllocationHandle import(int fd)
{
    CUmemGenericAllocationHandle h;
    OK(cuMemImportFromShareableHandle(&h, (void *)(intptr_t)fd, FD));
    return h;
}

Test(simdriver, shared_memory)
{
    begin();
    CUmemAllocationProp prop = shareable, plain = shareable;
    CUmemGenericAllocationHandle h, i, j;
    int fd, again;
    OK(cuMemCreate(&h, 4 * MIB, &prop, 0));
    OK(cuMemGetAllocationPropertiesFromHandle(&prop, h));
    cr_assert_eq((int)prop.requestedHandleTypes, (int)FD);
    OK(cuMemExportToShareableHandle(&fd, h, FD, 0));
    OK(cuMemExportToShareableHandle(&again, h, FD, 0));
    i = import(fd);
    cr_assert(i != h && sim_used(0) == 4 * MIB, "another handle of the same memory");
    CUdeviceptr p = map(h, 4 * MIB), q = map(i, 4 * MIB);
    unsigned char byte = 0;
    OK(cuMemsetD8_v2(p, 9, 4 * MIB));
    OK(cuMemcpyDtoH_v2(&byte, q + 4 * MIB - 1, 1));
    cr_assert_eq(byte, 9);
    OK(cuMemRetainAllocationHandle(&j, (void *)(uintptr_t)q));
    cr_assert_eq(j, i);
    OK(cuMemRelease(j));
    OK(cuMemRelease(h));
    OK(cuMemRelease(i));
    OK(cuMemUnmap(p, 4 * MIB));
    OK(cuMemUnmap(q, 4 * MIB));
    close(again);
    cr_assert_eq(sim_used(0), 4 * MIB, "the descriptor keeps it");
    i = import(fd);
    close(fd);
    q = map(i, 4 * MIB);
    OK(cuMemcpyDtoH_v2(&byte, q, 1));
    cr_assert(byte == 9 && sim_used(0) == 4 * MIB);
    OK(cuMemRelease(i));
    OK(cuMemUnmap(q, 4 * MIB));
    cr_assert_eq(sim_used(0), 0);
    plain.requestedHandleTypes = CU_MEM_HANDLE_TYPE_NONE;
    OK(cuMemCreate(&h, 2 * MIB, &plain, 0));
    IS(cuMemExportToShareableHandle(&fd, h, FD, 0), 1);
    IS(cuMemExportToShareableHandle(&fd, h, (CUmemAllocationHandleType)2, 0), 801);
    OK(cuMemRelease(h));
    IS(cuMemExportToShareableHandle(&fd, h, FD, 0), 1);
    IS(cuMemImportFromShareableHandle(&h, (void *)(intptr_t)999, FD), 1);
    IS(cuMemGetAllocationPropertiesFromHandle(&prop, h), 1);
}

Test(simdriver, memory_of_another_process)
{
    int to[2], back[2], fd = -1;
    unsigned char byte = 0;
    cr_assert(!pipe(to) && !pipe(back));
    pid_t child = fork(); /* before the driver starts: each has its own */
    if (!child) {
        char path[64];
        int owner[2];
        if (read(to[0], owner, sizeof owner) != (ssize_t)sizeof owner)
            _exit(1);
        snprintf(path, sizeof path, "/proc/%d/fd/%d", owner[0], owner[1]);
        begin();
        CUmemGenericAllocationHandle i = import(open(path, O_RDWR));
        OK(cuMemsetD8_v2(map(i, 2 * MIB), 5, 2 * MIB));
        OK(cuCtxSynchronize());
        _exit(sim_used(0) == 0 && write(back[1], "x", 1) == 1 ? 0 : 1);
    }
    begin();
    CUmemGenericAllocationHandle h;
    OK(cuMemCreate(&h, 2 * MIB, &shareable, 0));
    OK(cuMemExportToShareableHandle(&fd, h, FD, 0));
    int me[2] = {getpid(), fd}, status;
    cr_assert_eq(write(to[1], me, sizeof me), (ssize_t)sizeof me);
    cr_assert_eq(read(back[0], &byte, 1), 1);
    waitpid(child, &status, 0);
    cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    OK(cuMemcpyDtoH_v2(&byte, map(h, 2 * MIB) + MIB, 1));
    cr_assert_eq(byte, 5);
}

Test(simdriver, what_ends_with_a_context)
{
    begin();
    CUcontext other;
    OK(cuCtxCreate_v2(&other, 0, 0));
    CUdeviceptr managed, pool;
    CUmemGenericAllocationHandle h;
    void *pinned;
    static char mine[100];
    CUarray a = array_2d(1024, 256);
    CUmipmappedArray m;
    CUDA_ARRAY3D_DESCRIPTOR d = {64, 64, 0, CU_AD_FORMAT_FLOAT, 1, 0};
    OK(cuMipmappedArrayCreate(&m, &d, 3));
    OK(cuMemAllocManaged(&managed, 4 * MIB, 1));
    OK(cuMemHostAlloc(&pinned, 4096, 0));
    OK(cuMemHostRegister_v2(mine, sizeof mine, 0));
    OK(cuMemAllocAsync(&pool, 2 * MIB, NULL));
    OK(cuMemCreate(&h, 2 * MIB, &shareable, 0));
    CUdeviceptr mapped = map(h, 2 * MIB);
    cr_assert_eq(sim_used(0), 14 * MIB);
    OK(cuCtxDestroy_v2(other));
    OK(cuCtxSetCurrent(ctx));
    cr_assert_eq(sim_used(0), 4 * MIB);
    IS(cuArrayDestroy(a), 400);
    IS(cuMipmappedArrayDestroy(m), 400);
    IS(cuMemFree_v2(managed), 1);
    IS(cuMemFreeHost(pinned), 1);
    IS(cuMemHostUnregister(mine), 713);
    fill(NULL, pool, 2 * MIB, 1, 0);
    fill(NULL, mapped, 2 * MIB, 1, 0);
    OK(cuMemFreeAsync(pool, NULL));
    OK(cuCtxSynchronize());
    OK(cuMemUnmap(mapped, 2 * MIB));
    OK(cuMemRelease(h));
    cr_assert_eq(sim_used(0), 0);
    cr_assert_eq(sim_hazards(), 0);
}

Test(simdriver, external_memory)
{
    begin();
    int fd;
    CUmemGenericAllocationHandle h;
    CUexternalMemory m, n;
    CUdeviceptr p, q;
    unsigned char byte = 0;
    OK(cuMemCreate(&h, 2 * MIB, &shareable, 0));
    OK(cuMemExportToShareableHandle(&fd, h, FD, 0)); /* stands for another API's memory */
    OK(cuMemsetD8_v2(map(h, 2 * MIB) + 5000, 3, 1));
    CUDA_EXTERNAL_MEMORY_HANDLE_DESC d = {
        .type = CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD, .handle.fd = fd, .size = 2 * MIB};
    OK(cuImportExternalMemory(&m, &d));
    OK(cuExternalMemoryGetMappedBuffer(&p, m, &(CUDA_EXTERNAL_MEMORY_BUFFER_DESC){.offset = 5000, .size = 1000}));
    OK(cuMemcpyDtoH_v2(&byte, p, 1));
    cr_assert_eq(byte, 3);
    d.handle.fd = open("/dev/null", O_RDWR);
    OK(cuImportExternalMemory(&n, &d));
    OK(cuExternalMemoryGetMappedBuffer(&q, n, &(CUDA_EXTERNAL_MEMORY_BUFFER_DESC){.size = 2 * MIB}));
    cr_assert_eq(sim_used(0), 2 * MIB, "the other API's, not ours");
    IS(cuExternalMemoryGetMappedBuffer(&p, n, &(CUDA_EXTERNAL_MEMORY_BUFFER_DESC){.offset = 1, .size = 2 * MIB}), 1);
    OK(cuDestroyExternalMemory(n));
    cr_assert_eq(fcntl(d.handle.fd, F_GETFD), -1);
    IS(cuDestroyExternalMemory(n), 400);
    IS(cuExternalMemoryGetMappedBuffer(&p, n, &(CUDA_EXTERNAL_MEMORY_BUFFER_DESC){.size = 1}), 400);
    IS(cuImportExternalMemory(&n, &d), 1);
    d.type = (CUexternalMemoryHandleType)4;
    IS(cuImportExternalMemory(&n, &d), 801);
    double start = ms();
    spin(NULL, 60);
    fill(NULL, q, 2 * MIB, 1, 0);
    OK(cuMemFree_v2(q));
    cr_assert_geq(ms() - start, 60);
    IS(cuMemFree_v2(q), 1);
    OK(cuMemFree_v2(p));
    OK(cuDestroyExternalMemory(m));
    cr_assert_eq(sim_hazards(), 0);
}

static uint64_t graph_amount(CUgraphMem_attribute attribute)
{
    uint64_t n;
    OK(cuDeviceGetGraphMemAttribute(0, attribute, &n));
    return n;
}

#define GRAPHS_USE graph_amount(CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT)
#define GRAPHS_RESERVE graph_amount(CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT)

/* Allocates, fills, and perhaps frees 4 MiB. */
static CUgraphExec graph_with_memory(CUstream s, bool frees, unsigned int flags, CUdeviceptr *p)
{
    CUgraph g;
    CUgraphExec x;
    OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
    OK(cuMemAllocAsync(p, 4 * MIB, s));
    sim_note_alloc(*p, 4 * MIB);
    OK(cuMemsetD8Async(*p, 7, 4 * MIB, s));
    if (frees) {
        sim_note_free(*p);
        OK(cuMemFreeAsync(*p, s));
        IS(cuMemFreeAsync(*p, s), 1);
    }
    OK(cuStreamEndCapture(s, &g));
    OK(cuGraphInstantiateWithFlags(&x, g, flags));
    OK(cuGraphDestroy(g));
    return x;
}

Test(simdriver, graph_memory)
{
    begin();
    CUstream s = stream(CU_STREAM_NON_BLOCKING), t = stream(CU_STREAM_NON_BLOCKING);
    CUdeviceptr p;
    CUgraphExec x = graph_with_memory(s, true, 0, &p);
    cr_assert_eq(sim_used(0), 0, "an address alone");
    IS(cuMemFree_v2(p), 1);
    OK(cuGraphLaunch(x, s));
    cr_assert(sim_used(0) == 4 * MIB && GRAPHS_USE == 4 * MIB && GRAPHS_RESERVE == 4 * MIB);
    OK(cuGraphLaunch(x, t)); /* comes after the first */
    OK(cuCtxSynchronize());
    cr_assert_eq(sim_used(0), 4 * MIB, "a synchronise leaves it");
    cr_assert_eq(sim_hazards(), 0);
    OK(cuDeviceGraphMemTrim(0));
    cr_assert(sim_used(0) == 0 && GRAPHS_USE == 0);
    OK(cuGraphLaunch(x, s));
    cr_assert_eq(sim_used(0), 4 * MIB);
    fill(s, p, 100, 1, 0);
    cr_assert_eq(sim_hazards(), 1, "freed inside the graph");
    OK(cuGraphExecDestroy(x));
    OK(cuCtxSynchronize());
    cr_assert(GRAPHS_USE == 0 && GRAPHS_RESERVE == 4 * MIB && sim_used(0) == 4 * MIB);
    OK(cuDeviceGraphMemTrim(0));
    cr_assert(GRAPHS_RESERVE == 0 && sim_used(0) == 0);
    cr_assert_eq(graph_amount(CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH), 4 * MIB);
    cr_assert_not(sim_is_allocated(p));
    IS(cuDeviceGraphMemTrim(1), 101);
}

Test(simdriver, graph_memory_freed_outside)
{
    begin();
    CUstream s = stream(CU_STREAM_NON_BLOCKING);
    CUdeviceptr p, q, plain = alloc(100), pool;
    CUgraph g;
    unsigned char byte = 0;
    CUgraphExec x = graph_with_memory(s, false, 0, &p), y = graph_with_memory(s, false, 1, &q);
    OK(cuGraphLaunch(x, s));
    IS(cuGraphLaunch(x, s), 1);
    OK(cuStreamSynchronize(s));
    OK(cuMemcpyDtoH_v2(&byte, p + 100, 1));
    cr_assert_eq(byte, 7);
    sim_note_free(p);
    OK(cuMemFreeAsync(p, s));
    IS(cuMemFreeAsync(p, s), 1);
    OK(cuGraphLaunch(x, s));
    OK(cuGraphLaunch(y, s));
    OK(cuGraphLaunch(y, s)); /* frees what the first has left */
    OK(cuGraphExecDestroy(x));
    OK(cuGraphExecDestroy(y));
    OK(cuDeviceGraphMemTrim(0));
    cr_assert_eq(GRAPHS_USE, 8 * MIB, "nobody freed it");
    OK(cuMemFree_v2(p));
    OK(cuMemFreeAsync(q, s));
    OK(cuStreamSynchronize(s));
    OK(cuDeviceGraphMemTrim(0));
    cr_assert_eq(GRAPHS_RESERVE, 0);
    OK(cuMemAllocAsync(&pool, 100, s));
    OK(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_RELAXED));
    IS(cuMemFreeAsync(plain, s), 1);
    IS(cuMemFreeAsync(pool, s), 1);
    OK(cuMemAllocAsync(&p, 100, s));
    OK(cuStreamEndCapture(s, &g));
    OK(cuGraphInstantiateWithFlags(&x, g, 0));
    IS(cuGraphInstantiateWithFlags(&y, g, 0), 1);
    OK(cuGraphDestroy(g));
    OK(cuGraphExecDestroy(x));
    OK(cuCtxSynchronize());
    cr_assert_not(sim_is_allocated(p), "never launched");
    cr_assert_eq(sim_hazards(), 0);
}

Test(simdriver, fork_after_init)
{
    begin();
    pid_t child = fork();
    if (!child) {
        CUdeviceptr p;
        _exit(cuMemAlloc_v2(&p, 10) == CUDA_ERROR_NOT_INITIALIZED && cuInit(0) == CUDA_ERROR_NOT_INITIALIZED ? 0 : 1);
    }
    int status;
    waitpid(child, &status, 0);
    cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void late(void)
{
    if (cuMemFree_v2(0) != CUDA_ERROR_DEINITIALIZED)
        _exit(1);
}

Test(simdriver, after_exit)
{
    pid_t child = fork();
    if (!child) {
        atexit(late); /* before cuInit: runs after the driver's own */
        begin();
        exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    cr_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

Test(simdriver, peers)
{
    setenv("SIMCUDA_DEVICES", "2", 1);
    begin();
    CUcontext other;
    OK(cuCtxCreate_v2(&other, 0, 1));
    OK(cuCtxEnablePeerAccess(ctx, 0));
    IS(cuCtxEnablePeerAccess(ctx, 0), 704);
    double start = ms();
    spin(NULL, 60);
    OK(cuCtxSetCurrent(ctx));
    OK(cuMemFree_v2(alloc(100)));
    cr_assert_geq(ms() - start, 60, "the free waits for the peer");
    OK(cuCtxSetCurrent(other));
    OK(cuCtxDisablePeerAccess(ctx));
    IS(cuCtxDisablePeerAccess(ctx), 705);
}

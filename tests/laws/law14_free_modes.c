/*
 * Law 14, modes fenced and ordered: a free comes back at once, and its block is handed out only when no work of before can
 * touch it any more (fenced), or when all work of after comes behind that (ordered). Run with VRAMSHIM_FREE set to either;
 * natively, and in sync, there is nothing to see here.
 */
#include <pthread.h>
#include <string.h>

#include "law.h"
#include "sim.h"
#include "work.h"
#include "world.h"

static CUstream worker;
static CUcontext context;

/* Two devices, for peers. */
static void __attribute__((constructor)) devices(void) { setenv("SIMCUDA_DEVICES", "2", 1); }

static void start_mode(void)
{
    if (frees_wait())
        law_skip("frees wait in this mode");
    start();
    context = law_context();
    worker = stream_of_its_own();
}

/* A block that was freed under work that is still running; *ret_work is recorded behind that. */
static CUdeviceptr freed_while_in_use(size_t bytes, CUevent *ret_work)
{
    CUdeviceptr p = allocate(bytes);
    launch_fill(fill, worker, p, bytes, WORK_NS);
    *ret_work = record(worker);
    release(p);
    CHECK_EQ(cu.cuEventQuery(*ret_work), CUDA_ERROR_NOT_READY);
    return p;
}

static void use(CUdeviceptr p, size_t bytes)
{
    launch_fill(fill, stream_of_its_own(), p, bytes, WORK_NS);
    no_hazard();
}

LAW_CASE_SIM(a_free_comes_back_at_once)
{
    CUevent work;
    start_mode();
    freed_while_in_use(4 * MIB, &work);
    freed_while_in_use(1000, &work);
    CHECK_EQ(driver_calls("cuMemFree_v2"), 0);
    CHECK_EQ(driver_calls("cuCtxSynchronize"), 0);
}

LAW_CASE_SIM(an_idle_context_reuses_at_once)
{
    start_mode();
    CUdeviceptr p = cached_block(4 * MIB);
    for (int i = 0; i < 100; i++)
        CHECK_EQ(cached_block(4 * MIB), p);
    CHECK_EQ(driver_calls("cuMemAlloc_v2"), 1);
}

/* fenced: another block until the work is known to be done. ordered: the same block, and later work waits on the device. */
LAW_CASE_SIM(reuse_while_the_work_runs)
{
    CUevent work;
    start_mode();
    CUdeviceptr p = freed_while_in_use(4 * MIB, &work), q = allocate(4 * MIB);
    CHECK_EQ(cu.cuEventQuery(work), CUDA_ERROR_NOT_READY); /* neither waits on the host */
    CHECK_EQ(q == p, frees_order());
    use(q, 4 * MIB);
    OK(cu.cuCtxSynchronize());
    CHECK_EQ(allocate(4 * MIB) == p, !frees_order());
    release(q);
}

/* On streams of every kind, and on some that are made only later. */
LAW_CASE_SIM(every_stream_comes_behind)
{
    static const CUstream defaults[] = {NULL, CU_STREAM_PER_THREAD};
    CUevent work;
    CUstream before;
    start_mode();
    before = stream_of_its_own();
    for (int i = 0; i < 8; i++) {
        CUdeviceptr p = allocate(4 * MIB);
        launch_fill(fill, i & 1 ? worker : defaults[i >> 1 & 1], p, 4 * MIB, WORK_NS);
        release(p);
        CUdeviceptr q = allocate(4 * MIB);
        CUstream s[] = {before, NULL, CU_STREAM_PER_THREAD, stream_of_its_own()};
        launch_fill(fill, s[i % 4], q, 4 * MIB, WORK_NS);
        no_hazard();
        release(q);
    }
    freed_while_in_use(4 * MIB, &work);
}

/* A stream that waits for nothing and whose handle was another's. */
LAW_CASE_SIM(the_stream_is_gone)
{
    start_mode();
    CUstream s = stream_of_its_own();
    CUdeviceptr p = allocate(4 * MIB);
    launch_fill(fill, s, p, 4 * MIB, WORK_NS);
    OK(cu.cuStreamDestroy_v2(s));
    release(p);
    use(allocate(4 * MIB), 4 * MIB);
}

LAW_CASE_SIM(one_fence_for_many_frees)
{
    enum { N = 64 };
    CUdeviceptr p[N];
    start_mode();
    for (int i = 0; i < N; i++)
        p[i] = allocate(2 * MIB);
    unsigned long before = driver_calls("cuCtxRecordEvent");
    for (int i = 0; i < N; i++) {
        launch_fill(fill, worker, p[i], 4096, WORK_NS);
        release(p[i]);
    }
    CHECK(driver_calls("cuCtxRecordEvent") - before <= N / 8 + 1);
    for (int i = 0; i < N; i++)
        use(allocate(2 * MIB), 4096);
    if (frees_order())
        CHECK_EQ(driver_calls("cuMemAlloc_v2"), N);
}

/* The fence of an earlier free is complete, that of this one is not. */
LAW_CASE_SIM(an_older_fence_is_not_enough)
{
    CUevent work;
    start_mode();
    CUstream early = stream_of_its_own();
    for (int i = 0; i < 3; i++) {
        CUdeviceptr a = allocate(2 * MIB);
        launch_fill(fill, early, a, 2 * MIB, WORK_NS);
        release(a);
        CUdeviceptr other = allocate((6 + 2 * (size_t)i) * MIB); /* nothing fits: now there is a fence for a */
        CUdeviceptr b = freed_while_in_use(4 * MIB, &work);
        OK(cu.cuStreamSynchronize(early));
        CHECK_EQ(cu.cuEventQuery(work), CUDA_ERROR_NOT_READY);
        CUdeviceptr q = allocate(4 * MIB);
        CHECK_EQ(q == b, frees_order());
        use(q, 4 * MIB);
        release(q);
        release(other);
        OK(cu.cuCtxSynchronize());
    }
}

/* More fences under way than there are events for them. */
LAW_CASE_SIM(many_fences_at_once)
{
    start_mode();
    for (int i = 0; i < 400; i++) {
        CUdeviceptr p = allocate(2 * MIB);
        launch_fill(fill, i % 3 ? worker : stream_of_its_own(), p, 4096, WORK_NS);
        release(p);
    }
    no_hazard();
    CHECK(driver_calls("cuEventCreate") <= 32);
    OK(cu.cuCtxSynchronize());
    unsigned long before = driver_calls("cuMemAlloc_v2");
    for (int i = 0; i < 20; i++)
        use(allocate(2 * MIB), 4096);
    CHECK(driver_calls("cuMemAlloc_v2") - before <= (frees_order() ? 19 : 0));
}

/* Natively each free had waited, so its memory would be there: it is waited for now, and that is all. */
LAW_CHILD(full_of_pending_memory)
{
    CUevent work;
    start_mode();
    CUdeviceptr p = freed_while_in_use(40 * MIB, &work);
    size_t free_bytes, total;
    OK(cu.cuMemGetInfo_v2(&free_bytes, &total));
    CHECK_EQ(free_bytes, total);
    CHECK_EQ(allocate(40 * MIB), p);
    CHECK_EQ(driver_calls("cuMemFree_v2"), 0);
    use(p, 40 * MIB);
    release(p);
    use(allocate(60 * MIB), 60 * MIB); /* and this one needs it back at the driver */
    CHECK_EQ(driver_calls("cuMemFree_v2"), 1);
}

LAW_CASE_SIM(out_of_memory_beside_pending_memory)
{
    static char text[8192];
    if (frees_wait())
        law_skip("frees wait in this mode");
    CHECK_EQ(law_run_child("full_of_pending_memory", ENV("SIMCUDA_CAPACITY=64M"), text, sizeof(text)), 0);
}

LAW_CHILD(flushed_with_pending_memory)
{
    CUevent work;
    start_mode();
    for (int i = 0; i < 20; i++)
        freed_while_in_use(2 * MIB, &work);
    raise(SIGUSR1);
    WAIT_UNTIL(SIM(sim_used)(0) == 0);
    no_hazard();
    use(allocate(2 * MIB), 2 * MIB);
}

LAW_CASE_SIM(a_flush_waits_for_pending_memory)
{
    static char text[8192];
    if (frees_wait())
        law_skip("frees wait in this mode");
    CHECK_EQ(law_run_child("flushed_with_pending_memory", NULL, text, sizeof(text)), 0);
    CHECK(strstr(text, "flush (SIGUSR1): gave"));
}

/* What the program freed is freed, pending or not. */
LAW_CASE_SIM(pending_memory_is_not_the_programs)
{
    CUevent work;
    CUdeviceptr base;
    size_t size;
    unsigned type;
    start_mode();
    CUdeviceptr p = freed_while_in_use(4 * MIB, &work);
    CHECK_EQ(cu.cuMemFree_v2(p), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemFreeAsync(p, worker), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemGetAddressRange_v2(&base, &size, p + 512), CUDA_ERROR_NOT_FOUND);
    CHECK_EQ(cu.cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, p), CUDA_ERROR_INVALID_VALUE);
    CUdeviceptr q = allocate(4 * MIB);
    use(q, 4 * MIB);
    OK(cu.cuMemGetAddressRange_v2(&base, &size, q + 512));
    release(q);
}

/* Before an address is shown to somebody whom no fence binds, its work is over. */
static void shown(CUresult (*show)(CUdeviceptr))
{
    CUevent work;
    CUdeviceptr p = freed_while_in_use(4 * MIB, &work), q = allocate(4 * MIB);
    CHECK_EQ(q == p, frees_order());
    show(q); /* whatever the driver says to it */
    CHECK_EQ(cu.cuEventQuery(work), frees_order() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
    release(q);
    OK(cu.cuCtxSynchronize());
}

static CUresult by_ipc(CUdeviceptr p)
{
    CUipcMemHandle handle;
    return cu.cuIpcGetMemHandle(&handle, p);
}
static CUresult by_descriptor(CUdeviceptr p)
{
    int fd = -1;
    return cu.cuMemGetHandleForAddressRange(&fd, p, 2 * MIB, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
}
static CUresult by_tokens(CUdeviceptr p)
{
    unsigned long long tokens[2];
    return cu.cuPointerGetAttribute(tokens, CU_POINTER_ATTRIBUTE_P2P_TOKENS, p);
}
static CUresult by_tokens_among_others(CUdeviceptr p)
{
    unsigned long long tokens[2], type;
    void *data[] = {&type, tokens};
    CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_P2P_TOKENS};
    return cu.cuPointerGetAttributes(2, attributes, data, p);
}
static CUresult by_sync_memops(CUdeviceptr p)
{
    int yes = 1;
    return cu.cuPointerSetAttribute(&yes, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, p);
}

LAW_CASE_SIM(exports_wait)
{
    start_mode();
    shown(by_ipc);
    shown(by_descriptor);
    shown(by_tokens);
    shown(by_tokens_among_others);
    shown(by_sync_memops);
}

/* A peer's streams are not behind the owner's fence. */
LAW_CASE_SIM(enabling_peer_access_waits)
{
    CUcontext peer;
    CUevent work;
    start_mode();
    CUdeviceptr p = freed_while_in_use(4 * MIB, &work), q = allocate(4 * MIB);
    CHECK_EQ(q == p, frees_order());
    OK(cu.cuCtxCreate_v2(&peer, 0, 1));
    CUfunction fill_there = kernel("vram_fill");
    OK(cu.cuCtxEnablePeerAccess(context, 0));
    CUstream there = stream_of_its_own();
    launch_fill(fill_there, there, q, 4096, WORK_NS);
    no_hazard();
    CUevent far = record(there);
    /* From now on its work counts at a free, and fences of the owner alone are not enough. */
    OK(cu.cuCtxSetCurrent(context));
    release(q);
    CHECK_EQ(cu.cuEventQuery(far), CUDA_SUCCESS);
    use(allocate(4 * MIB), 4 * MIB);
}

/* With a second context about, whose copies could reach the block, only what is done is handed out. */
LAW_CASE_SIM(several_contexts)
{
    CUcontext other;
    CUevent work;
    start_mode();
    OK(cu.cuCtxCreate_v2(&other, 0, 0));
    cached_block(2 * MIB);
    CUdeviceptr theirs = cached_block(4 * MIB);
    OK(cu.cuCtxSetCurrent(context));
    CUdeviceptr p = freed_while_in_use(4 * MIB, &work), q = allocate(4 * MIB);
    CHECK(q != p && q != theirs);
    use(q, 4 * MIB);
    OK(cu.cuCtxSetCurrent(other));
    CUdeviceptr r = allocate(4 * MIB);
    CHECK(r != p && r != q);
    OK(cu.cuCtxSetCurrent(context));
    OK(cu.cuCtxSynchronize());
    CHECK_EQ(allocate(4 * MIB), p);
}

/* Freed where another context is current, or none: the fence is the owner's. */
LAW_CASE_SIM(freed_from_elsewhere)
{
    CUcontext other;
    start_mode();
    CUdeviceptr p = allocate(4 * MIB), q = allocate(6 * MIB);
    launch_fill(fill, worker, p, 4 * MIB, WORK_NS);
    launch_fill(fill, worker, q, 6 * MIB, WORK_NS);
    CUevent work = record(worker);
    OK(cu.cuCtxCreate_v2(&other, 0, 0));
    release(p);
    OK(cu.cuCtxSetCurrent(NULL));
    release(q);
    OK(cu.cuCtxSetCurrent(context));
    CHECK_EQ(cu.cuEventQuery(work), CUDA_ERROR_NOT_READY);
    use(allocate(4 * MIB), 4 * MIB);
    use(allocate(6 * MIB), 6 * MIB);
    CHECK_EQ(driver_calls("cuMemFree_v2"), 0);
}

/* The fences of a context that ends never complete; the next one under its handle has its own. */
LAW_CASE_SIM(a_context_that_ends)
{
    CUcontext mine;
    CUevent work;
    start_mode();
    for (int i = 0; i < 3; i++) {
        OK(cu.cuCtxCreate_v2(&mine, 0, 0));
        worker = stream_of_its_own();
        fill = kernel("vram_fill");
        for (int k = 0; k < 20; k++)
            freed_while_in_use(2 * MIB, &work);
        OK(cu.cuCtxDestroy_v2(mine));
        no_hazard();
    }
    OK(cu.cuCtxSetCurrent(context));
    worker = stream_of_its_own();
    fill = kernel("vram_fill");
    freed_while_in_use(4 * MIB, &work);
    OK(cu.cuDevicePrimaryCtxReset_v2(0));
    law_context();
    start();
    use(allocate(4 * MIB), 4 * MIB);
}

/* During a capture no fence is recorded and none is looked at; what is pending stays so until afterwards. */
LAW_CASE_SIM(pending_through_a_capture)
{
    CUevent work;
    CUgraph graph;
    start_mode();
    CUdeviceptr p = freed_while_in_use(4 * MIB, &work), inside;
    CUstream capturing = stream_of_its_own();
    OK(cu.cuStreamBeginCapture_v2(capturing, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(cu.cuMemAlloc_v2(&inside, 4 * MIB));
    CHECK(inside != p);
    OK(cu.cuMemFree_v2(inside));
    CHECK_EQ(cu.cuMemFree_v2(p), CUDA_ERROR_INVALID_VALUE);
    static const char *const ours[] = {"cuCtxRecordEvent", "cuCtxWaitEvent", "cuEventQuery", "cuEventCreate", "cuCtxSynchronize"};
    for (size_t i = 0; i < sizeof(ours) / sizeof(*ours); i++)
        CHECK_EQ(SIM(sim_calls_during_capture)(ours[i]), 0);
    OK(cu.cuStreamEndCapture(capturing, &graph));
    OK(cu.cuGraphDestroy(graph));
    OK(cu.cuCtxSynchronize());
    use(allocate(4 * MIB), 4 * MIB);
}

/* A driver of before CUDA 12.5: everything waits, as in sync, and one line says so. */
LAW_CHILD(without_context_events)
{
    start_mode();
    for (int i = 0; i < 3; i++) {
        CUdeviceptr p = allocate(4 * MIB);
        launch_fill(fill, worker, p, 4 * MIB, WORK_NS);
        CUevent work = record(worker);
        release(p);
        CHECK_EQ(cu.cuEventQuery(work), CUDA_SUCCESS);
        CUdeviceptr q = allocate(4 * MIB);
        CHECK_EQ(q, p);
        use(q, 4 * MIB);
        release(q);
    }
}

LAW_CASE_SIM(a_driver_without_context_events)
{
    static char text[8192];
    if (frees_wait())
        law_skip("frees wait in this mode");
    static const char *const hiding[] = {"SIMCUDA_VERSION=12040", "SIMCUDA_HIDE=cuCtxRecordEvent"};
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(law_run_child("without_context_events", ENV(hiding[i]), text, sizeof(text)), 0);
        CHECK_EQ(count_of(text, "no context events"), 1);
    }
}

/* A fence that the driver refuses covers nothing: what should wait for it waits for the next. */
LAW_CASE_SIM(a_refused_fence)
{
    CUevent work;
    start_mode();
    cached_block(2 * MIB);
    CUdeviceptr first = freed_while_in_use(4 * MIB, &work);
    CHECK(SIM(sim_fail)("cuCtxRecordEvent", 1, 1, CUDA_ERROR_UNKNOWN) == 0);
    CUdeviceptr q = allocate(4 * MIB); /* asks for a fence, in vain */
    CHECK(q != first || frees_order());
    use(q, 4 * MIB);
    for (int i = 0; i < 12; i++) {
        CHECK(SIM(sim_fail)(i & 1 ? "cuCtxRecordEvent" : "cuEventCreate", 1 + i / 4, 3, CUDA_ERROR_UNKNOWN) == 0);
        CUdeviceptr p[10];
        for (int k = 0; k < 10; k++) {
            p[k] = allocate(4 * MIB);
            launch_fill(fill, worker, p[k], 4 * MIB, WORK_NS);
        }
        for (int k = 0; k < 10; k++)
            release(p[k]);
        for (int k = 0; k < 10; k++) {
            p[k] = allocate(4 * MIB);
            use(p[k], 4 * MIB);
        }
        for (int k = 0; k < 10; k++)
            release(p[k]);
    }
    no_hazard();
}

/* Later work could not be put behind the fence: the block stays where it is. */
LAW_CASE_SIM(a_refused_wait)
{
    CUevent work;
    start_mode();
    CUdeviceptr p = freed_while_in_use(4 * MIB, &work);
    CHECK(SIM(sim_fail)("cuCtxWaitEvent", 1, 1, CUDA_ERROR_UNKNOWN) == 0);
    CUdeviceptr q = allocate(4 * MIB);
    CHECK(q != p);
    use(q, 4 * MIB);
    CUdeviceptr r = allocate(4 * MIB);
    CHECK_EQ(r == p, frees_order());
    use(r, 4 * MIB);
}

/* The error of a kernel that the fence would have covered (law 13). */
LAW_CASE_SIM(a_failed_kernel)
{
    start_mode();
    CUdeviceptr p = allocate(4 * MIB), q = allocate(4 * MIB), unused;
    cached_block(8 * MIB);
    OK(cu.cuLaunchKernel(kernel("vram_fault"), 1, 1, 1, 1, 1, 1, 0, worker, NULL, NULL));
    CHECK_EQ(cu.cuStreamSynchronize(worker), CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK_EQ(cu.cuMemFree_v2(p), CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK_EQ(cu.cuMemAlloc_v2(&unused, 8 * MIB), CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK_EQ(cu.cuMemFree_v2(q), CUDA_ERROR_ILLEGAL_ADDRESS);
}

static CUdeviceptr taken;
static void *take(void *unused)
{
    (void)unused;
    OK(cu.cuCtxSetCurrent(context));
    OK(cu.cuMemAlloc_v2(&taken, 4 * MIB));
    return NULL;
}

static void meanwhile(const char *entry, void *arg)
{
    pthread_t thread;
    (void)arg;
    CHECK(SIM(sim_on_call)(entry, NULL, NULL) == 0);
    CHECK(pthread_create(&thread, NULL, take, NULL) == 0);
    pthread_join(thread, NULL);
}

/* Another thread asks while one is at the driver for a fence, or for the wait: the block is in nobody's hands twice, and
 * not before it is covered (law 16). */
LAW_CASE_SIM(asked_for_while_the_fence_is_made)
{
    static const char *const calls[] = {"cuCtxRecordEvent", "cuCtxWaitEvent", "cuEventQuery"};
    CUevent work;
    start_mode();
    cached_block(2 * MIB);
    for (size_t i = 0; i < sizeof(calls) / sizeof(*calls); i++) {
        taken = 0;
        freed_while_in_use(4 * MIB, &work);
        CHECK(SIM(sim_on_call)(calls[i], meanwhile, NULL) == 0);
        CUdeviceptr q = allocate(4 * MIB);
        CHECK(SIM(sim_on_call)(calls[i], NULL, NULL) == 0);
        CHECK(taken != q);
        use(q, 4 * MIB);
        if (taken) {
            SIM(sim_note_alloc)(taken, 4 * MIB);
            use(taken, 4 * MIB);
            release(taken);
        }
        release(q);
        OK(cu.cuCtxSynchronize());
    }
}

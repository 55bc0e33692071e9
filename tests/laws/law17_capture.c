/*
 * Law 17: while any stream of the process captures, the shim makes no call of its own on the driver, and the program's
 * calls have their native effect on the capture. HAMi-core 192. The expected results are those of a real GPU (H200).
 */
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>

#include "law.h"
#include "sim.h"
#include "world.h"

enum { MIB = 1 << 20 };

static CUcontext context;
static CUstream stream;

static void begin_with_something_cached(CUstreamCaptureMode mode)
{
    context = law_context();
    OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    cached_block(4 * MIB);
    OK(cu.cuStreamBeginCapture_v2(stream, mode));
}

static CUstreamCaptureStatus status_of(CUstream s)
{
    CUstreamCaptureStatus status;
    OK(cu.cuStreamIsCapturing(s, &status));
    return status;
}

static void ends_with(CUresult expected)
{
    CUgraph graph = NULL;
    CHECK_EQ(cu.cuStreamEndCapture(stream, &graph), expected);
    if (expected == CUDA_SUCCESS)
        OK(cu.cuGraphDestroy(graph));
}

/* Under the shim, the cache serves again. */
static void expect_caching(void)
{
    CUdeviceptr p;
    cached_block(6 * MIB);
    unsigned long before = driver_calls("cuMemAlloc_v2");
    OK(cu.cuMemAlloc_v2(&p, 6 * MIB));
    if (under_shim() && simulated())
        CHECK_EQ(driver_calls("cuMemAlloc_v2"), before);
    OK(cu.cuMemFree_v2(p));
}

/* An allocation that the cache could serve still fails, and invalidates, as it does natively. */
static void refused_inside(CUstreamCaptureMode mode)
{
    CUdeviceptr p = 0x1234;
    begin_with_something_cached(mode);
    CHECK_EQ(status_of(stream), CU_STREAM_CAPTURE_STATUS_ACTIVE);
    CHECK_EQ(cu.cuMemAlloc_v2(&p, 4 * MIB), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CHECK_EQ(p, 0); /* what the driver leaves there (measured) */
    CHECK_EQ(status_of(stream), CU_STREAM_CAPTURE_STATUS_INVALIDATED);
    ends_with(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    expect_caching();
}

LAW_CASE(allocation_in_a_global_capture) { refused_inside(CU_STREAM_CAPTURE_MODE_GLOBAL); }
LAW_CASE(allocation_in_a_thread_local_capture) { refused_inside(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL); }

static void free_refused_inside(CUstreamCaptureMode mode)
{
    CUdeviceptr live, freed;
    context = law_context();
    OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cu.cuMemAlloc_v2(&live, 4 * MIB));
    freed = cached_block(2 * MIB);
    /* Of a live block, of one that was freed, inside a block, and of nothing: each ends a capture. */
    const CUdeviceptr frees[] = {live, freed, live + 512, 0};
    for (int i = 0; i < 4; i++) {
        OK(cu.cuStreamBeginCapture_v2(stream, mode));
        CHECK_EQ(cu.cuMemFree_v2(frees[i]), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        CHECK_EQ(status_of(stream), CU_STREAM_CAPTURE_STATUS_INVALIDATED);
        ends_with(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    }
    OK(cu.cuMemFree_v2(live)); /* the refused one changed nothing */
    expect_caching();
}

LAW_CASE(frees_in_a_global_capture) { free_refused_inside(CU_STREAM_CAPTURE_MODE_GLOBAL); }
LAW_CASE(frees_in_a_thread_local_capture) { free_refused_inside(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL); }

/* A relaxed capture allows everything that the program does, and nothing that a shim might add: cuCtxSynchronize and
 * cuCtxRecordEvent invalidate it. */
LAW_CASE(relaxed_capture_with_allocations_inside)
{
    CUdeviceptr live, freed, p;
    size_t unused;
    context = law_context();
    OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cu.cuMemAlloc_v2(&live, 4 * MIB));
    freed = cached_block(2 * MIB);
    OK(cu.cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(cu.cuMemAlloc_v2(&p, 4 * MIB));
    OK(cu.cuMemFree_v2(p));
    OK(cu.cuMemFree_v2(live));
    CHECK_EQ(cu.cuMemFree_v2(freed), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemFree_v2(live + 512), CUDA_ERROR_INVALID_VALUE);
    OK(cu.cuMemFree_v2(0));
    OK(cu.cuMemGetInfo_v2(&unused, &unused));
    CHECK_EQ(status_of(stream), CU_STREAM_CAPTURE_STATUS_ACTIVE);
    ends_with(CUDA_SUCCESS);
    expect_caching();
}

/* Counted at the driver: during the capture it sees the program's calls and no other. */
LAW_CASE_SIM(no_call_of_the_shim_during_a_capture)
{
    enum { N = 5 };
    CUdeviceptr before[N], inside;
    context = law_context();
    OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    for (int i = 0; i < N; i++)
        OK(cu.cuMemAlloc_v2(&before[i], 4 * MIB));
    cached_block(8 * MIB);
    OK(cu.cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    for (int i = 0; i < N; i++) {
        OK(cu.cuMemAlloc_v2(&inside, 8 * MIB));
        OK(cu.cuMemFree_v2(inside));
        OK(cu.cuMemFree_v2(before[i]));
    }
    ends_with(CUDA_SUCCESS);
    CHECK_EQ(SIM(sim_calls_during_capture)("cuMemAlloc_v2"), N);
    CHECK_EQ(SIM(sim_calls_during_capture)("cuMemFree_v2"), 2 * N);
    static const char *const ours[] = {"cuCtxSynchronize", "cuCtxSynchronize_v2", "cuCtxRecordEvent",
                                       "cuEventQuery",     "cuEventSynchronize",  "cuEventRecord",
                                       "cuStreamQuery",    "cuStreamSynchronize"};
    for (size_t i = 0; i < sizeof(ours) / sizeof(*ours); i++)
        CHECK_EQ(SIM(sim_calls_during_capture)(ours[i]), 0);
}

/* Out of memory inside a capture: what is cached stays, the answer is the driver's. */
LAW_CHILD(full_card_in_a_capture)
{
    CUdeviceptr p;
    begin_with_something_cached(CU_STREAM_CAPTURE_MODE_RELAXED);
    unsigned long frees = driver_calls("cuMemFree_v2");
    CHECK_EQ(cu.cuMemAlloc_v2(&p, 100 * MIB), CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_EQ(driver_calls("cuMemFree_v2"), frees);
    CHECK_EQ(status_of(stream), CU_STREAM_CAPTURE_STATUS_ACTIVE);
    ends_with(CUDA_SUCCESS);
}

LAW_CASE_SIM(no_trim_for_an_allocation_in_a_capture)
{
    char text[8192];
    CHECK_EQ(law_run_child("full_card_in_a_capture", ENV("SIMCUDA_CAPACITY=64M"), text, sizeof(text)), 0);
}

/* Another thread goes on as ever beside a thread-local capture, and so does the capture. */
static CUdeviceptr for_the_other;
static CUresult other_result;
static void *free_and_allocate(void *unused)
{
    CUdeviceptr p;
    (void)unused;
    other_result = cu.cuCtxSetCurrent(context);
    if (other_result == CUDA_SUCCESS)
        other_result = cu.cuMemFree_v2(for_the_other);
    if (other_result == CUDA_SUCCESS)
        other_result = cu.cuMemAlloc_v2(&p, 4 * MIB);
    if (other_result == CUDA_SUCCESS)
        other_result = cu.cuMemFree_v2(p);
    return NULL;
}

static void beside(CUstreamCaptureMode mode, CUresult expected)
{
    pthread_t thread;
    context = law_context();
    OK(cu.cuMemAlloc_v2(&for_the_other, 4 * MIB));
    begin_with_something_cached(mode);
    CHECK(pthread_create(&thread, NULL, free_and_allocate, NULL) == 0);
    pthread_join(thread, NULL);
    CHECK_EQ(other_result, expected);
    bool unharmed = expected == CUDA_SUCCESS;
    CHECK_EQ(status_of(stream), unharmed ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_INVALIDATED);
    ends_with(unharmed ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
}

LAW_CASE_SIM(another_thread_beside_a_thread_local_capture)
{
    beside(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, CUDA_SUCCESS);
}
LAW_CASE_SIM(another_thread_beside_a_relaxed_capture) { beside(CU_STREAM_CAPTURE_MODE_RELAXED, CUDA_SUCCESS); }
LAW_CASE_SIM(another_thread_beside_a_global_capture)
{
    beside(CU_STREAM_CAPTURE_MODE_GLOBAL, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
}

/*
 * The race: a free has seen that nobody captures and is on its way to wait for the block's work; now another thread
 * begins a capture. The begin has to come after the wait, or the wait kills the capture.
 */
static sem_t may_begin;
static atomic_bool told;

static void during_the_wait(const char *entry, void *unused)
{
    (void)entry;
    (void)unused;
    if (atomic_exchange(&told, true))
        return;
    sem_post(&may_begin);
    for (int i = 0; i < 20; i++) /* time for a begin that does not wait for us */
        nap();
}

static CUresult begin_result, end_result;
static CUstreamCaptureStatus status_inside;
static void *capture_meanwhile(void *unused)
{
    CUgraph graph;
    (void)unused;
    while (sem_wait(&may_begin) != 0)
        ;
    begin_result = cu.cuCtxSetCurrent(context);
    if (begin_result == CUDA_SUCCESS)
        begin_result = cu.cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    for (int i = 0; i < 40; i++)
        nap();
    cu.cuStreamIsCapturing(stream, &status_inside);
    end_result = cu.cuStreamEndCapture(stream, &graph);
    return NULL;
}

LAW_CASE_SIM(a_begin_waits_for_a_call_that_is_under_way)
{
    pthread_t thread;
    CUdeviceptr p;
    context = law_context();
    OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cu.cuMemAlloc_v2(&p, 4 * MIB));
    CHECK(sem_init(&may_begin, 0, 0) == 0);
    CHECK(pthread_create(&thread, NULL, capture_meanwhile, NULL) == 0);
    CHECK(SIM(sim_on_call)(frees_wait() ? "cuCtxSynchronize" : "cuCtxRecordEvent", during_the_wait, NULL) == 0);
    OK(cu.cuMemFree_v2(p));
    if (under_shim())
        CHECK(told);
    if (!told)
        sem_post(&may_begin);
    pthread_join(thread, NULL);
    OK(begin_result);
    CHECK_EQ(status_inside, CU_STREAM_CAPTURE_STATUS_ACTIVE);
    OK(end_result);
}

/* The signal comes during a capture: it waits for the end, and then does its work. */
LAW_CHILD(signalled_in_a_capture)
{
    begin_with_something_cached(CU_STREAM_CAPTURE_MODE_RELAXED);
    unsigned long before = driver_calls("cuMemFree_v2");
    if (under_shim())
        raise(SIGUSR1);
    LINGER(driver_calls("cuMemFree_v2") != before);
    CHECK_EQ(driver_calls("cuMemFree_v2"), before);
    CHECK_EQ(status_of(stream), CU_STREAM_CAPTURE_STATUS_ACTIVE);
    ends_with(CUDA_SUCCESS);
    if (under_shim())
        WAIT_UNTIL(driver_calls("cuMemFree_v2") == before + 1);
    CHECK_EQ(SIM(sim_calls_during_capture)("cuMemFree_v2"), 0);
}

LAW_CASE_SIM(a_signal_waits_for_the_end)
{
    char text[8192];
    CHECK_EQ(law_run_child("signalled_in_a_capture", NULL, text, sizeof(text)), 0);
}

/* What was kept for too long goes back by itself, but not now. */
LAW_CHILD(decays_in_a_capture)
{
    begin_with_something_cached(CU_STREAM_CAPTURE_MODE_RELAXED);
    unsigned long before = driver_calls("cuMemFree_v2");
    LINGER(driver_calls("cuMemFree_v2") != before);
    CHECK_EQ(driver_calls("cuMemFree_v2"), before);
    ends_with(CUDA_SUCCESS);
    if (under_shim())
        WAIT_UNTIL(driver_calls("cuMemFree_v2") == before + 1);
    CHECK_EQ(SIM(sim_calls_during_capture)("cuMemFree_v2"), 0);
}

LAW_CASE_SIM(decay_waits_for_the_end)
{
    char text[8192];
    CHECK_EQ(law_run_child("decays_in_a_capture", ENV("VRAMSHIM_DECAY=0.05"), text, sizeof(text)), 0);
}

/* All ways to end a capture are seen: afterwards the cache works again. */
LAW_CASE(destroying_the_stream_ends_its_capture)
{
    begin_with_something_cached(CU_STREAM_CAPTURE_MODE_GLOBAL);
    OK(cu.cuStreamDestroy_v2(stream));
    expect_caching();
}

LAW_CASE_SIM(destroying_the_context_ends_its_captures)
{
    CUcontext other;
    law_context();
    OK(cu.cuCtxCreate_v2(&other, 0, 0));
    OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    cached_block(4 * MIB);
    OK(cu.cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(cu.cuCtxDestroy_v2(other));
    law_context();
    expect_caching();
}

/* A begin or an end that is refused begins and ends nothing. */
LAW_CASE(refused_begins_and_ends_do_not_count)
{
    CUstream idle;
    CUgraph graph;
    begin_with_something_cached(CU_STREAM_CAPTURE_MODE_RELAXED);
    OK(cu.cuStreamCreate(&idle, CU_STREAM_NON_BLOCKING));
    CHECK_EQ(cu.cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_ERROR_ILLEGAL_STATE);
    CHECK_EQ(cu.cuStreamEndCapture(idle, &graph), CUDA_ERROR_ILLEGAL_STATE);
    /* Still in the capture: a free must not be made safe by a synchronise. */
    cached_block(4 * MIB);
    CHECK_EQ(status_of(stream), CU_STREAM_CAPTURE_STATUS_ACTIVE);
    ends_with(CUDA_SUCCESS);
    expect_caching();
}

static CUresult wrong_thread_result;
static void *end_from_elsewhere(void *unused)
{
    CUgraph graph;
    (void)unused;
    wrong_thread_result = cu.cuCtxSetCurrent(context);
    if (wrong_thread_result == CUDA_SUCCESS)
        wrong_thread_result = cu.cuStreamEndCapture(stream, &graph);
    return NULL;
}

LAW_CASE_SIM(another_thread_cannot_end_a_capture)
{
    pthread_t thread;
    begin_with_something_cached(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    CHECK(pthread_create(&thread, NULL, end_from_elsewhere, NULL) == 0);
    pthread_join(thread, NULL);
    CHECK_EQ(wrong_thread_result, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
    CUdeviceptr p;
    CHECK_EQ(cu.cuMemAlloc_v2(&p, 4 * MIB), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    ends_with(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    expect_caching();
}

/* Two captures at once: the first end does not end the second. */
LAW_CASE(two_captures)
{
    CUstream second;
    CUgraph graph;
    begin_with_something_cached(CU_STREAM_CAPTURE_MODE_RELAXED);
    OK(cu.cuStreamCreate(&second, CU_STREAM_NON_BLOCKING));
    OK(cu.cuStreamBeginCapture_v2(second, CU_STREAM_CAPTURE_MODE_RELAXED));
    ends_with(CUDA_SUCCESS);
    cached_block(4 * MIB);
    CHECK_EQ(status_of(second), CU_STREAM_CAPTURE_STATUS_ACTIVE);
    OK(cu.cuStreamEndCapture(second, &graph));
    OK(cu.cuGraphDestroy(graph));
    expect_caching();
}

/* Every entry that begins a capture. The looked-up names are the exported ones: there is one way to each. */
static void *exported(const char *name)
{
    void *p = law_sim(name);
    if (!p)
        law_skip("the driver has no such entry");
    return p;
}

LAW_CASE(begun_by_the_first_entry)
{
    CUdeviceptr p;
    context = law_context();
    OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    cached_block(4 * MIB);
    OK(((__typeof__(&cuStreamBeginCapture))exported("cuStreamBeginCapture"))(stream));
    /* It knows no modes, and forbids nothing (measured); only a synchronisation, as ours at a free, would invalidate it. */
    OK(cu.cuMemAlloc_v2(&p, 4 * MIB));
    OK(cu.cuMemFree_v2(p));
    CHECK_EQ(status_of(stream), CU_STREAM_CAPTURE_STATUS_ACTIVE);
    ends_with(CUDA_SUCCESS);
    expect_caching();
}

LAW_CASE(begun_into_a_graph)
{
    CUgraph graph, same;
    CUdeviceptr p;
    context = law_context();
    OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cu.cuGraphCreate(&graph, 0));
    OK(cu.cuMemAlloc_v2(&p, 4 * MIB));
    OK(cu.cuStreamBeginCaptureToGraph(stream, graph, NULL, NULL, 0, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(cu.cuMemFree_v2(p));
    CHECK_EQ(status_of(stream), CU_STREAM_CAPTURE_STATUS_ACTIVE);
    OK(cu.cuStreamEndCapture(stream, &same));
    CHECK_EQ(same, graph);
    OK(cu.cuGraphDestroy(graph));
    expect_caching();
}

/* Per-thread default streams: one handle that is many streams (law 15). */
static void *capture_own_default_stream(void *failed)
{
    CUgraph graph;
    CUdeviceptr p;
    __typeof__(&cuStreamBeginCapture_v2) begin = (__typeof__(begin))exported("cuStreamBeginCapture_v2_ptsz");
    __typeof__(&cuStreamEndCapture) end = (__typeof__(end))exported("cuStreamEndCapture_ptsz");
    bool ok = cu.cuCtxSetCurrent(context) == CUDA_SUCCESS && cu.cuMemAlloc_v2(&p, 4 * MIB) == CUDA_SUCCESS &&
              begin(NULL, CU_STREAM_CAPTURE_MODE_RELAXED) == CUDA_SUCCESS && cu.cuMemFree_v2(p) == CUDA_SUCCESS &&
              end(NULL, &graph) == CUDA_SUCCESS && cu.cuGraphDestroy(graph) == CUDA_SUCCESS;
    *(bool *)failed = !ok;
    return NULL;
}

LAW_CASE(per_thread_default_streams)
{
    enum { N = 4 };
    pthread_t threads[N];
    bool failed[N] = {false};
    context = law_context();
    for (int i = 0; i < N; i++)
        CHECK(pthread_create(&threads[i], NULL, capture_own_default_stream, &failed[i]) == 0);
    for (int i = 0; i < N; i++)
        pthread_join(threads[i], NULL);
    for (int i = 0; i < N; i++)
        CHECK(!failed[i]);
    expect_caching();
}

/* Captures come and go on one thread while others allocate and free: each capture is untouched. */
static atomic_bool stop;
static atomic_uint failures;
static void *pairs(void *unused)
{
    (void)unused;
    failures += cu.cuCtxSetCurrent(context) != CUDA_SUCCESS;
    while (!stop) {
        CUdeviceptr p;
        failures += cu.cuMemAlloc_v2(&p, 4 * MIB) != CUDA_SUCCESS;
        failures += cu.cuMemFree_v2(p) != CUDA_SUCCESS;
    }
    return NULL;
}

LAW_CASE(captures_come_and_go_beside_working_threads)
{
    enum { N = 3 };
    pthread_t threads[N];
    const int captures = simulated() ? 300 : 20; /* on a real card each pair of calls costs the others a wait */
    context = law_context();
    OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    for (int i = 0; i < N; i++)
        CHECK(pthread_create(&threads[i], NULL, pairs, NULL) == 0);
    for (int i = 0; i < captures; i++) {
        OK(cu.cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
        CHECK_EQ(status_of(stream), CU_STREAM_CAPTURE_STATUS_ACTIVE);
        ends_with(CUDA_SUCCESS);
    }
    stop = true;
    for (int i = 0; i < N; i++)
        pthread_join(threads[i], NULL);
    CHECK_EQ(failures, 0);
    expect_caching();
}

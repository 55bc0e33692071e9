/*
 * Law 15: streams are not identities. One handle may mean many streams (the per-thread default), handles recur, and the
 * legacy stream does not cover those that do not block on it. cub 156 and 373. In every free mode.
 */
#include <pthread.h>
#include <string.h>

#include "law.h"
#include "sim.h"
#include "work.h"
#include "world.h"

static CUcontext context;

static void begin(void)
{
    start();
    context = law_context();
}

/* Frees the block and gives it, if the shim does so now, to its next owner on `next`. */
static void hand_over(CUdeviceptr p, size_t bytes, CUstream next)
{
    release(p);
    CUdeviceptr q = allocate(bytes);
    launch_fill(fill, next, q, bytes, WORK_NS);
    no_hazard();
    release(q);
}

static CUdeviceptr shared;
static void *use_own_default_stream(void *unused)
{
    OK(cu.cuCtxSetCurrent(context));
    launch_fill(fill, CU_STREAM_PER_THREAD, shared, 4 * MIB, WORK_NS);
    return unused;
}

/* The new owner's stream has the old one's handle, and is another thread's. */
LAW_CASE_SIM(one_handle_for_many_streams)
{
    pthread_t thread;
    begin();
    for (int i = 0; i < 5; i++) {
        shared = allocate(4 * MIB);
        CHECK(pthread_create(&thread, NULL, use_own_default_stream, NULL) == 0);
        pthread_join(thread, NULL);
        hand_over(shared, 4 * MIB, CU_STREAM_PER_THREAD);
    }
}

/* The same for the entries that mean the per-thread stream by 0. */
static CUresult fill_by(const char *entry, CUdeviceptr p, size_t bytes)
{
    __typeof__(&cuMemsetD8Async) set = (__typeof__(set))law_sim(entry);
    CHECK(set);
    return set(p, 3, bytes, NULL);
}

static void *use_own_null_stream(void *unused)
{
    OK(cu.cuCtxSetCurrent(context));
    OK(fill_by("cuMemsetD8Async_ptsz", shared, 4 * MIB));
    return unused;
}

LAW_CASE_SIM(the_null_stream_of_a_thread)
{
    pthread_t thread;
    begin();
    for (int i = 0; i < 5; i++) {
        shared = allocate(4 * MIB);
        CHECK(pthread_create(&thread, NULL, use_own_null_stream, NULL) == 0);
        pthread_join(thread, NULL);
        release(shared);
        CUdeviceptr q = allocate(4 * MIB);
        OK(fill_by("cuMemsetD8Async_ptsz", q, 4 * MIB));
        no_hazard();
        release(q);
    }
}

/* A stream that ends with work under way, and the next one, which may have its handle. */
LAW_CASE_SIM(handles_recur)
{
    begin();
    for (int i = 0; i < 20; i++) {
        CUstream s = stream_of_its_own();
        CUdeviceptr p = allocate(4 * MIB);
        launch_fill(fill, s, p, 4 * MIB, WORK_NS);
        OK(cu.cuStreamDestroy_v2(s));
        hand_over(p, 4 * MIB, stream_of_its_own());
    }
}

/* What was submitted to the legacy stream comes after streams that block, and after no other. */
LAW_CASE_SIM(the_legacy_stream_covers_no_other)
{
    CUstream blocking;
    begin();
    OK(cu.cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
    CUstream free_running = stream_of_its_own();
    CUstream const streams[] = {free_running, blocking, NULL, CU_STREAM_PER_THREAD};
    for (int from = 0; from < 4; from++) {
        for (int to = 0; to < 4; to++) {
            CUdeviceptr p = allocate(4 * MIB);
            launch_fill(fill, streams[from], p, 4 * MIB, WORK_NS);
            hand_over(p, 4 * MIB, streams[to]);
        }
    }
}

/* More streams than any list would hold. */
LAW_CASE_SIM(hundreds_of_streams)
{
    enum { N = 300 };
    static CUstream s[N];
    static CUdeviceptr p[N];
    begin();
    for (int i = 0; i < N; i++) {
        s[i] = stream_of_its_own();
        p[i] = allocate(4096);
        launch_fill(fill, s[i], p[i], 4096, WORK_NS);
    }
    for (int i = 0; i < N; i++)
        release(p[i]);
    for (int i = 0; i < N; i++) {
        p[i] = allocate(4096);
        launch_fill(fill, s[(i + 7) % N], p[i], 4096, WORK_NS);
    }
    no_hazard();
}

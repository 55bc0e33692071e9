/*
 * Law 14, mode sync: a free waits for all outstanding work of the context, on every stream, as native cuMemFree does,
 * both for reuse and as a barrier for the host. cub 156 and 373 (published before its event; stream handles), kokkos
 * 9307 and cupy 3777 (programs that lean on cudaFree's barrier).
 */
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "law.h"
#include "sim.h"
#include "work.h"
#include "world.h"

/* The free of `p` waits for the work before `e`. */
static void free_waits_for(CUdeviceptr p, CUevent e)
{
    CHECK_EQ(cu.cuEventQuery(e), CUDA_ERROR_NOT_READY); /* or this shows nothing */
    release(p);
    CHECK_EQ(cu.cuEventQuery(e), CUDA_SUCCESS);
    CHECK_EQ(SIM(sim_pending)(), 0);
}

/* What only a free that waits gives: the other modes are law14_free_modes.c's. */
static void as_a_barrier(void)
{
    if (!frees_wait())
        law_skip("frees do not wait in this mode");
}

LAW_CASE_SIM(a_non_blocking_stream)
{
    as_a_barrier();
    start();
    CUstream s = stream_of_its_own();
    CUdeviceptr p = allocate(4 * MIB);
    launch_fill(fill, s, p, 4 * MIB, WORK_NS);
    free_waits_for(p, record(s));
}

LAW_CASE_SIM(the_default_streams)
{
    as_a_barrier();
    start();
    CUdeviceptr p = allocate(4 * MIB), q = allocate(4 * MIB);
    launch_fill(fill, NULL, p, 4 * MIB, WORK_NS);
    free_waits_for(p, record(NULL));
    launch_fill(fill, CU_STREAM_PER_THREAD, q, 4 * MIB, WORK_NS);
    free_waits_for(q, record(CU_STREAM_PER_THREAD));
}

/* As a barrier: the work does not touch the block, and the block is small. */
LAW_CASE_SIM(work_that_has_nothing_to_do_with_it)
{
    as_a_barrier();
    static const size_t sizes[] = {1, 4096, 2 * MIB, 64 * MIB};
    start();
    CUstream s = stream_of_its_own();
    CUdeviceptr other = allocate(4 * MIB);
    for (size_t i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
        CUdeviceptr p = allocate(sizes[i]);
        launch_fill(fill, s, other, 4 * MIB, WORK_NS);
        free_waits_for(p, record(s));
    }
}

/* Many streams at once, each behind another's event or alone. */
LAW_CASE_SIM(every_stream)
{
    as_a_barrier();
    enum { N = 16 };
    CUstream s[N];
    CUevent e[N];
    start();
    CUdeviceptr p = allocate(4 * MIB), other = allocate(4 * MIB);
    for (int i = 0; i < N; i++) {
        s[i] = stream_of_its_own();
        if (i % 4 == 3)
            OK(cu.cuStreamWaitEvent(s[i], e[i - 1], 0));
        launch_fill(fill, s[i], other + (CUdeviceptr)i * 4096, 4096, WORK_NS);
        e[i] = record(s[i]);
    }
    release(p);
    for (int i = 0; i < N; i++)
        CHECK_EQ(cu.cuEventQuery(e[i]), CUDA_SUCCESS);
    no_hazard();
}

/* The stream is gone, its work is not. */
LAW_CASE_SIM(a_stream_that_was_destroyed)
{
    as_a_barrier();
    start();
    CUstream s = stream_of_its_own(), other = stream_of_its_own();
    CUdeviceptr p = allocate(4 * MIB);
    launch_fill(fill, s, p, 4 * MIB, WORK_NS);
    OK(cu.cuStreamDestroy_v2(s));
    release(p);
    CHECK_EQ(SIM(sim_pending)(), 0);
    CUdeviceptr q = allocate(4 * MIB);
    CHECK_EQ(q, p);
    launch_fill(fill, other, q, 4 * MIB, WORK_NS);
    no_hazard();
}

/* Reuse on another stream, at once: a kernel of the old owner and one of the new one never meet. */
LAW_CASE_SIM(reuse_is_ordered)
{
    start();
    CUstream s[4];
    for (int i = 0; i < 4; i++)
        s[i] = stream_of_its_own();
    CUdeviceptr keep = allocate(4 * MIB);
    for (int i = 0; i < 40; i++) {
        size_t bytes = i % 3 ? 4 * MIB : 100000; /* not so small that fresh blocks are cheaper than fences */
        CUdeviceptr a = allocate(bytes), b = allocate(bytes);
        launch_fill(fill, s[i % 4], a, bytes, WORK_NS);
        launch_copy(s[i % 4], b, a, bytes);
        launch_fill(fill, s[(i + 1) % 4], keep + (CUdeviceptr)(i % 4) * MIB, 4096, WORK_NS);
        release(a);
        CUdeviceptr c = allocate(bytes);
        launch_fill(fill, s[(i + 2) % 4], c, bytes, WORK_NS);
        release(b);
        release(c);
        no_hazard();
    }
    if (under_shim() && (frees_wait() || frees_order()))
        CHECK(driver_calls("cuMemAlloc_v2") <= 6);
}

/* The host writes where the kernel has read: after the free it may, natively. */
LAW_CASE_SIM(a_barrier_for_the_host)
{
    as_a_barrier();
    static unsigned char host[65536];
    __typeof__(&cuMemcpyHtoDAsync_v2) upload = (__typeof__(upload))law_sim("cuMemcpyHtoDAsync_v2");
    start();
    CUstream s = stream_of_its_own();
    CUdeviceptr p = allocate(sizeof(host)), q = allocate(4096);
    OK(upload(p, host, sizeof(host), s));
    launch_fill(fill, s, p, sizeof(host), WORK_NS);
    CUevent e = record(s);
    release(q); /* not even the block in question */
    CHECK_EQ(cu.cuEventQuery(e), CUDA_SUCCESS);
    release(p);
    no_hazard();
}

/* An allocation does not wait, from the cache as little as from the driver; nor does a free of nothing. */
LAW_CASE_SIM(nothing_else_waits)
{
    CUdeviceptr base;
    size_t size;
    start();
    CUstream s = stream_of_its_own();
    CUdeviceptr p = allocate(4 * MIB);
    cached_block(8 * MIB);
    launch_fill(fill, s, p, 4 * MIB, WORK_NS);
    CUevent e = record(s);
    CHECK_EQ(cu.cuEventQuery(e), CUDA_ERROR_NOT_READY);
    CUdeviceptr q = allocate(8 * MIB);
    CHECK_EQ(cu.cuEventQuery(e), CUDA_ERROR_NOT_READY);
    allocate(6 * MIB);
    CHECK_EQ(cu.cuEventQuery(e), CUDA_ERROR_NOT_READY);
    OK(cu.cuMemFree_v2(0));
    CHECK_EQ(cu.cuMemFree_v2(512), CUDA_ERROR_INVALID_VALUE);
    OK(cu.cuMemGetInfo_v2(&size, NULL));
    OK(cu.cuMemGetAddressRange_v2(&base, &size, q));
    CHECK_EQ(cu.cuEventQuery(e), CUDA_ERROR_NOT_READY);
    release(q);
    CHECK_EQ(cu.cuEventQuery(e), frees_wait() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
}

/* A double free answers without waiting, as the refused call natively does. */
LAW_CASE_SIM(a_refused_free_does_not_wait)
{
    start();
    CUstream s = stream_of_its_own();
    CUdeviceptr q = allocate(8 * MIB), p = cached_block(4 * MIB);
    launch_fill(fill, s, q, 8 * MIB, WORK_NS);
    CUevent e = record(s);
    CHECK_EQ(cu.cuMemFree_v2(p), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemFree_v2(q + 512), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuEventQuery(e), CUDA_ERROR_NOT_READY);
    release(q);
}

/* Freed with another context of the device current: the owner's work is waited for, the other's is not. */
LAW_CASE_SIM(the_owners_work_not_the_callers)
{
    as_a_barrier();
    CUcontext owner = law_context(), other, current;
    start();
    CUstream s = stream_of_its_own();
    CUdeviceptr p = allocate(4 * MIB);
    OK(cu.cuCtxCreate_v2(&other, 0, 0));
    CUstream t = stream_of_its_own();
    CUfunction fill_here = kernel("vram_fill");
    CUdeviceptr q = allocate(4 * MIB);
    OK(cu.cuCtxSetCurrent(owner));
    launch_fill(fill, s, p, 4 * MIB, WORK_NS);
    CUevent e = record(s);
    OK(cu.cuCtxSetCurrent(other));
    launch_fill(fill_here, t, q, 4 * MIB, WORK_NS);
    CUevent f = record(t);
    release(p);
    OK(cu.cuCtxGetCurrent(&current));
    CHECK_EQ((uintptr_t)current, (uintptr_t)other);
    CHECK_EQ(cu.cuEventQuery(f), CUDA_ERROR_NOT_READY);
    OK(cu.cuCtxSetCurrent(owner));
    CHECK_EQ(cu.cuEventQuery(e), CUDA_SUCCESS);
    CUdeviceptr again = allocate(4 * MIB);
    launch_fill(fill, stream_of_its_own(), again, 4 * MIB, WORK_NS);
    no_hazard();
}

/* Pitched memory and a block served from a larger one are no exceptions. */
LAW_CASE_SIM(every_kind_of_block)
{
    as_a_barrier();
    CUdeviceptr p;
    size_t pitch;
    start();
    CUstream s = stream_of_its_own();
    OK(cu.cuMemAllocPitch_v2(&p, &pitch, 4096, 1024, 4));
    SIM(sim_note_alloc)(p, 4096 * 1024);
    launch_fill(fill, s, p, 4096 * 1024, WORK_NS);
    free_waits_for(p, record(s));
    p = allocate(3 * MIB);
    launch_fill(fill, s, p, 3 * MIB, WORK_NS);
    free_waits_for(p, record(s));
}

static pthread_barrier_t together;
static CUcontext shared_context;

static void *churn(void *seed)
{
    unsigned x = (unsigned)(uintptr_t)seed;
    OK(cu.cuCtxSetCurrent(shared_context));
    CUstream s = stream_of_its_own();
    pthread_barrier_wait(&together);
    for (int i = 0; i < 150; i++) {
        x = x * 1103515245u + 12345u;
        size_t bytes = 2 * MIB + (x >> 16 & 1) * 2 * MIB;
        CUdeviceptr p = allocate(bytes);
        launch_fill(fill, s, p, 65536, 1000); /* as good as all of it, and no host memory to speak of */
        release(p);
    }
    return NULL;
}

/* Threads that hand each other their blocks: a block may be seen only after its work is waited for. */
LAW_CASE_SIM(many_threads)
{
    pthread_t threads[4];
    start();
    OK(cu.cuCtxGetCurrent(&shared_context));
    pthread_barrier_init(&together, NULL, 4);
    for (uintptr_t i = 0; i < 4; i++)
        CHECK(pthread_create(&threads[i], NULL, churn, (void *)(i + 1)) == 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    no_hazard();
    if (under_shim() && (frees_wait() || frees_order()))
        CHECK(driver_calls("cuMemAlloc_v2") <= 16);
}

static CUdeviceptr taken;
static void *take(void *unused)
{
    (void)unused;
    OK(cu.cuCtxSetCurrent(shared_context));
    OK(cu.cuMemAlloc_v2(&taken, 4 * MIB));
    return NULL;
}

static void while_waiting(const char *entry, void *arg)
{
    pthread_t thread;
    (void)entry;
    (void)arg;
    CHECK(pthread_create(&thread, NULL, take, NULL) == 0);
    pthread_join(thread, NULL);
}

/* Another thread asks while the free waits: the block is nobody's yet. */
LAW_CASE_SIM(not_handed_out_while_its_work_is_waited_for)
{
    as_a_barrier();
    start();
    OK(cu.cuCtxGetCurrent(&shared_context));
    CUdeviceptr p = allocate(4 * MIB);
    launch_fill(fill, stream_of_its_own(), p, 4 * MIB, WORK_NS);
    const char *waits = under_shim() ? "cuCtxSynchronize" : "cuMemFree_v2";
    CHECK(SIM(sim_on_call)(waits, while_waiting, NULL) == 0);
    release(p);
    CHECK(taken && taken != p);
    CHECK(SIM(sim_on_call)(waits, NULL, NULL) == 0);
    CHECK_EQ(allocate(4 * MIB), p); /* now it is */
    no_hazard();
}

/*
 * Law 18: if another context has enabled peer access to the owner of a block, its work counts too. Simulated time
 * stands still until a host call waits (SIMCUDA_CLOCK=lazy): what a free waited for is complete afterwards, and nothing
 * else is.
 */
#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include "law.h"
#include "sim.h"
#include "world.h"

enum { MIB = 1 << 20, WORK_NS = 1000000, UNKNOWN = 999, ALWAYS = 1000 };

/* This program has its own mmap, as programs may: it can fail for the shim. */
static bool no_memory;

void *mmap(void *addr, size_t length, int prot, int flags, int fd, off_t offset)
{
    Dl_info info;
    if (no_memory && dladdr(__builtin_return_address(0), &info) && strstr(info.dli_fname, "libvramshim")) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    return (void *)syscall(SYS_mmap, addr, length, prot, flags, fd, offset);
}

/* Before the driver reads its options; the cases' processes inherit it. */
static void __attribute__((constructor)) two_devices(void)
{
    setenv("SIMCUDA_DEVICES", "2", 1);
    setenv("SIMCUDA_CLOCK", "lazy", 1);
}

static CUcontext owner, peer; /* device 0's and device 1's */
static CUstream stream;       /* of peer */
static CUevent done;          /* of peer */
static CUfunction fill;       /* of peer */

static void two_contexts(void)
{
    CUdevice device;
    owner = law_context();
    OK(cu.cuDeviceGet(&device, 1));
    OK(cu.cuDevicePrimaryCtxRetain(&peer, device));
    OK(cu.cuCtxSetCurrent(peer));
    OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cu.cuEventCreate(&done, 0));
    fill = kernel("vram_fill");
    OK(cu.cuCtxSetCurrent(owner));
}

/* A kernel of the peer that uses p, and the event behind it. The owner is current again afterwards. */
static void peer_uses(CUdeviceptr p)
{
    OK(cu.cuCtxSetCurrent(peer));
    launch_fill(fill, stream, p, 4096, WORK_NS);
    OK(cu.cuEventRecord(done, stream));
    CHECK_EQ(cu.cuEventQuery(done), CUDA_ERROR_NOT_READY);
    OK(cu.cuCtxSetCurrent(owner));
}

static CUdeviceptr allocate(size_t bytes)
{
    CUdeviceptr p;
    OK(cu.cuMemAlloc_v2(&p, bytes));
    SIM(sim_note_alloc)(p, bytes);
    return p;
}

static void release(CUdeviceptr p)
{
    SIM(sim_note_free)(p);
    OK(cu.cuMemFree_v2(p));
}

/* The next owner of the memory uses it at once, on a stream that knows nothing of the peer. */
static void reuse(CUdeviceptr before, size_t bytes)
{
    CUstream other;
    OK(cu.cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
    unsigned long calls = driver_calls("cuMemAlloc_v2");
    CUdeviceptr p = allocate(bytes);
    if (under_shim() && frees_wait()) {
        CHECK_EQ(driver_calls("cuMemAlloc_v2"), calls);
        CHECK_EQ(p, before);
    }
    OK(cu.cuMemsetD8Async(p, 1, bytes, other));
    CHECK_EQ(SIM(sim_hazards)(), 0);
    release(p);
}

LAW_CASE_SIM(a_free_waits_for_the_peers_work)
{
    two_contexts();
    OK(cu.cuCtxSetCurrent(peer));
    OK(cu.cuCtxEnablePeerAccess(owner, 0));
    OK(cu.cuCtxSetCurrent(owner));
    CUdeviceptr p = allocate(4 * MIB);
    peer_uses(p);
    release(p);
    reuse(p, 4 * MIB);
    OK(cu.cuEventQuery(done));
}

/* The free is made where the peer is current: the owner's work and the peer's both count. */
LAW_CASE_SIM(freed_from_the_peer)
{
    CUstream own;
    CUevent own_done;
    two_contexts();
    OK(cu.cuStreamCreate(&own, CU_STREAM_NON_BLOCKING));
    OK(cu.cuEventCreate(&own_done, 0));
    OK(cu.cuCtxSetCurrent(peer));
    OK(cu.cuCtxEnablePeerAccess(owner, 0));
    OK(cu.cuCtxSetCurrent(owner));
    CUdeviceptr p = allocate(4 * MIB);
    OK(cu.cuMemsetD8Async(p + 8192, 1, 4096, own));
    OK(cu.cuEventRecord(own_done, own));
    peer_uses(p);
    OK(cu.cuCtxSetCurrent(peer));
    release(p);
    OK(cu.cuEventQuery(done));
    OK(cu.cuEventQuery(own_done));
    OK(cu.cuCtxSetCurrent(owner));
    reuse(p, 4 * MIB);
}

/* Access goes one way: the owner reaching into the peer does not make the peer's work count. */
LAW_CASE_SIM(only_the_one_with_access_counts)
{
    two_contexts();
    OK(cu.cuCtxEnablePeerAccess(peer, 0)); /* owner may use peer's memory, not the other way round */
    OK(cu.cuCtxSetCurrent(peer));
    CUdeviceptr its_own = allocate(4 * MIB);
    peer_uses(its_own);
    CUdeviceptr p = allocate(4 * MIB);
    release(p);
    OK(cu.cuCtxSetCurrent(peer));
    CHECK_EQ(cu.cuEventQuery(done), CUDA_ERROR_NOT_READY);
    release(its_own);
    OK(cu.cuEventQuery(done));
}

LAW_CASE_SIM(access_given_up_counts_no_longer)
{
    two_contexts();
    OK(cu.cuCtxSetCurrent(peer));
    CHECK_EQ(cu.cuCtxDisablePeerAccess(owner), CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
    OK(cu.cuCtxEnablePeerAccess(owner, 0));
    CHECK_EQ(cu.cuCtxEnablePeerAccess(owner, 0), CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
    OK(cu.cuCtxDisablePeerAccess(owner));
    CHECK_EQ(cu.cuCtxDisablePeerAccess(owner), CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
    CUdeviceptr its_own = allocate(4 * MIB);
    peer_uses(its_own);
    CUdeviceptr p = allocate(4 * MIB);
    release(p);
    CHECK_EQ(cu.cuEventQuery(done), CUDA_ERROR_NOT_READY);
}

/* A refused request for access changes nothing. */
LAW_CASE_SIM(access_that_was_refused_does_not_count)
{
    two_contexts();
    OK(cu.cuCtxSetCurrent(peer));
    CHECK_EQ(cu.cuCtxEnablePeerAccess(owner, 1), CUDA_ERROR_INVALID_VALUE);
    CUdeviceptr its_own = allocate(4 * MIB);
    peer_uses(its_own);
    release(allocate(4 * MIB));
    CHECK_EQ(cu.cuEventQuery(done), CUDA_ERROR_NOT_READY);
}

/* The peer ends: its work is over with it, and the owner's frees go on as before, in the cache. */
LAW_CASE_SIM(a_peer_that_has_ended)
{
    CUcontext gone;
    two_contexts();
    OK(cu.cuCtxCreate_v2(&gone, 0, 1));
    OK(cu.cuCtxEnablePeerAccess(owner, 0));
    OK(cu.cuCtxDestroy_v2(gone));
    OK(cu.cuCtxSetCurrent(owner));
    CUdeviceptr p = allocate(4 * MIB);
    release(p);
    reuse(p, 4 * MIB);
    OK(cu.cuCtxSetCurrent(peer));
    OK(cu.cuCtxEnablePeerAccess(owner, 0));
    OK(cu.cuDevicePrimaryCtxReset_v2(1));
    OK(cu.cuCtxSetCurrent(owner));
    release(allocate(4 * MIB));
    reuse(p, 4 * MIB);
    CHECK_EQ(SIM(sim_hazards)(), 0);
}

/* What comes after an ended peer, in the same place, has no access: its work does not count. */
LAW_CASE_SIM(an_ended_peers_successor)
{
    CUcontext next;
    CUstream work;
    CUevent after;
    two_contexts();
    for (int i = 0; i < 3; i++) {
        CUcontext gone;
        OK(cu.cuCtxCreate_v2(&gone, 0, 1));
        OK(cu.cuCtxEnablePeerAccess(owner, 0));
        OK(cu.cuCtxDestroy_v2(gone));
        OK(cu.cuCtxCreate_v2(&next, 0, 1));
        CUdeviceptr its_own = allocate(4 * MIB);
        OK(cu.cuStreamCreate(&work, CU_STREAM_NON_BLOCKING));
        OK(cu.cuEventCreate(&after, 0));
        OK(cu.cuMemsetD8Async(its_own, 1, 4096, work));
        OK(cu.cuEventRecord(after, work));
        OK(cu.cuCtxSetCurrent(owner));
        release(allocate(4 * MIB));
        OK(cu.cuCtxSetCurrent(next));
        CHECK_EQ(cu.cuEventQuery(after), CUDA_ERROR_NOT_READY);
        SIM(sim_note_free)(its_own);
        OK(cu.cuCtxDestroy_v2(next));
    }
}

/* More peers than one would think of: all of them count. */
LAW_CASE_SIM(many_peers)
{
    enum { N = 20 };
    CUcontext peers[N];
    CUevent events[N];
    two_contexts();
    CUdeviceptr p = allocate(N * 4096);
    for (int i = 0; i < N; i++) {
        CUstream s;
        OK(cu.cuCtxCreate_v2(&peers[i], 0, 1));
        OK(cu.cuCtxEnablePeerAccess(owner, 0));
        OK(cu.cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
        OK(cu.cuEventCreate(&events[i], 0));
        launch_fill(kernel("vram_fill"), s, p + (CUdeviceptr)i * 4096, 4096, WORK_NS);
        OK(cu.cuEventRecord(events[i], s));
    }
    OK(cu.cuCtxSetCurrent(owner));
    release(p);
    for (int i = 0; i < N; i++) {
        OK(cu.cuCtxSetCurrent(peers[i]));
        OK(cu.cuEventQuery(events[i]));
    }
}

/* Access of which the shim cannot note who has it: the driver's own free waits for whoever it is, and the shim asks for
 * nothing in a context that it does not know. */
static void access_that_cannot_be_noted(const char *refused)
{
    two_contexts();
    OK(cu.cuCtxSetCurrent(peer));
    unsigned long pushes = driver_calls("cuCtxPushCurrent_v2");
    if (refused)
        SIM(sim_fail)(refused, 1, ALWAYS, UNKNOWN);
    no_memory = !refused;
    OK(cu.cuCtxEnablePeerAccess(owner, 0));
    no_memory = false;
    if (refused)
        SIM(sim_fail)(refused, 1, 0, 0);
    OK(cu.cuCtxSetCurrent(owner));
    CUdeviceptr p = allocate(4 * MIB);
    peer_uses(p);
    release(p);
    OK(cu.cuEventQuery(done));
    p = allocate(4 * MIB);
    OK(cu.cuMemsetD8Async(p, 1, 4 * MIB, NULL));
    release(p);
    CHECK_EQ(SIM(sim_hazards)(), 0);
    if (refused && strcmp(refused, "cuCtxGetCurrent") == 0)
        CHECK_EQ(driver_calls("cuCtxPushCurrent_v2"), pushes);
}

LAW_CASE_SIM(a_peer_that_is_not_named) { access_that_cannot_be_noted("cuCtxGetCurrent"); }
LAW_CASE_SIM(a_peer_whose_device_is_not_named) { access_that_cannot_be_noted("cuCtxGetDevice"); }
LAW_CASE_SIM(no_memory_to_note_a_peer) { access_that_cannot_be_noted(NULL); }

/* Where contexts begin, end and reach into each other. */
#include "driver/capture.h"
#include "heap/heap.h"
#include "heap/life.h"
#include "interpose/hooks.h"

CUresult hook_cuDevicePrimaryCtxRetain(uintptr_t caller, CUcontext *pctx, CUdevice dev)
{
    (void)caller;
    CUresult r = VRAM_DRV(cuDevicePrimaryCtxRetain)(pctx, dev);
    if (r == CUDA_SUCCESS && pctx)
        vram_life_primary(dev, *pctx);
    return r;
}

static CUresult made(CUresult r, CUcontext *pctx, CUdevice dev)
{
    if (r == CUDA_SUCCESS)
        vram_life_made(*pctx, dev);
    return r;
}

CUresult hook_cuCtxCreate(uintptr_t caller, CUcontext *pctx, unsigned int flags, CUdevice dev)
{
    (void)caller;
    return made(VRAM_DRV(cuCtxCreate)(pctx, flags, dev), pctx, dev);
}

CUresult hook_cuCtxCreate_v2(uintptr_t caller, CUcontext *pctx, unsigned int flags, CUdevice dev)
{
    (void)caller;
    return made(VRAM_DRV(cuCtxCreate_v2)(pctx, flags, dev), pctx, dev);
}

CUresult hook_cuCtxCreate_v3(uintptr_t caller, CUcontext *pctx, CUexecAffinityParam *params, int count, unsigned int flags,
                             CUdevice dev)
{
    (void)caller;
    return made(VRAM_DRV(cuCtxCreate_v3)(pctx, params, count, flags, dev), pctx, dev);
}

CUresult hook_cuCtxCreate_v4(uintptr_t caller, CUcontext *pctx, CUctxCreateParams *params, unsigned int flags, CUdevice dev)
{
    (void)caller;
    return made(VRAM_DRV(cuCtxCreate_v4)(pctx, params, flags, dev), pctx, dev);
}

CUresult hook_cuGLCtxCreate(uintptr_t caller, CUcontext *pctx, unsigned int flags, CUdevice dev)
{
    (void)caller;
    return made(VRAM_DRV(cuGLCtxCreate)(pctx, flags, dev), pctx, dev);
}

CUresult hook_cuGLCtxCreate_v2(uintptr_t caller, CUcontext *pctx, unsigned int flags, CUdevice dev)
{
    (void)caller;
    return made(VRAM_DRV(cuGLCtxCreate_v2)(pctx, flags, dev), pctx, dev);
}

CUresult hook_cuVDPAUCtxCreate(uintptr_t caller, CUcontext *pctx, unsigned int flags, CUdevice dev, uint32_t vdpau,
                               void *get_proc_address)
{
    (void)caller;
    return made(VRAM_DRV(cuVDPAUCtxCreate)(pctx, flags, dev, vdpau, get_proc_address), pctx, dev);
}

CUresult hook_cuVDPAUCtxCreate_v2(uintptr_t caller, CUcontext *pctx, unsigned int flags, CUdevice dev, uint32_t vdpau,
                                  void *get_proc_address)
{
    (void)caller;
    return made(VRAM_DRV(cuVDPAUCtxCreate_v2)(pctx, flags, dev, vdpau, get_proc_address), pctx, dev);
}

/* A release ends the context only when it was the last, and other libraries' retains are not all seen by us: the driver
 * is asked. Where it cannot be asked, the life ends: a block forgotten is better than one handed out of a dead context. */
static bool primary_is_gone(CUdevice dev)
{
    unsigned flags;
    int active = 0;
    return !vram_driver()->cuDevicePrimaryCtxGetState ||
           VRAM_DRV(cuDevicePrimaryCtxGetState)(dev, &flags, &active) != CUDA_SUCCESS || !active;
}

/* What ended with the context: its blocks, and captures on its streams, which exist also where it never allocated. */
static void ended(struct vram_life *life, CUcontext ctx, bool gone)
{
    vram_life_end(life, gone);
    if (gone)
        vram_capture_context_ended(ctx);
}

static CUresult release(CUresult (*real)(CUdevice), CUdevice dev)
{
    CUcontext ctx = vram_life_primary_of(dev);
    vram_host_trim(ctx);
    struct vram_life *life = vram_life_end_begin(ctx);
    vram_locks_check_none();
    CUresult r = real(dev);
    ended(life, ctx, r == CUDA_SUCCESS && primary_is_gone(dev));
    return r;
}

static CUresult reset(CUresult (*real)(CUdevice), CUdevice dev)
{
    CUcontext ctx = vram_life_primary_of(dev);
    vram_host_trim(ctx);
    struct vram_life *life = vram_life_end_begin(ctx);
    vram_locks_check_none();
    CUresult r = real(dev);
    ended(life, ctx, r == CUDA_SUCCESS);
    return r;
}

static CUresult destroy(CUresult (*real)(CUcontext), CUcontext ctx)
{
    vram_host_trim(ctx);
    struct vram_life *life = vram_life_end_begin(ctx);
    vram_locks_check_none();
    CUresult r = real(ctx);
    ended(life, ctx, r == CUDA_SUCCESS);
    return r;
}

#define FORWARD(how, name, type, arg)                                                                                  \
    CUresult hook_##name(uintptr_t caller, type arg)                                                                   \
    {                                                                                                                  \
        (void)caller;                                                                                                  \
        return how(vram_driver()->name, arg);                                                                          \
    }
FORWARD(release, cuDevicePrimaryCtxRelease, CUdevice, dev)
FORWARD(release, cuDevicePrimaryCtxRelease_v2, CUdevice, dev)
FORWARD(reset, cuDevicePrimaryCtxReset, CUdevice, dev)
FORWARD(reset, cuDevicePrimaryCtxReset_v2, CUdevice, dev)
FORWARD(destroy, cuCtxDestroy, CUcontext, ctx)
FORWARD(destroy, cuCtxDestroy_v2, CUcontext, ctx)
FORWARD(destroy, cuCtxDetach, CUcontext, ctx)

CUresult hook_cuCtxFromGreenCtx(uintptr_t caller, CUcontext *pctx, CUgreenCtx green)
{
    (void)caller;
    CUresult r = VRAM_DRV(cuCtxFromGreenCtx)(pctx, green);
    if (r == CUDA_SUCCESS && pctx)
        vram_life_green(*pctx);
    return r;
}

/* The current context gains, or gives up, access to the memory of `peer` (law 18). */
CUresult hook_cuCtxEnablePeerAccess(uintptr_t caller, CUcontext peer, unsigned int flags)
{
    (void)caller;
    vram_heap_settle_context(peer);
    CUresult r = VRAM_DRV(cuCtxEnablePeerAccess)(peer, flags);
    if (r == CUDA_SUCCESS) {
        vram_life_peer(vram_life_context(), peer, true);
        vram_heap_settle_context(peer); /* what another thread was given meanwhile */
    }
    return r;
}

CUresult hook_cuCtxDisablePeerAccess(uintptr_t caller, CUcontext peer)
{
    (void)caller;
    CUresult r = VRAM_DRV(cuCtxDisablePeerAccess)(peer);
    if (r == CUDA_SUCCESS)
        vram_life_peer(vram_life_context(), peer, false);
    return r;
}

#include "context.h"

#include "array.h"
#include "capture.h"
#include "entry.h"
#include "judge.h"
#include "memory.h"
#include "pool.h"
#include "stream.h"
#include "work.h"

#include <stdlib.h>
#include <string.h>

CUcontext sim_context_current(void)
{
    return sim_thread.depth ? sim_thread.stack[sim_thread.depth - 1] : NULL;
}

CUresult sim_context_check(void)
{
    CUcontext ctx = sim_context_current();
    if (!ctx)
        return CUDA_ERROR_INVALID_CONTEXT;
    return ctx->alive ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

bool sim_context_exists(CUcontext ctx)
{
    for (CUcontext c = sim.contexts; c; c = c->next)
        if (c == ctx)
            return true;
    return false;
}

CUresult sim_context_use(CUcontext ctx, const char *entry)
{
    if (!sim_context_exists(ctx))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (ctx->alive)
        return CUDA_SUCCESS;
    sim_judge_hazard("%s on context %p, which has ended", entry, (void *)ctx);
    return CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

static bool bad_device(CUdevice dev)
{
    return dev < 0 || dev >= sim.config.devices;
}

static CUcontext context_create(CUdevice dev, bool primary)
{
    CUcontext c = sim_xcalloc(sizeof *c);
    c->device = dev;
    c->primary = primary;
    c->next = sim.contexts;
    sim.contexts = c;
    return c;
}

static CUresult context_begin(CUcontext c)
{
    CUresult r = sim_memory_take(c->device, sim.config.context_cost);
    if (r)
        return r;
    c->id = ++sim.next_id;
    c->error = CUDA_SUCCESS;
    c->alive = true;
    sim_stream_begin_context(c);
    return CUDA_SUCCESS;
}

static void context_end(CUcontext c)
{
    c->alive = false; /* first: no new work while we wait */
    sim_work_drop(c);
    sim_pool_reclaim(false);
    sim_capture_end_context(c);
    sim_stream_end_context(c);
    sim_array_end_context(c);
    sim_memory_end_context(c);
    sim_memory_give(c->device, sim.config.context_cost);
    for (CUcontext other = sim.contexts; other; other = other->next)
        for (size_t i = 0; i < other->accessor_count; i++)
            if (other->accessors[i] == c)
                other->accessors[i--] = other->accessors[--other->accessor_count];
    free(c->accessors);
    c->accessors = NULL;
    c->accessor_count = 0;
    c->retains = 0;
}

static CUresult push(CUcontext ctx)
{
    if (sim_thread.depth == SIM_MAX_STACK)
        return CUDA_ERROR_INVALID_CONTEXT;
    sim_thread.stack[sim_thread.depth++] = ctx;
    return CUDA_SUCCESS;
}

CUresult do_cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev)
{
    if (!pctx)
        return CUDA_ERROR_INVALID_VALUE;
    if (bad_device(dev))
        return CUDA_ERROR_INVALID_DEVICE;
    struct sim_device *d = &sim.device[dev];
    sim_work_poll();
    if (d->error)
        return d->error;
    if (!d->primary)
        d->primary = context_create(dev, true);
    if (!d->primary->alive) {
        CUresult r = context_begin(d->primary);
        if (r)
            return r;
        d->primary->flags = d->primary_flags;
    }
    d->primary->retains++;
    *pctx = d->primary;
    return CUDA_SUCCESS;
}

CUresult do_cuDevicePrimaryCtxRelease_v2(CUdevice dev)
{
    if (bad_device(dev))
        return CUDA_ERROR_INVALID_DEVICE;
    CUcontext c = sim.device[dev].primary;
    if (!c || !c->alive || !c->retains)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!--c->retains)
        context_end(c);
    return CUDA_SUCCESS;
}

CUresult do_cuDevicePrimaryCtxRelease(CUdevice dev)
{
    return do_cuDevicePrimaryCtxRelease_v2(dev);
}

CUresult do_cuDevicePrimaryCtxReset_v2(CUdevice dev)
{
    if (bad_device(dev))
        return CUDA_ERROR_INVALID_DEVICE;
    CUcontext c = sim.device[dev].primary;
    if (c && c->alive)
        context_end(c);
    return CUDA_SUCCESS;
}

CUresult do_cuDevicePrimaryCtxReset(CUdevice dev)
{
    return do_cuDevicePrimaryCtxReset_v2(dev);
}

CUresult do_cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int *flags, int *active)
{
    if (bad_device(dev))
        return CUDA_ERROR_INVALID_DEVICE;
    if (!flags || !active)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = sim.device[dev].primary_flags;
    *active = sim.device[dev].primary && sim.device[dev].primary->alive;
    return CUDA_SUCCESS;
}

CUresult do_cuDevicePrimaryCtxSetFlags_v2(CUdevice dev, unsigned int flags)
{
    if (bad_device(dev))
        return CUDA_ERROR_INVALID_DEVICE;
    sim.device[dev].primary_flags = flags;
    return CUDA_SUCCESS;
}

CUresult do_cuDevicePrimaryCtxSetFlags(CUdevice dev, unsigned int flags)
{
    return do_cuDevicePrimaryCtxSetFlags_v2(dev, flags);
}

CUresult do_cuCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev)
{
    if (!pctx)
        return CUDA_ERROR_INVALID_VALUE;
    if (bad_device(dev))
        return CUDA_ERROR_INVALID_DEVICE;
    if (sim.device[dev].error)
        return sim.device[dev].error;
    if (sim_thread.depth == SIM_MAX_STACK)
        return CUDA_ERROR_INVALID_CONTEXT;
    CUcontext c = context_create(dev, false); /* a handle of its own each time, as measured */
    CUresult r = context_begin(c);
    if (r)
        return r;
    c->flags = flags;
    *pctx = c;
    return push(c);
}

CUresult do_cuCtxCreate(CUcontext *pctx, unsigned int flags, CUdevice dev)
{
    return do_cuCtxCreate_v2(pctx, flags, dev);
}

CUresult do_cuCtxCreate_v4(CUcontext *pctx, CUctxCreateParams *params, unsigned int flags, CUdevice dev)
{
    return params ? CUDA_ERROR_NOT_SUPPORTED : do_cuCtxCreate_v2(pctx, flags, dev);
}

CUresult do_cuCtxDestroy_v2(CUcontext ctx)
{
    CUresult r = sim_context_use(ctx, "cuCtxDestroy");
    if (r)
        return r;
    if (ctx->primary)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (sim_context_current() == ctx)
        sim_thread.depth--;
    context_end(ctx);
    return CUDA_SUCCESS;
}

CUresult do_cuCtxDestroy(CUcontext ctx)
{
    return do_cuCtxDestroy_v2(ctx);
}

CUresult do_cuCtxAttach(CUcontext *pctx, unsigned int flags)
{
    if (!pctx || flags)
        return CUDA_ERROR_INVALID_VALUE;
    sim_context_current()->retains++;
    *pctx = sim_context_current();
    return CUDA_SUCCESS;
}

/* Gives a cuCtxAttach back, or ends the context when there is none left. */
CUresult do_cuCtxDetach(CUcontext ctx)
{
    CUresult r = sim_context_use(ctx, "cuCtxDetach");
    if (r)
        return r;
    if (sim_context_current() != ctx || ctx->primary)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (ctx->retains) {
        ctx->retains--;
        return CUDA_SUCCESS;
    }
    return do_cuCtxDestroy_v2(ctx);
}

CUresult do_cuCtxPushCurrent_v2(CUcontext ctx)
{
    CUresult r = sim_context_use(ctx, "cuCtxPushCurrent");
    return r ? r : push(ctx);
}

CUresult do_cuCtxPushCurrent(CUcontext ctx)
{
    return do_cuCtxPushCurrent_v2(ctx);
}

CUresult do_cuCtxPopCurrent_v2(CUcontext *pctx)
{
    if (!sim_thread.depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    CUcontext ctx = sim_thread.stack[--sim_thread.depth];
    if (pctx)
        *pctx = ctx;
    return CUDA_SUCCESS;
}

CUresult do_cuCtxPopCurrent(CUcontext *pctx)
{
    return do_cuCtxPopCurrent_v2(pctx);
}

CUresult do_cuCtxGetCurrent(CUcontext *pctx)
{
    if (!pctx)
        return CUDA_ERROR_INVALID_VALUE;
    *pctx = sim_context_current();
    return CUDA_SUCCESS;
}

CUresult do_cuCtxSetCurrent(CUcontext ctx)
{
    if (!ctx) {
        if (sim_thread.depth)
            sim_thread.depth--;
        return CUDA_SUCCESS;
    }
    CUresult r = sim_context_use(ctx, "cuCtxSetCurrent");
    if (r)
        return r;
    if (!sim_thread.depth)
        return push(ctx);
    sim_thread.stack[sim_thread.depth - 1] = ctx;
    return CUDA_SUCCESS;
}

CUresult do_cuCtxGetDevice(CUdevice *device)
{
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    *device = sim_context_current()->device;
    return CUDA_SUCCESS;
}

CUresult do_cuCtxGetFlags(unsigned int *flags)
{
    if (!flags)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = sim_context_current()->flags;
    return CUDA_SUCCESS;
}

CUresult do_cuCtxGetId(CUcontext ctx, unsigned long long *id)
{
    CUresult r = ctx ? sim_context_use(ctx, "cuCtxGetId") : sim_context_check();
    if (!r && !id)
        r = CUDA_ERROR_INVALID_VALUE;
    if (!r)
        *id = (ctx ? ctx : sim_context_current())->id;
    return r;
}

CUresult do_cuCtxGetApiVersion(CUcontext ctx, unsigned int *version)
{
    CUresult r = ctx ? sim_context_use(ctx, "cuCtxGetApiVersion") : sim_context_check();
    if (!r && !version)
        r = CUDA_ERROR_INVALID_VALUE;
    if (!r)
        *version = 3020;
    return r;
}

CUresult do_cuCtxSynchronize(void)
{
    CUcontext ctx = sim_context_current();
    struct vclock at = {0};
    sim_work_context_clock(ctx, &at);
    sim_work_wait(&at);
    sim_vclock_clear(&at);
    sim_pool_synchronised(ctx->device);
    return ctx->error;
}

CUresult do_cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags)
{
    CUcontext me = sim_context_current();
    CUresult r = sim_context_use(peer, "cuCtxEnablePeerAccess");
    if (r)
        return r;
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (peer == me || peer->device == me->device)
        return CUDA_ERROR_INVALID_DEVICE;
    for (size_t i = 0; i < peer->accessor_count; i++)
        if (peer->accessors[i] == me)
            return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    peer->accessors = sim_xrealloc(peer->accessors, (peer->accessor_count + 1) * sizeof(CUcontext));
    peer->accessors[peer->accessor_count++] = me;
    return CUDA_SUCCESS;
}

CUresult do_cuCtxDisablePeerAccess(CUcontext peer)
{
    CUresult r = sim_context_use(peer, "cuCtxDisablePeerAccess");
    if (r)
        return r;
    for (size_t i = 0; i < peer->accessor_count; i++) {
        if (peer->accessors[i] == sim_context_current()) {
            peer->accessors[i] = peer->accessors[--peer->accessor_count];
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
}

CUresult do_cuCtxRecordEvent(CUcontext ctx, CUevent event)
{
    CUresult r = ctx ? sim_context_use(ctx, "cuCtxRecordEvent") : sim_context_check();
    ctx = ctx ? ctx : sim_context_current();
    if (!r)
        r = sim_capture_check_never(ctx);
    if (!r && !sim_handle_is(event, HANDLE_EVENT))
        r = CUDA_ERROR_INVALID_HANDLE;
    if (!r && event->ctx != ctx)
        r = CUDA_ERROR_INVALID_HANDLE;
    sim_work_poll();
    if (!r)
        r = ctx->error;
    if (r)
        return r;
    sim_work_forget_event(event);
    sim_vclock_clear(&event->at);
    sim_work_context_clock(ctx, &event->at);
    event->stamp = sim_work_time(&event->at);
    event->recorded = true;
    event->capture_id = 0;
    return CUDA_SUCCESS;
}

CUresult do_cuCtxWaitEvent(CUcontext ctx, CUevent event)
{
    CUresult r = ctx ? sim_context_use(ctx, "cuCtxWaitEvent") : sim_context_check();
    ctx = ctx ? ctx : sim_context_current();
    if (!r)
        r = sim_capture_check_never(ctx);
    if (!r && !sim_handle_is(event, HANDLE_EVENT))
        r = CUDA_ERROR_INVALID_HANDLE;
    if (!r && event->capture_id)
        r = CUDA_ERROR_CAPTURED_EVENT;
    if (!r)
        r = ctx->error;
    if (!r)
        sim_vclock_join(&ctx->base, &event->at);
    return r;
}

/* Settings that are taken and change nothing. */
CUresult do_cuCtxGetLimit(size_t *value, int limit)
{
    if (!value || limit < 0 || limit > 9)
        return CUDA_ERROR_INVALID_VALUE;
    *value = limit == 0 ? 1024 : (size_t)8 << 20;
    return CUDA_SUCCESS;
}

CUresult do_cuCtxSetLimit(int limit, size_t value)
{
    (void)value;
    return limit < 0 || limit > 9 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult do_cuCtxGetCacheConfig(int *config)
{
    if (!config)
        return CUDA_ERROR_INVALID_VALUE;
    *config = 0;
    return CUDA_SUCCESS;
}

CUresult do_cuCtxSetCacheConfig(int config)
{
    (void)config;
    return CUDA_SUCCESS;
}

CUresult do_cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return CUDA_SUCCESS;
}

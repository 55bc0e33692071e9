#include "stream.h"

#include "capture.h"
#include "context.h"
#include "entry.h"
#include "pool.h"
#include "work.h"

#include <stdlib.h>

static CUstream stream_create(CUcontext ctx, unsigned int kind, unsigned int flags)
{
    CUstream s = sim_xcalloc(sizeof *s);
    s->kind = kind;
    s->ctx = ctx;
    s->flags = flags;
    s->id = ++sim.next_id;
    s->slot = sim_work_take_slot();
    s->next = ctx->streams;
    ctx->streams = s;
    return s;
}

/* The work of a destroyed stream goes on, and is still waited for by its context and its legacy stream. */
static void stream_destroy(CUstream s)
{
    CUcontext ctx = s->ctx;
    sim_capture_end_stream(s);
    sim_vclock_join(&ctx->gone, &s->base);
    if (!(s->flags & CU_STREAM_NON_BLOCKING))
        sim_vclock_join(&ctx->gone_blocking, &s->base);
    for (CUstream *at = &ctx->streams; *at; at = &(*at)->next) {
        if (*at == s) {
            *at = s->next;
            break;
        }
    }
    if (s->kind == STREAM_PLAIN)
        sim_handle_remove(s);
    sim_work_release_slot(s->slot);
    sim_vclock_clear(&s->base);
    free(s);
}

void sim_stream_begin_context(CUcontext ctx)
{
    ctx->legacy = stream_create(ctx, STREAM_LEGACY, CU_STREAM_DEFAULT);
}

void sim_stream_end_context(CUcontext ctx)
{
    while (ctx->streams)
        stream_destroy(ctx->streams);
    ctx->legacy = NULL;
    sim_vclock_clear(&ctx->gone);
    sim_vclock_clear(&ctx->gone_blocking);
    sim_vclock_clear(&ctx->base);
}

/* When a thread ends, its default streams do. */
static void thread_ends(void *arg)
{
    uint64_t serial = (uint64_t)(uintptr_t)arg;
    sim_lock();
    for (CUcontext c = sim.contexts; c; c = c->next) {
        for (CUstream s = c->streams, next; s; s = next) {
            next = s->next;
            if (s->kind == STREAM_PER_THREAD && s->thread == serial)
                stream_destroy(s);
        }
    }
    sim_unlock();
}

static pthread_key_t thread_key;

static void make_key(void)
{
    pthread_key_create(&thread_key, thread_ends);
}

static CUstream per_thread_stream(CUcontext ctx)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    for (CUstream s = ctx->streams; s; s = s->next)
        if (s->kind == STREAM_PER_THREAD && s->thread == sim_thread.serial)
            return s;
    pthread_once(&once, make_key);
    pthread_setspecific(thread_key, (void *)(uintptr_t)sim_thread.serial);
    CUstream s = stream_create(ctx, STREAM_PER_THREAD, CU_STREAM_DEFAULT);
    s->thread = sim_thread.serial;
    return s;
}

CUstream sim_stream_resolve(CUstream handle)
{
    if (handle == NULL)
        handle = sim_thread.per_thread_default ? CU_STREAM_PER_THREAD : CU_STREAM_LEGACY;
    if (handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) {
        CUcontext ctx = sim_context_current();
        if (!ctx || !ctx->alive)
            return NULL;
        return handle == CU_STREAM_LEGACY ? ctx->legacy : per_thread_stream(ctx);
    }
    return sim_handle_is(handle, HANDLE_STREAM) && handle->ctx->alive ? handle : NULL;
}

CUresult do_cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority)
{
    if (!stream || flags & ~(unsigned int)CU_STREAM_NON_BLOCKING)
        return CUDA_ERROR_INVALID_VALUE;
    *stream = stream_create(sim_context_current(), STREAM_PLAIN, flags);
    (*stream)->priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
    sim_handle_add(*stream, HANDLE_STREAM);
    return CUDA_SUCCESS;
}

CUresult do_cuStreamCreate(CUstream *stream, unsigned int flags)
{
    return do_cuStreamCreateWithPriority(stream, flags, 0);
}

CUresult do_cuStreamDestroy_v2(CUstream stream)
{
    if (!sim_handle_is(stream, HANDLE_STREAM))
        return CUDA_ERROR_INVALID_HANDLE;
    stream_destroy(stream);
    return CUDA_SUCCESS;
}

CUresult do_cuStreamDestroy(CUstream stream)
{
    return do_cuStreamDestroy_v2(stream);
}

CUresult do_cuStreamSynchronize(CUstream handle)
{
    CUstream s = sim_stream_resolve(handle);
    if (!s)
        return CUDA_ERROR_INVALID_HANDLE;
    CUresult r = sim_capture_check_stream(s);
    if (r)
        return r;
    CUcontext ctx = s->ctx;
    struct vclock at = {0};
    sim_work_stream_clock(s, &at);
    sim_work_wait(&at);
    sim_vclock_clear(&at);
    sim_pool_synchronised(ctx->device);
    return ctx->error;
}

CUresult do_cuStreamQuery(CUstream handle)
{
    CUstream s = sim_stream_resolve(handle);
    if (!s)
        return CUDA_ERROR_INVALID_HANDLE;
    CUresult r = sim_capture_check_stream(s);
    if (r)
        return r;
    struct vclock at = {0};
    sim_work_stream_clock(s, &at);
    bool done = sim_work_observe(&at);
    sim_vclock_clear(&at);
    return s->ctx->error ? s->ctx->error : done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult do_cuStreamWaitEvent(CUstream handle, CUevent event, unsigned int flags)
{
    (void)flags;
    CUstream s = sim_stream_resolve(handle);
    if (!s || !sim_handle_is(event, HANDLE_EVENT))
        return CUDA_ERROR_INVALID_HANDLE;
    bool captured;
    CUresult r = sim_capture_wait(s, event, &captured);
    if (!r && !captured)
        sim_vclock_join(&s->base, &event->at);
    return r;
}

CUresult do_cuStreamGetPriority(CUstream handle, int *priority)
{
    CUstream s = sim_stream_resolve(handle);
    if (!s)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!priority)
        return CUDA_ERROR_INVALID_VALUE;
    *priority = s->priority;
    return CUDA_SUCCESS;
}

CUresult do_cuStreamGetFlags(CUstream handle, unsigned int *flags)
{
    CUstream s = sim_stream_resolve(handle);
    if (!s)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!flags)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = s->flags;
    return CUDA_SUCCESS;
}

CUresult do_cuStreamGetId(CUstream handle, unsigned long long *id)
{
    CUstream s = sim_stream_resolve(handle);
    if (!s)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!id)
        return CUDA_ERROR_INVALID_VALUE;
    *id = s->id;
    return CUDA_SUCCESS;
}

CUresult do_cuStreamGetCtx(CUstream handle, CUcontext *pctx)
{
    CUstream s = sim_stream_resolve(handle);
    if (!s)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!pctx)
        return CUDA_ERROR_INVALID_VALUE;
    *pctx = s->ctx;
    return CUDA_SUCCESS;
}

CUresult do_cuStreamGetCtx_v2(CUstream handle, CUcontext *pctx, CUgreenCtx *green)
{
    if (green)
        *green = NULL;
    return do_cuStreamGetCtx(handle, pctx);
}

CUresult do_cuStreamAttachMemAsync(CUstream handle, CUdeviceptr dptr, size_t bytes, unsigned int flags)
{
    (void)dptr, (void)bytes, (void)flags;
    return sim_stream_resolve(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult do_cuStreamAddCallback(CUstream handle, CUstreamCallback callback, void *user_data, unsigned int flags)
{
    CUstream s = sim_stream_resolve(handle);
    if (!s)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!callback || flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (s->capture)
        return sim_capture_check_stream(s); /* never capturable */
    return sim_work_enqueue(s, &(struct sim_op){.kind = OP_HOST,
                                                .what = "callback",
                                                .callback = callback,
                                                .callback_stream = handle,
                                                .user_data = user_data});
}

CUresult do_cuLaunchHostFunc(CUstream handle, CUhostFn fn, void *user_data)
{
    CUstream s = sim_stream_resolve(handle);
    if (!s)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!fn)
        return CUDA_ERROR_INVALID_VALUE;
    return sim_work_enqueue(
        s, &(struct sim_op){.kind = OP_HOST, .what = "host function", .host = fn, .user_data = user_data});
}

CUresult do_cuEventCreate(CUevent *event, unsigned int flags)
{
    if (!event || flags & ~7u)
        return CUDA_ERROR_INVALID_VALUE;
    *event = sim_xcalloc(sizeof **event);
    (*event)->ctx = sim_context_current();
    (*event)->flags = flags;
    sim_handle_add(*event, HANDLE_EVENT);
    return CUDA_SUCCESS;
}

CUresult do_cuEventDestroy_v2(CUevent event)
{
    if (!sim_handle_is(event, HANDLE_EVENT))
        return CUDA_ERROR_INVALID_HANDLE;
    sim_handle_remove(event);
    sim_work_forget_event(event);
    sim_vclock_clear(&event->at);
    sim_vclock_clear(&event->capture_at);
    free(event);
    return CUDA_SUCCESS;
}

CUresult do_cuEventDestroy(CUevent event)
{
    return do_cuEventDestroy_v2(event);
}

CUresult do_cuEventRecordWithFlags(CUevent event, CUstream handle, unsigned int flags)
{
    CUstream s = sim_stream_resolve(handle);
    if (!s || !sim_handle_is(event, HANDLE_EVENT) || event->ctx != s->ctx)
        return CUDA_ERROR_INVALID_HANDLE;
    if (flags > 1)
        return CUDA_ERROR_INVALID_VALUE;
    bool captured;
    CUresult r = sim_capture_record(s, event, &captured);
    if (!r && !captured) {
        event->capture_id = 0;
        sim_work_event(s, event);
    }
    return r;
}

CUresult do_cuEventRecord(CUevent event, CUstream handle)
{
    return do_cuEventRecordWithFlags(event, handle, 0);
}

static CUresult event_check(CUevent event)
{
    if (!sim_handle_is(event, HANDLE_EVENT))
        return CUDA_ERROR_INVALID_HANDLE;
    if (event->capture_id)
        return CUDA_ERROR_CAPTURED_EVENT;
    return event->ctx->alive ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

CUresult do_cuEventQuery(CUevent event)
{
    CUresult r = event_check(event);
    if (r)
        return r;
    bool done = sim_work_observe(&event->at);
    return event->ctx->error ? event->ctx->error : done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult do_cuEventSynchronize(CUevent event)
{
    CUresult r = event_check(event);
    if (r)
        return r;
    CUcontext ctx = event->ctx;
    sim_work_wait(&event->at);
    sim_pool_synchronised(ctx->device);
    return ctx->error;
}

CUresult do_cuEventElapsedTime_v2(float *ms, CUevent start, CUevent end)
{
    CUresult r = event_check(start);
    if (!r)
        r = event_check(end);
    if (r)
        return r;
    if (!ms)
        return CUDA_ERROR_INVALID_VALUE;
    if ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING || !start->recorded || !end->recorded)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!sim_work_done(&start->at) || !sim_work_done(&end->at))
        return CUDA_ERROR_NOT_READY;
    *ms = (float)((double)(int64_t)(end->stamp - start->stamp) / 1e6);
    return CUDA_SUCCESS;
}

CUresult do_cuEventElapsedTime(float *ms, CUevent start, CUevent end)
{
    return do_cuEventElapsedTime_v2(ms, start, end);
}

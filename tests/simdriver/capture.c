#include "capture.h"

#include "context.h"
#include "entry.h"
#include "graph.h"
#include "sim.h"
#include "stream.h"

#include <stdlib.h>

#define MAX_STREAMS 64

/*
 * Streams that take part have an index; clock[i] tells how far stream i has got, and what of the others it comes after.
 * At the end the origin must come after all of them, else the capture is not joined.
 */
struct sim_capture {
    uint64_t id;
    CUstreamCaptureMode mode;
    uint64_t thread; /* that began it */
    CUcontext ctx;
    CUgraph graph;
    bool own_graph; /* not the caller's, of cuStreamBeginCaptureToGraph */
    bool invalid;
    uint32_t count;
    CUstream stream[MAX_STREAMS]; /* [0]: the origin; NULL: destroyed */
    struct vclock clock[MAX_STREAMS];
    struct sim_capture *next;
};
static struct sim_capture *captures;

int sim_capture_count(void)
{
    int n = 0;
    for (struct sim_capture *c = captures; c; c = c->next)
        n++;
    return n;
}

CUresult sim_capture_check_unsafe(void)
{
    CUresult r = CUDA_SUCCESS;
    if (sim_thread.capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return r;
    for (struct sim_capture *c = captures; c; c = c->next) {
        bool mine = c->thread == sim_thread.serial && c->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
        bool global =
            c->mode == CU_STREAM_CAPTURE_MODE_GLOBAL && sim_thread.capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
        if (mine || global) {
            c->invalid = true;
            r = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    }
    return r;
}

CUresult sim_capture_check_never(CUcontext ctx)
{
    CUresult r = CUDA_SUCCESS;
    for (struct sim_capture *c = captures; c; c = c->next) {
        if (c->ctx == ctx) {
            c->invalid = true;
            r = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    }
    return r;
}

/* The legacy stream would have to wait for a capturing stream, which is not possible. */
static CUresult check_legacy(CUstream stream, bool invalidate)
{
    CUresult r = CUDA_SUCCESS;
    if (stream->kind != STREAM_LEGACY)
        return r;
    for (CUstream s = stream->ctx->streams; s; s = s->next) {
        if (s->capture && !(s->flags & CU_STREAM_NON_BLOCKING)) {
            s->capture->invalid |= invalidate;
            r = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
    }
    return r;
}

CUresult sim_capture_check_stream(CUstream stream)
{
    if (stream->capture) {
        stream->capture->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return check_legacy(stream, true);
}

static struct vclock *clock_of(CUstream stream)
{
    return &stream->capture->clock[stream->capture_index];
}

static void advance(CUstream stream)
{
    struct vclock *at = clock_of(stream);
    sim_vclock_raise(at, stream->capture_index, sim_vclock_get(at, stream->capture_index) + 1);
}

CUresult sim_capture_op(CUstream stream, const struct sim_op *op, bool *captured)
{
    struct sim_capture *c = stream->capture;
    *captured = c != NULL;
    if (!c)
        return check_legacy(stream, true);
    if (c->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    sim_graph_add(c->graph, op);
    advance(stream);
    return CUDA_SUCCESS;
}

CUresult sim_capture_record(CUstream stream, CUevent event, bool *captured)
{
    struct sim_capture *c = stream->capture;
    *captured = c != NULL;
    if (!c)
        return check_legacy(stream, true);
    if (c->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    event->capture_id = c->id;
    sim_vclock_copy(&event->capture_at, clock_of(stream));
    return CUDA_SUCCESS;
}

CUresult sim_capture_wait(CUstream stream, CUevent event, bool *captured)
{
    struct sim_capture *c = stream->capture, *of = captures;
    *captured = c != NULL || event->capture_id;
    if (!*captured)
        return check_legacy(stream, true);
    while (of && of->id != event->capture_id)
        of = of->next;
    if (c && c->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (!event->capture_id) { /* work from outside cannot be waited for inside */
        c->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    if (!of)
        return CUDA_ERROR_CAPTURED_EVENT;
    if (c && c != of) {
        c->invalid = of->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    if (of->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (!c) { /* the wait makes this stream part of the capture */
        if (stream->kind == STREAM_LEGACY)
            return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        if (of->count == MAX_STREAMS)
            return CUDA_ERROR_NOT_SUPPORTED;
        stream->capture = of;
        stream->capture_index = of->count++;
        of->stream[stream->capture_index] = stream;
    }
    sim_vclock_join(clock_of(stream), &event->capture_at);
    return CUDA_SUCCESS;
}

static CUresult begin(CUstream handle, CUstreamCaptureMode mode, CUgraph graph)
{
    CUstream s = sim_stream_resolve(handle);
    if (!s)
        return CUDA_ERROR_INVALID_HANDLE;
    if (mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    if (s->kind == STREAM_LEGACY)
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    if (s->capture)
        return CUDA_ERROR_ILLEGAL_STATE;
    struct sim_capture *c = sim_xcalloc(sizeof *c);
    c->id = ++sim.next_id;
    c->mode = mode;
    c->thread = sim_thread.serial;
    c->ctx = s->ctx;
    c->own_graph = !graph;
    c->graph = graph ? graph : sim_graph_create();
    c->stream[c->count++] = s;
    c->next = captures;
    captures = c;
    s->capture = c;
    s->capture_index = 0;
    return CUDA_SUCCESS;
}

/* Every stream leaves it, and the graph goes unless it is handed over. */
static void end(struct sim_capture *c, bool keep_graph)
{
    for (struct sim_capture **at = &captures; *at; at = &(*at)->next) {
        if (*at == c) {
            *at = c->next;
            break;
        }
    }
    for (uint32_t i = 0; i < c->count; i++) {
        if (c->stream[i])
            c->stream[i]->capture = NULL;
        sim_vclock_clear(&c->clock[i]);
    }
    if (c->own_graph && !keep_graph)
        sim_graph_destroy(c->graph);
    free(c);
}

void sim_capture_end_stream(CUstream stream)
{
    struct sim_capture *c = stream->capture;
    if (!c)
        return;
    if (c->stream[0] == stream) {
        end(c, false);
    } else {
        c->stream[stream->capture_index] = NULL;
        c->invalid = true;
        stream->capture = NULL;
    }
}

void sim_capture_end_context(CUcontext ctx)
{
    for (struct sim_capture *c = captures, *next; c; c = next) {
        next = c->next;
        if (c->ctx == ctx)
            end(c, false);
    }
}

/* CUDA 10.0 had no modes: an allocation during such a capture succeeds (measured). */
CUresult do_cuStreamBeginCapture(CUstream stream)
{
    return begin(stream, CU_STREAM_CAPTURE_MODE_RELAXED, NULL);
}

CUresult do_cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode)
{
    return begin(stream, mode, NULL);
}

CUresult do_cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode *dependencies,
                                        const CUgraphEdgeData *dependency_data, size_t count, CUstreamCaptureMode mode)
{
    (void)dependency_data;
    if (!sim_handle_is(graph, HANDLE_GRAPH) || (count && !dependencies))
        return CUDA_ERROR_INVALID_VALUE;
    return begin(stream, mode, graph);
}

CUresult do_cuStreamEndCapture(CUstream handle, CUgraph *graph)
{
    CUstream s = sim_stream_resolve(handle);
    if (!s)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!graph)
        return CUDA_ERROR_INVALID_VALUE;
    struct sim_capture *c = s->capture;
    if (!c)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (c->mode != CU_STREAM_CAPTURE_MODE_RELAXED && c->thread != sim_thread.serial)
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    if (c->stream[0] != s)
        return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    CUresult r = c->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
    for (uint32_t i = 1; !r && i < c->count; i++)
        if (sim_vclock_get(&c->clock[0], i) < sim_vclock_get(&c->clock[i], i))
            r = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    *graph = r ? NULL : c->graph;
    end(c, !r);
    return r;
}

static CUstreamCaptureStatus status_of(CUstream s)
{
    if (!s->capture)
        return CU_STREAM_CAPTURE_STATUS_NONE;
    return s->capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}

CUresult do_cuStreamGetCaptureInfo_v3(CUstream handle, CUstreamCaptureStatus *status, unsigned long long *id,
                                      CUgraph *graph, const CUgraphNode **dependencies, const CUgraphEdgeData **edges,
                                      size_t *count)
{
    CUstream s = sim_stream_resolve(handle);
    if (!s)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!status)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult r = check_legacy(s, false);
    if (r)
        return r;
    *status = status_of(s);
    if (*status != CU_STREAM_CAPTURE_STATUS_ACTIVE)
        return CUDA_SUCCESS;
    if (id)
        *id = s->capture->id;
    if (graph)
        *graph = s->capture->graph;
    if (dependencies)
        *dependencies = NULL;
    if (edges)
        *edges = NULL;
    if (count)
        *count = 0;
    return CUDA_SUCCESS;
}

CUresult do_cuStreamGetCaptureInfo_v2(CUstream handle, CUstreamCaptureStatus *status, unsigned long long *id,
                                      CUgraph *graph, const CUgraphNode **dependencies, size_t *count)
{
    return do_cuStreamGetCaptureInfo_v3(handle, status, id, graph, dependencies, NULL, count);
}

CUresult do_cuStreamGetCaptureInfo(CUstream handle, CUstreamCaptureStatus *status, unsigned long long *id)
{
    return do_cuStreamGetCaptureInfo_v3(handle, status, id, NULL, NULL, NULL, NULL);
}

CUresult do_cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status)
{
    return do_cuStreamGetCaptureInfo_v3(handle, status, NULL, NULL, NULL, NULL, NULL);
}

CUresult do_cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    if (!mode || *mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    CUstreamCaptureMode old = sim_thread.capture_mode;
    sim_thread.capture_mode = *mode;
    *mode = old;
    return CUDA_SUCCESS;
}

__attribute__((visibility("default"))) int sim_capturing(void)
{
    sim_lock();
    int n = sim_capture_count();
    sim_unlock();
    return n;
}

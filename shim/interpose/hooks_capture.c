/* Where captures begin and end (law 17). */
#include "driver/capture.h"
#include "heap/life.h"
#include "interpose/hooks.h"

/* Each begin: announce, let the driver decide, keep or withdraw the announcement. */
#define BEGIN(name, per_thread, parameters, arguments)                                                                 \
    CUresult hook_##name(uintptr_t caller, VRAM_EXPAND parameters)                                                     \
    {                                                                                                                  \
        (void)caller;                                                                                                  \
        CUcontext ctx = vram_life_context();                                                                           \
        vram_capture_announce();                                                                                       \
        CUresult r = VRAM_DRV(name) arguments;                                                                         \
        if (r == CUDA_SUCCESS)                                                                                         \
            vram_capture_begun(stream, per_thread, ctx);                                                               \
        else                                                                                                           \
            vram_capture_not_begun();                                                                                  \
        return r;                                                                                                      \
    }

#define TO_GRAPH                                                                                                       \
    (CUstream stream, CUgraph graph, const CUgraphNode *dependencies, const CUgraphEdgeData *dependency_data,          \
     size_t count, CUstreamCaptureMode mode)

BEGIN(cuStreamBeginCapture, false, (CUstream stream), (stream))
BEGIN(cuStreamBeginCapture_ptsz, true, (CUstream stream), (stream))
BEGIN(cuStreamBeginCapture_v2, false, (CUstream stream, CUstreamCaptureMode mode), (stream, mode))
BEGIN(cuStreamBeginCapture_v2_ptsz, true, (CUstream stream, CUstreamCaptureMode mode), (stream, mode))
BEGIN(cuStreamBeginCaptureToGraph, false, TO_GRAPH, (stream, graph, dependencies, dependency_data, count, mode))
BEGIN(cuStreamBeginCaptureToGraph_ptsz, true, TO_GRAPH, (stream, graph, dependencies, dependency_data, count, mode))

/* An end that fails because the capture was invalidated, or because streams were not joined, has ended it all the same;
 * one that was refused (another thread's capture, a stream that does not capture, a bad handle) has ended nothing. */
static bool has_ended(CUresult r)
{
    return r == CUDA_SUCCESS || (r >= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED && r <= CUDA_ERROR_CAPTURED_EVENT);
}

static CUresult end(CUresult (*real)(CUstream, CUgraph *), CUstream stream, CUgraph *graph, bool per_thread)
{
    CUcontext ctx = vram_life_context();
    vram_locks_check_none();
    CUresult r = real(stream, graph);
    if (has_ended(r))
        vram_capture_ended(stream, per_thread, ctx);
    return r;
}

CUresult hook_cuStreamEndCapture(uintptr_t caller, CUstream stream, CUgraph *graph)
{
    (void)caller;
    return end(vram_driver()->cuStreamEndCapture, stream, graph, false);
}

CUresult hook_cuStreamEndCapture_ptsz(uintptr_t caller, CUstream stream, CUgraph *graph)
{
    (void)caller;
    return end(vram_driver()->cuStreamEndCapture_ptsz, stream, graph, true);
}

static CUresult destroy(CUresult (*real)(CUstream), CUstream stream)
{
    vram_locks_check_none();
    CUresult r = real(stream);
    if (r == CUDA_SUCCESS && vram_capture_active())
        vram_capture_ended(stream, false, vram_life_context());
    return r;
}

CUresult hook_cuStreamDestroy(uintptr_t caller, CUstream stream)
{
    (void)caller;
    return destroy(vram_driver()->cuStreamDestroy, stream);
}

CUresult hook_cuStreamDestroy_v2(uintptr_t caller, CUstream stream)
{
    (void)caller;
    return destroy(vram_driver()->cuStreamDestroy_v2, stream);
}

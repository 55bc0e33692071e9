/* Copies and fills, synchronous and not. */
#include "context.h"
#include "entry.h"
#include "memory.h"
#include "stream.h"
#include "work.h"

enum side { SIDE_DEVICE, SIDE_HOST, SIDE_ANY };

/*
 * Whether [address, address + size) may be used, and whether the judge watches it. Device memory has to be allocated;
 * host memory is watched when it is ours, and else the program's own affair.
 */
static CUresult check_side(enum side side, uint64_t address, size_t size, bool *judged)
{
    struct sim_block *b = sim_memory_find(address);
    *judged = b != NULL;
    if (b)
        return sim_memory_covers(address, address + size) || side != SIDE_DEVICE ? CUDA_SUCCESS
                                                                                 : CUDA_ERROR_INVALID_VALUE;
    if (side == SIDE_DEVICE || sim_memory_is_device(address) || !address)
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

static size_t span(size_t pitch, size_t bytes, size_t rows)
{
    return pitch * (rows - 1) + bytes;
}

/* Submits, and for a synchronous call waits for it. */
static CUresult submit(struct sim_op *op, enum side dst, enum side src, CUstream handle, bool wait)
{
    CUstream s = sim_stream_resolve(handle);
    if (!s)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!op->bytes || !op->rows)
        return CUDA_SUCCESS;
    CUresult r = check_side(dst, op->dst, span(op->dst_pitch, op->bytes, op->rows), &op->dst_judged);
    if (!r && op->kind == OP_COPY)
        r = check_side(src, op->src, span(op->src_pitch, op->bytes, op->rows), &op->src_judged);
    if (!r)
        r = sim_work_enqueue(s, op);
    if (r || !wait)
        return r;
    CUcontext ctx = s->ctx;
    sim_work_wait(&s->base);
    return ctx->error;
}

static CUresult copy(const char *what, uint64_t dst, enum side dst_side, uint64_t src, enum side src_side, size_t bytes,
                     CUstream stream, bool wait)
{
    struct sim_op op = {.kind = OP_COPY,
                        .what = what,
                        .dst = dst,
                        .src = src,
                        .bytes = bytes,
                        .rows = 1,
                        .dst_pitch = bytes,
                        .src_pitch = bytes};
    return submit(&op, dst_side, src_side, stream, wait);
}

static uint64_t host(const void *p)
{
    return (uint64_t)(uintptr_t)p;
}

CUresult do_cuMemcpyHtoD_v2(CUdeviceptr dst, const void *src, size_t bytes)
{
    return copy("cuMemcpyHtoD", dst, SIDE_DEVICE, host(src), SIDE_HOST, bytes, NULL, true);
}

CUresult do_cuMemcpyDtoH_v2(void *dst, CUdeviceptr src, size_t bytes)
{
    return copy("cuMemcpyDtoH", host(dst), SIDE_HOST, src, SIDE_DEVICE, bytes, NULL, true);
}

/* Between device addresses a copy orders the device, not the host, although its name has no Async. */
CUresult do_cuMemcpyDtoD_v2(CUdeviceptr dst, CUdeviceptr src, size_t bytes)
{
    return copy("cuMemcpyDtoD", dst, SIDE_DEVICE, src, SIDE_DEVICE, bytes, NULL, false);
}

CUresult do_cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t bytes)
{
    bool device = sim_memory_is_device(dst) && sim_memory_is_device(src);
    return copy("cuMemcpy", dst, SIDE_ANY, src, SIDE_ANY, bytes, NULL, !device);
}

CUresult do_cuMemcpyPeer(CUdeviceptr dst, CUcontext dst_ctx, CUdeviceptr src, CUcontext src_ctx, size_t bytes)
{
    CUresult r = sim_context_use(dst_ctx, "cuMemcpyPeer");
    if (!r)
        r = sim_context_use(src_ctx, "cuMemcpyPeer");
    return r ? r : copy("cuMemcpyPeer", dst, SIDE_DEVICE, src, SIDE_DEVICE, bytes, NULL, false);
}

CUresult do_cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void *src, size_t bytes, CUstream stream)
{
    return copy("cuMemcpyHtoDAsync", dst, SIDE_DEVICE, host(src), SIDE_HOST, bytes, stream, false);
}

CUresult do_cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t bytes, CUstream stream)
{
    return copy("cuMemcpyDtoHAsync", host(dst), SIDE_HOST, src, SIDE_DEVICE, bytes, stream, false);
}

CUresult do_cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream)
{
    return copy("cuMemcpyDtoDAsync", dst, SIDE_DEVICE, src, SIDE_DEVICE, bytes, stream, false);
}

CUresult do_cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream)
{
    return copy("cuMemcpyAsync", dst, SIDE_ANY, src, SIDE_ANY, bytes, stream, false);
}

CUresult do_cuMemcpyPeerAsync(CUdeviceptr dst, CUcontext dst_ctx, CUdeviceptr src, CUcontext src_ctx, size_t bytes,
                              CUstream stream)
{
    CUresult r = sim_context_use(dst_ctx, "cuMemcpyPeerAsync");
    if (!r)
        r = sim_context_use(src_ctx, "cuMemcpyPeerAsync");
    return r ? r : copy("cuMemcpyPeerAsync", dst, SIDE_DEVICE, src, SIDE_DEVICE, bytes, stream, false);
}

static CUresult copy_2d(const CUDA_MEMCPY2D *c, CUstream stream, bool may_wait)
{
    if (!c)
        return CUDA_ERROR_INVALID_VALUE;
    if (c->srcMemoryType == CU_MEMORYTYPE_ARRAY || c->dstMemoryType == CU_MEMORYTYPE_ARRAY)
        return CUDA_ERROR_NOT_SUPPORTED;
    static const enum side sides[5] = {SIDE_ANY, SIDE_HOST, SIDE_DEVICE, SIDE_ANY, SIDE_ANY};
    if (c->srcMemoryType < 1 || c->srcMemoryType > 4 || c->dstMemoryType < 1 || c->dstMemoryType > 4)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t src = c->srcMemoryType == CU_MEMORYTYPE_HOST ? host(c->srcHost) : c->srcDevice;
    uint64_t dst = c->dstMemoryType == CU_MEMORYTYPE_HOST ? host(c->dstHost) : c->dstDevice;
    struct sim_op op = {.kind = OP_COPY,
                        .what = "cuMemcpy2D",
                        .bytes = c->WidthInBytes,
                        .rows = c->Height,
                        .dst_pitch = c->dstPitch ? c->dstPitch : c->WidthInBytes,
                        .src_pitch = c->srcPitch ? c->srcPitch : c->WidthInBytes};
    if (op.dst_pitch < c->dstXInBytes + c->WidthInBytes || op.src_pitch < c->srcXInBytes + c->WidthInBytes)
        return CUDA_ERROR_INVALID_VALUE;
    op.dst = dst + c->dstY * op.dst_pitch + c->dstXInBytes;
    op.src = src + c->srcY * op.src_pitch + c->srcXInBytes;
    bool device = sim_memory_is_device(op.dst) && sim_memory_is_device(op.src);
    return submit(&op, sides[c->dstMemoryType], sides[c->srcMemoryType], stream, may_wait && !device);
}

CUresult do_cuMemcpy2D_v2(const CUDA_MEMCPY2D *c)
{
    return copy_2d(c, NULL, true);
}

CUresult do_cuMemcpy2DUnaligned_v2(const CUDA_MEMCPY2D *c)
{
    return copy_2d(c, NULL, true);
}

CUresult do_cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *c, CUstream stream)
{
    return copy_2d(c, stream, false);
}

/* Fills return before they are done, whatever they are called. */
static CUresult fill(uint64_t dst, size_t pitch, uint32_t value, unsigned int width, size_t count, size_t rows,
                     CUstream stream)
{
    size_t bytes;
    if (dst % width || __builtin_mul_overflow(count, (size_t)width, &bytes))
        return CUDA_ERROR_INVALID_VALUE;
    if (rows > 1 && pitch < bytes)
        return CUDA_ERROR_INVALID_VALUE;
    struct sim_op op = {.kind = OP_FILL,
                        .what = "cuMemset",
                        .dst = dst,
                        .bytes = bytes,
                        .rows = rows,
                        .dst_pitch = rows > 1 ? pitch : bytes,
                        .value = value,
                        .width = width};
    return submit(&op, SIDE_DEVICE, SIDE_DEVICE, stream, false);
}

CUresult do_cuMemsetD8_v2(CUdeviceptr dst, unsigned char value, size_t count)
{
    return fill(dst, 0, value, 1, count, 1, NULL);
}

CUresult do_cuMemsetD16_v2(CUdeviceptr dst, unsigned short value, size_t count)
{
    return fill(dst, 0, value, 2, count, 1, NULL);
}

CUresult do_cuMemsetD32_v2(CUdeviceptr dst, unsigned int value, size_t count)
{
    return fill(dst, 0, value, 4, count, 1, NULL);
}

CUresult do_cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t count, CUstream stream)
{
    return fill(dst, 0, value, 1, count, 1, stream);
}

CUresult do_cuMemsetD16Async(CUdeviceptr dst, unsigned short value, size_t count, CUstream stream)
{
    return fill(dst, 0, value, 2, count, 1, stream);
}

CUresult do_cuMemsetD32Async(CUdeviceptr dst, unsigned int value, size_t count, CUstream stream)
{
    return fill(dst, 0, value, 4, count, 1, stream);
}

CUresult do_cuMemsetD2D8_v2(CUdeviceptr dst, size_t pitch, unsigned char value, size_t width, size_t height)
{
    return fill(dst, pitch, value, 1, width, height, NULL);
}

CUresult do_cuMemsetD2D8Async(CUdeviceptr dst, size_t pitch, unsigned char value, size_t width, size_t height,
                              CUstream stream)
{
    return fill(dst, pitch, value, 1, width, height, stream);
}

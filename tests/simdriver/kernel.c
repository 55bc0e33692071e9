/* Modules, functions and launches. Any image is taken; functions of known name do something, all others nothing. */
#include "context.h"
#include "entry.h"
#include "stream.h"
#include "work.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum kernel { KERNEL_OTHER, KERNEL_SPIN, KERNEL_FILL, KERNEL_COPY, KERNEL_CHECK, KERNEL_FAULT };

/* The kernels of tests/programs/kernels.ptx, with their parameters: q is 64 bits, d is 32. */
static const struct {
    const char *name, *params;
} kernels[] = {
    [KERNEL_OTHER] = {"", ""},
    [KERNEL_SPIN] = {"vram_spin", "q"},
    [KERNEL_FILL] = {"vram_fill", "qqdq"},
    [KERNEL_COPY] = {"vram_copy", "qqqq"},
    [KERNEL_CHECK] = {"vram_check", "qqdq"},
    [KERNEL_FAULT] = {"vram_fault", ""},
};

struct CUfunc_st {
    CUmodule module;
    enum kernel kernel;
    char *name;
    CUfunction next;
};

struct CUmod_st {
    CUcontext ctx;
    CUfunction functions;
};

static CUresult load(CUmodule *module)
{
    CUmodule m = sim_xcalloc(sizeof *m);
    m->ctx = sim_context_current();
    sim_handle_add(m, HANDLE_MODULE);
    *module = m;
    return CUDA_SUCCESS;
}

CUresult do_cuModuleLoadData(CUmodule *module, const void *image)
{
    return module && image ? load(module) : CUDA_ERROR_INVALID_VALUE;
}

CUresult do_cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count, void *options, void **values)
{
    (void)count, (void)options, (void)values;
    return do_cuModuleLoadData(module, image);
}

CUresult do_cuModuleLoadFatBinary(CUmodule *module, const void *image)
{
    return do_cuModuleLoadData(module, image);
}

CUresult do_cuModuleLoad(CUmodule *module, const char *path)
{
    if (!module || !path)
        return CUDA_ERROR_INVALID_VALUE;
    return access(path, R_OK) ? (CUresult)301 /* FILE_NOT_FOUND */ : load(module);
}

CUresult do_cuModuleUnload(CUmodule module)
{
    if (!sim_handle_is(module, HANDLE_MODULE))
        return CUDA_ERROR_INVALID_HANDLE;
    for (CUfunction f = module->functions, next; f; f = next) {
        next = f->next;
        sim_handle_remove(f);
        free(f->name);
        free(f);
    }
    sim_handle_remove(module);
    free(module);
    return CUDA_SUCCESS;
}

CUresult do_cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    if (!function || !name || !*name)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_handle_is(module, HANDLE_MODULE))
        return CUDA_ERROR_INVALID_HANDLE;
    CUfunction f = module->functions;
    while (f && strcmp(f->name, name))
        f = f->next;
    if (!f) {
        f = sim_xcalloc(sizeof *f);
        f->module = module;
        f->name = strcpy(sim_xrealloc(NULL, strlen(name) + 1), name);
        for (enum kernel k = KERNEL_SPIN; k <= KERNEL_FAULT; k++)
            if (!strcmp(name, kernels[k].name))
                f->kernel = k;
        f->next = module->functions;
        module->functions = f;
        sim_handle_add(f, HANDLE_FUNCTION);
    }
    *function = f;
    return CUDA_SUCCESS;
}

CUresult do_cuModuleGetGlobal_v2(CUdeviceptr *dptr, size_t *bytes, CUmodule module, const char *name)
{
    (void)dptr, (void)bytes, (void)name; /* what an image holds is not looked at */
    return sim_handle_is(module, HANDLE_MODULE) ? CUDA_ERROR_NOT_FOUND : CUDA_ERROR_INVALID_HANDLE;
}

CUresult do_cuModuleGetGlobal(CUdeviceptr_v1 *dptr, unsigned int *bytes, CUmodule module, const char *name)
{
    (void)dptr, (void)bytes;
    return do_cuModuleGetGlobal_v2(NULL, NULL, module, name);
}

CUresult do_cuModuleGetLoadingMode(int *mode)
{
    if (!mode)
        return CUDA_ERROR_INVALID_VALUE;
    *mode = 2; /* lazy, the default of CUDA 12 */
    return CUDA_SUCCESS;
}

CUresult do_cuFuncGetAttribute(int *value, int attribute, CUfunction function)
{
    static const int values[] = {1024, 0, 0, 0, 16, 70, 90, 0, 49152, -1};
    if (!value || attribute < 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_handle_is(function, HANDLE_FUNCTION))
        return CUDA_ERROR_INVALID_HANDLE;
    *value = (size_t)attribute < sizeof values / sizeof *values ? values[attribute] : 0;
    return CUDA_SUCCESS;
}

CUresult do_cuFuncSetAttribute(CUfunction function, int attribute, int value)
{
    (void)attribute, (void)value;
    return sim_handle_is(function, HANDLE_FUNCTION) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult do_cuFuncSetCacheConfig(CUfunction function, int config)
{
    return do_cuFuncSetAttribute(function, 0, config);
}

CUresult do_cuFuncGetModule(CUmodule *module, CUfunction function)
{
    if (!sim_handle_is(function, HANDLE_FUNCTION) || !module)
        return CUDA_ERROR_INVALID_HANDLE;
    *module = function->module;
    return CUDA_SUCCESS;
}

/* The values of the parameters, given one by one or packed in a buffer (extra). */
static bool read_params(const char *types, void **params, void **extra, uint64_t value[4])
{
    const char *buffer = NULL;
    size_t size = 0, offset = 0;
    for (; !params && extra && *extra; extra += 2) {
        if (extra[0] == (void *)1)
            buffer = extra[1];
        else if (extra[0] == (void *)2)
            size = *(size_t *)extra[1];
    }
    if (*types && !params && !buffer)
        return false;
    for (size_t i = 0; types[i]; i++) {
        size_t width = types[i] == 'q' ? 8 : 4;
        offset = (offset + width - 1) / width * width;
        if (!params && offset + width > size)
            return false;
        value[i] = 0;
        memcpy(&value[i], params ? params[i] : buffer + offset, width);
        offset += width;
    }
    return true;
}

CUresult do_cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                           unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes,
                           CUstream handle, void **params, void **extra)
{
    (void)shared_bytes;
    uint64_t v[4] = {0};
    CUstream s = sim_stream_resolve(handle);
    if (!s || !sim_handle_is(function, HANDLE_FUNCTION))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!grid_x || !grid_y || !grid_z || !block_x || !block_y || !block_z ||
        (uint64_t)block_x * block_y * block_z > 1024)
        return CUDA_ERROR_INVALID_VALUE;
    enum kernel k = function->kernel;
    if (!read_params(kernels[k].params, params, extra, v))
        return CUDA_ERROR_INVALID_VALUE;
    struct sim_op op = {.what = kernels[k].name, .rows = 1, .width = 1, .dst_judged = true, .src_judged = true};
    switch (k) {
    case KERNEL_OTHER:
        op = (struct sim_op){.kind = OP_MARK, .what = "kernel"};
        break;
    case KERNEL_SPIN:
        op.kind = OP_SPIN;
        op.ns = v[0];
        break;
    case KERNEL_FILL:
        op.kind = OP_FILL;
        op.dst = v[0];
        op.bytes = op.dst_pitch = v[1];
        op.value = (uint32_t)v[2];
        op.ns = v[3];
        break;
    case KERNEL_COPY:
        op.kind = OP_COPY;
        op.dst = v[0];
        op.src = v[1];
        op.bytes = op.dst_pitch = op.src_pitch = v[2];
        op.ns = v[3];
        break;
    case KERNEL_CHECK:
        op.kind = OP_CHECK;
        op.src = v[0];
        op.bytes = v[1];
        op.value = (uint32_t)v[2];
        op.dst = v[3];
        break;
    case KERNEL_FAULT:
        op.kind = OP_FAULT;
        break;
    }
    return sim_work_enqueue(s, &op);
}

CUresult do_cuLaunchCooperativeKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                                      unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                                      unsigned int block_z, unsigned int shared_bytes, CUstream stream, void **params)
{
    return do_cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, params,
                             NULL);
}

CUresult do_cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction function, int block_size,
                                                                 size_t shared_bytes, unsigned int flags)
{
    (void)shared_bytes, (void)flags;
    if (!blocks || block_size <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_handle_is(function, HANDLE_FUNCTION))
        return CUDA_ERROR_INVALID_HANDLE;
    *blocks = block_size > 1024 ? 0 : 2048 / block_size > 32 ? 32 : 2048 / block_size;
    return CUDA_SUCCESS;
}

CUresult do_cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int block_size,
                                                        size_t shared_bytes)
{
    return do_cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, block_size, shared_bytes, 0);
}

CUresult do_cuOccupancyMaxPotentialBlockSizeWithFlags(int *grid, int *block, CUfunction function,
                                                      CUoccupancyB2DSize shared, size_t shared_bytes, int limit,
                                                      unsigned int flags)
{
    (void)shared, (void)shared_bytes, (void)flags;
    if (!grid || !block)
        return CUDA_ERROR_INVALID_VALUE;
    if (!sim_handle_is(function, HANDLE_FUNCTION))
        return CUDA_ERROR_INVALID_HANDLE;
    *block = limit > 0 && limit < 1024 ? limit : 1024;
    *grid = 132 * (2048 / *block);
    return CUDA_SUCCESS;
}

CUresult do_cuOccupancyMaxPotentialBlockSize(int *grid, int *block, CUfunction function, CUoccupancyB2DSize shared,
                                             size_t shared_bytes, int limit)
{
    return do_cuOccupancyMaxPotentialBlockSizeWithFlags(grid, block, function, shared, shared_bytes, limit, 0);
}

/* The linker takes anything and gives back an image that says nothing. */
struct CUlinkState_st {
    char image[16];
};

CUresult do_cuLinkCreate_v2(unsigned int count, void *options, void **values, CUlinkState *state)
{
    (void)count, (void)options, (void)values;
    if (!state)
        return CUDA_ERROR_INVALID_VALUE;
    *state = sim_xcalloc(sizeof **state);
    strcpy((*state)->image, "simulated");
    sim_handle_add(*state, HANDLE_LINK);
    return CUDA_SUCCESS;
}

CUresult do_cuLinkAddData_v2(CUlinkState state, int type, void *data, size_t size, const char *name, unsigned int count,
                             void *options, void **values)
{
    (void)type, (void)data, (void)size, (void)name, (void)count, (void)options, (void)values;
    return sim_handle_is(state, HANDLE_LINK) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult do_cuLinkAddFile_v2(CUlinkState state, int type, const char *path, unsigned int count, void *options,
                             void **values)
{
    (void)type, (void)path, (void)count, (void)options, (void)values;
    return sim_handle_is(state, HANDLE_LINK) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult do_cuLinkComplete(CUlinkState state, void **cubin, size_t *size)
{
    if (!sim_handle_is(state, HANDLE_LINK) || !cubin)
        return CUDA_ERROR_INVALID_HANDLE;
    *cubin = state->image;
    if (size)
        *size = sizeof state->image;
    return CUDA_SUCCESS;
}

CUresult do_cuLinkDestroy(CUlinkState state)
{
    if (!sim_handle_is(state, HANDLE_LINK))
        return CUDA_ERROR_INVALID_HANDLE;
    sim_handle_remove(state);
    free(state);
    return CUDA_SUCCESS;
}

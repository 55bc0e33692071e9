/* Initialisation, what a device says of itself, and the texts of errors. */
#include "entry.h"
#include "sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void at_exit(void)
{
    sim_lock();
    sim.exited = true;
    sim_unlock();
}

CUresult do_cuInit(unsigned int flags)
{
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (sim.initialised)
        return CUDA_SUCCESS;
    if (!sim.config.devices)
        return CUDA_ERROR_NO_DEVICE;
    /* The real driver looks itself up while it initialises, through whatever stands in front of dlsym. */
    sim_unlock();
    int found = sim_entry_self_lookup();
    sim_lock();
    if (!sim.initialised) {
        sim.self_lookup = found;
        sim.initialised = true;
        atexit(at_exit);
    }
    return CUDA_SUCCESS;
}

CUresult do_cuDriverGetVersion(int *version)
{
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    *version = sim.config.version;
    return CUDA_SUCCESS;
}

static CUresult check(const void *out, CUdevice dev)
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    return dev < 0 || dev >= sim.config.devices ? CUDA_ERROR_INVALID_DEVICE : CUDA_SUCCESS;
}

CUresult do_cuDeviceGetCount(int *count)
{
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    *count = sim.config.devices;
    return CUDA_SUCCESS;
}

CUresult do_cuDeviceGet(CUdevice *device, int ordinal)
{
    CUresult r = check(device, ordinal);
    if (!r)
        *device = ordinal;
    return r;
}

CUresult do_cuDeviceGetName(char *name, int len, CUdevice dev)
{
    CUresult r = check(name, dev);
    if (!r && len <= 0)
        r = CUDA_ERROR_INVALID_VALUE;
    if (!r)
        snprintf(name, (size_t)len, "Simulated GPU");
    return r;
}

CUresult do_cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice dev)
{
    CUresult r = check(uuid, dev);
    if (r)
        return r;
    memcpy(uuid->bytes, "vramshim-simGPU", sizeof uuid->bytes);
    uuid->bytes[15] = (char)dev;
    return CUDA_SUCCESS;
}

CUresult do_cuDeviceGetUuid(CUuuid *uuid, CUdevice dev)
{
    return do_cuDeviceGetUuid_v2(uuid, dev);
}

CUresult do_cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev)
{
    CUresult r = check(bytes, dev);
    if (!r)
        *bytes = sim.config.capacity;
    return r;
}

CUresult do_cuDeviceTotalMem(unsigned int *bytes, CUdevice dev)
{
    CUresult r = check(bytes, dev);
    if (!r)
        *bytes = sim.config.capacity > UINT32_MAX ? UINT32_MAX : (unsigned int)sim.config.capacity;
    return r;
}

/* Those of an H200, as far as programs ask; everything else is 0. */
static const struct {
    CUdevice_attribute attribute;
    int value;
} attributes[] = {
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 2147483647},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152},
    {CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, 65536},
    {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
    {CU_DEVICE_ATTRIBUTE_MAX_PITCH, 2147483647},
    {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
    {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1980000},
    {CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT, 512},
    {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132},
    {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
    {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
    {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 3201000},
    {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 6144},
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048},
    {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 3},
    {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 233472},
    {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 65536},
    {CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1},
    {CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, 1},
    {CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 1},
    {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, 1},
};

CUresult do_cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice dev)
{
    CUresult r = check(value, dev);
    if (!r && ((int)attribute < 1 || (int)attribute > 200))
        r = CUDA_ERROR_INVALID_VALUE;
    if (r)
        return r;
    *value = attribute == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID ? dev + 1 : 0;
    for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++)
        if (attributes[i].attribute == attribute)
            *value = attributes[i].value;
    return CUDA_SUCCESS;
}

CUresult do_cuDeviceComputeCapability(int *major, int *minor, CUdevice dev)
{
    CUresult r = check(major && minor ? major : NULL, dev);
    if (!r) {
        *major = 9;
        *minor = 0;
    }
    return r;
}

CUresult do_cuDeviceGetPCIBusId(char *id, int len, CUdevice dev)
{
    CUresult r = check(id, dev);
    if (!r && len < 13)
        r = CUDA_ERROR_INVALID_VALUE;
    if (!r)
        snprintf(id, (size_t)len, "0000:%02X:00.0", (unsigned int)(dev + 1) & 0xff);
    return r;
}

CUresult do_cuDeviceCanAccessPeer(int *can, CUdevice dev, CUdevice peer)
{
    CUresult r = check(can, dev);
    if (!r)
        r = check(can, peer);
    if (!r)
        *can = dev != peer;
    return r;
}

CUresult do_cuProfilerStart(void)
{
    return CUDA_SUCCESS;
}

CUresult do_cuProfilerStop(void)
{
    return CUDA_SUCCESS;
}

static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_DEINITIALIZED, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
     "peer access is already enabled"},
    {CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "peer access has not been enabled"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CUDA_ERROR_CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
};

static CUresult describe(CUresult error, const char **out, bool name)
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    *out = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == error)
            *out = name ? errors[i].name : errors[i].text;
    return *out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult do_cuGetErrorName(CUresult error, const char **name)
{
    return describe(error, name, true);
}

CUresult do_cuGetErrorString(CUresult error, const char **text)
{
    return describe(error, text, false);
}

__attribute__((visibility("default"))) int sim_self_lookup_ok(void)
{
    sim_lock();
    int ok = sim.self_lookup;
    sim_unlock();
    return ok;
}

/*
 * A driver for the unit tests of heap/, control/ and observe/: the entries that the shim calls. Each counts its calls,
 * refuses when told to, and lets the test act in the middle of a call. Two devices, a few contexts, memory in pages as
 * measured (ledger/block.h), and work that is done when the test says so.
 */
#ifndef VRAM_TESTS_FAKE_DRIVER_H
#define VRAM_TESTS_FAKE_DRIVER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "config/options.h"
#include "vramshim/cuda_abi.h"

#define FAKE_ENTRIES(X)                                                                                                \
    X(cuMemAlloc_v2, (CUdeviceptr * dptr, size_t size), (dptr, size))                                                  \
    X(cuMemAllocPitch_v2, (CUdeviceptr * dptr, size_t *pitch, size_t width, size_t height, unsigned element),          \
      (dptr, pitch, width, height, element))                                                                           \
    X(cuMemFree_v2, (CUdeviceptr dptr), (dptr))                                                                        \
    X(cuMemFreeAsync, (CUdeviceptr dptr, CUstream stream), (dptr, stream))                                             \
    X(cuMemGetInfo_v2, (size_t *free, size_t *total), (free, total))                                                   \
    X(cuMemGetAddressRange_v2, (CUdeviceptr * base, size_t *size, CUdeviceptr dptr), (base, size, dptr))               \
    X(cuPointerGetAttribute, (void *data, CUpointer_attribute attribute, CUdeviceptr ptr), (data, attribute, ptr))     \
    X(cuCtxGetCurrent, (CUcontext * ctx), (ctx))                                                                       \
    X(cuCtxSetCurrent, (CUcontext ctx), (ctx))                                                                         \
    X(cuCtxPushCurrent_v2, (CUcontext ctx), (ctx))                                                                     \
    X(cuCtxPopCurrent_v2, (CUcontext * ctx), (ctx))                                                                    \
    X(cuCtxGetDevice, (CUdevice * device), (device))                                                                   \
    X(cuCtxGetStreamPriorityRange, (int *least, int *greatest), (least, greatest))                                     \
    X(cuCtxSynchronize, (void), ())                                                                                    \
    X(cuDevicePrimaryCtxGetState, (CUdevice device, unsigned *flags, int *active), (device, flags, active))            \
    X(cuCtxRecordEvent, (CUcontext ctx, CUevent event), (ctx, event))                                                  \
    X(cuCtxWaitEvent, (CUcontext ctx, CUevent event), (ctx, event))                                                    \
    X(cuEventCreate, (CUevent * event, unsigned flags), (event, flags))                                                \
    X(cuEventQuery, (CUevent event), (event))                                                                          \
    X(cuEventSynchronize, (CUevent event), (event))                                                                    \
    X(cuDeviceGetDefaultMemPool, (CUmemoryPool * pool, CUdevice device), (pool, device))                               \
    X(cuMemPoolGetAttribute, (CUmemoryPool pool, CUmemPool_attribute attribute, void *value), (pool, attribute, value)) \
    X(cuMemPoolTrimTo, (CUmemoryPool pool, size_t keep), (pool, keep))                                                 \
    X(cuDeviceGetGraphMemAttribute, (CUdevice device, CUgraphMem_attribute attribute, void *value),                    \
      (device, attribute, value))                                                                                      \
    X(cuDeviceGraphMemTrim, (CUdevice device), (device))                                                               \
    X(cuMemHostAlloc, (void **pp, size_t size, unsigned flags), (pp, size, flags))                                     \
    X(cuMemFreeHost, (void *p), (p))

struct fake_entry {
    atomic_uint calls;
    CUresult refuse; /* what it answers instead of doing anything; CUDA_SUCCESS: it does it */
    unsigned times;  /* refuses so often; 0: until told otherwise */
    void (*_Atomic before)(void); /* called once, in the next call, before what it does */
    void (*_Atomic after)(void);  /* and after */
};

struct fake {
#define FAKE_FIELD(name, parameters, arguments) struct fake_entry name;
    FAKE_ENTRIES(FAKE_FIELD)
#undef FAKE_FIELD
    uint64_t pages[2]; /* what each device has */
    uint64_t others[2]; /* pages that other programs, contexts and the like take */
    size_t row;        /* rows of pitched memory are rounded up to it */
};
extern struct fake fake;

struct CUctx_st {
    int device;
    CUresult failed;     /* a kernel has: every call in it answers so */
    uint64_t work;       /* submitted so far */
    uint64_t done;       /* of it, complete */
    uint64_t behind;     /* work that all later work waits for (cuCtxWaitEvent) */
    unsigned waited_for; /* synchronisations */
};
/* A stream-ordered pool; each device has a default one, and one for graphs. In pages, so that they count in cuMemGetInfo. */
struct CUmemPoolHandle_st {
    uint64_t reserved, used;
};
extern struct CUmemPoolHandle_st fake_pools[2], fake_graphs[2], fake_own_pool; /* the last: of device 0 */

extern struct CUctx_st fake_a, fake_b, fake_other; /* two contexts of device 0, one of device 1 */

/* Fills the driver's table, reads the options (without a bound on what is held, unless the test wants one), makes the process ours and fake_a current. */
#define FAKE_START(...) fake_start((char *const *)(const char *const[]){"VRAMSHIM_SLACK=unlimited", ##__VA_ARGS__, NULL})
void fake_start(char *const *environ_strings);
void fake_only_a(void); /* let fake_a be known to be the one context of the process: until then, there may be others */

void fake_use(CUcontext ctx); /* makes it the thread's current one; NULL: none */
CUcontext fake_current(void);
void fake_end(CUcontext ctx); /* its memory is freed; the handle is as good as new */

uint64_t fake_blocks(void);
uint64_t fake_size_of(CUdeviceptr addr); /* 0: the driver has given no such address */

#endif

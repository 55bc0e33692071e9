/*
 * A tool as profilers are: the driver loads it by CUDA_INJECTION64_PATH, and CUPTI tells it of each call of the driver
 * and of each kernel. Writes one line of JSON into CUPTI_COUNTS_FILE when the program exits. CUPTI is found at run time
 * (CUPTI_COUNTS_LIBRARY), so that building needs no toolkit; the few declarations are those of cupti_callbacks.h and
 * cupti_activity.h.
 */
#include <dlfcn.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    DOMAIN_DRIVER_API = 1,
    SITE_ENTER = 0,
    KIND_KERNEL = 3,
    KIND_CONCURRENT_KERNEL = 10,
    FLUSH_FORCED = 1,
    BUFFER = 1 << 20
};

struct callback_data { /* the begin of CUpti_CallbackData */
    int site;
    const char *function;
};

typedef void callback_fn(void *user, int domain, uint32_t id, const void *data);
typedef void request_fn(uint8_t **buffer, size_t *size, size_t *max_records);
typedef void complete_fn(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid);

static struct {
    int (*cuptiSubscribe)(void **, callback_fn *, void *);
    int (*cuptiEnableDomain)(uint32_t, void *, int);
    int (*cuptiActivityRegisterCallbacks)(request_fn *, complete_fn *);
    int (*cuptiActivityEnable)(int);
    int (*cuptiActivityFlushAll)(uint32_t);
    int (*cuptiActivityGetNextRecord)(uint8_t *, size_t, void **);
} cupti;

static atomic_ulong calls, launches, allocations, kernels;
static FILE *file;

static void on_call(void *user, int domain, uint32_t id, const void *p)
{
    const struct callback_data *data = p;
    (void)user, (void)id;
    if (domain != DOMAIN_DRIVER_API || data->site != SITE_ENTER || !data->function)
        return;
    atomic_fetch_add(&calls, 1);
    if (strncmp(data->function, "cuLaunchKernel", 14) == 0)
        atomic_fetch_add(&launches, 1);
    if (strncmp(data->function, "cuMemAlloc_v2", 13) == 0)
        atomic_fetch_add(&allocations, 1);
}

static void on_request(uint8_t **buffer, size_t *size, size_t *max_records)
{
    *buffer = aligned_alloc(8, BUFFER);
    *size = *buffer ? BUFFER : 0;
    *max_records = 0;
}

static void on_complete(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid)
{
    void *record = NULL;
    (void)context, (void)stream, (void)size;
    while (valid && cupti.cuptiActivityGetNextRecord(buffer, valid, &record) == 0) {
        int kind = *(const int *)record;
        if (kind == KIND_KERNEL || kind == KIND_CONCURRENT_KERNEL)
            atomic_fetch_add(&kernels, 1);
    }
    free(buffer);
}

static void finish(void)
{
    cupti.cuptiActivityFlushAll(FLUSH_FORCED);
    fprintf(file, "{\"calls\": %lu, \"launches\": %lu, \"allocations\": %lu, \"kernels\": %lu}\n", calls, launches,
            allocations, kernels);
    fclose(file);
}

__attribute__((format(printf, 1, 2))) static int give_up(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vfprintf(file, format, args);
    va_end(args);
    fclose(file);
    return 1;
}

__attribute__((visibility("default"))) int InitializeInjection(void);
int InitializeInjection(void)
{
    const char *name = getenv("CUPTI_COUNTS_LIBRARY"), *path = getenv("CUPTI_COUNTS_FILE");
    void *subscriber, *library = dlopen(name ? name : "libcupti.so", RTLD_NOW);
    int r;
    if (!(file = fopen(path ? path : "/dev/null", "w")))
        return 1;
    if (!library)
        return give_up("%s\n", dlerror());
#define X(entry)                                                                                                       \
    if (!(cupti.entry = (__typeof__(cupti.entry))dlsym(library, #entry)))                                              \
        return give_up("%s\n", dlerror());
    X(cuptiSubscribe)
    X(cuptiEnableDomain)
    X(cuptiActivityRegisterCallbacks)
    X(cuptiActivityEnable)
    X(cuptiActivityFlushAll)
    X(cuptiActivityGetNextRecord)
#undef X
    if ((r = cupti.cuptiSubscribe(&subscriber, on_call, NULL)) != 0 ||
        (r = cupti.cuptiEnableDomain(1, subscriber, DOMAIN_DRIVER_API)) != 0 ||
        (r = cupti.cuptiActivityRegisterCallbacks(on_request, on_complete)) != 0 ||
        (r = cupti.cuptiActivityEnable(KIND_CONCURRENT_KERNEL)) != 0)
        return give_up("CUPTI: error %d\n", r);
    atexit(finish);
    return 1;
}

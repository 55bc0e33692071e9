/*
 * Makes the calls of a trace again, in its order and on one thread, against whatever it runs on: the driver, the driver's
 * stream-ordered pool, or the shim where that is preloaded, of which it knows nothing. The trace is CSV in the format of RMM's
 * logging adaptor, as VRAMSHIM_TRACE writes it.
 *
 *   replay FILE.csv|- [--api alloc|async] [--speed as-fast|recorded] [--kernel US]
 *
 * --api async: cuMemAllocAsync and cuMemFreeAsync on the legacy stream. --speed recorded: no call before its time in the trace.
 * --kernel: after each allocation a kernel of so many microseconds, so that a free has something to wait for.
 *
 * Prints one line of JSON. operations: calls made; skipped: frees of what the trace never allocated; implied: frees that it does
 * not have, of addresses that it allocates anew (their context had ended), or of all at a second header (another process);
 * failed: allocations; refused: frees. seconds: in the calls, one by one. peak_live_bytes: what was asked for and not freed.
 * peak_held_bytes: what the device had in use beyond the beginning, as seen behind any shim: the simulated driver says it after
 * each allocation, NVML every 10 ms, then with whatever others use; else null. driver_calls: those that reached the simulated
 * driver, of them driver_allocs and driver_frees; else null.
 */
#include <dlfcn.h>
#include <getopt.h>
#include <search.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "vramshim/cuda_abi.h"

struct operation {
    double at; /* seconds after the first */
    unsigned block; /* the how many-th allocation of the trace it is of */
    bool free;
};

struct block {
    unsigned long long address, size; /* in the trace; the key is the address */
    unsigned number;
    bool live;
    CUdeviceptr here; /* 0: it failed */
};

static struct {
    struct operation *operations;
    struct block **blocks;
    unsigned count, block_count, skipped, implied;
    void *by_address; /* live ones */
} trace;

static void give_up(const char *what, const char *why) __attribute__((noreturn));
static void give_up(const char *what, const char *why)
{
    fprintf(stderr, "replay: %s: %s\n", what, why);
    exit(2);
}

/* Room for one more: doubled at each power of two. */
static void *grown(void *p, unsigned count, size_t size)
{
    if (count & (count - 1))
        return p;
    p = realloc(p, (count ? 2 * (size_t)count : 1) * size);
    if (!p)
        give_up("the trace", "no memory");
    return p;
}

static void add(double at, unsigned block, bool free)
{
    trace.operations = grown(trace.operations, trace.count, sizeof(*trace.operations));
    trace.operations[trace.count++] = (struct operation){at, block, free};
}

static int by_address(const void *a, const void *b)
{
    const struct block *x = a, *y = b;
    return x->address < y->address ? -1 : x->address > y->address;
}

static struct block *find(unsigned long long address)
{
    const struct block key = {.address = address};
    struct block *const *found = tfind(&key, &trace.by_address, by_address);
    return found ? *found : NULL;
}

static void add_free(double at, struct block *b)
{
    add(at, b->number, true);
    b->live = false;
    tdelete(b, &trace.by_address, by_address);
}

static void add_allocation(double at, unsigned long long address, unsigned long long size)
{
    struct block *old = find(address), *b = calloc(1, sizeof(*b));
    if (old) {
        add_free(at, old);
        trace.implied++;
    }
    trace.blocks = grown(trace.blocks, trace.block_count, sizeof(*trace.blocks));
    if (b)
        *b = (struct block){address, size, trace.block_count, true, 0};
    if (!b || !tsearch(b, &trace.by_address, by_address))
        give_up("the trace", "no memory");
    trace.blocks[trace.block_count++] = b;
    add(at, b->number, false);
}

static void end_all(double at)
{
    for (unsigned i = 0; i < trace.block_count; i++) {
        if (!trace.blocks[i]->live)
            continue;
        add_free(at, trace.blocks[i]);
        trace.implied++;
    }
}

static void read_trace(const char *path)
{
    FILE *f = strcmp(path, "-") == 0 ? stdin : fopen(path, "r");
    char *line = NULL, place[64];
    size_t cap = 0;
    double last = 0, shift = 0; /* of the time of day, to that since the first line */
    bool any = false;
    if (!f) {
        perror(path);
        exit(2);
    }
    for (unsigned n = 1; getline(&line, &cap, f) > 0; n++) {
        unsigned hours, minutes;
        double seconds;
        char action[24];
        unsigned long long address, size;
        if (strncmp(line, "Thread,", 7) == 0) {
            end_all(last);
            continue;
        }
        snprintf(place, sizeof(place), "line %u", n);
        if (sscanf(line, "%*[^,],%u:%u:%lf,%23[^,],%llx,%llu", &hours, &minutes, &seconds, action, &address, &size) != 6)
            give_up(place, "not of RMM's format");
        seconds += hours * 3600.0 + minutes * 60.0;
        if (!any || seconds + shift < last) /* the begin, midnight, or another process */
            shift = last - seconds;
        any = true;
        last = seconds + shift;
        if (strcmp(action, "allocate") == 0) {
            add_allocation(last, address, size);
        } else if (strcmp(action, "free") == 0) {
            struct block *b = find(address);
            if (b)
                add_free(last, b);
            else
                trace.skipped++;
        } else if (strcmp(action, "allocate failure") != 0) {
            give_up(place, "neither an allocation nor a free");
        }
    }
    free(line);
    fclose(f);
}

/* vram_spin(ns): takes that long. The simulated driver knows it by name. */
static const char ptx[] =
    ".version 7.0\n.target sm_50\n.address_size 64\n"
    ".visible .entry vram_spin(.param .u64 ns)\n"
    "{\n"
    "    .reg .u64 %start, %now, %ns;\n"
    "    .reg .pred %p;\n"
    "    ld.param.u64 %ns, [ns];\n"
    "    mov.u64 %start, %globaltimer;\n"
    "wait:\n"
    "    mov.u64 %now, %globaltimer;\n"
    "    sub.u64 %now, %now, %start;\n"
    "    setp.lt.u64 %p, %now, %ns;\n"
    "    @%p bra wait;\n"
    "    ret;\n"
    "}\n";

#define ENTRIES(X)                                                                                                     \
    X(cuInit) X(cuDeviceGet) X(cuDevicePrimaryCtxRetain) X(cuCtxSetCurrent) X(cuCtxSynchronize) X(cuMemAlloc_v2)       \
    X(cuMemFree_v2) X(cuMemAllocAsync) X(cuMemFreeAsync) X(cuModuleLoadData) X(cuModuleGetFunction) X(cuLaunchKernel)

static void *library;
static struct {
#define X(name) __typeof__(&name) name;
    ENTRIES(X)
#undef X
} cu;

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        CUresult result_ = (call);                                                                                     \
        if (result_ != CUDA_SUCCESS) {                                                                                 \
            fprintf(stderr, "replay: %s: error %d\n", #call, result_);                                                 \
            exit(2);                                                                                                   \
        }                                                                                                              \
    } while (0)

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* Who can see behind a shim what the device has in use: the simulated driver (tests/simdriver/sim.h), or NVML. */
static struct {
    uint64_t (*sim_used)(int device);
    unsigned long (*sim_calls)(const char *entry);
    unsigned long (*sim_calls_total)(void);
    int (*nvml_memory)(void *device, unsigned long long *ret_total_free_used);
    void *nvml_device;
    uint64_t at_first, most;
    double last;
} seen;

static void find_nvml(CUdevice device)
{
    CUresult (*bus_id)(char *, int, CUdevice) = (__typeof__(bus_id))dlsym(library, "cuDeviceGetPCIBusId");
    void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    int (*init)(void) = nvml ? (__typeof__(init))dlsym(nvml, "nvmlInit_v2") : NULL;
    int (*by_bus)(const char *, void **) =
        nvml ? (__typeof__(by_bus))dlsym(nvml, "nvmlDeviceGetHandleByPciBusId_v2") : NULL;
    char bus[32];
    if (bus_id && init && by_bus && bus_id(bus, sizeof(bus), device) == CUDA_SUCCESS && init() == 0 &&
        by_bus(bus, &seen.nvml_device) == 0)
        seen.nvml_memory = (__typeof__(seen.nvml_memory))dlsym(nvml, "nvmlDeviceGetMemoryInfo");
}

static uint64_t used(void)
{
    unsigned long long memory[3] = {0}; /* total, free, used */
    if (seen.sim_used)
        return seen.sim_used(0);
    return seen.nvml_memory && seen.nvml_memory(seen.nvml_device, memory) == 0 ? memory[2] : 0;
}

static void look(CUdevice device)
{
    seen.sim_used = (__typeof__(seen.sim_used))dlsym(library, "sim_used");
    seen.sim_calls = (__typeof__(seen.sim_calls))dlsym(library, "sim_calls");
    seen.sim_calls_total = (__typeof__(seen.sim_calls_total))dlsym(library, "sim_calls_total");
    if (!seen.sim_used)
        find_nvml(device);
    seen.at_first = seen.most = used();
}

static void look_again(bool whatever_the_time)
{
    if (!seen.sim_used && (!seen.nvml_memory || (!whatever_the_time && now() < seen.last + 0.01)))
        return;
    uint64_t n = used();
    seen.most = n > seen.most ? n : seen.most;
    seen.last = now();
}

static unsigned long calls_of(const char *entry) { return seen.sim_calls ? seen.sim_calls(entry) : 0; }
static unsigned long driver_allocs(void) { return calls_of("cuMemAlloc_v2") + calls_of("cuMemAllocAsync"); }
static unsigned long driver_frees(void) { return calls_of("cuMemFree_v2") + calls_of("cuMemFreeAsync"); }

static void wait_until(double t)
{
    struct timespec until = {(time_t)t, (long)((t - (double)(time_t)t) * 1e9)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) != 0)
        ;
}

static void print_known(const char *name, bool known, unsigned long long n)
{
    if (known)
        printf(", \"%s\": %llu", name, n);
    else
        printf(", \"%s\": null", name);
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"api", required_argument, NULL, 'a'},
        {"speed", required_argument, NULL, 's'},
        {"kernel", required_argument, NULL, 'k'},
        {NULL, 0, NULL, 0},
    };
    bool async = false, recorded = false, bad = false;
    unsigned long long kernel_ns = 0;
    int option;
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (option) {
        case 'a':
            async = strcmp(optarg, "async") == 0;
            bad |= !async && strcmp(optarg, "alloc") != 0;
            break;
        case 's':
            recorded = strcmp(optarg, "recorded") == 0;
            bad |= !recorded && strcmp(optarg, "as-fast") != 0;
            break;
        case 'k': kernel_ns = (unsigned long long)(atof(optarg) * 1000); break;
        default: bad = true;
        }
    }
    if (bad || optind + 1 != argc) {
        fprintf(stderr, "usage: replay FILE.csv|- [--api alloc|async] [--speed as-fast|recorded] [--kernel US]\n");
        return 2;
    }
    read_trace(argv[optind]);

    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library)
        give_up("the driver", dlerror());
#define X(name)                                                                                                        \
    if (!(cu.name = (__typeof__(&name))dlsym(library, #name)))                                                         \
        give_up(#name, "the driver has none");
    ENTRIES(X)
#undef X
    CUdevice device;
    CUcontext context;
    CUmodule module;
    CUfunction spin = NULL;
    CHECK(cu.cuInit(0));
    CHECK(cu.cuDeviceGet(&device, 0));
    CHECK(cu.cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cu.cuCtxSetCurrent(context));
    if (kernel_ns) {
        CHECK(cu.cuModuleLoadData(&module, ptx));
        CHECK(cu.cuModuleGetFunction(&spin, module, "vram_spin"));
    }
    look(device);

    unsigned operations = 0, failed = 0, refused = 0;
    uint64_t live = 0, peak_live = 0;
    unsigned long calls = seen.sim_calls_total ? seen.sim_calls_total() : 0, allocs = driver_allocs(), frees = driver_frees();
    double start = now(), spent = 0;
    for (unsigned i = 0; i < trace.count; i++) {
        const struct operation *o = &trace.operations[i];
        struct block *b = trace.blocks[o->block];
        if (o->free && !b->here)
            continue;
        if (recorded)
            wait_until(start + o->at);
        operations++;
        double before = now();
        CUresult r;
        if (o->free)
            r = async ? cu.cuMemFreeAsync(b->here, NULL) : cu.cuMemFree_v2(b->here);
        else
            r = async ? cu.cuMemAllocAsync(&b->here, b->size, NULL) : cu.cuMemAlloc_v2(&b->here, b->size);
        spent += now() - before;
        if (o->free) {
            refused += r != CUDA_SUCCESS;
            live -= b->size;
            continue;
        }
        if (r != CUDA_SUCCESS) {
            b->here = 0;
            failed++;
            continue;
        }
        live += b->size;
        peak_live = live > peak_live ? live : peak_live;
        look_again(false);
        if (spin) {
            void *arguments[] = {&kernel_ns};
            CHECK(cu.cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, NULL, arguments, NULL));
        }
    }
    look_again(true);
    double wall = now() - start;
    unsigned long calls_after = seen.sim_calls_total ? seen.sim_calls_total() : 0;
    CHECK(cu.cuCtxSynchronize());

    printf("{\"operations\": %u, \"skipped\": %u, \"implied\": %u, \"failed\": %u, \"refused\": %u, \"seconds\": %.6f, "
           "\"wall_seconds\": %.6f, \"peak_live_bytes\": %llu",
           operations, trace.skipped, trace.implied, failed, refused, spent, wall, (unsigned long long)peak_live);
    print_known("peak_held_bytes", seen.sim_used || seen.nvml_memory, seen.most - seen.at_first);
    print_known("driver_calls", seen.sim_calls_total, calls_after - calls);
    print_known("driver_allocs", seen.sim_calls, driver_allocs() - allocs);
    print_known("driver_frees", seen.sim_calls, driver_frees() - frees);
    printf("}\n");
    return 0;
}

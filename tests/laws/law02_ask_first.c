/*
 * Law 2: the driver is asked first, its answer kept, and only the address of an entry that is hooked is replaced.
 * HAMi-core 36 and 57 (cuGetProcAddress gave the wrong version, or NULL), 326.
 */
#include <dlfcn.h>
#include <string.h>

#include "law.h"
#include "next.h"
#include "sim.h"
#include "world.h"

enum { MIB = 1 << 20 };

typedef __typeof__(&cuGetProcAddress) get1;
typedef __typeof__(&cuGetProcAddress_v2) get2;
typedef CUresult (*alloc32_fn)(CUdeviceptr_v1 *dptr, unsigned bytes);
typedef CUresult (*free32_fn)(CUdeviceptr_v1 dptr);
typedef CUresult (*info32_fn)(unsigned *free, unsigned *total);

static void *handle(void)
{
    void *h = dlopen("libcuda.so.1", RTLD_NOW);
    CHECK(h);
    return h;
}

/* Hooked or not, with versions and without, and names that nobody has. */
static const char *const symbols[] = {
    "cuMemAlloc",
    "cuMemAllocPitch",
    "cuMemFree",
    "cuMemGetInfo",
    "cuMemGetAddressRange",
    "cuPointerGetAttribute",
    "cuPointerGetAttributes",
    "cuPointerSetAttribute",
    "cuIpcGetMemHandle",
    "cuIpcOpenMemHandle",
    "cuMemGetHandleForAddressRange",
    "cuMulticastBindAddr",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease",
    "cuDevicePrimaryCtxReset",
    "cuCtxCreate",
    "cuCtxDestroy",
    "cuCtxDetach",
    "cuCtxFromGreenCtx",
    "cuCtxEnablePeerAccess",
    "cuStreamBeginCapture",
    "cuStreamBeginCaptureToGraph",
    "cuStreamEndCapture",
    "cuStreamDestroy",
    "cuStreamCreate",
    "cuGetProcAddress",
    "cuInit",
    "cuLaunchKernel",
    "cuMemcpyHtoD",
    "cuMemAllocAsync",
    "cuMemFreeAsync",
    "cuMemAllocManaged",
    "cuMemCreate",
    "cuEventRecord",
    "cuGraphInstantiate",
    /* a suffix is the driver's business, not the caller's: measured as not found */
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuGetProcAddress_v2",
    "cuStreamBeginCapture_ptsz",
    "cuStreamBeginCapture_v2_ptsz",
    "cuMemAlloc_v3",
    "cuMemAlloc_v2_ptsz",
    "cuMem",
    "cu",
    "",
    "malloc",
    "dlsym",
    "cuNoSuchEntry",
};
static const int versions[] = {0,     1000,  2000,  3000,  3010,  3020,  4000,  7000,  10000,
                               10010, 11000, 11030, 12000, 12030, 12050, 13000, 99000, -1};

/* What a program can tell of an answer; two entries of one name are told apart by their position among the versions. */
LAW_CHILD(print_the_answers)
{
    get1 old = (get1)dlsym(handle(), "cuGetProcAddress");
    get2 new = (get2)dlsym(handle(), "cuGetProcAddress_v2");
    CHECK(old && new);
    for (size_t s = 0; s < sizeof(symbols) / sizeof(*symbols); s++) {
        for (uint64_t flags = 0; flags < 4; flags++) {
            void *last = NULL;
            unsigned different = 0;
            fprintf(stderr, "%s/%d:", symbols[s], (int)flags);
            for (size_t v = 0; v < sizeof(versions) / sizeof(*versions); v++) {
                CUdriverProcAddressQueryResult status = (CUdriverProcAddressQueryResult)77;
                void *p = (void *)0x5a5a, *q = (void *)0x5a5a, *r = (void *)0x5a5a;
                CUresult a = new (symbols[s], &p, versions[v], flags, &status);
                CUresult b = new (symbols[s], &q, versions[v], flags, NULL);
                CUresult c = old(symbols[s], &r, versions[v], flags);
                different += p != last;
                last = p;
                fprintf(stderr, " %d,%d,%d %d %d%d%d%d %u", a, b, c, (int)status, p == NULL, p == (void *)0x5a5a,
                        p == q, p == r, different);
            }
            fprintf(stderr, "\n");
        }
    }
    CUdriverProcAddressQueryResult status = (CUdriverProcAddressQueryResult)77;
    void *p = (void *)0x5a5a;
    if (simulated()) /* the real driver faults on a NULL name (measured) */
        fprintf(stderr, "bad calls: %d %d %d %d %p %d\n", new (NULL, &p, 12000, 0, &status),
            new ("cuMemAlloc", NULL, 12000, 0, &status), old(NULL, &p, 12000, 0), old("cuMemAlloc", NULL, 12000, 0), p,
            (int)status);
    for (size_t s = 0; s < sizeof(symbols) / sizeof(*symbols); s++) {
        dlerror();
        p = dlsym(handle(), symbols[s]);
        const char *error = dlerror();
        fprintf(stderr, "dlsym %s: %d %s\n", symbols[s], p != NULL, error ? error : "no error");
    }
}

static void same_answers(const char *const *env_native, const char *const *env)
{
    enum { CAP = 1 << 18 };
    static char native[CAP], here[CAP];
    CHECK_EQ(law_run_child("print_the_answers", env_native, native, CAP), 0);
    CHECK_EQ(law_run_child("print_the_answers", env, here, CAP), 0);
    CHECK(strlen(native) > 1000 && strlen(native) + 1 < CAP);
    for (char *a = native, *b = here; *a || *b;) {
        size_t n = strcspn(a, "\n"), m = strcspn(b, "\n");
        if (n != m || memcmp(a, b, n) != 0)
            law_fail(__FILE__, __LINE__, "natively\n%.*s\nbut here\n%.*s", (int)n, a, (int)m, b);
        a += n + (a[n] == '\n');
        b += m + (b[m] == '\n');
    }
}

/* Result, status, NULL or not, for each name, version and flag; on an older driver, too, and on one that lacks entries.
 */
LAW_CASE_ONCE(every_answer_is_the_drivers)
{
    same_answers(ENV("LD_PRELOAD="), ENV("LAW=2"));
}

LAW_CASE_SIM_ONCE(every_answer_of_an_older_driver)
{
    same_answers(ENV("LD_PRELOAD=", "SIMCUDA_VERSION=11040"), ENV("SIMCUDA_VERSION=11040"));
}

#define HIDDEN                                                                                                         \
    "SIMCUDA_HIDE=cuMemGetHandleForAddressRange,cuStreamBeginCaptureToGraph,cuMemFree_v2,cuPointerSetAttribute"
LAW_CASE_SIM_ONCE(every_answer_of_a_driver_that_lacks_entries)
{
    same_answers(ENV("LD_PRELOAD=", HIDDEN), ENV(HIDDEN));
}

/* An entry that is not hooked comes back as the driver's own; one that is, exactly when its own address is the answer.
 */
LAW_CASE_ONCE(only_known_addresses_are_replaced)
{
    get2 get = (get2)dlsym(handle(), "cuGetProcAddress_v2");
    CUdriverProcAddressQueryResult status;
    void *p;
    static const struct {
        const char *symbol, *exported;
        int version;
        bool replaced;
    } answers[] = {
        {"cuMemAlloc", "cuMemAlloc", 3000, false},
        {"cuMemAlloc", "cuMemAlloc_v2", 3020, true},
        {"cuMemFree", "cuMemFree", 3010, false},
        {"cuMemFree", "cuMemFree_v2", 12000, true},
        {"cuMemGetInfo", "cuMemGetInfo", 2000, false},
        {"cuMemGetInfo", "cuMemGetInfo_v2", 12000, true},
        {"cuMemAllocAsync", "cuMemAllocAsync", 12000, true},
        {"cuMemCreate", "cuMemCreate", 12000, true},
        {"cuMemPoolSetAttribute", "cuMemPoolSetAttribute", 12000, false},
        {"cuLaunchKernel", "cuLaunchKernel", 12000, false},
        {"cuStreamCreate", "cuStreamCreate", 12000, false},
        {"cuInit", "cuInit", 12000, false},
    };
    for (size_t i = 0; i < sizeof(answers) / sizeof(*answers); i++) {
        printf("    %s at %d\n", answers[i].symbol, answers[i].version);
        void *real = second_next(answers[i].exported);
        OK(get(answers[i].symbol, &p, answers[i].version, 0, &status));
        CHECK(p && real);
        CHECK_EQ(p == real, !under_shim() || !answers[i].replaced);
        CHECK_EQ((uintptr_t)dlsym(handle(), answers[i].exported), (uintptr_t)p);
    }
}

/* The entries of CUDA 3.0 write 32 bits and take 32 bits: a 64-bit hook behind them would write over what follows, and
 * read what nobody passed. */
LAW_CASE_SIM_ONCE(the_32_bit_entries_pass_untouched)
{
    get2 get = (get2)dlsym(handle(), "cuGetProcAddress_v2");
    CUdriverProcAddressQueryResult status;
    struct {
        CUdeviceptr_v1 ptr;
        unsigned guard;
    } a = {0, 0x5a5a5a5a}, b = {0, 0x5a5a5a5a};
    unsigned free_bytes[2] = {1, 0x5a5a5a5a}, total[2] = {1, 0x5a5a5a5a};
    alloc32_fn alloc;
    free32_fn release;
    info32_fn info;
    law_context();
    OK(get("cuMemAlloc", (void **)&alloc, 3000, 0, &status));
    OK(get("cuMemFree", (void **)&release, 3000, 0, &status));
    OK(get("cuMemGetInfo", (void **)&info, 3000, 0, &status));
    CHECK_EQ((uintptr_t)alloc, (uintptr_t)dlsym(handle(), "cuMemAlloc"));
    for (int i = 0; i < 3; i++) {
        OK(alloc(&a.ptr, 4 * MIB));
        OK(alloc(&b.ptr, 4 * MIB));
        CHECK(a.ptr && b.ptr && a.ptr != b.ptr);
        CHECK_EQ(a.guard, 0x5a5a5a5a);
        CHECK_EQ(b.guard, 0x5a5a5a5a);
        OK(release(a.ptr));
        OK(cu.cuMemFree_v2(b.ptr)); /* allowed: an address is an address */
        CHECK(!SIM(sim_is_allocated)(a.ptr) && !SIM(sim_is_allocated)(b.ptr));
        CHECK_EQ(release(a.ptr), CUDA_ERROR_INVALID_VALUE);
    }
    OK(info(free_bytes, total));
    CHECK_EQ(free_bytes[1], 0x5a5a5a5a);
    CHECK_EQ(total[1], 0x5a5a5a5a);
    CHECK_EQ(driver_calls("cuMemAlloc"), 6);
    CHECK_EQ(driver_calls("cuMemFree"), 6);
}

/* Another library has no such entry, whatever its name. */
LAW_CASE_ONCE(a_handle_that_is_not_the_drivers)
{
    static const char *const names[] = {"cuMemAlloc_v2", "cuMemFree_v2", "cuGetProcAddress", "cuStreamEndCapture_ptsz"};
    void *libc = dlopen("libc.so.6", RTLD_NOW | RTLD_NOLOAD);
    CHECK(libc);
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        CHECK(dlsym(libc, names[i]) == NULL);
        const char *error = dlerror();
        CHECK(error && strstr(error, names[i]) && strstr(error, "libc.so.6"));
        CHECK(dlerror() == NULL);
    }
}

/* Another library that has a function of that name is asked for it, and gives its own. */
LAW_CASE_ONCE(a_name_that_is_not_the_drivers)
{
    char path[4096];
    ssize_t n = readlink("/proc/self/exe", path, sizeof(path) - 64);
    CHECK(n > 0);
    path[n] = 0;
    strcpy(strrchr(path, '/'), "/libvramlawplugin.so");
    void *plugin = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    CHECK(plugin);
    void *(*own)(void) = (void *(*)(void))dlsym(plugin, "plugin_own_info");
    CHECK(own);
    CHECK_EQ((uintptr_t)dlsym(plugin, "cuMemGetInfo_v2"), (uintptr_t)own());
    CHECK((uintptr_t)dlsym(handle(), "cuMemGetInfo_v2") != (uintptr_t)own());
}

/* When the driver fails, its result goes back and nothing is written for it. */
LAW_CASE_SIM_ONCE(a_lookup_that_fails)
{
    get1 old = (get1)dlsym(handle(), "cuGetProcAddress");
    get2 new = (get2)dlsym(handle(), "cuGetProcAddress_v2");
    CUdriverProcAddressQueryResult status = (CUdriverProcAddressQueryResult)77;
    void *real = second_next("cuMemAlloc_v2"), *p = real;
    CHECK(SIM(sim_fail)("cuGetProcAddress_v2", 1, 1, CUDA_ERROR_UNKNOWN) == 0);
    CHECK_EQ(new ("cuMemAlloc", &p, 12000, 0, &status), CUDA_ERROR_UNKNOWN);
    CHECK_EQ((uintptr_t)p, (uintptr_t)real);
    CHECK_EQ(status, 77);
    CHECK(SIM(sim_fail)("cuGetProcAddress", 1, 1, CUDA_ERROR_UNKNOWN) == 0);
    CHECK_EQ(old("cuMemAlloc", &p, 12000, 0), CUDA_ERROR_UNKNOWN);
    CHECK_EQ((uintptr_t)p, (uintptr_t)real);
}

/* The question reaches the driver once, whatever the name, and as it was asked. */
LAW_CASE_SIM_ONCE(each_question_is_asked_once)
{
    get1 old = (get1)dlsym(handle(), "cuGetProcAddress");
    get2 new = (get2)dlsym(handle(), "cuGetProcAddress_v2");
    CUdriverProcAddressQueryResult status;
    void *p;
    SIM(sim_reset_counters)();
    for (size_t s = 0; s < sizeof(symbols) / sizeof(*symbols); s++) {
        new (symbols[s], &p, 12000, 0, &status);
        old(symbols[s], &p, 12000, 0);
    }
    CHECK_EQ(driver_calls("cuGetProcAddress_v2"), sizeof(symbols) / sizeof(*symbols));
    CHECK_EQ(driver_calls("cuGetProcAddress"), sizeof(symbols) / sizeof(*symbols));
}

/*
 * Law 1: a driver entry is reached by a direct reference, by dlsym on a handle of libcuda.so.1, and by
 * cuGetProcAddress, itself reached by any of the three; all end at the same place. Shims that forgot one way saw only a
 * part of a program's memory: HAMi-core 36 and 57 (cuGetProcAddress).
 */
#include <dlfcn.h>
#include <link.h>
#include <string.h>

#include "law.h"
#include "next.h"
#include "sim.h"
#include "world.h"

enum { MIB = 1 << 20 };

typedef __typeof__(&cuGetProcAddress) get1;
typedef __typeof__(&cuGetProcAddress_v2) get2;
typedef __typeof__(&cuMemAlloc_v2) alloc_fn;
typedef __typeof__(&cuMemFree_v2) free_fn;

static void *handle(void)
{
    static void *h;
    if (!h)
        h = dlopen("libcuda.so.1", RTLD_NOW);
    CHECK(h);
    return h;
}

/* The lookup functions themselves, each found in every way. */
static get2 gets2[8];
static get1 gets1[8];
static unsigned gets;

static void find_lookups(void)
{
    CUdriverProcAddressQueryResult status;
    void *p;
    gets1[0] = &cuGetProcAddress;
    gets2[0] = &cuGetProcAddress_v2;
    gets1[1] = (get1)dlsym(handle(), "cuGetProcAddress");
    gets2[1] = (get2)dlsym(handle(), "cuGetProcAddress_v2");
    for (gets = 2; gets < 6; gets += 2) {
        OK(gets2[gets - 2]("cuGetProcAddress", &p, 11030, 0, &status));
        gets1[gets] = (get1)p;
        OK(gets2[gets - 1]("cuGetProcAddress", &p, 12000, 0, &status));
        gets2[gets] = (get2)p;
        OK(gets1[gets - 2]("cuGetProcAddress", &p, 11030, 0));
        gets1[gets + 1] = (get1)p;
        OK(gets1[gets - 1]("cuGetProcAddress", &p, 12000, 0));
        gets2[gets + 1] = (get2)p;
    }
    for (unsigned i = 1; i < gets; i++) {
        CHECK_EQ((uintptr_t)gets1[i], (uintptr_t)gets1[0]);
        CHECK_EQ((uintptr_t)gets2[i], (uintptr_t)gets2[0]);
    }
}

/* The entries that matter to whoever looks after memory, with the version that brought them; flags 2 asks for the entry
 * for per-thread default streams. */
static const struct {
    const char *exported, *symbol;
    int version;
    uint64_t flags;
} entries[] = {
    {"cuMemAlloc_v2", "cuMemAlloc", 3020, 0},
    {"cuMemAlloc_v2", "cuMemAlloc", 13000, 2},
    {"cuMemAllocPitch_v2", "cuMemAllocPitch", 3020, 0},
    {"cuMemFree_v2", "cuMemFree", 3020, 0},
    {"cuMemGetInfo_v2", "cuMemGetInfo", 3020, 0},
    {"cuMemGetAddressRange_v2", "cuMemGetAddressRange", 3020, 0},
    {"cuPointerGetAttribute", "cuPointerGetAttribute", 4000, 0},
    {"cuPointerGetAttributes", "cuPointerGetAttributes", 7000, 0},
    {"cuPointerSetAttribute", "cuPointerSetAttribute", 6000, 0},
    {"cuIpcGetMemHandle", "cuIpcGetMemHandle", 4010, 0},
    {"cuMemGetHandleForAddressRange", "cuMemGetHandleForAddressRange", 11070, 0},
    {"cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain", 7000, 0},
    {"cuDevicePrimaryCtxRelease_v2", "cuDevicePrimaryCtxRelease", 11000, 0},
    {"cuDevicePrimaryCtxReset_v2", "cuDevicePrimaryCtxReset", 11000, 0},
    {"cuCtxDestroy_v2", "cuCtxDestroy", 4000, 0},
    {"cuCtxEnablePeerAccess", "cuCtxEnablePeerAccess", 4000, 0},
    {"cuCtxDisablePeerAccess", "cuCtxDisablePeerAccess", 4000, 0},
    {"cuStreamBeginCapture", "cuStreamBeginCapture", 10000, 0},
    {"cuStreamBeginCapture_ptsz", "cuStreamBeginCapture", 10000, 2},
    {"cuStreamBeginCapture_v2", "cuStreamBeginCapture", 10010, 0},
    {"cuStreamBeginCapture_v2_ptsz", "cuStreamBeginCapture", 10010, 2},
    {"cuStreamBeginCaptureToGraph", "cuStreamBeginCaptureToGraph", 12030, 0},
    {"cuStreamBeginCaptureToGraph_ptsz", "cuStreamBeginCaptureToGraph", 12030, 2},
    {"cuStreamEndCapture", "cuStreamEndCapture", 10000, 0},
    {"cuStreamEndCapture_ptsz", "cuStreamEndCapture", 10000, 2},
    {"cuStreamDestroy_v2", "cuStreamDestroy", 4000, 0},
    {"cuGetProcAddress", "cuGetProcAddress", 11030, 0},
    {"cuGetProcAddress_v2", "cuGetProcAddress", 12000, 0},
};
enum { ENTRIES = sizeof(entries) / sizeof(*entries) };

struct object {
    uintptr_t address;
    char name[256];
};

static int contains(struct dl_phdr_info *info, size_t size, void *data)
{
    struct object *o = data;
    (void)size;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *p = &info->dlpi_phdr[i];
        if (p->p_type == PT_LOAD && o->address - (info->dlpi_addr + p->p_vaddr) < p->p_memsz) {
            snprintf(o->name, sizeof(o->name), "%s", info->dlpi_name);
            return 1;
        }
    }
    return 0;
}

static bool is_in(const void *p, const char *library)
{
    struct object o = {(uintptr_t)p, ""};
    dl_iterate_phdr(contains, &o);
    return strstr(o.name, library) != NULL;
}

/* One address whichever way it is asked for; under the shim, the shim's. RTLD_DEFAULT gives what the linker binds a
 * direct reference to. */
LAW_CASE_ONCE(one_address_for_every_way)
{
    CUdriverProcAddressQueryResult status;
    OK(cu.cuInit(0));
    find_lookups();
    for (int i = 0; i < ENTRIES; i++) {
        void *by_dlsym = dlsym(handle(), entries[i].exported), *by_get;
        void *direct = dlsym(RTLD_DEFAULT, entries[i].exported);
        printf("    %s\n", entries[i].exported);
        CHECK(by_dlsym);
        CHECK_EQ((uintptr_t)direct, (uintptr_t)by_dlsym);
        for (unsigned g = 0; g < gets; g++) {
            by_get = NULL;
            OK(gets2[g](entries[i].symbol, &by_get, entries[i].version, entries[i].flags, &status));
            CHECK_EQ((uintptr_t)by_get, (uintptr_t)by_dlsym);
            CHECK_EQ(status, CU_GET_PROC_ADDRESS_SUCCESS);
            by_get = NULL;
            OK(gets1[g](entries[i].symbol, &by_get, entries[i].version, entries[i].flags));
            CHECK_EQ((uintptr_t)by_get, (uintptr_t)by_dlsym);
        }
        if (under_shim()) {
            CHECK(is_in(by_dlsym, "libvramshim"));
            CHECK(by_dlsym != second_next(entries[i].exported)); /* the driver's own */
        }
    }
}

/* Allocated one way, freed another, handed out by a third: one block, one owner. */
LAW_CASE_SIM_ONCE(ways_can_be_mixed)
{
    alloc_fn alloc[4] = {&cuMemAlloc_v2, (alloc_fn)dlsym(handle(), "cuMemAlloc_v2")};
    free_fn release[4] = {&cuMemFree_v2, (free_fn)dlsym(handle(), "cuMemFree_v2")};
    CUdriverProcAddressQueryResult status;
    CUdeviceptr first = 0, p;
    law_context();
    find_lookups();
    OK(gets2[0]("cuMemAlloc", (void **)&alloc[2], 12000, 0, &status));
    OK(gets2[1]("cuMemFree", (void **)&release[2], 12000, 0, &status));
    OK(gets1[0]("cuMemAlloc", (void **)&alloc[3], 12000, 0));
    OK(gets1[1]("cuMemFree", (void **)&release[3], 12000, 0));
    for (int a = 0; a < 4; a++) {
        for (int f = 0; f < 4; f++) {
            OK(alloc[a](&p, 4 * MIB));
            CHECK(first == 0 || p == first);
            first = p;
            OK(release[f](p));
            CHECK_EQ(release[(f + 1) % 4](p), CUDA_ERROR_INVALID_VALUE);
        }
    }
    if (under_shim()) {
        CHECK_EQ(driver_calls("cuMemAlloc_v2"), 1);
        CHECK_EQ(driver_calls("cuMemFree_v2"), 0);
    }
}

/* Through the route of this run the shim is at work: pytorch and cudart use only the last two. */
LAW_CASE_SIM(every_way_is_served_from_the_cache)
{
    size_t pitch;
    CUdeviceptr p;
    law_context();
    for (int i = 0; i < 10; i++) {
        OK(cu.cuMemAlloc_v2(&p, 4 * MIB));
        OK(cu.cuMemFree_v2(p));
        OK(cu.cuMemAllocPitch_v2(&p, &pitch, 4096, 2048, 4));
        OK(cu.cuMemFree_v2(p));
    }
    CHECK_EQ(driver_calls("cuMemAlloc_v2"), under_shim() ? 1 : 10);
    CHECK_EQ(driver_calls("cuMemAllocPitch_v2"), under_shim() ? 1 : 10);
    CHECK_EQ(driver_calls("cuMemFree_v2"), under_shim() ? 0 : 20);
}

/* A handle of libcuda.so.1 however it was had: by its path, once more, locally, without loading, and through a library
 * that depends on it (a dlsym on a handle searches what it needs, too). */
LAW_CASE_SIM_ONCE(every_handle)
{
    struct link_map *map;
    void *handles[5];
    law_context();
    CHECK(dlinfo(handle(), RTLD_DI_LINKMAP, &map) == 0);
    handles[0] = dlopen(map->l_name, RTLD_NOW | RTLD_LOCAL);
    handles[1] = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_GLOBAL);
    handles[2] = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    handles[3] = dlopen(NULL, RTLD_NOW);
    handles[4] = dlopen("libvramlawnext2.so", RTLD_NOW | RTLD_NOLOAD);
    for (int i = 0; i < 5; i++) {
        CUdeviceptr p;
        CHECK(handles[i]);
        alloc_fn alloc = (alloc_fn)dlsym(handles[i], "cuMemAlloc_v2");
        free_fn release = (free_fn)dlsym(handles[i], "cuMemFree_v2");
        CHECK_EQ((uintptr_t)alloc, (uintptr_t)&cuMemAlloc_v2);
        CHECK_EQ((uintptr_t)release, (uintptr_t)&cuMemFree_v2);
        OK(alloc(&p, 4 * MIB));
        OK(release(p));
    }
    CHECK_EQ(driver_calls("cuMemAlloc_v2"), under_shim() ? 1 : 5);
}

/* Looked up before the driver is initialised, as every one of them does, and kept. */
LAW_CASE_SIM_ONCE(looked_up_before_cuInit)
{
    CUdriverProcAddressQueryResult status;
    alloc_fn alloc;
    free_fn release = (free_fn)dlsym(handle(), "cuMemFree_v2");
    get2 get = (get2)dlsym(handle(), "cuGetProcAddress_v2");
    CUdeviceptr p;
    OK(get("cuMemAlloc", (void **)&alloc, 12000, 0, &status));
    CHECK_EQ(alloc(&p, MIB), CUDA_ERROR_NOT_INITIALIZED);
    CHECK_EQ(release(0), CUDA_ERROR_NOT_INITIALIZED);
    law_context();
    OK(alloc(&p, 4 * MIB));
    OK(release(p));
    OK(alloc(&p, 4 * MIB));
    OK(release(p));
    CHECK_EQ(driver_calls("cuMemAlloc_v2"), under_shim() ? 2 : 3); /* one of them refused, above */
}

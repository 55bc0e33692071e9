/*
 * The scenarios of the other families of memory: part of scenario.c, which is long enough without them.
 *
 * The program keeps count of what it holds of each family, as a careful one would: `inject` compares that with the
 * report.
 */
#include <spawn.h>
#include <sys/mman.h>

/* The words of the report. */
enum family { ASYNC, VIRTUAL, ARRAY, MANAGED, HOST, REGISTERED, IPC, IMPORTED, EXTERNAL, FAMILIES };
static const struct {
    const char *words;
    bool on_device, ends; /* it takes the device's memory; it ends with its context */
} family_traits[FAMILIES] = {
    [ASYNC] = {"stream-ordered", true, false},
    [VIRTUAL] = {"virtual", true, false},
    [ARRAY] = {"array", true, true},
    [MANAGED] = {"managed", true, true},
    [HOST] = {"pinned host", false, true},
    [REGISTERED] = {"registered host", false, true},
    [IPC] = {"opened by IPC", false, true},
    [IMPORTED] = {"imported", false, false},
    [EXTERNAL] = {"of another API", false, false},
};

struct holding {
    enum family family;
    unsigned references; /* 0: a free slot */
    unsigned long long name, bytes;
    CUcontext ctx;
};
static struct holding held[BLOCKS];
static unsigned long long family_born[FAMILIES], families_ended;

static struct holding *find_held(enum family family, unsigned long long name)
{
    for (int i = 0; i < BLOCKS; i++)
        if (held[i].references && held[i].family == family && held[i].name == name)
            return &held[i];
    return NULL;
}

static void family_got(enum family family, unsigned long long name, unsigned long long bytes)
{
    struct holding *h = find_held(family, name);
    if (h) { /* opened once more */
        h->references++;
        return;
    }
    for (h = held; h->references; h++)
        ;
    *h = (struct holding){family, 1, name, bytes, current};
    family_born[family]++;
    if (family == ASYNC || family == MANAGED)
        forget_given(name, bytes);
}

static void family_gave(enum family family, unsigned long long name)
{
    struct holding *h = find_held(family, name);
    if (h)
        h->references--;
}

static void families_end(CUcontext ctx)
{
    for (int i = 0; i < BLOCKS; i++) {
        struct holding *h = &held[i];
        if (!h->references || h->ctx != ctx || !family_traits[h->family].ends)
            continue;
        families_ended += family_traits[h->family].on_device;
        h->references = 0;
    }
}

static void tell_families(void)
{
    for (int f = 0; f < FAMILIES; f++) {
        unsigned long long count = 0, bytes = 0;
        for (int i = 0; i < BLOCKS; i++) {
            count += held[i].references && held[i].family == (enum family)f;
            bytes += held[i].references && held[i].family == (enum family)f ? held[i].bytes : 0;
        }
        if (family_born[f])
            printf("# family %s: %llu bytes in %llu, in all %llu\n", family_traits[f].words, bytes, count,
                   family_born[f]);
    }
    printf("# families_ended %llu\n", families_ended);
}

/* GOT(family, name, bytes, entry, arguments): the name is read after the call, and only if it succeeded. */
#define GOT(family, name, bytes, entry, ...)                                                                           \
    ({                                                                                                                 \
        CUresult got_ = CALL(entry, __VA_ARGS__);                                                                      \
        if (got_ == CUDA_SUCCESS)                                                                                      \
            family_got(family, (unsigned long long)(name), bytes);                                                     \
        got_ == CUDA_SUCCESS;                                                                                          \
    })

/* What was refused is given up by the second attempt, as a program with patience would. */
#define GIVE(family, name, entry, ...)                                                                                 \
    for (int attempt_ = 0; attempt_ < 2; attempt_++) {                                                                 \
        if (CALL(entry, __VA_ARGS__) == CUDA_SUCCESS) {                                                                \
            family_gave(family, (unsigned long long)(name));                                                           \
            break;                                                                                                     \
        }                                                                                                              \
    }

/* Managed memory. */
static CUdeviceptr managed(size_t size)
{
    CUdeviceptr p = 0;
    return GOT(MANAGED, p, size, cuMemAllocManaged, &p, size, 1) ? p : 0;
}

static void free_managed(CUdeviceptr p)
{
    if (p)
        GIVE(MANAGED, p, cuMemFree_v2, p);
}

/* Physical memory, in place of an address reserved for four pieces of it. */
enum { PIECE = 4 * MIB };
static CUdeviceptr place;

static CUmemGenericAllocationHandle piece(size_t size)
{
    CUmemGenericAllocationHandle handle = 0;
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    return GOT(VIRTUAL, handle, size, cuMemCreate, &handle, size, &prop, 0) ? handle : 0;
}

static bool map(enum family family, CUmemGenericAllocationHandle handle, unsigned at)
{
    if (CALL(cuMemMap, place + (size_t)at * PIECE, PIECE, 0, handle, 0) != CUDA_SUCCESS)
        return false;
    struct holding *h = find_held(family, handle);
    h->references++;
    h->bytes = PIECE; /* of an import, only now is it known */
    return true;
}

/* The handles behind `count` pieces that are mapped there. */
static void unmap(enum family family, unsigned at, unsigned count, const CUmemGenericAllocationHandle *handles)
{
    for (int attempt = 0; attempt < 2; attempt++) {
        if (CALL(cuMemUnmap, place + (size_t)at * PIECE, (size_t)count * PIECE) != CUDA_SUCCESS)
            continue;
        for (unsigned i = 0; i < count; i++)
            family_gave(family, handles[i]);
        break;
    }
}

static void pieces(void)
{
    CUmemGenericAllocationHandle one = piece(PIECE), two = piece(PIECE), again = 0, import = 0;
    void *inside = (void *)(uintptr_t)(place + 100);
    CUdeviceptr own = 0;
    int fd = -1;
    if (one) {
        bool first = map(VIRTUAL, one, 0), second = map(VIRTUAL, one, 1); /* twice: two names */
        if (first && CALL(cuMemRetainAllocationHandle, &again, inside) == CUDA_SUCCESS) {
            find_held(VIRTUAL, one)->references++; /* it is the same handle (documented to be released as often) */
            saw("retained", again == one);
        }
        GIVE(VIRTUAL, one, cuMemRelease, one);
        if (first && second)
            unmap(VIRTUAL, 0, 2, (CUmemGenericAllocationHandle[]){one, one}); /* in one call */
        else if (first || second)
            unmap(VIRTUAL, second, 1, &one);
        if (again)
            GIVE(VIRTUAL, one, cuMemRelease, again);
        if (!again || first)
            CALL(cuMemRelease, (CUmemGenericAllocationHandle)0); /* none */
    }
    if (two && CALL(cuMemAddressReserve, &own, PIECE, 0, 0, 0) == CUDA_SUCCESS) {
        const CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
        if (CALL(cuMemMap, own, PIECE, 0, two, 0) == CUDA_SUCCESS) {
            find_held(VIRTUAL, two)->references++;
            CALL(cuMemSetAccess, own, PIECE, &access, 1);
            for (int attempt = 0; attempt < 2; attempt++) {
                if (CALL(cuMemUnmap, own, PIECE) != CUDA_SUCCESS)
                    continue;
                family_gave(VIRTUAL, two);
                break;
            }
        }
        for (int attempt = 0; attempt < 2; attempt++)
            if (CALL(cuMemAddressFree, own, PIECE) == CUDA_SUCCESS)
                break;
    }
    if (two) {
        CALL(cuMemExportToShareableHandle, &fd, two, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
        if (fd >= 0 &&
            GOT(IMPORTED, import, 0, cuMemImportFromShareableHandle, &import, (void *)(intptr_t)fd,
                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)) {
            bool mapped = map(IMPORTED, import, 2);
            GIVE(IMPORTED, import, cuMemRelease, import);
            if (mapped)
                unmap(IMPORTED, 2, 1, &import);
        }
        if (fd >= 0)
            close(fd);
        GIVE(VIRTUAL, two, cuMemRelease, two);
    }
    piece(2 * MIB); /* never released */
}

/* Arrays. */
static CUarray array(size_t width, size_t height)
{
    CUDA_ARRAY_DESCRIPTOR d = {.Width = width, .Height = height, .Format = CU_AD_FORMAT_FLOAT, .NumChannels = 4};
    CUarray a = NULL;
    return GOT(ARRAY, a, width * height * 16, cuArrayCreate_v2, &a, &d) ? a : NULL;
}

static void free_array(CUarray a)
{
    if (a)
        GIVE(ARRAY, a, cuArrayDestroy, a);
}

static void arrays(void)
{
    CUDA_ARRAY3D_DESCRIPTOR d = {
        .Width = 512, .Height = 512, .Depth = 8, .Format = CU_AD_FORMAT_UNSIGNED_INT8, .NumChannels = 4};
    CUarray flat = array(512, 512), deep = NULL;
    CUmipmappedArray levels = NULL;
    GOT(ARRAY, deep, 8 * MIB, cuArray3DCreate_v2, &deep, &d);
    d.Depth = 0;
    GOT(ARRAY, levels, MIB + MIB / 4 + MIB / 16, cuMipmappedArrayCreate, &levels, &d, 3);
    free_array(flat);
    free_array(deep);
    if (levels)
        GIVE(ARRAY, levels, cuMipmappedArrayDestroy, levels);
    CALL(cuArrayDestroy, NULL);
    CALL(cuArrayCreate_v2, &flat, NULL);
}

/* Host memory: pinned here, or there before and registered. */
static void host(void)
{
    static char own[2][64 * KIB];
    void *p[2] = {NULL, NULL};
    GOT(HOST, (uintptr_t)p[0], 3 * MIB, cuMemAllocHost_v2, &p[0], 3 * MIB);
    GOT(HOST, (uintptr_t)p[1], 5000, cuMemHostAlloc, &p[1], 5000, 2);
    for (int i = 0; i < 2; i++) {
        unsigned flags = 0;
        CUdeviceptr device = 0;
        if (!p[i])
            continue;
        if (CALL(cuMemHostGetFlags, &flags, p[i]) == CUDA_SUCCESS)
            saw("flags", flags);
        if (CALL(cuMemHostGetDevicePointer_v2, &device, p[i], 0) == CUDA_SUCCESS)
            saw("the same", device == (uintptr_t)p[i]);
        GIVE(HOST, (uintptr_t)p[i], cuMemFreeHost, p[i]);
    }
    CALL(cuMemFreeHost, own[0]);
    bool registered[2] = {
        GOT(REGISTERED, (uintptr_t)own[0], sizeof(own[0]), cuMemHostRegister, own[0], sizeof(own[0]), 0),
        GOT(REGISTERED, (uintptr_t)own[1], sizeof(own[1]), cuMemHostRegister_v2, own[1], sizeof(own[1]), 0)};
    for (int i = 0; i < 2; i++)
        if (registered[i])
            GIVE(REGISTERED, (uintptr_t)own[i], cuMemHostUnregister, own[i]);
    CALL(cuMemHostUnregister, own[0]);
}

/* What belongs to others. */
static CUipcMemHandle handle_of_donor;
enum { DONATED = 3 * MIB };

/* Another program's memory, for IPC: this one again, on its own and without whatever is injected here. */
static void donate(void)
{
    CUdeviceptr p;
    CUipcMemHandle handle;
    CUcontext ctx;
    MUST(cuInit(0));
    MUST(cuDevicePrimaryCtxRetain(&ctx, 0));
    MUST(cuCtxSetCurrent(ctx));
    MUST(cuMemAlloc_v2(&p, DONATED));
    MUST(cuIpcGetMemHandle(&handle, p));
    fwrite(&handle, sizeof(handle), 1, stdout);
}

static void ask_donor(void)
{
    const char *library = getenv("LD_LIBRARY_PATH");
    char path[4096], name[] = "scenario", what[] = "donor";
    char *arguments[] = {name, what, NULL}, *environment[] = {path, NULL};
    posix_spawn_file_actions_t actions;
    pid_t pid;
    int fds[2], status;
    snprintf(path, sizeof(path), "LD_LIBRARY_PATH=%s", library ? library : "");
    if (pipe(fds) != 0 || posix_spawn_file_actions_init(&actions) != 0)
        exit(3);
    posix_spawn_file_actions_adddup2(&actions, fds[1], STDOUT_FILENO);
    posix_spawn_file_actions_addclose(&actions, fds[0]);
    if (posix_spawn(&pid, "/proc/self/exe", &actions, NULL, arguments, environment) != 0)
        exit(3);
    close(fds[1]);
    bool told = read(fds[0], &handle_of_donor, sizeof(handle_of_donor)) == sizeof(handle_of_donor);
    close(fds[0]);
    while (waitpid(pid, &status, 0) < 0)
        ;
    if (!told)
        exit(3);
}

static void others(void)
{
    CUdeviceptr p[2] = {0, 0};
    CUexternalMemory external = NULL;
    GOT(IPC, p[0], DONATED, cuIpcOpenMemHandle, &p[0], handle_of_donor, 1);
    GOT(IPC, p[1], DONATED, cuIpcOpenMemHandle_v2, &p[1], handle_of_donor, 1); /* the same once more */
    for (int i = 0; i < 2; i++)
        if (p[i])
            GIVE(IPC, p[i], cuIpcCloseMemHandle, p[i]);
    CALL(cuIpcCloseMemHandle, 0);
    CUDA_EXTERNAL_MEMORY_HANDLE_DESC d = {.type = CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD, .size = 7 * MIB};
    d.handle.fd = memfd_create("external", MFD_CLOEXEC); /* the driver's once it is imported */
    if (GOT(EXTERNAL, (uintptr_t)external, d.size, cuImportExternalMemory, &external, &d))
        GIVE(EXTERNAL, (uintptr_t)external, cuDestroyExternalMemory, external);
}

static void scenario_families(void)
{
    CUdeviceptr p;
    CUcontext main_context, other;
    ask_donor();
    MUST(cuInit(0));
    main_context = primary(0);
    for (int i = 0; i < 2 && !place; i++)
        CALL(cuMemAddressReserve, &place, 4 * PIECE, 0, 0, 0);
    release_surely(alloc(3 * MIB));
    for (int round = 0; round < 2; round++) {
        p = managed(3 * MIB + 5);
        if (p)
            range(p, MIB);
        free_managed(p);
        release(p); /* twice: not known any more */
        managed(700);
        pieces();
        arrays();
        host();
        others();
        memory_info();
    }
    /* A context ends, and some of what was made in it. */
    other = create();
    CUdeviceptr in_order = 0, opened = 0;
    void *pinned = NULL;
    p = managed(2 * MIB);
    array(256, 256);
    GOT(HOST, (uintptr_t)pinned, MIB, cuMemHostAlloc, &pinned, MIB, 0);
    GOT(IPC, opened, DONATED, cuIpcOpenMemHandle_v2, &opened, handle_of_donor, 1);
    GOT(ASYNC, in_order, 6 * MIB, cuMemAllocAsync, &in_order, 6 * MIB, NULL);
    piece(2 * MIB);
    destroy(other, 0);
    set_current(main_context);
    free_managed(p);
    if (in_order)
        GIVE(ASYNC, in_order, cuMemFree_v2, in_order);
}

static void destroy_pool(CUmemoryPool pool)
{
    for (int attempt = 0; pool && attempt < 2; attempt++)
        if (CALL(cuMemPoolDestroy, pool) == CUDA_SUCCESS)
            return;
}

/* Stream-ordered memory, from the device's pool and from those of the program; a flush, with pools that keep some of
 * it. */
static void scenario_pools(void)
{
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    unsigned long long threshold = ~0ull;
    CUstream stream;
    CUmemoryPool pool[2] = {NULL, NULL}, own;
    primary(0);
    MUST(cuStreamCreate(&stream, 0));
    MUST(cuDeviceGetMemPool(&own, 0)); /* its other name is left to the shim, so that failures are its own */
    MUST(cuMemPoolSetAttribute(own, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
    release_surely(alloc(5 * MIB));
    for (int round = 0; round < 2; round++) {
        CUdeviceptr p[4] = {0, 0, 0, 0};
        if (CALL(cuMemPoolCreate, &pool[round], &props) == CUDA_SUCCESS)
            MUST(cuMemPoolSetAttribute(pool[round], CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
        GOT(ASYNC, p[0], 3 * MIB, cuMemAllocAsync, &p[0], 3 * MIB, stream);
        GOT(ASYNC, p[1], 700, cuMemAllocAsync_ptsz, &p[1], 700, NULL);
        if (pool[round]) {
            GOT(ASYNC, p[2], 4 * MIB, cuMemAllocFromPoolAsync, &p[2], 4 * MIB, pool[round], stream);
            GOT(ASYNC, p[3], 2 * MIB, cuMemAllocFromPoolAsync_ptsz, &p[3], 2 * MIB, pool[round], NULL);
        }
        if (p[0])
            GIVE(ASYNC, p[0], cuMemFreeAsync, p[0], stream);
        if (p[1] && round)
            GIVE(ASYNC, p[1], cuMemFreeAsync_ptsz, p[1], NULL);
        if (p[2])
            GIVE(ASYNC, p[2], cuMemFreeAsync, p[2], stream);
        if (p[3])
            GIVE(ASYNC, p[3], cuMemFree_v2, p[3]);
        CALL(cuMemFreeAsync, p[2], stream); /* twice */
        MUST(cuStreamSynchronize(stream));
        flush();
    }
    destroy_pool(pool[0]);
    destroy_pool(pool[1]);
    CALL(cuMemPoolDestroy, own); /* cannot be */
    flush();
}

/* 64 MiB a device, most of it in blocks that are kept: each family asks for what is only there when they go. */
static void fill_cache(void)
{
    CUdeviceptr p[5];
    for (int i = 0; i < 5; i++)
        p[i] = alloc((size_t)(8 + 2 * i) * MIB);
    for (int i = 0; i < 5; i++)
        release_surely(p[i]);
}

static void scenario_scarce(void)
{
    CUmemGenericAllocationHandle handle;
    CUdeviceptr p = 0;
    CUmemoryPool pool = NULL;
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    primary(0);
    CALL(cuMemPoolCreate, &pool, &props);
    fill_cache();
    handle = piece(40 * MIB);
    memory_info();
    piece(40 * MIB); /* there is no room */
    if (handle)
        GIVE(VIRTUAL, handle, cuMemRelease, handle);
    fill_cache();
    p = managed(40 * MIB);
    managed(100 * MIB);
    free_managed(p);
    fill_cache();
    free_array(array(2048, 1280));
    fill_cache();
    CUDA_ARRAY3D_DESCRIPTOR d = {
        .Width = 1024, .Height = 1024, .Depth = 10, .Format = CU_AD_FORMAT_UNSIGNED_INT8, .NumChannels = 4};
    CUarray deep = NULL;
    CUmipmappedArray level = NULL;
    GOT(ARRAY, deep, 40 * MIB, cuArray3DCreate_v2, &deep, &d);
    free_array(deep);
    fill_cache();
    if (GOT(ARRAY, level, 40 * MIB, cuMipmappedArrayCreate, &level, &d, 1))
        GIVE(ARRAY, level, cuMipmappedArrayDestroy, level);
    for (int way = 0; way < 2; way++) {
        p = 0;
        fill_cache();
        if (way && pool)
            GOT(ASYNC, p, 40 * MIB, cuMemAllocFromPoolAsync, &p, 40 * MIB, pool, NULL);
        if (!way)
            GOT(ASYNC, p, 40 * MIB, cuMemAllocAsync, &p, 40 * MIB, NULL);
        memory_info();
        if (p)
            GIVE(ASYNC, p, cuMemFree_v2, p);
        MUST(cuStreamSynchronize(NULL)); /* the pool lets go */
    }
    memory_info();
    destroy_pool(pool);
}

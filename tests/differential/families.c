/* Operations on the families of memory beside plain blocks. What of them a kernel can use lies in a block slot as well. */
#include "machine.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 2 << 20, BUFFER = 1 << 16 };

/* An allocation of any family begins. */
static void about_to_allocate(struct thread *t)
{
    t->world->freed = 0;
    settle_pools(t);
}

static void *as_handle(CUdeviceptr ptr) { return (void *)(uintptr_t)ptr; }

/* The next block of the family from the slot on. */
static struct block *block_of(struct thread *t, enum family family, uint64_t arg)
{
    for (unsigned i = 0; i < BLOCKS; i++) {
        struct block *b = &t->world->blocks[(arg + i) % BLOCKS];
        if (b->ptr && b->family == family)
            return b;
    }
    return NULL;
}

/* ---- managed ---- */

void op_managed(struct thread *t, const uint64_t *arg)
{
    struct block *b = slot(t, arg[0], false);
    struct context *c = here(t);
    CUdeviceptr ptr = 0;
    if (!b)
        return nothing(t);
    about_to_allocate(t);
    unsigned flags = arg[2] % 16 ? 1 + arg[2] % 2 : arg[2] % 32 ? 3 : 0;
    if (got(t, "r", cuMemAllocManaged(&ptr, arg[1], flags)) == CUDA_SUCCESS && c)
        allocated(t, b, FAMILY_MANAGED, ptr, arg[1], index_of(t, c));
}

/* What frees another family frees nothing here. */
void op_wrong(struct thread *t, const uint64_t *arg)
{
    struct block *b = slot(t, arg[0], true);
    if (!b)
        return nothing(t);
    see(t, "family", b->family);
    switch (arg[1] % 9) {
    case 0: got(t, "host", cuMemFreeHost(as_handle(b->ptr))); break;
    case 1: got(t, "unregister", cuMemHostUnregister(as_handle(b->ptr))); break;
    case 2: got(t, "close", cuIpcCloseMemHandle(b->ptr)); break;
    case 3:
        if (b->family != FAMILY_VIRTUAL)
            got(t, "unmap", cuMemUnmap(b->ptr, b->size));
        break;
    case 4: got(t, "array", cuArrayDestroy(as_handle(b->ptr))); break;
    case 5: got(t, "release", cuMemRelease(b->ptr)); break;
    case 6: got(t, "pool", cuMemPoolDestroy(as_handle(b->ptr))); break;
    case 7: got(t, "external", cuDestroyExternalMemory(as_handle(b->ptr))); break;
    default: got(t, "addresses", cuMemAddressFree(b->ptr, b->size));
    }
}

/* ---- virtual ---- */

static bool exists(const struct memory *m) { return m->held || m->mapped; }

static struct memory *memory_at(struct thread *t, uint64_t arg, bool held)
{
    for (unsigned i = 0; i < MEMORIES; i++) {
        struct memory *m = &t->world->memories[(arg + i) % MEMORIES];
        if (held ? m->held != 0 : !exists(m))
            return m;
    }
    return NULL;
}

void op_physical(struct thread *t, const uint64_t *arg)
{
    struct memory *m = memory_at(t, 0, false);
    CUmemGenericAllocationHandle handle = 0;
    unsigned how = (unsigned)arg[1];
    if (!m)
        return nothing(t);
    size_t size = (1 + arg[0] % 3) * PAGE;
    int device = how & 1 && t->world->contexts[3].exists;
    CUmemAllocationProp prop = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = how & 2 ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE,
        .location = {CU_MEM_LOCATION_TYPE_DEVICE, device},
    };
    about_to_allocate(t);
    switch (how >> 2) {
    case 0: got(t, "size", cuMemCreate(&handle, size + 1, &prop, 0)); return;
    case 1: got(t, "zero", cuMemCreate(&handle, 0, &prop, 0)); return;
    case 2: got(t, "flags", cuMemCreate(&handle, size, &prop, 1)); return;
    case 3: got(t, "nothing", cuMemCreate(&handle, size, NULL, 0)); return;
    case 4:
        prop.location.id = 77;
        got(t, "device", cuMemCreate(&handle, size, &prop, 0));
        return;
    default: break;
    }
    if (got(t, "r", cuMemCreate(&handle, size, &prop, 0)) == CUDA_SUCCESS)
        *m = (struct memory){.handle = handle, .size = size, .device = device, .counted = device, .held = 1,
                             .shareable = how & 2, .bytes = ++t->world->births};
}

void op_release(struct thread *t, const uint64_t *arg)
{
    struct memory *m = memory_at(t, arg[0], true);
    if (!m)
        return nothing(t);
    CUmemGenericAllocationHandle handle = m->handle;
    if (got(t, "r", cuMemRelease(handle)) == CUDA_SUCCESS)
        m->held--;
    if (!m->held && arg[1] & 1 && (t->program->turns || m->mapped)) /* else another thread may have been given it */
        got(t, "again", cuMemRelease(handle));
}

/* The same bytes by a second handle. */
void op_share(struct thread *t, const uint64_t *arg)
{
    struct memory *m = memory_at(t, arg[0], true), *new = memory_at(t, 0, false);
    struct context *c = here(t);
    CUmemGenericAllocationHandle handle = 0;
    const CUmemAllocationHandleType type = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    int fd = -1;
    if (arg[1] % 8 == 7) {
        got(t, "import bad", cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)-1, type));
        return;
    }
    if (!m || !new || !c)
        return nothing(t);
    got(t, "export", cuMemExportToShareableHandle(&fd, m->handle, type, 0));
    if (fd < 0)
        return;
    if (arg[1] & 1 && got(t, "import", cuMemImportFromShareableHandle(&handle, (void *)(intptr_t)fd, type)) == 0)
        *new = (struct memory){.handle = handle, .size = m->size, .device = m->device, .counted = c->device, .held = 1,
                               .imported = true, .shareable = true, .bytes = m->bytes};
    close(fd);
}

static int range_for(struct thread *t, size_t size, bool larger)
{
    struct world *w = t->world;
    int unused = -1;
    for (int i = 0; i < RANGES; i++) {
        if (w->ranges[i].ptr && !w->ranges[i].used && w->ranges[i].size >= size)
            return i;
        if (!w->ranges[i].ptr)
            unused = i;
    }
    if (unused < 0)
        return -1;
    size_t all = size + (larger ? PAGE : 0);
    if (got(t, "reserve", cuMemAddressReserve(&w->ranges[unused].ptr, all, 0, 0, 0)) != CUDA_SUCCESS) {
        w->ranges[unused].ptr = 0;
        return -1;
    }
    w->ranges[unused].size = all;
    return unused;
}

static CUresult allow(CUdeviceptr ptr, size_t size, int device, CUmemAccess_flags flags)
{
    CUmemAccessDesc desc = {{CU_MEM_LOCATION_TYPE_DEVICE, device}, flags};
    return cuMemSetAccess(ptr, size, &desc, 1);
}

/* Whose streams work on memory of the device. */
static struct context *on_device(struct thread *t, int device)
{
    struct context *c = here(t);
    for (int i = 0; (!c || c->device != device) && i < CONTEXTS; i++)
        c = &t->world->contexts[i];
    return c && c->alive && c->device == device ? c : NULL;
}

void op_map(struct thread *t, const uint64_t *arg)
{
    struct block *b = slot(t, arg[0], false);
    struct memory *m = memory_at(t, arg[1], true);
    struct context *c = m ? on_device(t, m->device) : NULL;
    unsigned how = (unsigned)arg[2];
    if (!b || !m || !c)
        return nothing(t);
    size_t size = m->size - (how % 8 == 1 && m->size > PAGE ? PAGE : 0);
    struct block *mapped = block_of(t, FAMILY_VIRTUAL, how);
    t->world->freed = 0;
    switch (how >> 3) {
    case 0: got(t, "map nowhere", cuMemMap(PAGE, size, 0, m->handle, 0)); return;
    case 1:
        if (mapped)
            got(t, "map over", cuMemMap(mapped->ptr, PAGE, 0, m->handle, 0));
        return;
    default: break;
    }
    int range = range_for(t, size, how & 2);
    if (range < 0)
        return;
    CUdeviceptr ptr = t->world->ranges[range].ptr;
    if (how >> 3 == 2)
        got(t, "map flags", cuMemMap(ptr, size, 0, m->handle, 1));
    if (how >> 3 == 3)
        got(t, "access before", allow(ptr, size, m->device, CU_MEM_ACCESS_FLAGS_PROT_READWRITE));
    if (got(t, "map", cuMemMap(ptr, size, 0, m->handle, 0)) != CUDA_SUCCESS)
        return;
    if (how >> 3 == 4 || got(t, "access", allow(ptr, size, m->device, CU_MEM_ACCESS_FLAGS_PROT_READWRITE)) != 0) {
        got(t, "unmap", cuMemUnmap(ptr, size));
        if (m->imported && m->seen < size)
            m->seen = size;
        return;
    }
    allocated(t, b, FAMILY_VIRTUAL, ptr, size, index_of(t, c));
    b->memory = (unsigned)(m - t->world->memories);
    b->range = (unsigned)range;
    t->world->ranges[range].used = true;
    m->mapped++;
    if (m->imported && m->seen < size)
        m->seen = size;
}

/* Unmapping waits for nothing. False: nor can the program. */
static bool settle(struct thread *t, struct block *b)
{
    struct context *c = b->last.context < 0 ? NULL : &t->world->contexts[b->last.context];
    if (!c || !c->alive)
        return true;
    enter(c);
    CUresult r = got(t, "sync", cuCtxSynchronize());
    leave();
    if (r == CUDA_SUCCESS)
        b->last.context = -1;
    return r == CUDA_SUCCESS;
}

void op_unmap(struct thread *t, const uint64_t *arg)
{
    struct block *b = block_of(t, FAMILY_VIRTUAL, arg[0]);
    unsigned n = (unsigned)arg[1];
    if (!b || !settle(t, b))
        return nothing(t);
    struct memory *m = &t->world->memories[b->memory];
    CUdeviceptr ptr = b->ptr;
    size_t size = b->size, all = t->world->ranges[b->range].size;
    if ((n & 3) == 1 && size > PAGE)
        got(t, "part", cuMemUnmap(ptr, PAGE));
    if ((n & 3) == 2)
        got(t, "free before", cuMemAddressFree(ptr, all));
    if ((n & 3) == 3)
        got(t, "more", cuMemUnmap(ptr, size + PAGE));
    if (n & 4)
        got(t, "access", allow(ptr, size, m->device, n & 8 ? CU_MEM_ACCESS_FLAGS_PROT_NONE
                                                          : CU_MEM_ACCESS_FLAGS_PROT_READWRITE));
    sim_note_free(ptr);
    if (got(t, "unmap", cuMemUnmap(ptr, size)) != CUDA_SUCCESS) {
        sim_note_alloc(ptr, size);
        return;
    }
    m->mapped--;
    t->world->ranges[b->range].used = false;
    b->ptr = 0;
    if (n & 16)
        got(t, "again", cuMemUnmap(ptr, size));
    if (n & 32 && got(t, "free", cuMemAddressFree(ptr, n & 64 ? all : all + PAGE)) == CUDA_SUCCESS)
        t->world->ranges[b->range].ptr = 0;
}

void op_handle(struct thread *t, const uint64_t *arg)
{
    struct block *b = block_of(t, FAMILY_VIRTUAL, arg[0]);
    CUmemGenericAllocationHandle handle = 0;
    CUmemAllocationProp prop = {0};
    if (!b) {
        got(t, "handle of nothing", cuMemRetainAllocationHandle(&handle, &handle));
        return;
    }
    struct memory *m = &t->world->memories[b->memory];
    if (got(t, "handle", cuMemRetainAllocationHandle(&handle, as_handle(b->ptr + arg[1] % 2 * (b->size / 2)))) != 0)
        return;
    see(t, "same", handle == m->handle);
    m->held++;
    got(t, "properties", cuMemGetAllocationPropertiesFromHandle(&prop, handle));
    see(t, "device", (uint64_t)prop.location.id);
}

/* ---- arrays ---- */

static size_t or_1(size_t n) { return n ? n : 1; }

static size_t array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned levels)
{
    size_t width = d->Width, height = or_1(d->Height), depth = or_1(d->Depth), sum = 0;
    if (d->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING))
        return 0;
    for (unsigned i = 0; i < levels; i++) {
        sum += width * height * depth * d->NumChannels * 4;
        if (width == 1 && height == 1 && (d->Flags || depth == 1))
            break; /* there are no more levels */
        width = or_1(width / 2);
        height = or_1(height / 2);
        depth = d->Flags ? depth : or_1(depth / 2);
    }
    size_t unit = sum < PAGE ? 512 : PAGE;
    return (sum + unit - 1) / unit * unit;
}

static CUresult array_destroy(const struct array *a)
{
    return a->mipmapped ? cuMipmappedArrayDestroy(a->handle) : cuArrayDestroy(a->handle);
}

static void array_end(struct thread *t, struct array *a, unsigned how)
{
    if (how % 8 == 1)
        got(t, "other", a->mipmapped ? cuArrayDestroy(a->handle) : cuMipmappedArrayDestroy(a->handle));
    if (got(t, "destroy", array_destroy(a)) != CUDA_SUCCESS)
        return;
    if (how % 8 == 2 && t->program->turns)
        got(t, "again", array_destroy(a));
    a->handle = NULL;
}

void op_array(struct thread *t, const uint64_t *arg)
{
    static const unsigned flags[] = {0, 0, 0, CUDA_ARRAY3D_LAYERED, CUDA_ARRAY3D_SPARSE, CUDA_ARRAY3D_DEFERRED_MAPPING};
    static const unsigned many[] = {1, 2, 3, 40, 0xffffffff};
    struct array *a = &t->world->arrays[arg[0] % ARRAYS], new = {0};
    struct context *c = here(t);
    unsigned how = (unsigned)arg[2], levels = 1;
    bool large = t->program->exact || t->program->pools || t->program->about;
    CUresult r;
    if (a->handle)
        return array_end(t, a, how);
    CUDA_ARRAY3D_DESCRIPTOR d = {.Width = 1 + arg[1], .Height = how & 1 ? 0 : 1 + how, .Format = CU_AD_FORMAT_FLOAT,
                                 .NumChannels = 1u << how / 2 % 3, .Flags = flags[arg[1] % 6]};
    if (large) { /* of 2 MiB and more */
        d.Width = 1024 + arg[1];
        d.Height = 512 + how;
    }
    if (d.Flags == CUDA_ARRAY3D_LAYERED)
        d.Depth = 3;
    if (how % 32 == 1)
        d.NumChannels = 3;
    if (how % 32 == 3)
        d.Width = 0;
    if (how % 32 == 5)
        d.Format = 99;
    CUDA_ARRAY_DESCRIPTOR flat = {d.Width, d.Height, d.Format, d.NumChannels};
    about_to_allocate(t);
    new.mipmapped = how % 3 == 2;
    if (how % 64 == 7) {
        got(t, "nothing", cuArray3DCreate_v2((CUarray *)&new.handle, NULL));
        got(t, "nowhere", cuArrayCreate_v2(NULL, &flat));
        return;
    }
    if (new.mipmapped) {
        levels = many[how / 3 % 5];
        r = cuMipmappedArrayCreate((CUmipmappedArray *)&new.handle, &d, levels);
    } else if (how % 3) {
        r = cuArray3DCreate_v2((CUarray *)&new.handle, &d);
    } else {
        d = (CUDA_ARRAY3D_DESCRIPTOR){.Width = d.Width, .Height = d.Height, .Format = d.Format,
                                      .NumChannels = d.NumChannels};
        r = cuArrayCreate_v2((CUarray *)&new.handle, &flat);
    }
    if (got(t, "r", r) != CUDA_SUCCESS || !c)
        return;
    new.context = index_of(t, c);
    new.bytes = array_bytes(&d, levels);
    *a = new;
}

/* ---- host ---- */

static CUresult pin_free(const struct pin *p)
{
    return p->registered ? cuMemHostUnregister(p->ptr) : cuMemFreeHost(p->ptr);
}

static void pin_use(struct thread *t, struct pin *p, unsigned how)
{
    unsigned flags = 0xbeef;
    CUdeviceptr at = 0;
    switch (how % 8) {
    case 0:
        got(t, "flags", cuMemHostGetFlags(&flags, p->ptr));
        see(t, "value", flags);
        return;
    case 1:
        got(t, "pointer", cuMemHostGetDevicePointer_v2(&at, p->ptr, 0));
        see(t, "same", at == (uintptr_t)p->ptr);
        return;
    case 2: got(t, "register", cuMemHostRegister_v2(p->ptr, p->size, 0)); return;
    case 3:
        got(t, "plain free", cuMemFree_v2((uintptr_t)p->ptr));
        got(t, "inside", p->registered ? cuMemHostUnregister((char *)p->ptr + 1) : cuMemFreeHost((char *)p->ptr + 1));
        got(t, "other", p->registered ? cuMemFreeHost(p->ptr) : cuMemHostUnregister(p->ptr));
        return;
    default: break;
    }
    if (got(t, "free", pin_free(p)) != CUDA_SUCCESS)
        return;
    if (how % 8 == 4 && t->program->turns) { /* else another thread may have been given it */
        got(t, "again", pin_free(p));
        got(t, "flags", cuMemHostGetFlags(&flags, p->ptr));
    }
    p->ptr = NULL;
}

void op_pin(struct thread *t, const uint64_t *arg)
{
    struct pin *p = &t->world->pins[arg[0] % PINS];
    struct context *c = here(t);
    unsigned how = (unsigned)(arg[0] / PINS);
    size_t size = arg[1];
    void *ptr = NULL;
    CUresult r;
    if (p->ptr)
        return pin_use(t, p, how);
    t->world->freed = 0;
    bool registered = how % 4 == 3;
    if (how == 60)
        return (void)got(t, "zero", cuMemHostAlloc(&ptr, 0, 0));
    if (registered) {
        if (!p->buffer && !(p->buffer = aligned_alloc(4096, BUFFER)))
            abort();
        size = 1 + size % BUFFER;
        ptr = p->buffer;
        r = how & 4 ? cuMemHostRegister(ptr, size, how / 8) : cuMemHostRegister_v2(ptr, size, how / 8);
    } else if (how % 4) {
        r = cuMemHostAlloc(&ptr, size, how / 4 % 9);
    } else {
        r = cuMemAllocHost_v2(&ptr, size);
    }
    if (got(t, "r", r) != CUDA_SUCCESS || !c)
        return;
    p->ptr = ptr;
    p->size = size;
    p->context = index_of(t, c);
    p->registered = registered;
}

/* ---- pools ---- */

void settle_pools(struct thread *t)
{
    if (!t->program->pools || !t->world->dying)
        return;
    t->world->dying = false;
    for (int i = 0; i < CONTEXTS; i++) {
        if (!t->world->contexts[i].alive)
            continue;
        enter(&t->world->contexts[i]);
        got(t, "settle", cuCtxSynchronize());
        leave();
    }
}

static uint64_t attribute(CUmemoryPool pool, CUmemPool_attribute attribute)
{
    uint64_t value = 0;
    cuMemPoolGetAttribute(pool, attribute, &value);
    return value;
}

uint64_t idle_in_pools(struct thread *t, uint64_t *ret_reserved)
{
    struct context *c = here(t);
    CUmemoryPool pool = NULL;
    uint64_t used = 0;
    *ret_reserved = 0;
    if (!c || cuDeviceGetDefaultMemPool(&pool, c->device) != CUDA_SUCCESS)
        return 0;
    for (int i = -1; i < POOLS; i++) {
        if (i >= 0 && t->world->pools[i].device != c->device)
            continue;
        pool = i < 0 ? pool : t->world->pools[i].handle;
        if (!pool)
            continue;
        *ret_reserved += attribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
        used += attribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT);
    }
    return *ret_reserved - used;
}

/* Into a capture: the address is the graph's, which frees it too. */
static void capture_memory(struct thread *t, const struct context *c, int key, size_t size)
{
    CUdeviceptr ptr = 0;
    CUstream s = stream_of(c, key);
    CUresult r = got(t, "node", cuMemAllocAsync(&ptr, size, s));
    if (r == CUDA_SUCCESS)
        r = got(t, "set", cuMemsetD8Async(ptr, 1, size, s));
    if (r == CUDA_SUCCESS)
        r = got(t, "free", cuMemFreeAsync(ptr, s));
    if (r != CUDA_SUCCESS)
        t->world->captured.context = -1; /* not launched */
}

static void allocate_async(struct thread *t, struct block *b, struct context *c, int key, size_t size, int from)
{
    CUdeviceptr ptr = 0;
    int device = c->device;
    about_to_allocate(t);
    if (from < 0) {
        CUmemoryPool now = NULL;
        cuDeviceGetMemPool(&now, c->device);
        for (int i = 0; i < POOLS; i++)
            if (now && t->world->pools[i].handle == now)
                device = t->world->pools[i].device;
        from = -1;
    } else {
        device = t->world->pools[from].device;
    }
    bool uncounted = sim_capturing() != 0;
    CUresult r = from < 0 ? cuMemAllocAsync(&ptr, size, stream_of(c, key))
                          : cuMemAllocFromPoolAsync(&ptr, size, t->world->pools[from].handle, stream_of(c, key));
    if (got(t, "r", r) != CUDA_SUCCESS)
        return;
    allocated(t, b, FAMILY_ASYNC, ptr, size, index_of(t, c));
    b->uncounted = uncounted;
    b->device = device;
    b->last = (struct last){b->context, key};
}

void op_pool(struct thread *t, const uint64_t *arg)
{
    struct block *b = slot(t, arg[0], false);
    struct context *c = here(t);
    int key = key_of(t, arg[2]);
    if (!b || !c || !has_stream(c, key))
        return nothing(t);
    if (!capturing(c, key))
        return allocate_async(t, b, c, key, arg[1], -1);
    enter(c);
    capture_memory(t, c, key, arg[1]);
    leave();
}

/* From a pool of the program's, or on a stream of a context that is not current. */
void op_from(struct thread *t, const uint64_t *arg)
{
    struct block *b = slot(t, arg[0], false);
    unsigned how = (unsigned)arg[1];
    int key = key_of(t, arg[3]), from = (int)(how % (POOLS + 1)) - 1;
    struct context *c = key < LEGACY && how & 64 ? context_of(t, how) : here(t);
    if (!b || !c || !has_stream(c, key) || capturing(c, key) || (from >= 0 && !t->world->pools[from].handle))
        return nothing(t);
    allocate_async(t, b, c, key, arg[2], from);
}

void op_makepool(struct thread *t, const uint64_t *arg)
{
    static const uint64_t thresholds[] = {0, 4 << 20, 16 << 20, UINT64_MAX};
    unsigned i = (unsigned)(arg[0] % POOLS), how = (unsigned)arg[1];
    CUmemoryPool pool = t->world->pools[i].handle;
    uint64_t threshold = thresholds[how / 8 % 4];
    settle_pools(t);
    if (pool) {
        if (got(t, "destroy", cuMemPoolDestroy(pool)) != CUDA_SUCCESS)
            return;
        if (how & 1 && t->program->turns)
            got(t, "again", cuMemPoolDestroy(pool));
        t->world->pools[i].handle = NULL;
        return;
    }
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                            .location = {CU_MEM_LOCATION_TYPE_DEVICE, how & 1 && t->world->contexts[3].exists},
                            .maxSize = how / 2 % 4 == 3 ? 8 << 20 : 0};
    t->world->pools[i].device = props.location.id;
    if (how > 250)
        props.location.id = 77;
    if (got(t, "r", cuMemPoolCreate(&pool, &props)) != CUDA_SUCCESS)
        return;
    got(t, "threshold", cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
    t->world->pools[i].handle = pool;
}

void op_askpool(struct thread *t, const uint64_t *arg)
{
    static const CUmemPool_attribute asked[] = {CU_MEMPOOL_ATTR_USED_MEM_CURRENT, CU_MEMPOOL_ATTR_USED_MEM_HIGH,
                                                CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
                                                CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC};
    unsigned i = (unsigned)(arg[0] % (POOLS + 1)), how = (unsigned)arg[1];
    CUmemoryPool pool = i < POOLS ? t->world->pools[i].handle : NULL;
    uint64_t value = 0;
    if (i == POOLS && t->program->turns) /* elsewhere it is everybody's */
        cuDeviceGetDefaultMemPool(&pool, how & 1 && t->world->contexts[3].exists);
    if (!pool)
        return nothing(t);
    settle_pools(t);
    switch (how / 2 % 8) {
    case 0:
    case 1:
    case 2:
        got(t, "get", cuMemPoolGetAttribute(pool, asked[how / 16 % 4], &value));
        see(t, "value", value);
        break;
    case 3: got(t, "reset", cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH, &value)); break;
    case 4:
        value = 1 + how;
        got(t, "set bad", cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, &value));
        break;
    case 5: got(t, "trim", cuMemPoolTrimTo(pool, (size_t)(how / 16) << 20)); break;
    case 6:
        value = (uint64_t)(how / 16) << 20;
        got(t, "threshold", cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &value));
        break;
    default:
        if (t->program->turns)
            got(t, "current", cuDeviceSetMemPool(i < POOLS ? t->world->pools[i].device : (int)(how & 1), pool));
    }
}

/* ---- of other APIs ---- */

void op_external(struct thread *t, const uint64_t *arg)
{
    struct block *b = slot(t, arg[0], false);
    struct context *c = here(t);
    unsigned i = (unsigned)(arg[1] % EXTERNALS), how = (unsigned)arg[2];
    CUexternalMemory memory = t->world->externals[i].handle;
    CUdeviceptr ptr = 0;
    if (!c)
        return nothing(t);
    if (!memory) {
        CUDA_EXTERNAL_MEMORY_HANDLE_DESC d = {.type = CU_EXTERNAL_MEMORY_HANDLE_TYPE_OPAQUE_FD,
                                              .size = how % 8 ? (1 + how) * 4096 : 0};
        d.handle.fd = memfd_create("differential", MFD_CLOEXEC);
        if (got(t, "import", cuImportExternalMemory(&memory, &d)) != CUDA_SUCCESS) {
            close(d.handle.fd);
            return;
        }
        t->world->externals[i].handle = memory;
        t->world->externals[i].size = d.size;
        t->world->externals[i].device = c->device;
        return;
    }
    if (how % 4 == 3) {
        if (got(t, "destroy", cuDestroyExternalMemory(memory)) == CUDA_SUCCESS)
            t->world->externals[i].handle = NULL;
        return;
    }
    if (!b)
        return nothing(t);
    CUDA_EXTERNAL_MEMORY_BUFFER_DESC d = {.size = t->world->externals[i].size + (how % 16 == 0)};
    t->world->freed = 0;
    if (got(t, "buffer", cuExternalMemoryGetMappedBuffer(&ptr, memory, &d)) == CUDA_SUCCESS)
        allocated(t, b, FAMILY_EXTERNAL, ptr, d.size, index_of(t, c));
}

/* ---- contexts end ---- */

/* What lives on must not be in use by them. */
void families_about_to_end(struct thread *t, int context)
{
    for (int i = 0; i < BLOCKS; i++) {
        struct block *b = &t->world->blocks[i];
        if (!b->ptr || b->family != FAMILY_VIRTUAL || b->last.context != context || settle(t, b))
            continue;
        sim_note_free(b->ptr); /* nobody can tell any more: it is left mapped */
        b->ptr = 0;
    }
}

void families_ended(struct thread *t, int context)
{
    for (int i = 0; i < PINS; i++)
        if (t->world->pins[i].context == context)
            t->world->pins[i].ptr = NULL;
    for (int i = 0; i < ARRAYS; i++)
        if (t->world->arrays[i].context == context)
            t->world->arrays[i].handle = NULL;
}

/* ---- what is held at the end ---- */

struct held {
    unsigned long count, bytes;
};

static void add(struct held *h, unsigned long bytes)
{
    h->count++;
    h->bytes += bytes;
}

static void count(const struct world *w, struct held held[DEVICES][FAMILIES])
{
    for (int d = 0; d < DEVICES; d++)
        for (int f = 0; f < FAMILIES; f++) {
            held[d][f].count += w->lost[d][f].count;
            held[d][f].bytes += w->lost[d][f].bytes;
        }
    for (int i = 0; i < BLOCKS; i++) {
        const struct block *b = &w->blocks[i];
        if (b->ptr && !b->uncounted && b->family != FAMILY_VIRTUAL && b->family != FAMILY_EXTERNAL)
            add(&held[b->device][b->family], b->size);
    }
    for (int i = 0; i < CONTEXTS; i++)
        if (w->contexts[i].result.ptr)
            add(&held[w->contexts[i].device][FAMILY_PLAIN], w->contexts[i].result.size);
    for (int i = 0; i < PINS; i++)
        if (w->pins[i].ptr)
            add(&held[w->contexts[w->pins[i].context].device][w->pins[i].registered ? FAMILY_REGISTERED : FAMILY_HOST],
                w->pins[i].size);
    for (int i = 0; i < MEMORIES; i++) {
        const struct memory *m = &w->memories[i];
        if (exists(m))
            add(&held[m->counted][m->imported ? FAMILY_IMPORTED : FAMILY_VIRTUAL], m->imported ? m->seen : m->size);
    }
    for (int i = 0; i < ARRAYS; i++)
        if (w->arrays[i].handle)
            add(&held[w->contexts[w->arrays[i].context].device][FAMILY_ARRAY], w->arrays[i].bytes);
    for (int i = 0; i < EXTERNALS; i++)
        if (w->externals[i].handle)
            add(&held[w->externals[i].device][FAMILY_EXTERNAL], w->externals[i].size);
}

void machine_held(const struct program *p, const struct world *worlds, unsigned n)
{
    static const char *const words[FAMILIES] = {
#define VRAM_FAMILY(name, words, where, ends) words,
#include "vramshim/families.def"
#undef VRAM_FAMILY
    };
    struct held held[DEVICES][FAMILIES] = {0};
    for (unsigned i = 0; i < n; i++)
        count(&worlds[i], held);
    for (int d = 0; d < DEVICES; d++)
        for (int f = 0; f < FAMILIES; f++)
            /* Where threads do not take turns, nobody knows what was allocated during another's capture. */
            if (p->turns || f != FAMILY_ASYNC)
                printf("held %d %lu %lu %s\n", d, held[d][f].count, held[d][f].bytes, words[f]);
}

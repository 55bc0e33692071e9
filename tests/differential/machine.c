#include "machine.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>

#include "process.h"

CUresult got(struct thread *t, const char *what, CUresult r)
{
    see(t, what, r);
    return r;
}

void nothing(struct thread *t) { fputs(" -", t->out); }

/* The first slot from there on that is in use, or is free; so that few operations find nothing to do. */
struct block *slot(struct thread *t, uint64_t arg, bool used)
{
    unsigned slots = t->program->exact || t->program->pools || t->program->about ? BLOCKS : BLOCKS * 2 / 3;
    for (unsigned i = 0; i < slots; i++) {
        struct block *b = &t->world->blocks[(arg + i) % slots];
        if ((b->ptr != 0) == used)
            return b;
    }
    return NULL;
}

/* ---- contexts and streams ---- */

/* What is current, if it is one of ours and alive. */
struct context *here(struct thread *t)
{
    CUcontext ctx = NULL;
    cuCtxGetCurrent(&ctx);
    for (int i = 0; ctx && i < CONTEXTS; i++)
        if (t->world->contexts[i].alive && t->world->contexts[i].ctx == ctx)
            return &t->world->contexts[i];
    return NULL;
}

int index_of(struct thread *t, const struct context *c) { return (int)(c - t->world->contexts); }

static struct context *owner(struct thread *t, const struct block *b) { return &t->world->contexts[b->context]; }

void enter(const struct context *c) { cuCtxPushCurrent_v2(c->ctx); }

void leave(void)
{
    CUcontext popped;
    cuCtxPopCurrent_v2(&popped);
}

int key_of(const struct thread *t, uint64_t arg) { return arg == OWN ? OWN + (int)t->index : (int)arg; }

bool has_stream(const struct context *c, int key) { return key >= LEGACY || c->streams[key]; }

CUstream stream_of(const struct context *c, int key)
{
    return key >= OWN ? CU_STREAM_PER_THREAD : key == LEGACY ? NULL : c->streams[key];
}

/* A stream that cannot be asked counts as capturing: nothing is submitted to it. The legacy stream never captures. */
bool capturing(const struct context *c, int key)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (key == LEGACY)
        return false;
    enter(c);
    CUresult r = cuStreamIsCapturing(stream_of(c, key), &status);
    leave();
    return r != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE;
}

/* Puts what the stream does next behind all that was done to the block before. False: nothing may be submitted. */
static bool order(struct thread *t, struct block *b, struct context *c, int key)
{
    struct last to = {index_of(t, c), key};
    if (!has_stream(c, key) || capturing(c, key))
        return false;
    struct context *from = b->last.context < 0 ? NULL : &t->world->contexts[b->last.context];
    if (from && from->alive && (b->last.context != to.context || b->last.key != key)) {
        bool others = b->last.key >= OWN && b->last.key != OWN + (int)t->index; /* its handle means another stream here */
        if (others || !has_stream(from, b->last.key)) {
            enter(from);
            CUresult r = got(t, "order", cuCtxSynchronize());
            leave();
            if (r != CUDA_SUCCESS)
                return false;
        } else {
            if (capturing(from, b->last.key))
                return false;
            enter(from);
            CUresult r = cuEventRecord(from->order, stream_of(from, b->last.key));
            leave();
            enter(c);
            if (r == CUDA_SUCCESS)
                r = cuStreamWaitEvent(stream_of(c, key), from->order, 0);
            leave();
            if (got(t, "order", r) != CUDA_SUCCESS)
                return false;
        }
    }
    b->last = to;
    return true;
}

static CUresult launch(struct context *c, int key, CUfunction function, void **params)
{
    enter(c);
    CUresult r = cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream_of(c, key), params, NULL);
    leave();
    return r;
}

void allocated(struct thread *t, struct block *b, enum family family, CUdeviceptr ptr, size_t size, int context)
{
    sim_note_alloc(ptr, size);
    *b = (struct block){.ptr = ptr,
                        .size = size,
                        .context = context,
                        .family = family,
                        .device = t->world->contexts[context].device,
                        .last = {-1, 0},
                        .born = ++t->world->births};
}

void lose(struct thread *t, enum family family, int device, size_t bytes)
{
    t->world->lost[device][family].count++;
    t->world->lost[device][family].bytes += bytes;
}

/* What it was filled with is there, until somebody writes the same bytes by another mapping. */
static void wrote(struct thread *t, struct block *b, bool filled, unsigned value)
{
    struct world *w = t->world;
    for (int i = 0; b->family == FAMILY_VIRTUAL && i < BLOCKS; i++)
        if (w->blocks[i].ptr && w->blocks[i].family == FAMILY_VIRTUAL &&
            w->memories[w->blocks[i].memory].bytes == w->memories[b->memory].bytes)
            w->blocks[i].filled = false;
    b->filled = filled;
    b->value = (unsigned char)value;
}

static void furnish(struct thread *t, struct context *c)
{
    CUmodule module = NULL;
    CUdeviceptr result = 0;
    enter(c);
    for (int i = 0; i < STREAMS; i++)
        if (cuStreamCreate(&c->streams[i], i ? CU_STREAM_NON_BLOCKING : CU_STREAM_DEFAULT) != CUDA_SUCCESS)
            c->streams[i] = NULL;
    for (int i = 0; i < EVENTS; i++)
        cuEventCreate(&c->events[i], 0);
    cuEventCreate(&c->order, 0);
    cuModuleLoadData(&module, ".version 7.0");
    cuModuleGetFunction(&c->fill, module, "vram_fill");
    cuModuleGetFunction(&c->copy, module, "vram_copy");
    cuModuleGetFunction(&c->check, module, "vram_check");
    cuModuleGetFunction(&c->fault, module, "vram_fault");
    if (got(t, "result", cuMemAlloc_v2(&result, 4)) == CUDA_SUCCESS)
        allocated(t, &c->result, FAMILY_PLAIN, result, 4, index_of(t, c));
    leave();
    t->world->freed = 0;
}

/* All that lies in it goes with it. What still runs for another context's block is waited for: that block lives on. */
static void about_to_end(struct thread *t, struct context *c)
{
    int i = index_of(t, c);
    families_about_to_end(t, i);
    for (int k = 0; k < CONTEXTS; k++) {
        if (t->world->peer[i][k]) {
            enter(c);
            got(t, "sync", cuCtxSynchronize());
            leave();
            break;
        }
    }
    for (int k = 0; k < BLOCKS; k++)
        if (t->world->blocks[k].ptr && t->world->blocks[k].context == i && t->world->blocks[k].family != FAMILY_VIRTUAL)
            sim_note_free(t->world->blocks[k].ptr);
    if (c->result.ptr)
        sim_note_free(c->result.ptr);
}

static void ended(struct thread *t, struct context *c)
{
    struct world *w = t->world;
    int i = index_of(t, c);
    for (int k = 0; k < BLOCKS; k++) {
        struct block *b = &w->blocks[k];
        if (b->ptr && b->context == i && b->family == FAMILY_ASYNC && !b->uncounted)
            lose(t, FAMILY_ASYNC, b->device, b->size); /* it lives on */
        if (b->context == i && b->family == FAMILY_VIRTUAL)
            b->context = b->device && w->contexts[3].exists ? 3 : 0;
        else if (b->context == i)
            b->ptr = 0;
        if (w->blocks[k].last.context == i)
            w->blocks[k].last.context = -1;
    }
    for (int k = 0; k < CONTEXTS; k++)
        w->peer[i][k] = w->peer[k][i] = false;
    if (w->captured.context == i)
        w->captured.context = -1;
    families_ended(t, i);
    *c = (struct context){.device = c->device, .exists = true};
}

static void not_ended(struct thread *t, struct context *c)
{
    for (int k = 0; k < BLOCKS; k++)
        if (t->world->blocks[k].ptr && t->world->blocks[k].context == index_of(t, c) &&
            t->world->blocks[k].family != FAMILY_VIRTUAL)
            sim_note_alloc(t->world->blocks[k].ptr, t->world->blocks[k].size);
    if (c->result.ptr)
        sim_note_alloc(c->result.ptr, c->result.size);
}

static bool is_primary(int context) { return context == 0 || context == 3; }

static void begin_context(struct thread *t, int i)
{
    struct context *c = &t->world->contexts[i];
    CUcontext popped;
    if (is_primary(i)) {
        c->alive = got(t, "retain", cuDevicePrimaryCtxRetain(&c->ctx, c->device)) == CUDA_SUCCESS;
    } else {
        c->alive = got(t, "create", cuCtxCreate_v2(&c->ctx, 0, c->device)) == CUDA_SUCCESS;
        if (c->alive)
            cuCtxPopCurrent_v2(&popped);
    }
    if (c->alive)
        furnish(t, c);
}

void machine_start(struct thread *t)
{
    struct world *w = t->world;
    if (!w->contexts[0].exists) {
        int devices = 0;
        cuInit(0);
        cuDeviceGetCount(&devices);
        w->captured.context = -1;
        for (int i = 0; i < CONTEXTS; i++)
            w->contexts[i] = (struct context){.device = i < 3 ? 0 : devices - 1, .exists = i < 3 || devices > 1};
        begin_context(t, 0);
        if (devices > 1)
            begin_context(t, 3);
        rewind(t->out);
    }
    cuCtxSetCurrent(w->contexts[0].ctx);
}

/* The context that an argument names; NULL if there is none to be used now. */
struct context *context_of(struct thread *t, uint64_t arg)
{
    for (unsigned i = 0; i < CONTEXTS; i++) {
        struct context *c = &t->world->contexts[(arg + i) % CONTEXTS];
        if (c->alive)
            return c;
    }
    return NULL;
}

/* Whether other threads could feel what is done to the context. */
static bool shared(const struct thread *t, const struct context *c)
{
    return !t->program->turns && is_primary((int)(c - t->world->contexts));
}

void op_use(struct thread *t, const uint64_t *arg)
{
    struct context *c = context_of(t, arg[0]);
    if (!c)
        return nothing(t);
    got(t, "r", cuCtxSetCurrent(c->ctx));
}

void op_none(struct thread *t, const uint64_t *arg)
{
    (void)arg;
    got(t, "r", cuCtxSetCurrent(NULL));
}

void op_push(struct thread *t, const uint64_t *arg)
{
    struct context *c = context_of(t, arg[0]);
    if (!c || t->pushed == 4)
        return nothing(t);
    if (got(t, "r", cuCtxPushCurrent_v2(c->ctx)) == CUDA_SUCCESS)
        t->pushed++;
}

void op_pop(struct thread *t, const uint64_t *arg)
{
    CUcontext ctx = NULL;
    (void)arg;
    if (!t->pushed)
        return nothing(t);
    t->pushed--;
    got(t, "r", cuCtxPopCurrent_v2(&ctx));
    see(t, "some", ctx != NULL);
}

void op_create(struct thread *t, const uint64_t *arg)
{
    for (unsigned i = 0; i < CONTEXTS; i++) {
        struct context *c = &t->world->contexts[(arg[0] + i) % CONTEXTS];
        if (c->exists && !c->alive)
            return begin_context(t, (int)((arg[0] + i) % CONTEXTS));
    }
    nothing(t);
}

void op_destroy(struct thread *t, const uint64_t *arg)
{
    struct context *c = context_of(t, arg[0]);
    if (c && is_primary(index_of(t, c)))
        c = context_of(t, arg[0] + 1);
    if (!c || is_primary(index_of(t, c)))
        return nothing(t);
    about_to_end(t, c);
    if (got(t, "r", cuCtxDestroy_v2(c->ctx)) == CUDA_SUCCESS)
        ended(t, c);
    else
        not_ended(t, c);
}

void op_reset(struct thread *t, const uint64_t *arg)
{
    int i = arg[0] & 1 && t->world->contexts[3].exists ? 3 : 0;
    struct context *c = &t->world->contexts[i];
    if (!c->alive)
        return nothing(t);
    about_to_end(t, c);
    CUresult r = arg[0] & 2 ? cuDevicePrimaryCtxReset_v2(c->device) : cuDevicePrimaryCtxRelease_v2(c->device);
    if (got(t, "r", r) != CUDA_SUCCESS)
        return not_ended(t, c);
    ended(t, c);
    begin_context(t, i);
}

void op_retain(struct thread *t, const uint64_t *arg)
{
    struct context *c = &t->world->contexts[arg[0] & 1 && t->world->contexts[3].exists ? 3 : 0];
    CUcontext again = NULL;
    if (!c->alive)
        return nothing(t);
    if (got(t, "retain", cuDevicePrimaryCtxRetain(&again, c->device)) == CUDA_SUCCESS) {
        see(t, "same", again == c->ctx);
        got(t, "release", cuDevicePrimaryCtxRelease_v2(c->device));
    }
}

void op_peer(struct thread *t, const uint64_t *arg)
{
    struct context *a = context_of(t, arg[0]), *b = context_of(t, arg[1]);
    if (!a || !b)
        return nothing(t);
    bool *access = &t->world->peer[index_of(t, a)][index_of(t, b)];
    enter(a);
    if (arg[2] % 4) {
        *access |= got(t, "enable", cuCtxEnablePeerAccess(b->ctx, arg[2] % 16 == 1)) == CUDA_SUCCESS;
    } else if (got(t, "sync", cuCtxSynchronize()) == CUDA_SUCCESS || !*access) {
        if (got(t, "disable", cuCtxDisablePeerAccess(b->ctx)) == CUDA_SUCCESS)
            *access = false;
    }
    leave();
}

/* ---- memory ---- */

void op_alloc(struct thread *t, const uint64_t *arg)
{
    struct block *b = slot(t, arg[0], false);
    struct context *c = here(t);
    CUdeviceptr ptr = 0xdead;
    if (!b)
        return nothing(t);
    t->world->freed = 0;
    settle_pools(t);
    CUresult r = got(t, "r", cuMemAlloc_v2(&ptr, arg[1]));
    if (r != CUDA_SUCCESS)
        return see(t, "output", ptr);
    see(t, "alignment", ptr % 512);
    if (c)
        allocated(t, b, FAMILY_PLAIN, ptr, arg[1], index_of(t, c));
}

void op_pitch(struct thread *t, const uint64_t *arg)
{
    struct block *b = slot(t, arg[0], false);
    struct context *c = here(t);
    CUdeviceptr ptr = 0xdead;
    size_t pitch = 0xbeef, width = arg[1] * 20, height = arg[2];
    if (!b)
        return nothing(t);
    t->world->freed = 0;
    CUresult r = got(t, "r", cuMemAllocPitch_v2(&ptr, &pitch, width, height, arg[3] % 13 ? 4u << arg[3] % 3 : 5));
    see(t, "pitch", pitch);
    if (r != CUDA_SUCCESS)
        return see(t, "output", ptr);
    if (c)
        allocated(t, b, FAMILY_PITCH, ptr, pitch * height, index_of(t, c));
}

static void fill(struct thread *t, struct block *b, int key, unsigned n)
{
    struct context *c = owner(t, b);
    unsigned long long size = b->size, ns = n % 2 ? 20000 : 0;
    unsigned value = n % 255 + 1;
    void *params[] = {&b->ptr, &size, &value, &ns};
    if (has_stream(c, key) && key != LEGACY && capturing(c, key)) {
        enter(c);
        CUresult r = got(t, "captured", cuMemsetD8Async(b->ptr, (unsigned char)value, size, stream_of(c, key)));
        leave();
        if (t->world->captured.context != index_of(t, c) || t->world->captured.key != key)
            return;
        unsigned i = t->world->captured.count++;
        if (r != CUDA_SUCCESS || i == CAPTURED) {
            t->world->captured.context = -1; /* more than we follow */
            return;
        }
        t->world->captured.blocks[i] = b;
        t->world->captured.born[i] = b->born;
        t->world->captured.values[i] = (unsigned char)value;
        return;
    }
    if (!order(t, b, c, key))
        return nothing(t);
    if (got(t, "fill", launch(c, key, c->fill, params)) == CUDA_SUCCESS)
        wrote(t, b, true, value);
}

void op_fill(struct thread *t, const uint64_t *arg)
{
    struct block *b = slot(t, arg[0], true);
    if (!b)
        return nothing(t);
    fill(t, b, key_of(t, arg[1]), (unsigned)arg[2]);
}

void op_peerfill(struct thread *t, const uint64_t *arg)
{
    struct block *b = slot(t, arg[0], true);
    struct context *c = NULL;
    int key = key_of(t, arg[2]);
    for (unsigned i = 0; b && !c && i < CONTEXTS; i++)
        if (t->world->peer[(arg[1] + i) % CONTEXTS][b->context])
            c = &t->world->contexts[(arg[1] + i) % CONTEXTS];
    if (!c || !order(t, b, c, key))
        return nothing(t);
    unsigned long long size = b->size, ns = 20000;
    unsigned value = (unsigned)arg[3] % 255 + 1;
    void *params[] = {&b->ptr, &size, &value, &ns};
    if (got(t, "fill", launch(c, key, c->fill, params)) == CUDA_SUCCESS)
        wrote(t, b, true, value);
}

void op_set(struct thread *t, const uint64_t *arg)
{
    struct block *b = slot(t, arg[0], true);
    if (!b || !order(t, b, owner(t, b), LEGACY))
        return nothing(t);
    enter(owner(t, b));
    CUresult r = got(t, "set", cuMemsetD8_v2(b->ptr, (unsigned char)arg[1], b->size));
    leave();
    if (r == CUDA_SUCCESS)
        wrote(t, b, true, (unsigned)arg[1]);
}

void op_copy(struct thread *t, const uint64_t *arg)
{
    struct block *to = slot(t, arg[0], true), *from = slot(t, arg[1], true);
    int key = key_of(t, arg[2]);
    if (!to || to == from || to->context != from->context || !order(t, to, owner(t, to), key) ||
        !order(t, from, owner(t, to), key))
        return nothing(t);
    struct context *c = owner(t, to);
    unsigned long long size = to->size < from->size ? to->size : from->size, ns = 20000;
    void *params[] = {&to->ptr, &from->ptr, &size, &ns};
    if (got(t, "copy", launch(c, key, c->copy, params)) == CUDA_SUCCESS)
        wrote(t, to, from->filled && size == to->size, from->value);
}

/* Looks with a kernel, or at the first bytes from the host; both behind the work that came last. */
static void look(struct thread *t, struct block *b, bool kernel)
{
    struct context *c = owner(t, b);
    int key = b->last.context == b->context && b->last.key < OWN ? b->last.key : OWN + (int)t->index;
    unsigned long long size = b->size;
    unsigned value = b->value, wrong = 0;
    unsigned char bytes[64];
    if (!b->filled || !order(t, b, c, key) || (kernel && (!c->result.ptr || !order(t, &c->result, c, key))))
        return nothing(t);
    CUstream s = stream_of(c, key);
    enter(c);
    CUresult r;
    if (kernel) {
        void *params[] = {&b->ptr, &size, &value, &c->result.ptr};
        r = cuMemsetD8Async(c->result.ptr, 0, 4, s);
        if (r == CUDA_SUCCESS)
            r = launch(c, key, c->check, params);
        if (r == CUDA_SUCCESS)
            r = cuMemcpyDtoHAsync_v2(&wrong, c->result.ptr, 4, s);
    } else {
        size = size < sizeof bytes ? size : sizeof bytes;
        memset(bytes, (int)value, sizeof bytes);
        r = cuMemcpyDtoHAsync_v2(bytes, b->ptr, size, s);
    }
    if (r == CUDA_SUCCESS)
        r = cuStreamSynchronize(s);
    leave();
    for (size_t i = 0; !kernel && i < sizeof bytes; i++)
        wrong += bytes[i] != value;
    if (got(t, "look", r) == CUDA_SUCCESS) {
        see(t, "wrong", wrong);
        t->wrong += wrong != 0;
    }
}

void op_look(struct thread *t, const uint64_t *arg)
{
    struct block *b = slot(t, arg[0], true);
    if (!b)
        return nothing(t);
    look(t, b, arg[1] & 1);
}

/* Gone from the program, if the driver says so. What is freed at once can be named until somebody allocates. */
static void after_free(struct thread *t, struct block *b, CUresult r, bool at_once)
{
    if (r != CUDA_SUCCESS) {
        sim_note_alloc(b->ptr, b->size);
        return;
    }
    if (at_once && t->program->turns && b->family != FAMILY_EXTERNAL) {
        t->world->freed = b->ptr;
        t->world->freed_size = b->size;
    }
    b->ptr = 0;
}

static void free_async(struct thread *t, struct block *b, int key)
{
    struct context *c = owner(t, b);
    if (!order(t, b, c, key))
        return nothing(t);
    sim_note_free(b->ptr);
    enter(c);
    CUresult r = got(t, "freeasync", cuMemFreeAsync(b->ptr, stream_of(c, key)));
    leave();
    t->world->dying |= r == CUDA_SUCCESS;
    after_free(t, b, r, false);
}

void op_freeasync(struct thread *t, const uint64_t *arg)
{
    struct block *b = slot(t, arg[0], true);
    if (!b)
        return nothing(t);
    free_async(t, b, key_of(t, arg[1]));
}

/* What nobody owns any more: nobody else can have been given the address meanwhile. */
void op_again(struct thread *t, const uint64_t *arg)
{
    CUdeviceptr ptr = t->world->freed, inside = ptr + t->world->freed_size / 2, base = 1;
    size_t range = 2;
    unsigned long long data[4] = {0}, many[4] = {7, 7, 7, 7};
    CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_RANGE_SIZE,
                                        CU_POINTER_ATTRIBUTE_IS_MANAGED, CU_POINTER_ATTRIBUTE_HOST_POINTER};
    void *outputs[] = {&many[0], &many[1], &many[2], &many[3]};
    CUipcMemHandle ipc;
    int one = 1;
    if (!ptr)
        return nothing(t);
    fputs(" again", t->out);
    switch (arg[0] % 11) {
    case 0: got(t, "free", cuMemFree_v2(ptr)); break;
    case 1: got(t, "inside", cuMemFree_v2(inside)); break;
    case 2:
        got(t, "range", cuMemGetAddressRange_v2(&base, &range, inside));
        see(t, "base", base);
        see(t, "size", range);
        break;
    case 3: got(t, "attribute", cuPointerGetAttribute(data, attributes[arg[0] / 11 % 3], ptr)); break;
    case 4:
        got(t, "attributes", cuPointerGetAttributes(4, attributes, outputs, ptr));
        see(t, "type", many[0]);
        see(t, "size", many[1]);
        see(t, "managed", many[2]);
        see(t, "host", many[3] == ptr);
        break;
    case 5: got(t, "ipc", cuIpcGetMemHandle(&ipc, ptr)); break;
    case 6: got(t, "set", cuPointerSetAttribute(&one, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, ptr)); break;
    case 7: got(t, "host", cuMemFreeHost((void *)(uintptr_t)ptr)); break;
    case 8: got(t, "async", cuMemFreeAsync(ptr, NULL)); break;
    case 9: got(t, "close", cuIpcCloseMemHandle(ptr)); break;
    default:
        got(t, "free", cuMemFree_v2(ptr));
        got(t, "free", cuMemFree_v2(ptr));
    }
}

void op_free(struct thread *t, const uint64_t *arg)
{
    struct block *b = slot(t, arg[0], true);
    unsigned n = (unsigned)arg[1];
    if (!b)
        return nothing(t);
    if (b->family == FAMILY_ASYNC && n & 8)
        return free_async(t, b, b->last.key < OWN ? b->last.key : OWN + (int)t->index);
    if ((n & 3) == 1)
        look(t, b, n & 4);
    if ((n & 3) == 2)
        fill(t, b, key_of(t, (n >> 2) % 5), n >> 4);
    struct context *other = n & 0x40 ? context_of(t, n >> 2) : NULL;
    bool none = !other && (n & 0x30) == 0x30 && here(t);
    CUcontext current = NULL;
    if (other)
        enter(other);
    if (none)
        cuCtxPopCurrent_v2(&current);
    sim_note_free(b->ptr);
    CUresult r = got(t, "free", cuMemFree_v2(b->ptr));
    if (none)
        cuCtxPushCurrent_v2(current);
    if (other)
        leave();
    after_free(t, b, r, true);
    if (n & 0x80)
        op_again(t, (const uint64_t[]){n >> 2});
}

void op_misuse(struct thread *t, const uint64_t *arg)
{
    struct block *b = slot(t, arg[0], true);
    CUdeviceptr ptr = 0xdead;
    size_t pitch = 0xbeef, bytes = 0xf00d, total = 0xcafe;
    unsigned n = (unsigned)arg[1];
    int on_stack;
    CUcontext current = NULL;
    switch (n % 11) {
    case 0: got(t, "alloc 0", cuMemAlloc_v2(&ptr, 0)); break;
    case 1: got(t, "alloc NULL", cuMemAlloc_v2(NULL, 512)); break;
    case 2: got(t, "alloc huge", cuMemAlloc_v2(&ptr, (size_t)1 << (40 + n / 11))); break;
    case 3: got(t, "free 0", cuMemFree_v2(0)); break;
    case 4: got(t, "free unknown", cuMemFree_v2((CUdeviceptr)(uintptr_t)&on_stack)); break;
    case 5:
        if (b && b->family != FAMILY_ASYNC)
            got(t, "free inside", cuMemFree_v2(b->ptr + 1 + n));
        break;
    case 6: got(t, "pitch bad", cuMemAllocPitch_v2(&ptr, &pitch, n / 11 % 2, n / 22 % 2, 3 + 8 * (n / 44 % 2))); break;
    case 7:
        if (!here(t))
            break;
        cuCtxPopCurrent_v2(&current);
        if (!here(t)) {
            got(t, "alloc", cuMemAlloc_v2(&ptr, 512));
            got(t, "info", cuMemGetInfo_v2(&bytes, n / 11 % 2 ? &total : NULL));
            got(t, "free 0", cuMemFree_v2(0));
            got(t, "free bad", cuMemFree_v2(0x40));
        }
        cuCtxPushCurrent_v2(current);
        break;
    case 8: got(t, "info NULL", cuMemGetInfo_v2(NULL, NULL)); break;
    case 9: got(t, "pitch NULL", cuMemAllocPitch_v2(&ptr, NULL, 512, 2, 4)); break;
    default: got(t, "attribute", cuPointerGetAttribute(&bytes, CU_POINTER_ATTRIBUTE_CONTEXT, 0x40)); break;
    }
    if (ptr == 0xdead || !ptr)
        see(t, "output", ptr);
    see(t, "pitch", pitch);
    see(t, "bytes", bytes);
    see(t, "total", total);
}

void op_query(struct thread *t, const uint64_t *arg)
{
    static const CUpointer_attribute plain[] = {
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED,    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
        CU_POINTER_ATTRIBUTE_RANGE_SIZE,  CU_POINTER_ATTRIBUTE_HOST_POINTER,  CU_POINTER_ATTRIBUTE_MAPPED,
        CU_POINTER_ATTRIBUTE_SYNC_MEMOPS,
    };
    struct block *b = slot(t, arg[0], true);
    size_t size = 0xbeef;
    unsigned long long data[2] = {0};
    if (!b || b->family == FAMILY_ASYNC)
        return nothing(t);
    CUdeviceptr base = b->ptr, at = b->ptr + (size_t)(arg[2] * b->size / 256);
    switch (arg[1] % 6) {
    case 0:
        got(t, "range", cuMemGetAddressRange_v2(&base, &size, at));
        see(t, "base", base - b->ptr);
        see(t, "size", size);
        break;
    case 1:
        got(t, "range", cuMemGetAddressRange_v2(NULL, &size, at));
        see(t, "size", size);
        break;
    case 2:
        got(t, "attribute", cuPointerGetAttribute(data, plain[arg[1] / 6 % 7], at));
        see(t, "value", data[0] == at ? 1 : data[0]); /* as a host pointer */
        break;
    case 3: {
        CUpointer_attribute attributes[] = {CU_POINTER_ATTRIBUTE_RANGE_SIZE, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR};
        void *outputs[] = {&data[0], &data[1]};
        got(t, "attributes", cuPointerGetAttributes(2, attributes, outputs, at));
        see(t, "size", data[0]);
        see(t, "start", data[1] - b->ptr);
        break;
    }
    case 4:
        got(t, "pointer", cuPointerGetAttribute(data, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, at));
        see(t, "offset", data[0] - at);
        break;
    default:
        got(t, "context", cuPointerGetAttribute(data, CU_POINTER_ATTRIBUTE_CONTEXT, at));
        see(t, "owner", data[0] == (uintptr_t)owner(t, b)->ctx);
    }
}

void op_export(struct thread *t, const uint64_t *arg)
{
    struct block *b = slot(t, arg[0], true);
    CUipcMemHandle ipc;
    unsigned char tokens[16];
    int one = 1, fd = -1;
    if (!b || b->family == FAMILY_ASYNC)
        return nothing(t);
    switch (arg[1] % 4) {
    case 0: got(t, "ipc", cuIpcGetMemHandle(&ipc, b->ptr)); break;
    case 1:
        if (b->size < 2 << 20) /* whether a small one may be shown depends on where it lies in its page */
            return nothing(t);
        got(t, "dma-buf", cuMemGetHandleForAddressRange(&fd, b->ptr, b->size, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
        if (fd >= 0)
            close(fd);
        break;
    case 2: got(t, "sync memops", cuPointerSetAttribute(&one, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, b->ptr)); break;
    default: got(t, "tokens", cuPointerGetAttribute(tokens, CU_POINTER_ATTRIBUTE_P2P_TOKENS, b->ptr)); break;
    }
}

/* Pools keep natively what the shim may have given back: more may be free than natively, never less, and with what they
 * keep it is the same (`differ` knows "more" and "less"). A flush may be going on. */
static void info_beside_pools(struct thread *t)
{
    size_t free_bytes = 0, total = 0;
    uint64_t before, idle, reserved;
    CUresult r;
    settle_pools(t);
    idle = idle_in_pools(t, &reserved);
    do {
        before = idle;
        r = cuMemGetInfo_v2(&free_bytes, &total);
        idle = idle_in_pools(t, &reserved);
    } while (idle != before);
    got(t, "r", r);
    see(t, "total", total);
    see(t, "more", free_bytes);
    see(t, "less", reserved);
    see(t, "with idle", free_bytes + idle);
}

void op_info(struct thread *t, const uint64_t *arg)
{
    size_t free_bytes = 0, total = 0;
    (void)arg;
    if (t->program->pools)
        return info_beside_pools(t);
    got(t, "r", cuMemGetInfo_v2(&free_bytes, &total));
    see(t, "total", total);
    if (t->program->exact)
        see(t, "free", free_bytes);
    if (t->program->about)
        see(t, "free~", free_bytes); /* `differ` allows for the waste */
}

/* ---- streams and captures ---- */

void op_record(struct thread *t, const uint64_t *arg)
{
    struct context *c = here(t);
    int key = key_of(t, arg[1]);
    if (!c || !has_stream(c, key))
        return nothing(t);
    got(t, "r", cuEventRecord(c->events[arg[0] % EVENTS], stream_of(c, key)));
}

void op_wait(struct thread *t, const uint64_t *arg)
{
    struct context *c = here(t);
    int key = key_of(t, arg[1]);
    if (!c || !has_stream(c, key))
        return nothing(t);
    got(t, "r", cuStreamWaitEvent(stream_of(c, key), c->events[arg[0] % EVENTS], 0));
}

void op_sync(struct thread *t, const uint64_t *arg)
{
    (void)arg;
    got(t, "r", cuCtxSynchronize());
}

void op_streamsync(struct thread *t, const uint64_t *arg)
{
    struct context *c = here(t);
    int key = key_of(t, arg[0]);
    if (!c || !has_stream(c, key))
        return nothing(t);
    got(t, "r", cuStreamSynchronize(stream_of(c, key)));
}

void op_stream(struct thread *t, const uint64_t *arg)
{
    struct context *c = here(t);
    int key = (int)(arg[0] % STREAMS);
    if (!c)
        return nothing(t);
    if (c->streams[key]) {
        /* The one that comes has its number: what ran on this one must be over. */
        if (!capturing(c, key) && got(t, "sync", cuStreamSynchronize(c->streams[key])) != CUDA_SUCCESS)
            return;
        if (got(t, "destroy", cuStreamDestroy_v2(c->streams[key])) != CUDA_SUCCESS)
            return;
        c->streams[key] = NULL;
        if (t->world->captured.context == index_of(t, c) && t->world->captured.key == key)
            t->world->captured.context = -1;
    }
    if (got(t, "create", cuStreamCreate(&c->streams[key], key ? CU_STREAM_NON_BLOCKING : CU_STREAM_DEFAULT)) != 0)
        c->streams[key] = NULL;
}

void op_begin(struct thread *t, const uint64_t *arg)
{
    struct context *c = here(t);
    int key = key_of(t, arg[0]);
    CUstreamCaptureMode mode = (CUstreamCaptureMode)(arg[1] % 3);
    if (!c || c->failed || !has_stream(c, key) ||
        (!t->program->turns && (shared(t, c) || mode == CU_STREAM_CAPTURE_MODE_GLOBAL)))
        return nothing(t);
    /* So that blocks that it used need not be put behind it while it captures. */
    if (!capturing(c, key) && got(t, "sync", cuStreamSynchronize(stream_of(c, key))) != CUDA_SUCCESS)
        return;
    if (got(t, "r", cuStreamBeginCapture_v2(stream_of(c, key), mode)) != CUDA_SUCCESS)
        return;
    t->world->captured.context = index_of(t, c);
    t->world->captured.key = key;
    t->world->captured.count = 0;
}

/* Launches the graph of the last capture, if all that it writes is still there. */
static void launch_graph(struct thread *t, struct context *c, int key, CUgraph graph)
{
    struct world *w = t->world;
    CUgraphExec exec = NULL;
    if (w->captured.context != index_of(t, c) || w->captured.key != key)
        return;
    for (unsigned i = 0; i < w->captured.count; i++) {
        struct block *b = w->captured.blocks[i];
        if (!b->ptr || b->born != w->captured.born[i] || !order(t, b, c, key))
            return;
    }
    enter(c);
    if (got(t, "instantiate", cuGraphInstantiateWithFlags(&exec, graph, 0)) == CUDA_SUCCESS) {
        if (got(t, "launch", cuGraphLaunch(exec, stream_of(c, key))) == CUDA_SUCCESS)
            for (unsigned i = 0; i < w->captured.count; i++)
                wrote(t, w->captured.blocks[i], true, w->captured.values[i]);
        got(t, "sync", cuStreamSynchronize(stream_of(c, key)));
        got(t, "destroy", cuGraphExecDestroy(exec));
    }
    leave();
}

void op_end(struct thread *t, const uint64_t *arg)
{
    struct context *c = here(t);
    int key = key_of(t, arg[0]);
    CUgraph graph = NULL;
    if (!c || !has_stream(c, key))
        return nothing(t);
    CUresult r = got(t, "r", cuStreamEndCapture(stream_of(c, key), &graph));
    see(t, "graph", graph != NULL);
    if (graph && r == CUDA_SUCCESS && arg[1] & 1)
        launch_graph(t, c, key, graph);
    if (graph)
        got(t, "destroy", cuGraphDestroy(graph));
}

void op_exchange(struct thread *t, const uint64_t *arg)
{
    CUstreamCaptureMode mode = (CUstreamCaptureMode)(arg[0] % 3);
    got(t, "r", cuThreadExchangeStreamCaptureMode(&mode));
    see(t, "before", mode);
}

/* ---- failures ---- */

void op_fault(struct thread *t, const uint64_t *arg)
{
    struct context *c = context_of(t, arg[0]);
    if (!c || c->failed || !c->streams[1] || sim_capturing())
        return nothing(t);
    c->failed = got(t, "launch", launch(c, 1, c->fault, NULL)) == CUDA_SUCCESS;
    enter(c);
    got(t, "sync", cuCtxSynchronize());
    leave();
    for (int i = 0; i < BLOCKS; i++)
        if (t->world->blocks[i].context == index_of(t, c))
            t->world->blocks[i].filled = false;
}

/* The program sees the driver's failure, or success: never another code, and nothing is lost by it. */
void op_fail(struct thread *t, const uint64_t *arg)
{
    static const struct {
        const char *entry;
        CUresult code;
    } failing[] = {
        {"cuMemAlloc_v2", CUDA_ERROR_OUT_OF_MEMORY},
        {"cuMemFree_v2", CUDA_ERROR_UNKNOWN},
        {"cuCtxGetCurrent", CUDA_ERROR_UNKNOWN},
        {"cuCtxPushCurrent_v2", CUDA_ERROR_UNKNOWN},
        {"cuCtxPopCurrent_v2", CUDA_ERROR_UNKNOWN},
        {"cuCtxGetDevice", CUDA_ERROR_UNKNOWN},
        {"cuCtxSynchronize", CUDA_ERROR_UNKNOWN},
        {"cuCtxGetStreamPriorityRange", CUDA_ERROR_UNKNOWN},
        {"cuDevicePrimaryCtxGetState", CUDA_ERROR_UNKNOWN},
        {"cuCtxRecordEvent", CUDA_ERROR_UNKNOWN},
        {"cuCtxWaitEvent", CUDA_ERROR_UNKNOWN},
        {"cuEventCreate", CUDA_ERROR_UNKNOWN},
        {"cuEventQuery", CUDA_ERROR_UNKNOWN},
    };
    struct context *c = here(t);
    unsigned which = (unsigned)(arg[0] % (sizeof failing / sizeof *failing));
    CUresult code = failing[which].code, freed = CUDA_SUCCESS;
    CUdeviceptr ptr = 0;
    if (!c || c->failed || sim_capturing())
        return nothing(t);
    t->world->freed = 0;
    settle_pools(t);
    sim_fail(failing[which].entry, 1 + arg[1] % 3, 1, (int)code);
    CUresult r = cuMemAlloc_v2(&ptr, arg[2]);
    if (r == CUDA_SUCCESS) {
        sim_note_alloc(ptr, arg[2]);
        sim_note_free(ptr);
        freed = cuMemFree_v2(ptr);
    }
    sim_fail(failing[which].entry, 1, 0, 0);
    CUresult again = freed == CUDA_SUCCESS ? CUDA_SUCCESS : cuMemFree_v2(ptr);
    if (got(t, "once more", again) != CUDA_SUCCESS)
        lose(t, FAMILY_PLAIN, c->device, arg[2]);
    see(t, "alloc", r == code ? CUDA_SUCCESS : r);
    see(t, "free", freed == code ? CUDA_SUCCESS : freed);
}

/* ---- threads; the rest of the process is in process.c ---- */

struct visit {
    struct thread *host;
    struct context *context;
    size_t size;
};

static void *visit(void *arg)
{
    struct visit *v = arg;
    struct thread *t = v->host;
    CUdeviceptr ptr = 0;
    got(t, "set", cuCtxSetCurrent(v->context->ctx));
    if (got(t, "alloc", cuMemAlloc_v2(&ptr, v->size)) != CUDA_SUCCESS)
        return NULL;
    sim_note_alloc(ptr, v->size);
    got(t, "memset", cuMemsetD8Async(ptr, 1, v->size, CU_STREAM_PER_THREAD));
    sim_note_free(ptr);
    CUresult r = got(t, "free", cuMemFree_v2(ptr));
    if (r != CUDA_SUCCESS) {
        sim_note_alloc(ptr, v->size);
        lose(t, FAMILY_PLAIN, v->context->device, v->size);
    }
    return NULL;
}

void op_visitor(struct thread *t, const uint64_t *arg)
{
    struct context *c = context_of(t, arg[0]);
    pthread_t id;
    if (!c)
        return nothing(t);
    struct visit v = {t, c, arg[1]};
    t->world->freed = 0;
    settle_pools(t);
    if (pthread_create(&id, NULL, visit, &v) == 0)
        pthread_join(id, NULL);
}

void machine_step(struct thread *t, const struct line *line)
{
    static void (*const run[OPS])(struct thread *, const uint64_t *) = {
#define OP(name, weight, arguments, where) [OP_##name] = op_##name,
#include "ops.def"
#undef OP
    };
    run[line->op](t, line->arg);
}

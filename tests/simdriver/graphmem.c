#include "graphmem.h"

#include "context.h"
#include "entry.h"
#include "judge.h"
#include "memory.h"
#include "pool.h"
#include "sim.h"
#include "work.h"

#include <stdlib.h>

struct sim_graph_memory {
    struct sim_block *block;
    size_t pages;            /* bytes of physical memory that it needs */
    unsigned int references; /* by nodes of graphs and executable graphs; + live */
    bool has_exec;           /* of its allocation node */
    bool has_free;           /* a free node */
    bool live;               /* allocated by a launch, as far as submitted, and not freed */
    bool backed;
    struct vclock busy; /* all that may still use it */
    struct sim_graph_memory *next;
};
static struct sim_graph_memory *memories;

static bool allocates(const struct sim_op *op)
{
    return op->memory && !op->frees;
}

static CUmemoryPool pool_of(const struct sim_graph_memory *m)
{
    return sim_pool_of_graphs(m->block->device);
}

static struct sim_op node(struct sim_block *b, const char *what, bool frees)
{
    /* As in cuMemFreeAsync, both write the whole block as far as order goes. */
    return (struct sim_op){.kind = OP_MARK,
                           .what = what,
                           .dst = b->address,
                           .bytes = b->size,
                           .rows = 1,
                           .dst_judged = true,
                           .frees = frees,
                           .memory = b->graph};
}

static void unback(struct sim_graph_memory *m)
{
    if (m->backed)
        sim_pool_unback(pool_of(m), m->pages);
    m->backed = false;
}

void sim_graph_memory_reclaim(void)
{
    for (struct sim_graph_memory **at = &memories; *at;) {
        struct sim_graph_memory *m = *at;
        if (m->references || !sim_work_done(&m->busy)) {
            at = &m->next;
            continue;
        }
        *at = m->next;
        unback(m);
        sim_judge_release(m->block->address, m->block->address + m->block->size, false);
        sim_memory_hide(m->block);
        sim_memory_release(m->block);
        sim_vclock_clear(&m->busy);
        free(m);
    }
}

CUresult sim_graph_memory_capture_alloc(CUstream s, size_t size, uint64_t *ret)
{
    struct sim_block *b;
    CUresult r = sim_memory_alloc(s->ctx, size, MEMORY_GRAPH, false, &b);
    if (r)
        return r;
    struct sim_graph_memory *m = b->graph = sim_xcalloc(sizeof *m);
    *m = (struct sim_graph_memory){.block = b, .pages = b->map_size, .next = memories};
    memories = m;
    struct sim_op op = node(b, "graph allocation", false);
    r = sim_work_enqueue(s, &op);
    if (!r)
        *ret = b->address;
    sim_graph_memory_reclaim(); /* it was not taken into the graph */
    return r;
}

CUresult sim_graph_memory_capture_free(CUstream s, struct sim_block *b)
{
    if (b->kind != MEMORY_GRAPH || b->graph->has_free)
        return CUDA_ERROR_INVALID_VALUE;
    struct sim_op op = node(b, "graph free", true);
    CUresult r = sim_work_enqueue(s, &op);
    b->graph->has_free |= !r;
    return r;
}

void sim_graph_memory_retain(const struct sim_op *op)
{
    if (op->memory)
        op->memory->references++;
}

void sim_graph_memory_release(const struct sim_op *op)
{
    if (op->memory)
        op->memory->references--; /* the next reclaim sees it: its work may go on */
}

bool sim_graph_memory_instantiate(const struct sim_op *op, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (allocates(&op[i]) && op[i].memory->has_exec)
            return false;
    for (size_t i = 0; i < count; i++)
        if (allocates(&op[i]))
            op[i].memory->has_exec = true;
    return true;
}

void sim_graph_memory_forget_exec(const struct sim_op *op, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (allocates(&op[i]))
            op[i].memory->has_exec = false;
}

CUresult sim_graph_memory_upload(const struct sim_op *op, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (!allocates(&op[i]) || op[i].memory->backed)
            continue;
        CUresult r = sim_pool_back(pool_of(op[i].memory), op[i].memory->pages);
        if (r)
            return r;
        op[i].memory->backed = true;
    }
    return CUDA_SUCCESS;
}

CUresult sim_graph_memory_launch(const struct sim_op *op, size_t count, bool auto_free, CUstream s)
{
    bool any = false;
    for (size_t i = 0; i < count; i++) {
        struct sim_graph_memory *m = op[i].memory;
        if (!m)
            continue;
        any = true;
        if (allocates(&op[i])) {
            if (m->live && !auto_free)
                return CUDA_ERROR_INVALID_VALUE;
        } else {
            bool here = false;
            for (size_t k = 0; k < i; k++)
                here |= allocates(&op[k]) && op[k].memory == m;
            if (!here && !m->live)
                return CUDA_ERROR_INVALID_VALUE;
        }
    }
    if (any && s->capture)
        return CUDA_ERROR_NOT_SUPPORTED;
    CUresult r = sim_graph_memory_upload(op, count);
    for (size_t i = 0; !r && i < count; i++)
        if (allocates(&op[i]) && op[i].memory->live)
            r = sim_graph_memory_free_async(op[i].memory->block, s);
    return r;
}

void sim_graph_memory_before(const struct sim_op *op)
{
    if (!allocates(op))
        return;
    /* What the program said of it while it captured was about this launch, and about the last one. */
    sim_judge_renew(op->dst, op->dst + op->bytes);
    op->memory->live = true;
    op->memory->references++;
}

static void freed(struct sim_graph_memory *m)
{
    m->live = false;
    m->references--;
}

void sim_graph_memory_after(const struct sim_op *op)
{
    if (op->memory && op->frees)
        freed(op->memory);
}

void sim_graph_memory_used(const struct sim_op *op, CUstream s)
{
    if (op->memory)
        sim_vclock_join(&op->memory->busy, &s->base);
}

bool sim_graph_memory_live(const struct sim_block *b)
{
    return b->graph->live;
}

CUresult sim_graph_memory_free(struct sim_block *b)
{
    if (!b->graph->live)
        return CUDA_ERROR_INVALID_VALUE;
    CUcontext owner = b->ctx->alive ? b->ctx : sim_context_current();
    b->graph->live = false; /* before the wait gives the lock up: no second free, and it stays where it is till then */
    if (owner)
        sim_memory_wait_owner(owner);
    freed(b->graph);
    sim_graph_memory_reclaim();
    return owner ? owner->error : CUDA_SUCCESS;
}

CUresult sim_graph_memory_free_async(struct sim_block *b, CUstream s)
{
    struct sim_op op = node(b, "cuMemFreeAsync", true);
    CUresult r = b->graph->live ? sim_work_enqueue(s, &op) : CUDA_ERROR_INVALID_VALUE;
    if (!r) {
        sim_graph_memory_after(&op);
        sim_graph_memory_used(&op, s);
    }
    return r;
}

static bool bad_device(CUdevice dev)
{
    return dev < 0 || dev >= sim.config.devices;
}

CUresult do_cuDeviceGraphMemTrim(CUdevice dev)
{
    if (bad_device(dev))
        return CUDA_ERROR_INVALID_DEVICE;
    sim_graph_memory_reclaim();
    for (struct sim_graph_memory *m = memories; m; m = m->next)
        if (m->block->device == dev && !m->live && sim_work_done(&m->busy))
            unback(m); /* until the next launch */
    sim_pool_release(sim_pool_of_graphs(dev));
    return CUDA_SUCCESS;
}

CUresult do_cuDeviceGetGraphMemAttribute(CUdevice dev, CUgraphMem_attribute attribute, void *value)
{
    if (bad_device(dev))
        return CUDA_ERROR_INVALID_DEVICE;
    if (!value || attribute > CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH)
        return CUDA_ERROR_INVALID_VALUE;
    sim_graph_memory_reclaim();
    CUmemoryPool pool = sim_pool_of_graphs(dev);
    const uint64_t amount[] = {pool->backed, pool->backed_high, pool->reserved, pool->reserved_high};
    *(uint64_t *)value = amount[attribute];
    return CUDA_SUCCESS;
}

CUresult do_cuDeviceSetGraphMemAttribute(CUdevice dev, CUgraphMem_attribute attribute, void *value)
{
    if (bad_device(dev))
        return CUDA_ERROR_INVALID_DEVICE;
    CUmemoryPool pool = sim_pool_of_graphs(dev);
    if (!value || *(uint64_t *)value)
        return CUDA_ERROR_INVALID_VALUE;
    if (attribute == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH)
        pool->backed_high = pool->backed;
    else if (attribute == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH)
        pool->reserved_high = pool->reserved;
    else
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

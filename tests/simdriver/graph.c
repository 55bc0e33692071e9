#include "graph.h"

#include "context.h"
#include "entry.h"
#include "graphmem.h"
#include "stream.h"
#include "work.h"

#include <stdlib.h>
#include <string.h>

#define AUTO_FREE_ON_LAUNCH 1u /* CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH */

struct CUgraph_st {
    struct sim_op *op;
    size_t count, size;
};

struct CUgraphExec_st {
    struct CUgraph_st graph; /* a copy of its own: the graph may go */
    bool auto_free;
    struct vclock at; /* its last launch: the next one comes after it, on whatever stream (documented) */
};

CUgraph sim_graph_create(void)
{
    CUgraph g = sim_xcalloc(sizeof *g);
    sim_handle_add(g, HANDLE_GRAPH);
    return g;
}

static void drop(CUgraph g)
{
    for (size_t i = 0; i < g->count; i++)
        sim_graph_memory_release(&g->op[i]);
    free(g->op);
}

void sim_graph_destroy(CUgraph g)
{
    sim_handle_remove(g);
    drop(g);
    free(g);
}

void sim_graph_add(CUgraph g, const struct sim_op *op)
{
    if (g->count == g->size)
        g->op = sim_xrealloc(g->op, (g->size = g->size ? g->size * 2 : 8) * sizeof *g->op);
    g->op[g->count++] = *op;
    sim_graph_memory_retain(op);
}

CUresult do_cuGraphCreate(CUgraph *graph, unsigned int flags)
{
    if (!graph || flags)
        return CUDA_ERROR_INVALID_VALUE;
    *graph = sim_graph_create();
    return CUDA_SUCCESS;
}

CUresult do_cuGraphDestroy(CUgraph graph)
{
    if (!sim_handle_is(graph, HANDLE_GRAPH))
        return CUDA_ERROR_INVALID_VALUE;
    sim_graph_destroy(graph);
    return CUDA_SUCCESS;
}

/* A node is known by the place of its operation; enough to be counted and compared. */
CUresult do_cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count)
{
    if (!sim_handle_is(graph, HANDLE_GRAPH) || !count)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; nodes && i < *count; i++)
        nodes[i] = i < graph->count ? (CUgraphNode)(void *)&graph->op[i] : NULL;
    if (!nodes || *count > graph->count)
        *count = graph->count;
    return CUDA_SUCCESS;
}

CUresult do_cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
    if (!exec || !sim_handle_is(graph, HANDLE_GRAPH) || !sim_graph_memory_instantiate(graph->op, graph->count))
        return CUDA_ERROR_INVALID_VALUE;
    CUgraphExec e = sim_xcalloc(sizeof *e);
    e->auto_free = flags & AUTO_FREE_ON_LAUNCH;
    for (size_t i = 0; i < graph->count; i++)
        sim_graph_add(&e->graph, &graph->op[i]);
    sim_handle_add(e, HANDLE_EXEC);
    *exec = e;
    return CUDA_SUCCESS;
}

CUresult do_cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *error_node, char *log, size_t size)
{
    if (error_node)
        *error_node = NULL;
    if (log && size)
        *log = 0;
    return do_cuGraphInstantiateWithFlags(exec, graph, 0);
}

CUresult do_cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, CUgraphNode *error_node, char *log, size_t size)
{
    return do_cuGraphInstantiate_v2(exec, graph, error_node, log, size);
}

CUresult do_cuGraphLaunch(CUgraphExec exec, CUstream handle)
{
    CUstream s = sim_stream_resolve(handle);
    if (!sim_handle_is(exec, HANDLE_EXEC) || !s)
        return CUDA_ERROR_INVALID_HANDLE;
    const struct sim_op *op = exec->graph.op;
    if (!s->capture)
        sim_vclock_join(&s->base, &exec->at);
    CUresult r = sim_graph_memory_launch(op, exec->graph.count, exec->auto_free, s);
    for (size_t i = 0; !r && i < exec->graph.count; i++) {
        sim_graph_memory_before(&op[i]);
        r = sim_work_enqueue(s, &op[i]);
        sim_graph_memory_after(&op[i]);
    }
    /* All that used its memory is over when the launch is. */
    for (size_t i = 0; i < exec->graph.count; i++)
        sim_graph_memory_used(&op[i], s);
    if (!s->capture)
        sim_vclock_copy(&exec->at, &s->base);
    return r;
}

CUresult do_cuGraphUpload(CUgraphExec exec, CUstream handle)
{
    if (!sim_handle_is(exec, HANDLE_EXEC) || !sim_stream_resolve(handle))
        return CUDA_ERROR_INVALID_HANDLE;
    return sim_graph_memory_upload(exec->graph.op, exec->graph.count);
}

CUresult do_cuGraphExecDestroy(CUgraphExec exec)
{
    if (!sim_handle_is(exec, HANDLE_EXEC))
        return CUDA_ERROR_INVALID_HANDLE;
    sim_handle_remove(exec);
    sim_graph_memory_forget_exec(exec->graph.op, exec->graph.count);
    drop(&exec->graph);
    sim_vclock_clear(&exec->at);
    free(exec);
    return CUDA_SUCCESS;
}

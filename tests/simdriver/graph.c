#include "graph.h"

#include "context.h"
#include "entry.h"
#include "stream.h"
#include "work.h"

#include <stdlib.h>
#include <string.h>

struct CUgraph_st {
    struct sim_op *op;
    size_t count, size;
};

struct CUgraphExec_st {
    struct CUgraph_st graph; /* a copy of its own: the graph may go */
};

CUgraph sim_graph_create(void)
{
    CUgraph g = sim_xcalloc(sizeof *g);
    sim_handle_add(g, HANDLE_GRAPH);
    return g;
}

void sim_graph_destroy(CUgraph g)
{
    sim_handle_remove(g);
    free(g->op);
    free(g);
}

void sim_graph_add(CUgraph g, const struct sim_op *op)
{
    if (g->count == g->size)
        g->op = sim_xrealloc(g->op, (g->size = g->size ? g->size * 2 : 8) * sizeof *g->op);
    g->op[g->count++] = *op;
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
    (void)flags;
    if (!exec || !sim_handle_is(graph, HANDLE_GRAPH))
        return CUDA_ERROR_INVALID_VALUE;
    CUgraphExec e = sim_xcalloc(sizeof *e);
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
    CUresult r = CUDA_SUCCESS;
    for (size_t i = 0; !r && i < exec->graph.count; i++)
        r = sim_work_enqueue(s, &exec->graph.op[i]);
    return r;
}

CUresult do_cuGraphUpload(CUgraphExec exec, CUstream handle)
{
    return sim_handle_is(exec, HANDLE_EXEC) && sim_stream_resolve(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult do_cuGraphExecDestroy(CUgraphExec exec)
{
    if (!sim_handle_is(exec, HANDLE_EXEC))
        return CUDA_ERROR_INVALID_HANDLE;
    sim_handle_remove(exec);
    free(exec->graph.op);
    free(exec);
    return CUDA_SUCCESS;
}

/*
 * Memory nodes of graphs: what a capturing stream allocates and frees in stream order. All under the state lock.
 *
 * The address is the graph's from the capture until no graph and no executable graph has the node any more, and nothing
 * allocated by a launch is left. Physical memory comes at the first launch (or upload) from a pool of the device that
 * is there for graphs alone, and stays until cuDeviceGraphMemTrim finds it unused. No two nodes share any.
 */
#ifndef SIMDRIVER_GRAPHMEM_H
#define SIMDRIVER_GRAPHMEM_H

#include "op.h"
#include "state.h"

struct sim_graph_memory;

/* On a capturing stream. */
CUresult sim_graph_memory_capture_alloc(CUstream stream, size_t size, uint64_t *ret);
CUresult sim_graph_memory_capture_free(CUstream stream, struct sim_block *block);

/* The operation's node is in one graph more, or less. */
void sim_graph_memory_retain(const struct sim_op *op);
void sim_graph_memory_release(const struct sim_op *op);

/* Before a launch: whether all of them can run, and there is memory for them. auto_free: what a launch left is freed.
 */
CUresult sim_graph_memory_upload(const struct sim_op *op, size_t count);
CUresult sim_graph_memory_launch(const struct sim_op *op, size_t count, bool auto_free, CUstream stream);
/* During it, before and after an operation is put on the stream. */
void sim_graph_memory_before(const struct sim_op *op);
void sim_graph_memory_after(const struct sim_op *op);
/* After it: what is on the stream by now may use the memory. */
void sim_graph_memory_used(const struct sim_op *op, CUstream stream);

/* One executable graph at a time can have them: false when there is one. */
bool sim_graph_memory_instantiate(const struct sim_op *op, size_t count);
void sim_graph_memory_forget_exec(const struct sim_op *op, size_t count);

/* A free outside any graph, of what a launch has allocated; 1 for all else. */
CUresult sim_graph_memory_free(struct sim_block *block);
CUresult sim_graph_memory_free_async(struct sim_block *block, CUstream stream);

bool sim_graph_memory_live(const struct sim_block *block); /* a launch has allocated it */
void sim_graph_memory_reclaim(void);                       /* what nobody has any more, and nothing still uses */

#endif

/* Graphs: a list of operations in capture order, replayed one after the other. All under the state lock. */
#ifndef SIMDRIVER_GRAPH_H
#define SIMDRIVER_GRAPH_H

#include "op.h"
#include "state.h"

CUgraph sim_graph_create(void);
void sim_graph_destroy(CUgraph graph);
void sim_graph_add(CUgraph graph, const struct sim_op *op);

#endif

/*
 * What a work item does to memory: a kernel, a copy, a fill. The effect is applied when the item is submitted, in
 * submission order, which is one of the orders that the hardware may choose as long as nothing races; judge.c says
 * whether something does. All under the state lock.
 */
#ifndef SIMDRIVER_OP_H
#define SIMDRIVER_OP_H

#include "state.h"

struct sim_graph_memory;

/* What one item does. The ranges that it touches follow from it (judge.c). */
struct sim_op {
    enum { OP_MARK, OP_SPIN, OP_FILL, OP_COPY, OP_CHECK, OP_FAULT, OP_HOST } kind;
    const char *what; /* for the text of a hazard */
    uint64_t dst, src;
    size_t bytes; /* of one row */
    size_t rows;  /* 1 unless two-dimensional */
    size_t dst_pitch, src_pitch;
    bool dst_judged, src_judged; /* memory of ours: pageable host memory is the program's own affair */
    bool frees; /* orders like a write, and is no use: the program has said that it frees the memory */
    uint32_t value;
    unsigned int width; /* of value: 1, 2 or 4 bytes */
    uint64_t ns;
    struct sim_graph_memory *memory; /* of an allocation node, or with `frees` of a free node */
    CUhostFn host;
    CUstreamCallback callback;
    CUstream callback_stream;
    void *user_data;
};

/* One range that an op touches. */
struct sim_range {
    uint64_t low, high; /* [low, high) */
    bool write;
};
/* At most 2; memory that is not judged is left out. */
unsigned int sim_op_ranges(const struct sim_op *op, struct sim_range range[2]);
void sim_op_apply(const struct sim_op *op);

#endif

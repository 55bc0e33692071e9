#include "op.h"

#include <string.h>

static void *host(uint64_t address)
{
    return (void *)(uintptr_t)address;
}

static size_t span(const struct sim_op *op, size_t pitch)
{
    return op->bytes && op->rows ? pitch * (op->rows - 1) + op->bytes : 0;
}

unsigned int sim_op_ranges(const struct sim_op *op, struct sim_range range[2])
{
    unsigned int n = 0;
    switch (op->kind) {
    case OP_MARK:
    case OP_FILL:
    case OP_COPY:
        if (op->dst_judged && span(op, op->dst_pitch))
            range[n++] = (struct sim_range){op->dst, op->dst + span(op, op->dst_pitch), true};
        if (op->kind == OP_COPY && op->src_judged && span(op, op->src_pitch))
            range[n++] = (struct sim_range){op->src, op->src + span(op, op->src_pitch), false};
        break;
    case OP_CHECK:
        range[n++] = (struct sim_range){op->dst, op->dst + sizeof(uint32_t), true};
        if (op->bytes)
            range[n++] = (struct sim_range){op->src, op->src + op->bytes, false};
        break;
    case OP_SPIN:
    case OP_FAULT:
    case OP_HOST:
        break;
    }
    return n;
}

static void fill(const struct sim_op *op)
{
    for (size_t row = 0; row < op->rows; row++) {
        unsigned char *p = host(op->dst + row * op->dst_pitch);
        if (op->width == 1)
            memset(p, (int)(op->value & 0xff), op->bytes);
        else
            for (size_t i = 0; i < op->bytes; i += op->width)
                memcpy(p + i, &op->value, op->width); /* little-endian, as everything that CUDA runs on */
    }
}

static void check(const struct sim_op *op)
{
    const unsigned char *p = host(op->src);
    uint32_t result, wrong = 0;
    for (size_t i = 0; i < op->bytes; i++)
        wrong += p[i] != (op->value & 0xff);
    memcpy(&result, host(op->dst), sizeof result);
    result += wrong;
    memcpy(host(op->dst), &result, sizeof result);
}

void sim_op_apply(const struct sim_op *op)
{
    if (op->kind == OP_FILL)
        fill(op);
    else if (op->kind == OP_CHECK)
        check(op);
    else if (op->kind == OP_COPY)
        for (size_t row = 0; row < op->rows; row++)
            memmove(host(op->dst + row * op->dst_pitch), host(op->src + row * op->src_pitch), op->bytes);
}

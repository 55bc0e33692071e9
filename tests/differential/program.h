/*
 * A random program: a list of operations on threads, as text that a person can read, cut down and keep.
 *
 *   # anything                 a comment
 *   threads 3
 *   turns                      operations run one at a time, in the order of the file; without it each thread runs its own
 *                              as fast as it can, and only what the others cannot feel
 *   exact                      turns of one thread, and the reported free memory is compared to the byte
 *   pools                      as exact, with pools, that natively keep what the shim gives back: more may be free
 *   about                      turns, and the reported free memory is compared within what the shim says that it wastes
 *   env SIMCUDA_CLOCK=lazy     set before the program runs (by `differ`, natively and under the shim)
 *   0 alloc 5 2097152          thread, operation (ops.def), arguments
 */
#ifndef DIFFERENTIAL_PROGRAM_H
#define DIFFERENTIAL_PROGRAM_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

enum { MAX_THREADS = 8, MAX_ARGS = 4 };

enum where { ANY, TURNS, LOOSE, POOLED, FAULTS, FORKS };

enum op_id {
#define OP(name, weight, arguments, where) OP_##name,
#include "ops.def"
#undef OP
    OPS
};

struct op {
    const char *name;
    unsigned weight;
    const char *arguments;
    enum where where;
};
extern const struct op ops[OPS];

struct line {
    unsigned char thread, op;
    uint64_t arg[MAX_ARGS];
};

struct program {
    unsigned threads;
    bool turns, exact, pools, about; /* the last three: blocks of 2 MiB and more only, whose place does not decide what they take */
    char *env[8];
    size_t envs, count, capacity;
    struct line *lines;
};

void program_add(struct program *p, struct line line);
void program_write(const struct program *p, FILE *out);
/* False, and one line on stderr, if the text is not a program. */
bool program_read(struct program *p, FILE *in, const char *name);
/* The same program for the same arguments. Without forks: for a build whose threads must not be forked. */
void program_generate(struct program *p, uint64_t seed, size_t operations, bool forks, bool turns);
/* Runs it, prints what each operation saw. False if the judge found a hazard or contents were wrong. */
bool program_run(const struct program *p);

#endif

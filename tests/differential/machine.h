/*
 * What runs a program's operations.
 *
 * A program is correct natively, whatever its operations are: each block remembers which work on it came last (struct last),
 * and work on another stream is put behind that first. It looks at memory only after waiting, and never uses what it freed
 * except as an address. So every hazard and every wrong byte is the shim's doing.
 *
 * Where threads take turns they share one world; elsewhere each has its own, and only the primary contexts are common.
 * Nothing is locked: in turns one thread runs at a time.
 */
#ifndef DIFFERENTIAL_MACHINE_H
#define DIFFERENTIAL_MACHINE_H

#include "program.h"
#include "sim.h"
#include "vramshim/cuda_abi.h"

/* LEGACY: the context's legacy stream. OWN + n: the default stream of thread n's own. Below: the context's streams. */
enum { BLOCKS = 24, CONTEXTS = 5, STREAMS = 3, LEGACY = STREAMS, OWN, EVENTS = 2, PINS = 4, CAPTURED = 8 };

struct last {
    int context; /* -1: nothing that is not known to be complete */
    int key;
};

struct block {
    CUdeviceptr ptr; /* 0: no block */
    size_t size;
    int context; /* that it lies in */
    bool pool, filled;
    unsigned char value;
    unsigned long born; /* tells two blocks of one slot apart */
    struct last last;
};

/* 0 and 3: the primary contexts of the first and the last device; 3 and 4 exist with a second device only. */
struct context {
    CUcontext ctx;
    CUdevice device;
    bool exists, alive, failed;
    CUstream streams[STREAMS];
    CUevent events[EVENTS], order;
    CUfunction fill, copy, check, fault;
    struct block result; /* 4 bytes for vram_check */
};

struct world {
    struct block blocks[BLOCKS];
    struct context contexts[CONTEXTS];
    bool peer[CONTEXTS][CONTEXTS]; /* [a][b]: a may use what lies in b */
    void *pins[PINS];
    CUdeviceptr freed; /* last, and nothing was allocated since; 0 otherwise */
    size_t freed_size;
    unsigned long births;
    struct {
        int context, key; /* -1: no capture whose graph may be launched */
        unsigned count;
        struct block *blocks[CAPTURED];
        unsigned long born[CAPTURED];
        unsigned char values[CAPTURED];
    } captured;
};

struct thread {
    unsigned index, pushed;
    struct world *world;
    const struct program *program;
    FILE *out;
    char *text;
    size_t text_size;
    unsigned long wrong;
};

/* What came back. Everything that is seen is compared, addresses excepted. */
void see(struct thread *t, const char *what, uint64_t value);

/* The primary contexts of a world, in a thread that has none current yet; afterwards the first is current. */
void machine_start(struct thread *t);
void machine_step(struct thread *t, const struct line *line);

#endif

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
enum { BLOCKS = 24, CONTEXTS = 5, STREAMS = 3, LEGACY = STREAMS, OWN, EVENTS = 2, CAPTURED = 8, DEVICES = 2 };
enum { PINS = 4, MEMORIES = 8, RANGES = 8, ARRAYS = 6, POOLS = 3, EXTERNALS = 2 };

struct last {
    int context; /* -1: nothing that is not known to be complete */
    int key;
};

enum family {
#define VRAM_FAMILY(name, words, where, ends) FAMILY_##name,
#include "vramshim/families.def"
#undef VRAM_FAMILY
    FAMILIES
};

struct block {
    CUdeviceptr ptr; /* 0: no block */
    size_t size;
    int context;        /* that it lies in, or whose streams work on it */
    enum family family; /* VIRTUAL: a mapping; EXTERNAL: a buffer of another API's memory */
    int device;         /* whose figures it is in */
    bool filled;
    bool uncounted; /* allocated during a capture */
    unsigned char value;
    unsigned memory, range; /* of a mapping */
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

/* What there is beside blocks; `families.c` has the operations on it. All of 0: none. */
struct pin {
    void *ptr, *buffer; /* buffer: for what is registered */
    size_t size;
    int context;
    bool registered;
};

struct memory { /* physical, with its handle: exists while it is held or mapped */
    CUmemGenericAllocationHandle handle;
    size_t size, seen; /* seen: the largest mapping of an import, whose size shows in no other way */
    int device;        /* that it lies on */
    int counted;       /* in whose figures it is */
    unsigned held, mapped;
    bool imported, shareable;
    unsigned long bytes; /* the same number: the same bytes */
};

struct array {
    void *handle;
    bool mipmapped;
    int context;
    size_t bytes;
};

struct world {
    struct block blocks[BLOCKS];
    struct pin pins[PINS];
    struct memory memories[MEMORIES];
    struct {
        CUdeviceptr ptr;
        size_t size;
        bool used;
    } ranges[RANGES];
    struct array arrays[ARRAYS];
    struct {
        CUmemoryPool handle;
        int device;
    } pools[POOLS];
    struct {
        CUexternalMemory handle;
        size_t size;
        int device;
    } externals[EXTERNALS];
    bool dying; /* something was freed in stream order, and perhaps not reached */
    struct {
        unsigned long count, bytes;
    } lost[DEVICES][FAMILIES]; /* of nobody any more, and not freed */
    struct context contexts[CONTEXTS];
    bool peer[CONTEXTS][CONTEXTS]; /* [a][b]: a may use what lies in b */
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
/* What the worlds still hold, a line for each device and family that the shim reports. */
void machine_held(const struct program *p, const struct world *worlds, unsigned count);

/* ---- what the operations in families.c and machine.c have in common ---- */

CUresult got(struct thread *t, const char *what, CUresult r); /* sees it */
void nothing(struct thread *t);
struct block *slot(struct thread *t, uint64_t arg, bool used);
struct context *here(struct thread *t);
struct context *context_of(struct thread *t, uint64_t arg);
int index_of(struct thread *t, const struct context *c);
void enter(const struct context *c);
void leave(void);
int key_of(const struct thread *t, uint64_t arg);
bool has_stream(const struct context *c, int key);
CUstream stream_of(const struct context *c, int key);
bool capturing(const struct context *c, int key);
void allocated(struct thread *t, struct block *b, enum family family, CUdeviceptr ptr, size_t size, int context);
void lose(struct thread *t, enum family family, int device, size_t bytes);

/* In programs that compare free memory beside pools: what was freed in stream order is reached, so that what there is to
 * allocate does not depend on when. */
void settle_pools(struct thread *t);
/* What the pools of the current device keep unused. */
uint64_t idle_in_pools(struct thread *t, uint64_t *ret_reserved);

void families_about_to_end(struct thread *t, int context);
void families_ended(struct thread *t, int context);

#define OP(name, weight, arguments, where) void op_##name(struct thread *t, const uint64_t *arg);
#include "ops.def"
#undef OP

#endif

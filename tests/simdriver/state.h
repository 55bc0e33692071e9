/*
 * The state that all of the simulated driver shares, its one lock, and what a thread has of its own.
 *
 * Every entry runs with the lock held (entry.c takes it); whoever waits for simulated time does so on the condition
 * variable, which gives the lock up; callbacks of the program run without it.
 */
#ifndef SIMDRIVER_STATE_H
#define SIMDRIVER_STATE_H

#include "vramshim/cuda_abi.h"
#include "vclock.h"

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SIM_PAGE ((size_t)2 << 20) /* the unit in which the real driver takes device memory */
#define SIM_GRANULE ((size_t)512)  /* alignment of every device allocation */
#define SIM_MAX_DEVICES 16
#define SIM_MAX_STACK 64 /* contexts pushed on one thread */

struct sim_capture;
struct sim_block;
struct sim_chunk;

struct CUstream_st {
    enum { STREAM_PLAIN, STREAM_LEGACY, STREAM_PER_THREAD } kind;
    CUcontext ctx;
    unsigned int flags;
    int priority;
    uint64_t id;
    uint64_t thread;    /* whose default stream, for STREAM_PER_THREAD */
    uint32_t slot;      /* where its work is counted in every vector clock */
    struct vclock base; /* all that its next item comes after, its own items included */
    struct sim_capture *capture;
    uint32_t capture_index;
    CUstream next; /* in ctx->streams */
};

struct CUevent_st {
    CUcontext ctx;
    unsigned int flags;
    bool recorded;
    struct vclock at;         /* complete when all of this is */
    uint32_t slot, item;      /* the item that stamps its time; item 0: none */
    uint64_t stamp;           /* ns; 0 while unknown */
    uint64_t capture_id;      /* recorded inside this capture; 0: outside any */
    struct vclock capture_at; /* position in that capture, by capture_index */
};

struct CUctx_st {
    uint64_t id;
    int device;
    bool primary;
    bool alive;
    unsigned int retains; /* of a primary context */
    unsigned int flags;
    CUresult error;     /* sticky */
    struct vclock base; /* cuCtxWaitEvent: what all its later work comes after, also on streams made later */
    struct vclock gone, gone_blocking; /* work of destroyed streams, which goes on; the second: of blocking ones */
    CUstream streams;                  /* all of them, the default ones included */
    CUstream legacy;
    struct sim_chunk *chunks; /* where its small blocks live, by rising address */
    struct sim_block *blocks; /* all that ends with it */
    CUcontext *accessors;     /* contexts that enabled peer access to it */
    size_t accessor_count;
    CUcontext next; /* in sim.contexts; a context is never taken out, so that a stale handle is known as such */
};

struct sim_device {
    CUcontext primary; /* made at the first retain and then the same for ever, as measured */
    CUresult error;    /* after a fault no new context can be had, also not after a reset (measured) */
    unsigned int primary_flags;
    uint64_t used;
    CUmemoryPool default_pool, pool, graph_pool;
};

/* Options: config.c reads them once, before the first call does anything. */
struct sim_config {
    int devices;
    uint64_t capacity;
    uint64_t context_cost;
    bool lazy;
    bool judge;
    enum { HAZARDS_COUNT, HAZARDS_PRINT, HAZARDS_ABORT } hazards;
    int version;
    bool native_cost;
    const char *report;
};

struct sim_state {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* work completed, was forced, or the driver's thread has something to do */
    bool initialised;
    bool exited;
    bool forked; /* this is a child of a process that had initialised */
    bool used;   /* some entry was called in this process */
    int self_lookup;
    struct sim_config config;
    struct sim_device device[SIM_MAX_DEVICES];
    CUcontext contexts;
    uint64_t next_id;
    unsigned long refused_frees;
};

extern struct sim_state sim;

struct sim_thread {
    uint64_t serial; /* 0 until the first call */
    CUcontext stack[SIM_MAX_STACK];
    int depth;
    CUstreamCaptureMode capture_mode;
    bool per_thread_default; /* the call in progress came through a _ptsz or _ptds entry */
    bool in_callback;        /* of sim_on_call */
};

extern __thread struct sim_thread sim_thread;

void sim_lock(void); /* also makes sure that the options were read */
void sim_unlock(void);

uint64_t sim_now(void); /* CLOCK_MONOTONIC, ns; never 0 */
void sim_spin(uint64_t ns);
void *sim_xrealloc(void *p, size_t size); /* of a simulator nobody expects to survive without memory: aborts */
void *sim_xcalloc(size_t size);

/* Which handles exist, by kind: a stale or foreign one is answered and not followed. */
enum sim_handle {
    HANDLE_STREAM = 1,
    HANDLE_EVENT,
    HANDLE_MODULE,
    HANDLE_FUNCTION,
    HANDLE_GRAPH,
    HANDLE_EXEC,
    HANDLE_POOL,
    HANDLE_LINK,
    HANDLE_MEMORY,
    HANDLE_ARRAY,
    HANDLE_MIPMAPPED,
    HANDLE_EXTERNAL
};
void sim_handle_add(const void *handle, enum sim_handle kind);
void sim_handle_remove(const void *handle);
bool sim_handle_is(const void *handle, enum sim_handle kind);

#endif

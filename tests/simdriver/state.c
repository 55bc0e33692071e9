#include "state.h"

#include "config.h"
#include "entry.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct sim_state sim = {.lock = PTHREAD_MUTEX_INITIALIZER, .self_lookup = -1};
__thread struct sim_thread sim_thread;

static void before_fork(void)
{
    pthread_mutex_lock(&sim.lock);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&sim.lock);
}

static void after_fork_in_child(void)
{
    /* The real driver is of no use in a child once its parent initialised it: every call answers NOT_INITIALIZED. */
    if (sim.initialised)
        sim.forked = true;
    sim.used = false;
    pthread_mutex_unlock(&sim.lock);
}

static void start(void)
{
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&sim.changed, &attr);
    pthread_condattr_destroy(&attr);
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    sim_config_read();
}

void sim_lock(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, start);
    pthread_mutex_lock(&sim.lock);
}

void sim_unlock(void)
{
    pthread_mutex_unlock(&sim.lock);
}

uint64_t sim_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

void sim_spin(uint64_t ns)
{
    uint64_t end = sim_now() + ns;
    while (sim_now() < end)
        ;
}

void *sim_xrealloc(void *p, size_t size)
{
    void *q = realloc(p, size ? size : 1);
    if (!q) {
        fputs("simdriver: out of host memory\n", stderr);
        abort();
    }
    return q;
}

void *sim_xcalloc(size_t size)
{
    return memset(sim_xrealloc(NULL, size), 0, size);
}

/* An open hash of addresses; a removed key leaves a grave, which keeps longer probes going until the next rehash. */
static struct {
    const void **key;
    unsigned char *kind; /* 0: free, GRAVE: removed */
    size_t size, filled; /* filled counts graves too */
} handles;
#define GRAVE 255

static size_t handle_slot(const void *key)
{
    size_t i = (size_t)(((uintptr_t)key >> 4) * 0x9e3779b97f4a7c15u >> 20) & (handles.size - 1);
    while (handles.kind[i] && (handles.kind[i] == GRAVE || handles.key[i] != key))
        i = (i + 1) & (handles.size - 1);
    return i;
}

void sim_handle_add(const void *handle, enum sim_handle kind)
{
    if ((handles.filled + 1) * 2 > handles.size) {
        const void **key = handles.key;
        unsigned char *old = handles.kind;
        size_t size = handles.size, live = 0;
        for (size_t i = 0; i < size; i++)
            live += old[i] && old[i] != GRAVE;
        handles.size = 256;
        while (handles.size < live * 4)
            handles.size *= 2;
        handles.key = sim_xcalloc(handles.size * sizeof *handles.key);
        handles.kind = sim_xcalloc(handles.size);
        handles.filled = 0;
        for (size_t i = 0; i < size; i++)
            if (old[i] && old[i] != GRAVE)
                sim_handle_add(key[i], old[i]);
        free(key);
        free(old);
    }
    size_t i = handle_slot(handle);
    handles.key[i] = handle;
    handles.kind[i] = (unsigned char)kind;
    handles.filled++;
}

void sim_handle_remove(const void *handle)
{
    if (!handles.size)
        return;
    size_t i = handle_slot(handle);
    if (handles.kind[i])
        handles.kind[i] = GRAVE;
}

bool sim_handle_is(const void *handle, enum sim_handle kind)
{
    return handles.size && handle && handles.kind[handle_slot(handle)] == kind;
}

#include "work.h"

#include "capture.h"
#include "judge.h"
#include "sim.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

struct item {
    uint64_t end;        /* when it completes, ns; meaningless while !known */
    uint64_t ns;         /* how long it takes */
    bool known;          /* not so while it comes after a host function that has not run */
    CUcontext fault;     /* sticky error for this context at completion */
    CUevent event;       /* stamped at completion */
    struct vclock at;    /* kept only while !known */
    struct sim_op *host; /* a host function to run */
};

struct slot {
    bool taken;
    uint32_t submitted, done;
    uint32_t forced;       /* lazy clock: how far a host call wants it to be */
    uint32_t unknown_from; /* first item whose end is unknown; UINT32_MAX: none */
    uint64_t done_end;
    struct item *ring; /* items done+1 .. submitted, item k at ring[k & (size - 1)] */
    uint32_t size;
};

static struct slot *slots;
static uint32_t slot_count;
static struct vclock host; /* what the host has seen complete */
static unsigned long pending;

/* Items with an unknown end, by submission, which is a topological order. */
static struct unknown {
    uint32_t slot, item;
} * unknown;
static size_t unknown_count, unknown_size;
static bool runner_started;

static struct item *item_at(uint32_t slot, uint32_t item)
{
    return &slots[slot].ring[item & (slots[slot].size - 1)];
}

uint32_t sim_work_take_slot(void)
{
    /* A slot is used again only when all of its work was observed: else its new work would pass for ordered. */
    for (uint32_t i = 0; i < slot_count; i++) {
        if (!slots[i].taken && sim_vclock_get(&host, i) >= slots[i].submitted) {
            slots[i].taken = true;
            return i;
        }
    }
    slots = sim_xrealloc(slots, (slot_count + 1) * sizeof *slots);
    slots[slot_count] = (struct slot){.taken = true, .unknown_from = UINT32_MAX};
    return slot_count++;
}

void sim_work_release_slot(uint32_t slot)
{
    slots[slot].taken = false;
}

static void complete(struct slot *s)
{
    struct item *i = &s->ring[++s->done & (s->size - 1)];
    s->done_end = i->end;
    if (i->fault) {
        i->fault->error = CUDA_ERROR_ILLEGAL_ADDRESS;
        sim.device[i->fault->device].error = CUDA_ERROR_ILLEGAL_ADDRESS;
    }
    if (i->event)
        i->event->stamp = i->end;
    pending--;
}

static void poll_slot(struct slot *s, uint64_t now)
{
    while (s->done < s->submitted) {
        struct item *i = &s->ring[(s->done + 1) & (s->size - 1)];
        if (!i->known || (sim.config.lazy ? s->done >= s->forced : i->end > now))
            return;
        complete(s);
    }
}

void sim_work_poll(void)
{
    if (!pending)
        return;
    uint64_t now = sim_now();
    for (uint32_t i = 0; i < slot_count; i++)
        poll_slot(&slots[i], now);
}

static bool done_at(const struct vclock *at, uint64_t now)
{
    for (uint32_t i = 0; i < at->len; i++) {
        if (at->at[i] > slots[i].done) {
            poll_slot(&slots[i], now);
            if (at->at[i] > slots[i].done)
                return false;
        }
    }
    return true;
}

bool sim_work_done(const struct vclock *at)
{
    return done_at(at, sim_now());
}

bool sim_work_observe(const struct vclock *at)
{
    if (!sim_work_done(at))
        return false;
    sim_vclock_join(&host, at);
    return true;
}

bool sim_work_observed(uint32_t slot, uint32_t item)
{
    return sim_vclock_get(&host, slot) >= item;
}

/* When the item is complete, as far as that can be said: what is done already counts as long ago unless it was last. */
static uint64_t end_of(uint32_t slot, uint32_t item)
{
    struct slot *s = &slots[slot];
    if (item > s->done)
        return item_at(slot, item)->end;
    return item == s->done ? s->done_end : 0;
}

uint64_t sim_work_time(const struct vclock *at)
{
    uint64_t end = 0;
    for (uint32_t i = 0; i < at->len; i++)
        if (at->at[i] && at->at[i] < slots[i].unknown_from && end_of(i, at->at[i]) > end)
            end = end_of(i, at->at[i]);
    return end ? end : sim_now();
}

static void wait_until(uint64_t end)
{
    if (end) {
        struct timespec t = {(time_t)(end / 1000000000u), (long)(end % 1000000000u)};
        pthread_cond_timedwait(&sim.changed, &sim.lock, &t);
    } else {
        pthread_cond_wait(&sim.changed, &sim.lock);
    }
}

void sim_work_wait(const struct vclock *what)
{
    struct vclock at = {0}; /* a copy: the stream may be gone when we wake */
    sim_vclock_copy(&at, what);
    if (sim.config.lazy) {
        for (uint32_t i = 0; i < at.len; i++)
            if (slots[i].forced < at.at[i])
                slots[i].forced = at.at[i];
        if (unknown_count)
            pthread_cond_broadcast(&sim.changed);
    }
    for (;;) {
        uint64_t now = sim_now(), last = 0;
        bool guess = false;
        if (done_at(&at, now))
            break;
        for (uint32_t i = 0; i < at.len; i++) {
            if (at.at[i] <= slots[i].done)
                continue;
            if (at.at[i] >= slots[i].unknown_from)
                guess = true;
            else if (item_at(i, at.at[i])->end > last)
                last = item_at(i, at.at[i])->end;
        }
        wait_until(guess ? 0 : last);
    }
    sim_vclock_join(&host, &at);
    sim_vclock_clear(&at);
}

/* All that the next item on the stream comes after. */
static void next_clock(CUstream stream, struct vclock *at)
{
    sim_vclock_join(at, &host);
    sim_vclock_join(at, &stream->base);
    sim_vclock_join(at, &stream->ctx->base);
    sim_work_stream_clock(stream, at);
    if (!(stream->flags & CU_STREAM_NON_BLOCKING) && stream->kind != STREAM_LEGACY && stream->ctx->legacy)
        sim_vclock_join(at, &stream->ctx->legacy->base);
}

void sim_work_stream_clock(CUstream stream, struct vclock *out)
{
    sim_vclock_join(out, &stream->base);
    if (stream->kind != STREAM_LEGACY)
        return;
    /* The legacy stream waits for every stream of its context that is not non-blocking. */
    for (CUstream s = stream->ctx->streams; s; s = s->next)
        if (!(s->flags & CU_STREAM_NON_BLOCKING))
            sim_vclock_join(out, &s->base);
    sim_vclock_join(out, &stream->ctx->gone_blocking);
}

void sim_work_context_clock(CUcontext ctx, struct vclock *out)
{
    for (CUstream s = ctx->streams; s; s = s->next)
        sim_vclock_join(out, &s->base);
    sim_vclock_join(out, &ctx->gone);
}

static bool ends_known(const struct vclock *at)
{
    for (uint32_t i = 0; i < at->len; i++)
        if (at->at[i] >= slots[i].unknown_from)
            return false;
    return true;
}

static void schedule(struct item *i, const struct vclock *at, uint64_t earliest)
{
    uint64_t start = earliest;
    if (!sim.config.lazy)
        for (uint32_t s = 0; s < at->len; s++)
            if (at->at[s] && end_of(s, at->at[s]) > start)
                start = end_of(s, at->at[s]);
    i->end = sim.config.lazy ? start : start + i->ns;
    i->known = true;
}

/* After a host function has run, the ends of what waited for it become known, in submission order. */
static void resolve(void)
{
    size_t kept = 0;
    uint64_t now = sim_now();
    for (uint32_t s = 0; s < slot_count; s++)
        slots[s].unknown_from = UINT32_MAX;
    for (size_t n = 0; n < unknown_count; n++) {
        struct unknown u = unknown[n];
        struct item *i = item_at(u.slot, u.item);
        if (!i->host && ends_known(&i->at)) {
            schedule(i, &i->at, now);
            sim_vclock_clear(&i->at);
        }
        if (!i->known) {
            unknown[kept++] = u;
            if (slots[u.slot].unknown_from > u.item)
                slots[u.slot].unknown_from = u.item;
        }
    }
    unknown_count = kept;
}

/* The first host function that may run now. */
static struct item *runnable(uint32_t *slot, uint32_t *number)
{
    for (size_t n = 0; n < unknown_count; n++) {
        struct item *i = item_at(unknown[n].slot, unknown[n].item);
        if (!i->host || (sim.config.lazy && slots[unknown[n].slot].forced < unknown[n].item))
            continue;
        if (sim_work_done(&i->at)) {
            *slot = unknown[n].slot;
            *number = unknown[n].item;
            return i;
        }
    }
    return NULL;
}

static void *runner(void *arg)
{
    (void)arg;
    sim_lock();
    while (!sim.exited) {
        uint32_t slot, number;
        struct item *i = runnable(&slot, &number);
        if (!i) {
            /* In real time the one that comes next becomes due without anybody saying so. */
            wait_until(unknown_count && !sim.config.lazy ? sim_now() + 200000 : 0);
            continue;
        }
        struct sim_op *op = i->host;
        sim_unlock();
        if (op->host)
            op->host(op->user_data);
        else
            op->callback(op->callback_stream, CUDA_SUCCESS, op->user_data);
        sim_lock();
        free(op);
        i = item_at(slot, number); /* the ring may have moved */
        i->host = NULL;
        i->known = true;
        i->end = sim_now();
        sim_vclock_clear(&i->at);
        resolve();
        pthread_cond_broadcast(&sim.changed);
    }
    sim_unlock();
    return NULL;
}

static void start_runner(void)
{
    if (runner_started)
        return;
    pthread_t thread;
    if (!pthread_create(&thread, NULL, runner, NULL)) {
        pthread_detach(thread);
        runner_started = true;
    }
}

static struct item *append(struct slot *s)
{
    uint32_t live = s->submitted - s->done;
    if (live >= s->size) {
        uint32_t size = s->size ? s->size * 2 : 16;
        struct item *ring = sim_xcalloc(size * sizeof *ring);
        for (uint32_t k = s->done + 1; k <= s->submitted && s->size; k++)
            ring[k & (size - 1)] = s->ring[k & (s->size - 1)];
        free(s->ring);
        s->ring = ring;
        s->size = size;
    }
    struct item *i = &s->ring[++s->submitted & (s->size - 1)];
    *i = (struct item){0};
    pending++;
    return i;
}

uint32_t sim_work_submit(CUstream stream, const struct sim_op *op)
{
    struct vclock at = {0};
    next_clock(stream, &at);
    uint64_t now = sim_now();
    for (uint32_t i = 0; i < at.len; i++)
        poll_slot(&slots[i], now);
    poll_slot(&slots[stream->slot], now);

    struct slot *s = &slots[stream->slot];
    struct item *i = append(s);
    uint32_t number = s->submitted;
    i->ns = op->ns;
    if (op->kind == OP_FAULT)
        i->fault = stream->ctx;
    if (op->kind == OP_HOST || !ends_known(&at)) {
        sim_vclock_copy(&i->at, &at);
        if (unknown_count == unknown_size)
            unknown = sim_xrealloc(unknown, (unknown_size = unknown_size ? unknown_size * 2 : 64) * sizeof *unknown);
        unknown[unknown_count++] = (struct unknown){stream->slot, number};
        if (s->unknown_from > number)
            s->unknown_from = number;
        if (op->kind == OP_HOST) {
            i->host = sim_xcalloc(sizeof *i->host);
            *i->host = *op;
            start_runner();
            pthread_cond_broadcast(&sim.changed);
        }
    } else {
        schedule(i, &at, now);
    }
    if (sim_judge_op(op, &at, stream, number))
        sim_op_apply(op);
    sim_vclock_raise(&at, stream->slot, number);
    sim_vclock_clear(&stream->base);
    stream->base = at;
    return number;
}

CUresult sim_work_enqueue(CUstream stream, const struct sim_op *op)
{
    bool captured;
    CUresult r = sim_capture_op(stream, op, &captured);
    if (!r && !captured)
        sim_work_submit(stream, op);
    return r;
}

void sim_work_event(CUstream stream, CUevent event)
{
    sim_work_forget_event(event);
    uint32_t number = sim_work_submit(stream, &(struct sim_op){.kind = OP_MARK, .what = "event"});
    sim_vclock_copy(&event->at, &stream->base);
    event->slot = stream->slot;
    event->item = number;
    event->stamp = 0;
    event->recorded = true;
    item_at(stream->slot, number)->event = event;
}

void sim_work_forget_event(CUevent event)
{
    if (event->item > slots[event->slot].done && item_at(event->slot, event->item)->event == event)
        item_at(event->slot, event->item)->event = NULL;
    event->item = 0;
}

void sim_work_drop(CUcontext ctx)
{
    struct vclock at = {0};
    sim_work_context_clock(ctx, &at);
    sim_work_wait(&at);
    sim_vclock_clear(&at);
}

__attribute__((visibility("default"))) unsigned long sim_pending(void)
{
    sim_lock();
    sim_work_poll();
    unsigned long n = pending;
    sim_unlock();
    return n;
}

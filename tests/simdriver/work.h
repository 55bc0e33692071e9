/*
 * Work items: what is submitted to streams, in which order it completes, and when. Time is real or, with
 * SIMCUDA_CLOCK=lazy, absent: then nothing completes before a host call waits for it. The state lock covers it all;
 * waiting gives it up.
 *
 * A slot counts the items of one stream. Item k of slot s is complete when done(s) >= k; an item comes after all that
 * its vector clock names. What a host call waited for, or was told is complete, is joined into the host's clock, which
 * every later item comes after; completion in real time alone is not (else finding a race would depend on luck).
 */
#ifndef SIMDRIVER_WORK_H
#define SIMDRIVER_WORK_H

#include "op.h"
#include "state.h"

/* Puts op on the stream, or into the graph that the stream captures. Its data effect is applied at once. */
CUresult sim_work_enqueue(CUstream stream, const struct sim_op *op);
/* The same without asking for captures; returns the item's number in stream->slot. */
uint32_t sim_work_submit(CUstream stream, const struct sim_op *op);

void sim_work_event(CUstream stream, CUevent event); /* records it outside any capture */
void sim_work_forget_event(CUevent event);           /* no item stamps it any more */
/* The latest completion named by the clock, as far as known, else now. */
uint64_t sim_work_time(const struct vclock *at);

/* All that a synchronise of the stream or of the context waits for. *out is joined into. */
void sim_work_stream_clock(CUstream stream, struct vclock *out);
void sim_work_context_clock(CUcontext ctx, struct vclock *out);

void sim_work_poll(void); /* completes what is due */
bool sim_work_done(const struct vclock *at);
bool sim_work_observe(const struct vclock *at); /* as done; true makes it observed by the host */
void sim_work_wait(const struct vclock *at);    /* forces, waits, observes; gives the lock up meanwhile */
void sim_work_drop(CUcontext ctx);              /* a context ends: its work is complete at once */
/* Whether a work item is ordered before everything that will be submitted from now on. */
bool sim_work_observed(uint32_t slot, uint32_t item);

uint32_t sim_work_take_slot(void);
void sim_work_release_slot(uint32_t slot);

#endif

/*
 * Stream capture and its rules of invalidation, as measured, and graphs made by it. All under the
 * state lock.
 */
#ifndef SIMDRIVER_CAPTURE_H
#define SIMDRIVER_CAPTURE_H

#include "op.h"
#include "state.h"

/* Captures that were begun and not ended. */
int sim_capture_count(void);

/* 0, or 900 after invalidating what forbids the call: for entries that capture modes regulate ... */
CUresult sim_capture_check_unsafe(void);
/* ... and for entries that no capture in the context survives, in any mode. */
CUresult sim_capture_check_never(CUcontext ctx);
/* For a call that a capturing stream itself does not survive, and that the legacy stream must not make meanwhile. */
CUresult sim_capture_check_stream(CUstream stream);

/* What happens to an operation on the stream: *captured tells whether it went into a graph instead of to the device. */
CUresult sim_capture_op(CUstream stream, const struct sim_op *op, bool *captured);
CUresult sim_capture_record(CUstream stream, CUevent event, bool *captured);
CUresult sim_capture_wait(CUstream stream, CUevent event, bool *captured);

void sim_capture_end_stream(CUstream stream); /* the stream is destroyed */
void sim_capture_end_context(CUcontext ctx);

#endif

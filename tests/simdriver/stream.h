/* Streams and events: handles, the default streams, recording and waiting. All under the state lock. */
#ifndef SIMDRIVER_STREAM_H
#define SIMDRIVER_STREAM_H

#include "state.h"

/* The stream that a handle means in this call: 0, 0x1, 0x2, or one of cuStreamCreate. NULL: no such stream. */
CUstream sim_stream_resolve(CUstream handle);
void sim_stream_begin_context(CUcontext ctx);
void sim_stream_end_context(CUcontext ctx);

#endif

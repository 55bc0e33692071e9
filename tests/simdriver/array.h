/* CUDA arrays, as far as they take memory: what they hold cannot be reached. All under the state lock. */
#ifndef SIMDRIVER_ARRAY_H
#define SIMDRIVER_ARRAY_H

#include "state.h"

/* Its arrays' handles are none any more; their memory goes with the context's blocks. */
void sim_array_end_context(CUcontext ctx);

#endif

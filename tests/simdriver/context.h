/* Contexts: primary and created, the stack of each thread. All under the state lock. */
#ifndef SIMDRIVER_CONTEXT_H
#define SIMDRIVER_CONTEXT_H

#include "state.h"

CUcontext sim_context_current(void);    /* top of the calling thread's stack; may have ended; NULL: none */
CUresult sim_context_check(void);       /* 0, 201 without a current one, 709 when it has ended */
bool sim_context_exists(CUcontext ctx); /* whether the handle was ever given out */
/* 0, or the answer to a handle that is none or has ended; the latter is a hazard, too. */
CUresult sim_context_use(CUcontext ctx, const char *entry);

#endif

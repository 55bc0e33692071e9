/* Stream-ordered pools. All under the state lock. */
#ifndef SIMDRIVER_POOL_H
#define SIMDRIVER_POOL_H

#include "memory.h"

void sim_pool_forget(struct sim_block *block); /* a block is freed by cuMemFree */
void sim_pool_reclaim(bool wait);              /* gives back what stream-ordered frees have let go of */

#endif

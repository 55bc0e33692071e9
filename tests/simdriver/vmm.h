/* Virtual memory management: what the rest of the driver needs to know of it. Under the state lock. */
#ifndef SIMDRIVER_VMM_H
#define SIMDRIVER_VMM_H

void sim_vmm_reclaim(void); /* gives back memory that only descriptors kept, and which are closed by now */

#endif

/*
 * The equations of heap/account.h, heap/fence.h and cache/cache.h, each worked out again from the ledger alone. To be
 * asked while no call of the heap is under way: then nothing is VRAM_FREEING and nothing on its way to the driver.
 */
#ifndef VRAM_TESTS_INVARIANTS_H
#define VRAM_TESTS_INVARIANTS_H

void invariants(void);

#endif

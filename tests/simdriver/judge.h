/*
 * The judge: finds accesses that are not ordered, accesses to memory that nobody owns, and memory that was taken from
 * its owner. See README.md for the rules. All under the state lock.
 */
#ifndef SIMDRIVER_JUDGE_H
#define SIMDRIVER_JUDGE_H

#include "op.h"
#include "state.h"

/* Judges an item about to be submitted, which comes after all of `at`. False: it must not touch the memory. */
bool sim_judge_op(const struct sim_op *op, const struct vclock *at, CUstream stream, uint32_t item);

/* The driver takes [low, high) back: after a wait, so that nothing later can race with what was before. */
void sim_judge_release(uint64_t low, uint64_t high, bool by_free);

/* Memory that was freed, by the program's word, is allocated anew: what it said holds no longer. */
void sim_judge_renew(uint64_t low, uint64_t high);

void sim_judge_hazard(const char *format, ...) __attribute__((format(printf, 1, 2)));
unsigned int sim_judge_count(void);
const char *sim_judge_text(unsigned int index);

#endif

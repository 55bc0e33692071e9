/*
 * Vector clocks: for each stream slot, up to which of its work items something is known to come after. Used by work.c
 * (what has to complete first) and judge.c (what is ordered); the state lock covers them all.
 */
#ifndef SIMDRIVER_VCLOCK_H
#define SIMDRIVER_VCLOCK_H

#include <stdbool.h>
#include <stdint.h>

struct vclock {
    uint32_t *at; /* NULL while len is 0; slots past the end count as 0 */
    uint32_t len;
};

static inline uint32_t sim_vclock_get(const struct vclock *c, uint32_t slot)
{
    return slot < c->len ? c->at[slot] : 0;
}

void sim_vclock_raise(struct vclock *c, uint32_t slot, uint32_t value); /* at[slot] = max(at[slot], value) */
void sim_vclock_join(struct vclock *c, const struct vclock *other);
void sim_vclock_copy(struct vclock *c, const struct vclock *other);
void sim_vclock_clear(struct vclock *c);

#endif

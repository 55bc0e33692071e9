#include "vclock.h"

#include "state.h"

#include <stdlib.h>
#include <string.h>

static void grow(struct vclock *c, uint32_t len)
{
    if (len <= c->len)
        return;
    uint32_t old = c->len;
    c->at = sim_xrealloc(c->at, len * sizeof *c->at);
    memset(c->at + old, 0, (len - old) * sizeof *c->at);
    c->len = len;
}

void sim_vclock_raise(struct vclock *c, uint32_t slot, uint32_t value)
{
    grow(c, slot + 1);
    if (c->at[slot] < value)
        c->at[slot] = value;
}

void sim_vclock_join(struct vclock *c, const struct vclock *other)
{
    grow(c, other->len);
    for (uint32_t i = 0; i < other->len; i++)
        if (c->at[i] < other->at[i])
            c->at[i] = other->at[i];
}

void sim_vclock_copy(struct vclock *c, const struct vclock *other)
{
    sim_vclock_clear(c);
    sim_vclock_join(c, other);
}

void sim_vclock_clear(struct vclock *c)
{
    free(c->at);
    c->at = NULL;
    c->len = 0;
}

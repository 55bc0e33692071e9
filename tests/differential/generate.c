#include "program.h"

#include <stdlib.h>
#include <string.h>

static uint64_t state;

static uint64_t draw(void)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static unsigned below(unsigned n) { return (unsigned)((draw() >> 20) % n); }

/* A few sizes come again and again, as in programs; the others never do. */
static uint64_t draw_size(bool large_only)
{
    static const unsigned usual[] = {1, 512, 1000, 4096, 100000, 1 << 20, 2 << 20, 3 << 20, 8 << 20};
    static const unsigned large[] = {2 << 20, 3 << 20, 4 << 20, (4 << 20) + 512, 6 << 20};
    if (large_only)
        return below(3) ? large[below(5)] : (2 << 20) + below(6 << 20);
    switch (below(4)) {
    case 0: return 1 + below(5000);
    case 1: return 1 + below(3 << 20);
    default: return usual[below(9)];
    }
}

static uint64_t draw_argument(char kind, bool large_only)
{
    switch (kind) {
    case 'b': return below(large_only ? 24 : 16);
    case 'z': return draw_size(large_only);
    case 'c': return below(5);
    case 's': return below(5);
    case 'e': return below(2);
    case 'm': return below(3);
    default: return below(256);
    }
}

static void add(struct program *p, unsigned thread, enum op_id op)
{
    struct line l = {.thread = (unsigned char)thread, .op = (unsigned char)op};
    for (size_t k = 0; k < strlen(ops[op].arguments); k++)
        l.arg[k] = draw_argument(ops[op].arguments[k], p->exact || p->pools || p->about);
    program_add(p, l);
}

static bool fits(const struct program *p, enum where where, bool forks)
{
    switch (where) {
    case TURNS: return p->turns;
    case FORKS: return p->turns && forks;
    case LOOSE: return !p->exact && !p->pools && !p->about;
    case POOLED: return !p->exact && !p->about;
    case FAULTS: return p->turns && !p->exact && !p->pools && !p->about;
    default: return true;
    }
}

static void environment(struct program *p, const char *text)
{
    if (!(p->env[p->envs++] = strdup(text)))
        abort();
}

void program_generate(struct program *p, uint64_t seed, size_t operations, bool forks, bool turns)
{
    unsigned sum = 0;
    *p = (struct program){0};
    state = (seed + 1) * 0x9E3779B97F4A7C15u;
    for (int i = 0; i < 8; i++)
        draw();
    p->exact = turns && seed % 4 == 0;
    p->turns = turns && seed % 4 != 1;
    p->about = turns && seed % 8 == 2;
    p->pools = turns && seed % 8 == 7;
    p->threads = p->exact || p->pools ? 1 : p->turns ? 1 + below(4) : 2 + below(3);
    if (below(2))
        environment(p, "SIMCUDA_CLOCK=lazy");
    if (p->exact || p->pools) {
        environment(p, "VRAMSHIM_WASTE=0");
        environment(p, "SIMCUDA_CAPACITY=64M");
    }
    if (below(2))
        environment(p, "SIMCUDA_DEVICES=2");
    if (below(2))
        environment(p, "VRAMSHIM_SLACK=1");
    if (!below(3))
        environment(p, "VRAMSHIM_HOST_CACHE=16M");
    if (!below(3))
        environment(p, "VRAMSHIM_VIRTUAL_CACHE=16M");
    for (enum op_id op = 0; op < OPS; op++)
        sum += fits(p, ops[op].where, forks) ? ops[op].weight : 0;
    while (p->count < operations) {
        unsigned at = below(sum);
        enum op_id op = 0;
        for (;; op++) {
            unsigned weight = fits(p, ops[op].where, forks) ? ops[op].weight : 0;
            if (at < weight)
                break;
            at -= weight;
        }
        add(p, below(p->threads), op);
    }
}

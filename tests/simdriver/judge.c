#include "judge.h"

#include "graphmem.h"
#include "memory.h"
#include "sim.h"
#include "work.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Accesses that something submitted later might still race with. */
struct access {
    struct sim_range range;
    uint32_t slot, item;
    uint64_t stream; /* id, for the text */
    const char *what;
};
static struct access *accesses;
static size_t access_count, access_size;

/* What the program owns, by its own word; sorted, disjoint. A dead note is memory that it has freed. */
struct note {
    uint64_t low, high;
    bool live;
};
static struct note *notes;
static size_t note_count, note_size;

static char **hazards;
static unsigned int hazard_count, hazard_size;
#define MAX_HAZARDS 10000

void sim_judge_hazard(const char *format, ...)
{
    char text[400];
    va_list ap;
    if (!sim.config.judge)
        return;
    va_start(ap, format);
    vsnprintf(text, sizeof text, format, ap);
    va_end(ap);
    for (unsigned int i = hazard_count; i > 0 && i + 50 > hazard_count; i--)
        if (!strcmp(hazards[i - 1], text))
            return; /* the same thing in a loop is said once */
    if (hazard_count < MAX_HAZARDS) {
        if (hazard_count == hazard_size)
            hazards = sim_xrealloc(hazards, (hazard_size = hazard_size ? hazard_size * 2 : 16) * sizeof *hazards);
        hazards[hazard_count] = sim_xrealloc(NULL, strlen(text) + 1);
        strcpy(hazards[hazard_count++], text);
    }
    if (sim.config.hazards != HAZARDS_COUNT)
        fprintf(stderr, "simdriver: hazard: %s\n", text);
    if (sim.config.hazards == HAZARDS_ABORT)
        abort();
}

unsigned int sim_judge_count(void)
{
    return hazard_count;
}

const char *sim_judge_text(unsigned int index)
{
    return index < hazard_count ? hazards[index] : NULL;
}

/* Index of the first note that ends above low. */
static size_t note_at(uint64_t low)
{
    size_t a = 0, b = note_count;
    while (a < b) {
        size_t m = (a + b) / 2;
        if (notes[m].high > low)
            b = m;
        else
            a = m + 1;
    }
    return a;
}

static void note_remove(size_t index)
{
    memmove(&notes[index], &notes[index + 1], (--note_count - index) * sizeof *notes);
}

static void note_insert(size_t index, struct note note)
{
    if (note_count == note_size)
        notes = sim_xrealloc(notes, (note_size = note_size ? note_size * 2 : 64) * sizeof *notes);
    memmove(&notes[index + 1], &notes[index], (note_count++ - index) * sizeof *notes);
    notes[index] = note;
}

static const char *mode(const struct sim_range *r)
{
    return r->write ? "writes" : "reads";
}

/* Drops what can no longer race: all that the host has seen complete. */
static void prune(void)
{
    size_t kept = 0;
    for (size_t i = 0; i < access_count; i++)
        if (!sim_work_observed(accesses[i].slot, accesses[i].item))
            accesses[kept++] = accesses[i];
    access_count = kept;
}

static void judge_order(const struct access *new, const struct vclock *at)
{
    size_t kept = 0;
    for (size_t i = 0; i < access_count; i++) {
        struct access *old = &accesses[i];
        bool overlap = old->range.low < new->range.high &&new->range.low < old->range.high;
        bool ordered = sim_vclock_get(at, old->slot) >= old->item || (old->slot == new->slot && old->item == new->item);
        if (overlap && !ordered && (old->range.write || new->range.write)) {
            sim_judge_hazard("%s on stream %llu %s 0x%llx..0x%llx, unordered with %s on stream %llu that %s "
                             "0x%llx..0x%llx",
                             new->what, (unsigned long long)new->stream, mode(&new->range),
                             (unsigned long long)new->range.low, (unsigned long long)new->range.high, old->what,
                             (unsigned long long)old->stream, mode(&old->range), (unsigned long long)old->range.low,
                             (unsigned long long)old->range.high);
        }
        /* Whoever is ordered after the new access is so after an old one inside it, too: the new one stands for both.
         */
        bool covered = ordered && new->range.low <= old->range.low && old->range.high <= new->range.high &&
                       (new->range.write || !old->range.write);
        if (!covered)
            accesses[kept++] = *old;
    }
    access_count = kept;
}

static bool judge_owner(const struct access *new, bool frees)
{
    for (size_t i = note_at(new->range.low); !frees && i < note_count && notes[i].low < new->range.high; i++) {
        if (!notes[i].live) {
            sim_judge_hazard("%s on stream %llu %s 0x%llx..0x%llx, which the program has freed", new->what,
                             (unsigned long long)new->stream, mode(&new->range), (unsigned long long)new->range.low,
                             (unsigned long long)new->range.high);
            break;
        }
    }
    if (sim_memory_covers(new->range.low, new->range.high)) {
        struct sim_block *b = sim_memory_find(new->range.low);
        if (b && b->kind == MEMORY_GRAPH && !sim_graph_memory_live(b))
            sim_judge_hazard("%s on stream %llu %s 0x%llx..0x%llx, which no launch of its graph has allocated",
                             new->what, (unsigned long long)new->stream, mode(&new->range),
                             (unsigned long long)new->range.low, (unsigned long long)new->range.high);
        return true;
    }
    sim_judge_hazard("%s on stream %llu %s 0x%llx..0x%llx, which is not allocated", new->what,
                     (unsigned long long)new->stream, mode(&new->range), (unsigned long long)new->range.low,
                     (unsigned long long)new->range.high);
    return sim_memory_reachable(new->range.low, new->range.high);
}

bool sim_judge_op(const struct sim_op *op, const struct vclock *at, CUstream stream, uint32_t item)
{
    struct sim_range range[2];
    unsigned int n = sim_op_ranges(op, range);
    bool ok = true;
    for (unsigned int i = 0; i < n; i++) {
        struct access new = {range[i], stream->slot, item, stream->id, op->what};
        if (!sim.config.judge) {
            ok &= sim_memory_reachable(range[i].low, range[i].high);
            continue;
        }
        ok &= judge_owner(&new, op->frees);
        static size_t prune_at = 64;
        if (access_count >= prune_at) {
            prune();
            prune_at = access_count * 2 < 64 ? 64 : access_count * 2;
        }
        judge_order(&new, at);
        if (access_count == access_size)
            accesses = sim_xrealloc(accesses, (access_size = access_size ? access_size * 2 : 64) * sizeof *accesses);
        accesses[access_count++] = new;
    }
    return ok;
}

void sim_judge_renew(uint64_t low, uint64_t high)
{
    for (size_t i = note_at(low); i < note_count && notes[i].low < high;) {
        if (notes[i].live)
            i++;
        else
            note_remove(i);
    }
}

void sim_judge_release(uint64_t low, uint64_t high, bool by_free)
{
    for (size_t i = note_at(low); i < note_count && notes[i].low < high;) {
        if (notes[i].live && by_free)
            sim_judge_hazard("the driver was told to free 0x%llx..0x%llx, where the program still uses 0x%llx..0x%llx",
                             (unsigned long long)low, (unsigned long long)high, (unsigned long long)notes[i].low,
                             (unsigned long long)notes[i].high);
        note_remove(i);
    }
    size_t kept = 0;
    for (size_t i = 0; i < access_count; i++)
        if (accesses[i].range.high <= low || accesses[i].range.low >= high)
            accesses[kept++] = accesses[i];
    access_count = kept;
}

#define CONTROL __attribute__((visibility("default")))

CONTROL void sim_note_alloc(uint64_t ptr, size_t size)
{
    sim_lock();
    uint64_t high = ptr + size;
    for (size_t i = note_at(ptr); i < note_count && notes[i].low < high;) {
        if (notes[i].live)
            sim_judge_hazard("0x%llx..0x%llx was handed out while 0x%llx..0x%llx is in use", (unsigned long long)ptr,
                             (unsigned long long)high, (unsigned long long)notes[i].low,
                             (unsigned long long)notes[i].high);
        struct note old = notes[i];
        note_remove(i);
        if (old.live)
            continue; /* said once; what follows from it is not worth a line */
        /* Of freed memory, what lies outside the new block stays freed. */
        if (old.high > high)
            note_insert(i, (struct note){high, old.high, false});
        if (old.low < ptr)
            note_insert(i++, (struct note){old.low, ptr, false});
    }
    if (size) {
        if (!sim_memory_covers(ptr, high))
            sim_judge_hazard("0x%llx..0x%llx was handed out, which is not allocated", (unsigned long long)ptr,
                             (unsigned long long)high);
        note_insert(note_at(ptr), (struct note){ptr, high, true});
    }
    sim_unlock();
}

CONTROL void sim_note_free(uint64_t ptr)
{
    sim_lock();
    size_t i = note_at(ptr);
    if (i < note_count && notes[i].low == ptr && notes[i].live)
        notes[i].live = false;
    sim_unlock();
}

CONTROL unsigned int sim_hazards(void)
{
    sim_lock();
    unsigned int n = hazard_count;
    sim_unlock();
    return n;
}

CONTROL const char *sim_hazard_text(unsigned int index)
{
    sim_lock();
    const char *text = sim_judge_text(index);
    sim_unlock();
    return text;
}

CONTROL void sim_clear_hazards(void)
{
    sim_lock();
    for (unsigned int i = 0; i < hazard_count; i++)
        free(hazards[i]);
    hazard_count = 0;
    sim_unlock();
}

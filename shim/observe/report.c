#include "observe/report.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/cancel.h"
#include "base/clock.h"
#include "base/compiler.h"
#include "base/elf.h"
#include "base/proc.h"
#include "base/sandbox.h"
#include "base/say.h"
#include "base/text.h"
#include "config/options.h"
#include "heap/heap.h"
#include "observe/file.h"

enum { LARGEST = 5, PATIENCE_NS = 1000000000 };

static atomic_uintptr_t writer; /* the thread that writes the report, or has written it; 0: none yet */
static atomic_bool over;  /* it is written, or takes too long */
static struct vram_heap_summary summary; /* used by the writer alone, as is all that follows */
static char buffer[64 * 1024];

static void (*last_lines)(struct vram_text *t); /* written once, at load */

static unsigned long long ull(uint64_t n) { return n; }

/* "train.so+0x1234": what addr2line takes. */
static void place(struct vram_text *t, const struct vram_site *site)
{
    vram_text_add(t, "thread %u", site->tid);
    const struct link_map *map = site->caller ? vram_elf_containing(site->caller) : NULL;
    if (!map)
        return;
    const char *name = map->l_name && *map->l_name ? map->l_name : program_invocation_short_name;
    const char *slash = strrchr(name, '/');
    vram_text_add(t, ", called from ");
    vram_text_name(t, slash ? slash + 1 : name);
    vram_text_add(t, "+0x%llx", ull(site->caller - map->l_addr));
}

static void line_amount(struct vram_text *t, const char *label, uint64_t blocks, uint64_t bytes)
{
    vram_text_add(t, "    %-24s", label);
    vram_text_bytes(t, bytes);
    vram_text_add(t, " in ");
    vram_text_count(t, blocks, "block");
    vram_text_add(t, "\n");
}

/* What the figures say of all families that live in one place. */
static struct vram_figures sum_of(const struct vram_account *a, enum vram_where where)
{
    struct vram_figures sum = {0};
    for (int f = 0; f < VRAM_FAMILIES; f++) {
        if (vram_family_traits[f].where != where)
            continue;
        sum.bytes += a->figures[f].bytes;
        sum.count += a->figures[f].count;
        sum.total_count += a->figures[f].total_count;
        sum.ended_bytes += a->figures[f].ended_bytes;
        sum.ended_count += a->figures[f].ended_count;
    }
    return sum;
}

static void leaks(struct vram_text *t, int device, const struct vram_account *a, uint64_t now)
{
    static struct vram_held largest[LARGEST + 1]; /* the last is not shown, but tells what follows */
    struct vram_figures sum = sum_of(a, VRAM_WHERE_DEVICE);
    line_amount(t, "never freed", sum.count, sum.bytes);
    unsigned known = vram_heap_largest(device, largest, LARGEST + 1), n = known < LARGEST ? known : LARGEST;
    for (unsigned i = 0; i < n; i++) {
        const struct vram_held *h = &largest[i];
        vram_text_add(t, "      ");
        vram_text_bytes(t, h->size);
        bool by_handle = h->family == VRAM_VIRTUAL || h->family == VRAM_ARRAY;
        vram_text_add(t, by_handle ? " by handle 0x%llx, " : " at 0x%llx, ", ull(h->name));
        if (h->family != VRAM_PLAIN)
            vram_text_add(t, "%s, ", vram_family_traits[h->family].words);
        vram_text_duration(t, now - h->born.time);
        vram_text_add(t, " old, ");
        place(t, &h->born);
        vram_text_add(t, "\n");
    }
    if (sum.count > n && n)
        vram_text_add(t, "      and %llu %s\n", ull(sum.count - n),
                      known > n && largest[n].size < largest[n - 1].size ? "smaller" : "more");
    if (sum.ended_count)
        line_amount(t, "ended with its context", sum.ended_count, sum.ended_bytes);
}

/* A line for each family that was in use, where there is more to say than that it was cuMemAlloc. */
static void families(struct vram_text *t, const struct vram_account *a)
{
    bool others = false;
    for (int f = 0; f < VRAM_FAMILIES; f++)
        others |= f != VRAM_PLAIN && a->figures[f].total_count;
    for (int f = 0; others && f < VRAM_FAMILIES; f++) {
        const struct vram_figures *of = &a->figures[f];
        if (!of->total_count)
            continue;
        vram_text_add(t, "    %-24s", vram_family_traits[f].words);
        vram_text_bytes(t, of->bytes);
        vram_text_add(t, " in %llu at exit, peak ", ull(of->count));
        vram_text_bytes(t, of->peak_bytes);
        vram_text_add(t, "; in all ");
        vram_text_bytes(t, of->total_bytes);
        vram_text_add(t, " in %llu\n", ull(of->total_count));
    }
}

static void cache(struct vram_text *t, const struct vram_account *a)
{
    vram_text_add(t, "    %-24s", "peak");
    vram_text_bytes(t, a->peak_live_bytes);
    vram_text_add(t, " in use by the program, ");
    vram_text_bytes(t, a->peak_held_bytes);
    vram_text_add(t, " held from the driver\n");
    if (!vram_options->cache) {
        vram_text_add(t, "    %-24soff (VRAMSHIM_CACHE=0); %llu allocations, %llu frees\n", "cache", ull(a->allocs),
                      ull(a->frees));
        return;
    }
    line_amount(t, "kept at exit", a->cached_blocks, a->cached_bytes);
    uint64_t tenths = a->allocs ? (a->hits * 1000 + a->allocs / 2) / a->allocs : 0;
    vram_text_add(t, "    %-24s%llu of %llu allocations (%llu.%llu%%)\n", "served from the cache", ull(a->hits),
                  ull(a->allocs), ull(tenths / 10), ull(tenths % 10));
    uint64_t program = a->allocs + a->frees, driver = a->driver_allocs + a->driver_frees;
    vram_text_add(t, "    %-24s%llu of %llu\n", "driver calls saved", ull(program > driver ? program - driver : 0),
                  ull(program));
    if (a->peak_wasted_bytes) {
        vram_text_add(t, "    %-24s", "peak of larger fits");
        vram_text_bytes(t, a->peak_wasted_bytes);
        vram_text_add(t, " beyond what fresh blocks would have taken\n");
    }
    if (a->decayed.blocks)
        line_amount(t, "given back when unused", a->decayed.blocks, a->decayed.bytes);
    if (a->evicted.blocks) {
        line_amount(t, "given back meanwhile", a->evicted.blocks, a->evicted.bytes);
        vram_text_add(t, "      to hold at most %u.%02u times what was in use at most (VRAMSHIM_SLACK)\n",
                      vram_options->slack / 10000, vram_options->slack % 10000 / 100);
    }
    if (a->oom_rescued || a->oom_failed)
        vram_text_add(t, "    %-24s%llu rescued, %llu failed\n", "out of memory", ull(a->oom_rescued),
                      ull(a->oom_failed));
}

static void double_frees(struct vram_text *t, uint64_t count)
{
    if (!count)
        return;
    vram_text_add(t, "  double frees: %llu, each refused; the block stayed intact\n", ull(count));
    for (unsigned i = 0; i < summary.double_frees_kept; i++) {
        const struct vram_double_free *d = &summary.double_frees[i];
        vram_text_add(t, "    0x%llx (", ull(d->addr));
        vram_text_bytes(t, d->size);
        vram_text_add(t, "): freed by ");
        place(t, &d->first);
        vram_text_add(t, "; again by ");
        place(t, &d->second);
        vram_text_add(t, "\n");
    }
}

/* The caches of other families, where one is in use. */
static void kept(struct vram_text *t, const char *of, const struct vram_kept *k)
{
    if (!k->asked)
        return;
    vram_text_add(t, "  %s\n    %-24s", of, "kept at exit");
    vram_text_bytes(t, k->bytes);
    vram_text_add(t, "\n    %-24s%llu of %llu allocations\n", "served by what was kept", ull(k->hits), ull(k->asked));
}

static void compose(struct vram_text *t, bool exact)
{
    uint64_t now = vram_now(), leaked = 0, blocks = 0, doubles = 0;
    for (int d = 0; d < VRAM_DEVICES_MAX; d++) {
        struct vram_figures sum = sum_of(&summary.devices[d], VRAM_WHERE_DEVICE);
        leaked += sum.bytes;
        blocks += sum.count;
        doubles += summary.devices[d].double_frees;
    }
    vram_text_add(t, "vramshim: LEAK SUMMARY of ");
    vram_text_name(t, program_invocation_short_name);
    vram_text_add(t, " (pid %d): ", (int)vram_proc_pid());
    if (blocks) {
        vram_text_bytes(t, leaked);
        vram_text_add(t, " in ");
        vram_text_count(t, blocks, "block");
        vram_text_add(t, " never freed\n");
    } else {
        vram_text_add(t, "nothing leaked\n");
    }
    if (!exact)
        vram_text_add(t, "  (a thread was in the middle of an allocation: figures may be off by it)\n");
    for (int d = 0; d < VRAM_DEVICES_MAX; d++) {
        const struct vram_account *a = &summary.devices[d];
        if (!a->used)
            continue;
        vram_text_add(t, "  device %d\n", d);
        leaks(t, d, a, now);
        families(t, a);
        if (a->allocs)
            cache(t, a);
    }
    kept(t, "pinned host memory", &summary.host);
    kept(t, "virtual memory", &summary.virtual_memory);
    double_frees(t, doubles);
    if (last_lines)
        last_lines(t);
}

/* A number that no other thread has, without a system call. */
static uintptr_t this_thread(void)
{
    static VRAM_TLS char of_its_own;
    return (uintptr_t)&of_its_own;
}

bool vram_report_is_due(void)
{
    if (!vram_proc_is_recorded() || !vram_heap_used() || vram_options->report.kind == VRAM_OUTPUT_NONE ||
        atomic_load(&over))
        return false;
    return atomic_load(&writer) != this_thread(); /* else a signal handler leaves, in the middle of the writing */
}

/* Whoever goes on from here ends the process, and would cut what another thread is writing. */
static void wait_for_writer(void)
{
    const struct timespec tick = {0, 1000000};
    uint64_t until = vram_now() + PATIENCE_NS;
    while (!atomic_load(&over) && vram_now() < until)
        nanosleep(&tick, NULL);
}

static void write_report(void)
{
    struct vram_text t = VRAM_TEXT(buffer);
    compose(&t, vram_heap_summarise(&summary));

    if (vram_options->report.kind == VRAM_OUTPUT_PATH && vram_sandboxed()) {
        vram_say("this program has sandboxed itself, so no file is opened: the report for %s follows here",
                 vram_options->report.pattern);
    } else if (vram_options->report.kind != VRAM_OUTPUT_STDERR) {
        static struct vram_file file;
        if (vram_file_append(&file, &vram_options->report, t.buf, t.len) == 0)
            return;
        vram_say("cannot write the report to %s (%s)%s; it follows here", file.path, file.why,
                 file.begun ? ", only its beginning is there" : "");
    }
    vram_say_raw(t.buf, t.len);
}

void vram_report_write(void)
{
    uintptr_t nobody = 0;
    int saved = errno;
    if (!vram_report_is_due())
        return;
    int cancelling = vram_cancel_hold(); /* a writer that went would be waited for */
    if (atomic_compare_exchange_strong(&writer, &nobody, this_thread()))
        write_report();
    else
        wait_for_writer();
    atomic_store(&over, true);
    vram_cancel_give_back(cancelling);
    errno = saved;
}

void vram_report_ends_with(void (*add)(struct vram_text *t)) { last_lines = add; }

void vram_report_forget(void)
{
    atomic_store(&writer, 0);
    atomic_store(&over, false);
}

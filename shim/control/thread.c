#include "control/thread.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/activity.h"
#include "base/cancel.h"
#include "base/clock.h"
#include "base/compiler.h"
#include "base/futex.h"
#include "base/proc.h"
#include "base/sandbox.h"
#include "base/say.h"
#include "base/text.h"
#include "base/thread.h"
#include "config/options.h"
#include "control/disposition.h"
#include "control/drain.h"
#include "control/last.h"
#include "driver/capture.h"
#include "driver/driver.h"
#include "heap/heap.h"
#include "heap/host.h"
#include "heap/pools.h"
#include "heap/reclaim.h"
#include "heap/view.h"
#include "heap/virtual.h"
#include "observe/report.h"
#include "observe/trace.h"

enum {
    LAST_CALL_MS = 200,
    ALONE_NS = 50000000, /* between two looks whether the program's last thread is gone, */
    VANISHED_NS = 1000000000, /* and whether its main thread is */
    DRAIN_MS = 100, /* for Python to let us in; longer, and the flush goes ahead without */
};

int vram_control_atfork;
bool vram_activity;
static atomic_uint requests; /* made so far; a futex */
static unsigned served;      /* of them; the thread's own */
static atomic_bool heard;   /* a request was made from outside, ever */
static atomic_bool asked;   /* by somebody from outside, since the last flush: the frameworks' caches are meant as well */
static atomic_bool started; /* somebody starts, or has started, the thread */
static atomic_bool running; /* requests are served */

/* Why it flushes; at work on the thread only. */
static bool by_idleness;

static void begin_line(struct vram_text *t)
{
    if (by_idleness) {
        vram_text_add(t, "flush (idle for ");
        vram_text_duration(t, vram_options->idle_drain * 1000000);
    } else {
        vram_text_add(t, "flush (SIG");
        vram_signal_format(t, vram_options->signal);
    }
    vram_text_add(t, "): ");
}

static void amount(struct vram_text *t, uint64_t blocks, uint64_t bytes)
{
    vram_text_count(t, blocks, "block");
    vram_text_add(t, " (");
    vram_text_bytes(t, bytes);
    vram_text_add(t, ")");
}

/* Each signal is answered; what happens by idleness, when it does not happen all the time. Whether it was told. */
#define ANSWER(kind, ...) (by_idleness ? vram_notice(kind, __VA_ARGS__) : (vram_say(__VA_ARGS__), true))

/* "torch 1234" and "CuPy !what went wrong", a line each, as a drain leaves them. */
static void tell_drained(struct vram_text *t, const struct vram_drained *drained)
{
    char parts[VRAM_DRAIN_TEXT], *save = NULL;
    unsigned told = 0;
    memcpy(parts, drained->parts, sizeof(parts));
    for (char *part = strtok_r(parts, "\n", &save); part; part = strtok_r(NULL, "\n", &save)) {
        char *given = strchr(part, ' ');
        if (!given)
            continue;
        *given++ = 0;
        if (*given == '!') {
            ANSWER(VRAM_NOTICE_NO_DRAIN, "cannot drain %s: %s", part, given + 1);
            continue;
        }
        uint64_t bytes = strtoull(given, NULL, 10);
        if (bytes == 0)
            continue;
        vram_text_add(t, told++ ? ", %s " : "%s gave up ", part);
        vram_text_bytes(t, bytes);
    }
    if (!told)
        return;
    vram_text_add(t, " (Python let us in after ");
    vram_text_duration(t, drained->gil_ns);
    vram_text_add(t, "); ");
}

/* What is in use on each device of the program's, and by whom. */
static void tell_view(void)
{
    for (int device = 0; device < VRAM_DEVICES_MAX; device++) {
        char buf[768];
        struct vram_text t = VRAM_TEXT(buf);
        struct vram_device_view v;
        if (!vram_view(device, &v))
            continue;
        vram_text_add(&t, "device %d: ", device);
        vram_text_bytes(&t, v.used);
        vram_text_add(&t, " of ");
        vram_text_bytes(&t, v.total);
        vram_text_add(&t, " in use");
        for (unsigned i = 0; i < v.count; i++) {
            vram_text_add(&t, i ? ", " : ": ");
            vram_text_bytes(&t, v.parts[i].bytes);
            vram_text_add(&t, " %s", v.parts[i].words);
        }
        if (v.used > v.named) {
            vram_text_add(&t, v.count ? ", " : ": ");
            vram_text_bytes(&t, v.used - v.named);
            vram_text_add(&t, " since then by the driver and other programs");
        }
        if (v.managed) {
            vram_text_add(&t, " (managed, here or on the host: ");
            vram_text_bytes(&t, v.managed);
            vram_text_add(&t, ")");
        }
        vram_say("%s", buf);
    }
}

/* What a flush gave back beside blocks, in bytes. */
struct beside {
    uint64_t pools, host, virtual_memory;
};

static bool tell(const struct vram_reclaimed *done, const struct beside *beside, uint64_t ns,
                 const struct vram_drained *drained, bool draining)
{
    char buf[512];
    struct vram_text t = VRAM_TEXT(buf);
    begin_line(&t);
    if (drained)
        tell_drained(&t, drained);
    if (done->blocks == 0 && done->kept_blocks == 0 && beside->pools == 0 && beside->host == 0 &&
        beside->virtual_memory == 0) {
        vram_text_add(&t, "nothing was kept just then, so there was nothing to give back");
    } else {
        vram_text_add(&t, "gave ");
        amount(&t, done->blocks, done->bytes);
        if (beside->pools) {
            vram_text_add(&t, " and ");
            vram_text_bytes(&t, beside->pools);
            vram_text_add(&t, " of the driver's own pools");
        }
        if (beside->virtual_memory) {
            vram_text_add(&t, " and ");
            vram_text_bytes(&t, beside->virtual_memory);
            vram_text_add(&t, " of virtual memory");
        }
        if (beside->host) {
            vram_text_add(&t, " and ");
            vram_text_bytes(&t, beside->host);
            vram_text_add(&t, " of pinned host memory");
        }
        vram_text_add(&t, " back to the driver in ");
        vram_text_duration(&t, ns);
        vram_text_add(&t, ", kept ");
        amount(&t, done->kept_blocks, done->kept_bytes);
        if (done->refused != CUDA_SUCCESS)
            vram_text_add(&t, ": the driver refused with error %d", done->refused);
        else if (done->kept_blocks)
            vram_text_add(&t, vram_heap_is_exiting() ? ": the program is ending" : ", freed by the program meanwhile");
    }
    if (draining)
        vram_text_add(&t, "; Python is busy, its frameworks' caches follow when it lets us in");
    return ANSWER(VRAM_NOTICE_IDLE, "%s", buf);
}

static void await_captures(void)
{
    char buf[160];
    struct vram_text t = VRAM_TEXT(buf);
    if (!vram_capture_active())
        return;
    begin_line(&t);
    vram_text_add(&t, "a CUDA graph is being captured; it waits for the end of the capture");
    (void)ANSWER(VRAM_NOTICE_IDLE, "%s", buf);
    while (!vram_capture_wait_none(1000) && !vram_heap_is_exiting())
        ;
}

static void flush(const struct vram_drained *drained, bool draining)
{
    struct vram_reclaimed total = {0};
    struct beside beside = {0};
    uint64_t start = vram_now();
    vram_driver_look_again();
    for (;;) {
        struct vram_reclaimed now = vram_reclaim_all();
        total.blocks += now.blocks;
        total.bytes += now.bytes;
        total.kept_blocks = now.kept_blocks;
        total.kept_bytes = now.kept_bytes;
        total.refused = now.refused;
        beside.pools += vram_pools_trim(VRAM_EVERY_DEVICE, &now.capture);
        beside.host += vram_host_trim(NULL);
        beside.virtual_memory += vram_virtual_trim(VRAM_EVERY_DEVICE);
        if (!now.capture || vram_heap_is_exiting())
            break;
        await_captures();
    }
    if (tell(&total, &beside, vram_now() - start, drained, draining))
        tell_view();
    vram_trace_write();
}

static unsigned requests_so_far(void) { return atomic_load(&requests); }

static bool take_asked(void) { return atomic_exchange(&asked, false); }

static void post(void)
{
    atomic_fetch_add(&requests, 1);
    vram_futex_wake(&requests);
}

static void open_to_signals(void)
{
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

/* As the last thread of the program would have: with the program's exit functions, and open to signals. */
static void end_process(void)
{
    open_to_signals();
    exit(0);
}

/* As the last thread of a program whose main thread has ended by the plain system call: no exit function runs, and the status is
 * the main thread's. (Where another thread of the program outlived that one, newer kernels take its status, which is lost here.) */
static void end_thread(int status)
{
    open_to_signals();
    vram_heap_exiting();
    vram_trace_write();
    vram_report_write();
    if (status & 0x7f)
        kill(vram_proc_pid(), status & 0x7f);
    syscall(SYS_exit, status >> 8);
}

/* How often to look for what happens after so many ms: four times meanwhile, at least each minute. */
static uint64_t tick_of(uint64_t ms)
{
    if (ms == UINT64_MAX)
        return VRAM_FOR_EVER;
    return ms < 240000 ? ms * 250000 : 60000000000u;
}

static uint64_t earlier(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* What was kept for as long as VRAMSHIM_DECAY says goes back. Looks as often as tick_of says. */
static void decay(void)
{
    static uint64_t last;
    uint64_t now = vram_now(), age = vram_options->decay;
    if (age == UINT64_MAX || now - last < tick_of(age) || now < age * 1000000)
        return;
    last = now;
    vram_driver_look_again();
    struct vram_reclaimed gone = vram_reclaim_decayed(now - age * 1000000);
    if (!gone.blocks || !vram_options->verbose)
        return;
    char buf[160];
    struct vram_text t = VRAM_TEXT(buf);
    vram_text_add(&t, "decay: gave ");
    amount(&t, gone.blocks, gone.bytes);
    vram_text_add(&t, " back to the driver, unused for ");
    vram_text_duration(&t, age * 1000000);
    vram_notice(VRAM_NOTICE_DECAY, "%s", buf);
}

/* Waits for a request. False: there is none, but the program has been idle for as long as VRAMSHIM_IDLE_DRAIN says, for the
 * first time since it was at work. */
static bool await_request(void)
{
    static bool drained; /* since the program was last at work */
    uint64_t limit = vram_options->idle_drain, last = vram_now();
    uint64_t tick = earlier(tick_of(limit), tick_of(vram_options->decay));
    if (limit != UINT64_MAX)
        limit *= 1000000;
    for (;;) {
        unsigned now = requests_so_far();
        if (now != served) { /* a storm of signals is one flush; one that arrives from here on is another */
            served = now;
            return true;
        }
        bool leaving = vram_last_main_is_gone(), vanished = !leaving && vram_last_main_has_vanished();
        vram_futex_wait(&requests, now, earlier(tick, leaving || vanished ? ALONE_NS : VANISHED_NS));
        int status;
        if (leaving && vram_last_is_alone(&status))
            end_process();
        if (vanished && vram_last_is_alone(&status))
            end_thread(status);
        decay();
        if (limit == UINT64_MAX)
            continue;
        if (vram_activity_take()) {
            last = vram_now();
            drained = false;
        } else if (!drained && vram_now() - last >= limit) {
            drained = true;
            return false;
        }
    }
}

static void *serve(void *unused)
{
    (void)unused;
    vram_driver_look_again();
    for (;;) {
        struct vram_drained drained;
        by_idleness = !await_request();
        await_captures();
        bool wanted = take_asked() || by_idleness;
        bool draining = wanted && vram_drain_start(post);
        bool over = vram_drain_take(&drained, draining ? DRAIN_MS : 0);
        if (wanted || (over && drained.parts[0]))
            flush(over ? &drained : NULL, draining && !over);
        if (over)
            vram_activity_take(); /* the frameworks' frees, not the program's */
    }
    return NULL;
}

/* Runs before the driver's own exit function, which was registered earlier: from here on no driver call is ours (law 27),
 * and one that is under way gets a moment to come back. The program's destructors still reach the driver. */
static void stop_calling(int status, void *unused)
{
    (void)status;
    (void)unused;
    if (!vram_proc_is_recorded())
        return;
    vram_heap_exiting();
    int cancelling = vram_cancel_hold();
    vram_gate_drain(LAST_CALL_MS);
    vram_cancel_give_back(cancelling);
}

void vram_control_start(void)
{
    if (vram_likely(atomic_load_explicit(&started, memory_order_relaxed)) || atomic_exchange(&started, true))
        return;
    int saved = errno;
    bool wanted = vram_options->signal || vram_options_watch_launches() || vram_options->decay != UINT64_MAX;
    served = requests_so_far();
    atomic_store(&running, wanted); /* a signal that comes from here on finds the thread, once it is there */
    vram_sandbox_look();
    vram_options_complain();
    char unheard[256];
    struct vram_text t = VRAM_TEXT(unheard);
    if (vram_options->verbose && vram_disposition_unheard(&t))
        vram_say("%s", unheard);
    if (vram_control_atfork != 0)
        vram_say("cannot follow forks (%s): what a forked child does with GPU memory is neither kept nor reported",
                 strerror(vram_control_atfork));
    if (on_exit(stop_calling, NULL) != 0)
        vram_say("cannot be called at exit: a flush that is under way then may meet the end of the driver");
    const char *missing = vram_driver_missing();
    if (missing)
        vram_say("this driver has no %s: freed memory cannot be kept, it is only accounted for", missing);
    vram_last_main_has_vanished(); /* not yet: from here on it can be told */
    int r = wanted ? vram_thread_start(serve, "vramshim") : 0;
    if (r != 0) {
        atomic_store(&running, false);
        vram_say("cannot start a thread (%s): the signal will not give memory back; all else works", strerror(r));
    }
    errno = saved;
}

void vram_control_look(void) { post(); }

bool vram_control_was_asked(void) { return atomic_load(&heard); }

bool vram_control_request(void)
{
    atomic_store(&heard, true);
    if (!atomic_load(&running))
        return false;
    atomic_store(&asked, true);
    post();
    return true;
}

void vram_control_forget(void)
{
    atomic_store(&heard, false);
    atomic_store(&running, false);
    atomic_store(&started, false);
}

/*
 * The life of the process: load, fork, exit. The only file with constructors and destructors.
 */
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/compiler.h"
#include "base/elf.h"
#include "base/lock.h"
#include "base/proc.h"
#include "base/say.h"
#include "config/options.h"
#include "control/disposition.h"
#include "control/last.h"
#include "control/thread.h"
#include "driver/capture.h"
#include "driver/driver.h"
#include "driver/next.h"
#include "heap/heap.h"
#include "interpose/libc.h"
#include "observe/report.h"
#include "observe/trace.h"

/* The mask is the thread's (sigprocmask and pthread_sigmask are one system call; the latter has moved between libraries).
 * Signals stay blocked while the locks are held: a handler of the program on this thread may call sigaction. */
static sigset_t before_fork; /* under all locks */

static void prefork(void)
{
    sigset_t all, before;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &before);
    vram_locks_prefork();
    before_fork = before;
}

static void postfork_parent(void)
{
    sigset_t before = before_fork;
    vram_locks_postfork_parent();
    sigprocmask(SIG_SETMASK, &before, NULL);
}

/* The child is a program that has not used CUDA: it reports nothing of its parent's, frees nothing, and starts afresh if
 * it initialises CUDA itself (law 25). It keeps the signal dispositions, as every child does. */
static void postfork_child(void)
{
    sigset_t before = before_fork;
    vram_locks_postfork_child();
    if (vram_locks_held()) {
        /* Forked by a signal handler inside a call of ours: nothing may be touched, and the process stays a stranger. */
        sigprocmask(SIG_SETMASK, &before, NULL);
        return;
    }
    vram_capture_forget();
    vram_heap_forget();
    vram_control_forget();
    vram_say_forget();
    vram_report_forget();
    vram_trace_start();
    vram_last_watch(vram_control_look);
    vram_proc_record(); /* from here on it is ours again */
    sigprocmask(SIG_SETMASK, &before, NULL);
}

static void add_to_report(struct vram_text *report)
{
    char unheard[256];
    struct vram_text t = VRAM_TEXT(unheard);
    if (vram_disposition_unheard(&t))
        vram_text_add(report, "  %s\n", unheard);
}

static void report_at_exit(void)
{
    if (!vram_proc_is_recorded())
        return;
    vram_trace_write();
    vram_report_write();
}

static void report_on_exit(int status, void *unused)
{
    (void)status;
    (void)unused;
    /* A thread that calls exit() while this one writes has to find something to wait in. */
    if (vram_report_is_due())
        on_exit(report_on_exit, NULL);
    report_at_exit();
}

/* Nothing here may be seen in a program without CUDA (law 6): no thread, no descriptor, no output, no library. */
static void __attribute__((constructor)) load(void)
{
    if (vram_elf_is_second())
        return;
    vram_proc_record();
    vram_say_start();
    vram_options_read(environ);
    vram_driver_look_again();
    vram_next_settle();
    vram_trace_start();
    vram_disposition_init();
    vram_report_ends_with(add_to_report);
    vram_last_watch(vram_control_look);
    vram_control_atfork = pthread_atfork(prefork, postfork_parent, postfork_child);
    vram_quick_exit_register(); /* registered first, so that it runs after the program's own */
}

/*
 * The report has to come after every other library's destructors, and ours are not the last: the loader ends a preloaded
 * library before most others. But what is registered while exit() runs its functions is run after the function that is
 * running, and that one is the loader's run of all destructors. on_exit, because atexit would tie the function to this
 * library, whose own end is near.
 */
static void __attribute__((destructor)) unload(void)
{
    if (!vram_proc_is_recorded())
        return;
    vram_heap_exiting();
    if (on_exit(report_on_exit, NULL) == 0)
        return;
    if (vram_report_is_due())
        vram_say("cannot write the report last: memory that other libraries free from here on is in it as never freed");
    report_at_exit();
}

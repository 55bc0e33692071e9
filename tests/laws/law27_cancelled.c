/*
 * Law 27 for a thread that leaves with a cancellation pending: neither _exit, exit nor quick_exit is a cancellation point, so the
 * process ends as the thread said, and all that is written on the way out is whole. What is said in the middle: law32_words.c.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "law.h"
#include "sim.h"
#include "world.h"

enum { MIB = 1 << 20, WAYS = 4, STAYED = 42 };

static char text[65536];
static CUcontext context;

static void leave(int way)
{
    switch (way) {
    case 0:
        exit(way + 10);
    case 1:
        _exit(way + 10);
    case 2:
        _Exit(way + 10);
    default:
        quick_exit(way + 10);
    }
}

static void *leave_cancelled(void *unused)
{
    pthread_cancel(pthread_self());
    leave(atoi(getenv("LAW27_WAY")));
    return unused;
}

/* The process must be gone by the thread's end. */
static void end_by(void *(*thread)(void *))
{
    pthread_t t;
    CHECK(pthread_create(&t, NULL, thread, NULL) == 0);
    pthread_join(t, NULL);
    syscall(SYS_exit_group, STAYED);
}

static void leak(void)
{
    CUdeviceptr p;
    context = law_context();
    OK(cu.cuMemAlloc_v2(&p, 3 * MIB));
}

/* Expects one report in what `env` makes the child write to: standard error, or this folder. */
static void by_every_way(const char *name, const char *const *env, const char *folder)
{
    const char *with[4] = {NULL, env[0], env[0] ? env[1] : NULL, NULL};
    for (int way = 0; way < WAYS; way++) {
        char variable[32], command[128];
        snprintf(variable, sizeof(variable), "LAW27_WAY=%d", way);
        with[0] = variable;
        int status = law_run_child(name, with, text, sizeof(text));
        CHECK(WIFEXITED(status));
        CHECK_EQ(WEXITSTATUS(status), way + 10);
        if (folder) {
            CHECK_EQ(strlen(text), 0);
            snprintf(command, sizeof(command), "cat %s/* 2>/dev/null; rm -f %s/*", folder, folder);
            shell(command, text, sizeof(text));
            CHECK_EQ(count_of(text, ",allocate,"), under_shim());
        }
        CHECK_EQ(count_of(text, "3.0 MiB in 1 block never freed"), under_shim());
        CHECK_EQ(count_of(text, "driver calls saved"), under_shim());
    }
}

LAW_CHILD(leaves_cancelled)
{
    leak();
    end_by(leave_cancelled);
}

LAW_CASE_SIM_ONCE(reported_on_standard_error) { by_every_way("leaves_cancelled", ENV(NULL), NULL); }

LAW_CASE_SIM_ONCE(reported_in_files)
{
    char folder[] = "/tmp/law27.XXXXXX", report[64], trace[64];
    CHECK(mkdtemp(folder));
    snprintf(report, sizeof(report), "VRAMSHIM_REPORT=%s/r", folder);
    snprintf(trace, sizeof(trace), "VRAMSHIM_TRACE=%s/t", folder);
    by_every_way("leaves_cancelled", ENV(report, trace), folder);
    CHECK_EQ(rmdir(folder), 0);
}

/* While a flush is inside the driver, which exit() gives a moment to come back. */
static atomic_bool inside;
static void stay(const char *entry, void *unused)
{
    (void)entry;
    (void)unused;
    if (atomic_exchange(&inside, true))
        return;
    for (;;)
        pause();
}

LAW_CHILD(leaves_cancelled_beside_a_flush)
{
    leak();
    cached_block(4 * MIB);
    if (under_shim()) {
        CHECK(SIM(sim_on_call)("cuMemFree_v2", stay, NULL) == 0);
        raise(SIGUSR1);
        WAIT_UNTIL(inside);
    }
    end_by(leave_cancelled);
}

LAW_CASE_SIM_ONCE(beside_a_flush) { by_every_way("leaves_cancelled_beside_a_flush", ENV(NULL), NULL); }

/* While another thread writes the report. This program has a poll of its own, as programs may, in which that one looks whether
 * whoever waits for it is still there. */
static bool holds;
static atomic_bool writing;
static pthread_t waiter;

static bool called_by_the_shim(const void *caller)
{
    Dl_info info;
    return dladdr(caller, &info) && strstr(info.dli_fname, "libvramshim");
}

int poll(struct pollfd *fds, nfds_t count, int timeout)
{
    const struct timespec t = {timeout / 1000, timeout % 1000 * 1000000L};
    if (holds && called_by_the_shim(__builtin_return_address(0)) && !atomic_exchange(&writing, true)) {
        LINGER(pthread_tryjoin_np(waiter, NULL) == 0 && (syscall(SYS_exit_group, STAYED), true));
    }
    return ppoll(fds, count, timeout < 0 ? NULL : &t, NULL);
}

static void *leave_while_it_is_written(void *unused)
{
    WAIT_UNTIL(writing);
    return leave_cancelled(unused);
}

LAW_CHILD(leaves_cancelled_beside_a_report)
{
    leak();
    CHECK(pthread_create(&waiter, NULL, leave_while_it_is_written, NULL) == 0);
    holds = true;
    leave(atoi(getenv("LAW27_WAY")));
}

LAW_CASE_SIM_ONCE(beside_a_report) { by_every_way("leaves_cancelled_beside_a_report", ENV(NULL), NULL); }

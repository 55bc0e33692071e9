/*
 * Law 23: the signal flushes, and the program notices nothing but that: its handlers run, the dispositions that it set
 * are the ones that it sees, ignoring means ignoring. HAMi-core 160 (SIGUSR1 clobbered), Lightning 14610, submitit
 * 1697, nccl 704 (SIGUSR1 is taken).
 *
 * What is native is asked of SIGUSR2, which the shim has nothing to do with: the same calls on both must show the same.
 */
#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <setjmp.h>
#include <stdatomic.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>

#include "law.h"
#include "sim.h"
#include "world.h"

/* The old functions are what is tested here. */
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

enum { MIB = 1 << 20 };

static unsigned long frees_before;

/* One block is in the cache, so that there is something to give back. */
static void arm(void)
{
    static bool context;
    if (!context)
        law_context();
    context = true;
    cached_block(4 * MIB);
    frees_before = driver_calls("cuMemFree_v2");
}

/* Its thread sleeps, and goes on doing so: the flush is over, and a block that is cached from here on stays. */
static bool flush_is_over(void)
{
    DIR *tasks = opendir("/proc/self/task");
    bool asleep = tasks != NULL;
    for (struct dirent *e; tasks && (e = readdir(tasks)) != NULL;) {
        char path[300], stat[512];
        snprintf(path, sizeof(path), "/proc/self/task/%s/stat", e->d_name);
        if (e->d_name[0] != '.' && slurp(path, stat, sizeof(stat)) > 0 && strstr(stat, "(vramshim)"))
            asleep &= strstr(stat, "(vramshim) S") != NULL;
    }
    if (tasks)
        closedir(tasks);
    return asleep;
}

static void expect_flush(void)
{
    if (!under_shim())
        return;
    WAIT_UNTIL(driver_calls("cuMemFree_v2") > frees_before); /* an earlier flush may be under way, and free as well */
    for (int asleep = 0; asleep < 5; nap())
        asleep = flush_is_over() ? asleep + 1 : 0;
}

static void expect_no_flush(void)
{
    LINGER(driver_calls("cuMemFree_v2") != frees_before);
    CHECK_EQ(driver_calls("cuMemFree_v2"), frees_before);
}

static atomic_int calls;
static void count(int sig) { calls += sig == SIGUSR1; }
static void count_both(int sig) { calls += sig == SIGUSR1 || sig == SIGUSR2; }
static void other_handler(int sig) { (void)sig; }

typedef sighandler_t (*signal_function)(int, sighandler_t);
static signal_function by_name(const char *name) { return (signal_function)dlsym(RTLD_DEFAULT, name); }
static const char *const signal_functions[] = {"signal",      "bsd_signal",    "ssignal",
                                               "sysv_signal", "__sysv_signal", "sigset"};
enum { SIGNAL_FUNCTIONS = sizeof(signal_functions) / sizeof(*signal_functions) };

/* Every way to install a handler: it runs, once, and memory goes back as well. */
LAW_CASE_SIM_ONCE(handlers_run_and_memory_goes_back)
{
    struct sigaction act = {0}, old;
    act.sa_handler = count;
    arm();
    CHECK(sigaction(SIGUSR1, &act, NULL) == 0);
    raise(SIGUSR1);
    CHECK_EQ(calls, 1);
    expect_flush();
    for (int i = 0; i < SIGNAL_FUNCTIONS; i++) {
        signal_function install = by_name(signal_functions[i]);
        if (!install)
            continue;
        CHECK(install(SIGUSR1, count) == count || i > 0);
        arm();
        calls = 0;
        raise(SIGUSR1);
        CHECK_EQ(calls, 1);
        expect_flush();
        CHECK(sigaction(SIGUSR1, NULL, &old) == 0);
        CHECK(old.sa_handler == (strstr(signal_functions[i], "sysv") ? SIG_DFL : count));
    }
}

/* Installed before CUDA is up, even before main. */
static void __attribute__((constructor)) early(void)
{
    if (getenv("LAW23_EARLY"))
        signal(SIGUSR1, count);
}

LAW_CHILD(early_handler)
{
    arm();
    raise(SIGUSR1);
    CHECK_EQ(calls, 1);
    expect_flush();
}

LAW_CASE_SIM_ONCE(installed_before_main) { CHECK_EQ(law_run_child("early_handler", ENV("LAW23_EARLY=1"), NULL, 0), 0); }

LAW_CASE_SIM_ONCE(installed_before_and_after_the_first_allocation)
{
    signal(SIGUSR1, count);
    raise(SIGUSR1);
    CHECK_EQ(calls, 1);
    arm();
    raise(SIGUSR1);
    CHECK_EQ(calls, 2);
    expect_flush();
    CHECK(signal(SIGUSR1, other_handler) == count);
    arm();
    raise(SIGUSR1);
    CHECK_EQ(calls, 2);
    expect_flush();
}

/* Left at its default: native would end the process; the one wanted difference. */
LAW_CASE_SIM_ONCE(no_handler)
{
    if (!under_shim())
        return;
    arm();
    raise(SIGUSR1);
    expect_flush();
    signal(SIGUSR1, count);
    signal(SIGUSR1, SIG_DFL);
    arm();
    kill(getpid(), SIGUSR1);
    expect_flush();
    CHECK_EQ(calls, 0);
}

/* What the program reads back is, bit by bit, what it would read of any other signal. */
static void same(const char *step)
{
    struct sigaction one, two;
    CHECK(sigaction(SIGUSR1, NULL, &one) == 0 && sigaction(SIGUSR2, NULL, &two) == 0);
    bool mask = true;
    for (int s = 1; s < NSIG; s++) {
        /* the signal itself may be in its own mask */
        int other = s == SIGUSR1 ? SIGUSR2 : s == SIGUSR2 ? SIGUSR1 : s;
        mask &= sigismember(&one.sa_mask, s) == sigismember(&two.sa_mask, other);
    }
    if (one.sa_handler != two.sa_handler || one.sa_flags != two.sa_flags || !mask)
        law_fail(__FILE__, __LINE__, "after %s: handler %p, flags 0x%x where any other signal has %p, 0x%x%s", step,
                 (void *)(uintptr_t)one.sa_handler, one.sa_flags, (void *)(uintptr_t)two.sa_handler, two.sa_flags,
                 mask ? "" : "; the masks differ");
}

LAW_CASE_ONCE(dispositions_read_back)
{
    static const int flags[] = {0,
                                SA_RESTART,
                                SA_NODEFER,
                                SA_RESETHAND,
                                SA_SIGINFO,
                                SA_ONSTACK | SA_RESTART,
                                SA_SIGINFO | SA_RESETHAND | SA_NODEFER,
                                SA_NOCLDSTOP};
    const sighandler_t handlers[] = {count_both, SIG_IGN, SIG_DFL};
    same("nothing");
    for (size_t h = 0; h < 3; h++) {
        for (size_t f = 0; f < sizeof(flags) / sizeof(*flags); f++) {
            struct sigaction act = {0}, old[2];
            act.sa_handler = handlers[h];
            act.sa_flags = flags[f];
            if (f % 2)
                sigfillset(&act.sa_mask);
            else
                sigaddset(&act.sa_mask, SIGHUP);
            CHECK(sigaction(SIGUSR1, &act, &old[0]) == 0 && sigaction(SIGUSR2, &act, &old[1]) == 0);
            CHECK(old[0].sa_handler == old[1].sa_handler);
            CHECK_EQ(old[0].sa_flags, old[1].sa_flags);
            same("sigaction");
        }
        for (int i = 0; i < SIGNAL_FUNCTIONS; i++) {
            signal_function install = by_name(signal_functions[i]);
            if (!install)
                continue;
            CHECK(install(SIGUSR1, handlers[h]) == install(SIGUSR2, handlers[h]));
            same(signal_functions[i]);
        }
    }
    signal(SIGUSR1, count_both);
    signal(SIGUSR2, count_both);
    for (int i = 0; i < 2; i++) {
        CHECK(siginterrupt(SIGUSR1, !i) == siginterrupt(SIGUSR2, !i));
        same("siginterrupt");
        CHECK(signal(SIGUSR1, other_handler) == signal(SIGUSR2, other_handler));
        same("signal after siginterrupt");
    }
    CHECK(sigignore(SIGUSR1) == sigignore(SIGUSR2));
    same("sigignore");
}

/* sigset with SIG_HOLD, and what it says of a signal that was held. */
LAW_CASE_ONCE(held_by_sigset)
{
    static const sighandler_t steps[] = {count_both, SIG_HOLD, SIG_HOLD, other_handler,
                                         SIG_HOLD,   SIG_IGN,  SIG_DFL,  SIG_HOLD};
    for (size_t i = 0; i < sizeof(steps) / sizeof(*steps); i++) {
        sigset_t mask;
        CHECK(sigset(SIGUSR1, steps[i]) == sigset(SIGUSR2, steps[i]));
        CHECK(pthread_sigmask(SIG_BLOCK, NULL, &mask) == 0);
        CHECK_EQ(sigismember(&mask, SIGUSR1), sigismember(&mask, SIGUSR2));
        same("sigset");
    }
    errno = 0;
    CHECK(signal(SIGUSR1, SIG_ERR) == SIG_ERR);
    CHECK_EQ(errno, EINVAL);
}

/* SA_RESETHAND: one call, then the default again, seen from inside the handler already. */
static struct sigaction seen_inside[2];
static void look_inside(int sig)
{
    calls++;
    sigaction(sig, NULL, &seen_inside[sig == SIGUSR2]);
}

LAW_CASE_SIM_ONCE(reset_after_one_call)
{
    struct sigaction act = {0};
    act.sa_handler = look_inside;
    act.sa_flags = SA_RESETHAND;
    arm();
    CHECK(sigaction(SIGUSR1, &act, NULL) == 0 && sigaction(SIGUSR2, &act, NULL) == 0);
    raise(SIGUSR1);
    raise(SIGUSR2);
    CHECK_EQ(calls, 2);
    CHECK(seen_inside[0].sa_handler == SIG_DFL && seen_inside[1].sa_handler == SIG_DFL);
    CHECK_EQ(seen_inside[0].sa_flags, seen_inside[1].sa_flags);
    same("a call with SA_RESETHAND");
    expect_flush();
    if (under_shim()) { /* the default, which flushes */
        arm();
        raise(SIGUSR1);
        CHECK_EQ(calls, 2);
        expect_flush();
    }
    CHECK(sigaction(SIGUSR1, &act, NULL) == 0); /* installed again, it works again */
    arm();
    raise(SIGUSR1);
    CHECK_EQ(calls, 3);
    expect_flush();
}

/* SA_SIGINFO: who sent it, and what. */
static siginfo_t info_inside;
static void *context_inside;
static void keep_info(int sig, siginfo_t *info, void *context)
{
    calls += sig == SIGUSR1;
    info_inside = *info;
    context_inside = context;
}

LAW_CASE_SIM_ONCE(told_who_sent_it)
{
    struct sigaction act = {0};
    act.sa_sigaction = keep_info;
    act.sa_flags = SA_SIGINFO;
    arm();
    CHECK(sigaction(SIGUSR1, &act, NULL) == 0);
    CHECK(sigqueue(getpid(), SIGUSR1, (union sigval){.sival_int = 4711}) == 0);
    CHECK_EQ(calls, 1);
    CHECK_EQ(info_inside.si_code, SI_QUEUE);
    CHECK_EQ(info_inside.si_value.sival_int, 4711);
    CHECK_EQ(info_inside.si_pid, getpid());
    CHECK(context_inside);
    expect_flush();
}

/* The mask and the stack inside the handler are those that the program asked for. */
static sigset_t mask_inside;
static void *stack_inside;
static void look_around(int sig)
{
    (void)sig;
    pthread_sigmask(SIG_BLOCK, NULL, &mask_inside);
    stack_inside = __builtin_frame_address(0);
}

LAW_CASE_ONCE(mask_and_stack_of_a_handler)
{
    static char alternative[256 * 1024];
    const stack_t stack = {.ss_sp = alternative, .ss_size = sizeof(alternative)};
    CHECK(sigaltstack(&stack, NULL) == 0);
    for (int i = 0; i < 4; i++) {
        struct sigaction act = {0};
        act.sa_handler = look_around;
        act.sa_flags = (i & 1 ? SA_NODEFER : 0) | (i & 2 ? SA_ONSTACK : 0);
        sigaddset(&act.sa_mask, SIGHUP);
        CHECK(sigaction(SIGUSR1, &act, NULL) == 0);
        raise(SIGUSR1);
        CHECK_EQ(sigismember(&mask_inside, SIGHUP), 1);
        CHECK_EQ(sigismember(&mask_inside, SIGUSR1), !(i & 1));
        CHECK_EQ(sigismember(&mask_inside, SIGTERM), 0);
        bool alternate =
            (char *)stack_inside >= alternative && (char *)stack_inside < alternative + sizeof(alternative);
        CHECK_EQ(alternate, !!(i & 2));
    }
}

/* Interrupted or restarted, as the program chose. The signal comes once the reader sleeps. */
static int pipe_fds[2];
static pid_t reader_tid;
static atomic_bool about_to_read;

static bool sleeps(pid_t tid)
{
    char path[64], stat[512];
    snprintf(path, sizeof(path), "/proc/self/task/%d/stat", tid);
    if (slurp(path, stat, sizeof(stat)) <= 0)
        return false;
    const char *end = strrchr(stat, ')');
    return end && end[1] == ' ' && end[2] == 'S';
}

static void *interrupt_the_reader(void *sig)
{
    WAIT_UNTIL(about_to_read && sleeps(reader_tid));
    syscall(SYS_tgkill, getpid(), reader_tid, (int)(intptr_t)sig);
    WAIT_UNTIL(calls == 1 || sleeps(reader_tid)); /* an ignored signal has no effect to wait for */
    for (int i = 0; i < 5; i++)
        nap();
    CHECK(write(pipe_fds[1], "x", 1) == 1);
    return NULL;
}

/* True if a signal ends a read that waits. */
static bool read_is_interrupted(int sig)
{
    pthread_t thread;
    char c;
    CHECK(pipe(pipe_fds) == 0);
    reader_tid = (pid_t)syscall(SYS_gettid);
    about_to_read = false;
    calls = 0;
    CHECK(pthread_create(&thread, NULL, interrupt_the_reader, (void *)(intptr_t)sig) == 0);
    about_to_read = true;
    ssize_t n = read(pipe_fds[0], &c, 1);
    int error = errno;
    pthread_join(thread, NULL);
    close(pipe_fds[0]);
    close(pipe_fds[1]);
    if (n < 0)
        CHECK_EQ(error, EINTR);
    return n < 0;
}

static void expect_interrupts(bool expected)
{
    CHECK_EQ(read_is_interrupted(SIGUSR1), expected);
    CHECK_EQ(calls, 1);
}

LAW_CASE_ONCE(interrupted_or_restarted)
{
    struct sigaction act = {0};
    act.sa_handler = count;
    CHECK(sigaction(SIGUSR1, &act, NULL) == 0);
    expect_interrupts(true);
    act.sa_flags = SA_RESTART;
    CHECK(sigaction(SIGUSR1, &act, NULL) == 0);
    expect_interrupts(false);
    sysv_signal(SIGUSR1, count);
    expect_interrupts(true);
    signal(SIGUSR1, count);
    expect_interrupts(false);
    CHECK(siginterrupt(SIGUSR1, 1) == 0);
    expect_interrupts(true);
    signal(SIGUSR1, count);
    expect_interrupts(true);
    CHECK(siginterrupt(SIGUSR1, 0) == 0);
    expect_interrupts(false);
    sigset(SIGUSR1, count);
    expect_interrupts(true);
}

/* Ignored means ignored: the kernel is told, nothing is interrupted, nothing is given back. */
static bool kernel_ignores(const char *status, int sig)
{
    const char *line = strstr(status, "SigIgn:");
    return line && (strtoull(line + 7, NULL, 16) >> (sig - 1) & 1);
}

LAW_CHILD(inherits_an_ignored_signal)
{
    struct sigaction act;
    CHECK(sigaction(SIGUSR1, NULL, &act) == 0);
    CHECK(act.sa_handler == SIG_IGN);
    raise(SIGUSR1);
    arm();
    raise(SIGUSR1);
    expect_no_flush();
    signal(SIGUSR1, count);
    raise(SIGUSR1);
    CHECK_EQ(calls, 1);
    expect_flush();
}

LAW_CASE_SIM_ONCE(ignored)
{
    char status[8192];
    arm();
    CHECK(signal(SIGUSR1, SIG_IGN) == SIG_DFL);
    CHECK(slurp("/proc/self/status", status, sizeof(status)) > 0);
    CHECK(kernel_ignores(status, SIGUSR1));
    for (int i = 0; i < 20; i++)
        raise(SIGUSR1);
    CHECK(!read_is_interrupted(SIGUSR1));
    expect_no_flush();
    CHECK_EQ(shell("cat /proc/self/status", status, sizeof(status)), 0);
    CHECK(kernel_ignores(status, SIGUSR1));
    CHECK_EQ(law_run_child("inherits_an_ignored_signal", NULL, status, sizeof(status)), 0);
    CHECK(!strstr(status, "signal received"));
    signal(SIGUSR1, count);
    raise(SIGUSR1);
    CHECK_EQ(calls, 1);
    expect_flush();
    arm();
    CHECK(sigignore(SIGUSR1) == 0);
    raise(SIGUSR1);
    expect_no_flush();
    CHECK(signal(SIGUSR1, SIG_DFL) == SIG_IGN);
    CHECK(slurp("/proc/self/status", status, sizeof(status)) > 0);
    CHECK(!kernel_ignores(status, SIGUSR1));
}

/* A handler that leaves by a jump: the flush was asked for before. */
static sigjmp_buf away;
static void jump(int sig)
{
    (void)sig;
    siglongjmp(away, 1);
}

LAW_CASE_SIM_ONCE(a_handler_that_never_returns)
{
    signal(SIGUSR1, jump);
    for (volatile int i = 0; i < 3; i++) {
        arm();
        if (sigsetjmp(away, 1) == 0) {
            raise(SIGUSR1);
            CHECK(!"not reached");
        }
        expect_flush();
    }
}

/* errno is the handler's business, and only its. */
static void set_errno(int sig)
{
    (void)sig;
    errno = 77;
}

LAW_CASE_SIM_ONCE(errno_is_the_handlers)
{
    arm();
    signal(SIGUSR1, count);
    errno = 12;
    raise(SIGUSR1);
    CHECK_EQ(errno, 12);
    expect_flush();
    signal(SIGUSR1, set_errno);
    raise(SIGUSR1);
    CHECK_EQ(errno, 77);
}

/* The program never had the driver in mind when it chose what to do with the signal: chosen, changed and asked for before
 * the first allocation, then after it, by every function. */
LAW_CASE_SIM_ONCE(chosen_before_and_after_the_driver_is_used)
{
    for (int i = 0; i < SIGNAL_FUNCTIONS; i++) {
        signal_function install = by_name(signal_functions[i]);
        struct sigaction act;
        if (!install)
            continue;
        bool once = strstr(signal_functions[i], "sysv") != NULL;
        signal(SIGUSR1, SIG_DFL);
        CHECK(install(SIGUSR1, SIG_IGN) == SIG_DFL);
        raise(SIGUSR1);
        CHECK(install(SIGUSR1, count) == SIG_IGN);
        calls = 0;
        raise(SIGUSR1);
        CHECK_EQ(calls, 1);
        CHECK(sigaction(SIGUSR1, NULL, &act) == 0);
        CHECK(act.sa_handler == (once ? SIG_DFL : count));
        CHECK(install(SIGUSR1, count) == act.sa_handler);
        arm();
        CHECK(sigaction(SIGUSR1, NULL, &act) == 0);
        CHECK(act.sa_handler == count);
        raise(SIGUSR1);
        CHECK_EQ(calls, 2);
        expect_flush();
        CHECK(install(SIGUSR1, SIG_IGN) == (once ? SIG_DFL : count));
        arm();
        raise(SIGUSR1);
        expect_no_flush();
        CHECK_EQ(calls, 2);
    }
}

/* sigwait and sigtimedwait, on a thread of its own, with the signal blocked everywhere: the classic of servers. */
static void *wait_for_three(void *set)
{
    int sig;
    for (int i = 0; i < 3; i++) {
        CHECK(sigwait(set, &sig) == 0);
        CHECK_EQ(sig, SIGUSR1);
        calls++;
    }
    return NULL;
}

LAW_CASE_SIM_ONCE(taken_by_a_thread_that_waits)
{
    sigset_t only;
    pthread_t thread;
    sigemptyset(&only);
    sigaddset(&only, SIGUSR1);
    CHECK(pthread_sigmask(SIG_BLOCK, &only, NULL) == 0);
    CHECK(pthread_create(&thread, NULL, wait_for_three, &only) == 0);
    kill(getpid(), SIGUSR1); /* before CUDA */
    WAIT_UNTIL(calls == 1);
    arm();
    for (int i = 2; i <= 3; i++) {
        kill(getpid(), SIGUSR1);
        WAIT_UNTIL(calls == i);
    }
    pthread_join(thread, NULL);
    expect_no_flush();
    CHECK_EQ(sigtimedwait(&only, NULL, &(struct timespec){0, 0}), -1);
    CHECK_EQ(errno, EAGAIN);
}

/* A program that takes the signal by waiting for it gets it. */
LAW_CASE_SIM_ONCE(taken_by_waiting)
{
    sigset_t only, pending;
    siginfo_t info;
    struct signalfd_siginfo read_info;
    arm();
    sigemptyset(&only);
    sigaddset(&only, SIGUSR1);
    CHECK(pthread_sigmask(SIG_BLOCK, &only, NULL) == 0);
    raise(SIGUSR1);
    CHECK(sigpending(&pending) == 0 && sigismember(&pending, SIGUSR1));
    CHECK_EQ(sigwaitinfo(&only, &info), SIGUSR1);
    int fd = signalfd(-1, &only, SFD_CLOEXEC);
    raise(SIGUSR1);
    CHECK(read(fd, &read_info, sizeof(read_info)) == sizeof(read_info));
    CHECK_EQ(read_info.ssi_signo, SIGUSR1);
    CHECK(sigpending(&pending) == 0 && !sigismember(&pending, SIGUSR1));
    expect_no_flush();
}

/* To one thread of several: the handler runs there. */
static pthread_t handled_by;
static atomic_bool released;
static void note_thread(int sig)
{
    (void)sig;
    handled_by = pthread_self();
    calls++;
}

static void *wait_for_release(void *unused)
{
    WAIT_UNTIL(released);
    return unused;
}

LAW_CASE_SIM_ONCE(sent_to_one_thread)
{
    pthread_t thread;
    arm();
    signal(SIGUSR1, note_thread);
    CHECK(pthread_create(&thread, NULL, wait_for_release, NULL) == 0);
    CHECK(pthread_kill(thread, SIGUSR1) == 0);
    WAIT_UNTIL(calls == 1);
    CHECK(pthread_equal(handled_by, thread));
    expect_flush();
    released = true;
    pthread_join(thread, NULL);
}

/* No thread of the shim ever runs a handler of the program: its threads block everything. */
LAW_CASE_SIM_ONCE(never_on_a_thread_of_the_shim)
{
    sigset_t all;
    arm();
    signal(SIGUSR1, note_thread);
    signal(SIGUSR2, note_thread);
    signal(SIGALRM, note_thread);
    sigfillset(&all);
    CHECK(pthread_sigmask(SIG_BLOCK, &all, NULL) == 0); /* the program's only thread */
    kill(getpid(), SIGUSR1);
    kill(getpid(), SIGUSR2);
    kill(getpid(), SIGALRM);
    LINGER(calls > 0);
    CHECK_EQ(calls, 0);
}

/* Signals without end, dispositions changed all the time, allocations under way: nothing is lost or stands still. */
static atomic_bool stop;
static void *bombard(void *main_thread)
{
    while (!stop)
        pthread_kill(*(pthread_t *)main_thread, SIGUSR1);
    return NULL;
}

LAW_CASE_SIM_ONCE(a_storm)
{
    pthread_t thread, self = pthread_self();
    CUdeviceptr p;
    arm();
    signal(SIGUSR1, count);
    for (int i = 0; i < 1000; i++)
        raise(SIGUSR1);
    CHECK_EQ(calls, 1000);
    CHECK(pthread_create(&thread, NULL, bombard, &self) == 0);
    for (int i = 0; i < 3000; i++) {
        OK(cu.cuMemAlloc_v2(&p, (size_t)(1 + i % 7) * MIB));
        CHECK(signal(SIGUSR1, i % 2 ? count : other_handler) != SIG_DFL);
        OK(cu.cuMemFree_v2(p));
    }
    stop = true;
    pthread_join(thread, NULL);
    CHECK_EQ(SIM(sim_refused_frees)(), 0);
}

/* Ten thousand signals from all sides, and then the last one: what was freed before it goes back. */
enum { STORM = 10000, SENDERS = 2 };
static atomic_int sent;
static void *send_many(void *unused)
{
    while (sent++ < STORM)
        kill(getpid(), SIGUSR1);
    return unused;
}

LAW_CASE_SIM_ONCE(nothing_is_lost_after_a_storm)
{
    arm();
    signal(SIGUSR1, count);
    for (int round = 0; round < 5; round++) {
        pthread_t senders[SENDERS];
        CUdeviceptr p[6];
        sent = round ? STORM - 1000 : 0;
        for (int i = 0; i < SENDERS; i++)
            CHECK(pthread_create(&senders[i], NULL, send_many, NULL) == 0);
        while (sent < STORM)
            for (int i = 0; i < 6; i++)
                p[i] = cached_block((size_t)(2 + i) * MIB);
        for (int i = 0; i < 6; i++)
            p[i] = cached_block((size_t)(2 + i) * MIB);
        for (int i = 0; i < SENDERS; i++)
            pthread_join(senders[i], NULL);
        for (int i = 0; i < 6; i++)
            p[i] = cached_block((size_t)(2 + i) * MIB);
        int seen = calls;
        raise(SIGUSR1);
        CHECK_EQ(calls, seen + 1);
        for (int i = 0; i < 6; i++)
            WAIT_UNTIL(!SIM(sim_is_allocated)(p[i]));
    }
    CHECK(calls > 5);
    CHECK_EQ(SIM(sim_refused_frees)(), 0);
    CHECK_EQ(SIM(sim_hazards)(), 0);
}

/* One that arrives while a flush is ending is another flush. This program has its own poll, as programs may: what the shim
 * says at the end of a flush comes through there. */
static atomic_bool hold, held;

int poll(struct pollfd *fds, nfds_t n, int timeout_ms)
{
    const struct timespec timeout = {timeout_ms / 1000, timeout_ms % 1000 * 1000000L};
    Dl_info info;
    if (hold && dladdr(__builtin_return_address(0), &info) && strstr(info.dli_fname, "libvramshim")) {
        held = true;
        WAIT_UNTIL(!hold);
    }
    return (int)syscall(SYS_ppoll, fds, n, timeout_ms < 0 ? NULL : &timeout, NULL, (size_t)0);
}

LAW_CASE_SIM_ONCE(one_more_at_the_end_of_a_flush)
{
    if (!under_shim())
        return;
    arm();
    for (int round = 0; round < 3; round++) {
        hold = true;
        held = false;
        raise(SIGUSR1);
        WAIT_UNTIL(held);
        CUdeviceptr p = cached_block(5 * MIB);
        CHECK(SIM(sim_is_allocated)(p));
        raise(SIGUSR1);
        hold = false;
        WAIT_UNTIL(!SIM(sim_is_allocated)(p));
    }
}

/* The same from another process, which knows nothing of what we do. */
LAW_CASE_SIM_ONCE(a_storm_from_outside)
{
    CUdeviceptr p;
    int status;
    arm();
    signal(SIGUSR1, count);
    pid_t target = getpid(), pid = fork();
    if (pid == 0) {
        for (int i = 0; i < STORM; i++)
            kill(target, SIGUSR1);
        _exit(0);
    }
    for (;;) {
        pid_t ended = waitpid(pid, &status, WNOHANG);
        p = cached_block(4 * MIB);
        if (ended == pid)
            break;
        CHECK(ended == 0 || errno == EINTR);
    }
    CHECK_EQ(status, 0);
    CHECK(calls > 0);
    kill(getpid(), SIGUSR1);
    WAIT_UNTIL(!SIM(sim_is_allocated)(p));
}

/* Every descriptor is closed, as daemons and subprocess do, and the numbers are used again for data. */
LAW_CASE_SIM_ONCE(closed_descriptors)
{
    enum { FILES = 20 };
    int files[FILES];
    arm();
    for (int fd = 3; fd < 1024; fd++)
        close(fd);
    for (int i = 0; i < FILES; i++) {
        char name[] = "/tmp/law23.XXXXXX";
        files[i] = mkstemp(name);
        CHECK(files[i] >= 3);
        unlink(name);
    }
    if (under_shim()) {
        raise(SIGUSR1);
        expect_flush();
    }
    for (int i = 0; i < FILES; i++)
        CHECK_EQ(lseek(files[i], 0, SEEK_END), 0);
    /* And all of them at once, as newer programs do; the shim goes on. */
    CHECK(syscall(SYS_close_range, 3, ~0u, 0) == 0 || errno == ENOSYS);
    arm();
    if (under_shim()) {
        raise(SIGUSR1);
        expect_flush();
    }
}

/* Another signal, or none: then SIGUSR1 is the program's alone. */
LAW_CHILD(usr1_is_not_ours)
{
    arm();
    raise(SIGUSR1);
}

LAW_CHILD(usr2_flushes)
{
    arm();
    signal(SIGUSR1, count);
    raise(SIGUSR1);
    CHECK_EQ(calls, 1);
    expect_no_flush();
    if (under_shim()) {
        raise(SIGUSR2);
        expect_flush();
    }
    arm();
    signal(SIGUSR2, count_both);
    raise(SIGUSR2);
    CHECK_EQ(calls, 2);
    expect_flush();
}

LAW_CHILD(real_time_signal_flushes)
{
    arm();
    if (under_shim()) {
        raise(SIGRTMIN + 3);
        expect_flush();
    }
}

LAW_CASE_SIM_ONCE(another_signal_or_none)
{
    int status = law_run_child("usr1_is_not_ours", ENV("VRAMSHIM_SIGNAL=none"), NULL, 0);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGUSR1);
    status = law_run_child("usr1_is_not_ours", ENV("VRAMSHIM_SIGNAL=USR2"), NULL, 0);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGUSR1);
    CHECK_EQ(law_run_child("usr2_flushes", ENV("VRAMSHIM_SIGNAL=USR2"), NULL, 0), 0);
    CHECK_EQ(law_run_child("real_time_signal_flushes", ENV("VRAMSHIM_SIGNAL=RTMIN+3"), NULL, 0), 0);
}

/* Python's own handlers, and faulthandler's. */
static const char python[] = "import ctypes, faulthandler, os, signal, sys, tempfile, time\n"
                             "cuda = ctypes.CDLL('libcuda.so.1')\n"
                             "calls = cuda.sim_calls\n"
                             "calls.restype = ctypes.c_ulong\n"
                             "shim = 'libvramshim' in open('/proc/self/maps').read()\n"
                             "assert cuda.cuInit(0) == 0\n"
                             "ctx = ctypes.c_void_p()\n"
                             "assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctx), 0) == 0\n"
                             "assert cuda.cuCtxSetCurrent(ctx) == 0\n"
                             "def arm():\n"
                             "    p = ctypes.c_uint64()\n"
                             "    assert cuda.cuMemAlloc_v2(ctypes.byref(p), ctypes.c_size_t(4 << 20)) == 0\n"
                             "    assert cuda.cuMemFree_v2(p) == 0\n"
                             "    return calls(b'cuMemFree_v2')\n"
                             "def flushed(before):\n"
                             "    while shim and calls(b'cuMemFree_v2') != before + 1:\n"
                             "        time.sleep(0.001)\n"
                             "ran = []\n"
                             "assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL\n"
                             "signal.signal(signal.SIGUSR1, lambda s, f: ran.append(s))\n"
                             "before = arm()\n"
                             "os.kill(os.getpid(), signal.SIGUSR1)\n"
                             "while not ran:\n"
                             "    time.sleep(0.001)\n"
                             "flushed(before)\n"
                             "signal.signal(signal.SIGUSR1, signal.SIG_IGN)\n"
                             "os.kill(os.getpid(), signal.SIGUSR1)\n"
                             "signal.signal(signal.SIGUSR1, signal.SIG_DFL)\n"
                             "with tempfile.TemporaryFile() as f:\n"
                             "    faulthandler.register(signal.SIGUSR1, file=f)\n"
                             "    before = arm()\n"
                             "    os.kill(os.getpid(), signal.SIGUSR1)\n"
                             "    flushed(before)\n"
                             "    f.seek(0)\n"
                             "    assert b'most recent call first' in f.read()\n"
                             "    faulthandler.unregister(signal.SIGUSR1)\n"
                             "assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()\n"
                             "print('python is content')\n";

LAW_CASE_SIM_ONCE(handlers_of_python)
{
    char out[4096];
    if (shell("command -v python3", out, sizeof(out)) != 0)
        law_skip("no python3");
    setenv("LAW23_PYTHON", python, 1);
    CHECK_EQ(shell("exec python3 -c \"$LAW23_PYTHON\"", out, sizeof(out)), 0);
    CHECK(strcmp(out, "python is content\n") == 0);
}

/* Python again, with everything chosen before the driver is loaded; then every descriptor closed, and the numbers used
 * again. */
static const char python_first[] =
    "import ctypes, os, signal, sys, tempfile, threading, time\n"
    "ran = []\n"
    "def handler(s, f):\n"
    "    ran.append(s)\n"
    "assert signal.signal(signal.SIGUSR1, handler) == signal.SIG_DFL\n"
    "r, w = os.pipe()\n"
    "os.set_blocking(w, False)\n"
    "signal.set_wakeup_fd(w)\n"
    "signal.siginterrupt(signal.SIGUSR1, False)\n"
    "os.kill(os.getpid(), signal.SIGUSR1)\n"
    "while not ran:\n"
    "    time.sleep(0.001)\n"
    "assert os.read(r, 9) == bytes([signal.SIGUSR1])\n"
    "cuda = ctypes.CDLL('libcuda.so.1')\n"
    "calls = cuda.sim_calls\n"
    "calls.restype = ctypes.c_ulong\n"
    "shim = 'libvramshim' in open('/proc/self/maps').read()\n"
    "assert cuda.cuInit(0) == 0\n"
    "ctx = ctypes.c_void_p()\n"
    "assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctx), 0) == 0\n"
    "assert cuda.cuCtxSetCurrent(ctx) == 0\n"
    "def signalled(send):\n"
    "    p = ctypes.c_uint64()\n"
    "    assert cuda.cuMemAlloc_v2(ctypes.byref(p), ctypes.c_size_t(4 << 20)) == 0\n"
    "    assert cuda.cuMemFree_v2(p) == 0\n"
    "    before = calls(b'cuMemFree_v2')\n"
    "    del ran[:]\n"
    "    send()\n"
    "    while not ran or (shim and calls(b'cuMemFree_v2') != before + 1):\n"
    "        time.sleep(0.001)\n"
    "    assert ran == [signal.SIGUSR1]\n"
    "assert signal.getsignal(signal.SIGUSR1) is handler\n"
    "signalled(lambda: os.kill(os.getpid(), signal.SIGUSR1))\n"
    "assert os.read(r, 9) == bytes([signal.SIGUSR1])\n"
    "signalled(lambda: signal.raise_signal(signal.SIGUSR1))\n"
    "signalled(lambda: signal.pthread_kill(threading.get_ident(), signal.SIGUSR1))\n"
    "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])\n"
    "os.kill(os.getpid(), signal.SIGUSR1)\n"
    "assert signal.sigpending() == {signal.SIGUSR1}\n"
    "assert signal.sigwait([signal.SIGUSR1]) == signal.SIGUSR1\n"
    "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])\n"
    "signal.set_wakeup_fd(-1)\n"
    "os.closerange(3, 65536)\n"
    "files = [tempfile.TemporaryFile() for _ in range(20)]\n"
    "signalled(lambda: os.kill(os.getpid(), signal.SIGUSR1))\n"
    "assert signal.signal(signal.SIGUSR1, signal.SIG_IGN) is handler\n"
    "assert all(os.fstat(f.fileno()).st_size == 0 for f in files)\n"
    "print('python is content')\n";

LAW_CASE_SIM_ONCE(chosen_by_python_before_the_driver_is_loaded)
{
    char out[4096];
    if (shell("command -v python3", out, sizeof(out)) != 0)
        law_skip("no python3");
    setenv("LAW23_PYTHON", python_first, 1);
    CHECK_EQ(shell("exec python3 -c \"$LAW23_PYTHON\"", out, sizeof(out)), 0);
    CHECK(strcmp(out, "python is content\n") == 0);
}

/* Threads that go on freeing do not keep a flush going. */
static sem_t given_back, replaced;
static atomic_uint given;

static void *replace_what_is_given_back(void *ctx)
{
    OK(cu.cuCtxSetCurrent(ctx));
    for (;;) {
        sem_wait(&given_back);
        cached_block(4 * MIB);
        sem_post(&replaced);
    }
    return NULL;
}

static void replace(const char *entry, void *unused)
{
    (void)entry, (void)unused;
    if (atomic_fetch_add(&given, 1) >= 100)
        return;
    sem_post(&given_back);
    sem_wait(&replaced);
}

LAW_CASE_SIM_ONCE(among_threads_that_go_on_freeing)
{
    pthread_t thread;
    CUcontext ctx;
    if (!under_shim())
        return;
    arm();
    OK(cu.cuCtxGetCurrent(&ctx));
    sem_init(&given_back, 0, 0);
    sem_init(&replaced, 0, 0);
    CHECK(pthread_create(&thread, NULL, replace_what_is_given_back, ctx) == 0);
    CHECK(SIM(sim_on_call)("cuMemFree_v2", replace, NULL) == 0);
    raise(SIGUSR1);
    expect_flush();
    CHECK_EQ(atomic_load(&given), 1);
}

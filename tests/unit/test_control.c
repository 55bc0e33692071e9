/* control/: what the program sees of our signal, and the thread that gives memory back. */
#include <criterion/criterion.h>
#include <dirent.h>
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/libc.h"
#include "control/disposition.h"
#include "control/thread.h"
#include "driver/capture.h"
#include "driver/driver.h"
#include "heap/heap.h"
#include "heard.h"
#include "steps.h"

static void moment(void) { nanosleep(&(const struct timespec){0, 1000000}, NULL); }

/*
 * What the program sees: whatever it does with our signal, it does with another one as well, which is libc's and the
 * kernel's alone. All answers must be the same.
 */
enum { OURS, NATIVE, SIDES };
static const int sigs[SIDES] = {SIGUSR1, SIGUSR2};

static int action(int side, const struct sigaction *act, struct sigaction *old)
{
    return side == OURS ? vram_disposition_action(act, old) : vram_libc_sigaction()(SIGUSR2, act, old);
}

/* The kernel's word, without the shim in between. */
static struct sigaction in_the_kernel(int side)
{
    struct sigaction act;
    cr_assert_eq(vram_libc_sigaction()(sigs[side], NULL, &act), 0);
    return act;
}

/* A mask in which the signal itself has one and the same bit on both sides. */
static uint64_t comparable(const sigset_t *mask, int side)
{
    uint64_t bits = sigismember(mask, sigs[side]) == 1;
    for (int s = 1; s < 64; s++)
        if (s != SIGUSR1 && s != SIGUSR2 && sigismember(mask, s) == 1)
            bits |= (uint64_t)1 << s;
    return bits;
}

static struct run {
    unsigned times;
    int handler, sig, code, flags;
    uint64_t blocked;
    sighandler_t seen; /* from inside */
} runs[SIDES];

static void ran(int handler, int sig, int code)
{
    int side = sig == SIGUSR1 ? OURS : NATIVE;
    struct sigaction now;
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, NULL, &blocked);
    action(side, NULL, &now);
    runs[side] = (struct run){runs[side].times + 1, handler,       sig == sigs[side], code, now.sa_flags,
                              comparable(&blocked, side), now.sa_handler};
    errno = 4321;
}

static void on_a(int sig) { ran(1, sig, 0); }
static void on_b(int sig) { ran(2, sig, 0); }
static void on_info(int sig, siginfo_t *info, void *context) { ran(3, sig, context ? info->si_code : 0); }

static void same_action(const struct sigaction *ours, const struct sigaction *native)
{
    cr_assert_eq(ours->sa_handler, native->sa_handler);
    cr_assert_eq(ours->sa_flags, native->sa_flags, "%x and not %x", ours->sa_flags, native->sa_flags);
    cr_assert_eq(comparable(&ours->sa_mask, OURS), comparable(&native->sa_mask, NATIVE));
}

static bool blocked(int side)
{
    sigset_t now;
    pthread_sigmask(SIG_SETMASK, NULL, &now);
    return sigismember(&now, sigs[side]);
}

static void same_state(void)
{
    struct sigaction seen[SIDES];
    for (int side = 0; side < SIDES; side++)
        cr_assert_eq(action(side, NULL, &seen[side]), 0);
    same_action(&seen[OURS], &seen[NATIVE]);
    cr_assert_eq(blocked(OURS), blocked(NATIVE));
    cr_assert_eq(seen[OURS].sa_handler == SIG_IGN, in_the_kernel(OURS).sa_handler == SIG_IGN);
}

static void same_run(void)
{
    int after[SIDES];
    if (blocked(NATIVE) || in_the_kernel(NATIVE).sa_handler == SIG_DFL)
        return; /* it would end us */
    for (int side = 0; side < SIDES; side++) {
        errno = 1234;
        raise(sigs[side]); /* delivered before it returns */
        after[side] = errno;
    }
    cr_assert_eq(after[OURS], after[NATIVE]);
    cr_assert_eq(runs[OURS].times, runs[NATIVE].times);
    cr_assert_eq(runs[OURS].handler, runs[NATIVE].handler);
    cr_assert_eq(runs[OURS].sig, runs[NATIVE].sig);
    cr_assert_eq(runs[OURS].code, runs[NATIVE].code);
    cr_assert_eq(runs[OURS].flags, runs[NATIVE].flags);
    cr_assert_eq(runs[OURS].blocked, runs[NATIVE].blocked);
    cr_assert_eq(runs[OURS].seen, runs[NATIVE].seen);
}

static sighandler_t any_handler(void)
{
    static const sighandler_t handlers[] = {on_a, on_b, SIG_DFL, SIG_IGN};
    return handlers[rand() % 4];
}

static void set_by_sigaction(void)
{
    static const int flags[] = {SA_RESTART, SA_NODEFER, SA_RESETHAND, SA_ONSTACK, SA_NOCLDSTOP, 0x400 /* never known */};
    static const int masked[] = {SIGHUP, SIGTERM, SIGKILL, SIGSTOP, SIGALRM};
    struct sigaction act = {.sa_handler = any_handler()}, wanted[SIDES], old[SIDES];
    if (rand() % 3 == 0) {
        act.sa_sigaction = on_info;
        act.sa_flags = SA_SIGINFO;
    } else if (rand() % 4 == 0) {
        act.sa_flags = SA_SIGINFO; /* with SIG_IGN too: the kernel does not look at it there */
    }
    for (size_t i = 0; i < VRAM_LENGTH(flags); i++)
        act.sa_flags |= rand() % 3 ? 0 : flags[i];
    for (size_t i = 0; i < VRAM_LENGTH(masked); i++)
        if (rand() % 3 == 0)
            sigaddset(&act.sa_mask, masked[i]);
    bool itself = rand() % 2, ask = rand() % 2;
    for (int side = 0; side < SIDES; side++) {
        wanted[side] = act;
        if (itself)
            sigaddset(&wanted[side].sa_mask, sigs[side]);
        cr_assert_eq(action(side, &wanted[side], ask ? &old[side] : NULL), 0);
    }
    if (ask)
        same_action(&old[OURS], &old[NATIVE]);
}

static void set_by_signal(void)
{
    sighandler_t handler = rand() % 8 ? any_handler() : SIG_ERR;
    errno = 0;
    sighandler_t ours = vram_disposition_signal(handler, 0, true);
    int error = errno;
    errno = 0;
    cr_assert_eq(ours, vram_libc_signal()(SIGUSR2, handler));
    cr_assert_eq(error, errno);
}

static void set_by_sysv_signal(void)
{
    sighandler_t handler = any_handler();
    sighandler_t ours = vram_disposition_signal(handler, SA_RESETHAND | SA_NODEFER | SA_INTERRUPT, false);
    cr_assert_eq(ours, vram_libc_sysv_signal()(SIGUSR2, handler));
}

static void set_by_sigset(void)
{
    sighandler_t handler = rand() % 3 ? any_handler() : SIG_HOLD;
    sighandler_t ours = vram_disposition_sigset(handler);
    cr_assert_eq(ours, vram_libc_sigset()(SIGUSR2, handler));
}

static void set_interrupts(void)
{
    int interrupt = rand() % 2;
    cr_assert_eq(vram_disposition_interrupt(interrupt), vram_libc_siginterrupt()(SIGUSR2, interrupt));
}

Test(disposition, the_program_sees_what_it_would_see_natively)
{
    static void (*const ways[])(void) = {set_by_sigaction, set_by_sigaction, set_by_signal,
                                         set_by_sysv_signal, set_by_sigset,  set_interrupts};
    FAKE_START();
    vram_disposition_init();
    same_state();
    srand(17);
    for (int i = 0; i < 5000; i++) {
        ways[rand() % 6]();
        same_state();
        for (int raised = rand() % 3; raised > 0; raised--) {
            same_run();
            same_state();
        }
    }
    cr_assert_gt(runs[OURS].times, 1000);
}

Test(disposition, what_was_installed_before_us_is_seen_and_runs)
{
    const struct sigaction theirs = {.sa_handler = on_a, .sa_flags = SA_NODEFER};
    struct sigaction seen;
    FAKE_START();
    for (int side = 0; side < SIDES; side++)
        vram_libc_sigaction()(sigs[side], &theirs, NULL);
    struct sigaction before = in_the_kernel(OURS);
    vram_disposition_init();
    vram_disposition_action(NULL, &seen);
    cr_assert_eq(seen.sa_handler, before.sa_handler);
    cr_assert_eq(seen.sa_flags, before.sa_flags);
    cr_assert_neq(in_the_kernel(OURS).sa_handler, before.sa_handler, "the kernel has ours");
    same_run();
    cr_assert_eq(runs[OURS].times, 1);
}

Test(disposition, a_handler_that_resets_itself_runs_once_each_time_it_is_set)
{
    const struct sigaction once = {.sa_handler = on_a, .sa_flags = SA_RESETHAND};
    struct sigaction seen;
    FAKE_START();
    listen_to_it();
    vram_disposition_init();
    for (unsigned i = 1; i <= 2; i++) {
        vram_disposition_action(&once, NULL);
        raise(SIGUSR1);
        cr_assert_eq(runs[OURS].seen, SIG_DFL, "already while it runs");
        raise(SIGUSR1); /* natively this would be the end */
        cr_assert_eq(runs[OURS].times, i);
        vram_disposition_action(NULL, &seen);
        cr_assert_eq(seen.sa_handler, SIG_DFL);
    }
    cr_assert_not(in_the_kernel(OURS).sa_flags & SA_RESETHAND, "the signal stays ours");
}

Test(disposition, what_is_ignored_is_ignored_by_the_kernel)
{
    FAKE_START();
    listen_to_it();
    vram_disposition_init();
    cr_assert_eq(vram_disposition_signal(SIG_IGN, 0, true), SIG_DFL);
    cr_assert_eq(in_the_kernel(OURS).sa_handler, SIG_IGN); /* which is what its children inherit */
    raise(SIGUSR1);
    cr_assert_str_empty(heard());
    cr_assert_eq(vram_disposition_signal(SIG_DFL, 0, true), SIG_IGN);
    cr_assert_gt((uintptr_t)in_the_kernel(OURS).sa_handler, (uintptr_t)SIG_IGN);
    raise(SIGUSR1);
    cr_assert_eq(times_heard("signal received"), 1);
}

Test(disposition, without_a_thread_the_signal_is_answered_with_a_line)
{
    FAKE_START();
    listen_to_it();
    vram_disposition_init();
    errno = 1234;
    raise(SIGUSR1);
    cr_assert_eq(errno, 1234);
    cr_assert_str_eq(heard(),
                     "vramshim: signal received; this program has not used GPU memory, nothing to give back\n");
    vram_disposition_signal(on_a, 0, true);
    raise(SIGUSR1);
    cr_assert_eq(times_heard("vramshim"), 1, "a program that handles it may mean something else by it");
    vram_disposition_signal(SIG_DFL, 0, true);
    get(4 * MiB);
    raise(SIGUSR1);
    cr_assert_eq(times_heard("vramshim: signal received, but there is no thread to give memory back\n"), 1);
}

static int child_status(pid_t pid)
{
    int status = -1;
    waitpid(pid, &status, 0);
    return status;
}

Test(disposition, only_our_signal_in_our_process_is_ours)
{
    FAKE_START();
    listen_to_it();
    vram_disposition_init();
    cr_assert(vram_disposition_ours(SIGUSR1));
    cr_assert_not(vram_disposition_ours(SIGUSR2));
    cr_assert_not(vram_disposition_ours(0));
    pid_t pid = fork(); /* nothing here follows it: the child is a stranger */
    if (pid == 0) {
        raise(SIGUSR1);
        vram_disposition_signal(on_a, 0, true);
        raise(SIGUSR1);
        _exit(!vram_disposition_ours(SIGUSR1) && runs[OURS].times == 1 ? 0 : 1);
    }
    cr_assert_eq(child_status(pid), 0);
    cr_assert_str_empty(heard());
}

Test(disposition, without_a_signal_nothing_is_installed)
{
    FAKE_START("VRAMSHIM_SIGNAL=none");
    vram_disposition_init();
    cr_assert_eq(in_the_kernel(OURS).sa_handler, SIG_DFL);
    cr_assert_not(vram_disposition_ours(SIGUSR1));
    cr_assert_not(vram_disposition_ours(0));
}

/* The threads of ours, and whether each blocks every signal that can be blocked. */
static unsigned threads(bool *ret_all_blocked)
{
    unsigned n = 0;
    char path[64], line[256];
    DIR *dir = opendir("/proc/self/task");
    *ret_all_blocked = true;
    for (const struct dirent *d; (d = readdir(dir));) {
        bool ours = false;
        snprintf(path, sizeof(path), "/proc/self/task/%.20s/status", d->d_name);
        FILE *status = fopen(path, "re");
        while (status && fgets(line, sizeof(line), status)) {
            unsigned long long mask;
            ours |= strcmp(line, "Name:\tvramshim\n") == 0;
            if (ours && sscanf(line, "SigBlk: %llx", &mask) == 1)
                for (int s = 1; s < 32; s++)
                    *ret_all_blocked &= s == SIGKILL || s == SIGSTOP || (mask >> (s - 1) & 1);
        }
        if (status)
            fclose(status);
        n += ours;
    }
    closedir(dir);
    return n;
}

Test(thread, is_started_once_and_takes_no_signal, .timeout = 60)
{
    sigset_t before, after;
    bool all_blocked;
    FAKE_START();
    listen_to_it();
    cr_assert_not(vram_control_request());
    cr_assert_eq(threads(&all_blocked), 0);
    pthread_sigmask(SIG_SETMASK, NULL, &before);
    errno = 1234;
    vram_control_start();
    vram_control_start();
    cr_assert_eq(errno, 1234);
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    cr_assert_eq(comparable(&before, OURS), comparable(&after, OURS), "the caller's mask is as before");
    cr_assert(vram_control_request());
    hear("flush ("); /* so it runs: until then the C library has signals blocked for it */
    cr_assert_eq(threads(&all_blocked), 1);
    cr_assert(all_blocked);
}

Test(thread, gives_back_on_request_and_says_so, .timeout = 60)
{
    FAKE_START();
    listen_to_it();
    give_back(get(4 * MiB));
    vram_control_start();
    cr_assert(vram_control_request());
    hear("vramshim: flush (SIGUSR1): gave 1 block (4.0 MiB) back to the driver in ");
    hear(", kept 0 blocks (0 B)\n");
    cr_assert_eq(fake_blocks(), 0);
    vram_control_request();
    hear("flush (SIGUSR1): nothing was kept just then, so there was nothing to give back\n");
    invariants();
}

Test(thread, says_what_the_driver_refused, .timeout = 60)
{
    FAKE_START("VRAMSHIM_SIGNAL=RTMIN+2");
    listen_to_it();
    give_back(get(4 * MiB));
    fake.cuMemFree_v2.refuse = CUDA_ERROR_NOT_PERMITTED;
    vram_control_start();
    vram_control_request();
    hear(", kept 1 block (4.0 MiB): the driver refused with error 800\n");
    cr_assert_eq(times_heard("flush (SIGRTMIN+2)"), 1);
}

static sem_t go_on;
static void stay(void) { sem_wait(&go_on); }

static void flush_that_stays(void)
{
    sem_init(&go_on, 0, 0);
    fake.cuMemFree_v2.before = stay;
    vram_control_request();
    while (fake.cuMemFree_v2.calls == 0)
        moment();
}

Test(thread, a_storm_of_requests_is_one_more_flush, .timeout = 60)
{
    FAKE_START();
    listen_to_it();
    CUdeviceptr p = get(4 * MiB);
    give_back(get(4 * MiB));
    vram_control_start();
    flush_that_stays();
    give_back(p);
    for (int i = 0; i < 100; i++)
        vram_control_request();
    sem_post(&go_on);
    hear("gave 1 block (4.0 MiB)");
    while (fake_blocks())
        moment();
    while (times_heard("flush (") < 2)
        moment();
    for (int i = 0; i < 50 && times_heard("flush (") == 2; i++)
        moment();
    cr_assert_eq(times_heard("flush ("), 2, "what is asked for meanwhile is one flush, and is not forgotten");
}

Test(thread, a_flush_waits_for_the_end_of_a_capture, .timeout = 60)
{
    FAKE_START();
    listen_to_it();
    give_back(get(4 * MiB));
    vram_control_start();
    vram_capture_announce();
    vram_capture_begun((CUstream)0x100, false, &fake_a);
    vram_control_request();
    hear("flush (SIGUSR1): a CUDA graph is being captured; it waits for the end of the capture\n");
    cr_assert_eq(fake.cuMemFree_v2.calls, 0);
    vram_capture_ended((CUstream)0x100, false, &fake_a);
    hear("gave 1 block (4.0 MiB)");
}

Test(thread, the_signal_is_a_request_whatever_the_program_does_with_it, .timeout = 60)
{
    FAKE_START();
    listen_to_it();
    vram_disposition_init();
    give_back(get(4 * MiB));
    vram_control_start();
    raise(SIGUSR1);
    hear("gave 1 block (4.0 MiB)");
    give_back(get(8 * MiB));
    vram_disposition_signal(on_a, 0, true);
    raise(SIGUSR1);
    hear("gave 1 block (8.0 MiB)");
    cr_assert_eq(runs[OURS].times, 1);
    cr_assert_eq(times_heard("signal received"), 0);
}

Test(thread, without_a_signal_and_decay_there_is_none)
{
    bool all_blocked;
    FAKE_START("VRAMSHIM_SIGNAL=none", "VRAMSHIM_DECAY=none");
    vram_control_start();
    cr_assert_not(vram_control_request());
    cr_assert_eq(threads(&all_blocked), 0);
}

Test(thread, the_first_use_of_gpu_memory_tells_what_is_lacking)
{
    FAKE_START("VRAMSHIM_WASTE=x");
    listen_to_it();
    vram_driver_table.cuCtxSynchronize = NULL;
    vram_control_atfork = ENOMEM;
    vram_control_start();
    vram_control_start();
    cr_assert_eq(times_heard("VRAMSHIM_WASTE=x was ignored"), 1);
    cr_assert_eq(times_heard("cannot follow forks ("), 1);
    cr_assert_eq(times_heard("this driver has no cuCtxSynchronize: freed memory cannot be kept"), 1);
}

Test(thread, a_driver_without_fences_lacks_nothing)
{
    FAKE_START();
    listen_to_it();
    vram_driver_table.cuCtxRecordEvent = NULL;
    vram_driver_table.cuCtxSetCurrent = NULL;
    vram_control_start();
    cr_assert_str_empty(heard());
}

Test(thread, a_forked_child_has_none_until_it_starts_one, .timeout = 60)
{
    FAKE_START();
    listen_to_it();
    get(4 * MiB);
    vram_control_start();
    pid_t pid = fork();
    if (pid == 0) {
        vram_heap_forget();
        vram_control_forget();
        vram_proc_record();
        if (vram_control_request())
            _exit(1);
        give_back(get(16 * MiB));
        vram_control_start();
        if (!vram_control_request())
            _exit(2);
        while (times_heard("gave 1 block (16.0 MiB)") == 0)
            moment();
        _exit(0);
    }
    cr_assert_eq(child_status(pid), 0);
    cr_assert(vram_control_request(), "the parent keeps its own");
}

static void is_the_driver_left_alone(int status, void *unused)
{
    (void)unused;
    _exit(status == 0 && vram_heap_is_exiting() && vram_control_request() ? 0 : 1);
}

/* The driver registers its own exit function before the program can use memory: ours runs first. */
Test(thread, at_exit_no_driver_call_is_ours_any_more, .timeout = 60)
{
    FAKE_START();
    pid_t pid = fork();
    if (pid == 0) {
        vram_proc_record();
        on_exit(is_the_driver_left_alone, NULL);
        vram_control_start();
        exit(vram_heap_is_exiting());
    }
    cr_assert_eq(child_status(pid), 0);
}

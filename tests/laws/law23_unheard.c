/*
 * Law 23, the other side: a program that ignores the signal, inherits it ignored, or blocks it and takes it itself, has it as it
 * would natively, and the shim does not hear it. Then the report says so, because somebody will have waited for memory.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <sys/signalfd.h>

#include "law.h"
#include "sim.h"
#include "world.h"

enum { MIB = 1 << 20, SAID = 16384 };

static struct sigaction action_before;
static sigset_t mask_before;

static void look(struct sigaction *ret_action, sigset_t *ret_mask)
{
    memset(ret_action, 0, sizeof(*ret_action));
    sigemptyset(ret_mask);
    CHECK(sigaction(SIGUSR1, NULL, ret_action) == 0 && pthread_sigmask(SIG_BLOCK, NULL, ret_mask) == 0);
}

/* Uses GPU memory, one block of which is in the cache then; what the program sees of the signal is as it was. */
static void use_memory(void)
{
    struct sigaction action;
    sigset_t mask;
    look(&action_before, &mask_before);
    law_context();
    cached_block(4 * MIB);
    look(&action, &mask);
    CHECK(action.sa_handler == action_before.sa_handler && action.sa_flags == action_before.sa_flags);
    for (int sig = 1; sig < NSIG; sig++)
        CHECK_EQ(sigismember(&mask, sig), sigismember(&mask_before, sig));
}

static void nothing_goes_back(void)
{
    LINGER(driver_calls("cuMemFree_v2") > 0);
    CHECK_EQ(driver_calls("cuMemFree_v2"), under_shim() ? 0 : 1);
}

/* What is said of a signal by name, on standard error and in the report, by a program that has ended well; natively nothing. */
static unsigned lines_about(const char *child, const char *const *env, const char *what)
{
    static char said[SAID];
    CHECK_EQ(law_run_child(child, env, said, sizeof(said)), 0);
    unsigned n = count_of(said, what);
    if (!under_shim())
        CHECK_EQ(strlen(said), 0);
    return n;
}
#define EXPECT_LINES(n, ...) CHECK_EQ(lines_about(__VA_ARGS__), under_shim() ? (n) : 0)

static const char ignored[] = "SIGUSR1 is ignored here (by the program, or by `trap '' USR1` in what started it): it gives no memory "
                              "back; VRAMSHIM_SIGNAL=USR2 names another\n";
static const char blocked[] = ", and none has come through: one that waits, or that the program takes by sigwait, gives no memory back; "
                              "VRAMSHIM_SIGNAL=USR2 names another\n";
static const char unheard[] = "gives no memory back; VRAMSHIM_SIGNAL="; /* either, of any signal */

LAW_CHILD(ignores)
{
    signal(SIGUSR1, SIG_IGN);
    use_memory();
    raise(SIGUSR1);
    nothing_goes_back();
}

LAW_CASE_SIM_ONCE(ignored_by_the_program)
{
    EXPECT_LINES(1u, "ignores", NULL, ignored);
    EXPECT_LINES(2u, "ignores", ENV("VRAMSHIM_VERBOSE=1"), ignored); /* at the first use as well */
    EXPECT_LINES(0u, "ignores", ENV("VRAMSHIM_SIGNAL=none"), unheard);
    EXPECT_LINES(0u, "ignores", ENV("VRAMSHIM_SIGNAL=USR2"), unheard);
}

/* A batch script's trap is inherited by all that it starts. */
LAW_CHILD(inherits)
{
    struct sigaction action;
    CHECK(sigaction(SIGUSR1, NULL, &action) == 0 && action.sa_handler == SIG_IGN);
    raise(SIGUSR1);
    use_memory();
    raise(SIGUSR1);
    nothing_goes_back();
}

LAW_CASE_SIM_ONCE(ignored_by_a_script)
{
    char self[512], command[1024], said[SAID];
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    CHECK(n > 0);
    self[n] = 0;
    snprintf(command, sizeof(command), "trap '' USR1\n%s --case inherits --route dlsym 2>&1\nstatus=$?\ntrue\nexit $status", self);
    CHECK_EQ(shell(command, said, sizeof(said)), 0);
    CHECK_EQ(count_of(said, ignored), under_shim());
    CHECK(under_shim() || !*said);
    snprintf(command, sizeof(command), "trap '' USR1 USR2\nVRAMSHIM_SIGNAL=USR2 %s --case inherits --route dlsym 2>&1; exit $?", self);
    CHECK_EQ(shell(command, said, sizeof(said)), 0);
    CHECK_EQ(count_of(said, "SIGUSR2 is ignored here (by the program, or by `trap '' USR2` in what started it): it gives no memory "
                            "back; VRAMSHIM_SIGNAL=USR1 names another\n"), under_shim());
}

static sigset_t only_usr1(void)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    return set;
}

/* Blocked before the first use, and taken by each call that takes one. */
LAW_CHILD(takes)
{
    const struct timespec second = {1, 0};
    struct signalfd_siginfo read_info;
    siginfo_t info;
    int sig = 0;
    sigset_t set = only_usr1();
    CHECK(pthread_sigmask(SIG_BLOCK, &set, NULL) == 0);
    use_memory();
    kill(getpid(), SIGUSR1);
    CHECK(sigwait(&set, &sig) == 0 && sig == SIGUSR1);
    kill(getpid(), SIGUSR1);
    CHECK(sigtimedwait(&set, &info, &second) == SIGUSR1 && info.si_pid == getpid());
    kill(getpid(), SIGUSR1);
    int fd = signalfd(-1, &set, SFD_CLOEXEC);
    CHECK(read(fd, &read_info, sizeof(read_info)) == sizeof(read_info) && read_info.ssi_signo == SIGUSR1);
    nothing_goes_back();
}

LAW_CASE_SIM_ONCE(blocked_and_taken)
{
    EXPECT_LINES(1u, "takes", NULL, blocked);
    EXPECT_LINES(2u, "takes", ENV("VRAMSHIM_VERBOSE=1"), blocked);
    EXPECT_LINES(0u, "takes", ENV("VRAMSHIM_SIGNAL=none"), unheard);
}

/* Blocked where the program ends, and another thread lets it in. */
static void handle(int sig) { (void)sig; }

static void *let_it_in(void *done)
{
    sigset_t set = only_usr1();
    pthread_sigmask(SIG_UNBLOCK, &set, NULL);
    WAIT_UNTIL(__atomic_load_n((bool *)done, __ATOMIC_ACQUIRE));
    return NULL;
}

LAW_CHILD(is_heard)
{
    bool done = false;
    pthread_t other;
    sigset_t set = only_usr1();
    signal(SIGUSR1, handle);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    use_memory();
    CHECK(pthread_create(&other, NULL, let_it_in, &done) == 0);
    kill(getpid(), SIGUSR1);
    WAIT_UNTIL(driver_calls("cuMemFree_v2") == 1);
    __atomic_store_n(&done, true, __ATOMIC_RELEASE);
    pthread_join(other, NULL);
    signal(SIGUSR1, SIG_IGN); /* on its way out: it was heard before */
}

LAW_CHILD(is_not_asked) { use_memory(); }

LAW_CASE_SIM_ONCE(nothing_is_said_of_one_that_is_heard)
{
    EXPECT_LINES(0u, "is_not_asked", ENV("VRAMSHIM_REPORT=stderr"), unheard);
    if (under_shim()) /* natively nothing goes back */
        EXPECT_LINES(0u, "is_heard", NULL, unheard);
}

/* One that comes while the shim starts its thread is answered by it. The shim registers its function in between. */
static bool starts;

int on_exit(void (*function)(int, void *), void *argument)
{
    int (*next)(void (*)(int, void *), void *) = dlsym(RTLD_NEXT, "on_exit");
    if (starts)
        raise(SIGUSR1);
    starts = false;
    return next(function, argument);
}

LAW_CHILD(starts_at_the_signal)
{
    starts = under_shim();
    use_memory();
    CHECK(!starts);
    signal(SIGUSR1, handle);
    raise(SIGUSR1);
    WAIT_UNTIL(driver_calls("cuMemFree_v2") == 1);
}

LAW_CASE_SIM_ONCE(heard_while_the_thread_is_started)
{
    EXPECT_LINES(0u, "starts_at_the_signal", NULL, "there is no thread");
}

/* What its parent has heard is not the child's. */
LAW_CHILD(forks_and_ignores)
{
    int status;
    signal(SIGUSR1, handle);
    raise(SIGUSR1);
    pid_t pid = fork();
    if (pid == 0) {
        signal(SIGUSR1, SIG_IGN);
        use_memory();
        exit(0);
    }
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    use_memory();
}

LAW_CASE_SIM_ONCE(ignored_by_a_child) { EXPECT_LINES(1u, "forks_and_ignores", NULL, ignored); }

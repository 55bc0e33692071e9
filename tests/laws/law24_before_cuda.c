/*
 * Law 24: from load on, the signal harms no program that left it at its default, and says so with one fixed write. This
 * is the one wanted difference to native, where it ends the program.
 */
#include <sys/socket.h>

#include "law.h"
#include "sim.h"
#include "world.h"

static const char line[] = "vramshim: signal received; this program has not used GPU memory, nothing to give back\n";

static void expect_survival(const char *name, const char *const *env, unsigned lines)
{
    char text[8192];
    int status = law_run_child(name, env, text, sizeof(text));
    if (!under_shim()) {
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGUSR1);
        return;
    }
    CHECK_EQ(status, 0);
    CHECK_EQ(count_of(text, line), lines);
    CHECK_EQ(strlen(text), lines * (sizeof(line) - 1));
}

LAW_CHILD(raises_three_times)
{
    for (int i = 0; i < 3; i++) {
        errno = 40 + i;
        kill(getpid(), SIGUSR1);
        CHECK_EQ(errno, 40 + i);
    }
    CHECK_EQ(thread_count(), 1);
}

LAW_CASE_ONCE(at_its_default) { expect_survival("raises_three_times", NULL, 3); }

/* Before main: constructors of the program run after ours. */
static void __attribute__((constructor)) early(void)
{
    if (getenv("LAW24_EARLY"))
        raise(SIGUSR1);
}

LAW_CHILD(does_nothing) {}

LAW_CASE_ONCE(before_main) { expect_survival("does_nothing", ENV("LAW24_EARLY=1"), 1); }

/* CUDA is up, but no memory was used. */
LAW_CHILD(raises_with_a_context)
{
    law_context();
    raise(SIGUSR1);
    CHECK_EQ(thread_count(), 1);
}

LAW_CASE_SIM(before_the_first_allocation) { expect_survival("raises_with_a_context", NULL, 1); }

/* The program's own handler is all that there is; an ignored signal is nothing at all. */
static volatile sig_atomic_t calls;
static void count(int sig) { calls += sig == SIGUSR1; }

LAW_CHILD(handles_and_ignores)
{
    signal(SIGUSR1, count);
    raise(SIGUSR1);
    CHECK_EQ(calls, 1);
    signal(SIGUSR1, SIG_IGN);
    raise(SIGUSR1);
}

LAW_CASE_ONCE(handled_or_ignored)
{
    char text[8192];
    CHECK_EQ(law_run_child("handles_and_ignores", NULL, text, sizeof(text)), 0);
    CHECK_EQ(strlen(text), 0);
}

/* It waits for the signal instead of handling it: it gets it, and nothing is said. */
LAW_CHILD(waits_for_it)
{
    sigset_t only;
    int sig = 0;
    sigemptyset(&only);
    sigaddset(&only, SIGUSR1);
    CHECK(sigprocmask(SIG_BLOCK, &only, NULL) == 0);
    kill(getpid(), SIGUSR1);
    CHECK(sigwait(&only, &sig) == 0);
    CHECK_EQ(sig, SIGUSR1);
}

LAW_CASE_ONCE(waited_for)
{
    char text[8192];
    CHECK_EQ(law_run_child("waits_for_it", NULL, text, sizeof(text)), 0);
    CHECK_EQ(strlen(text), 0);
}

/* Pending when the program was started: delivered once it is let in. */
LAW_CHILD(lets_it_in)
{
    sigset_t only, pending;
    sigemptyset(&only);
    sigaddset(&only, SIGUSR1);
    CHECK(sigpending(&pending) == 0 && sigismember(&pending, SIGUSR1));
    CHECK(sigprocmask(SIG_UNBLOCK, &only, NULL) == 0);
}

LAW_CHILD(starts_with_it_pending)
{
    sigset_t only;
    sigemptyset(&only);
    sigaddset(&only, SIGUSR1);
    CHECK(sigprocmask(SIG_BLOCK, &only, NULL) == 0);
    raise(SIGUSR1);
    execl("/proc/self/exe", "law", "--case", "lets_it_in", "--route", "dlsym", (char *)NULL);
}

LAW_CASE_ONCE(pending_from_before_exec) { expect_survival("starts_with_it_pending", NULL, 1); }

/* Python, which leaves it at its default. */
LAW_CASE_ONCE(python)
{
    char out[4096];
    if (shell("command -v python3", out, sizeof(out)) != 0)
        law_skip("no python3");
    int status = shell("exec python3 -c 'import os, signal; print(signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL, "
                       "flush=True); os.kill(os.getpid(), signal.SIGUSR1); print(\"alive\")' 2>&1",
                       out, sizeof(out));
    CHECK(strncmp(out, "True\n", 5) == 0);
    CHECK_EQ(status, under_shim() ? 0 : 128 + SIGUSR1);
    CHECK_EQ(count_of(out, line), under_shim());
    CHECK_EQ(count_of(out, "alive\n"), under_shim());
}

/* A program that knows no CUDA at all. */
LAW_CASE_ONCE(a_shell)
{
    char out[4096];
    int status = shell("sh -c 'kill -USR1 $$; echo alive' 2>&1", out, sizeof(out));
    if (under_shim()) {
        CHECK_EQ(status, 0);
        CHECK_EQ(count_of(out, line), 1);
        CHECK(strstr(out, "alive\n"));
    } else {
        CHECK_EQ(status, 128 + SIGUSR1);
        CHECK(!strstr(out, "alive"));
    }
}

/* One write: on a socket that keeps messages apart, one message. */
LAW_CASE_ONCE(in_one_write)
{
    int fds[2];
    char message[512];
    if (!under_shim())
        return;
    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        dup2(fds[1], STDERR_FILENO);
        execl("/proc/self/exe", "law", "--case", "raises_three_times", "--route", "dlsym", (char *)NULL);
        _exit(126);
    }
    close(fds[1]);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(recv(fds[0], message, sizeof(message), 0), sizeof(line) - 1);
        CHECK(memcmp(message, line, sizeof(line) - 1) == 0);
    }
    CHECK_EQ(recv(fds[0], message, sizeof(message), 0), 0);
    int status;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK_EQ(status, 0);
}

/* Nowhere to say it: still harmless. */
LAW_CASE_ONCE(with_standard_error_closed)
{
    char out[4096];
    int status = shell("exec 2>&-; sh -c 'kill -USR1 $$; echo alive'", out, sizeof(out));
    CHECK_EQ(status, under_shim() ? 0 : 128 + SIGUSR1);
    CHECK(strcmp(out, under_shim() ? "alive\n" : "") == 0);
}

/* Other signals, and all of them with VRAMSHIM_SIGNAL=none, end a program as ever. */
LAW_CHILD(raises_another) { raise(SIGUSR2); }

LAW_CASE_ONCE(others_end_the_program)
{
    char text[4096];
    int status = law_run_child("raises_another", NULL, text, sizeof(text));
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGUSR2);
    CHECK_EQ(strlen(text), 0);
    status = law_run_child("raises_three_times", ENV("VRAMSHIM_SIGNAL=none"), text, sizeof(text));
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGUSR1);
    CHECK_EQ(strlen(text), 0);
}

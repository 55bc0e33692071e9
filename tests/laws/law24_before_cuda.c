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

/*
 * Law 27 in a sandbox: a program that has forbidden itself to open files and to poll ends as it would without the shim, and its
 * report is there. A filter that it was born with, as every container has one, changes nothing.
 */
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include "law.h"
#include "sim.h"
#include "world.h"

enum { MIB = 1 << 20, STATUS = 5 };

static char text[65536], out[4096];

static const int asking[] = {
#ifdef SYS_poll
    SYS_poll, SYS_select,
#endif
    SYS_ppoll, SYS_pselect6,
};
static const int opening[] = {
#ifdef SYS_open
    SYS_open,
#endif
    SYS_openat,
};
static const int seeking[] = {SYS_lseek};
static const int dating[] = {SYS_statx};
static const int asking_for_filters[] = {SYS_prctl};

enum { RULES_MAX = 32 };

static struct sock_filter rules[RULES_MAX];
static unsigned short rule_count;

static void add(struct sock_filter rule) { rules[rule_count++] = rule; }

static void answer(unsigned action, const int *calls, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        add((struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)calls[i], 0, 1));
        add((struct sock_filter)BPF_STMT(BPF_RET | BPF_K, action));
    }
}
#define ANSWER(action, calls) answer(action, calls, sizeof(calls) / sizeof(*(calls)))

static void begin(void)
{
    rule_count = 0;
    add((struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)));
}

/* The rest is allowed. */
static struct sock_fprog *finished(void)
{
    static struct sock_fprog filter = {0, rules};
    add((struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
    filter.len = rule_count;
    return &filter;
}

/* As programs do: by prctl; by plain system calls, which nobody between sees; as libseccomp, for all threads. */
static void install(const char *how, const struct sock_fprog *filter)
{
    if (*how == 'r')
        CHECK_EQ(syscall(SYS_prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
    else
        CHECK_EQ(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
    if (*how == 'p')
        CHECK_EQ(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, filter), 0);
    else
        CHECK_EQ(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, *how == 'l' ? SECCOMP_FILTER_FLAG_TSYNC : 0, filter), 0);
}

LAW_CHILD(sandboxes_itself)
{
    CUdeviceptr p;
    const char *how = getenv("LAW27_HOW");
    const unsigned action = *getenv("LAW27_ACTION") == 'k' ? SECCOMP_RET_KILL_PROCESS : SECCOMP_RET_ERRNO | EPERM;
    law_context();
    OK(cu.cuMemAlloc_v2(&p, MIB));
    begin();
    ANSWER(action, asking);
    ANSWER(action, opening);
    ANSWER(action, seeking);
    ANSWER(action, dating);
    if (*how != 'r') /* only the kernel can tell of that one */
        ANSWER(action, asking_for_filters);
    install(how, finished());
    cached_block(4 * MIB);
    if (under_shim() && *how == 'l') { /* the thread that answers is in the sandbox as well */
        unsigned long before = driver_calls("cuMemFree_v2");
        raise(SIGUSR1);
        WAIT_UNTIL(driver_calls("cuMemFree_v2") > before);
    }
    exit(STATUS);
}

static void expect_status(int status)
{
    if (!WIFEXITED(status))
        law_fail(__FILE__, __LINE__, "killed by signal %d: %s", WTERMSIG(status), text);
    CHECK_EQ(WEXITSTATUS(status), STATUS);
}

/* Each way into a sandbox, each answer of its filter, with the report on standard error and in a file. */
static void sandboxed(const char *how, const char *action)
{
    char directory[] = "/tmp/law27.XXXXXX", report[64], trace[64];
    const char *const none = "LAW27_NONE=";
    CHECK(mkdtemp(directory));
    snprintf(report, sizeof(report), "VRAMSHIM_REPORT=%s/r", directory);
    snprintf(trace, sizeof(trace), "VRAMSHIM_TRACE=%s/t", directory);
    for (int file = 0; file < 2; file++) {
        expect_status(law_run_child("sandboxes_itself", ENV(how, action, file ? report : none, file ? trace : none), text,
                                    sizeof(text)));
        if (!under_shim())
            continue;
        CHECK_EQ(count_of(text, "1.0 MiB in 1 block never freed"), 1);
        CHECK_EQ(count_of(text, "the report for "), file);
        CHECK_EQ(count_of(text, "the trace for "), file);
        CHECK_EQ(count_of(text, ",allocate,"), 2 * file);
    }
    CHECK_EQ(rmdir(directory), 0); /* nothing was opened */
}

LAW_CASE_SIM_ONCE(killed_for_asking) { sandboxed("LAW27_HOW=prctl", "LAW27_ACTION=kill"); }
LAW_CASE_SIM_ONCE(refused) { sandboxed("LAW27_HOW=prctl", "LAW27_ACTION=eperm"); }
LAW_CASE_SIM_ONCE(as_libseccomp_does) { sandboxed("LAW27_HOW=libseccomp", "LAW27_ACTION=kill"); }

/* A descriptor of its own that was named is written to, by the calls that it may make. */
LAW_CASE_SIM_ONCE(into_its_standard_output)
{
    static const char *const actions[] = {"LAW27_ACTION=kill", "LAW27_ACTION=eperm"};
    for (int i = 0; i < 2; i++) {
        expect_status(run_child_apart("sandboxes_itself", ENV("LAW27_HOW=prctl", actions[i], "VRAMSHIM_REPORT=/dev/stdout"), out,
                                      text, sizeof(out)));
        CHECK_EQ(count_of(out, "1.0 MiB in 1 block never freed"), under_shim());
        CHECK_EQ(strlen(text), 0);
    }
}

LAW_CASE_SIM_ONCE(by_plain_system_calls)
{
    if (prctl(PR_GET_SECCOMP) != 0)
        law_skip("there is a filter already: the kernel does not tell one from two");
    sandboxed("LAW27_HOW=raw", "LAW27_ACTION=kill");
    sandboxed("LAW27_HOW=raw", "LAW27_ACTION=eperm");
}

/* Born with a filter. */
LAW_CHILD(leaks)
{
    CUdeviceptr p;
    alarm(30);
    law_context();
    OK(cu.cuMemAlloc_v2(&p, MIB));
    exit(STATUS);
}

static int status_under(const struct sock_fprog *filter, const char *name, int err)
{
    int status = -1;
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        dup2(err, STDERR_FILENO);
        if (filter)
            install("p", filter);
        execl("/proc/self/exe", "law", "--case", name, "--route", "dlsym", (char *)NULL);
        _exit(126);
    }
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    return status;
}

/* One that allows everything: a full pipe that nobody reads is still not waited for. */
LAW_CASE_SIM_ONCE(a_full_pipe_in_a_container)
{
    int fds[2];
    char page[4096] = {0};
    CHECK(pipe2(fds, O_CLOEXEC | O_NONBLOCK) == 0);
    while (write(fds[1], page, sizeof(page)) > 0)
        ;
    CHECK(fcntl(fds[1], F_SETFL, 0) == 0);
    begin();
    expect_status(status_under(finished(), "leaks", fds[1]));
}

/* One that refuses to poll: what cannot be asked is written all the same. */
LAW_CASE_SIM_ONCE(a_container_that_refuses)
{
    static const unsigned errors[] = {EPERM, ENOSYS};
    for (int i = 0; i < 2; i++) {
        int fds[2];
        CHECK(pipe2(fds, O_CLOEXEC | O_NONBLOCK) == 0);
        begin();
        ANSWER(SECCOMP_RET_ERRNO | errors[i], asking);
        expect_status(status_under(finished(), "leaks", fds[1]));
        ssize_t n = read(fds[0], text, sizeof(text) - 1);
        text[n > 0 ? n : 0] = 0;
        CHECK_EQ(count_of(text, "LEAK SUMMARY"), under_shim());
        close(fds[0]);
        close(fds[1]);
    }
}

/* Standard error is a file: when that was made is not asked for in a sandbox, and may be refused in a container. */
LAW_CASE_SIM_ONCE(into_a_file_of_no_date)
{
    char path[] = "/tmp/law27.XXXXXX";
    int fd = mkstemp(path);
    CHECK(fd >= 0 && unlink(path) == 0 && fcntl(fd, F_SETFD, FD_CLOEXEC) == 0);
    setenv("LAW27_HOW", "prctl", 1);
    setenv("LAW27_ACTION", "kill", 1);
    expect_status(status_under(NULL, "sandboxes_itself", fd));
    begin();
    ANSWER(SECCOMP_RET_ERRNO | EPERM, dating);
    expect_status(status_under(finished(), "leaks", fd));
    ssize_t n = pread(fd, text, sizeof(text) - 1, 0);
    text[n > 0 ? n : 0] = 0;
    CHECK_EQ(count_of(text, "1.0 MiB in 1 block never freed"), 2 * under_shim());
}

/* The strict mode: nothing but read, write and the thread's end. exit() writes out what the program had to say, and only then
 * does something forbidden, for which its thread is killed; ours notices, and does not keep the process. */
LAW_CHILD(is_strict)
{
    CUdeviceptr p;
    law_context();
    OK(cu.cuMemAlloc_v2(&p, MIB));
    printf("the last words\n");
    CHECK_EQ(prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT), 0);
    exit(STATUS);
}

LAW_CASE_SIM_ONCE(the_strict_mode)
{
    static const char *const thread[] = {"VRAMSHIM_SIGNAL=USR1", "VRAMSHIM_SIGNAL=none"};
    for (int i = 0; i < 2; i++) {
        int status = run_child_apart("is_strict", ENV(thread[i], "VRAMSHIM_DECAY=none"), out, text, sizeof(out));
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        CHECK(strcmp(out, "the last words\n") == 0);
    }
}

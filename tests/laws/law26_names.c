/*
 * Law 26: many processes, one environment. Every file name carries the pid, a relative path means the directory at load
 * (uftrace 745), and a launcher keeps what LD_PRELOAD held.
 */
#include <sys/stat.h>

#include "law.h"
#include "sim.h"
#include "world.h"

enum { MIB = 1 << 20 };

static char directory[] = "/tmp/law26.XXXXXX";

static void remove_directory(void)
{
    char command[64], out[64];
    snprintf(command, sizeof(command), "rm -rf %s", directory);
    shell(command, out, sizeof(out));
}

static void in_a_new_directory(void)
{
    CHECK(mkdtemp(directory));
    CHECK(chdir(directory) == 0);
}

/* What a shell pattern below the directory matches, in order, one a line; "" for nothing. */
static const char *list(const char *pattern)
{
    static char out[8192];
    char command[256];
    snprintf(command, sizeof(command), "cd %s && ls -d %s 2>/dev/null", directory, pattern);
    shell(command, out, sizeof(out));
    return out;
}

static void leak(size_t bytes)
{
    CUdeviceptr p;
    law_context();
    OK(cu.cuMemAlloc_v2(&p, bytes));
}

/* Says who it is on stderr, which the report does not use here. */
LAW_CHILD(leaks_one)
{
    fprintf(stderr, "%d", (int)getpid());
    leak(MIB);
}

LAW_CHILD(leaks_one_elsewhere)
{
    fprintf(stderr, "%d", (int)getpid());
    CHECK(chdir("/") == 0);
    leak(MIB);
}

/* Runs the case with this pattern and expects the report, whole, in the file of this name, where %p stands for the pid
 * and %% for a percent sign. */
static void expect_file(const char *name, const char *pattern, const char *expected)
{
    char variable[256], text[4096], path[512], report[16384];
    in_a_new_directory();
    snprintf(variable, sizeof(variable), "VRAMSHIM_REPORT=%s", pattern);
    CHECK_EQ(law_run_child(name, ENV(variable), text, sizeof(text)), 0);
    if (!under_shim()) {
        CHECK(strcmp(list("*"), "") == 0);
        remove_directory();
        return;
    }
    size_t at = (size_t)snprintf(path, sizeof(path), "%s/", directory);
    for (const char *c = expected; *c; c++) {
        if (c[0] == '%' && c[1] == 'p') {
            at += (size_t)snprintf(path + at, sizeof(path) - at, "%s", text);
            c++;
        } else {
            c += c[0] == '%' && c[1] == '%';
            path[at++] = *c;
        }
    }
    path[at] = 0;
    if (slurp(path, report, sizeof(report)) < 0)
        law_fail(__FILE__, __LINE__, "no file %s; there is: %s", path, list("*"));
    CHECK_EQ(count_of(report, "LEAK SUMMARY"), 1);
    CHECK_EQ(count_of(report, "1.0 MiB in 1 block never freed"), 1);
    struct stat st;
    CHECK(stat(path, &st) == 0 && S_ISREG(st.st_mode));
    CHECK_EQ(st.st_mode & 0111, 0);
    remove_directory();
}

LAW_CASE_SIM_ONCE(named_by_the_pid) { expect_file("leaks_one", "report-%p.txt", "report-%p.txt"); }
LAW_CASE_SIM_ONCE(the_pid_is_added) { expect_file("leaks_one", "report", "report.%p"); }
LAW_CASE_SIM_ONCE(the_pid_twice) { expect_file("leaks_one", "%p-%p", "%p-%p"); }
LAW_CASE_SIM_ONCE(a_percent_sign) { expect_file("leaks_one", "100%%-%p", "100%%-%p"); }
LAW_CASE_SIM_ONCE(a_percent_sign_is_no_pid) { expect_file("leaks_one", "a%%p", "a%%p.%p"); }
LAW_CASE_SIM_ONCE(relative_to_the_directory_at_load) { expect_file("leaks_one_elsewhere", "report.%p", "report.%p"); }

LAW_CASE_SIM_ONCE(a_directory_with_a_percent_sign)
{
    char text[4096];
    in_a_new_directory();
    CHECK(mkdir("50%p", 0700) == 0 && chdir("50%p") == 0);
    CHECK_EQ(law_run_child("leaks_one_elsewhere", ENV("VRAMSHIM_REPORT=report.%p"), text, sizeof(text)), 0);
    if (under_shim()) {
        char expected[64];
        snprintf(expected, sizeof(expected), "50%%p/report.%d\n", atoi(text));
        CHECK(strcmp(list("*/*"), expected) == 0);
    }
    remove_directory();
}

/* Many processes at once, forked and started: a file each, each whole. */
LAW_CHILD(many_processes)
{
    enum { N = 6 };
    for (int i = 0; i < N; i++)
        if (fork() == 0) {
            leak(MIB);
            exit(0);
        }
    int status;
    for (int i = 0; i < N; i++)
        CHECK(wait(&status) > 0 && status == 0);
}

LAW_CASE_SIM_ONCE(a_file_for_each_process)
{
    char text[4096], out[65536];
    in_a_new_directory();
    for (int i = 0; i < 3; i++)
        CHECK_EQ(law_run_child("many_processes", ENV("VRAMSHIM_REPORT=report"), text, sizeof(text)), 0);
    if (under_shim()) {
        CHECK_EQ(count_of(list("report.*"), "\n"), 18);
        CHECK_EQ(shell("cat report.*", out, sizeof(out)), 0);
        CHECK_EQ(count_of(out, "LEAK SUMMARY"), 18);
        CHECK_EQ(count_of(out, "1.0 MiB in 1 block never freed"), 18);
    } else {
        CHECK(strcmp(list("*"), "") == 0);
    }
    CHECK(chdir("/") == 0);
    remove_directory();
}

/* A program that uses CUDA becomes another: same pid, the report is the second one's and knows nothing of the first. */
LAW_CHILD(becomes_another)
{
    leak(7 * MIB);
    execl("/proc/self/exe", "law", "--case", "leaks_one", "--route", "dlsym", (char *)NULL);
}

LAW_CASE_SIM_ONCE(after_exec) { expect_file("becomes_another", "report.%p", "report.%p"); }

/* A daemon: it forks twice, leaves its directory and closes every descriptor, and is the one that uses CUDA. */
LAW_CHILD(becomes_a_daemon)
{
    int done[2];
    char c;
    CHECK(pipe(done) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        CHECK(setsid() > 0);
        if (fork() != 0)
            _exit(0);
        CHECK(chdir("/") == 0);
        for (int fd = 0; fd < 1024; fd++)
            if (fd != done[1])
                close(fd);
        leak(MIB);
        exit(0); /* the report is written before the pipe closes */
    }
    close(done[1]);
    int status;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK_EQ(status, 0);
    CHECK_EQ(read(done[0], &c, 1), 0);
}

LAW_CASE_SIM_ONCE(of_a_daemon)
{
    char text[4096], out[8192];
    in_a_new_directory();
    CHECK_EQ(law_run_child("becomes_a_daemon", ENV("VRAMSHIM_REPORT=report"), text, sizeof(text)), 0);
    CHECK_EQ(strlen(text), 0);
    CHECK_EQ(count_of(list("*"), "\n"), under_shim());
    if (under_shim()) {
        CHECK_EQ(shell("cat report.*", out, sizeof(out)), 0);
        CHECK_EQ(count_of(out, "1.0 MiB in 1 block never freed"), 1);
    }
    CHECK(chdir("/") == 0);
    remove_directory();
}

/* Threads, vfork children and failed execs of one process: one file, one report. */
LAW_CHILD(starts_others)
{
    char out[64];
    leak(MIB);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(shell("exit 3", out, sizeof(out)), 3);
        CHECK_EQ(system("/nowhere/to/be/found 2>/dev/null") >> 8, 127);
        pid_t pid = vfork();
        if (pid == 0) {
            execl("/nowhere/to/be/found", "nothing", (char *)NULL);
            _exit(4);
        }
        int status;
        CHECK(waitpid(pid, &status, 0) == pid);
        CHECK_EQ(WEXITSTATUS(status), 4);
    }
}

LAW_CASE_SIM_ONCE(one_file_for_one_process)
{
    char text[4096], out[8192];
    in_a_new_directory();
    CHECK_EQ(law_run_child("starts_others", ENV("VRAMSHIM_REPORT=report"), text, sizeof(text)), 0);
    CHECK_EQ(count_of(list("*"), "\n"), under_shim());
    if (under_shim()) {
        CHECK_EQ(shell("cat report.*", out, sizeof(out)), 0);
        CHECK_EQ(count_of(out, "LEAK SUMMARY"), 1);
    }
    CHECK(chdir("/") == 0);
    remove_directory();
}

/* The pid in the text is the one in the name. */
LAW_CASE_SIM_ONCE(the_report_says_who_it_is_of)
{
    char text[8192], expected[64];
    CHECK_EQ(law_run_child("leaks_one", NULL, text, sizeof(text)), 0);
    if (under_shim()) {
        snprintf(expected, sizeof(expected), "(pid %d): ", atoi(text));
        CHECK(strstr(text, expected));
    }
}

/* The launcher puts the shim in front of what LD_PRELOAD held. */
LAW_CASE_ONCE(the_launcher_prepends)
{
    char out[4096];
    if (!getenv("VRAM_CTL"))
        law_skip("VRAM_CTL does not name vramctl");
    CHECK_EQ(
        shell("LD_PRELOAD=libm.so.6 exec \"$VRAM_CTL\" run -- sh -c 'printf %s \"$LD_PRELOAD\"'", out, sizeof(out)), 0);
    const char *shim = strstr(out, "libvramshim.so"), *other = strstr(out, "libm.so.6");
    CHECK(shim && other && shim < other);
    CHECK_EQ(shell("LD_PRELOAD= exec \"$VRAM_CTL\" run -- sh -c 'printf %s \"$LD_PRELOAD\"'", out, sizeof(out)), 0);
    CHECK(strlen(out) > 14 && strcmp(out + strlen(out) - 14, "libvramshim.so") == 0);
}

/*
 * Laws 29 and 32: what a program puts in the place of its standard error (a daemon, a logger, a notebook's kernel, pytest's
 * capture) is where a person looks for its words, and ours go there. What merely took the number 2 is not.
 */
#include <libgen.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "law.h"
#include "sim.h"
#include "world.h"

enum { MIB = 1 << 20 };

static char text[65536], log_text[65536], log_path[] = "/tmp/law32.XXXXXX";

static const char *log_name(void) { return getenv("LAW32_LOG"); }
static int log_file(void) { return open(log_name(), O_WRONLY | O_APPEND | O_CLOEXEC); }

static bool log_has(const char *what) { return slurp(log_name(), log_text, sizeof(log_text)) > 0 && strstr(log_text, what); }

/* A flush, which is told at once, where there is somebody to tell. */
static void flush_now(void)
{
    law_context();
    cached_block(4 * MIB);
    if (under_shim()) {
        unsigned long before = driver_calls("cuMemFree_v2");
        raise(SIGUSR1);
        WAIT_UNTIL(driver_calls("cuMemFree_v2") > before);
        LINGER(log_has("in use"));
    }
}

static void leak(void)
{
    CUdeviceptr p;
    OK(cu.cuMemAlloc_v2(&p, MIB));
}

/* Runs the case, which has a log of its own, and expects so many flushes and reports there, and so many on the standard error
 * that it was started with. */
static void expect(const char *name, unsigned in_log, unsigned reports_in_log, unsigned on_stderr, unsigned reports_on_stderr)
{
    char variable[64];
    int fd = mkstemp(log_path);
    CHECK(fd >= 0);
    close(fd);
    snprintf(variable, sizeof(variable), "LAW32_LOG=%s", log_path);
    CHECK_EQ(run_child_apart(name, ENV(variable), NULL, text, sizeof(text)), 0);
    CHECK(slurp(log_path, log_text, sizeof(log_text)) >= 0);
    unlink(log_path);
    strcpy(log_path + strlen(log_path) - 6, "XXXXXX");
    unsigned shim = under_shim();
    CHECK_EQ(count_of(log_text, "vramshim: flush"), shim * in_log);
    CHECK_EQ(count_of(log_text, "LEAK SUMMARY"), shim * reports_in_log);
    CHECK_EQ(count_of(text, "vramshim: flush"), shim * on_stderr);
    CHECK_EQ(count_of(text, "LEAK SUMMARY"), shim * reports_on_stderr);
}

LAW_CHILD(by_freopen)
{
    CHECK(freopen(log_name(), "a", stderr) == stderr);
    CHECK_EQ(fileno(stderr), STDERR_FILENO);
    errno = 0;
    CHECK(!freopen("/no/such/folder/log", "a", stdin));
    CHECK_EQ(errno, ENOENT);
    flush_now();
    leak();
}
LAW_CASE_SIM_ONCE(reopened) { expect("by_freopen", 1, 1, 0, 0); }

LAW_CHILD(by_dup2)
{
    errno = 77;
    CHECK_EQ(dup2(log_file(), STDERR_FILENO), STDERR_FILENO);
    CHECK_EQ(dup2(STDERR_FILENO, STDERR_FILENO), STDERR_FILENO);
    CHECK_EQ(errno, 77);
    CHECK(dup2(-1, STDERR_FILENO) == -1 && errno == EBADF);
    flush_now();
    leak();
}
LAW_CASE_SIM_ONCE(put_there_by_dup2) { expect("by_dup2", 1, 1, 0, 0); }

LAW_CHILD(by_dup3)
{
    CHECK_EQ(dup3(log_file(), STDERR_FILENO, O_CLOEXEC), STDERR_FILENO);
    CHECK(dup3(STDERR_FILENO, STDERR_FILENO, 0) == -1 && errno == EINVAL);
    flush_now();
    leak();
}
LAW_CASE_SIM_ONCE(put_there_by_dup3) { expect("by_dup3", 1, 1, 0, 0); }

LAW_CHILD(by_close_and_dup2)
{
    close(STDERR_FILENO);
    int fd = log_file();
    int other = dup(fd); /* fd is 2 */
    CHECK_EQ(dup2(other, STDERR_FILENO), STDERR_FILENO);
    flush_now();
    leak();
}
LAW_CASE_SIM_ONCE(closed_and_put_there) { expect("by_close_and_dup2", 1, 1, 0, 0); }

/* daemon() leads it to /dev/null from within libc, and the program to its log later. */
LAW_CHILD(as_a_daemon)
{
    law_context();
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    CHECK_EQ(syscall(SYS_dup3, null, STDERR_FILENO, 0), STDERR_FILENO);
    flush_now();
    CHECK(!log_has("vramshim"));
    CHECK_EQ(dup2(log_file(), STDERR_FILENO), STDERR_FILENO);
    flush_now();
    leak();
}
LAW_CASE_SIM_ONCE(to_null_and_then_to_a_log) { expect("as_a_daemon", 1, 1, 0, 0); }

/* pytest's capture: away for a test, and back. */
LAW_CHILD(captures)
{
    for (int i = 0; i < 100; i++) {
        int before = dup(STDERR_FILENO), file = log_file();
        CHECK_EQ(dup2(file, STDERR_FILENO), STDERR_FILENO);
        if (i == 50)
            flush_now();
        CHECK_EQ(dup2(before, STDERR_FILENO), STDERR_FILENO);
        close(before);
        close(file);
    }
    leak();
}
LAW_CASE_SIM_ONCE(away_and_back) { expect("captures", 1, 0, 0, 1); }

/* Away to a log, and back by a call that nobody sees. */
LAW_CHILD(comes_back)
{
    bool by_fcntl = *getenv("LAW32_HOW") == 'f';
    int save = dup(STDERR_FILENO), file = log_file();
    CHECK_EQ(dup2(file, STDERR_FILENO), STDERR_FILENO);
    close(file);
    flush_now();
    close(STDERR_FILENO);
    CHECK_EQ(by_fcntl ? fcntl(save, F_DUPFD, STDERR_FILENO) : dup(save), STDERR_FILENO);
    close(save);
    flush_now();
    leak();
}
LAW_CASE_SIM_ONCE(back_unseen)
{
    static const char *const hows[] = {"dup", "fcntl"};
    for (int i = 0; i < 2; i++) {
        setenv("LAW32_HOW", hows[i], 1);
        expect("comes_back", 1, 0, 1, 1);
    }
}

/* A child that shares our memory leads its own descriptor 2 away, whether its exec then fails or not. */
LAW_CHILD(starts_others)
{
    static char program[] = "/bin/true", nothing[] = "/no/such/program";
    char *const programs[] = {program, nothing};
    int file = open("/proc/self/exe", O_RDONLY | O_CLOEXEC); /* any other */
    CHECK(file >= 0 && dup2(log_file(), STDERR_FILENO) == STDERR_FILENO);
    for (int i = 0; i < 2; i++) {
        pid_t pid = vfork();
        if (pid == 0) {
            dup2(file, STDERR_FILENO);
            dup3(file, STDERR_FILENO, O_CLOEXEC);
            execl(programs[i], programs[i], (char *)NULL);
            _exit(127);
        }
        int status;
        CHECK(waitpid(pid, &status, 0) == pid && WEXITSTATUS(status) == 127 * i);
    }
    pid_t pid = fork();
    if (pid == 0) {
        dup2(file, STDERR_FILENO);
        _exit(0);
    }
    CHECK_EQ(waitpid(pid, NULL, 0), pid);
    flush_now();
    leak();
}
LAW_CASE_SIM_ONCE(a_childs_redirection_is_the_childs) { expect("starts_others", 1, 1, 0, 0); }

/* A data file that took the number of a closed stream stays one, also where it is led to itself. */
LAW_CHILD(data_at_2)
{
    int nobody = dup(STDERR_FILENO);
    close(STDERR_FILENO);
    CHECK_EQ(log_file(), STDERR_FILENO);
    CHECK_EQ(dup2(STDERR_FILENO, STDERR_FILENO), STDERR_FILENO);
    CHECK_EQ(dup2(STDERR_FILENO, nobody), nobody);
    flush_now();
    leak();
}
LAW_CASE_SIM_ONCE(a_data_file_is_led_to_itself) { expect("data_at_2", 0, 0, 0, 0); }

/* The file behind descriptor 1 or 2 is unlinked and closed, and its inode becomes that of a data file under the same number. */
enum { NOT_REUSED = 77 };

static long tick(void)
{
    struct timespec now; /* what files are dated by */
    clock_gettime(CLOCK_REALTIME_COARSE, &now);
    return now.tv_nsec;
}

LAW_CHILD(data_in_a_reused_inode)
{
    struct stat before, after;
    int at = atoi(getenv("LAW32_AT"));
    long since = tick();
    law_context();
    WAIT_UNTIL(tick() != since);
    if (*getenv("LAW32_HOW") == 'a') { /* adopted as well */
        int other = dup(at);
        CHECK_EQ(dup2(other, at), at);
        close(other);
    }
    CHECK(fstat(at, &before) == 0 && unlink("stream") == 0);
    close(at);
    CHECK_EQ(open("data", O_WRONLY | O_CREAT | O_CLOEXEC, 0600), at);
    if (fstat(at, &after) != 0 || after.st_ino != before.st_ino || after.st_dev != before.st_dev)
        _exit(NOT_REUSED);
    CHECK_EQ(write(at, "data", 4), 4);
    leak();
}

/* Whether there was such a file in the folder that we are in, after the case. */
static bool was_reused(const char *how, int at)
{
    char number[] = {(char)('0' + at), 0}, data[4096];
    int status = -1;
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        setenv("LAW32_HOW", how, 1);
        setenv("LAW32_AT", number, 1);
        if (at == STDOUT_FILENO)
            setenv("VRAMSHIM_REPORT", "/dev/stdout", 1);
        dup2(open("/dev/null", O_WRONLY | O_CLOEXEC), STDERR_FILENO);
        dup2(open("stream", O_WRONLY | O_CREAT | O_CLOEXEC, 0600), at);
        execl("/proc/self/exe", "law", "--case", "data_in_a_reused_inode", "--route", "dlsym", (char *)NULL);
        _exit(126);
    }
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status));
    ssize_t len = slurp("data", data, sizeof(data));
    unlink("data");
    if (WEXITSTATUS(status) == NOT_REUSED)
        return false;
    CHECK_EQ(WEXITSTATUS(status), 0);
    CHECK_EQ(len, 4);
    return true;
}

/* Not every file system has inodes for a second time. */
LAW_CASE_SIM_ONCE(a_data_file_with_the_streams_inode)
{
    char own[4096];
    ssize_t n = readlink("/proc/self/exe", own, sizeof(own) - 1);
    own[n > 0 ? n : 0] = 0;
    const char *const places[] = {"/tmp", "/var/tmp", dirname(own), "."};
    int found = 0;
    for (int i = 0; i < 4; i++) {
        char folder[4096];
        snprintf(folder, sizeof(folder), "%s/law32.XXXXXX", places[i]);
        int here = open(".", O_PATH | O_CLOEXEC);
        if (!mkdtemp(folder) || chdir(folder) != 0)
            continue;
        found += was_reused("load", STDERR_FILENO) + was_reused("adopted", STDERR_FILENO) + was_reused("load", STDOUT_FILENO);
        CHECK(fchdir(here) == 0 && rmdir(folder) == 0);
        close(here);
    }
    if (!found)
        law_skip("no file system here gave an inode to a second file");
}

/* Nothing is left: the program ends as it would, and a report in a file is there all the same. */
LAW_CHILD(closes_it)
{
    close(STDERR_FILENO);
    flush_now();
    leak();
}

LAW_CASE_SIM_ONCE(nowhere_is_left)
{
    char directory[] = "/tmp/law32.XXXXXX", variable[64], command[128];
    expect("closes_it", 0, 0, 0, 0);
    CHECK(mkdtemp(directory));
    snprintf(variable, sizeof(variable), "VRAMSHIM_REPORT=%s/r", directory);
    CHECK_EQ(run_child_apart("closes_it", ENV(variable, "LAW32_LOG=/dev/null"), NULL, text, sizeof(text)), 0);
    snprintf(command, sizeof(command), "cat %s/* 2>/dev/null; rm -r %s", directory, directory);
    shell(command, text, sizeof(text));
    CHECK_EQ(count_of(text, "LEAK SUMMARY"), under_shim());
}

/* A program without CUDA: a script that leads its standard error to a log. */
LAW_CASE_ONCE(a_shell)
{
    static const char *const shells[] = {"sh", "bash"};
    for (int i = 0; i < 2; i++) {
        char command[256];
        snprintf(command, sizeof(command),
                 "command -v %s >/dev/null || exit 0; f=$(mktemp); trap 'rm -f $f' EXIT; %s -c \"exec 2>>$f; kill -USR1 \\$\\$; ls "
                 "/nowhere; echo two >&2\" >/dev/null; grep -c two $f; grep -c 'signal received' $f",
                 shells[i], shells[i]);
        shell(command, text, sizeof(text));
        if (under_shim() && *text)
            CHECK(strcmp(text, "1\n1\n") == 0);
    }
}

/*
 * What scenarios need that look at the process around CUDA: files, child processes, waiting for something that another
 * thread does, and work that is still running. Used by the scenarios only, beside law.h.
 */
#ifndef TESTS_LAWS_WORLD_H
#define TESTS_LAWS_WORLD_H

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "law.h"
#include "sim.h"

/* Gives way for a millisecond. Cut short by a signal, it is simply shorter. */
static inline void nap(void) { nanosleep(&(struct timespec){0, 1000000}, NULL); }

/* Waits until the condition holds; the case's watchdog ends it if that never happens. */
#define WAIT_UNTIL(condition)                                                                                          \
    do {                                                                                                               \
        while (!(condition))                                                                                           \
            nap();                                                                                                     \
    } while (0)

/* Gives whatever must not happen a chance to happen. Passes at once when it has. */
#define LINGER(condition)                                                                                              \
    do {                                                                                                               \
        for (int linger_ = 0; linger_ < 100 && !(condition); linger_++)                                                \
            nap();                                                                                                     \
    } while (0)

/* The whole file, NUL-terminated, cut at cap; the length, or -1 if there is none. */
static inline ssize_t slurp(const char *path, char *buf, size_t cap)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    size_t len = 0;
    ssize_t n;
    if (fd < 0)
        return -1;
    while (len + 1 < cap && ((n = read(fd, buf + len, cap - 1 - len)) > 0 || (n < 0 && errno == EINTR)))
        len += n > 0 ? (size_t)n : 0;
    buf[len] = 0;
    close(fd);
    return (ssize_t)len;
}

static inline unsigned count_of(const char *text, const char *what)
{
    unsigned n = 0;
    for (const char *p = text; (p = strstr(p, what)) != NULL; p += strlen(what))
        n++;
    return n;
}

/* How many threads this process has. */
static inline unsigned thread_count(void)
{
    char status[8192];
    CHECK(slurp("/proc/self/status", status, sizeof(status)) > 0);
    const char *line = strstr(status, "\nThreads:");
    CHECK(line);
    return (unsigned)strtoul(line + 9, NULL, 10);
}

/* Runs the case `name` of this program again as law_run_child does, with standard output and error captured apart.
 * Either buffer may be NULL: then that stream is this process's. Returns the wait status. */
static inline int run_child_apart(const char *name, const char *const *env, char *out, char *err, size_t cap)
{
    static const char *const routes[ROUTES] = {"direct", "dlsym", "procaddress", "procaddress1"};
    int fds[2][2], status = -1;
    char *bufs[2] = {out, err};
    size_t len[2] = {0, 0};
    fflush(NULL);
    CHECK(pipe2(fds[0], O_CLOEXEC) == 0 && pipe2(fds[1], O_CLOEXEC) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        for (; env && *env; env++)
            putenv((char *)*env);
        for (int i = 0; i < 2; i++)
            if (bufs[i])
                dup2(fds[i][1], i ? STDERR_FILENO : STDOUT_FILENO);
        execl("/proc/self/exe", "law", "--case", name, "--route", routes[law_route], (char *)NULL);
        _exit(126);
    }
    CHECK(pid > 0);
    close(fds[0][1]);
    close(fds[1][1]);
    for (int open_ = 2; open_ > 0;) {
        struct pollfd p[2] = {{fds[0][0], POLLIN, 0}, {fds[1][0], POLLIN, 0}};
        if (poll(p, 2, -1) < 0)
            continue;
        for (int i = 0; i < 2; i++) {
            char rest[4096];
            if (!p[i].revents)
                continue;
            bool room = bufs[i] && len[i] + 1 < cap;
            ssize_t n = read(fds[i][0], room ? bufs[i] + len[i] : rest, room ? cap - 1 - len[i] : sizeof(rest));
            if (n < 0 && errno == EINTR)
                continue;
            if (n <= 0) {
                close(fds[i][0]);
                fds[i][0] = -1;
                open_--;
            } else if (room) {
                len[i] += (size_t)n;
            }
        }
    }
    for (int i = 0; i < 2; i++)
        if (bufs[i])
            bufs[i][len[i]] = 0;
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    return status;
}

/* An environment for run_child_apart and law_run_child, on the spot. */
#define ENV(...) ((const char *const[]){__VA_ARGS__, NULL})

/* Runs a shell command and captures what it writes on standard output; the exit status, or 128 plus a signal's number.
 */
static inline int shell(const char *command, char *out, size_t cap)
{
    fflush(NULL);
    size_t len = 0, n;
    FILE *f = popen(command, "r");
    CHECK(f);
    while (len + 1 < cap && (n = fread(out + len, 1, cap - 1 - len, f)) > 0)
        len += n;
    out[len] = 0;
    int status = pclose(f);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

/* A kernel that fills a range and takes its time; see tests/simdriver. */
static inline CUfunction kernel(const char *name)
{
    CUmodule module;
    CUfunction f;
    OK(cu.cuModuleLoadData(&module, ".version 7.0"));
    OK(cu.cuModuleGetFunction(&f, module, name));
    return f;
}

static inline void launch_fill(CUfunction fill, CUstream stream, CUdeviceptr p, unsigned long long bytes,
                               unsigned long long ns)
{
    unsigned value = 7;
    void *params[] = {&p, &bytes, &value, &ns};
    OK(cu.cuLaunchKernel(fill, 1, 1, 1, 1, 1, 1, 0, stream, params, NULL));
}

/* Allocates and frees: under the shim the block is then in the cache. Returns its address. */
static inline CUdeviceptr cached_block(size_t bytes)
{
    CUdeviceptr p = 0;
    OK(cu.cuMemAlloc_v2(&p, bytes));
    OK(cu.cuMemFree_v2(p));
    return p;
}

#endif

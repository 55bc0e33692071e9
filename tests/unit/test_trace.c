/* observe/trace.h: what a line says, when lines are written, and what happens when they cannot be. */
#include "observe/trace.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/lock.h"
#include "base/proc.h"
#include "heap/heap.h"
#include "heard.h"
#include "steps.h"

#define HEADER "Thread,Time,Action,Pointer,Size,Stream\n"

static char directory[] = "/tmp/vramshim-trace-XXXXXX", option[64];

/* Traces into a new directory from here on. */
static void start(void)
{
    cr_assert_not_null(mkdtemp(directory));
    snprintf(option, sizeof(option), "VRAMSHIM_TRACE=%s/t", directory);
    FAKE_START(option);
    listen_to_it();
    vram_trace_start();
    cr_assert(vram_trace_on());
}

static void finish(void)
{
    char command[64];
    if (!strchr(directory, 'X')) {
        snprintf(command, sizeof(command), "rm -r %s", directory);
        cr_assert_eq(system(command), 0);
    }
}

static char *path_of(pid_t pid)
{
    static char path[64];
    snprintf(path, sizeof(path), "%s/t.%d", directory, (int)pid);
    return path;
}

/* What was written by this process, "" if nothing was. */
static const char *written(pid_t pid)
{
    static char text[1 << 20];
    int fd = open(path_of(pid), O_RDONLY);
    ssize_t n = fd < 0 ? 0 : read(fd, text, sizeof(text) - 1);
    if (fd >= 0)
        close(fd);
    text[n] = 0;
    return text;
}

/* The lines without thread and time, which must be this process's and not go back. */
static const char *plain(const char *text)
{
    static char out[1 << 20];
    size_t len = 0;
    double last = 0;
    cr_assert_eq(strncmp(text, HEADER, strlen(HEADER)), 0, "%.80s", text);
    for (const char *line = text + strlen(HEADER); *line; line = strchr(line, '\n') + 1) {
        unsigned tid, h, m;
        double s;
        cr_assert_eq(sscanf(line, "%u,%2u:%2u:%9lf,", &tid, &h, &m, &s), 4, "%.80s", line);
        cr_assert_eq(tid, (unsigned)getpid());
        s += h * 3600 + m * 60;
        cr_assert_geq(s, last);
        last = s;
        const char *action = strchr(strchr(line, ',') + 1, ',') + 1;
        cr_assert_eq(action - strchr(line, ','), (long)strlen(",00:00:00.000000,"));
        size_t rest = (size_t)(strchr(line, '\n') + 1 - action);
        memcpy(out + len, action, rest);
        len += rest;
    }
    out[len] = 0;
    return out;
}

Test(trace, off_by_default)
{
    FAKE_START();
    vram_trace_start();
    cr_assert_not(vram_trace_on());
    vram_trace_write();
}

Test(trace, lines, .fini = finish)
{
    char expected[512];
    start();
    CUdeviceptr p = get(4 * MiB + 3);
    vram_trace_allocated(CUDA_SUCCESS, p, 4 * MiB + 3);
    vram_trace_allocated(CUDA_ERROR_OUT_OF_MEMORY, 0, (size_t)1 << 40);
    vram_trace_freeing(p);
    give_back(p);
    cr_assert_str_empty(written(getpid()), "nothing before there is much, or an end");
    errno = 1234;
    vram_trace_write();
    cr_assert_eq(errno, 1234);
    snprintf(expected, sizeof(expected),
             "allocate,0x%llx,4194307,0\nallocate failure,0x0,1099511627776,0\nfree,0x%llx,4194307,0\n", p, p);
    cr_assert_str_eq(plain(written(getpid())), expected);
    cr_assert(strstr(written(getpid()), ",00:00:00.000000,allocate,"), "the first line is the beginning of time");
    vram_trace_write();
    cr_assert_str_eq(plain(written(getpid())), expected, "once");
    cr_assert_str_empty(heard());
}

/* A free of a block that was cached names the size of its last request. */
Test(trace, sizes_are_the_programs, .fini = finish)
{
    char expected[128];
    start();
    give_back(get(18 * MiB));
    CUdeviceptr p = get(17 * MiB);
    vram_trace_freeing(p);
    vram_trace_write();
    snprintf(expected, sizeof(expected), "free,0x%llx,%d,0\n", p, 17 * MiB);
    cr_assert_str_eq(plain(written(getpid())), expected);
}

Test(trace, no_line_for_what_is_no_block_of_the_programs, .fini = finish)
{
    start();
    CUdeviceptr p = get(4 * MiB);
    give_back(p);
    vram_trace_freeing(p);
    vram_trace_freeing(p + 512);
    vram_trace_freeing(0);
    vram_trace_write();
    cr_assert_str_empty(written(getpid()));
}

Test(trace, written_when_there_is_much, .fini = finish)
{
    enum { LINES = 5000 };
    static char expected[1 << 20];
    size_t len = 0, most = 0;
    start();
    for (unsigned i = 0; i < LINES; i++) {
        vram_trace_allocated(CUDA_SUCCESS, 0x7f0000000000 + 512 * i, i);
        len += (size_t)snprintf(expected + len, sizeof(expected) - len, "allocate,0x%x%08x,%u,0\n", 0x7f00, 512 * i, i);
        struct stat st;
        size_t now = stat(path_of(getpid()), &st) == 0 ? (size_t)st.st_size : 0;
        cr_assert(now == most || now - most > 65000, "in parts of almost 64 KiB");
        most = now;
    }
    cr_assert_geq(most, 2 * 65000);
    cr_assert_eq(written(getpid())[most - 1], '\n');
    vram_trace_write();
    cr_assert_lt(most, strlen(written(getpid())));
    cr_assert_str_eq(plain(written(getpid())), expected);
}

static void *allocate_much(void *unused)
{
    for (unsigned i = 1; i <= 3000; i++)
        vram_trace_allocated(CUDA_SUCCESS, 0x1000, i);
    return unused;
}

Test(trace, lines_of_threads_stay_whole, .fini = finish)
{
    enum { THREADS = 4 };
    pthread_t threads[THREADS];
    unsigned last[THREADS] = {0}, tids[THREADS] = {0}, lines = 0;
    start();
    for (int i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, allocate_much, NULL);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    vram_trace_write();
    for (const char *line = written(getpid()) + strlen(HEADER); *line; line = strchr(line, '\n') + 1) {
        unsigned tid, size, k = 0;
        cr_assert_eq(sscanf(line, "%u,%*u:%*u:%*u.%*u,allocate,0x1000,%u,0\n", &tid, &size), 2, "%.80s", line);
        while (tids[k] && tids[k] != tid)
            k++;
        cr_assert_lt(k, THREADS);
        tids[k] = tid;
        cr_assert_eq(size, ++last[k]);
        lines++;
    }
    cr_assert_eq(lines, THREADS * 3000);
}

static void expect_given_up(const char *said)
{
    vram_trace_allocated(CUDA_SUCCESS, 0x1000, 1);
    errno = 1234;
    vram_trace_write();
    cr_assert_eq(errno, 1234);
    cr_assert_not(vram_trace_on());
    vram_trace_allocated(CUDA_SUCCESS, 0x1000, 1); /* by a thread that had looked before */
    vram_trace_write();
    cr_assert_str_eq(heard(), said);
}

Test(trace, a_file_that_cannot_be_had_is_told_once)
{
    char said[128];
    FAKE_START("VRAMSHIM_TRACE=/no/such/folder/t");
    listen_to_it();
    vram_trace_start();
    snprintf(said, sizeof(said),
             "vramshim: cannot write the trace to /no/such/folder/t.%d (its folder is not there): it ends here\n",
             (int)getpid());
    expect_given_up(said);
}

Test(trace, a_full_disk_is_told_once, .fini = finish)
{
    char said[160];
    start();
    cr_assert_eq(symlink("/dev/full", path_of(getpid())), 0);
    snprintf(said, sizeof(said), "vramshim: cannot write the trace to %s (no space is left there): it ends here\n",
             path_of(getpid()));
    expect_given_up(said);
}

Test(trace, on_standard_error)
{
    FAKE_START("VRAMSHIM_TRACE=stderr");
    listen_to_it();
    vram_trace_start();
    vram_trace_allocated(CUDA_SUCCESS, 0x1000, 7);
    vram_trace_write();
    cr_assert_str_eq(plain(heard()), "allocate,0x1000,7,0\n");
}

Test(trace, a_forked_child_has_its_own, .fini = finish)
{
    start();
    vram_trace_allocated(CUDA_SUCCESS, 0x1000, 1);
    pid_t stranger = fork();
    if (stranger == 0) {
        vram_trace_write();
        _exit(0);
    }
    pid_t child = fork();
    if (child == 0) {
        vram_heap_forget();
        vram_trace_start();
        vram_proc_record();
        vram_trace_write();
        if (*written(getpid()))
            _exit(1); /* it has done nothing itself */
        vram_trace_allocated(CUDA_SUCCESS, 0x2000, 2);
        vram_trace_write();
        _exit(strcmp(plain(written(getpid())), "allocate,0x2000,2,0\n") != 0);
    }
    int status = -1;
    waitpid(stranger, &status, 0);
    cr_assert_eq(status, 0);
    cr_assert_str_empty(written(stranger));
    waitpid(child, &status, 0);
    cr_assert_eq(status, 0);
    vram_trace_write();
    cr_assert_str_eq(plain(written(getpid())), "allocate,0x1000,1,0\n");
}

/* A handler that leaves in the middle of a line: no wait for ever, and no lines. */
Test(trace, leaving_while_the_lock_is_held, .fini = finish, .timeout = 60)
{
    start();
    vram_trace_allocated(CUDA_SUCCESS, 0x1000, 1);
    vram_lock(VRAM_RANK_TRACE);
    vram_trace_write();
    vram_unlock(VRAM_RANK_TRACE);
    cr_assert_str_empty(written(getpid()));
    vram_trace_write();
    cr_assert_str_eq(plain(written(getpid())), "allocate,0x1000,1,0\n");
}

static void *write_cancelled(void *unused)
{
    pthread_cancel(pthread_self());
    for (int i = 0; i < 5000; i++)
        vram_trace_allocated(CUDA_SUCCESS, 0x1000, 1);
    pthread_testcancel();
    return unused;
}

Test(trace, a_cancelled_thread_does_not_keep_the_lock, .fini = finish, .timeout = 60)
{
    pthread_t thread;
    void *result;
    start();
    pthread_create(&thread, NULL, write_cancelled, NULL);
    pthread_join(thread, &result);
    cr_assert_eq(result, PTHREAD_CANCELED);
    vram_trace_write();
    unsigned lines = 0;
    for (const char *c = written(getpid()); *c; c++)
        lines += *c == '\n';
    cr_assert_eq(lines, 5001);
}

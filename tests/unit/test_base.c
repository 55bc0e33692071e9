/* base/: text, metadata memory, ELF symbols, writing that cannot hurt, whose process this is, lock ranks. */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/elf.h"
#include "base/libc.h"
#include "base/lock.h"
#include "base/meta.h"
#include "base/proc.h"
#include "base/rate.h"
#include "base/sandbox.h"
#include "base/say.h"
#include "base/text.h"

static char text[1 << 16];

#define WRITTEN(call, expected)                                                                                        \
    do {                                                                                                               \
        char buf_[64];                                                                                                 \
        struct vram_text t = VRAM_TEXT(buf_);                                                                          \
        call;                                                                                                          \
        cr_assert_str_eq(buf_, expected);                                                                              \
    } while (0)

Test(text, bytes_durations_counts)
{
    WRITTEN(vram_text_bytes(&t, 0), "0 B");
    WRITTEN(vram_text_bytes(&t, 1023), "1023 B");
    WRITTEN(vram_text_bytes(&t, 1536), "1.5 KiB");
    WRITTEN(vram_text_bytes(&t, 80ull << 30), "80.0 GiB");
    WRITTEN(vram_text_bytes(&t, (1 << 20) - 1), "1024.0 KiB");
    WRITTEN(vram_text_bytes(&t, UINT64_MAX), "16.0 EiB");
    WRITTEN(vram_text_duration(&t, 1499), "1 us");
    WRITTEN(vram_text_duration(&t, 3400000), "3.4 ms");
    WRITTEN(vram_text_duration(&t, 5000000000), "5.0 s");
    WRITTEN(vram_text_duration(&t, 7380000000000), "2 h 3 min");
    WRITTEN(vram_text_count(&t, 1, "block"), "1 block");
    WRITTEN(vram_text_count(&t, 0, "block"), "0 blocks");
}

Test(text, a_name_is_quoted_and_not_endless)
{
    static char name[2000];
    char buf[VRAM_TEXT_NAME + 2];
    struct vram_text long_one = VRAM_TEXT(buf);
    WRITTEN(vram_text_name(&t, "a\nb\x1b[2J"), "a\\nb\\x1b[2J");
    memset(name, 'x', sizeof(name) - 1);
    vram_text_name(&long_one, name);
    cr_assert_eq(long_one.len, VRAM_TEXT_NAME - 1);
    cr_assert_str_eq(buf + long_one.len - 4, "x...");
}

Test(text, is_cut_and_terminated)
{
    char buf[6];
    struct vram_text t = VRAM_TEXT(buf);
    vram_text_add(&t, "abc");
    vram_text_add(&t, "defgh");
    cr_assert_str_eq(buf, "abcde");
    vram_text_add(&t, "x");
    cr_assert_eq(t.len, 5);
}

Test(meta, blocks_do_not_overlap_and_are_reused)
{
    enum { N = 3000 };
    static unsigned char *p[N];
    static size_t size[N];
    srand(3);
    for (int i = 0; i < N; i++) {
        size[i] = 1 + (size_t)rand() % (i % 50 ? 2000 : 200000);
        p[i] = vram_meta_alloc(size[i]);
        cr_assert_not_null(p[i]);
        cr_assert_eq((uintptr_t)p[i] % 16, 0);
        memset(p[i], i & 255, size[i]);
    }
    for (int i = 0; i < N; i++)
        for (size_t k = 0; k < size[i]; k += 97)
            cr_assert_eq(p[i][k], i & 255);
    uint64_t mapped = vram_meta_bytes();
    for (int i = 0; i < N; i++)
        vram_meta_free(p[i], size[i]);
    for (int i = 0; i < N; i++)
        if (size[i] <= 2000)
            cr_assert_not_null(vram_meta_alloc(size[i]));
    cr_assert_leq(vram_meta_bytes(), mapped);
    vram_meta_forget();
    cr_assert_eq(vram_meta_bytes(), 0);
    cr_assert_null(vram_meta_alloc(SIZE_MAX - 100));
}

Test(elf, finds_what_libc_exports)
{
    const struct link_map *libc = vram_elf_find("libc.so.6");
    cr_assert_not_null(libc);
    cr_assert_not_null(vram_elf_symbol(libc, "puts"));
    cr_assert_null(vram_elf_symbol(libc, "no_such_symbol"));
    cr_assert_null(vram_elf_symbol(libc, ""));
    cr_assert_null(vram_elf_find("libnothing.so.1"));
    cr_assert_eq(vram_elf_containing((uintptr_t)vram_elf_symbol(libc, "puts")), libc);
    cr_assert_not_null(vram_libc_dlsym());
    cr_assert_not_null(vram_libc_sigaction());
    int on_stack;
    cr_assert_null(vram_elf_containing((uintptr_t)&on_stack));
}

static int wait_status(pid_t pid)
{
    int status = -1;
    waitpid(pid, &status, 0);
    return status;
}

Test(proc, a_child_is_not_ours_until_it_is_recorded)
{
    vram_proc_record();
    cr_assert(vram_proc_is_ours());
    cr_assert(vram_proc_is_recorded());
    /* A fork that runs no handler. */
    pid_t pid = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (pid == 0) {
        bool stranger = !vram_proc_is_ours() && !vram_proc_is_recorded();
        vram_proc_record();
        _exit(stranger && vram_proc_is_ours() && vram_proc_is_recorded() ? 0 : 1);
    }
    cr_assert_eq(wait_status(pid), 0);
    cr_assert(vram_proc_is_ours());
    /* One that shares our memory: only the pid tells. */
    pid = vfork();
    if (pid == 0)
        _exit(vram_proc_is_recorded() ? 1 : 0);
    cr_assert_eq(wait_status(pid), 0);
    cr_assert(vram_proc_is_recorded());
}

static void *is_recorded(void *unused)
{
    (void)unused;
    return vram_proc_is_recorded() ? &text : NULL;
}

Test(proc, a_thread_may_renounce_it)
{
    pthread_t thread;
    void *of_another;
    vram_proc_record();
    vram_proc_renounce();
    cr_assert_not(vram_proc_is_recorded());
    pthread_create(&thread, NULL, is_recorded, NULL);
    pthread_join(thread, &of_another);
    cr_assert_not_null(of_another);
}

/* Law 32. */
Test(say, another_file_on_descriptor_2_is_not_written_unless_it_is_adopted)
{
    char path[] = "/tmp/vramshim-say-XXXXXX";
    vram_say_adopt();
    int fd = mkstemp(path), null = open("/dev/null", O_WRONLY), before = dup(STDERR_FILENO);
    cr_assert_geq(fd, 0);
    dup2(fd, STDERR_FILENO);
    cr_assert_eq(vram_say_raw("x", 1), -EBADF);
    cr_assert_eq(lseek(fd, 0, SEEK_END), 0);
    dup2(null, STDERR_FILENO);
    cr_assert_eq(vram_say_raw("x", 1), 0, "nobody minds");
    for (int i = 0; i < 1000; i++) { /* more than are remembered */
        dup2(i % 2 ? fd : before, STDERR_FILENO);
        errno = 1234;
        vram_say_adopt();
        cr_assert_eq(errno, 1234);
    }
    cr_assert_eq(vram_say_raw("x", 1), 0);
    cr_assert_eq(lseek(fd, 0, SEEK_END), 1);
    close(STDERR_FILENO);
    cr_assert_eq(vram_say_raw("x", 1), -EBADF);
    vram_say_adopt();
    dup2(fd, STDERR_FILENO);
    cr_assert_eq(vram_say_raw("x", 1), -EBADF, "none was adopted");
    unlink(path);
}

Test(say, a_closed_pipe_raises_no_signal)
{
    int fds[2];
    sigset_t pending;
    signal(SIGPIPE, SIG_DFL);
    cr_assert_eq(pipe(fds), 0);
    close(fds[0]);
    errno = 1234;
    cr_assert_eq(vram_write_gently(fds[1], "x", 1), -EPIPE);
    cr_assert_eq(errno, 1234);
    sigpending(&pending);
    cr_assert_not(sigismember(&pending, SIGPIPE));
}

Test(say, a_full_pipe_is_given_up, .timeout = 30)
{
    int fds[2];
    static char much[1 << 20];
    cr_assert_eq(pipe(fds), 0);
    cr_assert_eq(vram_write_gently(fds[1], much, sizeof(much)), -EAGAIN);
    cr_assert_not(fcntl(fds[1], F_GETFL) & O_NONBLOCK, "the descriptor's flags are the program's");
}

static int listening = -1;

/* What is said from here on, and, the second time, what was. */
static const char *listen_or_hear(void)
{
    int fds[2];
    if (listening < 0) {
        cr_assert_eq(pipe(fds), 0);
        fcntl(fds[0], F_SETFL, O_NONBLOCK);
        fcntl(fds[1], F_SETPIPE_SZ, 1 << 16);
        dup2(fds[1], STDERR_FILENO);
        vram_say_adopt();
        listening = fds[0];
        return text;
    }
    size_t len = 0;
    for (ssize_t n; (n = read(listening, text + len, sizeof(text) - 1 - len)) > 0;)
        len += (size_t)n;
    text[len] = 0;
    return text;
}

static bool ends_with(const char *s, const char *end)
{
    return strlen(s) >= strlen(end) && strcmp(s + strlen(s) - strlen(end), end) == 0;
}

Test(say, no_line_is_left_out)
{
    listen_or_hear();
    for (int i = 0; i < 1000; i++)
        vram_say("line %d", i);
    cr_assert(ends_with(listen_or_hear(), "vramshim: line 999\n"));
    cr_assert_not_null(strstr(text, "vramshim: line 500\n"));
}

Test(say, what_is_inserted_makes_no_line)
{
    listen_or_hear();
    vram_say("cannot write to %s (no room)", "a\nvramshim: b\x1b[31m\xff\t\xc3\xa9");
    cr_assert_str_eq(listen_or_hear(), "vramshim: cannot write to a\\nvramshim: b\\x1b[31m\\xff\\t\xc3\xa9 (no room)\n");
}

/* Whatever stands before it, the reason is there; where not even a path is so long, the line shows that it is cut. */
Test(say, a_long_line_is_said_as_a_whole)
{
    static char name[8192];
    listen_or_hear();
    for (size_t len = 100; len < 4200; len += 97) {
        memset(name, 'x', len);
        name[len] = 0;
        vram_say("cannot write to %s (no room)", name);
        cr_assert_eq(strlen(listen_or_hear()), len + strlen("vramshim: cannot write to  (no room)\n"));
        cr_assert(ends_with(text, "xxx (no room)\n"));
    }
    memset(name, '\n', 4096);
    name[4096] = 0;
    vram_say("cannot write to %s (no room)", name);
    cr_assert(ends_with(listen_or_hear(), "\\n\\n\\n (no room)\n"));
    memset(name, 'x', sizeof(name) - 1);
    vram_say("cannot write to %s (no room)", name);
    cr_assert(ends_with(listen_or_hear(), "xxx...\n"));
}

Test(say, of_a_notice_that_repeats_some_are_shown_and_all_are_counted)
{
    listen_or_hear();
    for (int i = 0; i < 100; i++)
        cr_assert_eq(vram_notice(VRAM_NOTICE_DECAY, "notice %d", i), i < 20);
    cr_assert(vram_notice(VRAM_NOTICE_IDLE, "of another kind"));
    vram_say("an answer");
    cr_assert(ends_with(listen_or_hear(), "vramshim: notice 19\nvramshim: of another kind\nvramshim: an answer\n"));
    vram_say_forget();
    cr_assert(vram_notice(VRAM_NOTICE_DECAY, "a child's own"));
    cr_assert(ends_with(listen_or_hear(), "vramshim: a child's own\n"));
}

/* One that could not be said is counted as well. */
Test(say, a_notice_that_nobody_heard_is_counted)
{
    int nowhere = open("/dev/zero", O_WRONLY);
    listen_or_hear();
    int before = dup(STDERR_FILENO);
    dup2(nowhere, STDERR_FILENO);
    cr_assert_not(vram_notice(VRAM_NOTICE_DECAY, "unheard"));
    cr_assert_not(vram_notice(VRAM_NOTICE_DECAY, "unheard"));
    dup2(before, STDERR_FILENO);
    cr_assert(vram_notice(VRAM_NOTICE_DECAY, "heard"));
    cr_assert_str_eq(listen_or_hear(), "vramshim: heard (and 2 more like this were not shown)\n");
}

/* Whoever cannot be asked is written to; what else cannot be done (a pipe that blocks) is not tried here. */
Test(say, in_a_sandbox_nothing_is_asked)
{
    listen_or_hear();
    cr_assert_not(vram_sandboxed());
    vram_sandbox_look();
    vram_sandbox_entered();
    cr_assert(vram_sandboxed());
    vram_say("plainly");
    cr_assert_str_eq(listen_or_hear(), "vramshim: plainly\n");
}

#define SECONDS(n) ((n) * (uint64_t)1000000000)

Test(rate, a_burst_and_then_one_each_period)
{
    struct vram_rate rate = {.burst = 3, .period = SECONDS(10)};
    unsigned told = 0, counted = 0, left_out;
    const uint64_t start = SECONDS(5); /* a machine that has just come up */
    for (uint64_t now = start; now < start + SECONDS(100); now += SECONDS(1) / 10) {
        if (!vram_rate_pass(&rate, now, &left_out))
            continue;
        told++;
        counted += left_out;
    }
    cr_assert_eq(told, 3 + 9);
    cr_assert_eq(told + counted + rate.left_out, 1000);
}

Test(rate, what_comes_after_quiet_is_told)
{
    struct vram_rate rate = {.burst = 20, .period = SECONDS(10)};
    unsigned left_out = 0, told = 0;
    for (int i = 0; i < 173; i++)
        told += vram_rate_pass(&rate, SECONDS(1000), &left_out);
    cr_assert_eq(told, 20);
    cr_assert_eq(left_out, 0);
    cr_assert(vram_rate_pass(&rate, SECONDS(1010), &left_out));
    cr_assert_eq(left_out, 153);
    cr_assert_not(vram_rate_pass(&rate, SECONDS(1019), &left_out));
    for (int i = 0; i < 20; i++)
        cr_assert(vram_rate_pass(&rate, SECONDS(2000), &left_out), "the burst has come back");
    cr_assert_not(vram_rate_pass(&rate, SECONDS(2000), &left_out));
    cr_assert_not(vram_rate_pass(&rate, SECONDS(1990), &left_out), "a clock that goes back does no harm");
}

#ifdef VRAM_CHECKS
Test(lock, the_wrong_order_aborts, .signal = SIGABRT)
{
    vram_lock(VRAM_RANK_META);
    vram_lock(VRAM_RANK_HEAP);
}

Test(lock, a_driver_call_under_a_lock_aborts, .signal = SIGABRT)
{
    vram_lock(VRAM_RANK_HEAP);
    vram_locks_check_none();
}
#endif

Test(lock, the_right_order_does_not)
{
    for (int r = 0; r < VRAM_RANKS; r++)
        vram_lock((enum vram_rank)r);
    for (int r = VRAM_RANKS - 1; r >= 0; r--)
        vram_unlock((enum vram_rank)r);
    vram_locks_check_none();
    vram_locks_prefork();
    vram_locks_postfork_child();
    vram_locks_check_none();
}

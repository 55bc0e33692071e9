/* base/: text, metadata memory, ELF symbols, writing that cannot hurt, whose process this is, lock ranks. */
#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
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
#include "base/say.h"
#include "base/text.h"

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

/* Law 32. */
Test(say, another_file_on_descriptor_2_is_not_written)
{
    char path[] = "/tmp/vramshim-say-XXXXXX";
    vram_say_init();
    int fd = mkstemp(path);
    cr_assert_geq(fd, 0);
    dup2(fd, STDERR_FILENO);
    cr_assert_eq(vram_say_raw("x", 1), -EBADF);
    cr_assert_eq(lseek(fd, 0, SEEK_END), 0);
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

Test(say, lines_are_bounded)
{
    int fds[2];
    static char text[1 << 16];
    cr_assert_eq(pipe(fds), 0);
    fcntl(fds[1], F_SETPIPE_SZ, 1 << 16);
    dup2(fds[1], STDERR_FILENO);
    vram_say_init();
    for (int i = 0; i < 1000; i++)
        vram_say("line %d", i);
    ssize_t n = read(fds[0], text, sizeof(text) - 1);
    cr_assert_gt(n, 0);
    text[n] = 0;
    cr_assert_not_null(strstr(text, "vramshim: line 199\n"));
    cr_assert_not_null(strstr(text, "vramshim: too many messages; no more are shown\n"));
    cr_assert_null(strstr(text, "line 200"));
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

#include "base/say.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <sys/select.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/check.h"
#include "base/clock.h"

enum { LINES_MAX = 200, WAIT_MS = 100, MS = 1000000 };

static struct stat stderr_at_load;
static bool stderr_known; /* written once, at load */
static atomic_uint lines;

/* fstat() has a version of glibc 2.33. */
static bool identify(int fd, struct stat *ret_stat) { return syscall(SYS_fstat, fd, ret_stat) == 0; }

void vram_say_init(void) { stderr_known = identify(STDERR_FILENO, &stderr_at_load); }

static bool stderr_is_ours(void)
{
    struct stat now;
    return stderr_known && identify(STDERR_FILENO, &now) && now.st_dev == stderr_at_load.st_dev &&
           now.st_ino == stderr_at_load.st_ino && now.st_rdev == stderr_at_load.st_rdev;
}

/* A pipe that polls writable takes PIPE_BUF bytes without blocking, whatever the descriptor's flags; its flags are the
 * program's (and shared with its parent), so we do not set O_NONBLOCK on them. */
static int wait_writable(int fd, uint64_t until)
{
    uint64_t now = vram_now(), left = now < until ? until - now : 0;
    struct pollfd p = {.fd = fd, .events = POLLOUT};
    int ready = poll(&p, 1, (int)((left + MS - 1) / MS));
    if (ready >= 0 || errno != EINVAL || fd >= FD_SETSIZE)
        return ready;
    /* More descriptors than the limit allows (RLIMIT_NOFILE of 0): select() knows no such limit. */
    const struct timespec wait = {0, (long)left};
    fd_set set;
    FD_ZERO(&set);
    FD_SET(fd, &set);
    return pselect(fd + 1, NULL, &set, NULL, &wait, NULL);
}

/* One time for all of it: a timer's signals must not make it longer. When it is over, only what finds room at once is
 * written. */
static int write_all(int fd, const char *bytes, size_t len)
{
    uint64_t until = vram_now() + (uint64_t)WAIT_MS * MS;
    while (len > 0) {
        int ready = wait_writable(fd, until);
        ssize_t n = ready > 0 ? write(fd, bytes, len < 512 ? len : 512) : ready;
        if (n < 0 && errno == EINTR && vram_now() < until)
            continue;
        if (n <= 0)
            return n == 0 ? -EAGAIN : -errno;
        bytes += n;
        len -= (size_t)n;
    }
    return 0;
}

int vram_write_gently(int fd, const char *bytes, size_t len)
{
    int saved = errno;
    sigset_t ours, before, pending;
    sigemptyset(&ours);
    sigaddset(&ours, SIGPIPE);
    sigaddset(&ours, SIGXFSZ); /* RLIMIT_FSIZE */
    sigaddset(&ours, SIGTTOU); /* a job in the background on a terminal that stops writers: while blocked, it may write */

    /* One that was already pending is the program's: leave it. One that our write raised is ours: consume it. */
    sigpending(&pending);
    sigprocmask(SIG_BLOCK, &ours, &before);
    int r = write_all(fd, bytes, len);
    int raised = r == -EPIPE ? SIGPIPE : r == -EFBIG ? SIGXFSZ : 0;
    if (raised && sigismember(&pending, raised) != 1) {
        const struct timespec zero = {0, 0};
        sigset_t only;
        sigemptyset(&only);
        sigaddset(&only, raised);
        while (sigtimedwait(&only, NULL, &zero) < 0 && errno == EINTR)
            ;
    }
    sigprocmask(SIG_SETMASK, &before, NULL);
    errno = saved;
    return r;
}

int vram_say_raw(const char *bytes, size_t len)
{
    int saved = errno;
    int r = stderr_is_ours() ? vram_write_gently(STDERR_FILENO, bytes, len) : -EBADF;
    errno = saved;
    return r;
}

void vram_say(const char *fmt, ...)
{
    static const char prefix[] = "vramshim: ";
    char buf[640];
    unsigned n = atomic_fetch_add(&lines, 1);
    if (n > LINES_MAX)
        return;
    if (n == LINES_MAX) {
        static const char last[] = "vramshim: too many messages; no more are shown\n";
        vram_say_raw(last, sizeof(last) - 1);
        return;
    }
    int len = snprintf(buf, sizeof(buf), "%s", prefix);
    va_list ap;
    va_start(ap, fmt);
    int more = vsnprintf(buf + len, sizeof(buf) - (size_t)len - 1, fmt, ap);
    va_end(ap);
    if (more < 0)
        return;
    len += more < (int)sizeof(buf) - len - 1 ? more : (int)sizeof(buf) - len - 2;
    buf[len++] = '\n';
    vram_say_raw(buf, (size_t)len);
}

#ifdef VRAM_CHECKS
#include <stdlib.h>
void vram_check_failed(const char *what, const char *file, int line)
{
    char buf[320];
    int n = snprintf(buf, sizeof(buf), "vramshim: check failed: %s (%s:%d)\n", what, file, line);
    if (n > 0 && write(STDERR_FILENO, buf, (size_t)n) < 0)
        abort();
    abort();
}
#endif

#include "base/say.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/select.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <time.h>
#include <unistd.h>

#include "base/cancel.h"
#include "base/check.h"
#include "base/clock.h"
#include "base/compiler.h"
#include "base/identity.h"
#include "base/rate.h"
#include "base/sandbox.h"
#include "vramshim/quote.h"

enum {
    WAIT_MS = 100,
    MS = 1000000,
    PIECE = 512,     /* bytes at a time into what may block */
    LINE = 640,      /* of a line, on the stack of whoever speaks, which may be a signal handler's */
    LONG_LINE = 5120 /* with a path in it */
};

/* The error stream from load: written once. */
static struct vram_identity first;
static bool has_first;

/* The one that the program put in its place. Each change goes into the next slot and is then published, so that neither a writer
 * nor a reader, which may be a signal handler, waits for anybody; a reader would have to sleep through all slots to see a torn one. */
enum { SLOTS = 64 };
static struct vram_identity slots[SLOTS];
static atomic_uint adoptions;
static struct vram_identity *_Atomic adopted; /* NULL: there is none */

void vram_say_start(void) { has_first = vram_identify(STDERR_FILENO, &first); }

void vram_say_adopt(void)
{
    struct vram_identity now, *slot = NULL;
    if (vram_identify(STDERR_FILENO, &now)) {
        slot = &slots[atomic_fetch_add(&adoptions, 1) % SLOTS];
        *slot = now;
    }
    atomic_store(&adopted, slot);
}

/* Where daemon() leads descriptor 2, without our seeing it: harmless, and nobody is to be told that it cannot be written. */
static bool is_null(const struct vram_identity *i) { return S_ISCHR(i->mode) && i->rdev == makedev(1, 3); }

/* The one from load may come back by a call that we do not see: dup(save), after close(2). */
static bool stderr_is_the_programs(struct vram_identity *ret_now)
{
    const struct vram_identity *last = atomic_load(&adopted);
    if (!vram_identify(STDERR_FILENO, ret_now))
        return false;
    return is_null(ret_now) || (has_first && vram_identity_same(ret_now, &first)) || (last && vram_identity_same(ret_now, last));
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
static int write_all(int fd, bool may_block, const char *bytes, size_t len)
{
    uint64_t until = vram_now() + (uint64_t)WAIT_MS * MS;
    while (len > 0) {
        int ready = may_block ? wait_writable(fd, until) : 1;
        if (ready < 0 && errno != EINTR) { /* a filter forbids to ask; what is wrong with the descriptor, write() will say */
            may_block = false;
            continue;
        }
        ssize_t n = ready > 0 ? write(fd, bytes, may_block && len > PIECE ? PIECE : len) : ready;
        if (n < 0 && errno == EINTR && vram_now() < until)
            continue;
        if (n <= 0)
            return n == 0 ? -EAGAIN : -errno;
        bytes += n;
        len -= (size_t)n;
    }
    return 0;
}

/* `what` it is may be unknown (NULL). */
static int write_guarded(int fd, const struct vram_identity *what, const char *bytes, size_t len)
{
    int saved = errno, cancelling = vram_cancel_hold();
    bool may_block = !(what && (S_ISREG(what->mode) || is_null(what))) && !vram_sandboxed();
    sigset_t ours, before, pending;
    sigemptyset(&ours);
    sigaddset(&ours, SIGPIPE);
    sigaddset(&ours, SIGXFSZ); /* RLIMIT_FSIZE */
    sigaddset(&ours, SIGTTOU); /* a job in the background on a terminal that stops writers: while blocked, it may write */

    /* One that was already pending is the program's: leave it. One that our write raised is ours: consume it. */
    sigpending(&pending);
    sigprocmask(SIG_BLOCK, &ours, &before);
    int r = write_all(fd, may_block, bytes, len);
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
    vram_cancel_give_back(cancelling);
    return r;
}

int vram_write_gently(int fd, const char *bytes, size_t len)
{
    struct vram_identity what;
    return write_guarded(fd, vram_identify(fd, &what) ? &what : NULL, bytes, len);
}

int vram_say_raw(const char *bytes, size_t len)
{
    struct vram_identity now;
    return stderr_is_the_programs(&now) ? write_guarded(STDERR_FILENO, &now, bytes, len) : -EBADF;
}

/* Quotes and says a line; one that grows by that beyond what is usual goes in several writes. */
static int say_quoted(const char *line, size_t len)
{
    char out[LINE + 8];
    int r;
    do {
        size_t at = 0;
        while (len > 0 && at + 8 < sizeof(out)) {
            size_t shown = vram_quote_shown((const unsigned char *)line, len), n = shown ? shown : 1;
            at += vram_quote(out + at, sizeof(out) - at, line, n);
            line += n;
            len -= n;
        }
        if (len == 0)
            out[at++] = '\n';
        r = vram_say_raw(out, at);
    } while (r == 0 && len > 0);
    return r;
}

/* Into the buffer; what does not fit ends with "...". Returns the length that it wants. */
static size_t compose(char *buf, size_t cap, unsigned left_out, const char *fmt, va_list ap)
{
    char more[64] = "";
    if (left_out)
        snprintf(more, sizeof(more), " (and %u more like this were not shown)", left_out);
    int prefix = snprintf(buf, cap, "vramshim: ");
    int text = vsnprintf(buf + prefix, cap - (size_t)prefix, fmt, ap);
    size_t len = (size_t)prefix + (text > 0 ? (size_t)text : 0), tail = strlen(more);
    size_t at = len;
    if (len + tail >= cap) {
        at = cap - 1 - tail;
        memcpy(buf + at - 3, "...", 3);
    }
    memcpy(buf + at, more, tail + 1);
    return len + tail;
}

static char long_line[LONG_LINE];
static atomic_bool busy; /* somebody uses it: another thread, or the frame that this handler interrupted */

static int say(unsigned left_out, const char *fmt, va_list ap)
{
    char line[LINE], *said = line;
    va_list again;
    va_copy(again, ap);
    size_t cap = sizeof(line), len = compose(line, cap, left_out, fmt, ap);
    bool taken = len >= cap && !atomic_exchange(&busy, true);
    if (taken)
        len = compose(said = long_line, cap = sizeof(long_line), left_out, fmt, again);
    va_end(again);
    int r = say_quoted(said, len < cap ? len : cap - 1);
    if (taken)
        atomic_store(&busy, false);
    return r;
}

void vram_say(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    say(0, fmt, ap);
    va_end(ap);
}

#define RATE(kind, burst, seconds) [kind] = {burst, (seconds) * 1000ull * MS, 0, 0},
static struct vram_rate rates[] = {VRAM_NOTICE_KINDS(RATE)};
#undef RATE

bool vram_notice(enum vram_notice kind, const char *fmt, ...)
{
    unsigned left_out;
    if (!vram_rate_pass(&rates[kind], vram_now(), &left_out))
        return false;
    va_list ap;
    va_start(ap, fmt);
    int r = say(left_out, fmt, ap);
    va_end(ap);
    if (r < 0)
        atomic_fetch_add(&rates[kind].left_out, left_out + 1); /* for the next one to tell */
    return r == 0;
}

void vram_say_forget(void)
{
    for (size_t i = 0; i < VRAM_LENGTH(rates); i++) {
        atomic_store(&rates[i].full, 0);
        atomic_store(&rates[i].left_out, 0);
    }
    atomic_store(&busy, false);
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

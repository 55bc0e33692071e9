/*
 * The functions of libc that we stand in front of. Each goes straight to libc unless it concerns our signal, the program's error
 * stream or a sandbox, in our own process (laws 23, 25, 32): in a vfork child, which shares our memory, nothing here touches
 * any state.
 */
#include <errno.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "base/compiler.h"
#include "base/elf.h"
#include "base/libc.h"
#include "base/proc.h"
#include "base/sandbox.h"
#include "base/say.h"
#include "control/disposition.h"
#include "heap/heap.h"
#include "interpose/libc.h"
#include "observe/report.h"
#include "observe/trace.h"

int vram_sigaction(int sig, const struct sigaction *act, struct sigaction *old);
int vram_sigaction(int sig, const struct sigaction *act, struct sigaction *old)
{
    return vram_disposition_ours(sig) ? vram_disposition_action(act, old) : vram_libc_sigaction()(sig, act, old);
}
VRAM_EXPORT __typeof__(vram_sigaction) sigaction __attribute__((alias("vram_sigaction")));
VRAM_EXPORT __typeof__(vram_sigaction) __sigaction __attribute__((alias("vram_sigaction")));

sighandler_t vram_signal(int sig, sighandler_t handler);
sighandler_t vram_signal(int sig, sighandler_t handler)
{
    return vram_disposition_ours(sig) ? vram_disposition_signal(handler, 0, true) : vram_libc_signal()(sig, handler);
}
VRAM_EXPORT __typeof__(vram_signal) signal __attribute__((alias("vram_signal")));
VRAM_EXPORT __typeof__(vram_signal) bsd_signal __attribute__((alias("vram_signal")));
VRAM_EXPORT __typeof__(vram_signal) ssignal __attribute__((alias("vram_signal")));

sighandler_t vram_sysv_signal(int sig, sighandler_t handler);
sighandler_t vram_sysv_signal(int sig, sighandler_t handler)
{
    const int flags = SA_RESETHAND | SA_NODEFER | SA_INTERRUPT; /* the last says nothing, but old kernels keep it */
    return vram_disposition_ours(sig) ? vram_disposition_signal(handler, flags, false)
                                      : vram_libc_sysv_signal()(sig, handler);
}
VRAM_EXPORT __typeof__(vram_sysv_signal) sysv_signal __attribute__((alias("vram_sysv_signal")));
VRAM_EXPORT __typeof__(vram_sysv_signal) __sysv_signal __attribute__((alias("vram_sysv_signal")));

VRAM_EXPORT sighandler_t sigset(int sig, sighandler_t handler)
{
    return vram_disposition_ours(sig) ? vram_disposition_sigset(handler) : vram_libc_sigset()(sig, handler);
}

VRAM_EXPORT int sigignore(int sig)
{
    const struct sigaction ignore = {.sa_handler = SIG_IGN};
    return vram_disposition_ours(sig) ? vram_disposition_action(&ignore, NULL) : vram_libc_sigignore()(sig);
}

VRAM_EXPORT int siginterrupt(int sig, int interrupt)
{
    return vram_disposition_ours(sig) ? vram_disposition_interrupt(interrupt) : vram_libc_siginterrupt()(sig, interrupt);
}

/* What the program itself leads descriptor 2 to is its error stream from then on. To itself is no leading: what is there may be
 * a data file that took the number of a closed stream. */
static void error_stream_moved(void)
{
    int saved = errno;
    if (vram_proc_is_recorded())
        vram_say_adopt();
    errno = saved;
}

int vram_dup2(int from, int to);
int vram_dup2(int from, int to)
{
    int fd = vram_libc_dup2()(from, to);
    if (fd == STDERR_FILENO && from != to)
        error_stream_moved();
    return fd;
}
VRAM_EXPORT __typeof__(vram_dup2) dup2 __attribute__((alias("vram_dup2")));
VRAM_EXPORT __typeof__(vram_dup2) __dup2 __attribute__((alias("vram_dup2")));

VRAM_EXPORT int dup3(int from, int to, int flags)
{
    int fd = vram_libc_dup3()(from, to, flags);
    if (fd == STDERR_FILENO)
        error_stream_moved();
    return fd;
}

static FILE *reopened(FILE *file)
{
    if (file && file == stderr && fileno(file) == STDERR_FILENO)
        error_stream_moved();
    return file;
}

/* <stdio.h> may call either by the other's name (_FILE_OFFSET_BITS), so the exported ones are named to the assembler. */
FILE *vram_freopen(const char *path, const char *mode, FILE *stream);
FILE *vram_freopen(const char *path, const char *mode, FILE *stream)
{
    return reopened(vram_libc_freopen()(path, mode, stream));
}
VRAM_EXPORT extern __typeof__(vram_freopen) exported_freopen __asm__("freopen") __attribute__((alias("vram_freopen")));

FILE *vram_freopen64(const char *path, const char *mode, FILE *stream);
FILE *vram_freopen64(const char *path, const char *mode, FILE *stream)
{
    return reopened(vram_libc_freopen64()(path, mode, stream));
}
VRAM_EXPORT extern __typeof__(vram_freopen64) exported_freopen64 __asm__("freopen64") __attribute__((alias("vram_freopen64")));

/* Whose process this is has to be asked before: afterwards it may be forbidden. */
VRAM_EXPORT int prctl(int option, ...)
{
    unsigned long arguments[4]; /* all that there can be: reading more than were given is what libc's own does */
    va_list ap;
    va_start(ap, option);
    for (int i = 0; i < 4; i++)
        arguments[i] = va_arg(ap, unsigned long);
    va_end(ap);
    bool sandbox = (option == PR_SET_NO_NEW_PRIVS || option == PR_SET_SECCOMP) && vram_proc_is_recorded();
    int r = vram_libc_prctl()(option, arguments[0], arguments[1], arguments[2], arguments[3]);
    if (sandbox && r == 0 && option == PR_SET_SECCOMP && arguments[0] == SECCOMP_MODE_STRICT)
        vram_proc_renounce(); /* this thread alone */
    else if (sandbox && r == 0)
        vram_sandbox_entered();
    return r;
}

/* Python's workers, and many a main function that has had enough, leave here: no destructor runs, so the report is written
 * now (law 27). */
void vram_exit_now(int status) __attribute__((noreturn));
void vram_exit_now(int status)
{
    if (vram_proc_is_recorded()) {
        vram_heap_exiting();
        vram_trace_write();
        vram_report_write();
    }
    vram_libc__exit()(status);
    __builtin_unreachable();
}
VRAM_EXPORT __typeof__(vram_exit_now) _exit __attribute__((alias("vram_exit_now")));
VRAM_EXPORT __typeof__(vram_exit_now) _Exit __attribute__((alias("vram_exit_now")));

/* What is registered first is called last, and libraries are initialised before us: ours goes in before anybody's. */
static void report_at_quick_exit(void *unused)
{
    (void)unused;
    vram_trace_write();
    if (!vram_report_is_due())
        return;
    vram_libc___cxa_at_quick_exit()(report_at_quick_exit, NULL); /* for other threads that leave so, to wait in */
    vram_report_write();
}

void vram_quick_exit_register(void)
{
    static atomic_bool done;
    if (!vram_elf_is_second() && !atomic_exchange(&done, true))
        vram_libc___cxa_at_quick_exit()(report_at_quick_exit, NULL);
}

int __cxa_at_quick_exit(void (*function)(void *), void *object);
VRAM_EXPORT int __cxa_at_quick_exit(void (*function)(void *), void *object)
{
    vram_quick_exit_register();
    return vram_libc___cxa_at_quick_exit()(function, object);
}

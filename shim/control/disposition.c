#include "control/disposition.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/libc.h"
#include "base/lock.h"
#include "base/proc.h"
#include "base/say.h"
#include "config/options.h"
#include "control/thread.h"
#include "heap/heap.h"

/* What the program believes is installed. Written under SIGNAL with every signal blocked; the handler reads it on any thread
 * without a lock. Each change goes into the next slot and is then published; a reader would have to sleep through all of
 * them, in the middle of a copy, to see a torn one. */
enum { SLOTS = 64 };
static struct sigaction slots[SLOTS];
static struct sigaction *_Atomic believed = &slots[0];
static atomic_bool spent;      /* SA_RESETHAND: the one call has been made; it is SIG_DFL again */
static bool interrupts_signal; /* siginterrupt(sig, 1) was called: signal() installs without SA_RESTART. Under SIGNAL */

static bool is_function(const struct sigaction *act)
{
    return act->sa_handler != SIG_DFL && act->sa_handler != SIG_IGN; /* as the kernel does, whatever SA_SIGINFO says */
}

static void on_signal(int sig, siginfo_t *info, void *context)
{
    int saved = errno;
    struct sigaction program = *atomic_load(&believed);
    bool run = is_function(&program);
    if (run && (program.sa_flags & SA_RESETHAND))
        run = !atomic_exchange(&spent, true);

    /* A vfork child shares our memory but is not us. Ask first: the program's handler may never return. */
    if (vram_proc_is_recorded() && !vram_control_request() && !run) {
        static const char text[] = "vramshim: signal received; this program has not used GPU memory, nothing to give back\n";
        static const char no_thread[] = "vramshim: signal received, but there is no thread to give memory back\n";
        if (vram_heap_used())
            vram_say_raw(no_thread, sizeof(no_thread) - 1);
        else
            vram_say_raw(text, sizeof(text) - 1);
    }
    errno = saved;
    if (!run)
        return;
    if (program.sa_flags & SA_SIGINFO)
        program.sa_sigaction(sig, info, context);
    else
        program.sa_handler(sig);
}

/* The action for the kernel: ours, with the flags and the mask that the program wants for its own. */
static struct sigaction for_kernel(const struct sigaction *program)
{
    struct sigaction act = *program;
    if (!is_function(program)) {
        if (program->sa_handler == SIG_IGN)
            return act;
        /* Default: native would have ended the process, so there is no native behaviour of interrupted calls to keep. The
         * program's flags go along, because only the kernel knows which of them it will read back. */
        sigemptyset(&act.sa_mask);
        act.sa_flags = (act.sa_flags & ~SA_NODEFER) | SA_RESTART | SA_ONSTACK;
    }
    act.sa_sigaction = on_signal;
    act.sa_flags = (act.sa_flags & ~SA_RESETHAND) | SA_SIGINFO;
    return act;
}

/* Under SIGNAL, signals blocked. */
static void believe(const struct sigaction *act)
{
    struct sigaction *slot = slots + (atomic_load(&believed) - slots + 1) % SLOTS;
    *slot = *act;
    atomic_store(&spent, false);
    atomic_store(&believed, slot);
}

static void enter(sigset_t *ret_before)
{
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, ret_before);
    vram_lock(VRAM_RANK_SIGNAL);
}

static void leave(const sigset_t *before)
{
    vram_unlock(VRAM_RANK_SIGNAL);
    sigprocmask(SIG_SETMASK, before, NULL);
}

static struct sigaction visible(void)
{
    struct sigaction act = *atomic_load(&believed);
    if (atomic_load(&spent)) {
        act.sa_handler = SIG_DFL; /* the kernel leaves the flags as they were */
    }
    return act;
}

/* Under SIGNAL. 0, or -1 with errno set by the kernel. */
static int install(const struct sigaction *act)
{
    struct sigaction kernel = for_kernel(act);
    struct sigaction seen = *act, made;
    if (vram_libc_sigaction()(vram_options->signal, &kernel, NULL) != 0)
        return -1;
    /* What a program reads back is what the kernel made of it: it adds and drops bits (SA_RESTORER; unknown ones). */
    if (vram_libc_sigaction()(vram_options->signal, NULL, &made) == 0)
        seen.sa_flags = (act->sa_flags & ~(kernel.sa_flags & ~made.sa_flags)) | (made.sa_flags & ~kernel.sa_flags);
    sigdelset(&seen.sa_mask, SIGKILL);
    sigdelset(&seen.sa_mask, SIGSTOP);
    believe(&seen);
    return 0;
}

void vram_disposition_init(void)
{
    struct sigaction now;
    sigset_t before;
    if (!vram_options->signal || vram_libc_sigaction()(vram_options->signal, NULL, &now) != 0)
        return;
    enter(&before);
    if (install(&now) == 0)
        believe(&now); /* as it was read, nothing added */
    leave(&before);
}

int vram_disposition_action(const struct sigaction *act, struct sigaction *old)
{
    sigset_t before;
    /* Copies first: the program's pointers may be bad, and may be the same. */
    struct sigaction wanted, previous;
    if (act)
        wanted = *act;
    enter(&before);
    previous = visible();
    int r = act ? install(&wanted) : 0;
    int error = errno;
    leave(&before);
    errno = error;
    if (r == 0 && old)
        *old = previous;
    return r;
}

sighandler_t vram_disposition_signal(sighandler_t handler, int flags, bool mask_itself)
{
    struct sigaction act = {0}, old;
    if (handler == SIG_ERR) {
        errno = EINVAL;
        return SIG_ERR;
    }
    act.sa_handler = handler;
    act.sa_flags = flags;
    if (mask_itself) {
        sigaddset(&act.sa_mask, vram_options->signal);
        act.sa_flags |= __atomic_load_n(&interrupts_signal, __ATOMIC_RELAXED) ? 0 : SA_RESTART;
    }
    return vram_disposition_action(&act, &old) == 0 ? old.sa_handler : SIG_ERR;
}

sighandler_t vram_disposition_sigset(sighandler_t handler)
{
    struct sigaction act = {0}, old;
    sigset_t only, before;
    sigemptyset(&only);
    sigaddset(&only, vram_options->signal);
    if (handler == SIG_HOLD) {
        if (sigprocmask(SIG_BLOCK, &only, &before) != 0 || vram_disposition_action(NULL, &old) != 0)
            return SIG_ERR;
        return sigismember(&before, vram_options->signal) ? SIG_HOLD : old.sa_handler;
    }
    act.sa_handler = handler;
    if (vram_disposition_action(&act, &old) != 0 || sigprocmask(SIG_UNBLOCK, &only, &before) != 0)
        return SIG_ERR;
    return sigismember(&before, vram_options->signal) ? SIG_HOLD : old.sa_handler;
}

int vram_disposition_interrupt(int interrupt)
{
    sigset_t before;
    enter(&before);
    struct sigaction act = visible();
    __atomic_store_n(&interrupts_signal, interrupt != 0, __ATOMIC_RELAXED);
    if (interrupt)
        act.sa_flags &= ~SA_RESTART;
    else
        act.sa_flags |= SA_RESTART;
    int r = install(&act);
    leave(&before);
    return r;
}

bool vram_disposition_unheard(struct vram_text *t)
{
    int sig = vram_options->signal;
    sigset_t mask;
    if (!sig || vram_control_was_asked())
        return false;
    bool ignored = visible().sa_handler == SIG_IGN;
    if (!ignored && (sigprocmask(SIG_BLOCK, NULL, &mask) != 0 || sigismember(&mask, sig) != 1))
        return false;
    vram_text_add(t, "SIG");
    vram_signal_format(t, sig);
    if (ignored) {
        vram_text_add(t, " is ignored here (by the program, or by `trap '' ");
        vram_signal_format(t, sig);
        vram_text_add(t, "` in what started it): it");
    } else { /* other threads may still take it */
        vram_text_add(t, " is blocked in thread %d, and none has come through: one that waits, or that the program takes by sigwait,",
                      (int)syscall(SYS_gettid));
    }
    vram_text_add(t, " gives no memory back; VRAMSHIM_SIGNAL=%s names another", sig == SIGUSR2 ? "USR1" : "USR2");
    return true;
}

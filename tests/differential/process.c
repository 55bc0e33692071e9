#include "process.h"

#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

static __thread volatile sig_atomic_t plain_signals, told_signals, value;

static void plain(int signal)
{
    (void)signal;
    plain_signals++;
}

static void told(int signal, siginfo_t *info, void *context)
{
    (void)signal, (void)context;
    told_signals++;
    value = info->si_value.sival_int;
}

static int known(const struct sigaction *a)
{
    return a->sa_handler == SIG_DFL                                ? 0
           : a->sa_handler == SIG_IGN                              ? 1
           : !(a->sa_flags & SA_SIGINFO) && a->sa_handler == plain ? 2
           : a->sa_flags & SA_SIGINFO && a->sa_sigaction == told   ? 3
                                                                   : 4;
}

static void see_disposition(struct thread *t, const struct sigaction *a)
{
    see(t, "handler", (uint64_t)known(a));
    see(t, "flags", (uint64_t)a->sa_flags & (SA_SIGINFO | SA_RESETHAND | SA_NODEFER | SA_RESTART | SA_ONSTACK));
}

void op_handler(struct thread *t, const uint64_t *arg)
{
    struct sigaction a = {0}, old = {0};
    switch (arg[0] % 6) {
    case 0: old.sa_handler = signal(SIGUSR1, plain); break;
    case 1: old.sa_handler = signal(SIGUSR1, SIG_IGN); break;
    case 2: old.sa_handler = signal(SIGUSR1, arg[0] & 64 ? SIG_DFL : plain); break;
    case 3:
        a.sa_sigaction = told;
        a.sa_flags = SA_SIGINFO | SA_RESTART;
        sigaction(SIGUSR1, &a, &old);
        break;
    case 4:
        a.sa_sigaction = told;
        a.sa_flags = SA_SIGINFO | (int)(arg[0] & 64 ? SA_RESETHAND : SA_NODEFER);
        sigaction(SIGUSR1, &a, &old);
        break;
    default: break;
    }
    if (arg[0] % 6 == 3 || arg[0] % 6 == 4)
        see_disposition(t, &old);
    else if (arg[0] % 6 < 3)
        see(t, "before", old.sa_handler == SIG_DFL   ? 0
                         : old.sa_handler == SIG_IGN ? 1
                         : old.sa_handler == plain   ? 2
                                                     : 3);
    sigaction(SIGUSR1, NULL, &old);
    see_disposition(t, &old);
}

static void raise_here(struct thread *t, unsigned n)
{
    sigset_t set, before, pending;
    switch (n % 3) {
    case 0: pthread_kill(pthread_self(), SIGUSR1); break;
    case 1: pthread_sigqueue(pthread_self(), SIGUSR1, (union sigval){.sival_int = (int)n}); break;
    default:
        sigemptyset(&set);
        sigaddset(&set, SIGUSR1);
        pthread_sigmask(SIG_BLOCK, &set, &before);
        pthread_kill(pthread_self(), SIGUSR1);
        sigpending(&pending);
        see(t, "pending", (uint64_t)sigismember(&pending, SIGUSR1));
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
}

/* Natively the default disposition would end the program. */
void op_signal(struct thread *t, const uint64_t *arg)
{
    struct sigaction now;
    sigaction(SIGUSR1, NULL, &now);
    see(t, "handler", (uint64_t)known(&now));
    if (now.sa_handler == SIG_DFL)
        return;
    raise_here(t, (unsigned)arg[0]);
    see(t, "plain", (uint64_t)plain_signals);
    see(t, "told", (uint64_t)told_signals);
    see(t, "value", (uint64_t)value);
}

static void child(struct thread *t, unsigned n, int to)
{
    CUdeviceptr ptr = 0;
    size_t bytes = 0;
    struct sigaction now;
    see(t, "current", cuCtxSynchronize());
    see(t, "alloc", cuMemAlloc_v2(&ptr, 4096));
    for (int i = 0; i < BLOCKS; i++)
        if (t->world->blocks[i].ptr)
            see(t, "free", cuMemFree_v2(t->world->blocks[i].ptr));
    see(t, "info", cuMemGetInfo_v2(&bytes, NULL));
    if (n & 8)
        see(t, "init", cuInit(0));
    sigaction(SIGUSR1, NULL, &now);
    see_disposition(t, &now);
    if (now.sa_handler != SIG_DFL) {
        raise_here(t, n);
        see(t, "plain", (uint64_t)plain_signals);
    }
    fflush(t->out);
    if (write(to, t->text, t->text_size) < 0)
        _exit(9);
    switch (n % 4) {
    case 0: _exit(0);
    case 1: quick_exit(0);
    case 2: execl("/bin/true", "true", (char *)NULL); _exit(8);
    default: exit(0);
    }
}

void op_fork(struct thread *t, const uint64_t *arg)
{
    int ends[2], status = -1;
    char text[512];
    ssize_t n;
    if (pipe(ends) != 0)
        return;
    fflush(t->out);
    pid_t pid = fork();
    if (pid == 0) {
        close(ends[0]);
        fclose(t->out);
        t->out = open_memstream(&t->text, &t->text_size);
        child(t, (unsigned)arg[0], ends[1]);
    }
    close(ends[1]);
    while ((n = read(ends[0], text, sizeof text)) > 0)
        fwrite(text, 1, (size_t)n, t->out);
    close(ends[0]);
    waitpid(pid, &status, 0);
    see(t, "status", (uint64_t)status);
}

void op_spawn(struct thread *t, const uint64_t *arg)
{
    char name[] = "true", *argv[] = {name, NULL};
    posix_spawnattr_t attributes;
    sigset_t set;
    pid_t pid = -1;
    int status = -1;
    if (arg[0] & 1) {
        posix_spawnattr_init(&attributes);
        sigemptyset(&set);
        sigaddset(&set, SIGUSR1);
        posix_spawnattr_setsigdefault(&attributes, &set);
        posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGDEF);
        if (posix_spawn(&pid, "/bin/true", NULL, &attributes, argv, environ) != 0)
            pid = -1;
        posix_spawnattr_destroy(&attributes);
    } else if ((pid = vfork()) == 0) {
        signal(SIGUSR1, SIG_DFL);
        if (arg[0] & 2)
            execl("/bin/true", "true", (char *)NULL);
        _exit(3);
    }
    if (pid > 0)
        waitpid(pid, &status, 0);
    see(t, "status", (uint64_t)status);
    op_handler(t, (const uint64_t[]){5});
}

#include "base/thread.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>

#include "base/glibc.h"
#include "base/libc.h"
#include "base/sandbox.h"

VRAM_OLD_SYMBOL(pthread_create, "GLIBC_2.2.5");
VRAM_OLD_SYMBOL(pthread_setname_np, "GLIBC_2.12");
VRAM_OLD_SYMBOL(pthread_mutex_timedlock, "GLIBC_2.2.5");

int vram_thread_lock_until(pthread_mutex_t *lock, const struct timespec *until)
{
    return pthread_mutex_timedlock ? pthread_mutex_timedlock(lock, until) : ENOSYS;
}

int vram_thread_start(void *(*run)(void *), const char *name)
{
    /* An older glibc's libpthread may have come with the driver, after us. */
    __typeof__(&pthread_create) create = pthread_create ? pthread_create : vram_libc_pthread_create();
    pthread_attr_t attr;
    pthread_t thread;
    sigset_t all, before;
    if (!create)
        return ENOSYS;
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &before);
    int r = create(&thread, &attr, run, NULL);
    sigprocmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attr);
    if (r == 0 && name && pthread_setname_np && !vram_sandboxed()) /* it may open a file of /proc */
        pthread_setname_np(thread, name);
    return r;
}

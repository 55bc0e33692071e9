#include "control/last.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/glibc.h"

VRAM_OLD_SYMBOL(pthread_key_create, "GLIBC_2.2.5");
VRAM_OLD_SYMBOL(pthread_setspecific, "GLIBC_2.2.5");

static atomic_bool main_is_gone;
static void (*on_gone)(void);

static void main_ends(void *unused)
{
    (void)unused;
    atomic_store(&main_is_gone, true);
    on_gone();
}

void vram_last_watch(void (*gone)(void))
{
    static pthread_key_t key;
    static bool made;
    atomic_store(&main_is_gone, false);
    /* Without libpthread (an older glibc, a program without threads) there is no other thread to wait for. */
    if (syscall(SYS_gettid) != syscall(SYS_getpid) || !pthread_key_create || !pthread_setspecific)
        return;
    on_gone = gone;
    made = made || pthread_key_create(&key, main_ends) == 0;
    if (made)
        pthread_setspecific(key, &main_is_gone);
}

bool vram_last_main_is_gone(void)
{
    return atomic_load(&main_is_gone);
}

bool vram_last_is_alone(void)
{
    enum { FIELDS = 17 }; /* from the state to the number of threads: proc(5) */
    char stat[1024];
    int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t n = read(fd, stat, sizeof(stat) - 1);
    close(fd);
    if (n <= 0)
        return false;
    stat[n] = 0;
    const char *at = strrchr(stat, ')'); /* a program's name may hold anything */
    if (!at || strncmp(at, ") Z ", 4) != 0)
        return false;
    at += 2;
    for (int i = 0; at && i < FIELDS; i++)
        at = strchr(at + 1, ' ');
    return at && strtol(at, NULL, 10) == 2;
}

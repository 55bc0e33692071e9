#include "control/last.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/glibc.h"
#include "base/proc.h"
#include "base/sandbox.h"

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

/* glibc registers one for each thread, the main one included. */
static bool has_robust_list(pid_t tid)
{
    void *head = NULL;
    size_t size;
    return syscall(SYS_get_robust_list, tid, &head, &size) == 0 && head;
}

bool vram_last_main_has_vanished(void)
{
    static pid_t seen; /* alive, by its list; in a forked child it is another */
    pid_t main_tid = vram_proc_pid();
    if (vram_sandboxed())
        return false;
    if (has_robust_list(main_tid)) {
        seen = main_tid;
        return false;
    }
    return seen == main_tid;
}

/* The field of that number of /proc/self/stat: proc(5). `at` is at the state, the third. */
static long field(const char *at, int number)
{
    for (int i = 3; at && i < number; i++)
        at = strchr(at + 1, ' ');
    return at ? strtol(at, NULL, 10) : -1;
}

bool vram_last_is_alone(int *ret_status)
{
    enum { THREADS = 20, EXIT_CODE = 52 };
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
    if (!at || strncmp(at, ") Z ", 4) != 0 || field(at + 1, THREADS) != 2)
        return false;
    *ret_status = (int)field(at + 1, EXIT_CODE);
    return true;
}

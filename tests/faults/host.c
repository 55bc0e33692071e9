/*
 * Preloaded beside the shim: lets what the host gives fail, for libvramshim.so only. Everybody else is served as ever.
 *
 *   FAULTS_HOST="mmap:3=ENOMEM"      the third mmap of the shim fails
 *   FAULTS_HOST="write:2*=EIO"       the second and all later ones
 *   FAULTS_HOST="write:1=SHORT"      writes half of it and says so
 *   FAULTS_CALLS=path                a file that holds the number of its calls, eight bytes
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { SHORT = -1 };

static const struct {
    const char *name;
    int value;
} errors[] = {
    {"ENOMEM", ENOMEM}, {"EAGAIN", EAGAIN}, {"EINTR", EINTR},   {"EIO", EIO},
    {"ENOSPC", ENOSPC}, {"EACCES", EACCES}, {"EMFILE", EMFILE}, {"EINVAL", EINVAL},
    {"ENOSYS", ENOSYS}, {"EBADF", EBADF},   {"EPERM", EPERM},   {"SHORT", SHORT},
};

static uintptr_t shim_start, shim_end;
static char wanted[32];
static unsigned long nth;
static bool from_then_on;
static int failure;
static atomic_ulong uncounted, *calls = &uncounted; /* in FAULTS_CALLS, so that forked and dying processes count, too */

static int is_shim(struct dl_phdr_info *info, size_t size, void *unused)
{
    (void)size;
    (void)unused;
    if (!strstr(info->dlpi_name, "libvramshim"))
        return 0;
    shim_start = UINTPTR_MAX;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        uintptr_t start = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr, end = start + info->dlpi_phdr[i].p_memsz;
        if (info->dlpi_phdr[i].p_type != PT_LOAD)
            continue;
        shim_start = start < shim_start ? start : shim_start;
        shim_end = end > shim_end ? end : shim_end;
    }
    return 1;
}

/* May be asked before any constructor has run. */
static void prepare(void)
{
    static atomic_bool done;
    char count[32] = "", error[16] = "";
    const char *what = getenv("FAULTS_HOST");
    if (atomic_load(&done))
        return;
    dl_iterate_phdr(is_shim, NULL);
    if (what && sscanf(what, "%31[^:]:%31[^=]=%15s", wanted, count, error) == 3) {
        nth = strtoul(count, NULL, 10);
        from_then_on = strchr(count, '*') != NULL;
        for (size_t i = 0; i < sizeof(errors) / sizeof(*errors); i++)
            if (strcmp(errors[i].name, error) == 0)
                failure = errors[i].value;
    }
    const char *path = getenv("FAULTS_CALLS");
    int fd = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : -1;
    if (fd >= 0 && ftruncate(fd, sizeof(*calls)) == 0) {
        void *shared = (void *)syscall(SYS_mmap, NULL, sizeof(*calls), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        calls = shared != MAP_FAILED ? shared : calls;
    }
    syscall(SYS_close, fd);
    atomic_store(&done, true);
}

/* What this call is to fail with, or 0. */
static int fails(const char *name, const void *caller)
{
    prepare();
    if ((uintptr_t)caller < shim_start || (uintptr_t)caller >= shim_end || strcmp(name, wanted) != 0)
        return 0;
    unsigned long n = atomic_fetch_add(calls, 1) + 1;
    return n == nth || (from_then_on && n > nth) ? failure : 0;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define CALLER __builtin_return_address(0)

/* Functions that answer -1 (or `bad`) and set errno; those that return the error themselves. */
#define SETS_ERRNO(ret, name, bad, parameters, arguments)                                                              \
    ret name parameters                                                                                                \
    {                                                                                                                  \
        int error = fails(#name, CALLER);                                                                              \
        if (error) {                                                                                                   \
            errno = error;                                                                                             \
            return bad;                                                                                                \
        }                                                                                                              \
        return REAL(name) arguments;                                                                                   \
    }
#define RETURNS_ERROR(name, parameters, arguments)                                                                     \
    int name parameters                                                                                                \
    {                                                                                                                  \
        int error = fails(#name, CALLER);                                                                              \
        return error ? error : REAL(name) arguments;                                                                   \
    }

int __register_atfork(void (*prepare_)(void), void (*parent)(void), void (*child)(void), void *object);
RETURNS_ERROR(__register_atfork, (void (*prepare_)(void), void (*parent)(void), void (*child)(void), void *object),
              (prepare_, parent, child, object))
RETURNS_ERROR(pthread_create, (pthread_t * thread, const pthread_attr_t *attr, void *(*start)(void *), void *arg),
              (thread, attr, start, arg))
RETURNS_ERROR(pthread_mutex_timedlock, (pthread_mutex_t * mutex, const struct timespec *until), (mutex, until))
RETURNS_ERROR(pthread_setname_np, (pthread_t thread, const char *name), (thread, name))
RETURNS_ERROR(on_exit, (void (*function)(int, void *), void *arg), (function, arg))

SETS_ERRNO(int, madvise, -1, (void *addr, size_t length, int advice), (addr, length, advice))
SETS_ERRNO(int, poll, -1, (struct pollfd * fds, nfds_t count, int timeout), (fds, count, timeout))
SETS_ERRNO(int, nanosleep, -1, (const struct timespec *time, struct timespec *rest), (time, rest))
SETS_ERRNO(int, mincore, -1, (void *addr, size_t length, unsigned char *vec), (addr, length, vec))
SETS_ERRNO(char *, getcwd, NULL, (char *buf, size_t size), (buf, size))
SETS_ERRNO(int, gethostname, -1, (char *buf, size_t size), (buf, size))
SETS_ERRNO(int, close, -1, (int fd), (fd))

void *mmap64(void *addr, size_t length, int prot, int flags, int fd, off64_t offset)
{
    int error = fails("mmap", CALLER);
    if (error) {
        errno = error;
        return MAP_FAILED;
    }
    return (void *)syscall(SYS_mmap, addr, length, prot, flags, fd, offset);
}

int open64(const char *path, int flags, ...)
{
    va_list ap;
    va_start(ap, flags);
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(ap, mode_t) : 0;
    va_end(ap);
    int error = fails("open", CALLER);
    if (error) {
        errno = error;
        return -1;
    }
    return REAL(open64)(path, flags, mode);
}

ssize_t write(int fd, const void *bytes, size_t size)
{
    int error = fails("write", CALLER);
    if (error == SHORT)
        return REAL(write)(fd, bytes, (size + 1) / 2);
    if (error) {
        errno = error;
        return -1;
    }
    return REAL(write)(fd, bytes, size);
}

/* System calls made by number. Waiting on a futex may be interrupted, or find that its word has changed. */
long syscall(long number, ...)
{
    va_list ap;
    long a[6];
    va_start(ap, number);
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(ap, long);
    va_end(ap);
    int error = 0;
    if (number == SYS_futex && (a[1] & FUTEX_CMD_MASK) == FUTEX_WAIT)
        error = fails("futex", CALLER);
    if (number == SYS_fstat)
        error = fails("fstat", CALLER);
    if (error) {
        errno = error;
        return -1;
    }
    return REAL(syscall)(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

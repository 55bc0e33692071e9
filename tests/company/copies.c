/*
 * An unmodified program that uses GPU memory, takes SIGUSR1, forks and vforks, and leaves one block behind. Single-threaded: all that the shim counts is the same in each run.
 *
 *   copies exit|_exit|quick_exit
 *
 * COPIES_ENTRIES=PATH: then it does the same by the entries of this loaded library; empty: by libcuda's and libc's own.
 * COPIES_NO_HANDLER: SIGUSR1 is left at its default, which natively ends the program.
 * COPIES_LOAD=PATH: this library is loaded once memory is in use.
 * Waits for a line on standard input once it has sent itself the signal, so that a flush can be waited for.
 */
#include <dlfcn.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "company.h"

enum { BLOCKS = 8, MIB = 1 << 20 };

static unsigned handled;
static void count(int sig) { handled += sig == SIGUSR1; }

static void say(const char *what, long value)
{
    printf("%s %ld\n", what, value);
    fflush(stdout);
}

static void *second, *driver, *libc;
static void *entry(void *home, const char *name) { return dlsym(second ? second : home, name); }

static void use(CUresult (*allocate)(CUdeviceptr *, size_t), CUresult (*release)(CUdeviceptr))
{
    CUdeviceptr p[BLOCKS];
    long wrong = 0;
    for (int round = 0; round < 10; round++) {
        for (int i = 0; i < BLOCKS; i++)
            wrong += allocate(&p[i], (size_t)(i + 1) * MIB) != CUDA_SUCCESS;
        for (int i = 0; i < BLOCKS; i++)
            wrong += release(p[i]) != CUDA_SUCCESS;
    }
    wrong += release(p[0]) != CUDA_ERROR_INVALID_VALUE;
    say("calls that went wrong:", wrong);
}

static long end_of(pid_t pid)
{
    int status = -1;
    waitpid(pid, &status, 0);
    return status;
}

static void children(void (*leave)(int))
{
    pid_t pid = fork();
    if (pid == 0)
        exit(3);
    say("a forked child:", end_of(pid));
    pid = fork();
    if (pid == 0)
        leave(4);
    say("one that leaves at once:", end_of(pid));
    pid = vfork();
    if (pid == 0) {
        signal(SIGUSR1, SIG_DFL);
        leave(5);
    }
    say("a vfork child:", end_of(pid));
}

/* What this address belongs to. */
static void home_of(const char *what, const void *address)
{
    Dl_info info = {0};
    dladdr(address, &info);
    const char *slash = info.dli_fname ? strrchr(info.dli_fname, '/') : NULL;
    printf("%s is of %s\n", what, slash ? slash + 1 : "nobody");
}

static void say_so(void *what) { say(what, 1); }

/* No entry of a copy that is not the shim does anything but what stands behind it. */
static void by_entries(void)
{
    void *(*lookup)(void *, const char *) = entry(libc, "dlsym");
    __typeof__(&cuGetProcAddress_v2) get = entry(driver, "cuGetProcAddress_v2");
    int (*set_action)(int, const struct sigaction *, struct sigaction *) = entry(libc, "sigaction");
    int (*real_action)(int, const struct sigaction *, struct sigaction *) = dlsym(libc, "sigaction");
    int (*at_quick)(void (*)(void *), void *) = entry(libc, "__cxa_at_quick_exit");
    void (*leave)(int) = entry(libc, "_exit");
    static char called[] = "called at quick_exit:";
    CUdriverProcAddressQueryResult status;
    struct sigaction one, two;
    void *p = NULL;
    sighandler_t (*set_signal)(int, sighandler_t) = entry(libc, "signal");

    home_of("what its dlsym finds", lookup(driver, "cuMemAlloc_v2"));
    say("cuGetProcAddress:", get("cuMemAlloc", &p, 12000, 0, &status));
    home_of("what that finds", p);
    use(entry(driver, "cuMemAlloc_v2"), entry(driver, "cuMemFree_v2"));
    say("sigaction:", set_action(SIGUSR1, NULL, &one));
    say("libc's:", real_action(SIGUSR1, NULL, &two));
    say("the same:", one.sa_handler == two.sa_handler && one.sa_flags == two.sa_flags);
    say("signal:", set_signal(SIGUSR2, count) == SIG_DFL);
    say("at_quick_exit:", at_quick(say_so, called));
    children(leave);
}

int main(int argc, char **argv)
{
    const char *how = argc > 1 ? argv[1] : "exit", *entries = getenv("COPIES_ENTRIES"), *load = getenv("COPIES_LOAD");
    struct runtime cuda;
    CUcontext context;
    CUdeviceptr forgotten;
    if (!getenv("COPIES_NO_HANDLER"))
        signal(SIGUSR1, count);
    driver = dlopen("libcuda.so.1", RTLD_NOW);
    libc = dlopen("libc.so.6", RTLD_NOW);
    second = entries && *entries ? dlopen(entries, RTLD_NOW | RTLD_NOLOAD) : NULL;
    if ((entries && *entries && !second) || !runtime_from(&cuda, driver) || cuda.init(0) != CUDA_SUCCESS ||
        cuda.retain(&context, 0) != CUDA_SUCCESS || cuda.set_current(context) != CUDA_SUCCESS) {
        fprintf(stderr, "copies: %s\n", dlerror());
        return 2;
    }
    use(cuda.mem_alloc, cuda.mem_free);
    if (load && !dlopen(load, RTLD_NOW | RTLD_GLOBAL)) {
        fprintf(stderr, "copies: %s\n", dlerror());
        return 2;
    }
    raise(SIGUSR1);
    say("signals handled:", handled);
    getchar();
    use(cuda.mem_alloc, cuda.mem_free);
    children(_exit);
    if (entries)
        by_entries();
    say("forgotten:", cuda.mem_alloc(&forgotten, MIB));
    if (strcmp(how, "_exit") == 0)
        _exit(0);
    if (strcmp(how, "quick_exit") == 0)
        quick_exit(0);
    return 0;
}

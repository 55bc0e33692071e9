/*
 * Law 25: fork, vfork, _Fork, clone and posix_spawn. A child reports nothing of its parent's, starts afresh if it uses
 * CUDA itself, and touches nothing of the parent's state, whose memory it may share. HAMi-core 199 and gperftools 932,
 * 1425 (fork), HAMi-core 86 and 248 (locks left behind).
 */
#include <dlfcn.h>
#include <pthread.h>
#include <spawn.h>
#include <stdatomic.h>
#include <sys/syscall.h>

#include "law.h"
#include "sim.h"
#include "world.h"

enum { MIB = 1 << 20 };

extern char **environ;

static volatile sig_atomic_t calls;
static void count(int sig) { calls += sig == SIGUSR1; }

static CUdeviceptr allocate(size_t bytes)
{
    CUdeviceptr p;
    OK(cu.cuMemAlloc_v2(&p, bytes));
    return p;
}

static int status_of(pid_t pid)
{
    int status = -1;
    CHECK(pid > 0);
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    return status;
}

/* The signal still does what it did before the child was made: the program's handler runs, and memory goes back. */
static void expect_signal_works(void)
{
    struct sigaction act;
    CHECK(sigaction(SIGUSR1, NULL, &act) == 0);
    CHECK(act.sa_handler == count);
    cached_block(4 * MIB);
    unsigned long before = driver_calls("cuMemFree_v2");
    int seen = calls;
    raise(SIGUSR1);
    CHECK_EQ(calls, seen + 1);
    if (under_shim())
        WAIT_UNTIL(driver_calls("cuMemFree_v2") > before);
}

/* Runs a case, which leaks `blocks` blocks of 1 MiB, and looks at its report: complete, and written once. */
static void expect_one_report(const char *name, unsigned blocks)
{
    static char text[65536];
    CHECK_EQ(law_run_child(name, NULL, text, sizeof(text)), 0);
    if (!under_shim())
        return;
    char expected[80];
    snprintf(expected, sizeof(expected), "%u.0 MiB in %u block%s never freed\n", blocks, blocks,
             blocks == 1 ? "" : "s");
    CHECK_EQ(count_of(text, "LEAK SUMMARY"), 1);
    CHECK(strstr(text, expected));
}

/* A forked child leaves, by every door. */
static void leave(int how)
{
    switch (how) {
    case 0:
        exit(how);
    case 1:
        _exit(how);
    case 2:
        _Exit(how);
    default:
        quick_exit(how);
    }
}

LAW_CHILD(forks)
{
    law_context();
    signal(SIGUSR1, count);
    allocate(MIB);
    cached_block(8 * MIB);
    for (int how = 0; how < 4; how++) {
        pid_t pid = fork();
        if (pid == 0)
            leave(how);
        int status = status_of(pid);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == how);
    }
    expect_signal_works();
    allocate(MIB);
}

LAW_CASE_SIM_ONCE(a_forked_child_reports_nothing) { expect_one_report("forks", 2); }

/* A child of a program that uses CUDA cannot use it: the driver says so, and nobody answers for it. */
LAW_CASE_SIM(a_forked_child_gets_the_drivers_answers)
{
    law_context();
    CUdeviceptr live = allocate(MIB), kept = cached_block(4 * MIB), p = 0;
    size_t size;
    pid_t pid = fork();
    if (pid == 0) {
        CHECK_EQ(cu.cuMemAlloc_v2(&p, 4 * MIB), CUDA_ERROR_NOT_INITIALIZED);
        CHECK_EQ(cu.cuMemFree_v2(live), CUDA_ERROR_NOT_INITIALIZED);
        CHECK_EQ(cu.cuMemFree_v2(kept), CUDA_ERROR_NOT_INITIALIZED);
        CHECK_EQ(cu.cuMemGetInfo_v2(&size, &size), CUDA_ERROR_NOT_INITIALIZED);
        CHECK_EQ(cu.cuMemGetAddressRange_v2(&p, &size, live), CUDA_ERROR_NOT_INITIALIZED);
        exit(0);
    }
    CHECK_EQ(status_of(pid), 0);
    OK(cu.cuMemFree_v2(live));
}

/* In the child, nobody has used GPU memory: the signal says so, or runs the program's handler. */
LAW_CHILD(signals_a_forked_child)
{
    law_context();
    cached_block(4 * MIB);
    pid_t pid = fork();
    if (pid == 0) {
        if (under_shim())
            raise(SIGUSR1);
        signal(SIGUSR1, count);
        raise(SIGUSR1);
        _exit(calls != 1);
    }
    CHECK_EQ(status_of(pid), 0);
}

LAW_CASE_SIM_ONCE(the_signal_in_a_forked_child)
{
    char text[8192];
    CHECK_EQ(law_run_child("signals_a_forked_child", NULL, text, sizeof(text)), 0);
    if (under_shim())
        CHECK_EQ(count_of(text, "signal received; this program has not used GPU memory"), 1);
}

/* The child is the first to use CUDA: it starts afresh, with cache, signal and a report of its own. */
LAW_CHILD(uses_cuda_in_the_child)
{
    signal(SIGUSR1, count);
    for (int i = 0; i < 2; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            law_context();
            expect_signal_works();
            allocate(MIB);
            cached_block(4 * MIB);
            unsigned long before = driver_calls("cuMemAlloc_v2");
            cached_block(4 * MIB);
            if (under_shim())
                CHECK_EQ(driver_calls("cuMemAlloc_v2"), before);
            exit(0);
        }
        CHECK_EQ(status_of(pid), 0);
    }
}

LAW_CASE_SIM_ONCE(a_child_starts_afresh)
{
    static char text[65536];
    CHECK_EQ(law_run_child("uses_cuda_in_the_child", NULL, text, sizeof(text)), 0);
    if (under_shim()) {
        CHECK_EQ(count_of(text, "LEAK SUMMARY"), 2);
        CHECK_EQ(count_of(text, "): 1.0 MiB in 1 block never freed"), 2);
    }
}

/* Handlers and masks go on in both. */
LAW_CASE_SIM_ONCE(dispositions_and_masks_survive_a_fork)
{
    sigset_t before, after;
    law_context();
    signal(SIGUSR1, count);
    sigemptyset(&before);
    sigaddset(&before, SIGHUP);
    CHECK(pthread_sigmask(SIG_SETMASK, &before, NULL) == 0);
    pid_t pid = fork();
    CHECK(pthread_sigmask(SIG_SETMASK, NULL, &after) == 0);
    for (int s = 1; s < 32; s++)
        CHECK_EQ(sigismember(&after, s), sigismember(&before, s));
    if (pid == 0) {
        raise(SIGUSR1);
        CHECK_EQ(calls, 1);
        exit(0);
    }
    CHECK_EQ(status_of(pid), 0);
    expect_signal_works();
}

/* Forks while every lock is in use: no child ever waits for a thread that it does not have. */
static CUcontext context;
static atomic_bool stop;
static void *busy(void *unused)
{
    (void)unused;
    cu.cuCtxSetCurrent(context);
    while (!stop) {
        CUdeviceptr p;
        struct sigaction act;
        if (cu.cuMemAlloc_v2(&p, 4 * MIB) == CUDA_SUCCESS)
            cu.cuMemFree_v2(p);
        sigaction(SIGUSR1, NULL, &act);
    }
    return NULL;
}

/* Hardly ever outside the lock of the dispositions: nearly each fork meets it. */
static void *asks_without_end(void *unused)
{
    struct sigaction act;
    while (!stop)
        sigaction(SIGUSR1, NULL, &act);
    return unused;
}

LAW_CASE_SIM_ONCE(forks_beside_working_threads)
{
    enum { N = 4 };
    pthread_t threads[N];
    alarm(30);
    context = law_context();
    signal(SIGUSR1, count);
    for (int i = 0; i < N; i++)
        CHECK(pthread_create(&threads[i], NULL, i ? busy : asks_without_end, NULL) == 0);
    for (int i = 0; i < 100; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            CUdeviceptr p;
            alarm(10);
            signal(SIGUSR1, SIG_IGN);
            CHECK_EQ(cu.cuMemAlloc_v2(&p, 4 * MIB), CUDA_ERROR_NOT_INITIALIZED);
            exit(0);
        }
        CHECK_EQ(status_of(pid), 0);
    }
    stop = true;
    for (int i = 0; i < N; i++)
        pthread_join(threads[i], NULL);
    expect_signal_works();
}

/* A vfork child shares our memory. What it does to the signal, and how it leaves, must not reach the parent. */
static pid_t __attribute__((noinline)) vfork_and_leave(int how)
{
    pid_t pid = vfork();
    if (pid == 0) {
        signal(SIGUSR1, SIG_DFL);
        sigaction(SIGUSR1, &(struct sigaction){.sa_handler = SIG_IGN}, NULL);
        if (how == 2)
            execl("/nowhere/to/be/found", "nothing", (char *)NULL);
        if (how == 1)
            _Exit(how);
        _exit(how);
    }
    return pid;
}

LAW_CHILD(vforks)
{
    law_context();
    signal(SIGUSR1, count);
    allocate(MIB);
    for (int how = 0; how < 3; how++) {
        int status = status_of(vfork_and_leave(how));
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == how);
        expect_signal_works();
    }
    allocate(MIB);
}

LAW_CASE_SIM_ONCE(a_vfork_child_touches_nothing) { expect_one_report("vforks", 2); }

/* posix_spawn, with the program's handler reset in the child, found and not found. */
LAW_CHILD(spawns)
{
    posix_spawnattr_t attr;
    sigset_t set;
    pid_t pid;
    char *const argv[] = {(char *)"true", NULL};
    law_context();
    signal(SIGUSR1, count);
    allocate(MIB);
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    posix_spawnattr_init(&attr);
    posix_spawnattr_setsigdefault(&attr, &set);
    posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGDEF);
    CHECK_EQ(posix_spawnp(&pid, "true", NULL, &attr, argv, environ), 0);
    CHECK_EQ(status_of(pid), 0);
    expect_signal_works();
    CHECK_EQ(posix_spawn(&pid, "/nowhere/to/be/found", NULL, &attr, argv, environ), ENOENT);
    expect_signal_works();
    CHECK_EQ(system("exit 3") >> 8, 3);
    expect_signal_works();
    allocate(MIB);
}

LAW_CASE_SIM_ONCE(spawned) { expect_one_report("spawns", 2); }

/* _Fork and clone run no handler: the child has a copy of our memory and is not us. */
static pid_t fork_without_handlers(bool by_clone)
{
    pid_t (*function)(void) = (pid_t(*)(void))dlsym(RTLD_DEFAULT, "_Fork");
    return by_clone || !function ? (pid_t)syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL) : function();
}

LAW_CHILD(forks_without_handlers)
{
    law_context();
    signal(SIGUSR1, count);
    allocate(MIB);
    cached_block(4 * MIB);
    for (int i = 0; i < 8; i++) {
        pid_t pid = fork_without_handlers(i & 1);
        if (pid == 0) {
            signal(SIGUSR1, count);
            raise(SIGUSR1);
            if (calls == 0)
                _exit(9);
            signal(SIGUSR1, SIG_IGN);
            leave(i >> 1);
        }
        int status = status_of(pid);
        CHECK(WIFEXITED(status));
        CHECK_EQ(WEXITSTATUS(status), i >> 1);
        expect_signal_works();
    }
    allocate(MIB);
}

LAW_CASE_SIM_ONCE(children_that_ran_no_handler) { expect_one_report("forks_without_handlers", 2); }

/* And the fork of such a child is a process like any other: it may use CUDA, under the shim. */
LAW_CHILD(grandchild_by_fork)
{
    pid_t pid = fork_without_handlers(false);
    if (pid == 0) {
        pid = fork();
        if (pid == 0) {
            law_context();
            signal(SIGUSR1, count);
            expect_signal_works();
            allocate(MIB);
            exit(0);
        }
        _exit(status_of(pid) != 0);
    }
    CHECK_EQ(status_of(pid), 0);
}

LAW_CASE_SIM_ONCE(a_forked_grandchild) { expect_one_report("grandchild_by_fork", 1); }

/* No child writes into a file of its parent. */
LAW_CASE_SIM_ONCE(files_of_the_parent)
{
    char directory[] = "/tmp/law25.XXXXXX", variable[128], command[256], out[4096], text[8192];
    CHECK(mkdtemp(directory));
    snprintf(variable, sizeof(variable), "VRAMSHIM_REPORT=%s/report", directory);
    CHECK_EQ(law_run_child("forks", ENV(variable), text, sizeof(text)), 0);
    CHECK(!strstr(text, "LEAK SUMMARY"));
    snprintf(command, sizeof(command), "cat %s/* 2>/dev/null; ls %s | wc -l; rm -r %s", directory, directory,
             directory);
    CHECK_EQ(shell(command, out, sizeof(out)), 0);
    if (under_shim()) {
        CHECK_EQ(count_of(out, "LEAK SUMMARY"), 1);
        CHECK(strstr(out, "2.0 MiB in 2 blocks never freed"));
        CHECK(strstr(out, "\n1\n"));
    } else {
        CHECK(strcmp(out, "0\n") == 0);
    }
}

/* Python: subprocess resets SIGUSR1 in a vfork child, and a failed exec leaves by _exit there; os.fork and
 * multiprocessing. */
static const char python[] =
    "import ctypes, multiprocessing, os, signal, subprocess, sys, time\n"
    "cuda = ctypes.CDLL('libcuda.so.1')\n"
    "calls = cuda.sim_calls\n"
    "calls.restype = ctypes.c_ulong\n"
    "shim = 'libvramshim' in open('/proc/self/maps').read()\n"
    "assert cuda.cuInit(0) == 0\n"
    "ctx = ctypes.c_void_p()\n"
    "assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctx), 0) == 0\n"
    "assert cuda.cuCtxSetCurrent(ctx) == 0\n"
    "def alloc(n):\n"
    "    p = ctypes.c_uint64()\n"
    "    assert cuda.cuMemAlloc_v2(ctypes.byref(p), ctypes.c_size_t(n)) == 0\n"
    "    return p\n"
    "ran = []\n"
    "signal.signal(signal.SIGUSR1, lambda s, f: ran.append(s))\n"
    "def works():\n"
    "    assert cuda.cuMemFree_v2(alloc(4 << 20)) == 0\n"
    "    before = calls(b'cuMemFree_v2')\n"
    "    del ran[:]\n"
    "    os.kill(os.getpid(), signal.SIGUSR1)\n"
    "    while not ran or (shim and calls(b'cuMemFree_v2') == before):\n"
    "        time.sleep(0.001)\n"
    "alloc(1 << 20)\n"
    "works()\n"
    "for kind in ({}, {'close_fds': False}, {'preexec_fn': lambda: None}, {'start_new_session': True}):\n"
    "    assert subprocess.run(['true'], **kind).returncode == 0\n"
    "    works()\n"
    "    try:\n"
    "        subprocess.run(['/nowhere/to/be/found'], **kind)\n"
    "        assert False\n"
    "    except FileNotFoundError:\n"
    "        pass\n"
    "    works()\n"
    "pid = os.fork()\n"
    "if pid == 0:\n"
    "    sys.exit(5)\n"
    "assert os.waitpid(pid, 0)[1] >> 8 == 5\n"
    "p = multiprocessing.get_context('fork').Process(target=os.getpid)\n"
    "p.start()\n"
    "p.join()\n"
    "assert p.exitcode == 0\n"
    "works()\n"
    "alloc(1 << 20)\n"
    "print('python is content', flush=True)\n";

LAW_CASE_SIM_ONCE(children_of_python)
{
    static char out[65536];
    if (shell("command -v python3", out, sizeof(out)) != 0)
        law_skip("no python3");
    setenv("LAW25_PYTHON", python, 1);
    CHECK_EQ(shell("exec python3 -c \"$LAW25_PYTHON\" 2>&1", out, sizeof(out)), 0);
    CHECK(strstr(out, "python is content\n"));
    if (under_shim()) {
        CHECK_EQ(count_of(out, "LEAK SUMMARY"), 1);
        CHECK(strstr(out, "2.0 MiB in 2 blocks never freed"));
    }
}

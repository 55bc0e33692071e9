/*
 * Law 25: fork, vfork, _Fork, clone and posix_spawn. A child reports nothing of its parent's, starts afresh if it uses
 * CUDA itself, and touches nothing of the parent's state, whose memory it may share. HAMi-core 199 and gperftools 932,
 * 1425 (fork), HAMi-core 86 and 248 (locks left behind).
 */
#include <dlfcn.h>
#include <pthread.h>
#include <spawn.h>
#include <stdatomic.h>
#include <sys/mman.h>
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

/* As status_of, but for a child that may never end: such a one is killed, and its status says so. */
static int status_of_one_that_may_hang(pid_t pid)
{
    int status = -1;
    CHECK(pid > 0);
    for (int i = 0; i < 10000; i++, nap())
        if (waitpid(pid, &status, WNOHANG) == pid)
            return status;
    kill(pid, SIGKILL);
    return status_of(pid);
}

static bool sleeps(pid_t tid)
{
    char path[64], stat[512];
    snprintf(path, sizeof(path), "/proc/self/task/%d/stat", tid);
    if (slurp(path, stat, sizeof(stat)) <= 0)
        return false;
    const char *end = strrchr(stat, ')');
    return end && end[1] == ' ' && end[2] == 'S';
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

LAW_CASE_SIM_ONCE(forks_beside_working_threads)
{
    enum { N = 3 };
    pthread_t threads[N];
    context = law_context();
    signal(SIGUSR1, count);
    for (int i = 0; i < N; i++)
        CHECK(pthread_create(&threads[i], NULL, busy, NULL) == 0);
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

/*
 * Forks while another thread is inside the shim with a lock, for certain: this program has its own mmap, as programs may,
 * and the shim asks for memory for its records with locks held. The thread stays in there until the fork waits for it or
 * is over. The child then uses what those locks guard.
 */
static unsigned hold_at; /* the how many-th of the shim's mmaps; 0: never */
static unsigned interrupt_at; /* the same, for a signal there */
static atomic_bool holding, about_to_fork, forked;
static pid_t forking;

void *mmap(void *addr, size_t length, int prot, int flags, int fd, off_t offset)
{
    Dl_info info;
    if ((hold_at || interrupt_at) && dladdr(__builtin_return_address(0), &info) &&
        strstr(info.dli_fname, "libvramshim")) {
        if (hold_at && --hold_at == 0) {
            holding = true;
            WAIT_UNTIL(about_to_fork);
            WAIT_UNTIL(forked || sleeps(forking));
        }
        if (interrupt_at && --interrupt_at == 0)
            raise(SIGUSR2);
    }
    return (void *)syscall(SYS_mmap, addr, length, prot, flags, fd, offset);
}

static atomic_bool has_filled;
static void *fill_the_records(void *unused)
{
    CUdeviceptr p;
    OK(cu.cuCtxSetCurrent(context));
    for (int i = 0; i < 6000; i++)
        OK(cu.cuMemAlloc_v2(&p, 512));
    has_filled = true;
    return unused;
}

LAW_CHILD(forks_beside_a_holder)
{
    pthread_t thread;
    CUdeviceptr p = 0;
    context = law_context();
    forking = (pid_t)syscall(SYS_gettid);
    hold_at = (unsigned)atoi(getenv("LAW25_HOLD_AT"));
    CHECK(pthread_create(&thread, NULL, fill_the_records, NULL) == 0);
    WAIT_UNTIL(holding || has_filled);
    if (!holding)
        _exit(under_shim() ? 12 : 0); /* it asks less often than that */
    about_to_fork = true;
    pid_t pid = fork();
    forked = true;
    if (pid == 0) {
        signal(SIGUSR1, SIG_IGN);
        CHECK_EQ(cu.cuMemFree_v2(0x1000), CUDA_ERROR_NOT_INITIALIZED);
        CHECK_EQ(cu.cuMemAlloc_v2(&p, 4 * MIB), CUDA_ERROR_NOT_INITIALIZED);
        exit(0);
    }
    int status = status_of_one_that_may_hang(pid);
    pthread_join(thread, NULL);
    CHECK_EQ(status, 0);
}

LAW_CASE_SIM_ONCE(forks_beside_a_thread_with_a_lock)
{
    static char text[65536];
    unsigned held = 0;
    for (bool more = true; more; held++) {
        char variable[32];
        snprintf(variable, sizeof(variable), "LAW25_HOLD_AT=%u", held + 1);
        int status = law_run_child("forks_beside_a_holder", ENV(variable), text, sizeof(text));
        more = under_shim() && WIFEXITED(status) && WEXITSTATUS(status) != 12;
        CHECK(WIFEXITED(status) && (WEXITSTATUS(status) == 0 || !more));
        CHECK(count_of(text, "LEAK SUMMARY") == under_shim());
    }
    CHECK(!under_shim() || held > 3);
}

/* Forks while a thread of the program is inside the driver, or the shim's own, in the middle of a flush. */
static void hold_inside(const char *entry, void *unused)
{
    (void)entry;
    (void)unused;
    if (atomic_exchange(&holding, true))
        return;
    WAIT_UNTIL(forked);
}

static void *allocate_once(void *unused)
{
    CUdeviceptr p;
    OK(cu.cuCtxSetCurrent(context));
    OK(cu.cuMemAlloc_v2(&p, MIB));
    return unused;
}

static void fork_and_look(void)
{
    pid_t pid = fork();
    if (pid == 0) {
        CUdeviceptr p = 0;
        signal(SIGUSR1, count);
        raise(SIGUSR1);
        CHECK_EQ(calls, 1);
        CHECK_EQ(cu.cuMemAlloc_v2(&p, 4 * MIB), CUDA_ERROR_NOT_INITIALIZED);
        CHECK_EQ(cu.cuMemFree_v2(0x1000), CUDA_ERROR_NOT_INITIALIZED);
        exit(0);
    }
    forked = true;
    CHECK_EQ(status_of_one_that_may_hang(pid), 0);
}

LAW_CHILD(forks_inside_an_allocation)
{
    pthread_t thread;
    context = law_context();
    signal(SIGUSR1, count);
    allocate(MIB);
    CHECK(SIM(sim_on_call)("cuMemAlloc_v2", hold_inside, NULL) == 0);
    CHECK(pthread_create(&thread, NULL, allocate_once, NULL) == 0);
    WAIT_UNTIL(holding);
    fork_and_look();
    pthread_join(thread, NULL);
    calls = 0;
    expect_signal_works();
}

LAW_CHILD(forks_inside_a_flush)
{
    CUdeviceptr p[8];
    law_context();
    signal(SIGUSR1, count);
    for (int i = 0; i < 8; i++)
        p[i] = allocate(2 * MIB);
    for (int i = 0; i < 8; i++)
        OK(cu.cuMemFree_v2(p[i]));
    if (under_shim()) {
        CHECK(SIM(sim_on_call)("cuMemFree_v2", hold_inside, NULL) == 0);
        raise(SIGUSR1);
        calls = 0;
        WAIT_UNTIL(holding);
    }
    fork_and_look();
    for (int i = 0; i < 8; i++)
        WAIT_UNTIL(!under_shim() || !SIM(sim_is_allocated)(p[i])); /* the flush went on */
    calls = 0;
    expect_signal_works();
    allocate(MIB);
}

/* And while a graph is being captured, with a flush that waits for its end. */
LAW_CHILD(forks_inside_a_capture)
{
    CUstream stream;
    CUgraph graph = NULL;
    law_context();
    signal(SIGUSR1, count);
    CUdeviceptr kept = cached_block(2 * MIB);
    OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cu.cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    raise(SIGUSR1);
    calls = 0;
    fork_and_look();
    CHECK(!under_shim() || SIM(sim_is_allocated)(kept));
    OK(cu.cuStreamEndCapture(stream, &graph));
    CHECK(graph);
    OK(cu.cuGraphDestroy(graph));
    WAIT_UNTIL(!SIM(sim_is_allocated)(kept));
    calls = 0;
    expect_signal_works();
    allocate(MIB);
}

LAW_CASE_SIM_ONCE(forks_while_a_thread_is_inside_the_driver) { expect_one_report("forks_inside_an_allocation", 2); }
LAW_CASE_SIM_ONCE(forks_while_memory_is_given_back) { expect_one_report("forks_inside_a_flush", 1); }
LAW_CASE_SIM_ONCE(forks_while_a_graph_is_captured) { expect_one_report("forks_inside_a_capture", 1); }

/* A signal handler forks, at the worst moments: inside the shim, which holds its locks. The child leaves, or becomes another
 * program. */
static unsigned forks_made;
static void fork_here(int sig)
{
    int saved = errno, status = -1;
    (void)sig;
    pid_t pid = fork();
    if (pid == 0) {
        if (forks_made % 2)
            execlp("true", "true", (char *)NULL);
        _exit(0);
    }
    status = status_of_one_that_may_hang(pid);
    if (status != 0)
        _exit(9);
    forks_made++;
    errno = saved;
}

LAW_CHILD(forks_in_a_handler)
{
    CUdeviceptr p;
    law_context();
    allocate(MIB);
    signal(SIGUSR2, fork_here);
    for (unsigned i = 1; i < 6; i++) {
        interrupt_at = i;
        for (int n = 0; n < 3000 && interrupt_at; n++)
            OK(cu.cuMemAlloc_v2(&p, 512));
        CHECK(interrupt_at == 0 || i > 2 || !under_shim());
    }
    CHECK(forks_made > 0 || !under_shim());
    signal(SIGUSR1, count);
    expect_signal_works();
}

LAW_CASE_SIM_ONCE(forked_by_a_signal_handler)
{
    char text[65536];
    CHECK_EQ(law_run_child("forks_in_a_handler", NULL, text, sizeof(text)), 0);
    CHECK_EQ(count_of(text, "LEAK SUMMARY"), under_shim());
}

/* The program becomes another one while its threads allocate and free: natively as under the shim, no report is left. */
LAW_CHILD(execs_beside_working_threads)
{
    pthread_t thread;
    context = law_context();
    allocate(MIB);
    for (int i = 0; i < 3; i++)
        CHECK(pthread_create(&thread, NULL, busy, NULL) == 0);
    nap();
    if (under_shim())
        raise(SIGUSR1);
    execlp("sh", "sh", "-c", "exit 7", (char *)NULL);
}

LAW_CASE_SIM_ONCE(becomes_another_beside_working_threads)
{
    char text[8192];
    for (int i = 0; i < 5; i++) {
        int status = law_run_child("execs_beside_working_threads", NULL, text, sizeof(text));
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
        CHECK_EQ(count_of(text, "LEAK SUMMARY"), 0);
    }
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

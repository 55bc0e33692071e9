/*
 * Law 27: the report is written from memory alone, once, whichever way the program leaves, and after everything that
 * the program still frees on its way out: exit handlers, destructors of its own and of its libraries. memray 634,
 * gperftools 1475.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>

#include "law.h"
#include "sim.h"
#include "world.h"

void late_keep(CUresult (*release)(CUdeviceptr), CUdeviceptr p);

enum { MIB = 1 << 20, WAYS = 5 };

static char text[65536];

static CUdeviceptr allocate(size_t bytes)
{
    CUdeviceptr p;
    OK(cu.cuMemAlloc_v2(&p, bytes));
    return p;
}

static void must_free(CUdeviceptr p)
{
    CUresult r = cu.cuMemFree_v2(p);
    if (r != CUDA_SUCCESS && r != CUDA_ERROR_DEINITIALIZED)
        fprintf(stderr, "a late free: %d\n", r);
}

static void leave(int way)
{
    switch (way) {
    case 0:
        exit(way + 10);
    case 1:
        _exit(way + 10);
    case 2:
        _Exit(way + 10);
    case 3:
        quick_exit(way + 10);
    default:
        return; /* from main, with 0 */
    }
}

static int way_from_environment(void)
{
    const char *s = getenv("LAW27_WAY");
    return s ? atoi(s) : 4;
}

/* Runs the case once for each way out and expects the exit status, and one report with this in it. */
static void by_every_way(const char *name, const char *expected, unsigned ways)
{
    for (int way = 0; way < WAYS; way++) {
        char variable[32];
        if (!(ways >> way & 1))
            continue;
        snprintf(variable, sizeof(variable), "LAW27_WAY=%d", way);
        int status = law_run_child(name, ENV(variable), text, sizeof(text));
        CHECK(WIFEXITED(status));
        CHECK_EQ(WEXITSTATUS(status), way == 4 ? 0 : way + 10);
        CHECK(!strstr(text, "late free"));
        if (!under_shim())
            continue;
        CHECK_EQ(count_of(text, "LEAK SUMMARY"), 1);
        if (!strstr(text, expected))
            law_fail(__FILE__, __LINE__, "by way %d, not \"%s\": %s", way, expected, text);
    }
}

enum { EVERY_WAY = 31, WITH_DESTRUCTORS = 1 | 16, QUICKLY = 8 };

LAW_CHILD(leaks)
{
    law_context();
    allocate(3 * MIB);
    cached_block(5 * MIB);
    leave(way_from_environment());
}

LAW_CASE_SIM(reported_by_every_way) { by_every_way("leaks", "3.0 MiB in 1 block never freed", EVERY_WAY); }

static void *leave_on_a_thread(void *unused)
{
    leave(way_from_environment());
    return unused;
}

LAW_CHILD(leaks_and_leaves_on_a_thread)
{
    pthread_t thread;
    law_context();
    allocate(3 * MIB);
    CHECK(pthread_create(&thread, NULL, leave_on_a_thread, NULL) == 0);
    pthread_join(thread, NULL);
    CHECK(!"reached");
}

LAW_CASE_SIM_ONCE(reported_from_another_thread)
{
    by_every_way("leaks_and_leaves_on_a_thread", "3.0 MiB in 1 block never freed", 15);
}

/* Freed by an exit handler, registered before CUDA is up and after. */
static CUdeviceptr for_handlers[3];
static void free_first(void) { must_free(for_handlers[0]); }
static void free_second(void) { must_free(for_handlers[1]); }

LAW_CHILD(frees_in_exit_handlers)
{
    atexit(free_first);
    law_context();
    for_handlers[0] = allocate(MIB);
    for_handlers[1] = allocate(MIB);
    cached_block(4 * MIB);
    atexit(free_second);
    leave(way_from_environment());
}

LAW_CASE_SIM(freed_in_exit_handlers) { by_every_way("frees_in_exit_handlers", "nothing leaked", WITH_DESTRUCTORS); }

/* Freed by handlers of quick_exit. */
static void __attribute__((constructor)) register_early(void)
{
    if (getenv("LAW27_WAY"))
        at_quick_exit(free_first);
}

LAW_CHILD(frees_in_quick_exit_handlers)
{
    law_context();
    for_handlers[0] = allocate(MIB);
    for_handlers[1] = allocate(MIB);
    at_quick_exit(free_second);
    leave(way_from_environment());
}

LAW_CASE_SIM_ONCE(freed_in_quick_exit_handlers)
{
    by_every_way("frees_in_quick_exit_handlers", "nothing leaked", QUICKLY);
}

/* Freed by a static destructor of the program. */
static void __attribute__((destructor)) static_destructor(void)
{
    if (for_handlers[2])
        must_free(for_handlers[2]);
}

LAW_CHILD(frees_in_a_static_destructor)
{
    law_context();
    for_handlers[2] = allocate(MIB);
    cached_block(4 * MIB);
    leave(way_from_environment());
}

LAW_CASE_SIM(freed_in_a_static_destructor)
{
    by_every_way("frees_in_a_static_destructor", "nothing leaked", WITH_DESTRUCTORS);
}

/* Freed by the destructor of a library: one that the program is linked to, and one that it loaded. */
LAW_CHILD(frees_in_library_destructors)
{
    char path[4096];
    ssize_t n = readlink("/proc/self/exe", path, sizeof(path) - 64);
    CHECK(n > 0);
    path[n] = 0;
    strcpy(strrchr(path, '/'), "/liblaw27loaded.so");
    void *loaded = dlopen(path, RTLD_NOW);
    CHECK(loaded);
    __typeof__(&late_keep) keep = (__typeof__(keep))dlsym(loaded, "late_keep");
    CHECK(keep && keep != late_keep);
    law_context();
    late_keep(cu.cuMemFree_v2, allocate(MIB));
    keep(cu.cuMemFree_v2, allocate(2 * MIB));
    cached_block(4 * MIB);
    leave(way_from_environment());
}

LAW_CASE_SIM(freed_in_library_destructors)
{
    by_every_way("frees_in_library_destructors", "nothing leaked", WITH_DESTRUCTORS);
}

/* The libraries' handlers of quick_exit, registered when they were loaded: one before us, one long after. */
LAW_CASE_SIM_ONCE(freed_in_quick_exit_handlers_of_libraries)
{
    by_every_way("frees_in_library_destructors", "nothing leaked", QUICKLY);
}

/* From main's end on, the driver sees what the program still calls and nothing else. */
LAW_CHILD(counts_to_the_end)
{
    law_context();
    allocate(3 * MIB);
    cached_block(4 * MIB);
    cached_block(5 * MIB);
    fprintf(stderr, "calls so far: %lu\n", SIM(sim_calls_total)());
}

LAW_CASE_SIM_ONCE(no_driver_call_on_the_way_out)
{
    char path[] = "/tmp/law27.XXXXXX", variable[64], report[16384];
    int fd = mkstemp(path);
    CHECK(fd >= 0);
    close(fd);
    snprintf(variable, sizeof(variable), "SIMCUDA_REPORT=%s", path);
    CHECK_EQ(law_run_child("counts_to_the_end", ENV(variable), text, sizeof(text)), 0);
    CHECK(slurp(path, report, sizeof(report)) > 0);
    unlink(path);
    unsigned long total = 0, frees = 0;
    for (char *line = strtok(report, "\n"); line; line = strtok(NULL, "\n")) {
        char name[80];
        unsigned long n;
        if (sscanf(line, "calls %79s %lu", name, &n) != 2 || strncmp(name, "cuGetProcAddress", 16) == 0)
            continue;
        total += n;
        frees += strcmp(name, "cuMemFree_v2") == 0 ? n : 0;
    }
    const char *so_far = strstr(text, "calls so far: ");
    CHECK(so_far);
    CHECK_EQ(total, strtoul(so_far + 14, NULL, 10));
    CHECK_EQ(frees, under_shim() ? 0 : 2); /* what is cached goes with the process */
}

/* Left in the middle of everything: a handler that interrupts an allocation, on the very thread that may hold a lock.
 */
static void leave_now(int sig)
{
    (void)sig;
    _exit(11);
}

LAW_CHILD(is_interrupted)
{
    struct itimerval soon = {.it_value = {0, 2000 + rand() % 1000}};
    law_context();
    alarm(20);
    cached_block(4 * MIB);
    signal(SIGVTALRM, leave_now);
    setitimer(ITIMER_VIRTUAL, &soon, NULL);
    for (;;)
        for (size_t i = 1; i < 64; i++)
            cached_block(i * 512);
}

LAW_CASE_SIM_ONCE(left_from_a_signal_handler)
{
    for (int i = 0; i < 10; i++) {
        int status = law_run_child("is_interrupted", NULL, text, sizeof(text));
        CHECK(WIFEXITED(status));
        CHECK_EQ(WEXITSTATUS(status), 11);
        if (under_shim())
            CHECK_EQ(count_of(text, "LEAK SUMMARY"), 1);
    }
}

static bool called_by_the_shim(const void *caller)
{
    Dl_info info;
    return dladdr(caller, &info) && strstr(info.dli_fname, "libvramshim");
}

/* The same at the worst moments, one after the other: whenever the shim asks for memory for its records, some of them
 * with its locks held. This program has its own mmap, as programs may; a signal handler there would do the same. */
static unsigned leave_at; /* the how many-th of its mmaps; 0: never */

void *mmap(void *addr, size_t length, int prot, int flags, int fd, off_t offset)
{
    if (leave_at && called_by_the_shim(__builtin_return_address(0)) && --leave_at == 0)
        _exit(11);
    return (void *)syscall(SYS_mmap, addr, length, prot, flags, fd, offset);
}

LAW_CHILD(leaves_at_the_worst_moment)
{
    alarm(20);
    law_context();
    leave_at = (unsigned)atoi(getenv("LAW27_LEAVE_AT"));
    for (int i = 0; i < 20000; i++)
        allocate(512);
    _exit(leave_at && under_shim() ? 12 : 11); /* it asks less often than that */
}

LAW_CASE_SIM_ONCE(left_at_the_worst_moment)
{
    bool inside = true;
    for (int i = 1; inside && i < 100; i++) {
        char variable[32];
        snprintf(variable, sizeof(variable), "LAW27_LEAVE_AT=%d", i);
        int status = law_run_child("leaves_at_the_worst_moment", ENV(variable), text, sizeof(text));
        CHECK(WIFEXITED(status));
        inside = under_shim() && WEXITSTATUS(status) == 11;
        CHECK(inside || i > 5 || !under_shim());
        if (under_shim() && i > 1) /* at the first, nothing is allocated yet */
            CHECK_EQ(count_of(text, "LEAK SUMMARY"), 1);
    }
}

/* Left while other threads allocate and free: nobody crashes, nobody waits for ever. */
static CUcontext context;
static void *pairs(void *unused)
{
    (void)unused;
    cu.cuCtxSetCurrent(context);
    for (;;) {
        CUdeviceptr p;
        if (cu.cuMemAlloc_v2(&p, 4 * MIB) == CUDA_SUCCESS)
            cu.cuMemFree_v2(p);
    }
    return NULL;
}

LAW_CHILD(threads_go_on)
{
    pthread_t thread;
    alarm(20);
    context = law_context();
    cached_block(4 * MIB);
    for (int i = 0; i < 3; i++)
        CHECK(pthread_create(&thread, NULL, pairs, NULL) == 0);
    for (int i = 0; i < 3; i++)
        nap();
    leave(way_from_environment());
}

LAW_CASE_SIM_ONCE(left_while_threads_go_on)
{
    for (int i = 0; i < 4; i++)
        by_every_way("threads_go_on", "LEAK SUMMARY", EVERY_WAY);
}

/* Left while a flush is under way. */
LAW_CHILD(flushes_and_leaves)
{
    CUdeviceptr p[50];
    law_context();
    for (int i = 0; i < 50; i++)
        p[i] = allocate(2 * MIB);
    for (int i = 0; i < 50; i++)
        OK(cu.cuMemFree_v2(p[i]));
    if (under_shim())
        raise(SIGUSR1);
    leave(way_from_environment());
}

LAW_CASE_SIM_ONCE(left_while_memory_is_given_back)
{
    for (int i = 0; i < 4; i++)
        by_every_way("flushes_and_leaves", "nothing leaked", EVERY_WAY);
}

/* Several threads leave at once. This program has a poll of its own, as programs may: the one that writes the report is
 * held there for a while, for ever, or leaves once more, as a signal handler would. Nobody waits for itself. */
static const char *hold;
static atomic_bool writing;

int poll(struct pollfd *fds, nfds_t count, int timeout)
{
    const struct timespec t = {timeout / 1000, timeout % 1000 * 1000000L};
    if (hold && called_by_the_shim(__builtin_return_address(0)) && !atomic_exchange(&writing, true)) {
        if (*hold == 'i')
            _exit(10);
        for (int i = 0; *hold == 'e' || i < 100; i++)
            nap();
    }
    return ppoll(fds, count, timeout < 0 ? NULL : &t, NULL);
}

int nanosleep(const struct timespec *time, struct timespec *rest)
{
    if (hold && *hold == 'i' && called_by_the_shim(__builtin_return_address(0)))
        syscall(SYS_exit_group, 99);
    int error = clock_nanosleep(CLOCK_REALTIME, 0, time, rest);
    errno = error ? error : errno;
    return error ? -1 : 0;
}

static void *leave_while_it_is_written(void *unused)
{
    WAIT_UNTIL(writing && *hold != 'i');
    leave(atoi(getenv("LAW27_SECOND_WAY")));
    return unused;
}

LAW_CHILD(leaves_twice)
{
    pthread_t thread;
    alarm(20);
    law_context();
    allocate(3 * MIB);
    hold = getenv("LAW27_HOLD");
    CHECK(pthread_create(&thread, NULL, leave_while_it_is_written, NULL) == 0);
    leave(way_from_environment());
}

static void twice(const char *how, int way, int second)
{
    char variables[3][32];
    snprintf(variables[0], sizeof(variables[0]), "LAW27_HOLD=%s", how);
    snprintf(variables[1], sizeof(variables[1]), "LAW27_WAY=%d", way);
    snprintf(variables[2], sizeof(variables[2]), "LAW27_SECOND_WAY=%d", second);
    int status = law_run_child("leaves_twice", ENV(variables[0], variables[1], variables[2]), text, sizeof(text));
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == way + 10 || WEXITSTATUS(status) == second + 10);
}

LAW_CASE_SIM_ONCE(left_while_the_report_is_written)
{
    for (int way = 0; way < 4; way++) {
        for (int second = 0; second < 4; second++) {
            twice("a while", way, second);
            if (!under_shim())
                continue;
            CHECK_EQ(count_of(text, "LEAK SUMMARY"), 1);
            if (!strstr(text, "3.0 MiB in 1 block never freed") || !strstr(text, "driver calls saved"))
                law_fail(__FILE__, __LINE__, "cut, where way %d meets %d: %s", way, second, text);
        }
    }
}

LAW_CASE_SIM_ONCE(left_while_the_report_is_never_written)
{
    for (int way = 0; way < 4; way++)
        twice("ever", way, way);
}

LAW_CASE_SIM_ONCE(left_from_within_the_report)
{
    for (int way = 0; way < 4; way++)
        twice("itself", way, 0);
}

/* Killed, from inside and from outside, idle and in the middle of everything: natively so, and nothing is written. */
static int way_to_be_killed(void) { return atoi(getenv("LAW27_SIGNAL")); }

LAW_CHILD(is_killed)
{
    pthread_t thread;
    signal(way_to_be_killed(), SIG_DFL); /* nohup, for one, leaves SIGHUP ignored to all that it starts */
    context = law_context();
    allocate(MIB);
    cached_block(4 * MIB);
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&thread, NULL, pairs, NULL) == 0);
    nap();
    kill(getpid(), way_to_be_killed());
    for (;;)
        pause();
}

LAW_CASE_SIM_ONCE(killed)
{
    static const int signals[] = {SIGTERM, SIGINT, SIGHUP, SIGKILL, SIGALRM, SIGUSR2};
    for (size_t i = 0; i < sizeof(signals) / sizeof(*signals); i++) {
        char variable[32];
        snprintf(variable, sizeof(variable), "LAW27_SIGNAL=%d", signals[i]);
        int status = law_run_child("is_killed", ENV(variable), text, sizeof(text));
        CHECK(WIFSIGNALED(status));
        CHECK_EQ(WTERMSIG(status), signals[i]);
        CHECK_EQ(strlen(text), 0);
    }
}

/* A handler that ends the program, as servers have: its status, and a report. */
static void end_the_program(int sig) { exit(sig); }
static void end_the_program_now(int sig) { _exit(sig); }

LAW_CHILD(handles_its_end)
{
    law_context();
    allocate(3 * MIB);
    cached_block(4 * MIB);
    signal(SIGTERM, way_to_be_killed() == SIGTERM ? end_the_program : end_the_program_now);
    raise(SIGTERM);
}

LAW_CASE_SIM_ONCE(ended_by_its_own_handler)
{
    for (int now = 0; now < 2; now++) {
        char variable[32];
        snprintf(variable, sizeof(variable), "LAW27_SIGNAL=%d", now ? SIGINT : SIGTERM);
        int status = law_run_child("handles_its_end", ENV(variable), text, sizeof(text));
        CHECK(WIFEXITED(status));
        CHECK_EQ(WEXITSTATUS(status), SIGTERM);
        if (under_shim())
            CHECK_EQ(count_of(text, "3.0 MiB in 1 block never freed"), 1);
    }
}

/* Left while another thread is for certain inside the driver, and stays there: an allocation, and a flush of ours. */
static atomic_bool inside;
static void stay(const char *entry, void *unused)
{
    (void)entry;
    (void)unused;
    if (atomic_exchange(&inside, true))
        return;
    for (;;)
        pause();
}

static void *allocate_for_ever(void *unused)
{
    OK(cu.cuCtxSetCurrent(context));
    allocate(9 * MIB);
    return unused;
}

LAW_CHILD(leaves_beside_an_allocation)
{
    pthread_t thread;
    context = law_context();
    allocate(3 * MIB);
    CHECK(SIM(sim_on_call)("cuMemAlloc_v2", stay, NULL) == 0);
    CHECK(pthread_create(&thread, NULL, allocate_for_ever, NULL) == 0);
    WAIT_UNTIL(inside);
    leave(way_from_environment());
}

LAW_CHILD(leaves_beside_a_flush)
{
    law_context();
    allocate(3 * MIB);
    cached_block(4 * MIB);
    if (under_shim()) {
        CHECK(SIM(sim_on_call)("cuMemFree_v2", stay, NULL) == 0);
        raise(SIGUSR1);
        WAIT_UNTIL(inside);
    }
    leave(way_from_environment());
}

LAW_CASE_SIM_ONCE(left_beside_a_call_that_never_returns)
{
    by_every_way("leaves_beside_an_allocation", "3.0 MiB in 1 block never freed", EVERY_WAY);
    by_every_way("leaves_beside_a_flush", "3.0 MiB in 1 block never freed", EVERY_WAY);
}

/* The main thread ends, the others go on, and one of them ends the program. */
static void *leave_when_alone(void *main_thread)
{
    pthread_join(*(pthread_t *)main_thread, NULL);
    OK(cu.cuCtxSetCurrent(context));
    cached_block(4 * MIB);
    leave(way_from_environment());
    return NULL;
}

LAW_CHILD(main_ends_first)
{
    static pthread_t self, thread;
    self = pthread_self();
    context = law_context();
    allocate(3 * MIB);
    CHECK(pthread_create(&thread, NULL, leave_when_alone, &self) == 0);
    pthread_exit(NULL);
}

LAW_CASE_SIM_ONCE(left_after_the_main_thread)
{
    by_every_way("main_ends_first", "3.0 MiB in 1 block never freed", EVERY_WAY & ~16);
}

/* The main thread ends, and nobody ends the program: it ends with its last thread, which is not ours. */
static void *be_the_last(void *main_thread)
{
    pthread_join(*(pthread_t *)main_thread, NULL);
    OK(cu.cuCtxSetCurrent(context));
    cached_block(4 * MIB);
    nap();
    return NULL;
}

/* Of what is left of a process then, every thread may have every signal masked: but for one. */
static void die_in_seconds(int seconds)
{
    timer_t timer;
    struct sigevent end = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGKILL};
    CHECK(timer_create(CLOCK_MONOTONIC, &end, &timer) == 0);
    CHECK(timer_settime(timer, 0, &(struct itimerspec){.it_value = {seconds, 0}}, NULL) == 0);
}

static void say_the_end(void) { fputs("its exit functions ran\n", stderr); }

LAW_CHILD(ends_with_its_last_thread)
{
    static pthread_t self, thread;
    self = pthread_self();
    die_in_seconds(10);
    atexit(say_the_end);
    context = law_context();
    allocate(3 * MIB);
    CHECK(pthread_create(&thread, NULL, be_the_last, &self) == 0);
    pthread_detach(thread);
    pthread_exit(NULL);
}

LAW_CASE_SIM_ONCE(left_by_its_last_thread)
{
    int status = law_run_child("ends_with_its_last_thread", NULL, text, sizeof(text));
    CHECK(WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), 0);
    CHECK_EQ(count_of(text, "its exit functions ran"), 1);
    if (under_shim())
        CHECK(strstr(text, "3.0 MiB in 1 block never freed"));
}

/* A forked child of such a program has a main thread of its own: whichever forked it. */
static void *fork_on_a_thread(void *unused)
{
    pid_t pid = fork();
    if (pid == 0)
        case_ends_with_its_last_thread();
    int status = -1;
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    CHECK(WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), 0);
    return unused;
}

LAW_CHILD(forks_and_ends_with_its_last_thread)
{
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, fork_on_a_thread, NULL) == 0);
    pthread_join(thread, NULL);
    exit(0);
}

LAW_CASE_SIM_ONCE(a_child_left_by_its_last_thread)
{
    int status = law_run_child("forks_and_ends_with_its_last_thread", NULL, text, sizeof(text));
    CHECK(WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), 0);
    CHECK_EQ(count_of(text, "its exit functions ran"), 1);
}

/* The program lets go of the driver before it ends, as often as it likes. */
LAW_CHILD(closes_the_driver)
{
    void *handles[3];
    for (int i = 0; i < 3; i++)
        CHECK((handles[i] = dlopen("libcuda.so.1", RTLD_NOW)) != NULL);
    law_context();
    allocate(3 * MIB);
    cached_block(4 * MIB);
    for (int i = 0; i < 3; i++)
        CHECK(dlclose(handles[i]) == 0);
    cached_block(4 * MIB);
    if (under_shim())
        raise(SIGUSR1);
    leave(way_from_environment());
}

LAW_CASE_SIM(left_after_closing_the_driver)
{
    by_every_way("closes_the_driver", "3.0 MiB in 1 block never freed", EVERY_WAY);
}

/* A program that is not linked to the driver: it loads it, uses it, and lets go of it for good. */
static const char loads_and_closes[] =
    "import _ctypes, ctypes, sys\n"
    "cuda = ctypes.CDLL('libcuda.so.1')\n"
    "assert cuda.cuInit(0) == 0\n"
    "ctx, p = ctypes.c_void_p(), ctypes.c_uint64()\n"
    "assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctx), 0) == 0\n"
    "assert cuda.cuCtxSetCurrent(ctx) == 0\n"
    "for i in range(2):\n"
    "    assert cuda.cuMemAlloc_v2(ctypes.byref(p), ctypes.c_size_t(3 << 20)) == 0\n"
    "    assert i or cuda.cuMemFree_v2(p) == 0\n"
    "_ctypes.dlclose(cuda._handle)\n"
    "again = ctypes.CDLL('libcuda.so.1')\n"
    "assert again.cuCtxSynchronize() == 0\n"
    "_ctypes.dlclose(again._handle)\n"
    "sys.exit(6)\n";

LAW_CASE_SIM_ONCE(loaded_and_closed_by_python)
{
    if (shell("command -v python3", text, sizeof(text)) != 0)
        law_skip("no python3");
    setenv("LAW27_PYTHON", loads_and_closes, 1);
    CHECK_EQ(shell("exec python3 -c \"$LAW27_PYTHON\" 2>&1", text, sizeof(text)), 6);
    CHECK_EQ(count_of(text, "3.0 MiB in 1 block never freed"), under_shim());
}

/* Standard error is closed, as daemons do, and its number becomes a data file: nothing of ours is in it. */
LAW_CHILD(reuses_descriptor_2)
{
    law_context();
    allocate(3 * MIB);
    close(STDERR_FILENO);
    CHECK_EQ(open(getenv("LAW27_DATA"), O_RDWR | O_CREAT | O_TRUNC, 0600), STDERR_FILENO);
    CHECK(write(STDERR_FILENO, "data", 4) == 4);
    cached_block(4 * MIB);
    if (under_shim())
        raise(SIGUSR1);
    leave(way_from_environment());
}

LAW_CASE_SIM_ONCE(nothing_in_a_data_file)
{
    char path[] = "/tmp/law27.XXXXXX", data[80], variable[32], content[64];
    int fd = mkstemp(path);
    CHECK(fd >= 0);
    close(fd);
    snprintf(data, sizeof(data), "LAW27_DATA=%s", path);
    for (int way = 0; way < WAYS; way++) {
        snprintf(variable, sizeof(variable), "LAW27_WAY=%d", way);
        int status = law_run_child("reuses_descriptor_2", ENV(data, variable), text, sizeof(text));
        CHECK(WIFEXITED(status));
        CHECK_EQ(WEXITSTATUS(status), way == 4 ? 0 : way + 10);
        CHECK_EQ(slurp(path, content, sizeof(content)), 4);
    }
    unlink(path);
}

/* Nobody reads what we say any more: the exit status is the program's. */
LAW_CASE_SIM_ONCE(piped_into_head)
{
    for (int way = 0; way < 4; way++) {
        char command[512];
        snprintf(command, sizeof(command),
                 "bash -c 'LAW27_WAY=%d /proc/%d/exe --case leaks --route dlsym 2>&1 | head -n 1 >/dev/null; "
                 "exit ${PIPESTATUS[0]}'",
                 way, (int)getpid());
        CHECK_EQ(shell(command, text, sizeof(text)), way + 10);
    }
}

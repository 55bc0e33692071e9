/*
 * Law 32: what the shim says cannot hurt. Broken and full pipes, closed descriptors that became data files, limits;
 * errno and dlerror() as before.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "law.h"
#include "sim.h"
#include "world.h"

enum { MIB = 1 << 20 };

static char text[65536];

/* Cause for words now and at exit: a flush, a double free, a leak. */
static void give_cause(void)
{
    CUdeviceptr p;
    law_context();
    p = cached_block(4 * MIB);
    CHECK_EQ(cu.cuMemFree_v2(p), CUDA_ERROR_INVALID_VALUE);
    unsigned long before = driver_calls("cuMemFree_v2");
    if (under_shim()) {
        raise(SIGUSR1);
        WAIT_UNTIL(driver_calls("cuMemFree_v2") > before);
    }
    for (int i = 0; i < 30; i++)
        nap(); /* for the line about the flush */
    OK(cu.cuMemAlloc_v2(&p, MIB));
}

/* Starts the case with this as its standard error, and optionally standard output. */
static pid_t start(const char *name, int out, int err)
{
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        if (out >= 0)
            dup2(out, STDOUT_FILENO);
        if (err >= 0)
            dup2(err, STDERR_FILENO);
        else
            close(STDERR_FILENO);
        execl("/proc/self/exe", "law", "--case", name, "--route", "dlsym", (char *)NULL);
        _exit(126);
    }
    CHECK(pid > 0);
    return pid;
}

static int status_of(pid_t pid)
{
    int status = -1;
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    return status;
}

/* The reader has gone, as `| head -1` does: the program does not notice. SIGPIPE is at its default. */
LAW_CHILD(talks_into_a_broken_pipe)
{
    signal(SIGPIPE, SIG_DFL);
    struct pollfd p = {STDERR_FILENO, 0, 0};
    WAIT_UNTIL(poll(&p, 1, 0) == 1 && p.revents & POLLERR);
    give_cause();
    exit(5);
}

static volatile sig_atomic_t pipe_signals;
static void count(int sig) { pipe_signals += sig == SIGPIPE; }

LAW_CHILD(handles_sigpipe)
{
    signal(SIGPIPE, count);
    struct pollfd p = {STDERR_FILENO, 0, 0};
    WAIT_UNTIL(poll(&p, 1, 0) == 1 && p.revents & POLLERR);
    give_cause();
    _exit(pipe_signals ? 99 : 5);
}

/* One that is pending and blocked is the program's: it stays. */
LAW_CHILD(holds_sigpipe)
{
    sigset_t only, pending;
    sigemptyset(&only);
    sigaddset(&only, SIGPIPE);
    struct pollfd p = {STDERR_FILENO, 0, 0};
    WAIT_UNTIL(poll(&p, 1, 0) == 1 && p.revents & POLLERR);
    CHECK(sigprocmask(SIG_BLOCK, &only, NULL) == 0);
    give_cause();
    CHECK(sigpending(&pending) == 0 && !sigismember(&pending, SIGPIPE));
    raise(SIGPIPE);
    CUdeviceptr q = cached_block(4 * MIB);
    CHECK_EQ(cu.cuMemFree_v2(q), CUDA_ERROR_INVALID_VALUE);
    CHECK(sigpending(&pending) == 0 && sigismember(&pending, SIGPIPE));
    exit(5); /* the report: it must not take it, nor be ended by it */
}

static void into_a_broken_pipe(const char *name)
{
    int fds[2];
    CHECK(pipe2(fds, O_CLOEXEC) == 0);
    pid_t pid = start(name, -1, fds[1]);
    close(fds[1]);
    close(fds[0]);
    int status = status_of(pid);
    CHECK(WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), 5);
}

LAW_CASE_SIM_ONCE(a_broken_pipe) { into_a_broken_pipe("talks_into_a_broken_pipe"); }
LAW_CASE_SIM_ONCE(a_broken_pipe_and_a_handler) { into_a_broken_pipe("handles_sigpipe"); }
LAW_CASE_SIM_ONCE(a_broken_pipe_and_a_pending_signal) { into_a_broken_pipe("holds_sigpipe"); }

LAW_CASE_SIM_ONCE(piped_into_head)
{
    if (!getenv("VRAM_LOOP"))
        law_skip("VRAM_LOOP names no program");
    if (shell("command -v bash", text, sizeof(text)) != 0)
        law_skip("no bash");
    for (int i = 0; i < 5; i++) {
        shell("bash -c '\"$VRAM_LOOP\" --quiet --iterations 200 --blocks 2 --size 64K --forget 2>&1 >/dev/null | head "
              "-1 >/dev/null;"
              "echo ${PIPESTATUS[0]}'",
              text, sizeof(text));
        CHECK(strcmp(text, "0\n") == 0);
    }
}

/* Nobody reads, and the pipe is full: the program ends all the same, and its flags are as they were. */
LAW_CHILD(talks_into_a_full_pipe)
{
    int flags = fcntl(STDERR_FILENO, F_GETFL);
    alarm(30);
    give_cause();
    CHECK_EQ(fcntl(STDERR_FILENO, F_GETFL), flags);
    exit(5);
}

/* The same while a profiler's timer interrupts every wait. */
static void *interrupt(void *main_thread)
{
    for (;;) {
        nap();
        pthread_kill(*(pthread_t *)main_thread, SIGPROF);
    }
    return NULL;
}

LAW_CHILD(talks_into_a_full_pipe_under_a_profiler)
{
    static pthread_t self, thread;
    alarm(20);
    give_cause();
    self = pthread_self();
    signal(SIGPROF, count);
    CHECK(pthread_create(&thread, NULL, interrupt, &self) == 0);
    exit(5);
}

static void into_a_full_pipe(const char *name, bool nonblocking)
{
    int fds[2];
    char page[4096] = {0};
    CHECK(pipe2(fds, O_CLOEXEC) == 0);
    CHECK(fcntl(fds[1], F_SETFL, O_NONBLOCK) == 0);
    while (write(fds[1], page, sizeof(page)) > 0)
        ;
    CHECK_EQ(errno, EAGAIN);
    if (!nonblocking)
        CHECK(fcntl(fds[1], F_SETFL, 0) == 0);
    int status = status_of(start(name, -1, fds[1]));
    CHECK(WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), 5);
}

LAW_CASE_SIM_ONCE(a_full_pipe) { into_a_full_pipe("talks_into_a_full_pipe", false); }
LAW_CASE_SIM_ONCE(a_full_pipe_that_does_not_block) { into_a_full_pipe("talks_into_a_full_pipe", true); }
LAW_CASE_SIM_ONCE(a_full_pipe_and_a_profiler) { into_a_full_pipe("talks_into_a_full_pipe_under_a_profiler", false); }

/* Descriptor 2 becomes a data file: closed by the program (0), or closed from the start (1). What the program puts in its place is
 * another matter: law32_redirected.c. */
LAW_CHILD(data_stays_for_the_parent)
{
    const char *path = getenv("LAW32_DATA");
    const char *how = getenv("LAW32_HOW");
    if (*how == '0')
        close(STDERR_FILENO);
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
    CHECK_EQ(fd, STDERR_FILENO);
    CHECK(write(STDERR_FILENO, "data", 4) == 4);
    give_cause();
}

LAW_CASE_SIM_ONCE(descriptor_2_is_a_data_file)
{
    static const char *const hows[] = {"0", "1"};
    char path[] = "/tmp/law32.XXXXXX", contents[256];
    int null = open("/dev/null", O_WRONLY | O_CLOEXEC), fd = mkstemp(path);
    close(fd);
    setenv("LAW32_DATA", path, 1);
    for (int i = 0; i < 2; i++) {
        setenv("LAW32_HOW", hows[i], 1);
        CHECK_EQ(status_of(start("data_stays_for_the_parent", -1, i == 1 ? -1 : null)), 0);
        CHECK_EQ(slurp(path, contents, sizeof(contents)), 4);
        CHECK(memcmp(contents, "data", 4) == 0);
    }
    unlink(path);
}

/* Standard error is a file, and files may not grow: the kernel's signal for it is not for the program. */
LAW_CHILD(talks_into_a_file_at_its_limit)
{
    struct rlimit limit = {0, 0};
    CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    give_cause();
    exit(5);
}

LAW_CASE_SIM_ONCE(a_file_at_its_limit)
{
    char path[] = "/tmp/law32.XXXXXX";
    int fd = mkstemp(path);
    unlink(path);
    int status = status_of(start("talks_into_a_file_at_its_limit", -1, fd));
    CHECK(WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), 5);
    CHECK_EQ(lseek(fd, 0, SEEK_END), 0);
}

/* Whoever asks is answered, however often. */
LAW_CHILD(is_asked_often)
{
    law_context();
    for (int i = 0; i < 301; i++) { /* what is said of the last may come too late */
        cached_block(4 * MIB);
        unsigned long before = driver_calls("cuMemFree_v2");
        if (under_shim()) {
            raise(SIGUSR1);
            WAIT_UNTIL(driver_calls("cuMemFree_v2") > before);
        }
    }
}

LAW_CASE_SIM_ONCE(every_question_is_answered)
{
    CHECK_EQ(law_run_child("is_asked_often", NULL, text, sizeof(text)), 0);
    if (under_shim()) {
        CHECK(count_of(text, "vramshim: flush (SIGUSR1): gave 1 block") >= 300);
        CHECK(count_of(text, "vramshim: device 0:") >= 300);
        CHECK_EQ(count_of(text, "LEAK SUMMARY"), 1);
    }
}

/* What repeats by itself does not fill a terminal: rescue after rescue, with VERBOSE. What fails is told. */
LAW_CHILD(needs_rescues)
{
    CUdeviceptr p;
    law_context();
    for (int i = 0; i < 200; i++) {
        cached_block(40 * MIB);
        cached_block(50 * MIB);
    }
    OK(cu.cuMemAlloc_v2(&p, 30 * MIB));
    cached_block(20 * MIB);
    CHECK_EQ(cu.cuMemAlloc_v2(&p, 40 * MIB), CUDA_ERROR_OUT_OF_MEMORY);
}

LAW_CASE_SIM_ONCE(what_repeats_is_told_at_times)
{
    CHECK_EQ(law_run_child("needs_rescues", ENV("SIMCUDA_CAPACITY=64M", "VRAMSHIM_VERBOSE=1"), text, sizeof(text)), 0);
    if (under_shim()) {
        unsigned told = count_of(text, "and the allocation succeeded");
        CHECK(told >= 20 && told < 100);
        CHECK(strstr(text, "399 rescued") || strstr(text, "400 rescued"));
    }
}

/* Nor does what the program's own pauses bring about. */
LAW_CHILD(is_idle_often)
{
    law_context();
    for (int i = 0; i < 101; i++) {
        unsigned long before = driver_calls("cuMemFree_v2");
        cached_block(4 * MIB);
        WAIT_UNTIL(driver_calls("cuMemFree_v2") > before);
    }
}

LAW_CASE_SIM_ONCE(pauses_are_told_at_times)
{
    CHECK_EQ(law_run_child("is_idle_often", ENV("VRAMSHIM_IDLE_DRAIN=0.001"), text, sizeof(text)), 0);
    if (under_shim()) {
        unsigned told = count_of(text, "vramshim: flush (idle for ");
        CHECK(told >= 20 && told < 100);
        CHECK(count_of(text, "vramshim: device 0:") <= told);
    }
}

/* A name, a path or a value that others chose makes no line of its own, and sends nothing to a terminal. */
LAW_CASE_SIM_ONCE(foreign_names_are_quoted)
{
    char program[4096], directory[] = "/tmp/law32.XXXXXX", command[9000];
    if (!getenv("VRAM_LOOP"))
        law_skip("VRAM_LOOP names no program");
    CHECK(mkdtemp(directory));
    snprintf(program, sizeof(program), "%s/a\nvramshim: LEAK SUMMARY of nobody\033[2J", directory);
    snprintf(command, sizeof(command),
             "p=$(printf '%s'); cp \"$VRAM_LOOP\" \"$p\"; VRAMSHIM_REPORT=\"/nowhere$p.r\" VRAMSHIM_TRACE=\"/nowhere$p.t\" "
             "VRAMSHIM_VERBOSE=1 VRAMSHIM_FREE=\"$p\" \"$p\" --quiet --iterations 50 --blocks 4 --size 4M --forget 2>&1 "
             ">/dev/null; rm -r %s",
             program, directory);
    shell(command, text, sizeof(text));
    CHECK(!strchr(text, '\033'));
    CHECK_EQ(count_of(text, "\nvramshim: LEAK SUMMARY of nobody"), 0);
    if (under_shim()) {
        CHECK_EQ(count_of(text, "\nvramshim: LEAK SUMMARY of a\\nvramshim: LEAK SUMMARY of nobody\\x1b[2J (pid "), 1);
        CHECK_EQ(count_of(text, "called from a\\nvramshim: LEAK SUMMARY of nobody\\x1b[2J+0x"), 1);
        CHECK_EQ(count_of(text, "cannot write the report to /nowhere/tmp/law32."), 1);
        CHECK_EQ(count_of(text, "cannot write the trace to /nowhere/tmp/law32."), 1);
        CHECK_EQ(count_of(text, "/a\\nvramshim: LEAK SUMMARY of nobody\\x1b[2J.r"), 2); /* as an option, and at exit */
    }
}

/* As long as a path may be: what is said about it is said to its end. */
LAW_CASE_SIM_ONCE(a_long_path_is_no_short_message)
{
    static char variable[4000] = "VRAMSHIM_REPORT=/nowhere/";
    memset(variable + strlen(variable), 'x', sizeof(variable) - strlen(variable) - 1);
    CHECK_EQ(law_run_child("is_asked_once", ENV(variable), text, sizeof(text)), 0);
    if (under_shim()) {
        CHECK_EQ(count_of(text, "; it follows here\nvramshim: LEAK SUMMARY"), 1);
    }
}

LAW_CHILD(is_asked_once)
{
    law_context();
    cached_block(4 * MIB);
}

/* A thread that is to be cancelled goes on to its next cancellation point, of which an allocation is none: it lets go of what it
 * holds. */
static pthread_mutex_t programs_own = PTHREAD_MUTEX_INITIALIZER;
static CUcontext context;
static bool let_go;

static void *allocate_cancelled(void *unused)
{
    CUdeviceptr p;
    OK(cu.cuCtxSetCurrent(context));
    pthread_cancel(pthread_self());
    pthread_mutex_lock(&programs_own);
    OK(cu.cuMemAlloc_v2(&p, 50 * MIB)); /* the first: complaints, and each option */
    OK(cu.cuMemFree_v2(p));
    OK(cu.cuMemAlloc_v2(&p, 60 * MIB)); /* a rescue, which is told */
    CHECK_EQ(cu.cuMemAlloc_v2(&p, 60 * MIB), CUDA_ERROR_OUT_OF_MEMORY);
    pthread_mutex_unlock(&programs_own);
    let_go = true;
    pthread_testcancel();
    return unused;
}

LAW_CHILD(is_cancelled_in_between)
{
    pthread_t thread;
    void *result;
    context = law_context();
    CHECK(pthread_create(&thread, NULL, allocate_cancelled, NULL) == 0);
    CHECK(pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED);
    CHECK(let_go);
    CHECK_EQ(pthread_mutex_trylock(&programs_own), 0);
}

LAW_CASE_SIM_ONCE(no_call_becomes_a_cancellation_point)
{
    CHECK_EQ(law_run_child("is_cancelled_in_between", ENV("SIMCUDA_CAPACITY=64M", "VRAMSHIM_VERBOSE=1", "VRAMSHIM_WASTE=lots"), text,
                           sizeof(text)),
             0);
    if (under_shim()) {
        CHECK_EQ(count_of(text, "vramshim: VRAMSHIM_FREE=sync"), 1);
        CHECK_EQ(count_of(text, "and the allocation succeeded"), 1);
    }
}

/* errno, through every hook that does work: a first allocation with all its complaints, hits, misses, refusals, ends.
 */
#define KEEPS_ERRNO(call, expected)                                                                                    \
    do {                                                                                                               \
        errno = 77;                                                                                                    \
        CHECK_EQ(call, expected);                                                                                      \
        CHECK_EQ(errno, 77);                                                                                           \
    } while (0)

LAW_CHILD(looks_at_errno)
{
    CUdeviceptr p, q, base;
    CUcontext other;
    CUstream stream;
    CUgraph graph;
    CUipcMemHandle handle;
    size_t size, pitch;
    law_context();
    KEEPS_ERRNO(cu.cuMemAlloc_v2(&p, 4 * MIB), CUDA_SUCCESS);
    KEEPS_ERRNO(cu.cuMemFree_v2(p), CUDA_SUCCESS);
    KEEPS_ERRNO(cu.cuMemFree_v2(p), CUDA_ERROR_INVALID_VALUE);
    KEEPS_ERRNO(cu.cuMemAlloc_v2(&q, 4 * MIB), CUDA_SUCCESS);
    KEEPS_ERRNO(cu.cuMemAllocPitch_v2(&p, &pitch, 1000, 100, 4), CUDA_SUCCESS);
    KEEPS_ERRNO(cu.cuMemGetInfo_v2(&size, &size), CUDA_SUCCESS);
    KEEPS_ERRNO(cu.cuMemGetAddressRange_v2(&base, &size, q), CUDA_SUCCESS);
    KEEPS_ERRNO(cu.cuIpcGetMemHandle(&handle, q), CUDA_SUCCESS);
    KEEPS_ERRNO(cu.cuMemFree_v2(q), CUDA_SUCCESS);
    KEEPS_ERRNO(cu.cuMemFree_v2(p), CUDA_SUCCESS);
    KEEPS_ERRNO(cu.cuMemAlloc_v2(&p, 50 * MIB), CUDA_SUCCESS);
    KEEPS_ERRNO(cu.cuMemFree_v2(p), CUDA_SUCCESS);
    KEEPS_ERRNO(cu.cuMemAlloc_v2(&p, 60 * MIB), CUDA_SUCCESS); /* a rescue, which is told */
    KEEPS_ERRNO(cu.cuMemAlloc_v2(&q, 100 * MIB), CUDA_ERROR_OUT_OF_MEMORY);
    OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    KEEPS_ERRNO(cu.cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    KEEPS_ERRNO(cu.cuStreamEndCapture(stream, &graph), CUDA_SUCCESS);
    OK(cu.cuMemFree_v2(p));
    OK(cu.cuCtxCreate_v2(&other, 0, 0));
    cached_block(2 * MIB);
    KEEPS_ERRNO(cu.cuCtxDestroy_v2(other), CUDA_SUCCESS);
    KEEPS_ERRNO(cu.cuDevicePrimaryCtxReset_v2(0), CUDA_SUCCESS);
}

LAW_CASE_SIM(errno_stays)
{
    CHECK_EQ(law_run_child("looks_at_errno", ENV("SIMCUDA_CAPACITY=64M", "VRAMSHIM_VERBOSE=1", "VRAMSHIM_WASTE=lots"),
                           text, sizeof(text)),
             0);
}

/* dlerror: a failure of the program's own stays pending through our work, and lookups leave what they leave natively.
 */
LAW_CASE_SIM_ONCE(dlerror_stays)
{
    CUdeviceptr p;
    void *handle = dlopen("libcuda.so.1", RTLD_NOW);
    CHECK(handle && !dlerror());
    law_context(); /* a driver looks itself up while it initialises */
    CHECK(!dlsym(handle, "cuNoSuchEntry"));
    OK(cu.cuMemAlloc_v2(&p, 4 * MIB));
    OK(cu.cuMemFree_v2(p));
    OK(cu.cuMemAlloc_v2(&p, 4 * MIB));
    OK(cu.cuMemFree_v2(p));
    CHECK_EQ(cu.cuMemFree_v2(p), CUDA_ERROR_INVALID_VALUE);
    signal(SIGUSR1, SIG_DFL);
    if (under_shim())
        raise(SIGUSR1);
    const char *error = dlerror();
    CHECK(error && strstr(error, "cuNoSuchEntry"));
    CHECK(!dlerror());
    CHECK(dlsym(handle, "cuMemAlloc_v2") && dlsym(handle, "cuGetProcAddress_v2"));
    CHECK(!dlerror());
    OK(cu.cuMemAlloc_v2(&p, 4 * MIB));
    CHECK(!dlerror());
    CHECK(!dlsym(RTLD_DEFAULT, "cuNoSuchEntryEither"));
    error = dlerror();
    CHECK(error && strstr(error, "cuNoSuchEntryEither"));
}

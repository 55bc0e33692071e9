/*
 * Law 30: when the shim itself fails (no memory, no thread, no file, a driver without an entry), the program goes on
 * with the native call, and one line says what is missing.
 *
 * This program brings its own pthread_create and mmap, as programs may: they fail for the shim, and for nobody else.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include "law.h"
#include "sim.h"
#include "world.h"

enum { MIB = 1 << 20 };

static char text[65536];
static atomic_bool no_threads, no_memory;
static atomic_uint refused;

static bool called_by_the_shim(const void *caller)
{
    Dl_info info;
    return dladdr(caller, &info) && info.dli_fname && strstr(info.dli_fname, "libvramshim");
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*start)(void *), void *arg)
{
    static int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    if (no_threads && called_by_the_shim(__builtin_return_address(0))) {
        refused++;
        return EAGAIN;
    }
    if (!real)
        real = (__typeof__(real))dlsym(RTLD_NEXT, "pthread_create");
    return real(thread, attr, start, arg);
}

void *mmap(void *addr, size_t length, int prot, int flags, int fd, off_t offset)
{
    if (no_memory && called_by_the_shim(__builtin_return_address(0))) {
        refused++;
        errno = ENOMEM;
        return MAP_FAILED;
    }
    return (void *)syscall(SYS_mmap, addr, length, prot, flags, fd, offset);
}

/* These two are asked for before a program can say a word, so the environment does. */
int on_exit(void (*function)(int, void *), void *arg)
{
    if (getenv("LAW30_NO_ON_EXIT") && called_by_the_shim(__builtin_return_address(0)))
        return -1;
    return ((__typeof__(&on_exit))dlsym(RTLD_NEXT, "on_exit"))(function, arg);
}

int __register_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void), void *object);
int __register_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void), void *object)
{
    if (getenv("LAW30_NO_ATFORK") && called_by_the_shim(__builtin_return_address(0)))
        return ENOMEM;
    return ((__typeof__(&__register_atfork))dlsym(RTLD_NEXT, "__register_atfork"))(prepare, parent, child, object);
}

/* The program as it would be natively: all succeeds, contents are right, errno stays. */
static void works(unsigned blocks)
{
    CUdeviceptr p[64];
    for (unsigned i = 0; i < blocks; i++) {
        unsigned char back = 0;
        errno = 77;
        OK(cu.cuMemAlloc_v2(&p[i], 2 * MIB));
        OK(cu.cuMemsetD8_v2(p[i], (unsigned char)(i + 1), 2 * MIB));
        OK(cu.cuMemcpyDtoH_v2(&back, p[i] + 2 * MIB - 1, 1));
        CHECK_EQ(back, i + 1);
        CHECK_EQ(errno, 77);
    }
    for (unsigned i = 0; i < blocks; i++) {
        errno = 77;
        OK(cu.cuMemFree_v2(p[i]));
        CHECK_EQ(errno, 77);
    }
    CHECK_EQ(cu.cuMemFree_v2(p[0]), CUDA_ERROR_INVALID_VALUE);
}

static unsigned lines_with(const char *what)
{
    unsigned n = 0;
    static char copy[sizeof(text)];
    strcpy(copy, text);
    for (char *line = strtok(copy, "\n"); line; line = strtok(NULL, "\n"))
        n += strstr(line, what) != NULL;
    return n;
}

LAW_CHILD(has_no_threads)
{
    no_threads = true;
    law_context();
    works(8);
    unsigned long before = driver_calls("cuMemAlloc_v2");
    works(8);
    if (under_shim()) {
        CHECK_EQ(driver_calls("cuMemAlloc_v2"), before); /* all else works */
        raise(SIGUSR1);
    }
    CHECK_EQ(refused, under_shim() ? 1 : 0); /* and nobody tries again and again */
}

LAW_CASE_SIM_ONCE(no_thread)
{
    CHECK_EQ(law_run_child("has_no_threads", NULL, text, sizeof(text)), 0);
    if (under_shim()) {
        CHECK_EQ(lines_with("cannot start a thread"), 1);
        CHECK(strstr(text, "nothing leaked"));
        CHECK(!strstr(text, "has not used GPU memory")); /* it has */
    }
}

/* The same by the kernel's own word, where a user may be limited. */
LAW_CHILD(may_not_have_threads)
{
    struct rlimit limit = {1, 1};
    if (geteuid() == 0 && (setgid(65534) != 0 || setuid(65534) != 0))
        law_skip("cannot become another user");
    CHECK(setrlimit(RLIMIT_NPROC, &limit) == 0);
    law_context();
    works(8);
    works(8);
}

LAW_CASE_SIM_ONCE(no_thread_by_limit)
{
    int status = law_run_child("may_not_have_threads", NULL, text, sizeof(text));
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
        law_skip("cannot become another user");
    CHECK_EQ(status, 0);
    if (under_shim())
        CHECK_EQ(lines_with("cannot start a thread"), 1);
}

/* No memory for records, from the start or later, for a while or for good. */
LAW_CHILD(has_no_memory)
{
    no_memory = true;
    law_context();
    works(20);
    works(20);
    CHECK(!under_shim() || refused > 0);
}

LAW_CHILD(has_no_memory_for_a_while)
{
    law_context();
    works(2);
    no_memory = true;
    CUdeviceptr *many = calloc(4096, sizeof(*many));
    CHECK(many);
    for (int i = 0; i < 4096; i++)
        OK(cu.cuMemAlloc_v2(&many[i], 512));
    CHECK(!under_shim() || refused > 0);
    for (int i = 0; i < 4096; i++)
        OK(cu.cuMemFree_v2(many[i]));
    CHECK_EQ(cu.cuMemFree_v2(many[4095]), CUDA_ERROR_INVALID_VALUE);
    no_memory = false;
    works(20);
    unsigned long before = driver_calls("cuMemAlloc_v2");
    works(20);
    if (under_shim())
        CHECK_EQ(driver_calls("cuMemAlloc_v2"), before);
    CHECK_EQ(SIM(sim_hazards)(), 0);
}

LAW_CASE_SIM(no_memory_for_records)
{
    CHECK_EQ(law_run_child("has_no_memory", NULL, text, sizeof(text)), 0);
    if (under_shim())
        CHECK_EQ(lines_with("no host memory"), 1);
}

LAW_CASE_SIM(no_memory_for_records_for_a_while)
{
    CHECK_EQ(law_run_child("has_no_memory_for_a_while", NULL, text, sizeof(text)), 0);
    if (under_shim())
        CHECK_EQ(lines_with("no host memory"), 1);
}

/* A driver that does not say in which context it allocates, and does when asked again: what it gave is in the books. Where it
 * never says, the block is the program's and the driver's alone, and so is its free. */
LAW_CHILD(allocates_in_an_unknown_context)
{
    CUdeviceptr p, q;
    size_t pitch;
    CUcontext other;
    law_context();
    OK(cu.cuCtxCreate_v2(&other, 0, 0)); /* of two, it has to be asked which is the current one */
    OK(cu.cuCtxPopCurrent_v2(&other));
    SIM(sim_fail)("cuCtxGetCurrent", 1, 1, CUDA_ERROR_UNKNOWN);
    OK(cu.cuMemAlloc_v2(&p, 3 * MIB));
    SIM(sim_fail)("cuCtxGetCurrent", 1, 1000, CUDA_ERROR_UNKNOWN);
    OK(cu.cuMemAlloc_v2(&q, 5 * MIB));
    OK(cu.cuMemAllocPitch_v2(&p, &pitch, MIB, 7, 4));
    SIM(sim_fail)("cuCtxGetCurrent", 1, 0, 0);
    unsigned long before = driver_calls("cuMemFree_v2");
    OK(cu.cuMemFree_v2(q));
    CHECK_EQ(driver_calls("cuMemFree_v2"), before + 1);
    CHECK_EQ(cu.cuMemFree_v2(q), CUDA_ERROR_INVALID_VALUE);
    works(8);
}

LAW_CASE_SIM(an_unknown_context)
{
    CHECK_EQ(law_run_child("allocates_in_an_unknown_context", NULL, text, sizeof(text)), 0);
    CHECK_EQ(lines_with("cannot account for an allocation"), under_shim());
    CHECK_EQ(lines_with("3.0 MiB in 1 block never freed"), under_shim());
}

/* The device is not named when peer access is given, but later: everything is under its own name. */
LAW_CHILD(gives_access_on_an_unknown_device)
{
    CUcontext owner = law_context(), other;
    CUdeviceptr p;
    OK(cu.cuCtxCreate_v2(&other, 0, 1));
    SIM(sim_fail)("cuCtxGetDevice", 1, 1000, CUDA_ERROR_UNKNOWN);
    OK(cu.cuCtxEnablePeerAccess(owner, 0));
    SIM(sim_fail)("cuCtxGetDevice", 1, 0, 0);
    OK(cu.cuCtxSetCurrent(owner));
    OK(cu.cuMemAlloc_v2(&p, 3 * MIB));
    works(8);
}

LAW_CASE_SIM(an_unknown_device)
{
    CHECK_EQ(law_run_child("gives_access_on_an_unknown_device", ENV("SIMCUDA_DEVICES=2"), text, sizeof(text)), 0);
    CHECK_EQ(lines_with("cannot account for an allocation"), 0);
    CHECK_EQ(lines_with("  device 0"), under_shim());
    CHECK_EQ(count_of(text, "  device "), under_shim());
}

/* No file for the report: one line, and the report where it can be read. */
LAW_CHILD(leaks)
{
    CUdeviceptr p;
    law_context();
    OK(cu.cuMemAlloc_v2(&p, 3 * MIB));
}

LAW_CHILD(does_nothing) {}

/* No handler for forks, or none for exit. What a program without CUDA lacks, nobody has to know (law 6). */
LAW_CASE_SIM_ONCE(no_fork_handler)
{
    CHECK_EQ(law_run_child("leaks", ENV("LAW30_NO_ATFORK=1"), text, sizeof(text)), 0);
    CHECK_EQ(lines_with("cannot follow forks"), under_shim());
    CHECK_EQ(lines_with("3.0 MiB in 1 block never freed"), under_shim());
    CHECK_EQ(law_run_child("does_nothing", ENV("LAW30_NO_ATFORK=1"), text, sizeof(text)), 0);
    CHECK_EQ(strlen(text), 0);
}

LAW_CASE_SIM_ONCE(no_exit_handler)
{
    CHECK_EQ(law_run_child("leaks", ENV("LAW30_NO_ON_EXIT=1"), text, sizeof(text)), 0);
    CHECK_EQ(lines_with("cannot be called at exit"), under_shim());
    CHECK_EQ(lines_with("cannot write the report last"), under_shim());
    CHECK_EQ(lines_with("3.0 MiB in 1 block never freed"), under_shim());
    CHECK_EQ(law_run_child("does_nothing", ENV("LAW30_NO_ON_EXIT=1"), text, sizeof(text)), 0);
    CHECK_EQ(strlen(text), 0);
}

LAW_CHILD(leaks_without_descriptors)
{
    const char *number = getenv("LAW30_DESCRIPTORS");
    struct rlimit limit = {(rlim_t)atoi(number), (rlim_t)atoi(number)};
    CUdeviceptr p;
    law_context();
    OK(cu.cuMemAlloc_v2(&p, 3 * MIB));
    CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
}

static void expect_report_here(const char *name, const char *variable, const char *path)
{
    CHECK_EQ(law_run_child(name, ENV(variable), text, sizeof(text)), 0);
    if (under_shim()) {
        CHECK_EQ(lines_with("cannot write the report to"), 1);
        CHECK(strstr(text, path));
        CHECK_EQ(lines_with("LEAK SUMMARY"), 1);
        CHECK_EQ(lines_with("3.0 MiB in 1 block never freed"), 1);
    } else {
        CHECK_EQ(strlen(text), 0);
    }
}

LAW_CASE_SIM_ONCE(no_directory_for_the_report)
{
    expect_report_here("leaks", "VRAMSHIM_REPORT=/nowhere/report.%p", "/nowhere/report.");
}
LAW_CASE_SIM_ONCE(a_file_instead_of_a_directory)
{
    expect_report_here("leaks", "VRAMSHIM_REPORT=/proc/self/exe/report.%p", "/proc/self/exe/report.");
}
LAW_CASE_SIM_ONCE(no_descriptor_for_the_report)
{
    setenv("LAW30_DESCRIPTORS", "3", 1);
    expect_report_here("leaks_without_descriptors", "VRAMSHIM_REPORT=/tmp/law30.%p", "/tmp/law30.");
}

/* A sandbox that allows none at all: poll() itself fails then. */
LAW_CASE_SIM_ONCE(no_descriptor_at_all)
{
    setenv("LAW30_DESCRIPTORS", "0", 1);
    expect_report_here("leaks_without_descriptors", "VRAMSHIM_REPORT=/tmp/law30.%p", "/tmp/law30.");
}

/* The disk is full; the pid is part of the name, so the full device is reached by a link. */
LAW_CHILD(leaks_onto_a_full_disk)
{
    char link[64];
    snprintf(link, sizeof(link), "/tmp/law30.full.%d", (int)getpid());
    CHECK(symlink("/dev/full", link) == 0);
    case_leaks();
}

LAW_CASE_SIM_ONCE(a_full_disk)
{
    expect_report_here("leaks_onto_a_full_disk", "VRAMSHIM_REPORT=/tmp/law30.full.%p", "/tmp/law30.full.");
    char out[64];
    shell("rm -f /tmp/law30.full.*", out, sizeof(out));
}

/* Files may not grow: the signal that the kernel sends for it must not end the program. */
LAW_CHILD(leaks_where_files_may_not_grow)
{
    struct rlimit limit = {0, 0};
    case_leaks();
    CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
}

LAW_CASE_SIM_ONCE(files_may_not_grow)
{
    expect_report_here("leaks_where_files_may_not_grow", "VRAMSHIM_REPORT=/tmp/law30.size.%p", "/tmp/law30.size.");
    char out[64];
    shell("rm -f /tmp/law30.size.*", out, sizeof(out));
}

/* Older drivers: what they lack is answered as it is natively, and the cache needs none of it. */
LAW_CHILD(runs_on_an_old_driver)
{
    CUstream stream;
    law_context();
    works(8);
    OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cu.cuMemsetD8Async(cached_block(2 * MIB), 0, 0, stream));
    unsigned long before = driver_calls("cuMemAlloc_v2");
    works(8);
    if (under_shim())
        CHECK_EQ(driver_calls("cuMemAlloc_v2"), before);
}

LAW_CASE_SIM_ONCE(old_drivers)
{
    static const char *const versions[] = {"SIMCUDA_VERSION=7000", "SIMCUDA_VERSION=9020", "SIMCUDA_VERSION=11000",
                                           "SIMCUDA_VERSION=12000", "SIMCUDA_VERSION=12040"};
    for (size_t i = 0; i < sizeof(versions) / sizeof(*versions); i++) {
        CHECK_EQ(law_run_child("runs_on_an_old_driver", ENV(versions[i]), text, sizeof(text)), 0);
        if (under_shim())
            CHECK(strstr(text, "nothing leaked"));
    }
}

/* What cannot be waited for is not handed out: the judge would see two kernels in one block. */
static void works_with_a_kernel_running(void)
{
    CUfunction fill = kernel("vram_fill");
    for (int i = 0; i < 3; i++) {
        CUdeviceptr p;
        CUstream stream;
        OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
        OK(cu.cuMemAlloc_v2(&p, 2 * MIB));
        launch_fill(fill, stream, p, 4096, 20000000);
        OK(cu.cuMemFree_v2(p));
    }
    CHECK_EQ(SIM(sim_hazards)(), 0);
}

/* Entries that the shim calls and the driver refuses: each time the program's own call is made instead. */
LAW_CHILD(runs_without_an_entry)
{
    CUcontext other;
    CUdeviceptr p;
    law_context();
    works(8);
    works_with_a_kernel_running();
    OK(cu.cuCtxCreate_v2(&other, 0, 0));
    OK(cu.cuMemAlloc_v2(&p, 2 * MIB));
    OK(cu.cuCtxSetCurrent(NULL));
    law_context();
    OK(cu.cuMemFree_v2(p));
    works(8);
    OK(cu.cuCtxDestroy_v2(other));
    OK(cu.cuDevicePrimaryCtxRelease_v2(0));
    works(8);
    CHECK_EQ(SIM(sim_hazards)(), 0);
}

static const char *const needed[] = {"cuCtxGetCurrent",     "cuCtxGetDevice",     "cuCtxSynchronize",
                                     "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuDevicePrimaryCtxGetState"};
enum { NEEDED = sizeof(needed) / sizeof(*needed) };

LAW_CASE_SIM_ONCE(a_driver_that_lacks_an_entry)
{
    for (int i = 0; i < NEEDED; i++) {
        char variable[64];
        snprintf(variable, sizeof(variable), "SIMCUDA_HIDE=%s", needed[i]);
        int status = law_run_child("runs_without_an_entry", ENV(variable), text, sizeof(text));
        if (status != 0)
            law_fail(__FILE__, __LINE__, "without %s: status %x: %s", needed[i], (unsigned)status, text);
    }
}

/* A copy of the driver that really lacks the entry: its name is misspelt in the table of exported names. The program is
 * one that asks for no more than it uses. */
static bool driver_without(const char *directory, const char *entry)
{
    static char driver[4 << 20];
    char path[128], name[64];
    Dl_info info;
    size_t len = strlen(entry) + 2;
    CHECK(dladdr((void *)SIM(sim_calls), &info));
    int from = open(info.dli_fname, O_RDONLY | O_CLOEXEC);
    ssize_t size = from >= 0 ? read(from, driver, sizeof(driver)) : -1;
    close(from);
    CHECK(size > 0 && (size_t)size < sizeof(driver));
    snprintf(name, sizeof(name), "%c%s", 0, entry);
    memcpy(name + 1, entry, len - 1);
    char *found = memmem(driver, (size_t)size, name, len);
    if (!found)
        return false;
    found[1] = 'x';
    snprintf(path, sizeof(path), "%s/libcuda.so.1", directory);
    int to = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0700);
    CHECK(to >= 0 && write(to, driver, (size_t)size) == size);
    close(to);
    return true;
}

LAW_CASE_SIM_ONCE(the_missing_entry_is_named)
{
    char directory[] = "/tmp/law30.XXXXXX", command[256];
    if (!getenv("VRAM_LOOP"))
        law_skip("VRAM_LOOP names no program");
    CHECK(mkdtemp(directory));
    for (int i = 0; i < NEEDED; i++) {
        CHECK(driver_without(directory, needed[i]));
        snprintf(command, sizeof(command),
                 "LD_LIBRARY_PATH=%s exec \"$VRAM_LOOP\" --quiet --iterations 3 --blocks 2 --size 2M 2>&1", directory);
        CHECK_EQ(shell(command, text, sizeof(text)), 0);
        CHECK_EQ(lines_with("checksum "), 1);
        if (under_shim() && lines_with(needed[i]) != 1)
            law_fail(__FILE__, __LINE__, "not one line, but %u, about %s: %s", lines_with(needed[i]), needed[i], text);
    }
    snprintf(command, sizeof(command), "rm -r %s", directory);
    shell(command, text, sizeof(text));
}

/*
 * VRAMSHIM_TRACE: each allocation and free as the program sees it (law 16), one file a process (laws 25, 26), and nothing
 * of it can hurt the program (laws 30, 32).
 */
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "law.h"
#include "sim.h"
#include "world.h"

#define HEADER "Thread,Time,Action,Pointer,Size,Stream\n"

enum { MIB = 1 << 20, ENOUGH = 3000 /* pairs, for some 64 KiB of lines */ };

static char directory[32], trace_here[64];

static void in_a_new_directory(void)
{
    strcpy(directory, "/tmp/trace.XXXXXX");
    CHECK(mkdtemp(directory));
    CHECK(chdir(directory) == 0);
    snprintf(trace_here, sizeof(trace_here), "VRAMSHIM_TRACE=%s/t.%%p", directory);
}

static void remove_directory(void)
{
    char command[64], out[64];
    snprintf(command, sizeof(command), "rm -rf %s", directory);
    shell(command, out, sizeof(out));
}

/* A shell command's output, with $D for the directory. */
static const char *look(const char *command)
{
    static char out[1 << 20];
    CHECK(setenv("D", directory, 1) == 0);
    shell(command, out, sizeof(out));
    return out;
}

/* The lines of all that was written, without thread and time. */
static const char *lines(void) { return look("cat $D/t.* 2>/dev/null | cut -d, -f3-"); }

static CUdeviceptr allocate(size_t bytes)
{
    CUdeviceptr p;
    OK(cu.cuMemAlloc_v2(&p, bytes));
    return p;
}

static void pairs(unsigned n)
{
    for (unsigned i = 0; i < n; i++)
        OK(cu.cuMemFree_v2(allocate(4096)));
}

/* Says on standard error what its trace has to be. */
LAW_CHILD(known)
{
    CUdeviceptr p, q, r;
    size_t pitch;
    law_context();
    p = allocate(3 * MIB);
    fprintf(stderr, "allocate,0x%llx,%d,0\n", p, 3 * MIB);
    OK(cu.cuMemAllocPitch_v2(&q, &pitch, 1000, 100, 4));
    fprintf(stderr, "allocate,0x%llx,%zu,0\n", q, pitch * 100);
    CHECK_EQ(cu.cuMemAlloc_v2(&r, (size_t)1 << 50), CUDA_ERROR_OUT_OF_MEMORY);
    fprintf(stderr, "allocate failure,0x0,%zu,0\n", (size_t)1 << 50);
    CHECK_EQ(cu.cuMemAlloc_v2(NULL, 512), CUDA_ERROR_INVALID_VALUE);
    fprintf(stderr, "allocate failure,0x0,512,0\n");
    OK(cu.cuMemFree_v2(p));
    fprintf(stderr, "free,0x%llx,%d,0\n", p, 3 * MIB);
    CHECK_EQ(cu.cuMemFree_v2(p), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemFree_v2(q + 512), CUDA_ERROR_INVALID_VALUE);
    OK(cu.cuMemFree_v2(0));
    r = allocate(3 * MIB - 5);
    fprintf(stderr, "allocate,0x%llx,%d,0\n", r, 3 * MIB - 5);
    OK(cu.cuMemFreeAsync(q, NULL));
    fprintf(stderr, "free,0x%llx,%zu,0\n", q, pitch * 100);
    OK(cu.cuMemAllocAsync(&p, MIB, NULL));
    OK(cu.cuMemFreeAsync(p, NULL));
    OK(cu.cuMemFree_v2(r));
    fprintf(stderr, "free,0x%llx,%d,0\n", r, 3 * MIB - 5);
    allocate(MIB);
}

static void expect_known(const char *more)
{
    char text[8192], expected[8192 + 64];
    in_a_new_directory();
    CHECK_EQ(law_run_child("known", ENV(trace_here, "VRAMSHIM_REPORT=none", more), text, sizeof(text)), 0);
    if (!under_shim()) {
        CHECK(strcmp(look("ls $D"), "") == 0);
    } else {
        CHECK_EQ(count_of(look("ls $D"), "\n"), 1);
        snprintf(expected, sizeof(expected), "Action,Pointer,Size,Stream\n%s", text);
        const char *found = lines();
        size_t same = strlen(expected);
        if (strncmp(found, expected, same) != 0 || count_of(found + same, "\n") != 1)
            law_fail(__FILE__, __LINE__, "expected:\n%sand one more line; found:\n%s", expected, found);
        CHECK(strncmp(look("cat $D/t.*"), HEADER, strlen(HEADER)) == 0);
        CHECK_EQ(count_of(look("grep -cEv '^[0-9]+,[0-9]{2}:[0-9]{2}:[0-9]{2}\\.[0-9]{6},[a-z ]+,0x[0-9a-f]+,[0-9]+,0$' $D/t.*"),
                          "1\n"), 1); /* the header */
    }
    remove_directory();
}

LAW_CASE_SIM(what_the_program_sees) { expect_known("VRAMSHIM_CACHE=1"); }
LAW_CASE_SIM(without_a_cache) { expect_known("VRAMSHIM_CACHE=0"); }

/* Runs the case and expects so many allocations and frees in so many files. */
static void expect_counts(const char *name, unsigned files, unsigned allocations, unsigned frees)
{
    char text[65536];
    in_a_new_directory();
    CHECK_EQ(law_run_child(name, ENV(trace_here, "VRAMSHIM_REPORT=none"), text, sizeof(text)), 0);
    CHECK(strcmp(text, "") == 0);
    CHECK_EQ(count_of(look("ls -d $D/t.* 2>/dev/null"), "\n"), under_shim() ? files : 0);
    if (under_shim()) {
        CHECK_EQ(count_of(lines(), "Action,Pointer,Size,Stream\n"), files);
        CHECK_EQ(count_of(lines(), "\nallocate,"), allocations);
        CHECK_EQ(count_of(lines(), "\nfree,"), frees);
    }
    remove_directory();
}

LAW_CHILD(leaves_by_exit) { law_context(), pairs(2), exit(0); }
LAW_CHILD(leaves_by__exit) { law_context(), pairs(2), _exit(0); }
LAW_CHILD(leaves_by_quick_exit) { law_context(), pairs(2), quick_exit(0); }
LAW_CASE_SIM_ONCE(whatever_the_way_out)
{
    expect_counts("leaves_by_exit", 1, 2, 2);
    expect_counts("leaves_by__exit", 1, 2, 2);
    expect_counts("leaves_by_quick_exit", 1, 2, 2);
}

static CUdeviceptr late;
static void __attribute__((destructor)) free_late(void)
{
    if (late)
        cu.cuMemFree_v2(late);
}
LAW_CHILD(frees_in_a_destructor) { law_context(), late = allocate(MIB); }
LAW_CASE_SIM_ONCE(what_destructors_free) { expect_counts("frees_in_a_destructor", 1, 1, 1); }

LAW_CHILD(uses_no_memory) { law_context(); }
LAW_CASE_SIM_ONCE(no_file_where_there_is_nothing_to_say) { expect_counts("uses_no_memory", 0, 0, 0); }

LAW_CHILD(traces_much) { law_context(), pairs(ENOUGH); }
LAW_CASE_SIM_ONCE(nothing_is_lost_between_two_writes) { expect_counts("traces_much", 1, ENOUGH, ENOUGH); }

/* Children that use no CUDA write nothing, not even what their parent has gathered; whoever does has a file of its own. */
LAW_CHILD(has_children)
{
    for (int i = 0; i < 2; i++) {
        int status = -1;
        pid_t pid = fork();
        if (pid == 0) {
            law_context();
            pairs(3);
            exit(0);
        }
        CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    }
    law_context();
    pairs(1);
    for (int i = 0; i < 5; i++) {
        int status = -1;
        pid_t pid = i < 2 ? fork() : i < 4 ? vfork() : (pid_t)syscall(SYS_clone, SIGCHLD, NULL, NULL, NULL, NULL);
        if (pid == 0) {
            if (i == 0)
                exit(0);
            if (i == 4)
                quick_exit(0); /* no handler of a fork has run */
            if (i == 2)
                execl("/nowhere/to/be/found", "nothing", (char *)NULL);
            _exit(0);
        }
        CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    }
    pairs(1);
}
LAW_CASE_SIM_ONCE(a_file_for_each_process) { expect_counts("has_children", 3, 8, 8); }

/* Runs the case, which goes on to the end and says "done", and expects one line of ours. */
static void expect_said_once(const char *name, const char *variable, const char *what)
{
    char text[65536];
    CHECK_EQ(law_run_child(name, ENV(variable, "VRAMSHIM_REPORT=none"), text, sizeof(text)), 0);
    CHECK_EQ(count_of(text, "done"), 1);
    CHECK_EQ(count_of(text, "vramshim: "), under_shim());
    CHECK_EQ(count_of(text, "vramshim: cannot write the trace to "), under_shim());
    CHECK_EQ(count_of(text, what), under_shim());
}

LAW_CHILD(goes_on)
{
    law_context();
    pairs(ENOUGH);
    errno = 1234;
    pairs(ENOUGH);
    CHECK_EQ(errno, 1234);
    fprintf(stderr, "done\n");
}

LAW_CASE_SIM_ONCE(a_folder_that_is_not_there)
{
    expect_said_once("goes_on", "VRAMSHIM_TRACE=/no/such/folder/t", "(its folder is not there): it ends here\n");
}

LAW_CHILD(goes_on_with_a_full_disk)
{
    char path[64];
    snprintf(path, sizeof(path), "t.%d", (int)getpid());
    CHECK(symlink("/dev/full", path) == 0);
    CHECK(signal(SIGPIPE, SIG_DFL) != SIG_ERR);
    law_context();
    pairs(2 * ENOUGH);
    fprintf(stderr, "done\n");
}

LAW_CASE_SIM_ONCE(a_full_disk)
{
    in_a_new_directory();
    expect_said_once("goes_on_with_a_full_disk", trace_here, "(no space is left there): it ends here\n");
    remove_directory();
}

/* A pipe that nobody reads: it costs a moment, once. */
LAW_CHILD(goes_on_with_a_full_pipe)
{
    char path[64];
    snprintf(path, sizeof(path), "t.%d", (int)getpid());
    CHECK(mkfifo(path, 0600) == 0);
    CHECK(open(path, O_RDWR | O_CLOEXEC) >= 0);
    alarm(20);
    law_context();
    pairs(4 * ENOUGH);
    fprintf(stderr, "done\n");
}

LAW_CASE_SIM_ONCE(a_pipe_that_nobody_reads)
{
    in_a_new_directory();
    expect_said_once("goes_on_with_a_full_pipe", trace_here, "(its reader does not take it): it ends here, within a line\n");
    remove_directory();
}

/* As daemons and launchers do: every descriptor is closed, and their numbers are the program's for files of its own. */
LAW_CHILD(closes_every_descriptor)
{
    enum { FILES = 60 };
    char name[32];
    law_context();
    pairs(ENOUGH);
    for (int fd = 3; fd < 1024; fd++)
        close(fd);
    for (int i = 0; i < FILES; i++) {
        snprintf(name, sizeof(name), "data.%d", i);
        CHECK_EQ(open(name, O_RDWR | O_CREAT, 0600), 3 + i);
    }
    pairs(ENOUGH);
}

LAW_CASE_SIM_ONCE(no_file_of_the_programs_is_written)
{
    char text[65536];
    in_a_new_directory();
    CHECK_EQ(law_run_child("closes_every_descriptor", ENV(trace_here, "VRAMSHIM_REPORT=none"), text, sizeof(text)), 0);
    CHECK(strcmp(text, "") == 0);
    CHECK_EQ(count_of(look("ls -d $D/data.*"), "\n"), 60);
    CHECK(strcmp(look("cat $D/data.*"), "") == 0);
    if (under_shim())
        CHECK_EQ(count_of(lines(), "\nfree,"), 2 * ENOUGH);
    remove_directory();
}

/* A program that somebody will end by force: at the signal its trace is there. */
LAW_CHILD(is_asked)
{
    char path[64];
    law_context();
    allocate(MIB);
    snprintf(path, sizeof(path), "t.%d", (int)getpid());
    CHECK(access(path, F_OK) != 0);
    if (under_shim()) {
        raise(SIGUSR1);
        WAIT_UNTIL(access(path, F_OK) == 0);
    }
    kill(getpid(), SIGKILL);
}

LAW_CASE_SIM_ONCE(the_signal_writes_it)
{
    char text[65536];
    in_a_new_directory();
    CHECK_EQ(law_run_child("is_asked", ENV(trace_here), text, sizeof(text)), SIGKILL);
    CHECK_EQ(count_of(lines(), "\nallocate,"), under_shim());
    remove_directory();
}

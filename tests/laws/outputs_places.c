/*
 * VRAMSHIM_REPORT and VRAMSHIM_TRACE where their file is no plain one, or cannot be written: a descriptor, a pipe, a device, a
 * folder, a full disk. Laws 29 and 32 hold for each of them, and law 30: one line says what is wrong, and the report is not lost.
 */
#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/un.h>

#include "law.h"
#include "sim.h"
#include "world.h"

enum { MIB = 1 << 20 };

static char out[1 << 16], err[1 << 16], folder[] = "/tmp/outputs.XXXXXX";

/* The two outputs, one at a time: `text` is in whatever of it is there. */
static const struct {
    const char *name, *rest, *text, *failed;
} outputs[] = {
    {"REPORT", "VRAMSHIM_TRACE=none", "LEAK SUMMARY", "vramshim: cannot write the report to "},
    {"TRACE", "VRAMSHIM_REPORT=none", "Thread,Time,Action,", "vramshim: cannot write the trace to "},
};
enum { REPORT, TRACE, OUTPUTS };
#define EACH(o) for (int o = REPORT; o < OUTPUTS; o++)

static void in_a_new_folder(void) { CHECK(mkdtemp(folder) && chdir(folder) == 0); }
static void remove_folder(void)
{
    char command[64];
    snprintf(command, sizeof(command), "rm -rf %s", folder);
    shell(command, out, sizeof(out));
}

static const char *const *to(int o, const char *where)
{
    static char variable[512];
    static const char *env[3];
    snprintf(variable, sizeof(variable), "VRAMSHIM_%s=%s", outputs[o].name, where);
    env[0] = variable;
    env[1] = outputs[o].rest;
    return env;
}

/* Starts the case with these as its standard streams (-1: closed) and, if it is none of them, this descriptor. */
static pid_t start(const char *name, const char *const *env, int one, int two, int kept)
{
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        for (; *env; env++)
            putenv((char *)*env);
        if (one < 0)
            close(STDOUT_FILENO);
        else
            dup2(one, STDOUT_FILENO);
        dup2(two, STDERR_FILENO);
        if (kept > STDERR_FILENO)
            fcntl(kept, F_SETFD, 0);
        execl("/proc/self/exe", "law", "--case", name, "--route", "dlsym", (char *)NULL);
        _exit(126);
    }
    CHECK(pid > 0);
    return pid;
}

static void expect_end(pid_t pid)
{
    int status = -1;
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    CHECK_EQ(status, 0);
}

static int make(const char *name) { return open(name, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600); }

LAW_CHILD(leaks)
{
    CUdeviceptr p;
    law_context();
    OK(cu.cuMemAlloc_v2(&p, MIB));
    printf("%d\n", (int)getpid());
    fflush(stdout);
}

/* Runs the case; a line of ours says this of what failed, and the report is on standard error. */
static void expect_trouble(const char *name, int o, const char *where, const char *why)
{
    CHECK_EQ(run_child_apart(name, to(o, where), out, err, sizeof(err)), 0);
    CHECK_EQ(count_of(out, "\n"), 1);
    if (!under_shim()) {
        CHECK_EQ(strlen(err), 0);
        return;
    }
    if (count_of(err, outputs[o].failed) != 1 || count_of(err, why) != 1)
        law_fail(__FILE__, __LINE__, "%s: expected \"%s\" in: %s", where, why, err);
    CHECK_EQ(count_of(err, o == REPORT ? "; it follows here\nvramshim: LEAK SUMMARY" : ": it ends here"), 1);
    CHECK_EQ(count_of(err, "vramshim: "), o == REPORT ? 2 : 1);
}

/* No file beside the named one. */
static void expect_no_file(const char *beginning)
{
    char command[300], found[300];
    snprintf(command, sizeof(command), "ls -d %s* 2>/dev/null", beginning);
    shell(command, found, sizeof(found));
    if (*found)
        law_fail(__FILE__, __LINE__, "was made: %s", found);
}

LAW_CASE_SIM_ONCE(standard_error_by_its_other_names)
{
    static const char *const names[] = {"/dev/stderr", "/dev/fd/2", "/proc/self/fd/2", "/proc/%p/fd/2", "/dev/../dev/fd/2"};
    EACH(o)
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        CHECK_EQ(run_child_apart("leaks", to(o, names[i]), out, err, sizeof(err)), 0);
        CHECK_EQ(count_of(err, outputs[o].text), under_shim());
        CHECK_EQ(count_of(err, "vramshim: cannot"), 0);
        CHECK_EQ(count_of(out, "\n"), 1);
        expect_no_file("/dev/stderr.");
    }
}

/* Law 32: closed, and its number a data file's. */
LAW_CHILD(makes_2_a_data_file)
{
    close(STDERR_FILENO);
    CHECK_EQ(open("data", O_RDWR | O_CREAT, 0600), STDERR_FILENO);
    case_leaks();
}

LAW_CASE_SIM_ONCE(descriptor_2_is_a_data_file)
{
    static const char *const names[] = {"/dev/stderr", "/dev/fd/2", "/proc/self/fd/2", "/proc/thread-self/fd/2"};
    in_a_new_folder();
    EACH(o)
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        CHECK_EQ(run_child_apart("makes_2_a_data_file", to(o, names[i]), out, err, sizeof(err)), 0);
        CHECK_EQ(slurp("data", err, sizeof(err)), 0);
    }
    remove_folder();
}

/* Standard output, because it was named: a pipe, a file that the program goes on writing, a socket, closed. */
LAW_CASE_SIM_ONCE(standard_output_if_it_is_named)
{
    static const char *const names[] = {"/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "/proc/%p/fd/1"};
    EACH(o)
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        CHECK_EQ(run_child_apart("leaks", to(o, names[i]), out, err, sizeof(err)), 0);
        CHECK(strtol(out, NULL, 10) > 1);
        CHECK_EQ(count_of(out, outputs[o].text), under_shim());
        CHECK_EQ(strlen(err), 0);
        expect_no_file("/dev/stdout.");
    }
}

static unsigned descriptors(void)
{
    unsigned n = 0;
    for (int fd = 0; fd < 1024; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

LAW_CHILD(writes_around)
{
    CUdeviceptr p;
    struct stat before, now;
    law_context();
    OK(cu.cuMemAlloc_v2(&p, MIB));
    unsigned open_before = descriptors();
    CHECK(write(STDOUT_FILENO, "before\n", 7) == 7);
    CHECK(fstat(STDOUT_FILENO, &before) == 0);
    if (under_shim()) {
        raise(SIGUSR1);
        WAIT_UNTIL(fstat(STDOUT_FILENO, &now) == 0 && now.st_size > before.st_size);
    }
    WAIT_UNTIL(descriptors() == open_before); /* what the flush had open is closed again */
    CHECK(write(STDOUT_FILENO, "after\n", 6) == 6);
}

LAW_CASE_SIM_ONCE(a_file_that_the_program_writes_too)
{
    char text[4096];
    in_a_new_folder();
    int file = make("file"), null = open("/dev/null", O_WRONLY | O_CLOEXEC);
    expect_end(start("writes_around", to(TRACE, "/dev/stdout"), file, null, -1));
    CHECK(slurp("file", text, sizeof(text)) > 0);
    CHECK(strncmp(text, under_shim() ? "before\nThread," : "before\nafter\n", 13) == 0);
    CHECK_EQ(count_of(text, ",0\nafter\n"), under_shim());
    CHECK_EQ(count_of(text, "allocate,"), under_shim());
    remove_folder();
}

LAW_CASE_SIM_ONCE(a_socket)
{
    EACH(o)
    {
        int pair[2], null = open("/dev/null", O_WRONLY | O_CLOEXEC);
        CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
        expect_end(start("leaks", to(o, "/dev/stdout"), pair[1], null, -1));
        close(pair[1]);
        size_t n = 0;
        for (ssize_t r; (r = read(pair[0], out + n, sizeof(out) - 1 - n)) > 0;)
            n += (size_t)r;
        out[n] = 0;
        CHECK_EQ(count_of(out, outputs[o].text), under_shim());
    }
}

LAW_CHILD(leaks_without_a_word)
{
    CUdeviceptr p;
    law_context();
    OK(cu.cuMemAlloc_v2(&p, MIB));
}

static void expect_said_in(const char *path, int o, const char *why)
{
    CHECK(slurp(path, err, sizeof(err)) >= 0);
    CHECK_EQ(count_of(err, outputs[o].failed), under_shim());
    CHECK_EQ(count_of(err, why), under_shim());
    CHECK_EQ(count_of(err, "LEAK SUMMARY"), under_shim() && o == REPORT);
}

LAW_CASE_SIM_ONCE(a_descriptor_that_is_closed)
{
    in_a_new_folder();
    EACH(o)
    {
        int said = make("said");
        expect_end(start("leaks_without_a_word", to(o, "/dev/stdout"), -1, said, -1));
        expect_said_in("said", o, "/dev/stdout (it was not open when the program started)");
        said = make("said");
        expect_end(start("leaks_without_a_word", to(o, "/dev/fd/77"), said, said, -1));
        expect_said_in("said", o, "/dev/fd/77 (it was not open when the program started)");
    }
    expect_no_file("/dev/stdout.");
    remove_folder();
}

/* One that the program was given: where its next words would stand, and only while it is that file. */
LAW_CASE_SIM_ONCE(a_descriptor_by_its_number)
{
    char text[4096], name[64];
    in_a_new_folder();
    EACH(o)
    for (int i = 0; i < 2; i++) {
        int log = make("log"), null = open("/dev/null", O_WRONLY | O_CLOEXEC);
        CHECK(write(log, "head\n", 5) == 5);
        snprintf(name, sizeof(name), i ? "/proc/self/fd/%d" : "/dev/fd/%d", log);
        expect_end(start("leaks_without_a_word", to(o, name), null, null, log));
        CHECK(slurp("log", text, sizeof(text)) >= 5);
        CHECK(strncmp(text, "head\n", 5) == 0);
        CHECK_EQ(count_of(text, outputs[o].text), under_shim());
        CHECK_EQ(lseek(log, 0, SEEK_CUR), strlen(text));
    }
    CHECK_EQ(shell("ls", text, sizeof(text)), 0);
    CHECK(strcmp(text, "log\n") == 0);
    remove_folder();
}

LAW_CHILD(makes_it_a_data_file)
{
    int fd = atoi(getenv("OUTPUTS_FD")), data = open("data", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK(dup2(data, fd) == fd);
    case_leaks_without_a_word();
}

LAW_CASE_SIM_ONCE(a_number_that_became_a_data_file)
{
    char name[64];
    in_a_new_folder();
    EACH(o)
    {
        int log = make("log"), said = make("said");
        snprintf(name, sizeof(name), "%d", log);
        setenv("OUTPUTS_FD", name, 1);
        snprintf(name, sizeof(name), "/dev/fd/%d", log);
        expect_end(start("makes_it_a_data_file", to(o, name), said, said, log));
        expect_said_in("said", o, " (it is not any more what it was when the program started)");
        CHECK_EQ(slurp("data", err, sizeof(err)), 0);
        int reading = open("log", O_RDONLY | O_CLOEXEC);
        said = make("said");
        snprintf(name, sizeof(name), "/dev/fd/%d", reading);
        expect_end(start("leaks_without_a_word", to(o, name), said, said, reading));
        expect_said_in("said", o, " (it is open for reading only)");
    }
    remove_folder();
}

/* As `| head -1` leaves it. */
LAW_CASE_SIM_ONCE(a_reader_that_has_gone)
{
    in_a_new_folder();
    EACH(o)
    {
        int ends[2], said = make("said");
        CHECK(pipe2(ends, O_CLOEXEC) == 0);
        close(ends[0]);
        expect_end(start("leaks_without_a_word", to(o, "/dev/stdout"), ends[1], said, -1));
        expect_said_in("said", o, "/dev/stdout (its reader has gone)");
    }
    remove_folder();
}

LAW_CASE_SIM_ONCE(a_pipe)
{
    char path[64];
    in_a_new_folder();
    snprintf(path, sizeof(path), "%s/pipe", folder);
    CHECK(mkfifo(path, 0600) == 0);
    EACH(o)
    {
        expect_trouble("leaks", o, path, "/pipe (nobody reads this pipe)");
        int reader = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
        CHECK_EQ(run_child_apart("leaks", to(o, path), out, err, sizeof(err)), 0);
        CHECK_EQ(strlen(err), 0);
        ssize_t n = read(reader, err, sizeof(err) - 1);
        err[n < 0 ? 0 : n] = 0;
        CHECK_EQ(count_of(err, outputs[o].text), under_shim());
        close(reader);
    }
    snprintf(path, sizeof(path), "%s/pipe.", folder);
    expect_no_file(path);
    remove_folder();
}

LAW_CASE_SIM_ONCE(devices)
{
    EACH(o)
    {
        CHECK_EQ(run_child_apart("leaks", to(o, "/dev/null"), out, err, sizeof(err)), 0);
        CHECK_EQ(strlen(err), 0);
        expect_trouble("leaks", o, "/dev/full", " /dev/full (no space is left there)");
    }
    expect_no_file("/dev/null.");
    expect_no_file("/dev/full.");
}

LAW_CASE_SIM_ONCE(nothing_is_made_in_dev)
{
    static const char *const names[] = {"/dev/outputs-test", "/dev/outputs-test.%p", "/tmp/../dev/outputs-test", "outputs-test",
                                        "/proc/self/root/dev/outputs-test", "/proc/outputs-test"};
    CHECK(chdir("/dev") == 0);
    shell("rm -f /dev/outputs-test*", out, sizeof(out)); /* of a shim that was broken on purpose */
    EACH(o)
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++)
        expect_trouble("leaks", o, names[i], " (it is not there, and is not made)");
    expect_no_file("/dev/outputs-test");
    if (access("/dev/shm", W_OK) != 0)
        return;
    char name[64], command[160];
    snprintf(name, sizeof(name), "/dev/shm/outputs-test-%d", (int)getpid());
    CHECK_EQ(run_child_apart("leaks", to(REPORT, name), out, err, sizeof(err)), 0);
    CHECK_EQ(strlen(err), 0);
    snprintf(command, sizeof(command), "cat %s.* 2>/dev/null; rm -f %s.*", name, name);
    CHECK_EQ(shell(command, err, sizeof(err)), 0);
    CHECK_EQ(count_of(err, "LEAK SUMMARY"), under_shim());
}

LAW_CASE_SIM_ONCE(places_that_take_no_file)
{
    char path[64];
    struct sockaddr_un name = {AF_UNIX, "socket"};
    in_a_new_folder();
    int s = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), file = make("file");
    CHECK(bind(s, (struct sockaddr *)&name, sizeof(name)) == 0 && file >= 0);
    snprintf(path, sizeof(path), "%s/here", folder);
    CHECK(symlink("here", "circle.%p") == 0 && mkdir(path, 0700) == 0);
    bool disk = mknod("disk", S_IFBLK | 0600, makedev(7, 200)) == 0;
    EACH(o)
    {
        expect_trouble("leaks", o, path, "/here (this is a folder: name a file in it)");
        expect_trouble("leaks", o, ".", " (this is a folder: name a file in it)");
        expect_trouble("leaks", o, "/nowhere/at/all/r", " (its folder is not there)");
        expect_trouble("leaks", o, "file/r", "/file/r."); /* and what it is: */
        CHECK(!under_shim() || strstr(err, " (what stands for its folder is none)"));
        expect_trouble("leaks", o, "socket", "/socket (a socket has to be open already)");
        if (disk)
            expect_trouble("leaks", o, "disk", "/disk (this is a disk: name a file on it)");
        expect_trouble("leaks", o, "/proc/sys/kernel/ostype", " /proc/sys/kernel/ostype (");
        CHECK(!under_shim() || strstr(err, "(there is no permission to write there)") || strstr(err, "it is read-only)"));
    }
    CHECK_EQ(shell("ls -A", out, sizeof(out)), 0);
    CHECK_EQ(count_of(out, "."), 1); /* nothing with a pid */
    remove_folder();
}

/* In a mount namespace of our own. */
static void on_a_disk(const char *size, unsigned long flags)
{
    in_a_new_folder();
    if (unshare(CLONE_NEWNS) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0)
        law_skip("no namespace of our own");
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 || mount("none", folder, "tmpfs", flags, size) != 0 ||
        chdir(folder) != 0)
        law_skip("no mounts here");
}

LAW_CASE_SIM_ONCE(a_read_only_place)
{
    on_a_disk("size=4k", MS_RDONLY);
    EACH(o) expect_trouble("leaks", o, "r", " (nothing can be written there: it is read-only)");
    CHECK(chdir("/") == 0 && umount(folder) == 0);
    remove_folder();
}

/* Enough for several writes by the thread that allocates. */
LAW_CHILD(counts_its_descriptors)
{
    law_context();
    cached_block(4096);
    unsigned before = descriptors();
    for (int i = 0; i < 3000; i++)
        cached_block(4096);
    CHECK_EQ(descriptors(), before);
}

LAW_CASE_SIM_ONCE(no_descriptor_stays_open)
{
    static const char *const names[] = {"t", "/dev/null", "/dev/full", "/nowhere/t"};
    in_a_new_folder();
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++)
        if (run_child_apart("counts_its_descriptors", to(TRACE, names[i]), out, err, sizeof(err)) != 0)
            law_fail(__FILE__, __LINE__, "%s: %s%s", names[i], out, err);
    remove_folder();
}

enum { PAIRS = 200 };
LAW_CHILD(traces_some_kilobytes)
{
    law_context();
    for (int i = 0; i < PAIRS; i++)
        cached_block(4096);
    printf("%d\n", (int)getpid());
}

LAW_CASE_SIM_ONCE(a_disk_that_fills)
{
    on_a_disk("size=4k", 0);
    expect_trouble("traces_some_kilobytes", TRACE, "t", " (no space is left there): it ends here, within a line\n");
    expect_trouble("leaks", REPORT, "r", " (no space is left there); it follows here\n");
    CHECK(chdir("/") == 0 && umount(folder) == 0);
    remove_folder();
}

/* The signal that the kernel sends for it is not for the program. */
LAW_CHILD(leaks_where_files_stay_small)
{
    const struct rlimit limit = {100, 100};
    CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
    case_traces_some_kilobytes();
}

LAW_CASE_SIM_ONCE(files_that_must_stay_small)
{
    in_a_new_folder();
    expect_trouble("leaks_where_files_stay_small", REPORT, "r",
                   " (no file may grow so large: ulimit -f), only its beginning is there; it follows here\n");
    expect_trouble("leaks_where_files_stay_small", TRACE, "t",
                   " (no file may grow so large: ulimit -f): it ends here, within a line\n");
    CHECK_EQ(shell("cat r.* t.* 2>/dev/null | wc -c", out, sizeof(out)), 0);
    CHECK_EQ(atoi(out), under_shim() ? 200 : 0);
    remove_folder();
}

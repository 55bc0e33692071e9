/*
 * Law 6: in a program that never initialises CUDA the shim starts no thread, opens nothing, loads nothing, says
 * nothing. HAMi 27 (undefined cu* broke every program of a container), 1777 (stdout); torch_memory_saver 50 and 108
 * (NEEDED).
 */
#include <dlfcn.h>
#include <link.h>
#include <string.h>

#include "law.h"
#include "shim_elf.h"
#include "sim.h"
#include "world.h"

enum { CAP = 1 << 16 };

/* Runs the command with or without the shim, with what an unaware user may have set, and gives all that it wrote. */
static int run(const char *command, bool with_shim, char *out)
{
    static char line[8192];
    char preload[4096];
    const char *shim = shim_path();
    snprintf(preload, sizeof(preload), "%s", with_shim && shim ? shim : "");
    snprintf(line, sizeof(line),
             "e=$(mktemp); unset LD_PRELOAD; export VRAMSHIM_VERBOSE=1 VRAMSHIM_WAST=3 VRAMSHIM_CACHE=perhaps; "
             "LD_PRELOAD='%s' sh -c '{ %s ; } 2>$0; echo status $?' $e; sed s/^/stderr:/ $e; rm -f $e",
             preload, command);
    return shell(line, out, CAP);
}

static void same(const char *command)
{
    static char native[CAP], here[CAP];
    int a = run(command, false, native), b = run(command, true, here);
    CHECK(strstr(native, "status ")); /* it ran at all */
    if (a != b || strcmp(native, here) != 0)
        law_fail(__FILE__, __LINE__, "%s: natively %d\n%s\nbut with the shim %d\n%s", command, a, native, b, here);
}

LAW_CASE_ONCE(shells_and_tools)
{
    same("bash -c true");
    same("bash -c false");
    same("bash -c \"exit 7\"");
    same("bash -c \"kill -9 \\$\\$\"");
    same("ls /");
    same("ls /no/such/file");
    same("cat /no/such/file");
    same("echo one; echo two >&2");
    same("env -i /bin/true");
    same("head -c 100000 /dev/zero | wc -c");
    same("yes | head -1");
    same("(echo a; echo b) | sort -r | tr a-z A-Z");
}

LAW_CASE_ONCE(the_loader_and_the_compiler)
{
    same("ldd /bin/sh | grep -v libvramshim | sed s/0x[0-9a-f]*// | sort");
    same("command -v gcc >/dev/null && gcc --version");
    same("command -v gcc >/dev/null && echo \"int main(void){return 0;}\" | gcc -x c -o /dev/null - && echo compiled");
}

LAW_CASE_ONCE(python)
{
    static char python[4096], command[2 * sizeof(python)];
    /* The interpreter itself: what stands in front of it (pyenv) is a program of its own. */
    if (shell("python3 -c 'import sys; print(sys.executable)'", python, sizeof(python)) != 0)
        law_skip("there is no Python");
    python[strcspn(python, "\n")] = 0;
    snprintf(command, sizeof(command), "%s -c pass", python);
    same(command);
    snprintf(command, sizeof(command),
             "%s -c \"import subprocess, threading, ctypes, signal, os; print(threading.active_count(), "
             "subprocess.run([str(b\\\"true\\\", \\\"ascii\\\")]).returncode, signal.getsignal(signal.SIGTERM), "
             "len(os.listdir(\\\"/proc/self/fd\\\")), len(os.listdir(\\\"/proc/self/task\\\")))\"",
             python);
    same(command);
}

/* The one thread and the descriptors that a process is born with. */
LAW_CASE_ONCE(no_thread_and_no_descriptor)
{
    same("ls /proc/self/task | wc -l");
    same("ls /proc/self/fd | wc -l");
    /* The pipe is not the shell's own: it would be among what is counted for a moment. */
    same("bash -c \"ls /proc/\\$\\$/fd /proc/\\$\\$/task; true\" | wc -l");
}

/* Only the shim itself is there that would not be there without it. */
LAW_CASE_ONCE(no_library)
{
    same("grep -o \"/.*[.]so.*\" /proc/self/maps | grep -v libvramshim | sort -u");
}

/* Whatever a process does at its start, the loader's work on the shim left out, it does natively too. */
LAW_CASE_ONCE(no_file_is_opened)
{
    static char out[CAP];
    if (shell("strace -f -o /dev/null true 2>&1 && echo traced", out, CAP) != 0 || !strstr(out, "traced"))
        law_skip("strace does not work here");
    same("strace -e "
         "trace=openat,open,creat,socket,connect,pipe,pipe2,eventfd2,memfd_create,clone,clone3,fork,vfork,write "
         "/bin/true 2>&1 | grep -v libvramshim | sed s/0x[0-9a-f]*//g");
}

/* The process of this case: what it has before its first call of the driver. Lookups and loading libcuda are no use. */
LAW_CHILD(loaded_but_not_used)
{
    char path[64], target[256];
    unsigned fds = 0;
    CHECK_EQ(thread_count(), 1);
    for (int fd = 3; fd < 64; fd++) {
        snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
        ssize_t n = readlink(path, target, sizeof(target) - 1);
        if (n < 0)
            continue;
        target[n] = 0;
        target[strcspn(target, "[")] = 0; /* a pipe's number is new each time */
        fds++;
        fprintf(stderr, "%d is %s\n", fd, target);
    }
    fprintf(stderr, "%u descriptors\n", fds);
}

LAW_CASE(loading_the_driver_is_not_using_it)
{
    static char native[CAP], here[CAP];
    CHECK_EQ(law_run_child("loaded_but_not_used", ENV("LD_PRELOAD=", "VRAMSHIM_VERBOSE=1"), native, CAP), 0);
    CHECK_EQ(law_run_child("loaded_but_not_used", ENV("VRAMSHIM_VERBOSE=1", "VRAMSHIM_NO_SUCH=1"), here, CAP), 0);
    /* Descriptors inherited from whoever runs the tests are the same ones. */
    if (strcmp(native, here) != 0)
        law_fail(__FILE__, __LINE__, "natively\n%s\nbut here\n%s", native, here);
}

static bool is_libc(const char *library)
{
    return strcmp(library, "libc.so.6") == 0 || strncmp(library, "ld-linux", 8) == 0 ||
           strcmp(library, "libpthread.so.0") == 0 || strcmp(library, "libdl.so.2") == 0; /* parts of it before 2.34 */
}

LAW_CASE_ONCE(it_depends_on_libc_alone)
{
    struct shim_elf e;
    ElfW(Xword) name, flags = 0;
    if (!shim_elf_open(&e))
        return;
    for (size_t i = 0; shim_elf_dynamic(&e, DT_NEEDED, i, &name); i++)
        if (!is_libc(e.strings + name))
            law_fail(__FILE__, __LINE__, "needs %s", e.strings + name);
    for (size_t i = 1; i < e.symbol_count; i++) {
        const char *symbol = shim_elf_name(&e, &e.symbols[i]);
        if (shim_elf_is_import(&e.symbols[i]) && strncmp(symbol, "cu", 2) == 0)
            law_fail(__FILE__, __LINE__, "imports %s", symbol);
    }
    CHECK(shim_elf_dynamic(&e, DT_FLAGS_1, 0, &flags) && (flags & DF_1_NODELETE));
}

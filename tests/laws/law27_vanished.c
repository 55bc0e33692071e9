/*
 * Law 27: a main thread that ends by the plain system call, as sandboxes and runtimes of other languages do it. The process ends with
 * its last thread, and ours is none of the program's; its status is the main thread's; no exit function runs.
 */
#include <pthread.h>
#include <sys/syscall.h>

#include "law.h"
#include "sim.h"
#include "world.h"

enum { MIB = 1 << 20, STATUS = 3 };

static char out[65536], err[65536];

static void never(void) { printf("an exit function\n"); }

static void use_memory(void)
{
    CUdeviceptr p;
    law_context();
    OK(cu.cuMemAlloc_v2(&p, MIB));
    atexit(never);
}

LAW_CHILD(vanishes)
{
    use_memory();
    syscall(SYS_exit, STATUS);
}

static void *go_on(void *unused)
{
    for (int i = 0; i < 200; i++)
        nap();
    write(STDOUT_FILENO, "the last thread ends\n", 21);
    syscall(SYS_exit, STATUS); /* which one's status counts depends on the kernel */
    return unused;
}

LAW_CHILD(vanishes_before_another)
{
    pthread_t thread;
    use_memory();
    CHECK(pthread_create(&thread, NULL, go_on, NULL) == 0);
    syscall(SYS_exit, STATUS);
}

static void ends(const char *child, const char *says)
{
    static const char *const decay[] = {"VRAMSHIM_DECAY=60", "VRAMSHIM_DECAY=none"};
    for (int i = 0; i < 2; i++) {
        int status = run_child_apart(child, ENV(decay[i], "VRAMSHIM_REPORT=stderr"), out, err, sizeof(out));
        CHECK(WIFEXITED(status));
        CHECK_EQ(WEXITSTATUS(status), STATUS);
        CHECK(strcmp(out, says) == 0);
        CHECK_EQ(count_of(err, "1.0 MiB in 1 block never freed\n"), under_shim());
    }
}

LAW_CASE_SIM_ONCE(the_last_thread) { ends("vanishes", ""); }
LAW_CASE_SIM_ONCE(before_the_last_thread) { ends("vanishes_before_another", "the last thread ends\n"); }

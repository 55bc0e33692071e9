/* observe/report.h: written once, where VRAMSHIM_REPORT says, with the figures of the books. */
#include "observe/report.h"

#include <criterion/criterion.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/elf.h"
#include "base/lock.h"
#include "base/proc.h"
#include "heap/heap.h"
#include "heard.h"
#include "steps.h"

static void says(const char *text) { cr_assert(strstr(heard(), text), "\"%s\" is not in: %s", text, heard()); }
static void says_not(const char *text) { cr_assert_null(strstr(heard(), text), "\"%s\" is in: %s", text, heard()); }

Test(report, nothing_when_no_memory_was_used)
{
    FAKE_START();
    listen_to_it();
    cr_assert_not(vram_report_is_due());
    vram_report_write();
    cr_assert_str_empty(heard());
    get(4 * MiB);
    cr_assert(vram_report_is_due());
    vram_report_write();
    says("LEAK SUMMARY");
}

Test(report, once)
{
    FAKE_START();
    listen_to_it();
    get(4 * MiB);
    errno = 1234;
    vram_report_write();
    cr_assert_eq(errno, 1234);
    cr_assert_not(vram_report_is_due());
    vram_report_write();
    cr_assert_eq(times_heard("LEAK SUMMARY"), 1);
}

Test(report, none_when_none_is_wanted)
{
    FAKE_START("VRAMSHIM_REPORT=none");
    listen_to_it();
    get(4 * MiB);
    cr_assert_not(vram_report_is_due());
    vram_report_write();
    cr_assert_str_empty(heard());
}

Test(report, none_from_a_process_that_is_not_ours)
{
    FAKE_START();
    listen_to_it();
    get(4 * MiB);
    pid_t pid = fork();
    if (pid == 0) {
        bool due = vram_report_is_due();
        vram_report_write();
        _exit(due);
    }
    int status = -1;
    waitpid(pid, &status, 0);
    cr_assert_eq(status, 0);
    cr_assert_str_empty(heard());
}

Test(report, a_forked_child_writes_its_own)
{
    FAKE_START();
    listen_to_it();
    get(4 * MiB);
    vram_report_write();
    pid_t pid = fork();
    if (pid == 0) {
        vram_heap_forget();
        vram_report_forget();
        vram_proc_record();
        if (vram_report_is_due())
            _exit(1); /* it has used nothing itself */
        get(6 * MiB);
        vram_report_write();
        _exit(0);
    }
    int status = -1;
    waitpid(pid, &status, 0);
    cr_assert_eq(status, 0);
    char expected[64];
    snprintf(expected, sizeof(expected), "(pid %d): 6.0 MiB in 1 block never freed", (int)pid);
    says(expected);
}

Test(report, what_was_never_freed_largest_first)
{
    char expected[160];
    const unsigned long long offset = (uintptr_t)says - vram_elf_containing((uintptr_t)says)->l_addr;
    const char *name = program_invocation_short_name; /* Criterion runs each test in a process of another name */
    const int pid = (int)getpid();
    FAKE_START();
    listen_to_it();
    for (size_t i = 1; i <= 7; i++)
        get(i * 2 * MiB);
    CUdeviceptr p;
    cr_assert_eq(vram_heap_alloc(&p, 20 * MiB, (uintptr_t)says), CUDA_SUCCESS);
    vram_report_write();
    snprintf(expected, sizeof(expected), "vramshim: LEAK SUMMARY of %s (pid %d): 76.0 MiB in 8 blocks never freed\n",
             name, pid);
    says(expected);
    says("  device 0\n    never freed             76.0 MiB in 8 blocks\n");
    snprintf(expected, sizeof(expected), "      20.0 MiB at 0x%llx, ", p);
    says(expected);
    snprintf(expected, sizeof(expected), " old, thread %d, called from %s+0x%llx\n", pid, name, offset);
    says(expected);
    cr_assert_lt(strstr(heard(), "      20.0 MiB at"), strstr(heard(), "      14.0 MiB at"));
    cr_assert_lt(strstr(heard(), "      14.0 MiB at"), strstr(heard(), "      8.0 MiB at"));
    says_not("      6.0 MiB at");
    says("      and 3 smaller\n");
    says_not("device 1");
}

/* "Smaller" is said of what is. */
Test(report, what_is_not_shown_may_be_as_large)
{
    FAKE_START();
    listen_to_it();
    for (size_t i = 0; i < 9; i++)
        get(2 * MiB);
    fake_use(&fake_other);
    for (size_t i = 0; i < 9; i++)
        get((i < 7 ? 4 : 2) * MiB);
    vram_report_write();
    cr_assert_eq(times_heard("      and 4 more\n"), 2);
    says_not("smaller");
}

/* The program's name is whoever's started it. */
Test(report, a_name_makes_no_line)
{
    FAKE_START();
    listen_to_it();
    static char name[] = "a\nvramshim: LEAK SUMMARY of b\x1b[2J";
    program_invocation_short_name = name;
    CUdeviceptr p;
    cr_assert_eq(vram_heap_alloc(&p, 2 * MiB, (uintptr_t)says), CUDA_SUCCESS);
    vram_report_write();
    cr_assert_eq(times_heard("\nvramshim"), 0);
    cr_assert_eq(times_heard("of a\\nvramshim: LEAK SUMMARY of b\\x1b[2J (pid"), 1);
    cr_assert_eq(times_heard("from a\\nvramshim: LEAK SUMMARY of b\\x1b[2J+0x"), 1);
}

Test(report, what_the_cache_did)
{
    FAKE_START();
    listen_to_it();
    CUdeviceptr p = get(18 * MiB), q = get(4 * MiB), r = get(6 * MiB);
    vram_heap_identity_left(r);
    give_back(r); /* to the driver */
    give_back(p);
    for (int i = 0; i < 3; i++) {
        p = get(16 * MiB); /* in what costs 2 MiB more */
        give_back(p);
    }
    give_back(q);
    vram_report_write();
    says("nothing leaked\n");
    says("    never freed             0 B in 0 blocks\n");
    says("    peak                    28.0 MiB in use by the program, 28.0 MiB held from the driver\n");
    says("    kept at exit            22.0 MiB in 2 blocks\n");
    says("    served from the cache   3 of 6 allocations (50.0%)\n");
    says("    driver calls saved      8 of 12\n");
    says("    peak of larger fits     2.0 MiB beyond what fresh blocks would have taken\n");
    says_not("out of memory");
    says_not("double frees");
    says_not("ended with its context");
    says_not("figures may be off");
}

Test(report, without_a_cache_it_says_so)
{
    FAKE_START("VRAMSHIM_CACHE=0");
    listen_to_it();
    give_back(get(4 * MiB));
    vram_report_write();
    says("    cache                   off (VRAMSHIM_CACHE=0); 1 allocations, 1 frees\n");
    says_not("kept at exit");
}

Test(report, each_device_that_was_used)
{
    FAKE_START();
    listen_to_it();
    get(4 * MiB);
    fake_use(&fake_other);
    get(6 * MiB);
    vram_report_write();
    says(": 10.0 MiB in 2 blocks never freed\n");
    says("  device 0\n    never freed             4.0 MiB in 1 block\n");
    says("  device 1\n    never freed             6.0 MiB in 1 block\n");
    cr_assert_gt(strstr(heard(), "      6.0 MiB at"), strstr(heard(), "  device 1"));
    says_not("device 2");
}

Test(report, what_the_program_did_wrong)
{
    char expected[160];
    CUdeviceptr p = 0, q;
    FAKE_START();
    listen_to_it();
    p = get(4 * MiB);
    cr_assert_eq(vram_heap_free(p, (uintptr_t)says), CUDA_SUCCESS);
    vram_heap_free(p, 0);
    vram_heap_free(p, 0);
    give_back(get(64 * MiB));
    get(120 * (size_t)MiB);
    for (int i = 0; i < 2; i++)
        cr_assert_eq(vram_heap_alloc(&q, 120 * (size_t)MiB, 0), CUDA_ERROR_OUT_OF_MEMORY);
    struct vram_life *life = vram_life_end_begin(&fake_a);
    fake_end(&fake_a);
    vram_life_end(life, true);
    vram_report_write();
    says("  double frees: 2, each refused; the block stayed intact\n");
    snprintf(expected, sizeof(expected), "    0x%llx (4.0 MiB): freed by thread %d, called from %s+0x", p,
             (int)getpid(), program_invocation_short_name);
    says(expected);
    snprintf(expected, sizeof(expected), "; again by thread %d\n", (int)getpid());
    says(expected);
    says("    out of memory           1 rescued, 2 failed\n");
    says("    ended with its context  120.0 MiB in 1 block\n");
    says("nothing leaked\n");
}

/* Law 26: each process of a job has a file of its own. */
Test(report, a_file_carries_the_pid)
{
    char dir[] = "/tmp/vramshim-report-XXXXXX", option[64], path[64], text[512] = "";
    cr_assert_not_null(mkdtemp(dir));
    snprintf(option, sizeof(option), "VRAMSHIM_REPORT=%s/r", dir);
    snprintf(path, sizeof(path), "%s/r.%d", dir, (int)getpid());
    FAKE_START(option);
    listen_to_it();
    get(4 * MiB);
    vram_report_write();
    int fd = open(path, O_RDONLY);
    cr_assert_geq(fd, 0);
    cr_assert_gt(read(fd, text, sizeof(text) - 1), 0);
    cr_assert_not_null(strstr(text, "LEAK SUMMARY"));
    cr_assert_str_empty(heard());
    unlink(path);
    rmdir(dir);
}

Test(report, a_file_that_cannot_be_written_is_told_and_the_report_not_lost)
{
    FAKE_START("VRAMSHIM_REPORT=/no/such/folder/r.%p");
    listen_to_it();
    get(4 * MiB);
    vram_report_write();
    says("vramshim: cannot write the report to /no/such/folder/r.");
    says("; it follows here\nvramshim: LEAK SUMMARY");
}

enum { WRITERS = 4 };
static unsigned seen[WRITERS];

static void *write_and_look(void *mine)
{
    vram_report_write();
    *(unsigned *)mine = vram_report_is_due();
    return NULL;
}

/* Whoever returns from it ends the process: nobody may before the report is complete. */
Test(report, threads_that_leave_together_wait_for_the_one_that_writes, .timeout = 60)
{
    pthread_t threads[WRITERS];
    FAKE_START();
    listen_to_it();
    get(4 * MiB);
    vram_lock(VRAM_RANK_HEAP); /* which the writer wants, but not for ever */
    for (int i = 0; i < WRITERS; i++)
        pthread_create(&threads[i], NULL, write_and_look, &seen[i]);
    for (int i = 0; i < WRITERS; i++)
        pthread_join(threads[i], NULL);
    vram_unlock(VRAM_RANK_HEAP);
    for (int i = 0; i < WRITERS; i++)
        cr_assert_eq(seen[i], 0);
    cr_assert_eq(times_heard("LEAK SUMMARY"), 1);
    says("  (a thread was in the middle of an allocation: figures may be off by it)\n");
}

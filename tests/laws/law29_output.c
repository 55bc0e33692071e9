/*
 * Law 29: standard output is the program's alone, and there is silence until there is something to say. HAMi 1777.
 */
#include "law.h"
#include "sim.h"
#include "world.h"

enum { MIB = 1 << 20 };

static char out[65536], err[65536];

/* Everything that the shim has words for: options, a flush, a double free, a rescue, leaks, the report. */
LAW_CHILD(gives_cause_to_talk)
{
    CUdeviceptr p;
    law_context();
    printf("first\n");
    fflush(stdout);
    p = cached_block(40 * MIB);
    CHECK_EQ(cu.cuMemFree_v2(p), CUDA_ERROR_INVALID_VALUE);
    OK(cu.cuMemAlloc_v2(&p, 50 * MIB));
    OK(cu.cuMemFree_v2(p));
    if (under_shim()) {
        unsigned long before = driver_calls("cuMemFree_v2");
        raise(SIGUSR1);
        WAIT_UNTIL(driver_calls("cuMemFree_v2") > before);
    }
    for (int i = 0; i < 20; i++)
        nap(); /* for the line about it */
    OK(cu.cuMemAlloc_v2(&p, MIB));
    printf("last\n");
}

LAW_CASE_SIM_ONCE(standard_output_is_the_programs)
{
    CHECK_EQ(
        run_child_apart("gives_cause_to_talk",
                        ENV("SIMCUDA_CAPACITY=64M", "VRAMSHIM_VERBOSE=1", "VRAMSHIM_WASTE=lots", "VRAMSHIM_CASH=1"),
                        out, err, sizeof(out)),
        0);
    CHECK(strcmp(out, "first\nlast\n") == 0);
    if (under_shim()) {
        static const char *const said[] = {"did you mean VRAMSHIM_CACHE?",
                                           "VRAMSHIM_WASTE=lots was ignored",
                                           "VRAMSHIM_CACHE=1",
                                           "out of memory for 50.0 MiB",
                                           "flush (SIGUSR1): gave",
                                           "double frees: 1",
                                           "LEAK SUMMARY"};
        for (size_t i = 0; i < sizeof(said) / sizeof(*said); i++)
            if (!strstr(err, said[i]))
                law_fail(__FILE__, __LINE__, "nothing about \"%s\" in: %s", said[i], err);
    } else {
        CHECK_EQ(strlen(err), 0);
    }
}

LAW_CASE_SIM_ONCE(none_means_none)
{
    CHECK_EQ(run_child_apart("gives_cause_to_talk", ENV("VRAMSHIM_REPORT=none"), out, err, sizeof(out)), 0);
    CHECK(strcmp(out, "first\nlast\n") == 0);
    CHECK(!strstr(err, "LEAK SUMMARY"));
}

/* The same in a file: standard error has what is said meanwhile, the file the report, standard output nothing of
 * either. */
LAW_CASE_SIM_ONCE(into_a_file)
{
    char directory[] = "/tmp/law29.XXXXXX", variable[64], command[128];
    CHECK(mkdtemp(directory));
    snprintf(variable, sizeof(variable), "VRAMSHIM_REPORT=%s/r", directory);
    CHECK_EQ(run_child_apart("gives_cause_to_talk", ENV(variable), out, err, sizeof(out)), 0);
    CHECK(strcmp(out, "first\nlast\n") == 0);
    CHECK(!strstr(err, "LEAK SUMMARY"));
    snprintf(command, sizeof(command), "cat %s/* 2>/dev/null; rm -r %s", directory, directory);
    shell(command, out, sizeof(out));
    CHECK_EQ(count_of(out, "LEAK SUMMARY"), under_shim());
}

/* A program that uses CUDA and gives no cause: nothing until its end. */
LAW_CHILD(gives_no_cause)
{
    law_context();
    for (int i = 0; i < 10; i++)
        cached_block(4 * MIB);
    fprintf(stderr, "the end\n");
}

LAW_CASE_SIM_ONCE(silent_until_the_end)
{
    CHECK_EQ(run_child_apart("gives_no_cause", NULL, out, err, sizeof(out)), 0);
    CHECK_EQ(strlen(out), 0);
    CHECK(strncmp(err, "the end\n", 8) == 0);
    if (!under_shim())
        CHECK_EQ(strlen(err), 8);
    CHECK_EQ(run_child_apart("gives_no_cause", ENV("VRAMSHIM_REPORT=none"), out, err, sizeof(out)), 0);
    CHECK(strcmp(err, "the end\n") == 0);
}

/* A program that does not: nothing at all, not even of what is wrong with the options. */
LAW_CASE_ONCE(silent_without_cuda)
{
    CHECK_EQ(shell("VRAMSHIM_VERBOSE=1 VRAMSHIM_WASTE=lots VRAMSHIM_CASH=1 sh -c 'echo one; ls /nowhere' 2>&1 | sed "
                   "s/.*ls:/ls:/",
                   out, sizeof(out)),
             0);
    CHECK_EQ(count_of(out, "\n"), 2);
    CHECK_EQ(count_of(out, "vramshim"), 0);
    CHECK_EQ(count_of(out, "VRAMSHIM"), 0);
}

LAW_CHILD(initialises_only) { law_context(); }

LAW_CASE_SIM_ONCE(silent_without_an_allocation)
{
    CHECK_EQ(
        run_child_apart("initialises_only", ENV("VRAMSHIM_VERBOSE=1", "VRAMSHIM_WASTE=lots"), out, err, sizeof(out)),
        0);
    CHECK_EQ(strlen(out), 0);
    CHECK_EQ(strlen(err), 0);
}

/* Another program's output, compared: with the shim and without. */
LAW_CASE_SIM_ONCE(the_same_output)
{
    static char without[4096];
    if (!getenv("VRAM_LOOP"))
        law_skip("VRAM_LOOP names no program");
    CHECK_EQ(shell("env -u LD_PRELOAD \"$VRAM_LOOP\" --quiet --iterations 50 --blocks 4 --size 4M --forget", without,
                   sizeof(without)),
             0);
    CHECK_EQ(
        shell("\"$VRAM_LOOP\" --quiet --iterations 50 --blocks 4 --size 4M --forget 2>/dev/null", out, sizeof(out)), 0);
    CHECK(strcmp(out, without) == 0);
    CHECK(strstr(out, "checksum "));
}

/* Complaints: one line each, once, and the default stays. */
LAW_CASE_SIM_ONCE(one_line_for_a_wrong_option)
{
    CHECK_EQ(
        run_child_apart("gives_no_cause", ENV("VRAMSHIM_CACHE=perhaps", "VRAMSHIM_REPORT=none"), out, err, sizeof(out)),
        0);
    if (under_shim()) {
        CHECK_EQ(count_of(err, "\n"), 2);
        CHECK_EQ(count_of(err, "VRAMSHIM_CACHE=perhaps"), 1);
    }
}

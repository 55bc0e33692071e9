/*
 * What options take, through the environment and through the question that vramctl asks (vramshim/vramshim.h): one line for
 * each wrong value or name, which says all of it and can forge nothing, the default stays, and the program ends as ever.
 */
#include <dlfcn.h>
#include <sys/stat.h>

#include "law.h"
#include "sim.h"
#include "vramshim/vramshim.h"
#include "world.h"

enum type { BOOL, BOUND, KEEP, PERCENT, FACTOR, SECONDS, FREE, SIGNAL, OUTPUT };

static const struct option {
    const char *name, *initial;
    enum type type;
} options[] = {
#define VRAM_OPTION(NAME, field, TYPE, initial, help) {#NAME, initial, TYPE},
#include "vramshim/options.def"
#undef VRAM_OPTION
};
#define COUNT(a) (sizeof(a) / sizeof((a)[0]))
enum { LONG = 10000, ENDS_WITH = 5 };

static char text[1 << 16], baseline[1 << 16], long_value[LONG + 1];

static __typeof__(&vramshim_check_option) check(void)
{
    return (__typeof__(&vramshim_check_option))dlsym(RTLD_DEFAULT, "vramshim_check_option");
}

LAW_CHILD(ends_with_5)
{
    CUdeviceptr p;
    law_context();
    OK(cu.cuMemAlloc_v2(&p, 4096));
    exit(ENDS_WITH);
}

/* What a program says with this in its environment. */
static const char *said_with(const char *const *env)
{
    int status = law_run_child("ends_with_5", env, text, sizeof(text));
    CHECK(WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), ENDS_WITH);
    if (!under_shim())
        CHECK_EQ(strlen(text), 0);
    return text;
}

/* What a shim that is broken on purpose takes for the name of a file is made here. */
static char folder[] = "/tmp/options.XXXXXX";
static void in_a_new_folder(void) { CHECK(mkdtemp(folder) && chdir(folder) == 0); }
static void remove_folder(void)
{
    char command[64];
    snprintf(command, sizeof(command), "rm -rf %s", folder);
    shell(command, text, sizeof(text));
}

/* The line of VRAMSHIM_VERBOSE about an option. */
static const char *value_said(const char *said, const char *name, char *ret_line, size_t cap)
{
    char begin[64];
    snprintf(begin, sizeof(begin), "vramshim: VRAMSHIM_%s=", name);
    for (const char *at = said; (at = strstr(at, begin)); at += strlen(begin)) {
        size_t n = strcspn(at, "\n");
        if (n + 1 > cap || memmem(at, n, " was ignored", 12))
            continue;
        memcpy(ret_line, at, n);
        ret_line[n] = 0;
        return ret_line;
    }
    return strcpy(ret_line, "");
}

/* No control characters, no bytes that are no text, and no line but ours. */
static void expect_no_forgery(const char *said)
{
    for (const unsigned char *c = (const unsigned char *)said; *c; c++)
        if ((*c < 0x20 && *c != '\n') || *c == 0x7f || *c >= 0xf8)
            law_fail(__FILE__, __LINE__, "a byte 0x%02x in: %s", *c, said);
    CHECK(!strstr(said, "\nvramshim: forged"));
}

static void expect_refused(const struct option *o, const char *value)
{
    char why[1024] = "", begin[64], line[700], was[700];
    if (!check()(o->name, value, NULL, 0) || check()(o->name, value, why, sizeof(why)) != -EINVAL)
        law_fail(__FILE__, __LINE__, "VRAMSHIM_%s=%.100s is taken", o->name, value);
    snprintf(begin, sizeof(begin), "VRAMSHIM_%s=", o->name);
    CHECK(strncmp(why, begin, strlen(begin)) == 0);
    CHECK(strstr(why, " is not taken: ") && strstr(why, "it takes "));
    CHECK(strlen(why) < 600);
    expect_no_forgery(why);
    if (strlen(value) > 1000)
        CHECK(strstr(why, "... is not taken"));

    static char variable[LONG + 64];
    snprintf(variable, sizeof(variable), "VRAMSHIM_%s=%s", o->name, value);
    const char *said = said_with(ENV("VRAMSHIM_VERBOSE=1", variable));
    CHECK_EQ(count_of(said, " was ignored"), 1);
    snprintf(line, sizeof(line), "%s; using %s\n", strstr(why, " is not taken: ") + strlen(" is not taken"), o->initial);
    CHECK(strstr(said, line));
    if (strcmp(o->name, "VERBOSE") != 0)
        CHECK(strcmp(value_said(said, o->name, line, sizeof(line)), value_said(baseline, o->name, was, sizeof(was))) == 0);
}

/* Every option with what no option takes, and with what only a file may be called. */
LAW_CASE_SIM_ONCE(every_option_with_every_wrong_value)
{
    static const char *const for_none[] = {"", " ", " 1", "1 ", "\t", "none ", "\n1", long_value};
    static const char *const for_files[] = {
        "99999999999999999999", "18446744073709551616", "-1",   "+1",  "1e9",  "0x10", "0x",   "1.",      ".5",  "1.2.3", "1,5",
        "K",                    "%%",                   "B",    "KiB", "s",    "x",    "null", "unbound", "\xc3\xa9", "\xff\xfe",
        "\xd9\xa1", "1\xc2\xa0", "1_000", "sync,fenced", "USR", "1\x1b[31m", "1\nvramshim: forged"};
    static const char *const for_parts[] = {"1.5", "1.0", "0.5B", "20000000T"}; /* of a byte; and more than there are */
    if (!under_shim()) {
        said_with(ENV("VRAMSHIM_CACHE_MAX=-1"));
        return;
    }
    in_a_new_folder();
    memset(long_value, '7', LONG);
    strcpy(baseline, said_with(ENV("VRAMSHIM_VERBOSE=1")));
    for (size_t i = 0; i < COUNT(options); i++) {
        char line[700];
        CHECK(*value_said(baseline, options[i].name, line, sizeof(line)));
        for (size_t j = 0; j < COUNT(for_none); j++)
            expect_refused(&options[i], for_none[j]);
        for (size_t j = 0; options[i].type != OUTPUT && j < COUNT(for_files); j++)
            expect_refused(&options[i], for_files[j]);
        if (options[i].type == BOOL || options[i].type == SIGNAL || options[i].type == FREE)
            expect_refused(&options[i], "1.5");
        for (size_t j = 0; (options[i].type == BOUND || options[i].type == KEEP) && j < COUNT(for_parts); j++)
            expect_refused(&options[i], for_parts[j]);
        CHECK_EQ(check()(options[i].name, options[i].initial, NULL, 0), 0);
    }
    remove_folder();
}

/* One word, one meaning, and in any case: what each option makes of it, NULL for nothing. */
LAW_CASE_SIM_ONCE(one_word_has_one_meaning)
{
    static const struct {
        const char *name, *none, *unlimited;
    } expected[] = {
        {"CACHE", NULL, NULL},         {"CACHE_MAX", NULL, "unlimited"},       {"HOST_CACHE", "none", "unlimited"},
        {"FREE", NULL, NULL},          {"VIRTUAL_CACHE", "none", "unlimited"}, {"WASTE", NULL, NULL},
        {"SLACK", NULL, "unlimited"},  {"DECAY", "none", NULL},                {"SIGNAL", "none", NULL},
        {"DRAIN", NULL, NULL},         {"IDLE_DRAIN", "none", NULL},           {"VERBOSE", NULL, NULL},
        {"REPORT", "none", "-"},       {"TRACE", "none", "-"}};
    CHECK_EQ(COUNT(expected), COUNT(options));
    in_a_new_folder();
    for (size_t i = 0; i < COUNT(expected) && under_shim(); i++) {
        const char *const words[][3] = {{"none", "NONE", "None"}, {"unlimited", "UNLIMITED", "Unlimited"}};
        const char *const means[] = {expected[i].none, expected[i].unlimited};
        for (int w = 0; w < 2; w++) {
            for (int c = 0; c < 3; c++) {
                char variable[64], begin[64], line[700];
                int r = check()(expected[i].name, words[w][c], line, sizeof(line));
                CHECK_EQ(r, means[w] ? 0 : -EINVAL);
                if (!means[w] || *means[w] == '-')
                    continue; /* a file of that name is nothing to make here */
                snprintf(variable, sizeof(variable), "VRAMSHIM_%s=%s", expected[i].name, words[w][c]);
                snprintf(begin, sizeof(begin), "vramshim: VRAMSHIM_%s=%s  (", expected[i].name, means[w]);
                const char *said = said_with(ENV("VRAMSHIM_VERBOSE=1", variable));
                CHECK(strstr(said, begin));
                CHECK_EQ(count_of(said, " was ignored"), 0);
            }
        }
    }
    const char *said = said_with(ENV("VRAMSHIM_CACHE_MAX=none"));
    CHECK_EQ(count_of(said, "VRAMSHIM_CACHE_MAX=none was ignored: it takes a size such as 512M or 4G, 0, or unlimited"),
             under_shim());
    said = said_with(ENV("VRAMSHIM_SLACK=none"));
    CHECK_EQ(count_of(said, "VRAMSHIM_SLACK=none was ignored: it takes a factor from 1 to 1000, such as 1.25, or unlimited"),
             under_shim());
    said = said_with(ENV("VRAMSHIM_FREE=SYNC", "VRAMSHIM_SLACK=1.5X", "VRAMSHIM_CACHE_MAX=1gIb", "VRAMSHIM_DECAY=5S",
                         "VRAMSHIM_DRAIN=Off"));
    CHECK_EQ(count_of(said, " was ignored"), 0);
    remove_folder();
}

/* Who writes "none" to switch it off gets no pinned memory kept. */
LAW_CHILD(pins_and_gives_up)
{
    void *p;
    law_context();
    for (int i = 0; i < 3; i++) {
        OK(cuMemHostAlloc(&p, 1 << 20, 0));
        OK(cuMemFreeHost(p));
    }
    exit((int)driver_calls("cuMemFreeHost"));
}

LAW_CASE_SIM_ONCE(none_keeps_nothing)
{
    CHECK_EQ(WEXITSTATUS(law_run_child("pins_and_gives_up", ENV("VRAMSHIM_HOST_CACHE=none"), text, sizeof(text))), 3);
    int kept = law_run_child("pins_and_gives_up", ENV("VRAMSHIM_HOST_CACHE=unlimited"), text, sizeof(text));
    CHECK_EQ(WEXITSTATUS(kept), under_shim() ? 0 : 3);
}

/* Signals: decided by what they are, whichever way they are written. */
LAW_CASE_SIM_ONCE(signals_by_name_and_by_number)
{
    static const struct {
        const char *names;
        bool taken;
    } table[] = {
        [SIGHUP] = {"HUP", true}, [SIGINT] = {"INT", true}, [SIGQUIT] = {"QUIT", true}, [SIGILL] = {"ILL", false},
        [SIGTRAP] = {"TRAP", false}, [SIGABRT] = {"ABRT IOT", false}, [SIGBUS] = {"BUS", false},
        [SIGFPE] = {"FPE", false}, [SIGKILL] = {"KILL", false}, [SIGUSR1] = {"USR1", true},
        [SIGSEGV] = {"SEGV", false}, [SIGUSR2] = {"USR2", true}, [SIGPIPE] = {"PIPE", false},
        [SIGALRM] = {"ALRM", true}, [SIGTERM] = {"TERM", true}, [SIGSTKFLT] = {"STKFLT", true},
        [SIGCHLD] = {"CHLD CLD", false}, [SIGCONT] = {"CONT", false}, [SIGSTOP] = {"STOP", false},
        [SIGTSTP] = {"TSTP", false}, [SIGTTIN] = {"TTIN", false}, [SIGTTOU] = {"TTOU", false},
        [SIGURG] = {"URG", false}, [SIGXCPU] = {"XCPU", true}, [SIGXFSZ] = {"XFSZ", false},
        [SIGVTALRM] = {"VTALRM", true}, [SIGPROF] = {"PROF", true}, [SIGWINCH] = {"WINCH", false},
        [SIGIO] = {"IO POLL", true}, [SIGPWR] = {"PWR", true}, [SIGSYS] = {"SYS", false}};
    CHECK_EQ(COUNT(table), 32);
    if (!under_shim())
        return;
    for (int sig = 0; sig <= SIGRTMAX + 1; sig++) {
        char names[32] = "", number[16], why[512], *save = NULL;
        bool taken = sig < 32 ? table[sig].taken : sig >= SIGRTMIN && sig <= SIGRTMAX;
        if (sig > 0 && sig < 32)
            snprintf(names, sizeof(names), "%s", table[sig].names);
        else if (taken)
            snprintf(names, sizeof(names), "RTMIN+%d RTMAX-%d", sig - SIGRTMIN, SIGRTMAX - sig);
        snprintf(number, sizeof(number), "%d", sig);
        CHECK_EQ(check()("SIGNAL", number, why, sizeof(why)), taken ? 0 : -EINVAL);
        for (char *name = strtok_r(names, " ", &save); name; name = strtok_r(NULL, " ", &save)) {
            char full[40];
            snprintf(full, sizeof(full), "SIG%s", name);
            CHECK_EQ(check()("SIGNAL", name, why, sizeof(why)), taken ? 0 : -EINVAL);
            CHECK_EQ(check()("SIGNAL", full, why, sizeof(why)), taken ? 0 : -EINVAL);
        }
    }
    static const char *const half[] = {"10.9",     "SIGRTMIN+1.5", "RTMIN+", "RTMIN-1", "RTMAX+1",
                                       "RTMIN+31", "10 ",          "SIG10",  "0",       "+10"};
    for (size_t i = 0; i < COUNT(half); i++)
        CHECK_EQ(check()("SIGNAL", half[i], NULL, 0), -EINVAL);
}

/* Names that are no options: whole, if a person can have meant them, and each of them counted. */
LAW_CASE_SIM_ONCE(unknown_names)
{
    static char variable[LONG + 64];
    const char *said =
        said_with(ENV("VRAMSHIM_MOST_BYTES_OF_FREED_BLOCKS_THAT_ARE_KEPT_ON_A_DEVICE=4G", "VRAMSHIM_host_cache=1G"));
    CHECK_EQ(count_of(said, "VRAMSHIM_MOST_BYTES_OF_FREED_BLOCKS_THAT_ARE_KEPT_ON_A_DEVICE is not an option"), under_shim());
    CHECK_EQ(count_of(said, "VRAMSHIM_host_cache is not an option and was ignored; did you mean VRAMSHIM_HOST_CACHE?"),
             under_shim());
    snprintf(variable, sizeof(variable), "VRAMSHIM_%0*d=1", LONG, 7);
    said = said_with(ENV(variable, "VRAMSHIM_A\nvramshim: B=1"));
    CHECK_EQ(count_of(said, "... is not an option and was ignored"), under_shim());
    CHECK_EQ(count_of(said, "VRAMSHIM_A\\nvramshim: B is not an option and was ignored"), under_shim());
    CHECK(strlen(said) < 2000);
    said = said_with(ENV("VRAMSHIM_1=", "VRAMSHIM_2=", "VRAMSHIM_3=", "VRAMSHIM_4=", "VRAMSHIM_5=", "VRAMSHIM_6=", "VRAMSHIM_7=",
                         "VRAMSHIM_8=", "VRAMSHIM_9=", "VRAMSHIM_CACHE=x", "VRAMSHIM_DECAY=x"));
    CHECK_EQ(count_of(said, " is not an option and was ignored; "), under_shim() ? 8 : 0);
    CHECK_EQ(count_of(said, "vramshim: and 3 more VRAMSHIM_ variables were ignored\n"), under_shim());
}

/* Names of files that hold a slip. */
LAW_CASE_SIM_ONCE(names_of_files)
{
    static const char *const wrong[][2] = {{"/tmp/%q", "a percent sign is followed by none of p, h and %"},
                                           {"/tmp/100%", "a percent sign is followed by none of p, h and %"},
                                           {" none", "there are blanks at an end"},
                                           {"stderr\n", "there are blanks at an end"},
                                           {"/tmp/", "a file is to be named, not a folder"},
                                           {long_value, "it is too long for a path"}};
    in_a_new_folder();
    memset(long_value, 'x', LONG);
    for (size_t i = 0; i < COUNT(wrong); i++) {
        static char variable[LONG + 64], expected[400];
        for (int trace = 0; trace < 2; trace++) {
            snprintf(variable, sizeof(variable), "VRAMSHIM_%s=%s", trace ? "TRACE" : "REPORT", wrong[i][0]);
            snprintf(expected, sizeof(expected),
                     " was ignored: %s; it takes stderr, none, or a path, in which %%p is the pid, %%h the host and %%%% a percent "
                     "sign; using %s\n", wrong[i][1], trace ? "none" : "stderr");
            CHECK_EQ(count_of(said_with(ENV(variable)), expected), under_shim());
        }
    }
    CHECK_EQ(count_of(said_with(ENV("VRAMSHIM_REPORT=STDERR")), "LEAK SUMMARY"), under_shim());
    CHECK_EQ(strlen(said_with(ENV("VRAMSHIM_REPORT=None", "VRAMSHIM_TRACE=NONE"))), 0);
    remove_folder();
}

/* What is asked is not set. */
LAW_CASE_SIM_ONCE(the_question_changes_nothing)
{
    law_context();
    if (under_shim())
        CHECK_EQ(check()("CACHE", "0", NULL, 0), 0);
    cached_block(1 << 20);
    CHECK_EQ(driver_calls("cuMemFree_v2"), !under_shim());
}

/* A folder that somebody has removed: no relative path can begin there. */
LAW_CASE_SIM_ONCE(a_folder_that_was_removed)
{
    in_a_new_folder();
    CHECK(rmdir(folder) == 0);
    const char *said = said_with(ENV("VRAMSHIM_REPORT=report", "VRAMSHIM_TRACE=/dev/null"));
    CHECK_EQ(count_of(said, "VRAMSHIM_REPORT=report was ignored: the current folder is not there any more"), under_shim());
    CHECK_EQ(count_of(said, " was ignored"), under_shim());
    CHECK_EQ(count_of(said, "LEAK SUMMARY"), under_shim());
}

/* What is taken is not printed as it is either. */
LAW_CASE_SIM_ONCE(a_path_that_forges_a_line)
{
    const char *said = said_with(ENV("VRAMSHIM_VERBOSE=1", "VRAMSHIM_REPORT=/nowhere/a\nvramshim: forged\x1b[31m\xff/%p"));
    expect_no_forgery(said);
    CHECK_EQ(count_of(said, "VRAMSHIM_REPORT=/nowhere/a\\nvramshim: forged\\x1b[31m\\xff/%p  ("), under_shim());
    CHECK_EQ(count_of(said, "cannot write the report to /nowhere/a\\nvramshim: forged\\x1b[31m\\xff/"), under_shim());
    CHECK_EQ(count_of(said, "LEAK SUMMARY"), under_shim());
}

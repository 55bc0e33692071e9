/*
 * vramctl run: the options of vramshim/options.def as flags, so that the two cannot drift apart, and a program with the library
 * preloaded, or else a line that says why not. Nothing is started before every value, the library and the program were looked at.
 */
#include <ctype.h>
#include <errno.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "command.h"
#include "library.h"
#include "loadable.h"
#include "say.h"

/* What a value is called in the help. */
#define SHOWN_BOOL "0|1"
#define SHOWN_BOUND "BYTES"
#define SHOWN_KEEP "BYTES"
#define SHOWN_PERCENT "PERCENT"
#define SHOWN_FACTOR "FACTOR"
#define SHOWN_SECONDS "SECONDS"
#define SHOWN_FREE "MODE"
#define SHOWN_SIGNAL "SIGNAL"
#define SHOWN_OUTPUT "PATH"

static const struct {
    const char *name, *shown, *initial, *help;
} options[] = {
#define VRAM_OPTION(NAME, field, TYPE, initial, help) {#NAME, SHOWN_##TYPE, initial, help},
#include "vramshim/options.def"
#undef VRAM_OPTION
};
enum { OPTIONS = sizeof(options) / sizeof(options[0]), LIBRARY = OPTIONS, FLAGS, FLAG_MAX = 32, COLUMN = 25, WHY_MAX = 8192 };

/* CACHE_MAX is --cache-max on the command line. */
static void name_flags(char ret_flags[FLAGS][FLAG_MAX])
{
    for (int i = 0; i < OPTIONS; i++) {
        size_t at = 0;
        for (const char *c = options[i].name; *c && at < FLAG_MAX - 1; c++)
            ret_flags[i][at++] = *c == '_' ? '-' : (char)tolower((unsigned char)*c);
        ret_flags[i][at] = 0;
    }
    strcpy(ret_flags[LIBRARY], "library");
}

void vram_run_usage(FILE *out)
{
    char flags[FLAGS][FLAG_MAX];
    name_flags(flags);
    fprintf(out, "usage: vramctl run [OPTION...] [--] PROGRAM [ARGUMENT...]\n\n"
                 "Runs PROGRAM with libvramshim.so preloaded, in front of what LD_PRELOAD already names.\n\n");
    for (int i = 0; i < OPTIONS; i++) {
        int n = fprintf(out, "  --%s=%s", flags[i], options[i].shown);
        fprintf(out, "%*s%s [%s]\n", n < COLUMN ? COLUMN - n : 1, "", options[i].help, options[i].initial);
    }
    fprintf(out, "  %-*s%s\n", COLUMN - 2, "--library=PATH",
            "the libvramshim.so to use, instead of the one that belongs to this vramctl");
    fprintf(out, "\nEach sets VRAMSHIM_<NAME>; the default is in brackets. BYTES may have a unit (512M, 4G).\n"
                 "A program into which the library cannot be loaded (statically linked, set-user-ID) is not started.\n\n"
                 "  vramctl run -- python train.py\n"
                 "  vramctl run --cache-max=4G --report=report.%%p -- python train.py\n"
                 "  kill -USR1 PID              # gives the kept memory back\n");
}

static int which_flag(char flags[FLAGS][FLAG_MAX], const char *name, size_t length)
{
    int i = 0;
    while (i < FLAGS && (strlen(flags[i]) != length || strncmp(flags[i], name, length) != 0))
        i++;
    return i < FLAGS ? i : -1;
}

static void refuse_flag(char flags[FLAGS][FLAG_MAX], const char *arg)
{
    char name[FLAG_MAX * 2] = "";
    const char *names[FLAGS + 1] = {"help"}, *start = arg + strspn(arg, "-");
    for (int i = 0; i < FLAGS; i++)
        names[i + 1] = flags[i];
    if (strncasecmp(start, "VRAMSHIM_", 9) == 0)
        start += 9;
    for (size_t i = 0; i + 1 < sizeof(name) && start[i] && start[i] != '='; i++)
        name[i] = start[i] == '_' ? '-' : (char)tolower((unsigned char)start[i]);
    const char *nearest = vram_nearest(name, names, FLAGS + 1);
    if (nearest)
        vram_say("run", "no option %s; did you mean --%s?", QUOTED(arg), nearest);
    else
        vram_say("run", "no option %s; vramctl run --help lists them", QUOTED(arg));
}

/*
 * Fills ret_values, one a flag, NULL where it is not there, and leaves optind at the program. Returns false if nothing is to be
 * run, with the exit status.
 */
static bool parse(int argc, char **argv, const char *ret_values[FLAGS], int *ret_status)
{
    enum { FIRST = 256 }; /* beyond letters */
    char flags[FLAGS][FLAG_MAX];
    struct option known[FLAGS + 2] = {0};
    name_flags(flags);
    for (int i = 0; i < FLAGS; i++)
        known[i] = (struct option){flags[i], required_argument, NULL, FIRST + i};
    known[FLAGS] = (struct option){"help", no_argument, NULL, 'h'};

    *ret_status = VRAM_EXIT_USAGE;
    for (;;) {
        int at = optind, found = getopt_long(argc, argv, "+:h", known, NULL);
        if (found == -1)
            break;
        const char *arg = argv[at], *name = strncmp(arg, "--", 2) == 0 ? arg + 2 : "";
        size_t length = strcspn(name, "=");
        int flag = which_flag(flags, name, length);
        if (strcmp(arg, "-h") == 0 || strcmp(arg, "--help") == 0) {
            vram_run_usage(stdout);
            *ret_status = 0;
            return false;
        }
        /* An abbreviation that getopt_long would take may mean something else tomorrow, when there are more options. */
        if (flag < 0) {
            refuse_flag(flags, arg);
            return false;
        }
        /* `--cache -- program` and `--cache --verbose=1` lack a value; one that begins so can be given by --report=--name. */
        bool apart = !name[length];
        if (found == ':' || (apart && strncmp(optarg, "--", 2) == 0)) {
            vram_say("run", "%s needs a value", arg);
            return false;
        }
        ret_values[flag] = optarg;
    }
    if (optind < argc)
        return true;
    vram_say("run", "which program? e.g. vramctl run -- python train.py");
    return false;
}

/* By the library's own parser, and in its own words, but for the name: a flag. */
static bool are_taken(const struct vram_library *library, const char *values[FLAGS])
{
    char flags[FLAGS][FLAG_MAX], why[WHY_MAX] = "";
    bool all = true;
    name_flags(flags);
    for (int i = 0; i < OPTIONS; i++) {
        if (!values[i] || library->check_option(options[i].name, values[i], why, sizeof(why)) == 0)
            continue;
        const char *rest = strchr(why, '=');
        fprintf(stderr, "vramctl run: --%s%s\n", flags[i], rest ? rest : why);
        all = false;
    }
    return all;
}

static bool set_environment(const struct vram_library *library, const char *values[FLAGS])
{
    char variable[FLAG_MAX + sizeof("VRAMSHIM_")];
    for (int i = 0; i < OPTIONS; i++) {
        snprintf(variable, sizeof(variable), "VRAMSHIM_%s", options[i].name);
        if (values[i] && setenv(variable, values[i], 1) != 0)
            return false;
    }
    char *preload = vram_library_preload(library, getenv("LD_PRELOAD"));
    bool set = preload && setenv("LD_PRELOAD", preload, 1) == 0;
    free(preload);
    return set;
}

int vram_run_main(int argc, char **argv)
{
    static struct vram_library library;
    const char *values[FLAGS] = {0};
    char why[WHY_MAX];
    int status;
    if (!parse(argc, argv, values, &status))
        return status;
    char **program = argv + optind;

    if (vram_library_open(&library, values[LIBRARY], why, sizeof(why)) != 0) {
        vram_say("run", "%s", why);
        return VRAM_EXIT_USAGE;
    }
    if (!are_taken(&library, values))
        return VRAM_EXIT_USAGE;
    if (!vram_loadable(*program, &library.elf, why, sizeof(why))) {
        vram_say("run", "%s", why);
        return VRAM_EXIT_USAGE;
    }
    if (!set_environment(&library, values)) {
        vram_say("run", "%s", strerror(ENOMEM));
        return VRAM_EXIT_USAGE;
    }
    execvp(*program, program);
    int error = errno;
    bool there = error == ENOENT && strchr(*program, '/') && access(*program, F_OK) == 0;
    vram_say("run", "%s: %s", QUOTED(*program), there ? "what is to interpret it is not there" : strerror(error));
    return error == ENOENT ? VRAM_EXIT_NOT_FOUND : VRAM_EXIT_CANNOT_RUN;
}

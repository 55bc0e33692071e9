/*
 * vramctl: the command beside the library. One subcommand a line in `commands`; options of `run` come from the same table as
 * the library's own (vramshim/options.def), so that the two cannot drift apart.
 */
#include <ctype.h>
#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const struct {
    const char *name, *initial, *help;
} options[] = {
#define VRAM_OPTION(NAME, field, TYPE, initial, help) {#NAME, initial, help},
#include "vramshim/options.def"
#undef VRAM_OPTION
};
enum { OPTIONS = sizeof(options) / sizeof(options[0]) };

/* CACHE_MAX is --cache-max on the command line. */
static void flag_name(const char *name, char *ret_flag)
{
    for (; *name; name++)
        *ret_flag++ = *name == '_' ? '-' : (char)tolower((unsigned char)*name);
    *ret_flag = 0;
}

static int usage_run(FILE *out)
{
    fprintf(out, "usage: vramctl run [OPTION...] [--] PROGRAM [ARGUMENT...]\n\n"
                 "Runs PROGRAM with libvramshim.so preloaded, in front of what LD_PRELOAD already names.\n\n");
    for (int i = 0; i < OPTIONS; i++) {
        char flag[32];
        flag_name(options[i].name, flag);
        fprintf(out, "  --%-10s %s [%s]\n", flag, options[i].help, options[i].initial);
    }
    fprintf(out, "  --%-10s %s\n", "library", "the libvramshim.so to use, instead of the one that belongs to this vramctl");
    fprintf(out, "\nEach option takes a value (--cache-max=4G or --cache-max 4G) and sets VRAMSHIM_<NAME>.\n"
                 "Afterwards: kill -USR1 PID gives the kept memory back.\n");
    return out == stderr ? 2 : 0;
}

/* The library that was built or installed with this program: seen from its own place, so that a build tree, a prefix and a
 * DESTDIR all work. Returns false if there is none. */
static bool find_library(char *ret_path)
{
    static const char *const places[] = {"../shim/libvramshim.so", "../" VRAM_LIBDIR "/libvramshim.so",
                                         "../lib/libvramshim.so", "../lib64/libvramshim.so"};
    char self[PATH_MAX / 2], candidate[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    if (n <= 0)
        return false;
    self[n] = 0;
    *strrchr(self, '/') = 0;
    for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++) {
        snprintf(candidate, sizeof(candidate), "%s/%s", self, places[i]);
        if (realpath(candidate, ret_path) && access(ret_path, R_OK) == 0)
            return true;
    }
    return false;
}

static bool option_matches(const char *arg, const char *flag, const char **ret_value)
{
    size_t len = strlen(flag);
    if (strncmp(arg, "--", 2) != 0 || strncmp(arg + 2, flag, len) != 0)
        return false;
    if (arg[2 + len] == '=')
        *ret_value = arg + 3 + len;
    else if (arg[2 + len] == 0)
        *ret_value = NULL;
    else
        return false;
    return true;
}

static int run(int argc, char **argv)
{
    char library[PATH_MAX] = "";
    int at = 1;
    for (; at < argc && argv[at][0] == '-'; at++) {
        const char *value = NULL, *chosen = NULL;
        char variable[48], flag[32];
        if (strcmp(argv[at], "--") == 0) {
            at++;
            break;
        }
        if (strcmp(argv[at], "--help") == 0 || strcmp(argv[at], "-h") == 0)
            return usage_run(stdout);
        if (option_matches(argv[at], "library", &value))
            chosen = "library";
        for (int i = 0; !chosen && i < OPTIONS; i++) {
            flag_name(options[i].name, flag);
            if (option_matches(argv[at], flag, &value))
                chosen = options[i].name;
        }
        if (!chosen) {
            fprintf(stderr, "vramctl run: no option %s; vramctl run --help lists them\n", argv[at]);
            return 2;
        }
        if (!value && at + 1 == argc) {
            fprintf(stderr, "vramctl run: %s needs a value\n", argv[at]);
            return 2;
        }
        if (!value)
            value = argv[++at];
        if (strcmp(chosen, "library") == 0) {
            if (!realpath(value, library)) {
                fprintf(stderr, "vramctl run: %s: %s\n", value, strerror(errno));
                return 2;
            }
            continue;
        }
        snprintf(variable, sizeof(variable), "VRAMSHIM_%s", chosen);
        setenv(variable, value, 1);
    }
    if (at == argc) {
        fprintf(stderr, "vramctl run: which program? e.g. vramctl run -- python train.py\n");
        return 2;
    }
    if (!*library && !find_library(library)) {
        fprintf(stderr, "vramctl run: libvramshim.so is not beside this vramctl; name it with --library PATH\n");
        return 2;
    }

    /* In front of what a launcher has put there, never instead of it (law 26). */
    const char *before = getenv("LD_PRELOAD");
    if (before && *before) {
        size_t len = strlen(library) + strlen(before) + 2;
        char *both = malloc(len);
        if (!both) {
            perror("vramctl run");
            return 2;
        }
        snprintf(both, len, "%s:%s", library, before);
        setenv("LD_PRELOAD", both, 1);
        free(both);
    } else {
        setenv("LD_PRELOAD", library, 1);
    }
    execvp(argv[at], argv + at);
    int error = errno;
    fprintf(stderr, "vramctl run: %s: %s\n", argv[at], strerror(error));
    return error == ENOENT ? 127 : 126;
}

static int help(int argc, char **argv);
static int version(int argc, char **argv)
{
    (void)argc;
    (void)argv;
    printf("vramctl %s\n", VRAM_VERSION);
    return 0;
}

static const struct {
    const char *name;
    int (*main)(int argc, char **argv);
    const char *help;
} commands[] = {
    {"run", run, "run a program with the shim: vramctl run -- python train.py"},
    {"help", help, "this list"},
    {"version", version, "the version of this command"},
};

static void list_commands(FILE *out)
{
    fprintf(out, "usage: vramctl COMMAND [...]\n\n");
    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++)
        fprintf(out, "  %-8s %s\n", commands[i].name, commands[i].help);
}

static int help(int argc, char **argv)
{
    (void)argc;
    (void)argv;
    list_commands(stdout);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc < 2) {
        list_commands(stderr);
        return 2;
    }
    const char *name = argv[1];
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0)
        name = "help";
    if (strcmp(name, "--version") == 0)
        name = "version";
    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++)
        if (strcmp(name, commands[i].name) == 0)
            return commands[i].main(argc - 1, argv + 1);
    fprintf(stderr, "vramctl: no command %s; vramctl help lists them\n", name);
    return 2;
}

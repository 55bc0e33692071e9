/*
 * vramctl: the command beside the library. One subcommand a line in `commands`.
 */
#include <stdio.h>
#include <string.h>

#include "command.h"
#include "say.h"

static int help_main(int argc, char **argv);
static int version_main(int argc, char **argv);

static void help_usage(FILE *out)
{
    fprintf(out, "usage: vramctl help [COMMAND]\n\nLists the commands, or says how COMMAND is used.\n");
}

static void version_usage(FILE *out)
{
    fprintf(out, "usage: vramctl version\n\nPrints the version of this command.\n");
}

static const struct command {
    const char *name;
    int (*main)(int argc, char **argv);
    void (*usage)(FILE *out);
    const char *help;
} commands[] = {
    {"run", vram_run_main, vram_run_usage, "run a program with the shim: vramctl run -- python train.py"},
    {"help", help_main, help_usage, "this list; vramctl help run: how run is used"},
    {"version", version_main, version_usage, "the version of this command"},
};
enum { COMMANDS = sizeof(commands) / sizeof(commands[0]) };

static void list_commands(FILE *out)
{
    fprintf(out, "usage: vramctl COMMAND [...]\n\n");
    for (size_t i = 0; i < COMMANDS; i++)
        fprintf(out, "  %-8s %s\n", commands[i].name, commands[i].help);
}

/* NULL where there is none, having said so for `asker` (a command, or NULL). */
static const struct command *find_command(const char *asker, const char *name)
{
    const char *names[COMMANDS];
    for (size_t i = 0; i < COMMANDS; i++) {
        if (strcmp(name, commands[i].name) == 0)
            return &commands[i];
        names[i] = commands[i].name;
    }
    const char *nearest = vram_nearest(name, names, COMMANDS);
    if (nearest)
        vram_say(asker, "no command %s; did you mean vramctl %s?", QUOTED(name), nearest);
    else
        vram_say(asker, "no command %s; vramctl help lists them", QUOTED(name));
    return NULL;
}

static int help_main(int argc, char **argv)
{
    if (argc > 2) {
        vram_say("help", "takes one command, not also %s", QUOTED(argv[2]));
        return VRAM_EXIT_USAGE;
    }
    if (argc < 2) {
        list_commands(stdout);
        return 0;
    }
    const struct command *command = find_command("help", argv[1]);
    if (!command)
        return VRAM_EXIT_USAGE;
    command->usage(stdout);
    return 0;
}

static int version_main(int argc, char **argv)
{
    if (argc > 1) {
        vram_say("version", "takes no argument, but was given %s", QUOTED(argv[1]));
        return VRAM_EXIT_USAGE;
    }
    printf("vramctl %s\n", VRAM_VERSION);
    return 0;
}

static int command_main(int argc, char **argv)
{
    if (argc < 2) {
        list_commands(stderr);
        return VRAM_EXIT_USAGE;
    }
    const char *name = argv[1];
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0)
        name = "help";
    if (strcmp(name, "--version") == 0)
        name = "version";
    const struct command *command = find_command(NULL, name);
    if (!command)
        return VRAM_EXIT_USAGE;
    if (argc == 3 && (strcmp(argv[2], "--help") == 0 || strcmp(argv[2], "-h") == 0)) {
        command->usage(stdout);
        return 0;
    }
    return command->main(argc - 1, argv + 1);
}

int main(int argc, char **argv)
{
    int status = command_main(argc, argv);
    if (status == 0 && !vram_close_stdout())
        status = VRAM_EXIT_OUTPUT;
    return status;
}

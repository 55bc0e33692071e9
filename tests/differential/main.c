/*
 *   program run FILE                                    runs a program; 1: a hazard, or wrong contents
 *   program generate --seed N [--operations N] [--no-forks] [--no-turns]     writes one
 */
#include "program.h"

#include <getopt.h>
#include <stdlib.h>
#include <string.h>

static int usage(void)
{
    fprintf(stderr, "usage: program run FILE\n"
                    "       program generate --seed N [--operations N] [--no-forks] [--no-turns]\n");
    return 2;
}

static int run(const char *name)
{
    struct program p;
    FILE *in = fopen(name, "r");
    if (!in) {
        perror(name);
        return 2;
    }
    bool ok = program_read(&p, in, name);
    fclose(in);
    return ok ? !program_run(&p) : 2;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"seed", required_argument, NULL, 's'}, {"operations", required_argument, NULL, 'n'},
        {"no-forks", no_argument, NULL, 'f'},   {"no-turns", no_argument, NULL, 't'},
        {NULL, 0, NULL, 0},
    };
    struct program p;
    uint64_t seed = 1;
    size_t operations = 300;
    bool forks = true, turns = true;
    int option;
    if (argc == 3 && !strcmp(argv[1], "run"))
        return run(argv[2]);
    if (argc < 2 || strcmp(argv[1], "generate") != 0)
        return usage();
    optind = 2;
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (option) {
        case 's': seed = strtoull(optarg, NULL, 0); break;
        case 'n': operations = strtoul(optarg, NULL, 0); break;
        case 'f': forks = false; break;
        case 't': turns = false; break;
        default: return usage();
        }
    }
    program_generate(&p, seed, operations, forks, turns);
    program_write(&p, stdout);
    return 0;
}

/*
 * The commands of vramctl: one line each in vramctl.c's table, one file each beside it. A command gets its own name as argv[0],
 * says what is wrong in one line on stderr (say.h), and returns the exit status; what it prints on stdout is checked by main.
 */
#ifndef VRAMCTL_COMMAND_H
#define VRAMCTL_COMMAND_H

#include <stdio.h>

enum {
    VRAM_EXIT_OUTPUT = 1,      /* standard output could not be written */
    VRAM_EXIT_USAGE = 2,       /* a wrong command line, or nothing was started for another reason */
    VRAM_EXIT_CANNOT_RUN = 126, /* as a shell says it */
    VRAM_EXIT_NOT_FOUND = 127,
};

int vram_run_main(int argc, char **argv);
void vram_run_usage(FILE *out);

#endif

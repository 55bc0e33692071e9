/*
 * A program with a Python of its own inside, as editors and simulators have it: libpython is loaded, brought up, given the
 * file, and brought down again while the program lives on.
 *
 *   embedded LIBPYTHON FILE
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *python;

static void *symbol(const char *name)
{
    void *p = dlsym(python, name);
    if (!p) {
        fprintf(stderr, "embedded: no %s\n", name);
        exit(2);
    }
    return p;
}

static void next_line(void)
{
    char line[64];
    if (!fgets(line, sizeof(line), stdin))
        exit(3);
}

int main(int argc, char **argv)
{
    static char text[65536];
    FILE *f = argc == 3 ? fopen(argv[2], "r") : NULL;
    if (!f || !(python = dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL))) {
        fprintf(stderr, "embedded: %s\n", f ? dlerror() : "cannot read the file");
        return 2;
    }
    text[fread(text, 1, sizeof(text) - 1, f)] = 0;
    fclose(f);
    ((void (*)(int))symbol("Py_InitializeEx"))(0);
    if (((int (*)(const char *))symbol("PyRun_SimpleString"))(text) != 0)
        return 2;
    void *state = ((void *(*)(void))symbol("PyEval_SaveThread"))();
    puts("ready");
    fflush(stdout);
    next_line();
    ((void (*)(void *))symbol("PyEval_RestoreThread"))(state);
    int r = ((int (*)(void))symbol("Py_FinalizeEx"))();
    puts("ended");
    fflush(stdout);
    next_line();
    return r;
}

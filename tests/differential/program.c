#include "program.h"

#include <stdlib.h>
#include <string.h>

const struct op ops[OPS] = {
#define OP(name, weight, arguments, where) {#name, weight, arguments, where},
#include "ops.def"
#undef OP
};

void program_add(struct program *p, struct line line)
{
    if (p->count == p->capacity) {
        p->capacity = p->capacity ? 2 * p->capacity : 256;
        p->lines = realloc(p->lines, p->capacity * sizeof *p->lines);
        if (!p->lines)
            abort();
    }
    p->lines[p->count++] = line;
}

void program_write(const struct program *p, FILE *out)
{
    fprintf(out, "threads %u\n%s", p->threads,
            p->exact   ? "exact\n"
            : p->pools ? "pools\n"
            : p->about ? "about\n"
            : p->turns ? "turns\n"
                       : "");
    for (size_t i = 0; i < p->envs; i++)
        fprintf(out, "env %s\n", p->env[i]);
    for (size_t i = 0; i < p->count; i++) {
        const struct line *l = &p->lines[i];
        fprintf(out, "%u %s", l->thread, ops[l->op].name);
        for (size_t k = 0; k < strlen(ops[l->op].arguments); k++)
            fprintf(out, " %llu", (unsigned long long)l->arg[k]);
        fputc('\n', out);
    }
}

static bool read_line(struct program *p, char *text)
{
    char word[16];
    unsigned thread;
    int used = 0;
    if (sscanf(text, "threads %u %n", &p->threads, &used) == 1)
        return !text[used] && p->threads >= 1 && p->threads <= MAX_THREADS;
    if (!strcmp(text, "turns"))
        return p->turns = true;
    if (!strcmp(text, "exact"))
        return p->turns = p->exact = true;
    if (!strcmp(text, "pools"))
        return p->turns = p->pools = true;
    if (!strcmp(text, "about"))
        return p->turns = p->about = true;
    if (!strncmp(text, "env ", 4) && strchr(text, '='))
        return p->envs < sizeof p->env / sizeof *p->env && (p->env[p->envs++] = strdup(text + 4));
    if (sscanf(text, "%u %15s %n", &thread, word, &used) != 2 || thread >= p->threads)
        return false;
    for (unsigned op = 0; op < OPS; op++) {
        if (strcmp(word, ops[op].name) != 0)
            continue;
        struct line l = {.thread = (unsigned char)thread, .op = (unsigned char)op};
        for (size_t k = 0; k < strlen(ops[op].arguments); k++) {
            char *end;
            l.arg[k] = strtoull(text + used, &end, 0);
            if (end == text + used)
                return false;
            used = (int)(end - text);
        }
        program_add(p, l);
        return !text[used];
    }
    return false;
}

bool program_read(struct program *p, FILE *in, const char *name)
{
    char text[256];
    *p = (struct program){.threads = 1};
    for (unsigned n = 1; fgets(text, sizeof text, in); n++) {
        text[strcspn(text, "\n")] = 0;
        if (*text && *text != '#' && !read_line(p, text)) {
            fprintf(stderr, "%s:%u: cannot read '%s'\n", name, n, text);
            return false;
        }
    }
    return true;
}

#include "say.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "vramshim/nearest.h"
#include "vramshim/quote.h"

void vram_say(const char *command, const char *fmt, ...)
{
    char line[8192]; /* in one piece: others write to the same terminal */
    int at = snprintf(line, sizeof(line), command ? "vramctl %s: " : "vramctl: ", command);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line + at, sizeof(line) - (size_t)at, fmt, ap);
    va_end(ap);
    fprintf(stderr, "%s\n", line);
}

const char *vram_quoted(char ret[VRAM_QUOTED_MAX], const char *s)
{
    if (!*s)
        return "''";
    vram_quote(ret, VRAM_QUOTED_MAX, s, strlen(s));
    return ret;
}

const char *vram_nearest(const char *name, const char *const *names, size_t count)
{
    size_t length = strlen(name), best = (length + 2) / 3;
    const char *nearest = NULL;
    for (size_t i = 0; i < count && length > 1; i++)
        if (strncmp(name, names[i], length) == 0)
            return names[i];
    for (size_t i = 0; i < count; i++) {
        size_t d = vram_nearest_distance(name, length, names[i]);
        if (d < best || (d == best && !nearest)) {
            best = d;
            nearest = names[i];
        }
    }
    return nearest;
}

bool vram_close_stdout(void)
{
    bool before = ferror(stdout);
    errno = 0;
    if (fclose(stdout) == 0 && !before)
        return true;
    if (errno)
        vram_say(NULL, "cannot write to standard output: %s", strerror(errno));
    else
        vram_say(NULL, "cannot write to standard output");
    return false;
}

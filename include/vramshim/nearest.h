/*
 * How far a name that is unknown is from one that is known, for "did you mean": by the shim for variables, by vramctl for flags and
 * commands. Levenshtein distance; names are compared as they are. No allocation.
 */
#ifndef VRAMSHIM_NEAREST_H
#define VRAMSHIM_NEAREST_H

#include <stddef.h>
#include <string.h>

enum { VRAM_NEAREST_MAX = 40 /* bytes; the known name is shorter */ };

/* Of the `length` bytes at `name`, from `known`. */
static inline size_t vram_nearest_distance(const char *name, size_t length, const char *known)
{
    size_t row[VRAM_NEAREST_MAX], width = strlen(known);
    if (width >= VRAM_NEAREST_MAX)
        return VRAM_NEAREST_MAX;
    for (size_t j = 0; j <= width; j++)
        row[j] = j;
    for (size_t i = 1; i <= length; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= width; j++) {
            size_t above = row[j], best = diagonal + (name[i - 1] != known[j - 1]);
            best = best < above + 1 ? best : above + 1;
            best = best < row[j - 1] + 1 ? best : row[j - 1] + 1;
            diagonal = above;
            row[j] = best;
        }
    }
    return row[width];
}

#endif

/*
 * What vramctl says. Used by every command. Names, paths and values of others are shown by QUOTED, so that none of them can forge
 * a line or recolour a terminal.
 */
#ifndef VRAMCTL_SAY_H
#define VRAMCTL_SAY_H

#include <stdbool.h>
#include <stddef.h>

/* One line on stderr: "vramctl", a blank and `command` if there is one, a colon, the text. */
void vram_say(const char *command, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* A name of others, as quote.h shows it; '' for an empty one. For a message only: it may be cut. */
enum { VRAM_QUOTED_MAX = 1024 };
const char *vram_quoted(char ret[VRAM_QUOTED_MAX], const char *s);
#define QUOTED(s) vram_quoted((char[VRAM_QUOTED_MAX]){0}, s)

/* Which of the names was probably meant: one that begins so, or the one a slip of the finger away; else NULL. */
const char *vram_nearest(const char *name, const char *const *names, size_t count);

/* Closes stdout. Returns false, having said why, if not all that was printed has been written. */
bool vram_close_stdout(void);

#endif

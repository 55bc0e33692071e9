/*
 * The exit report: what was never freed, what the cache did, and what the program did wrong. Written once, from memory
 * alone (law 27), by whichever way out of the process comes first.
 */
#ifndef VRAM_OBSERVE_REPORT_H
#define VRAM_OBSERVE_REPORT_H

#include <stdbool.h>

#include "base/text.h"

/* Writes the report where VRAMSHIM_REPORT says. Does nothing if no GPU memory was used, or the second time; while another
 * thread writes it, waits for that one, at most a second. */
void vram_report_write(void);

/* It is not written yet, and not in the making on this very thread. */
bool vram_report_is_due(void);

/* What a layer above has to say in the last lines of each report: called by whoever writes it, on a thread that is on its way out
 * of the process. At load, one. */
void vram_report_ends_with(void (*add)(struct vram_text *t));

void vram_report_forget(void); /* in a forked child */

#endif

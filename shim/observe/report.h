/*
 * The exit report: what was never freed, what the cache did, and what the program did wrong. Written once, from memory
 * alone (law 27), by whichever way out of the process comes first.
 */
#ifndef VRAM_OBSERVE_REPORT_H
#define VRAM_OBSERVE_REPORT_H

/* Writes the report where VRAMSHIM_REPORT says. Does nothing if no GPU memory was used, or the second time. */
void vram_report_write(void);

void vram_report_forget(void); /* in a forked child */

#endif

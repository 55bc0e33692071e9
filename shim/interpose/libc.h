/* What process.c needs of the interposed libc. */
#ifndef VRAM_INTERPOSE_LIBC_H
#define VRAM_INTERPOSE_LIBC_H

/* Registers the report with quick_exit, ahead of everybody else. At load, or earlier when a library that is initialised
 * before us registers something. The second call does nothing. */
void vram_quick_exit_register(void);

#endif

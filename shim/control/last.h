/*
 * A process ends with its last thread, and ours must not be the one that keeps it: a program may leave main by
 * pthread_exit and end when its workers have (law 27). Our thread masks every signal, so that not even SIGTERM would
 * end what is left.
 *
 * A destructor of thread-specific data tells when the main thread is gone; it runs in pthread_exit alone, not in exit.
 * From then on our thread looks now and then whether it is alone, and ends the process as the last thread would have.
 */
#ifndef VRAM_CONTROL_LAST_H
#define VRAM_CONTROL_LAST_H

#include <stdbool.h>

/* At load, and in the child handler of a fork: on the main thread, else it does nothing. `gone` is called on it when it
 * ends. */
void vram_last_watch(void (*gone)(void));

bool vram_last_main_is_gone(void);

/* Beside the calling thread, only what is left of the main thread is there. Opens a file under /proc. */
bool vram_last_is_alone(void);

#endif

/*
 * A process ends with its last thread, and ours must not be the one that keeps it: a program may leave main by
 * pthread_exit and end when its workers have (law 27). Our thread masks every signal, so that not even SIGTERM would
 * end what is left.
 *
 * A destructor of thread-specific data tells when the main thread is gone; it runs in pthread_exit alone, not in exit.
 * From then on our thread looks now and then whether it is alone, and ends the process as the last thread would have.
 *
 * Where the main thread ends by the plain system call (all that seccomp's strict mode leaves it), nothing of it runs. That the kernel
 * has taken its list of robust mutexes down tells; our thread asks each second, which takes no descriptor. Where the program has
 * sandboxed itself by a filter nobody asks: such a process stays.
 */
#ifndef VRAM_CONTROL_LAST_H
#define VRAM_CONTROL_LAST_H

#include <stdbool.h>

/* At load, and in the child handler of a fork: on the main thread, else it does nothing. `gone` is called on it when it
 * ends. */
void vram_last_watch(void (*gone)(void));

bool vram_last_main_is_gone(void);

/* It ended by the plain system call, or by pthread_exit as well. False where that cannot be told. Asked once before
 * our own thread starts, and by that one alone from then on. */
bool vram_last_main_has_vanished(void);

/* Beside the calling thread, only what is left of the main thread is there; then *ret_status is that one's, as wait() has it. Opens a
 * file under /proc. */
bool vram_last_is_alone(int *ret_status);

#endif

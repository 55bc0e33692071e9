/*
 * The thread behind the signal (law 23): the handler only posts; this thread, with all signals blocked, gives the blocks
 * back and says what it did. It is started at the program's first use of GPU memory, never before (law 6).
 */
#ifndef VRAM_CONTROL_THREAD_H
#define VRAM_CONTROL_THREAD_H

#include <stdbool.h>

/* The program uses GPU memory from now on: say what is wrong with its options, start the thread. Cheap when done already.
 * If no thread can be had, one line says so and flushes are not possible (law 30). */
void vram_control_start(void);

/* Something has changed that the thread waits for. */
void vram_control_look(void);

/* Asks for a flush. Async-signal-safe. False if the thread is not running. */
bool vram_control_request(void);
bool vram_control_was_asked(void); /* in this process, whether there was a thread or not */

extern int vram_control_atfork; /* what pthread_atfork answered at load; a failure is told when GPU memory is used */

void vram_control_forget(void); /* in a forked child: there is no thread; start may start one */

#endif

/* Threads of our own. */
#ifndef VRAM_BASE_THREAD_H
#define VRAM_BASE_THREAD_H

#include <pthread.h>
#include <time.h>

/* Starts a detached thread with every signal blocked. `name`: what ps shows (15 characters), from the start on, for a thread
 * that never ends; one that may have ended already names itself, and passes NULL. 0, or an errno. */
int vram_thread_start(void *(*run)(void *), const char *name);

/* pthread_mutex_timedlock, or ENOSYS where there is none. */
int vram_thread_lock_until(pthread_mutex_t *lock, const struct timespec *until);

#endif

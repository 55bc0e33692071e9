/*
 * A mutex with a rank. Locks are taken in ascending rank; builds with checks verify that and that no lock is held across
 * a driver call (law 28), so a wrong order fails the first test that reaches it instead of deadlocking a training run.
 *
 * Each lock is listed once, in lock.def; fork takes them all in rank order (vram_locks_prefork), so the child never sees
 * a half-made structure (law 25).
 */
#ifndef VRAM_BASE_LOCK_H
#define VRAM_BASE_LOCK_H

#include <pthread.h>
#include <stdbool.h>

enum vram_rank {
#define VRAM_LOCK(name) VRAM_RANK_##name,
#include "base/lock.def"
#undef VRAM_LOCK
    VRAM_RANKS
};

void vram_lock(enum vram_rank rank);
void vram_unlock(enum vram_rank rank);

/* For the way out of the process, where the holder may be a frame below us on this very thread (a signal handler that
 * called _exit): gives up after about 200 ms and returns false. */
bool vram_lock_at_exit(enum vram_rank rank);

/* No lock is held by this thread: said before each driver call, checked in builds with checks. */
#ifdef VRAM_CHECKS
void vram_locks_check_none(void);
#else
static inline void vram_locks_check_none(void) {}
#endif

bool vram_locks_held(void); /* by this thread, at least one */

void vram_locks_prefork(void);
void vram_locks_postfork_parent(void);
void vram_locks_postfork_child(void);

#endif

#include "base/lock.h"

#include <time.h>

#include "base/check.h"
#include "base/compiler.h"

static pthread_mutex_t locks[VRAM_RANKS] = {
#define VRAM_LOCK(name) [VRAM_RANK_##name] = PTHREAD_MUTEX_INITIALIZER,
#include "base/lock.def"
#undef VRAM_LOCK
};

#ifdef VRAM_CHECKS
static VRAM_TLS unsigned held; /* bit r set: this thread holds the lock of rank r */

static void note_taken(enum vram_rank rank)
{
    VRAM_CHECK((held >> rank) == 0); /* nothing of this rank or further in is held */
    held |= 1u << rank;
}

/* At exit anything may be held, by the frame that was interrupted. */
static void note_taken_at_exit(enum vram_rank rank) { held |= 1u << rank; }

static void note_released(enum vram_rank rank)
{
    VRAM_CHECK(held & (1u << rank));
    held &= ~(1u << rank);
}

void vram_locks_check_none(void) { VRAM_CHECK(held == 0); }
#else
static void note_taken(enum vram_rank rank) { (void)rank; }
static void note_taken_at_exit(enum vram_rank rank) { (void)rank; }
static void note_released(enum vram_rank rank) { (void)rank; }
#endif

void vram_lock(enum vram_rank rank)
{
    note_taken(rank);
    pthread_mutex_lock(&locks[rank]);
}

void vram_unlock(enum vram_rank rank)
{
    pthread_mutex_unlock(&locks[rank]);
    note_released(rank);
}

bool vram_lock_at_exit(enum vram_rank rank)
{
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 200 * 1000 * 1000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_nsec -= 1000000000;
        until.tv_sec++;
    }
    if (pthread_mutex_timedlock(&locks[rank], &until) != 0)
        return false;
    note_taken_at_exit(rank);
    return true;
}

void vram_locks_prefork(void)
{
    for (int r = 0; r < VRAM_RANKS; r++)
        vram_lock((enum vram_rank)r);
}

void vram_locks_postfork_parent(void)
{
    for (int r = VRAM_RANKS - 1; r >= 0; r--)
        vram_unlock((enum vram_rank)r);
}

void vram_locks_postfork_child(void)
{
    /* The forking thread holds them all and is the only thread left: unlocking is legal and leaves each one fresh. */
    vram_locks_postfork_parent();
}

#include "base/lock.h"

#include <time.h>

#include "base/check.h"
#include "base/compiler.h"
#include "base/thread.h"

/* They are held for less time than it takes to sleep: whoever finds one taken looks again for a while. */
static pthread_mutex_t locks[VRAM_RANKS] = {
#define VRAM_LOCK(name) [VRAM_RANK_##name] = PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP,
#include "base/lock.def"
#undef VRAM_LOCK
};

static VRAM_TLS unsigned held; /* bit r set: this thread holds, or is about to hold, the lock of rank r */

static void note_taken(enum vram_rank rank)
{
    VRAM_CHECK((held >> rank) == 0); /* nothing of this rank or further in is held */
    held |= 1u << rank;
}

static void note_released(enum vram_rank rank)
{
    VRAM_CHECK(held & (1u << rank));
    held &= ~(1u << rank);
}

#ifdef VRAM_CHECKS
void vram_locks_check_none(void) { VRAM_CHECK(held == 0); }
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
    if (vram_thread_lock_until(&locks[rank], &until) != 0)
        return false;
    held |= 1u << rank; /* in no order: anything may be held, by the frame that was interrupted */
    return true;
}

/* A signal handler may fork while the frame that it interrupted holds one of our locks: those are left to that frame, which
 * goes on in both processes. The child of such a fork can exec or leave, which is what handlers fork for. */
static unsigned taken; /* under all locks */

void vram_locks_prefork(void)
{
    unsigned before = held, now = 0;
    for (int r = 0; r < VRAM_RANKS; r++) {
        if (before & (1u << r))
            continue;
        pthread_mutex_lock(&locks[r]);
        now |= 1u << r;
    }
    held = before | now;
    taken = now;
}

void vram_locks_postfork_parent(void)
{
    unsigned mine = taken;
    for (int r = VRAM_RANKS - 1; r >= 0; r--) {
        if (!(mine & (1u << r)))
            continue;
        pthread_mutex_unlock(&locks[r]);
        held &= ~(1u << r);
    }
}

void vram_locks_postfork_child(void)
{
    /* The forking thread holds them all and is the only thread left: unlocking is legal and leaves each one fresh. */
    vram_locks_postfork_parent();
}

bool vram_locks_held(void) { return held != 0; }

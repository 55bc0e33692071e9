#include "driver/capture.h"

#include <errno.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/compiler.h"
#include "base/futex.h"
#include "base/lock.h"
#include "base/say.h"

enum { STREAMS_MAX = 256 };

struct capturing {
    CUstream stream;
    CUcontext ctx;
    int tid; /* of the capturing thread where the handle means a stream of each thread, else 0 */
};

static struct capturing list[STREAMS_MAX]; /* under CAPTURE */
static unsigned listed;                    /* under CAPTURE */
static bool full;                          /* it has been, once; under CAPTURE */

static atomic_uint captures;  /* announced and begun; futex of vram_capture_wait_none */
static atomic_uint in_flight; /* driver calls of ours; futex of vram_capture_announce */

void (*vram_capture_on_none)(void);

bool vram_gate_enter(void)
{
    /* Dekker: we raise our counter and read theirs, a begin raises its own and reads ours; both orders are seq_cst, so at
     * least one sees the other. */
    atomic_fetch_add(&in_flight, 1);
    if (vram_likely(atomic_load(&captures) == 0))
        return true;
    vram_gate_leave();
    return false;
}

void vram_gate_leave(void)
{
    if (atomic_fetch_sub(&in_flight, 1) == 1 && vram_unlikely(atomic_load(&captures) != 0))
        vram_futex_wake(&in_flight);
}

void vram_gate_drain(int timeout_ms)
{
    /* Leaving wakes nobody where no capture is announced: look again every millisecond. */
    const struct timespec tick = {0, 1000000};
    for (int ms = 0; ms < timeout_ms && atomic_load(&in_flight) != 0; ms++)
        nanosleep(&tick, NULL);
}

bool vram_capture_active(void) { return atomic_load(&captures) != 0; }

bool vram_capture_wait_none(int timeout_ms)
{
    unsigned n = atomic_load(&captures);
    if (n != 0)
        vram_futex_wait(&captures, n, (uint64_t)timeout_ms * 1000000);
    return atomic_load(&captures) == 0;
}

void vram_capture_announce(void)
{
    int saved = errno;
    unsigned n;
    atomic_fetch_add(&captures, 1);
    while ((n = atomic_load(&in_flight)) != 0)
        vram_futex_wait(&in_flight, n, VRAM_FOR_EVER);
    errno = saved;
}

static void one_less(void)
{
    if (atomic_fetch_sub(&captures, 1) != 1)
        return;
    int saved = errno;
    vram_futex_wake(&captures);
    if (vram_capture_on_none)
        vram_capture_on_none();
    errno = saved;
}

void vram_capture_not_begun(void) { one_less(); }

static struct capturing key(CUstream stream, bool per_thread, CUcontext ctx)
{
    bool thread_owned = stream == CU_STREAM_PER_THREAD || (per_thread && !stream);
    struct capturing k = {thread_owned ? CU_STREAM_PER_THREAD : stream, ctx, 0};
    if (thread_owned)
        k.tid = (int)syscall(SYS_gettid);
    return k;
}

void vram_capture_begun(CUstream stream, bool per_thread, CUcontext ctx)
{
    struct capturing k = key(stream, per_thread, ctx);
    vram_lock(VRAM_RANK_CAPTURE);
    bool room = listed < STREAMS_MAX, told = full;
    if (room)
        list[listed++] = k;
    full |= !room;
    vram_unlock(VRAM_RANK_CAPTURE);
    /* Not listed, it never ends for us: everything stays native, which is slow and right. */
    if (!room && !told)
        vram_say("more than %d streams capture at once; caching is off from here on", STREAMS_MAX);
}

/* Drops the entries for which the stream (if given) and the context match; a stream handle is unique while it lives, so
 * the context decides only for the per-thread handle, where it is known. */
static unsigned drop(const struct capturing *k, bool whole_context)
{
    unsigned dropped = 0;
    vram_lock(VRAM_RANK_CAPTURE);
    for (unsigned i = 0; i < listed;) {
        const struct capturing *c = &list[i];
        bool match = whole_context ? c->ctx == k->ctx
                                   : c->stream == k->stream && c->tid == k->tid &&
                                         (c->tid == 0 || c->ctx == k->ctx || !c->ctx || !k->ctx);
        if (match) {
            list[i] = list[--listed];
            dropped++;
        } else {
            i++;
        }
    }
    vram_unlock(VRAM_RANK_CAPTURE);
    return dropped;
}

void vram_capture_ended(CUstream stream, bool per_thread, CUcontext ctx)
{
    struct capturing k = key(stream, per_thread, ctx);
    for (unsigned n = drop(&k, false); n > 0; n--)
        one_less();
}

void vram_capture_context_ended(CUcontext ctx)
{
    struct capturing k = {NULL, ctx, 0};
    for (unsigned n = drop(&k, true); n > 0; n--)
        one_less();
}

void vram_capture_forget(void)
{
    listed = 0;
    atomic_store(&captures, 0);
    atomic_store(&in_flight, 0);
}

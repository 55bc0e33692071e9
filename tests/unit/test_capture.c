#include "driver/capture.h"

#include <criterion/criterion.h>
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

static CUstream stream(uintptr_t n) { return (CUstream)(n * 0x100); }
static CUcontext context(uintptr_t n) { return (CUcontext)(n * 0x100000); }

static void begin(CUstream s, bool per_thread, CUcontext c)
{
    vram_capture_announce();
    vram_capture_begun(s, per_thread, c);
}

Test(capture, the_gate_is_shut_from_announcement_to_end)
{
    cr_assert(vram_gate_enter());
    vram_gate_leave();
    vram_capture_announce();
    cr_assert_not(vram_gate_enter());
    vram_capture_begun(stream(1), false, context(1));
    cr_assert_not(vram_gate_enter());
    vram_capture_ended(stream(2), false, context(1)); /* another stream */
    cr_assert(vram_capture_active());
    vram_capture_ended(stream(1), false, context(2)); /* a handle is enough: the current context may be another */
    cr_assert_not(vram_capture_active());
    cr_assert(vram_gate_enter());
}

Test(capture, a_refused_begin_opens_it_again)
{
    vram_capture_announce();
    vram_capture_not_begun();
    cr_assert(vram_gate_enter());
}

Test(capture, contexts_end_their_captures)
{
    begin(stream(1), false, context(1));
    begin(stream(2), false, context(1));
    begin(stream(3), false, context(2));
    vram_capture_context_ended(context(1));
    cr_assert(vram_capture_active());
    vram_capture_context_ended(context(2));
    cr_assert_not(vram_capture_active());
}

static void *end_per_thread(void *unused)
{
    (void)unused;
    vram_capture_ended(CU_STREAM_PER_THREAD, false, context(1));
    return NULL;
}

/* Law 15: one handle, a stream of each thread. */
Test(capture, the_per_thread_stream_is_the_threads)
{
    pthread_t other;
    begin(NULL, true, context(1)); /* the null stream of a _ptsz entry is the same stream */
    pthread_create(&other, NULL, end_per_thread, NULL);
    pthread_join(other, NULL);
    cr_assert(vram_capture_active());
    vram_capture_ended(CU_STREAM_PER_THREAD, false, context(1));
    cr_assert_not(vram_capture_active());
}

static atomic_int calls, captures, together, stop;

static void *call_the_driver(void *unused)
{
    while (!atomic_load(&stop)) {
        if (!vram_gate_enter())
            continue;
        atomic_fetch_add(&calls, 1);
        if (atomic_load(&captures))
            atomic_store(&together, 1);
        atomic_fetch_sub(&calls, 1);
        vram_gate_leave();
    }
    return unused;
}

/* The race that law 17 names: never a capture and a call of ours at one time. */
Test(capture, a_call_and_a_capture_never_overlap, .timeout = 60)
{
    pthread_t threads[3];
    for (int i = 0; i < 3; i++)
        pthread_create(&threads[i], NULL, call_the_driver, NULL);
    for (int i = 0; i < 20000; i++) {
        vram_capture_announce();
        atomic_fetch_add(&captures, 1);
        if (atomic_load(&calls))
            atomic_store(&together, 1);
        atomic_fetch_sub(&captures, 1);
        vram_capture_not_begun();
    }
    atomic_store(&stop, 1);
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    cr_assert_not(atomic_load(&together));
    cr_assert_not(vram_capture_active());
}

Test(capture, too_many_streams_leave_everything_native)
{
    for (uintptr_t i = 1; i <= 300; i++)
        begin(stream(i), false, context(1));
    for (uintptr_t i = 1; i <= 300; i++)
        vram_capture_ended(stream(i), false, context(1));
    cr_assert_not(vram_gate_enter());
}

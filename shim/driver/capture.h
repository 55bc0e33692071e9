/*
 * Which streams of the process are being captured, and the gate that keeps our own driver calls out of a capture (law 17).
 *
 * While any stream captures, the shim makes no driver call of its own that could fail in, or invalidate, a capture. What
 * it would have done is done natively by the caller's own call, or waits. The race between "nobody captures" and a call
 * of ours is closed by counting: vram_gate_enter() counts a call of ours as in flight and fails when a capture is announced;
 * a begin announces itself first, then waits until the count is zero.
 *
 *   invariant: a capture that the driver has begun and a call of ours in flight never exist at one time.
 *
 * Callers: heap/ and control/ enter and leave the gate; interpose/ reports begin and end. The list is under CAPTURE; the
 * two counters are atomic.
 */
#ifndef VRAM_DRIVER_CAPTURE_H
#define VRAM_DRIVER_CAPTURE_H

#include <stdbool.h>

#include "vramshim/cuda_abi.h"

/* Around each driver call of ours that a capture forbids (synchronise, free, event). Nests. */
bool vram_gate_enter(void);
void vram_gate_leave(void);

void vram_gate_drain(int timeout_ms); /* waits until no call of ours is in flight, at most so long */

bool vram_capture_active(void);

/* Blocks until no stream captures or `timeout_ms` have passed; true if none does. */
bool vram_capture_wait_none(int timeout_ms);

/* Around the driver's begin. `per_thread`: the entry is a _ptsz one, where the null stream is the calling thread's.
 * A stream is told apart by its handle, the current context and, for the per-thread handles, the thread (law 15). */
void vram_capture_announce(void);
void vram_capture_begun(CUstream stream, bool per_thread, CUcontext ctx);
void vram_capture_not_begun(void);

/* The stream no longer captures: ended, destroyed, or its context is gone. Unknown streams are ignored. */
void vram_capture_ended(CUstream stream, bool per_thread, CUcontext ctx);
void vram_capture_context_ended(CUcontext ctx);

/* Called, without a lock, each time the last capture ends. Set once at start. */
extern void (*vram_capture_on_none)(void);

void vram_capture_forget(void); /* in a forked child */

#endif

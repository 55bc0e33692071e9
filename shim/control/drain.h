/*
 * Draining what Python frameworks keep above the driver: whoever asks a program from outside for its GPU memory means torch's
 * and CuPy's caches as well, and only they can give them up.
 *
 * A throw-away thread takes Python's lock (the GIL), calls torch.cuda.empty_cache() and CuPy's free_all_blocks() in a
 * namespace of its own, and ends. What they free arrives at our hooks as any free does, and the flush after it gives it back.
 *
 *   invariants
 *   - one drain at a time; nobody waits for it without a bound, and no CUDA call of the program waits for it at all
 *   - no lock of ours is held, and the gate of captures is not entered, by a thread that has the GIL or wants it
 *   - none begins while a stream captures; its thread's capture mode is relaxed, so that a capture that begins meanwhile is not
 *     harmed by what the frameworks call (cuThreadExchangeStreamCaptureMode)
 *   - only modules that are imported already are touched, and of __main__ nothing
 *
 * While the interpreter ends, CPython to 3.11 ends a thread that asks for the GIL, 3.12 and later let it sleep for ever. Hence
 * the thread of its own, with the default stack: neither harms anybody. The end of the interpreter waits for a drain that has
 * begun (threading's own list of what to call first), so that no framework is left in the middle of it.
 */
#ifndef VRAM_CONTROL_DRAIN_H
#define VRAM_CONTROL_DRAIN_H

#include <stdbool.h>
#include <stdint.h>

enum { VRAM_DRAIN_TEXT = 512 };

struct vram_drained {
    uint64_t gil_ns; /* until Python let us in */
    char parts[VRAM_DRAIN_TEXT]; /* a line for each framework: "NAME BYTES", or "NAME !what went wrong" */
};

/* Starts a drain, if Python is there and initialised; `done` is called on its thread when it is over. False: there is
 * nothing to drain, the option forbids it, a drain is under way, or no thread can be had. */
bool vram_drain_start(void (*done)(void));

/* Waits until the drain is over, at most so long, and takes its outcome, once. False: none is over. */
bool vram_drain_take(struct vram_drained *ret_drained, unsigned timeout_ms);

#endif

/*
 * The trace: a line for each allocation and each free of plain and pitched memory, in the CSV format of RMM's logging adaptor,
 * where VRAMSHIM_TRACE says. What a simulation of a cache, or tests/bench/replay, takes as its input.
 *
 *   Thread,Time,Action,Pointer,Size,Stream
 *   417,00:00:00.014758,allocate,0x7ff7cde00000,4096,0
 *
 * It is what the program sees, whatever the cache does: an allocation is entered after it came back, a free before it is made
 * (law 16), so no two lives of an address overlap. Size is what the program asked for, or, of pitched memory, what its rows
 * take. A free of what is no block of the program's (another family, unknown, freed already) has no line, nor has the end of a
 * context; one that the driver refuses, in a context that has failed, keeps its line. Time is since the first line.
 *
 * Called by interpose/, process.c and control/. Lines gather in a buffer, under TRACE; it is written under TRACE and no other
 * lock when it is full, at the signal, and on each way out of the process.
 *
 *   a line is whole in the buffer, or not counted in it; the header is the first line that a process writes
 *   the buffer always has room for one more line
 *   between two writes no descriptor is open
 *   the first write that fails is said, and the last: from then on the process is not traced (laws 30, 32)
 */
#ifndef VRAM_OBSERVE_TRACE_H
#define VRAM_OBSERVE_TRACE_H

#include <stdbool.h>

#include "base/compiler.h"
#include "vramshim/cuda_abi.h"

extern bool vram_trace_at_work; /* accessed atomically */
static inline bool vram_trace_on(void) { return vram_unlikely(__atomic_load_n(&vram_trace_at_work, __ATOMIC_RELAXED)); }

/* At load, after the options were read; and in a forked child, which has a file of its own, or none. Writes nothing. */
void vram_trace_start(void);

/* The next two while vram_trace_on(). An allocation has been answered so; with an error, `ptr` means nothing. */
void vram_trace_allocated(CUresult r, CUdeviceptr ptr, size_t size);
/* This address is about to be freed. Takes HEAP for a moment. */
void vram_trace_freeing(CUdeviceptr ptr);

/* Writes what has gathered. Does nothing in a process that is not ours; gives up after about 200 ms, in which somebody else
 * writes, or was interrupted on this thread by a signal handler that leaves. errno is kept. */
void vram_trace_write(void);

#endif

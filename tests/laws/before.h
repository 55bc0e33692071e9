/*
 * A library that stands before the driver, as some message-passing libraries do: before.c defines the driver's entries, counts, calls
 * the driver behind, and drops what it knows of a buffer when that is freed. Nothing of this shows whether the shim is there.
 *
 * How it finds the driver is chosen by BEFORE_BY in the environment: "next" (RTLD_NEXT, the default) or "handle" (dlsym on a handle
 * of libcuda.so.1, as a stub does that only looks up and forwards). BEFORE_FIRST makes its constructor do something: "look" looks an
 * entry up on a handle, "wait" calls the driver by name on a thread and waits for it.
 */
#ifndef TESTS_LAWS_BEFORE_H
#define TESTS_LAWS_BEFORE_H

#include <setjmp.h>
#include <stdbool.h>
#include <stddef.h>

#include "vramshim/cuda_abi.h"

/* Calls of this entry of it, by the exported name. */
unsigned long before_calls(const char *entry);

/* Blocks that it takes for registered: plain and pitched memory that it was told of, and not that it is freed. Copies at most max
 * addresses, returns how many there are. */
size_t before_registered(unsigned long long *ret_addresses, size_t max);

/* From now on it asks, in each free, how large the buffer is, and allocates and frees some memory of its own: at the driver that it
 * has found, or by name, as it is linked. */
void before_be_curious(bool by_name);
/* What it was told of the last one. */
size_t before_last_size(void);

/* The next free leaves it by longjmp to there, before the driver is called. */
void before_leave_to(jmp_buf *there);

/* Calls its own definitions directly, as a library that is linked -Bsymbolic does, and holds a lock over each. */
CUresult before_alloc_and_free(size_t bytes);

#endif

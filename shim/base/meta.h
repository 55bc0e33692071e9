/*
 * The metadata allocator: memory for our own records, from mmap, never from the program's malloc (which may be what is
 * calling us, and whose leak checkers would show our records as the program's).
 *
 * Callers name the size again when they free, so there are no headers: powers of two up to 32 KiB come from 256 KiB
 * arenas through free lists, larger sizes are mappings of their own. Locked inside (rank META). Returns NULL when the
 * host has no memory; the caller then goes on without a record (law 30).
 */
#ifndef VRAM_BASE_META_H
#define VRAM_BASE_META_H

#include <stddef.h>
#include <stdint.h>

void *vram_meta_alloc(size_t size); /* 16-byte aligned, not zeroed; NULL if the host has none */
void vram_meta_free(void *ptr, size_t size);
uint64_t vram_meta_bytes(void); /* mapped at present, bytes */

/* In a forked child: forget every record of the parent. Nothing allocated before is valid afterwards; the arenas are
 * unmapped (the parent keeps its own copy). Single-threaded, with META held by nobody. */
void vram_meta_forget(void);

#endif

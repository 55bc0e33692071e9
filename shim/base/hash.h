/*
 * uthash on our own allocator, and without its exit(): a table that cannot grow reports, and the caller goes on without
 * the entry (law 30). Include this instead of <uthash.h>. Not locked: the owner of the table locks.
 */
#ifndef VRAM_BASE_HASH_H
#define VRAM_BASE_HASH_H

#include "base/meta.h"

#define uthash_malloc(size) vram_meta_alloc(size)
#define uthash_free(ptr, size) vram_meta_free(ptr, size)
#define HASH_NONFATAL_OOM 1
/* Set by the caller in scope: HASH_ADD clears the element's hh.tbl when it could not be added. */
#define uthash_nonfatal_oom(element) ((void)(element))

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wcast-align"
#include <uthash.h>
#pragma GCC diagnostic pop

#endif

/*
 * Text built in a buffer of the caller's: no allocation, no locale, always terminated, cut at the end when full. For the
 * report, the log and everything else that is said where malloc must not be called.
 */
#ifndef VRAM_BASE_TEXT_H
#define VRAM_BASE_TEXT_H

#include <stddef.h>
#include <stdint.h>

#include "base/compiler.h"

struct vram_text {
    char *buf;
    size_t cap; /* bytes of buf, at least 1 */
    size_t len; /* without the final NUL; len < cap */
};

/* Of what others have named, as it is shown: more of it only fills the buffer. */
enum { VRAM_TEXT_NAME = 256 };

#define VRAM_TEXT(array) ((struct vram_text){(array), sizeof(array), 0})

void vram_text_add(struct vram_text *t, const char *fmt, ...) VRAM_PRINTF(2, 3);
void vram_text_name(struct vram_text *t, const char *name);   /* of others: quoted, and cut with "..." */
void vram_text_bytes(struct vram_text *t, uint64_t bytes);   /* "512 B", "1.5 MiB", "80.0 GiB" */
void vram_text_duration(struct vram_text *t, uint64_t ns);   /* "12 us", "3.4 ms", "5.0 s", "2 h 3 min" */
void vram_text_count(struct vram_text *t, uint64_t n, const char *noun); /* "1 block", "2 blocks" */

#endif

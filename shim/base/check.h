/*
 * Invariants, checked in builds with -Dchecks=true and compiled away otherwise. A failed check is a bug of ours: it says
 * which one on descriptor 2 and aborts, because a test build must stop where the equation broke.
 */
#ifndef VRAM_BASE_CHECK_H
#define VRAM_BASE_CHECK_H

#ifdef VRAM_CHECKS
void vram_check_failed(const char *what, const char *file, int line) __attribute__((noreturn));
#define VRAM_CHECK(cond) ((cond) ? (void)0 : vram_check_failed(#cond, __FILE__, __LINE__))
#else
#define VRAM_CHECK(cond) ((void)0)
#endif

#endif

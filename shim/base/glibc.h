/*
 * What glibc 2.34 moved from libpthread into libc. A library built there would ask for version 2.34 of them and not load on
 * anything older; so they are bound to the version that every glibc has, and weakly: where libpthread is not there (an older
 * glibc, a program without threads) the symbol is NULL, and the program loads all the same.
 *
 * A sanitizer stands in front of these functions and must see the calls: built with one, they are bound as ever.
 */
#ifndef VRAM_BASE_GLIBC_H
#define VRAM_BASE_GLIBC_H

#include <pthread.h>

/* `since`: the version in which x86-64 has had the symbol from the beginning; on aarch64 all began with 2.17. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define VRAM_OLD_SYMBOL(name, since) extern __typeof__(name) name __attribute__((weak))
#elif defined(__x86_64__)
#define VRAM_OLD_SYMBOL(name, since)                                                                                   \
    extern __typeof__(name) name __attribute__((weak));                                                                \
    __asm__(".symver " #name "," #name "@" since)
#elif defined(__aarch64__)
#define VRAM_OLD_SYMBOL(name, since)                                                                                   \
    extern __typeof__(name) name __attribute__((weak));                                                                \
    __asm__(".symver " #name "," #name "@GLIBC_2.17")
#else
#error "vramshim knows x86-64 and aarch64"
#endif

#endif

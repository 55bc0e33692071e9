/* Words for the compiler. Used by every layer. */
#ifndef VRAM_BASE_COMPILER_H
#define VRAM_BASE_COMPILER_H

#define VRAM_EXPORT __attribute__((visibility("default")))
#define VRAM_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))

/* Thread-local state is initial-exec (law 4): the dynamic model may allocate at first touch, inside a malloc that is
 * looking itself up. */
#define VRAM_TLS __thread __attribute__((tls_model("initial-exec")))

#define vram_likely(x) __builtin_expect(!!(x), 1)
#define vram_unlikely(x) __builtin_expect(!!(x), 0)
#define VRAM_LENGTH(array) (sizeof(array) / sizeof((array)[0]))

#endif

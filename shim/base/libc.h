/*
 * The real functions behind those of libc that we stand in front of, found by walking libc's symbol table (base/elf.h; in
 * libdl before glibc 2.34): safe before any constructor has run, in a signal handler and in a vfork child.
 */
#ifndef VRAM_BASE_LIBC_H
#define VRAM_BASE_LIBC_H

#include <pthread.h>
#include <signal.h>
#include <stdio.h>

#define VRAM_LIBC_FUNCTIONS(X)                                                                                         \
    X(void *, dlopen, (const char *, int))                                                                             \
    X(void *, dlsym, (void *, const char *))                                                                           \
    X(int, sigaction, (int, const struct sigaction *, struct sigaction *))                                             \
    X(sighandler_t, signal, (int, sighandler_t))                                                                       \
    X(sighandler_t, sysv_signal, (int, sighandler_t))                                                                  \
    X(sighandler_t, sigset, (int, sighandler_t))                                                                       \
    X(int, sigignore, (int))                                                                                           \
    X(int, siginterrupt, (int, int))                                                                                   \
    X(int, __cxa_at_quick_exit, (void (*)(void *), void *))                                                           \
    X(void, _exit, (int))                                                                                              \
    X(int, dup2, (int, int))                                                                                           \
    X(int, dup3, (int, int, int))                                                                                      \
    X(FILE *, freopen, (const char *, const char *, FILE *))                                                           \
    X(FILE *, freopen64, (const char *, const char *, FILE *))                                                         \
    X(int, prctl, (int, unsigned long, unsigned long, unsigned long, unsigned long))                                   \
    X(int, pthread_create, (pthread_t *, const pthread_attr_t *, void *(*)(void *), void *))

/* vram_libc_sigaction() and so on: the pointer to the real one. Never NULL for libc.so.6. */
#define VRAM_DECLARE(ret, name, params) ret(*vram_libc_##name(void)) params;
VRAM_LIBC_FUNCTIONS(VRAM_DECLARE)
#undef VRAM_DECLARE

#endif

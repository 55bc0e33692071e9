/*
 * Whether the program has put itself into a sandbox: a seccomp filter of its own, under which a call that it never makes itself
 * may end it. Whoever writes at exit asks, and then makes no call that it can do without (base/say.h, observe/).
 *
 * Known by what the program says: PR_SET_NO_NEW_PRIVS, without which no unprivileged program gets a filter, or PR_SET_SECCOMP,
 * seen by interpose/libc.c. And by what the kernel says, where a filter came by a plain system call: none at the first use of
 * GPU memory, one now. A filter that was there before (every container has one) means nothing: it does not change.
 *
 * No lock; async-signal-safe; errno is kept.
 */
#ifndef VRAM_BASE_SANDBOX_H
#define VRAM_BASE_SANDBOX_H

#include <stdbool.h>

void vram_sandbox_look(void);    /* at the first use of GPU memory: is there a filter already? */
void vram_sandbox_entered(void); /* the program has called for one */
bool vram_sandboxed(void);

#endif

/*
 * What becomes of our signal (laws 23, 24). The kernel has our handler; the program sees the disposition that it set. The
 * handler posts a request and then runs what the program installed. If the program ignores the signal, so does the kernel.
 *
 * The set functions stand behind the exported libc names (interpose/libc.c) and are called for our signal only, in our own
 * process only. They are async-signal-safe, as sigaction is: every signal is blocked while SIGNAL is held.
 */
#ifndef VRAM_CONTROL_DISPOSITION_H
#define VRAM_CONTROL_DISPOSITION_H

#include <signal.h>
#include <stdbool.h>

#include "base/proc.h"
#include "base/text.h"
#include "config/options.h"

/* At load: put our handler in front of whatever is installed. */
void vram_disposition_init(void);

/* This signal is ours, in this process. Inline, because it may be asked before a sanitizer's runtime is ready. */
static inline bool vram_disposition_ours(int sig)
{
    return sig != 0 && sig == vram_options->signal && vram_proc_is_recorded();
}

int vram_disposition_action(const struct sigaction *act, struct sigaction *old);
sighandler_t vram_disposition_signal(sighandler_t handler, int flags, bool mask_itself);
sighandler_t vram_disposition_sigset(sighandler_t handler);
int vram_disposition_interrupt(int interrupt);

/* Why the signal gives no memory back, for whoever waits for it: the program, or what started it, ignores it, or it is blocked in
 * the calling thread. False: neither, or it has come through all the same. Async-signal-safe, and asks the kernel for the mask
 * alone. */
bool vram_disposition_unheard(struct vram_text *t);

#endif

/*
 * Is this the process whose state we keep? (law 25)
 *
 * "Ours" is the process whose pid was recorded, at load or by the child handler of a fork. A child made by _Fork or
 * clone runs no handler and has a copy of our memory; a vfork child shares it. The two tests below differ in cost and reach:
 *
 *   vram_proc_is_ours()     one load: a word on a page that the kernel wipes in every child with a memory of its own
 *                           (MADV_WIPEONFORK, Linux 4.14). Cannot see a vfork child. For the hot path; CUDA cannot be
 *                           called in a vfork child.
 *   vram_proc_is_recorded() asks the kernel for the pid. Sees every child. For sigaction, _exit and their kin, which
 *                           programs do call in vfork children.
 */
#ifndef VRAM_BASE_PROC_H
#define VRAM_BASE_PROC_H

#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

void vram_proc_record(void); /* at load, and in the child handler of a fork: this process is ours from now on */
bool vram_proc_is_recorded(void);

/* This thread may do nothing any more but read, write and leave (seccomp's strict mode): whatever it asks, the process is no
 * longer ours, and asking costs no system call. */
void vram_proc_renounce(void);

pid_t vram_proc_pid(void); /* the recorded one */

extern atomic_uint *vram_proc_word; /* 1 in our process, 0 in a child that has not recorded itself; NULL: no such page */

static inline bool vram_proc_is_ours(void)
{
    return vram_proc_word ? atomic_load_explicit(vram_proc_word, memory_order_relaxed) == 1 : vram_proc_is_recorded();
}

#endif

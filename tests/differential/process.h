/* What a program does with its signals and its children. */
#ifndef DIFFERENTIAL_PROCESS_H
#define DIFFERENTIAL_PROCESS_H

#include "machine.h"

void op_signal(struct thread *t, const uint64_t *arg);
void op_handler(struct thread *t, const uint64_t *arg);
void op_fork(struct thread *t, const uint64_t *arg);
void op_spawn(struct thread *t, const uint64_t *arg);

#endif

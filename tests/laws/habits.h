/*
 * Two other habits of libraries that want to know of each buffer that is freed: rewriting the relocations of what is loaded, and
 * patching a function's code. habits.c does both for cuMemAlloc_v2 and cuMemFree_v2, as such libraries do it, and counts.
 */
#ifndef TESTS_LAWS_HABITS_H
#define TESTS_LAWS_HABITS_H

#include <stdbool.h>

enum { HABIT_ALLOC, HABIT_FREE, HABITS };

/* From now on, calls through the relocations of every object that is loaded come here first. Returns how many were rewritten. */
unsigned habit_rewrite(void);

/* Each of the two functions that dlsym(RTLD_NEXT) finds from here (behind the program and what is preloaded: the driver's own), or
 * RTLD_DEFAULT (whatever comes first), begins with a jump to here. False: not on this processor. For one thread. */
bool habit_patch(bool whatever_comes_first);

/* Calls that came here. */
unsigned long habit_calls(int which);

#endif

/* Lookups made from inside a library: see next.c. `first` comes before `second` in the search order, libcuda after
 * both. */
#ifndef TESTS_LAWS_NEXT_H
#define TESTS_LAWS_NEXT_H

#include <stddef.h>

const char *next_who(void);
void *first_next(const char *name);
void *first_default(const char *name);
void *first_next_version(const char *name, const char *version);
void *second_next(const char *name);
void *second_default(const char *name);
void *second_next_version(const char *name, const char *version);
int driver_version(void);          /* of `second` */
unsigned long first_mallocs(void); /* calls of the malloc that `first` has put in front of libc's */
void *malloc(size_t size);

#endif

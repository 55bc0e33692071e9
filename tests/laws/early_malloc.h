/* What early_malloc.c has seen. Looked up by name: the library is preloaded, not linked. */
#ifndef TESTS_LAWS_EARLY_MALLOC_H
#define TESTS_LAWS_EARLY_MALLOC_H

#include <stddef.h>

unsigned long early_malloc_reentered(void); /* allocations made while it was looking itself up */
unsigned long early_malloc_errors(void);    /* lookups after which dlerror() had something to say */
int early_malloc_works(void);

void *malloc(size_t size);
void *calloc(size_t n, size_t size);
void *realloc(void *p, size_t size);
void free(void *p);

#endif

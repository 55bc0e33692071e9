/*
 * What libvramshim.so offers to those who know it. To be looked up by dlsym on a handle of the library, or declared weak: nothing
 * links against it. Its presence also tells that a file is a libvramshim.so.
 */
#ifndef VRAMSHIM_VRAMSHIM_H
#define VRAMSHIM_VRAMSHIM_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Whether VRAMSHIM_<name>=<value> would be taken, by the parser that reads the environment: 0, -ENOENT for an unknown name, -EINVAL
 * for a value that is not taken. Then *ret_why (NUL-terminated, cut at cap; may be NULL with cap 0) has a line, without a
 * newline, that says what is wrong with it, control characters quoted. Changes nothing; thread-safe.
 */
int vramshim_check_option(const char *name, const char *value, char *ret_why, size_t cap);

#ifdef __cplusplus
}
#endif

#endif

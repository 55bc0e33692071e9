/*
 * The libvramshim.so that `vramctl run` preloads: found, loaded into vramctl itself to see that the loader can and to ask its
 * parser, and named in LD_PRELOAD. Loaded, it leaves nothing behind that outlives an exec: no descriptor, no thread, and a
 * handler of its signal, which exec puts back to what was inherited.
 */
#ifndef VRAMCTL_LIBRARY_H
#define VRAMCTL_LIBRARY_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>

#include "elffile.h"

struct vram_library {
    char path[PATH_MAX]; /* absolute, symbolic links as they were named */
    void *handle;
    bool first_named; /* in the LD_PRELOAD that vramctl was started with, and no other libvramshim before it */
    struct vram_elf elf;
    int (*check_option)(const char *name, const char *value, char *ret_why, size_t cap); /* vramshim_check_option */
};

/*
 * The library at `named`, or with NULL the one that was built or installed with this vramctl. Returns 0, or a negative errno and
 * in ret_why the line that says what is wrong.
 */
int vram_library_open(struct vram_library *ret_library, const char *named, char *ret_why, size_t cap);

/*
 * What LD_PRELOAD has to be, where it has been `before` since vramctl was started (NULL or empty: nothing): the library in front of it (law 26), or just that if
 * the library is named there already and no other libvramshim comes first. To be freed; NULL without memory.
 */
char *vram_library_preload(const struct vram_library *library, const char *before);

#endif

/*
 * Would the dynamic loader preload a library into a program? Asked before the program is started, because the loader itself
 * ignores the library in silence, or with a word that nobody reads.
 */
#ifndef VRAMCTL_LOADABLE_H
#define VRAMCTL_LOADABLE_H

#include <stdbool.h>
#include <stddef.h>

#include "elffile.h"

/*
 * `name` is looked for as execvp does; scripts are followed to what runs them, `#!/usr/bin/env NAME` to NAME. False only where it
 * is certain that the library would not be loaded; then ret_why has the line. What is not found, cannot be read, or is neither
 * script nor ELF file (binfmt_misc may know it) is left to execvp. What a program starts in turn is not looked at.
 */
bool vram_loadable(const char *name, const struct vram_elf *library, char *ret_why, size_t cap);

#endif

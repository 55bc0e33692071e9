/*
 * Symbols of loaded objects, found by walking the loader's list and the objects' own hash tables: no dlsym, no lock, no
 * allocation, no dlerror left behind (law 4). That is how the real dlsym is found, and the driver's entries too: a
 * lookup through libdl could come back to us, or to another shim.
 *
 * The list is read without the loader's lock. Objects are appended to it and libc and libcuda are never unloaded, so a
 * walk that starts at its head sees them whole. Only the main namespace is seen (not dlmopen's).
 */
#ifndef VRAM_BASE_ELF_H
#define VRAM_BASE_ELF_H

#include <link.h>
#include <stdbool.h>
#include <stdint.h>

/* strcmp(a, b) == 0, without libc: what runs inside anybody's dlsym may run before a sanitizer's strcmp is ready. */
static inline bool vram_elf_same(const char *a, const char *b)
{
    while (*a && *a == *b) {
        a++;
        b++;
    }
    return *a == *b;
}

/* The first loaded object whose DT_SONAME is `soname`, or NULL. */
const struct link_map *vram_elf_find(const char *soname);

/* A defined, exported function or object of that object, or NULL. Versions are ignored; the default one of a name comes
 * first in none of the libraries that we ask, and all agree on the address. */
void *vram_elf_symbol(const struct link_map *map, const char *name);

/* Sets defined[i] where the object defines and exports a function names[i]; leaves the others as they are. Data is none. Of *map
 * only l_addr and l_ld are looked at. */
void vram_elf_mark_functions(const struct link_map *map, const char *const *names, size_t count, bool *defined);

/* Whether its DT_SONAME is that. */
bool vram_elf_is_named(const struct link_map *map, const char *soname);

/* The memory that the object's segments span; 0, 0 where its program headers cannot be found. */
void vram_elf_span(const struct link_map *map, uintptr_t *ret_start, uintptr_t *ret_end);

/* The object that contains an address, or NULL. dladdr would do, but waits for a dlopen that another thread is in. */
const struct link_map *vram_elf_containing(uintptr_t address);

#endif

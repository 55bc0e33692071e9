/*
 * The families of memory (vramshim/families.def) and the figures that are kept for each of them. Pure.
 *
 *   bytes, count = what was born less what went; neither ever goes below 0, whatever the order of calls
 *   peak_bytes >= bytes; total_* only grow
 */
#ifndef VRAM_LEDGER_FAMILY_H
#define VRAM_LEDGER_FAMILY_H

#include <stdint.h>

enum vram_family {
#define VRAM_FAMILY(name, words, where, ends) VRAM_##name,
#include "vramshim/families.def"
#undef VRAM_FAMILY
    VRAM_FAMILIES
};

enum vram_where { VRAM_WHERE_DEVICE, VRAM_WHERE_HOST, VRAM_WHERE_FOREIGN };

struct vram_family_traits {
    const char *words;
    enum vram_where where;
    enum { VRAM_ENDS_CONTEXT, VRAM_ENDS_SELF } ends;
};
extern const struct vram_family_traits vram_family_traits[VRAM_FAMILIES];

struct vram_figures {
    uint64_t bytes, count; /* held by the program now */
    uint64_t peak_bytes;
    uint64_t total_bytes, total_count; /* since the start */
    uint64_t ended_bytes, ended_count; /* not freed when their context ended */
};

void vram_figures_more(struct vram_figures *f, uint64_t bytes);
void vram_figures_less(struct vram_figures *f, uint64_t bytes);

#endif

#include "ledger/family.h"

const struct vram_family_traits vram_family_traits[VRAM_FAMILIES] = {
#define VRAM_FAMILY(name, words, where, ends) {words, VRAM_WHERE_##where, VRAM_ENDS_##ends},
#include "vramshim/families.def"
#undef VRAM_FAMILY
};

static void add(uint64_t *sum, uint64_t n)
{
    *sum = *sum > UINT64_MAX - n ? UINT64_MAX : *sum + n;
}

void vram_figures_more(struct vram_figures *f, uint64_t bytes)
{
    add(&f->bytes, bytes);
    f->count++;
    add(&f->total_bytes, bytes);
    f->total_count++;
    if (f->bytes > f->peak_bytes)
        f->peak_bytes = f->bytes;
}

void vram_figures_less(struct vram_figures *f, uint64_t bytes)
{
    f->bytes -= bytes < f->bytes ? bytes : f->bytes;
    f->count -= f->count > 0;
}

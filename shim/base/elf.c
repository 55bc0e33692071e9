#include "base/elf.h"

#include <elf.h>
#include <stddef.h>
#include <sys/auxv.h>
#include <sys/mman.h>

/* What a walk needs of an object's dynamic section. */
struct tables {
    const ElfW(Sym) * symbols;
    const char *strings;
    const uint32_t *gnu_hash;
    const uint32_t *sysv_hash;
    const char *soname;
};

/* glibc relocates the pointers of a writable dynamic section in place, and leaves those of a read-only one (the vDSO,
 * some linkers' output) as offsets. */
static const void *relocated(const struct link_map *map, ElfW(Addr) value)
{
    return (const void *)(value < map->l_addr ? value + map->l_addr : value);
}

static bool read_tables(const struct link_map *map, struct tables *ret_tables)
{
    struct tables t = {0};
    ElfW(Addr) soname = 0;
    bool named = false;
    if (!map->l_ld)
        return false;
    for (const ElfW(Dyn) *d = map->l_ld; d->d_tag != DT_NULL; d++) {
        switch (d->d_tag) {
        case DT_SYMTAB: t.symbols = relocated(map, d->d_un.d_ptr); break;
        case DT_STRTAB: t.strings = relocated(map, d->d_un.d_ptr); break;
        case DT_GNU_HASH: t.gnu_hash = relocated(map, d->d_un.d_ptr); break;
        case DT_HASH: t.sysv_hash = relocated(map, d->d_un.d_ptr); break;
        case DT_SONAME: soname = d->d_un.d_val; named = true; break;
        default: break;
        }
    }
    if (!t.symbols || !t.strings)
        return false;
    t.soname = named ? t.strings + soname : NULL;
    *ret_tables = t;
    return true;
}

static const ElfW(Sym) *defined(const struct tables *t, uint32_t index, const char *name)
{
    const ElfW(Sym) *s = &t->symbols[index];
    return s->st_shndx != SHN_UNDEF && vram_elf_same(t->strings + s->st_name, name) ? s : NULL;
}

static const ElfW(Sym) *find_gnu(const struct tables *t, const char *name)
{
    const uint32_t *h = t->gnu_hash;
    uint32_t buckets = h[0], first = h[1], bloom_words = h[2];
    const ElfW(Addr) *bloom = (const ElfW(Addr) *)(h + 4);
    const uint32_t *bucket = h + 4 + bloom_words * (sizeof(ElfW(Addr)) / 4);
    const uint32_t *chain = bucket + buckets;
    const unsigned bits = sizeof(ElfW(Addr)) * 8;
    uint32_t hash = 5381;
    for (const unsigned char *c = (const unsigned char *)name; *c; c++)
        hash = hash * 33 + *c;
    if (buckets == 0 || bloom_words == 0)
        return NULL;
    ElfW(Addr) word = bloom[hash / bits % bloom_words]; /* most names are in few objects */
    if (!((word >> hash % bits) & (word >> (hash >> h[3]) % bits) & 1))
        return NULL;
    uint32_t i = bucket[hash % buckets];
    if (i < first)
        return NULL;
    for (;; i++) {
        uint32_t entry = chain[i - first];
        if ((entry | 1) == (hash | 1)) {
            const ElfW(Sym) *s = defined(t, i, name);
            if (s)
                return s;
        }
        if (entry & 1)
            return NULL;
    }
}

static const ElfW(Sym) *find_sysv(const struct tables *t, const char *name)
{
    const uint32_t *bucket = t->sysv_hash + 2, buckets = t->sysv_hash[0];
    uint32_t hash = 0;
    for (const unsigned char *c = (const unsigned char *)name; *c; c++) {
        hash = (hash << 4) + *c;
        hash ^= (hash & 0xf0000000) >> 24;
        hash &= 0x0fffffff;
    }
    if (buckets == 0)
        return NULL;
    for (uint32_t i = bucket[hash % buckets]; i; i = bucket[buckets + i]) {
        const ElfW(Sym) *s = defined(t, i, name);
        if (s)
            return s;
    }
    return NULL;
}

static const ElfW(Sym) *find(const struct tables *t, const char *name)
{
    if (t->gnu_hash)
        return find_gnu(t, name);
    return t->sysv_hash ? find_sysv(t, name) : NULL;
}

const struct link_map *vram_elf_find(const char *soname)
{
    for (const struct link_map *m = _r_debug.r_map; m; m = m->l_next)
        if (vram_elf_is_named(m, soname))
            return m;
    return NULL;
}

void *vram_elf_symbol(const struct link_map *map, const char *name)
{
    struct tables t;
    const ElfW(Sym) *s = read_tables(map, &t) ? find(&t, name) : NULL;
    unsigned type = s ? ELF64_ST_TYPE(s->st_info) : STT_NOTYPE;
    return type == STT_FUNC || type == STT_OBJECT ? (void *)(map->l_addr + s->st_value) : NULL;
}

void vram_elf_mark_functions(const struct link_map *map, const char *const *names, size_t count, bool *defined)
{
    struct tables t;
    if (!read_tables(map, &t))
        return;
    for (size_t i = 0; i < count; i++) {
        const ElfW(Sym) *s = find(&t, names[i]);
        unsigned type = s ? ELF64_ST_TYPE(s->st_info) : STT_NOTYPE;
        defined[i] |= type == STT_FUNC || type == STT_GNU_IFUNC;
    }
}

bool vram_elf_is_named(const struct link_map *map, const char *soname)
{
    struct tables t;
    return read_tables(map, &t) && t.soname && vram_elf_same(t.soname, soname);
}

void vram_elf_span(const struct link_map *map, uintptr_t *ret_start, uintptr_t *ret_end)
{
    const ElfW(Phdr) *phdr;
    size_t count;
    uintptr_t low = UINTPTR_MAX, high = 0;
    if (map == _r_debug.r_map) { /* the program itself: may be linked at a fixed address, with l_addr 0 */
        phdr = (const ElfW(Phdr) *)getauxval(AT_PHDR);
        count = getauxval(AT_PHNUM);
    } else { /* a shared object's first segment starts with its header, unless it was linked in an unusual way */
        const ElfW(Ehdr) *ehdr = (const ElfW(Ehdr) *)map->l_addr;
        unsigned char resident;
        *ret_start = *ret_end = 0;
        if (mincore((void *)(map->l_addr & ~(uintptr_t)4095), 1, &resident) != 0 || ehdr->e_ident[0] != ELFMAG0 ||
            ehdr->e_ident[1] != ELFMAG1 || ehdr->e_ident[2] != ELFMAG2 || ehdr->e_ident[3] != ELFMAG3)
            return;
        phdr = (const ElfW(Phdr) *)(map->l_addr + ehdr->e_phoff);
        count = ehdr->e_phnum;
    }
    for (size_t i = 0; phdr && i < count; i++) {
        if (phdr[i].p_type != PT_LOAD)
            continue;
        if (phdr[i].p_vaddr < low)
            low = phdr[i].p_vaddr;
        if (phdr[i].p_vaddr + phdr[i].p_memsz > high)
            high = phdr[i].p_vaddr + phdr[i].p_memsz;
    }
    *ret_start = high ? map->l_addr + low : 0;
    *ret_end = high ? map->l_addr + high : 0;
}

const struct link_map *vram_elf_containing(uintptr_t address)
{
    uintptr_t start, end;
    for (const struct link_map *m = _r_debug.r_map; m; m = m->l_next) {
        if (!m->l_ld || (m != _r_debug.r_map && !m->l_addr))
            continue;
        vram_elf_span(m, &start, &end);
        if (address >= start && address < end)
            return m;
    }
    return NULL;
}

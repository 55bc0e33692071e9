/*
 * The file of the shim that is loaded in this process, as the linker left it: symbols, versions, relocations and the
 * dynamic section. For scenarios about what it exports and needs.
 */
#ifndef TESTS_LAWS_SHIM_ELF_H
#define TESTS_LAWS_SHIM_ELF_H

#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "law.h"

struct shim_elf {
    const char *base;
    const ElfW(Ehdr) * header;
    const ElfW(Shdr) * sections;
    const ElfW(Sym) * symbols;
    size_t symbol_count;
    const char *strings;
    const ElfW(Versym) * versions; /* NULL: the file knows no versions */
};

static inline int shim_elf_path_(struct dl_phdr_info *info, size_t size, void *path)
{
    (void)size;
    if (!strstr(info->dlpi_name, "libvramshim"))
        return 0;
    *(const char **)path = info->dlpi_name;
    return 1;
}

/* The path of the loaded shim, NULL if there is none. */
static inline const char *shim_path(void)
{
    const char *path = NULL;
    dl_iterate_phdr(shim_elf_path_, &path);
    return path;
}

static inline const ElfW(Shdr) * shim_elf_section(const struct shim_elf *e, unsigned type, size_t nth)
{
    for (size_t i = 0; i < e->header->e_shnum; i++)
        if (e->sections[i].sh_type == type && nth-- == 0)
            return &e->sections[i];
    return NULL;
}

/* False where no shim is loaded: there is nothing to look at. */
static inline bool shim_elf_open(struct shim_elf *e)
{
    const char *path = shim_path();
    struct stat st;
    if (!path)
        return false;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0 && fstat(fd, &st) == 0);
    e->base = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    CHECK(e->base != MAP_FAILED && memcmp(e->base, ELFMAG, SELFMAG) == 0);
    e->header = (const void *)e->base;
    e->sections = (const void *)(e->base + e->header->e_shoff);
    const ElfW(Shdr) *symbols = shim_elf_section(e, SHT_DYNSYM, 0);
    const ElfW(Shdr) *versions = shim_elf_section(e, SHT_GNU_versym, 0);
    CHECK(symbols);
    e->symbols = (const void *)(e->base + symbols->sh_offset);
    e->symbol_count = symbols->sh_size / sizeof(*e->symbols);
    e->strings = e->base + e->sections[symbols->sh_link].sh_offset;
    e->versions = versions ? (const void *)(e->base + versions->sh_offset) : NULL;
    return true;
}

static inline const char *shim_elf_name(const struct shim_elf *e, const ElfW(Sym) * s)
{
    return e->strings + s->st_name;
}

static inline bool shim_elf_is_export(const ElfW(Sym) * s)
{
    return s->st_shndx != SHN_UNDEF && s->st_name && ELF64_ST_BIND(s->st_info) != STB_LOCAL;
}

static inline bool shim_elf_is_import(const ElfW(Sym) * s)
{
    return s->st_shndx == SHN_UNDEF && s->st_name;
}

/* The value of the nth dynamic entry with the tag; false: there are not so many. */
static inline bool shim_elf_dynamic(const struct shim_elf *e, ElfW(Sxword) tag, size_t nth, ElfW(Xword) * ret_value)
{
    const ElfW(Shdr) *section = shim_elf_section(e, SHT_DYNAMIC, 0);
    CHECK(section);
    const ElfW(Dyn) *d = (const void *)(e->base + section->sh_offset);
    for (; d->d_tag != DT_NULL; d++) {
        if (d->d_tag == tag && nth-- == 0) {
            *ret_value = d->d_un.d_val;
            return true;
        }
    }
    return false;
}

#endif

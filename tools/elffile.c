#include "elffile.h"

#include <elf.h>
#include <endian.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { OUR_ORDER = BYTE_ORDER == LITTLE_ENDIAN ? ELFDATA2LSB : ELFDATA2MSB };

static bool read_at(int fd, void *ret, size_t n, uint64_t offset)
{
    return pread(fd, ret, n, (off_t)offset) == (ssize_t)n;
}

static bool names_itself(int fd, const Elf64_Phdr *dynamic)
{
    Elf64_Dyn entry;
    for (uint64_t at = 0; at + sizeof(entry) <= dynamic->p_filesz; at += sizeof(entry)) {
        if (!read_at(fd, &entry, sizeof(entry), dynamic->p_offset + at) || entry.d_tag == DT_NULL)
            return false;
        if (entry.d_tag == DT_SONAME)
            return true;
    }
    return false;
}

int vram_elf_read(int fd, struct vram_elf *ret_elf)
{
    Elf64_Ehdr header = {0};
    struct vram_elf elf = {0};
    ssize_t n = pread(fd, &header, sizeof(header), 0);
    if (n < 0)
        return -errno;
    if (n < (ssize_t)sizeof(Elf32_Ehdr) || memcmp(header.e_ident, ELFMAG, SELFMAG) != 0)
        return -ENOEXEC;
    elf.bits = header.e_ident[EI_CLASS] == ELFCLASS64 ? 64 : 32;
    elf.foreign_order = header.e_ident[EI_DATA] != OUR_ORDER;
    elf.machine = elf.foreign_order ? __builtin_bswap16(header.e_machine) : header.e_machine; /* at one place in both lengths */
    if (elf.bits != 64 || elf.foreign_order) {
        *ret_elf = elf;
        return 0;
    }
    if (header.e_phentsize != sizeof(Elf64_Phdr))
        return -ENOEXEC;
    for (unsigned i = 0; i < header.e_phnum; i++) {
        Elf64_Phdr segment;
        if (!read_at(fd, &segment, sizeof(segment), header.e_phoff + i * sizeof(segment)))
            return -ENOEXEC;
        if (segment.p_type == PT_LOAD && segment.p_offset + segment.p_filesz > elf.size)
            elf.size = segment.p_offset + segment.p_filesz;
        if (segment.p_type == PT_INTERP && segment.p_filesz > 0) {
            size_t length = segment.p_filesz < sizeof(elf.interpreter) ? segment.p_filesz : sizeof(elf.interpreter);
            if (!read_at(fd, elf.interpreter, length, segment.p_offset))
                return -ENOEXEC;
            elf.interpreter[sizeof(elf.interpreter) - 1] = 0;
        } else if (segment.p_type == PT_DYNAMIC) {
            elf.has_soname = names_itself(fd, &segment);
        }
    }
    *ret_elf = elf;
    return 0;
}

const char *vram_elf_machine(const struct vram_elf *elf, char ret[VRAM_ELF_NAME_MAX])
{
    switch (elf->machine) {
    case EM_X86_64: return elf->bits == 64 ? "x86-64" : "x32";
    case EM_AARCH64: return "AArch64";
    case EM_386: return "32-bit x86";
    case EM_ARM: return "32-bit Arm";
    case EM_PPC64: return "POWER";
    case EM_RISCV: return "RISC-V";
    default: snprintf(ret, VRAM_ELF_NAME_MAX, "machine %u", elf->machine); return ret;
    }
}

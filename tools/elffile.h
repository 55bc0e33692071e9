/*
 * What the headers of an ELF file say, as far as vramctl asks: of the library (library.c) and of programs (loadable.c).
 */
#ifndef VRAMCTL_ELFFILE_H
#define VRAMCTL_ELFFILE_H

#include <stdbool.h>
#include <stdint.h>

struct vram_elf {
    unsigned char bits;   /* 32 or 64 */
    bool foreign_order;   /* of bytes */
    uint16_t machine;     /* EM_... */
    /* The rest is known where the file is of this machine's word length and byte order, else zero and empty. */
    uint64_t size;        /* that the file must have to be whole */
    bool has_soname;      /* it is a library: libraries have no interpreter, and the dynamic loader itself is one */
    char interpreter[256]; /* the dynamic loader that the kernel starts, cut; empty: none */
};

/* Returns 0, or -ENOEXEC if the file is no ELF file or is damaged, or another negative errno. Moves no file offset. */
int vram_elf_read(int fd, struct vram_elf *ret_elf);

/* "x86-64", "AArch64", ...; "machine 123" is written into ret. */
enum { VRAM_ELF_NAME_MAX = 32 };
const char *vram_elf_machine(const struct vram_elf *elf, char ret[VRAM_ELF_NAME_MAX]);

#endif

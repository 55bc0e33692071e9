/* See habits.h. */
#include "habits.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include "vramshim/cuda_abi.h"

enum { JUMP = 12 };

static const char *const names[HABITS] = {"cuMemAlloc_v2", "cuMemFree_v2"};
static unsigned long calls[HABITS]; /* accessed atomically */
static void *original[HABITS];

unsigned long habit_calls(int which) { return __atomic_load_n(&calls[which], __ATOMIC_RELAXED); }

static void make_writable(void *address, size_t size)
{
    uintptr_t page = (uintptr_t)address & ~(uintptr_t)4095;
    mprotect((void *)page, (uintptr_t)address + size - page, PROT_READ | PROT_WRITE | PROT_EXEC);
}

/* Relocations. */
static CUresult alloc_here(CUdeviceptr *p, size_t size)
{
    __atomic_fetch_add(&calls[HABIT_ALLOC], 1, __ATOMIC_RELAXED);
    return ((__typeof__(&cuMemAlloc_v2))original[HABIT_ALLOC])(p, size);
}

static CUresult free_here(CUdeviceptr p)
{
    __atomic_fetch_add(&calls[HABIT_FREE], 1, __ATOMIC_RELAXED);
    return ((__typeof__(&cuMemFree_v2))original[HABIT_FREE])(p);
}

static void *const here[HABITS] = {(void *)alloc_here, (void *)free_here};

static unsigned rewrite(ElfW(Addr) base, const ElfW(Rela) *rela, size_t size, const ElfW(Sym) *symbols, const char *strings)
{
    unsigned n = 0;
    for (size_t i = 0; rela && i < size / sizeof(*rela); i++) {
        const char *name = strings + symbols[ELF64_R_SYM(rela[i].r_info)].st_name;
        for (int which = 0; which < HABITS; which++) {
            void **slot = (void **)(base + rela[i].r_offset);
            if (strcmp(name, names[which]) != 0 || *slot == here[which])
                continue;
            make_writable(slot, sizeof(*slot));
            *slot = here[which];
            n++;
        }
    }
    return n;
}

static int rewrite_object(struct dl_phdr_info *info, size_t size, void *arg)
{
    const ElfW(Dyn) *d = NULL;
    const ElfW(Rela) *jump = NULL, *rela = NULL;
    const ElfW(Sym) *symbols = NULL;
    const char *strings = NULL;
    size_t jump_size = 0, rela_size = 0;
    (void)size;
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
            d = (const ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
    for (; d && d->d_tag != DT_NULL; d++) {
        switch (d->d_tag) {
        case DT_JMPREL: jump = (const void *)d->d_un.d_ptr; break;
        case DT_PLTRELSZ: jump_size = d->d_un.d_val; break;
        case DT_RELA: rela = (const void *)d->d_un.d_ptr; break;
        case DT_RELASZ: rela_size = d->d_un.d_val; break;
        case DT_SYMTAB: symbols = (const void *)d->d_un.d_ptr; break;
        case DT_STRTAB: strings = (const void *)d->d_un.d_ptr; break;
        default: break;
        }
    }
    if (symbols && strings && (uintptr_t)symbols > 4096 * 4096ul) /* not the vDSO, whose entries are offsets */
        *(unsigned *)arg += rewrite(info->dlpi_addr, jump, jump_size, symbols, strings) +
                            rewrite(info->dlpi_addr, rela, rela_size, symbols, strings);
    return 0;
}

unsigned habit_rewrite(void)
{
    unsigned n = 0;
    for (int which = 0; which < HABITS; which++)
        original[which] = dlsym(RTLD_DEFAULT, names[which]);
    dl_iterate_phdr(rewrite_object, &n);
    return n;
}

/* Code: the jump is taken out for the time of the call. */
static unsigned char *patched[HABITS];
static unsigned char before[HABITS][JUMP];

static void put_jump(int which, const void *to)
{
    static const unsigned char code[JUMP] = {0x48, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xe0}; /* movabs $to,%rax; jmp *%rax */
    memcpy(patched[which], code, JUMP);
    memcpy(patched[which] + 2, &to, sizeof(to));
}

static CUresult alloc_patched(CUdeviceptr *p, size_t size)
{
    __atomic_fetch_add(&calls[HABIT_ALLOC], 1, __ATOMIC_RELAXED);
    memcpy(patched[HABIT_ALLOC], before[HABIT_ALLOC], JUMP);
    CUresult r = ((__typeof__(&cuMemAlloc_v2))(void *)patched[HABIT_ALLOC])(p, size);
    put_jump(HABIT_ALLOC, (void *)alloc_patched);
    return r;
}

static CUresult free_patched(CUdeviceptr p)
{
    __atomic_fetch_add(&calls[HABIT_FREE], 1, __ATOMIC_RELAXED);
    memcpy(patched[HABIT_FREE], before[HABIT_FREE], JUMP);
    CUresult r = ((__typeof__(&cuMemFree_v2))(void *)patched[HABIT_FREE])(p);
    put_jump(HABIT_FREE, (void *)free_patched);
    return r;
}

bool habit_patch(bool whatever_comes_first)
{
#if defined(__x86_64__)
    static void *const to[HABITS] = {(void *)alloc_patched, (void *)free_patched};
    for (int which = 0; which < HABITS; which++) {
        patched[which] = dlsym(whatever_comes_first ? RTLD_DEFAULT : RTLD_NEXT, names[which]);
        if (!patched[which])
            return false;
        memcpy(before[which], patched[which], JUMP);
        make_writable(patched[which], JUMP);
        put_jump(which, to[which]);
    }
    return true;
#else
    (void)whatever_comes_first;
    return false;
#endif
}

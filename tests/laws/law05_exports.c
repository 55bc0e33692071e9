/*
 * Law 5: the exports carry no version, and nothing is exported but the hooks of the one table, the functions of libc
 * that are named here, and what vramshim/vramshim.h declares. A named version node silently stops glibc from binding
 * dlsym@GLIBC_2.34 to a preloaded dlsym.
 */
#include <dlfcn.h>
#include <link.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "law.h"
#include "shim_elf.h"

static const char *const table[] = {
#define VRAM_HOOK(name, parameters, arguments) #name,
#define VRAM_CALL(name)
#include "../../shim/driver/entries.def"
#undef VRAM_HOOK
#undef VRAM_CALL
};

static const char *const libc_names[] = {
    "dlsym",         "sigaction", "__sigaction", "signal",       "bsd_signal", "ssignal", "sysv_signal",
    "__sysv_signal", "sigset",    "sigignore",   "siginterrupt", "_exit",      "_Exit", "__cxa_at_quick_exit",
};

static const char *const own_names[] = {"vramshim_check_option"}; /* vramshim/vramshim.h */

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

static bool is_among(const char *name, const char *const *names, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (strcmp(names[i], name) == 0)
            return true;
    return false;
}

LAW_CASE_ONCE(nothing_else_is_exported)
{
    struct shim_elf e;
    if (!shim_elf_open(&e))
        return;
    size_t exports = 0;
    for (size_t i = 1; i < e.symbol_count; i++) {
        const char *name = shim_elf_name(&e, &e.symbols[i]);
        if (!shim_elf_is_export(&e.symbols[i]))
            continue;
        exports++;
        if (!is_among(name, table, COUNT(table)) && !is_among(name, libc_names, COUNT(libc_names)) &&
            !is_among(name, own_names, COUNT(own_names)))
            law_fail(__FILE__, __LINE__, "exports %s", name);
        if (ELF64_ST_TYPE(e.symbols[i].st_info) != STT_FUNC || ELF64_ST_BIND(e.symbols[i].st_info) != STB_GLOBAL)
            law_fail(__FILE__, __LINE__, "%s is no plain function", name);
    }
    CHECK_EQ(exports, COUNT(table) + COUNT(libc_names) + COUNT(own_names)); /* a name is listed once, and all of them are there */
}

LAW_CASE_ONCE(exports_carry_no_version)
{
    struct shim_elf e;
    ElfW(Xword) value;
    if (!shim_elf_open(&e))
        return;
    CHECK(!shim_elf_dynamic(&e, DT_VERDEF, 0, &value));
    for (size_t i = 1; e.versions && i < e.symbol_count; i++)
        if (shim_elf_is_export(&e.symbols[i]) && e.versions[i] != VER_NDX_GLOBAL)
            law_fail(__FILE__, __LINE__, "%s has version %d", shim_elf_name(&e, &e.symbols[i]), e.versions[i]);
}

struct place {
    uintptr_t address;
    bool in_shim;
};

static int is_in_shim(struct dl_phdr_info *info, size_t size, void *data)
{
    struct place *place = data;
    (void)size;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *p = &info->dlpi_phdr[i];
        if (p->p_type == PT_LOAD && place->address - (info->dlpi_addr + p->p_vaddr) < p->p_memsz)
            place->in_shim = strstr(info->dlpi_name, "libvramshim") != NULL;
    }
    return 0;
}

static bool bound_to_shim(const void *function)
{
    struct place place = {(uintptr_t)function, false};
    dl_iterate_phdr(is_in_shim, &place);
    return place.in_shim;
}

/* This program asks for versions, as everything that is linked against libc does: the unversioned exports satisfy them.
 */
LAW_CASE_ONCE(versioned_references_are_bound_to_the_shim)
{
    CHECK_EQ(bound_to_shim((void *)&dlsym), under_shim());
    CHECK_EQ(bound_to_shim((void *)&sigaction), under_shim());
    CHECK_EQ(bound_to_shim((void *)&signal), under_shim());
    CHECK_EQ(bound_to_shim((void *)&_exit), under_shim());
    CHECK_EQ(bound_to_shim((void *)&cuMemAlloc_v2), under_shim());
    CHECK_EQ(bound_to_shim((void *)&cuStreamEndCapture), under_shim());
    /* and the rest of libc and of the driver is not */
    CHECK(!bound_to_shim((void *)&dlopen));
    CHECK(!bound_to_shim((void *)&malloc));
    CHECK(!bound_to_shim((void *)&cuInit));
    CHECK(!bound_to_shim((void *)&cuDeviceGetCount));
}

/* Asked for by version explicitly, the program gets libc's: a lookup that names a version wants no other. */
LAW_CASE_ONCE(a_lookup_by_version_is_libcs)
{
    void *libc = dlopen("libc.so.6", RTLD_NOW | RTLD_NOLOAD);
    CHECK(libc);
    CHECK(!bound_to_shim(dlsym(libc, "sigaction")));
    CHECK(!bound_to_shim(dlsym(libc, "_exit")));
}

/* It stays where it is, whatever is closed: threads and handlers of it may run. */
LAW_CASE_ONCE(it_is_linked_for_good)
{
    struct shim_elf e;
    ElfW(Xword) flags = 0;
    if (!shim_elf_open(&e))
        return;
    CHECK(shim_elf_dynamic(&e, DT_FLAGS_1, 0, &flags));
    CHECK(flags & DF_1_NODELETE);
    CHECK(flags & DF_1_NOW);
}

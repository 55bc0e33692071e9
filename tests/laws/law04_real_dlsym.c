/*
 * Law 4: the real dlsym is found without luck. A malloc replacement looks libc's malloc up in its first call, before it
 * can allocate: an allocation, or an error left for dlerror(), inside that lookup is the shim's.
 */
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <string.h>

#include "early_malloc.h"
#include "law.h"
#include "shim_elf.h"
#include "sim.h"
#include "world.h"

enum { MIB = 1 << 20 };

#define EARLY(name) ((__typeof__(&name))dlsym(RTLD_DEFAULT, #name))

/* Runs with early_malloc.c preloaded. */
LAW_CHILD(with_a_malloc_replacement)
{
    CHECK(dlerror() == NULL);
    CHECK(EARLY(early_malloc_works) && EARLY(early_malloc_works)());
    CHECK_EQ(EARLY(early_malloc_reentered)(), 0);
    CHECK_EQ(EARLY(early_malloc_errors)(), 0);
    CHECK(dlerror() == NULL);
    law_context();
    for (int i = 0; i < 10; i++) {
        CUdeviceptr p;
        OK(cu.cuMemAlloc_v2(&p, 4 * MIB));
        OK(cu.cuMemFree_v2(p));
    }
    if (under_shim() && simulated())
        CHECK_EQ(driver_calls("cuMemAlloc_v2"), 1);
    CHECK_EQ(EARLY(early_malloc_reentered)(), 0);
}

static void with_preload(const char *format)
{
    char path[4096], setting[9000], err[4096];
    const char *shim = shim_path();
    ssize_t n = readlink("/proc/self/exe", path, sizeof(path) - 64);
    CHECK(n > 0);
    path[n] = 0;
    strcpy(strrchr(path, '/'), "/libvramlawearlymalloc.so");
    const char *first = *format == 'm' ? path : shim, *then = *format == 'm' ? shim : path;
    snprintf(setting, sizeof(setting), "LD_PRELOAD=%s:%s", first ? first : "", then ? then : "");
    int status = law_run_child("with_a_malloc_replacement", ENV(setting, "VRAMSHIM_REPORT=none"), err, sizeof(err));
    if (status != 0)
        law_fail(__FILE__, __LINE__, "status 0x%x with %s: %s", (unsigned)status, setting, err);
}

/* The documented order, and the other one. */
LAW_CASE(a_malloc_replacement_before)
{
    with_preload("malloc first");
}
LAW_CASE(a_malloc_replacement_after)
{
    with_preload("shim first");
}

/* The first lookup of the process has left nothing behind. */
LAW_CASE_ONCE(no_error_is_pending)
{
    CHECK(dlerror() == NULL);
    CHECK(dlsym(RTLD_DEFAULT, "malloc") && dlerror() == NULL);
    CHECK(dlsym(RTLD_NEXT, "free") && dlerror() == NULL);
}

static bool is_one_of(const char *name, const char *const *names)
{
    for (; *names; names++)
        if (strcmp(name, *names) == 0)
            return true;
    return false;
}

/* No symbol that glibc keeps for itself; nothing that allocates; no dlsym of its own, which could only be found by the
 * luck of the search order. */
LAW_CASE_ONCE(what_the_shim_imports)
{
    static const char *const forbidden[] = {"malloc",   "calloc",    "realloc", "free",           "strdup",
                                            "asprintf", "vasprintf", "getline", "fopen",          "fdopen",
                                            "opendir",  "dlopen",    "dlsym",   "dlvsym",         "dlclose",
                                            "dlerror",  "printf",    "puts",    "__tls_get_addr", NULL};
    struct shim_elf e;
    if (!shim_elf_open(&e))
        return;
    for (size_t i = 1; i < e.symbol_count; i++) {
        const char *name = shim_elf_name(&e, &e.symbols[i]);
        if (shim_elf_is_import(&e.symbols[i]) && is_one_of(name, forbidden))
            law_fail(__FILE__, __LINE__, "imports %s", name);
    }
    const ElfW(Shdr) *needed = shim_elf_section(&e, SHT_GNU_verneed, 0);
    CHECK(needed);
    const char *strings = e.base + e.sections[needed->sh_link].sh_offset;
    const char *at = e.base + needed->sh_offset;
    for (;;) {
        const ElfW(Verneed) *v = (const void *)at;
        const char *aux_at = at + v->vn_aux;
        for (unsigned i = 0; i < v->vn_cnt; i++) {
            const ElfW(Vernaux) *aux = (const void *)aux_at;
            const char *version = strings + aux->vna_name;
            if (strncmp(version, "GLIBC_2.", 8) != 0)
                law_fail(__FILE__, __LINE__, "needs version %s of %s", version, strings + v->vn_file);
            aux_at += aux->vna_next;
        }
        if (!v->vn_next)
            break;
        at += v->vn_next;
    }
}

/* Thread-local state is initial-exec: the dynamic models call the loader, which may allocate at a thread's first touch.
 */
LAW_CASE_ONCE(thread_local_state_is_initial_exec)
{
    struct shim_elf e;
    if (!shim_elf_open(&e))
        return;
    const ElfW(Shdr) * section;
    for (size_t n = 0; (section = shim_elf_section(&e, SHT_RELA, n)) != NULL; n++) {
        const ElfW(Rela) *r = (const void *)(e.base + section->sh_offset);
        for (size_t i = 0; i < section->sh_size / sizeof(*r); i++) {
            unsigned long type = ELF64_R_TYPE(r[i].r_info);
#if defined(__x86_64__)
            bool dynamic = type == R_X86_64_DTPMOD64 || type == R_X86_64_DTPOFF64 || type == R_X86_64_TLSDESC;
#else
            bool dynamic = type == R_AARCH64_TLS_DTPMOD || type == R_AARCH64_TLS_DTPREL || type == R_AARCH64_TLSDESC;
#endif
            CHECK(!dynamic);
        }
    }
}

static void *worker(void *unused)
{
    (void)unused;
    for (int i = 0; i < 200; i++) {
        CHECK(dlsym(RTLD_NEXT, "malloc"));
        CHECK(dlerror() == NULL);
        void *p = malloc(100);
        free(p);
    }
    return NULL;
}

/* No lookup of a thread disturbs that of another, and its first touch of anything of ours allocates nothing. */
LAW_CASE_ONCE(on_every_thread)
{
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        CHECK(pthread_create(&threads[i], NULL, worker, NULL) == 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
}

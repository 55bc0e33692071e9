/*
 * Law 3: the caller of dlsym stays its caller. What RTLD_NEXT and RTLD_DEFAULT find depends on who asks; an interposed
 * dlsym that calls the real one asks in its own name. HAMi-core 279 and 315 (RTLD_NEXT found the wrapper itself:
 * endless recursion).
 *
 * The search order of this program: itself, the shim if any, the libraries `first` and `second` (next.c), libcuda,
 * libc.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "law.h"
#include "next.h"
#include "sim.h"
#include "world.h"

enum { MIB = 1 << 20 };

typedef __typeof__(&cuMemAlloc_v2) alloc_fn;
typedef const char *(*who_fn)(void);

static unsigned wrapped;

/* A wrapper that is linked into the program, as profilers and tests do it. */
CUresult cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytes)
{
    static alloc_fn real;
    if (!real)
        real = (alloc_fn)dlsym(RTLD_NEXT, "cuMemAlloc_v2");
    CHECK(real && real != cuMemAlloc_v2);
    __atomic_fetch_add(&wrapped, 1, __ATOMIC_RELAXED);
    return real(dptr, bytes);
}

static const char *who(void *found)
{
    return found ? ((who_fn)found)() : "nobody";
}

static void check_who(void *found, const char *expected)
{
    if (strcmp(who(found), expected) != 0)
        law_fail(__FILE__, __LINE__, "found %s's, not %s's", who(found), expected);
}

LAW_CASE_SIM_ONCE(a_wrapper_in_the_program)
{
    CUdeviceptr p;
    law_context();
    for (int i = 0; i < 3; i++) {
        OK(cuMemAlloc_v2(&p, 4 * MIB));
        OK(cu.cuMemFree_v2(p));
    }
    CHECK_EQ(wrapped, 3);
    CHECK_EQ(driver_calls("cuMemAlloc_v2"), under_shim() ? 1 : 3); /* what is next to the program is the shim */
}

/* From a library that comes after the shim: next is the driver's own. Its memory is nobody's but the driver's. */
LAW_CASE_SIM(a_wrapper_in_a_library)
{
    alloc_fn next = (alloc_fn)second_next("cuMemAlloc_v2");
    CUdeviceptr p;
    law_context();
    CHECK(next && next != &cuMemAlloc_v2);
    CHECK_EQ((uintptr_t)first_next("cuMemAlloc_v2"), (uintptr_t)next);
    for (int i = 1; i <= 3; i++) {
        OK(next(&p, 4 * MIB));
        CHECK_EQ(driver_calls("cuMemAlloc_v2"), i);
        OK(cu.cuMemFree_v2(p));
        CHECK_EQ(driver_calls("cuMemFree_v2"), i);
    }
}

/* Each one's next is another, whoever asked before. */
LAW_CASE_ONCE(next_depends_on_the_caller)
{
    for (int i = 0; i < 3; i++) {
        check_who(dlsym(RTLD_NEXT, "next_who"), "first");
        check_who(first_next("next_who"), "second");
        CHECK(second_next("next_who") == NULL);
        CHECK(dlerror() != NULL);
        CHECK(dlerror() == NULL);
        check_who(dlsym(RTLD_DEFAULT, "next_who"), "first");
    }
}

/* The same for names of the driver that are hooked, that are not, and that nobody has. */
LAW_CASE_ONCE(next_for_every_kind_of_name)
{
    static const char *const names[] = {"cuMemAlloc_v2", "cuMemFree_v2", "cuGetProcAddress_v2",
                                        "cuInit",        "cuMemAlloc",   "cuStreamDestroy_v2"};
    for (int round = 0; round < 2; round++) {
        for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
            void *driver = second_next(names[i]), *own = dlsym(dlopen("libcuda.so.1", RTLD_NOW), names[i]);
            CHECK(driver && own);
            CHECK_EQ((uintptr_t)first_next(names[i]), (uintptr_t)driver);
            if (!under_shim())
                CHECK_EQ((uintptr_t)own, (uintptr_t)driver);
        }
        CHECK(second_next("cuNoSuchEntry") == NULL && dlerror());
        CHECK(dlsym(RTLD_NEXT, "cuNoSuchEntry") == NULL && dlerror());
        CHECK(dlsym(RTLD_DEFAULT, "cuNoSuchEntry") == NULL && dlerror());
    }
}

/* A library that wraps malloc and finds libc's by RTLD_NEXT: were the shim the one who asks, it would find itself. */
LAW_CASE_ONCE(a_library_that_wraps_malloc)
{
    unsigned long before = first_mallocs();
    void *volatile p = malloc(100);
    CHECK(p);
    CHECK_EQ(first_mallocs(), before + 1);
    free(p);
    CHECK_EQ((uintptr_t)dlsym(RTLD_NEXT, "malloc"), (uintptr_t)malloc);
    CHECK(first_next("malloc") && first_next("malloc") != (void *)malloc);
    CHECK_EQ((uintptr_t)first_next("malloc"), (uintptr_t)second_next("malloc"));
}

/* The name of an interposed function, looked up by one who comes after the shim. */
LAW_CASE_ONCE(next_for_what_the_shim_interposes)
{
    static const char *const names[] = {"sigaction", "signal", "_exit", "dlsym"};
    void *libc = dlopen("libc.so.6", RTLD_NOW | RTLD_NOLOAD);
    CHECK(libc);
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        void *expected = dlsym(libc, names[i]);
        if (!expected)
            continue; /* dlsym before glibc 2.34 */
        CHECK_EQ((uintptr_t)second_next(names[i]), (uintptr_t)expected);
        CHECK_EQ((uintptr_t)first_next(names[i]), (uintptr_t)expected);
    }
}

static void *plugin(const char *name)
{
    static void *h;
    char path[4096];
    ssize_t n = readlink("/proc/self/exe", path, sizeof(path) - 64);
    CHECK(n > 0);
    path[n] = 0;
    strcpy(strrchr(path, '/'), "/libvramlawplugin.so");
    if (!h && !(h = dlopen(path, RTLD_NOW | RTLD_LOCAL)))
        law_fail(__FILE__, __LINE__, "%s", dlerror());
    void *p = dlsym(h, name);
    CHECK(p);
    return p;
}

/* Of a library that was loaded locally only its own lookups see the symbols, by RTLD_DEFAULT. */
LAW_CASE_ONCE(default_depends_on_the_caller)
{
    void *(*from_plugin)(const char *) = (void *(*)(const char *))plugin("plugin_default");
    void *(*next_to_plugin)(const char *) = (void *(*)(const char *))plugin("plugin_next");
    for (int i = 0; i < 2; i++) {
        int *only = from_plugin("plugin_only");
        CHECK(only && *only == 42);
        CHECK(dlsym(RTLD_DEFAULT, "plugin_only") == NULL && dlerror());
        CHECK(first_default("plugin_only") == NULL && dlerror());
        CHECK(next_to_plugin("plugin_only") == NULL && dlerror());
        CHECK_EQ((uintptr_t)from_plugin("cuMemFree_v2"), (uintptr_t)dlsym(RTLD_DEFAULT, "cuMemFree_v2"));
        CHECK_EQ((uintptr_t)from_plugin("cuMemAlloc_v2"), (uintptr_t)&cuMemAlloc_v2);
        check_who(from_plugin("next_who"), "first");
    }
}

LAW_CASE_ONCE(versions)
{
    void *p = first_next_version("pthread_sigmask", "GLIBC_2.2.5"),
         *q = second_next_version("pthread_sigmask", "GLIBC_2.2.5");
    CHECK_EQ((uintptr_t)p, (uintptr_t)q);
    CHECK(first_next_version("next_who", "NOBODY_1.0") == NULL && dlerror());
    CHECK(dlerror() == NULL);
}

/* The text is the loader's, about the lookup that failed and about the one who asked; and it is told once. */
LAW_CASE_ONCE(what_dlerror_says)
{
    void *h = dlopen("libcuda.so.1", RTLD_NOW);
    CHECK(h && dlsym(h, "cuMemFree_v2"));
    CHECK(dlerror() == NULL);
    CHECK(dlsym(h, "cuNoSuchEntry") == NULL);
    const char *error = dlerror();
    CHECK(error && strstr(error, "cuNoSuchEntry") && strstr(error, "libcuda.so.1"));
    CHECK(dlerror() == NULL);
    CHECK(dlsym(h, "cuMemFree_v2") && dlerror() == NULL);
    CHECK(first_next("no_such_name") == NULL);
    error = dlerror();
    CHECK(error && strstr(error, "no_such_name") && strstr(error, "libvramlawnext1.so")); /* names the one who asked */
}

static void *ask(void *unused)
{
    (void)unused;
    for (int i = 0; i < 2000; i++) {
        check_who(first_next("next_who"), "second");
        check_who(dlsym(RTLD_NEXT, "next_who"), "first");
        CHECK(second_next("cuMemFree_v2") != NULL);
    }
    return NULL;
}

/* Nothing is remembered between lookups that another thread could see. */
LAW_CASE_ONCE(many_threads)
{
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        CHECK(pthread_create(&threads[i], NULL, ask, NULL) == 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
}

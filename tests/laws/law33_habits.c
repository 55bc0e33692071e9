/*
 * Law 33, beside it: two other habits of libraries that follow memory (habits.h), and what looks like a definition and is none. This
 * program is linked against libvramlawhabits, which stands before the driver but defines none of its entries.
 */
#include <dlfcn.h>

#include "habits.h"
#include "law.h"
#include "sim.h"
#include "world.h"

enum { MIB = 1 << 20, ROUNDS = 10, NEVER = 0 };

/* Ten allocations and frees by name, of one size, then all that is kept goes back. */
static void ten_by_name(void)
{
    CUdeviceptr p[ROUNDS];
    for (int i = 0; i < ROUNDS; i++)
        OK(cuMemAlloc_v2(&p[i], 4 * MIB));
    for (int i = 0; i < ROUNDS; i++)
        OK(cuMemFree_v2(p[i]));
}

static void flush(unsigned blocks)
{
    unsigned long before = driver_calls("cuMemFree_v2");
    if (!under_shim())
        return;
    raise(SIGUSR1);
    WAIT_UNTIL(driver_calls("cuMemFree_v2") >= before + blocks);
}

/* It sees what the program calls: a buffer is forgotten when the program frees it, and that is early enough. */
LAW_CASE_SIM_ONCE(relocations_are_rewritten)
{
    law_context();
    unsigned rewritten = habit_rewrite();
    if (!rewritten)
        law_skip("no relocation of this kind here");
    ten_by_name();
    CHECK_EQ(habit_calls(HABIT_ALLOC), ROUNDS);
    CHECK_EQ(habit_calls(HABIT_FREE), ROUNDS);
    flush(ROUNDS);
    CHECK_EQ(habit_calls(HABIT_FREE), ROUNDS);
    CHECK_EQ(driver_calls("cuMemFree_v2"), ROUNDS);
}

/* Of the driver's code: it sees what the driver sees. */
LAW_CASE_SIM(the_drivers_code_is_patched)
{
    law_context();
    if (!habit_patch(false))
        law_skip("for x86-64");
    for (int i = 0; i < ROUNDS; i++)
        cached_block(4 * MIB);
    flush(1);
    CHECK_EQ(habit_calls(HABIT_ALLOC), driver_calls("cuMemAlloc_v2"));
    WAIT_UNTIL(habit_calls(HABIT_FREE) == driver_calls("cuMemFree_v2"));
    CHECK_EQ(habit_calls(HABIT_FREE), under_shim() ? 1 : ROUNDS);
}

/* Of the code that the name means in the program: ours, under the shim. It sees what the program calls. */
LAW_CASE_SIM(the_code_of_the_first_definition_is_patched)
{
    law_context();
    if (!habit_patch(true))
        law_skip("for x86-64");
    for (int i = 0; i < ROUNDS; i++)
        cached_block(4 * MIB);
    flush(1);
    CHECK_EQ(habit_calls(HABIT_ALLOC), ROUNDS);
    CHECK_EQ(habit_calls(HABIT_FREE), ROUNDS);
}

/* Data under the names of entries is no definition. */
LAW_CHILD(uses_memory)
{
    CUdeviceptr p;
    law_context();
    for (int i = 0; i < ROUNDS; i++)
        cached_block(4 * MIB);
    flush(1);
    OK(cu.cuMemAlloc_v2(&p, MIB));
    OK(cu.cuMemFree_v2(p));
    CHECK_EQ(cu.cuMemFree_v2(p), CUDA_ERROR_INVALID_VALUE);
}

static void beside(const char *library)
{
    char preload[8192], path[4096];
    const char *before = getenv("LD_PRELOAD");
    ssize_t n = readlink("/proc/self/exe", path, sizeof(path) - 64);
    CHECK(n > 0);
    path[n] = 0;
    *strrchr(path, '/') = 0;
    snprintf(preload, sizeof(preload), "LD_PRELOAD=%s%s%s/%s", before ? before : "", before ? ":" : "", path, library);
    CHECK_EQ(run_child_apart("uses_memory", ENV(preload), NULL, NULL, NEVER), 0);
}

LAW_CASE_SIM(tables_of_a_loader)
{
    if (!under_shim() && law_route == ROUTE_DIRECT)
        law_skip("natively the program itself would call the data");
    beside("libvramlawtables.so");
}

static void *load(int flags)
{
    char path[4096];
    ssize_t n = readlink("/proc/self/exe", path, sizeof(path) - 64);
    CHECK(n > 0);
    path[n] = 0;
    strcpy(strrchr(path, '/'), "/libvramlawbefore.so");
    void *library = dlopen(path, RTLD_NOW | flags);
    if (!library)
        law_fail(__FILE__, __LINE__, "%s", dlerror());
    return library;
}

/* Before anything is looked up: a library whose constructor waits for a thread that calls the driver. Nobody may wait there for the
 * loader, which waits for the constructor; and what dlerror() has to say is the program's. */
static void __attribute__((constructor)) early(void)
{
    if (!getenv("HABITS_EARLY"))
        return;
    setenv("BEFORE_FIRST", "wait", 1);
    alarm(20);
    void *library = load(RTLD_LOCAL);
    CHECK(dlsym(library, "no_such_name") == NULL);
    size_t free_bytes, total;
    cuMemGetInfo_v2(&free_bytes, &total);
    CHECK(dlerror() != NULL);
}

LAW_CASE_SIM(a_constructor_that_waits_for_a_call)
{
    CHECK_EQ(run_child_apart("uses_memory", ENV("HABITS_EARLY=1"), NULL, NULL, NEVER), 0);
}

/* Loaded for somebody's own use only, a definition is nobody else's; loaded into the global scope behind the driver, neither. */
static void loaded(int flags)
{
    void *library = load(flags);
    unsigned long (*calls)(const char *) = (unsigned long (*)(const char *))dlsym(library, "before_calls");
    law_context();
    ten_by_name();
    flush(ROUNDS);
    CHECK_EQ(calls("cuMemAlloc_v2"), 0);
    CHECK_EQ(calls("cuMemFree_v2"), 0);
}

LAW_CASE_SIM(loaded_locally) { loaded(RTLD_LOCAL); }
LAW_CASE_SIM(loaded_globally_behind_the_driver) { loaded(RTLD_GLOBAL); }

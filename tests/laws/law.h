/*
 * The frame of a law's scenarios. A scenario is an unmodified CUDA program: it knows of the shim only what a program can
 * see, so each one must pass without the shim as well, where `under_shim()` is false.
 *
 * Each case runs in a fresh process, once through each lookup route that can reach the driver (law 1):
 *
 *   direct        the symbol that the program is linked against
 *   dlsym         dlsym on a handle of libcuda.so.1 (ctypes, CuPy, Numba)
 *   procaddress   cuGetProcAddress_v2, found by dlsym (cudart)
 *   procaddress1  cuGetProcAddress, its first version
 *
 *   LAW_CASE(name) { ...; CHECK(condition); CHECK_EQ(a, b); }          once through each route
 *   LAW_CASE_ONCE(name) { ... }                                        routes do not matter
 *   LAW_CASE_SIM(name), LAW_CASE_SIM_ONCE(name)                        needs the simulated driver (sim.h); skipped on a GPU
 *
 * A failed check ends the case with its place and values. The executable prints a line a case and ends with
 * "N passed, N failed, N skipped"; exit status 1 if any failed. `LAW --case NAME --route ROUTE` runs one.
 */
#ifndef TESTS_LAWS_LAW_H
#define TESTS_LAWS_LAW_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "vramshim/cuda_abi.h"

/* The entries that scenarios call, through the route of this process: cu.cuMemAlloc_v2(&p, 512). */
struct law_entries {
#define LAW_ENTRY(name, lookup_name) __typeof__(&name) name;
#include "entries.def"
#undef LAW_ENTRY
};
extern struct law_entries cu;

enum law_route { ROUTE_DIRECT, ROUTE_DLSYM, ROUTE_PROCADDRESS, ROUTE_PROCADDRESS1, ROUTES };
extern enum law_route law_route;

struct law_case {
    const char *name;
    void (*run)(void);
    bool once, simulated;
    struct law_case *next;
};
void law_register(struct law_case *c);

#define LAW_CASE_(name_, once_, simulated_)                                                                            \
    static void case_##name_(void);                                                                                    \
    static void __attribute__((constructor)) register_##name_(void)                                                    \
    {                                                                                                                  \
        static struct law_case c = {#name_, case_##name_, once_, simulated_, NULL};                                    \
        law_register(&c);                                                                                              \
    }                                                                                                                  \
    static void case_##name_(void)
#define LAW_CASE(name) LAW_CASE_(name, false, false)
#define LAW_CASE_ONCE(name) LAW_CASE_(name, true, false)
#define LAW_CASE_SIM(name) LAW_CASE_(name, false, true)
#define LAW_CASE_SIM_ONCE(name) LAW_CASE_(name, true, true)

void law_fail(const char *file, int line, const char *fmt, ...) __attribute__((noreturn, format(printf, 3, 4)));
void law_skip(const char *why) __attribute__((noreturn)); /* this machine cannot run the case */

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition))                                                                                              \
            law_fail(__FILE__, __LINE__, "%s", #condition);                                                            \
    } while (0)
#define CHECK_EQ(a, b)                                                                                                 \
    do {                                                                                                               \
        unsigned long long a_ = (unsigned long long)(a), b_ = (unsigned long long)(b);                                 \
        if (a_ != b_)                                                                                                  \
            law_fail(__FILE__, __LINE__, "%s is %llu (0x%llx), not %s, %llu (0x%llx)", #a, a_, a_, #b, b_, b_);        \
    } while (0)
#define OK(call) CHECK_EQ(call, CUDA_SUCCESS)

/* libvramshim.so is loaded in this process. */
bool under_shim(void);

/* The driver is the simulated one; its control functions, NULL on a real GPU. `sim(name)` looks one up: sim.h has them. */
bool simulated(void);
void *law_sim(const char *name);
#define SIM(name) ((__typeof__(&name))law_sim(#name))

/* How freed blocks are made safe here: what VRAMSHIM_FREE says. A free waits for the work natively, and in "sync". */
bool frees_wait(void);
bool frees_order(void); /* "ordered" */

/* How often the entry was called at the driver; only with the simulated driver. */
unsigned long driver_calls(const char *entry);

/* cuInit, device 0, its primary context made current. */
CUcontext law_context(void);

/* Runs this program again, the case `name` of it, with "NAME=value" strings added to the environment (NULL-terminated), with
 * its standard error captured (at most cap - 1 bytes, NUL-terminated). Returns the wait status. For scenarios about exit,
 * signals, options. A case that is only run so is named in no list: declare it with LAW_CHILD(name). */
int law_run_child(const char *name, const char *const *env, char *ret_stderr, size_t cap);
void law_register_child(struct law_case *c);
#define LAW_CHILD(name_)                                                                                               \
    static void case_##name_(void);                                                                                    \
    static void __attribute__((constructor)) register_##name_(void)                                                    \
    {                                                                                                                  \
        static struct law_case c = {#name_, case_##name_, true, false, NULL};                                          \
        law_register_child(&c);                                                                                        \
    }                                                                                                                  \
    static void case_##name_(void)

#endif

/*
 * The exported entries: counters, failure injection, the checks that come before an entry's own work, and lookup by
 * name. Expanded from entries.def. entry.c calls do_<name> with the state lock held.
 */
#ifndef SIMDRIVER_ENTRY_H
#define SIMDRIVER_ENTRY_H

#include "state.h"

enum sim_needs {
    NONE = 0,
    INIT = 1,
    CTX = INIT | 2,
    LIVE = CTX | 4,
    UNSAFE = 8,
    NEVER = 16,
};

/* What each entry does, by the file that has the subject. */
#define SIM(name, version, needs, params, args) CUresult do_##name params;
#define SIM_PT(name, pt, version, needs, params, args) CUresult do_##name params;
#define STUB(name, version)
#include "entries.def"
#undef SIM
#undef SIM_PT
#undef STUB

/* The lookup behind cuGetProcAddress. Returns NULL and a status when there is none. */
void *sim_entry_lookup(const char *symbol, int version, bool per_thread, CUdriverProcAddressQueryResult *status);

/* Looks some of the driver's own symbols up by dlsym, as the real one does. Called without the lock. */
int sim_entry_self_lookup(void);

/* For config.c; -1 for an unknown name. */
int sim_entry_fail(const char *entry, unsigned long nth, unsigned long count, int code);
int sim_entry_hide(const char *entry);

/* For report.c: the i-th entry's name and calls; NULL past the end. */
const char *sim_entry_name(size_t i, unsigned long *calls);

#endif

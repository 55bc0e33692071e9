#include "config.h"

#include "entry.h"
#include "state.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void bad(const char *name, const char *value)
{
    fprintf(stderr, "simdriver: bad value %s=%s\n", name, value);
}

static void read_size(const char *name, uint64_t *out)
{
    const char *s = getenv(name);
    if (!s)
        return;
    char *end;
    errno = 0;
    unsigned long long n = strtoull(s, &end, 10);
    static const char units[] = "KMGT";
    const char *unit = *end ? strchr(units, toupper((unsigned char)*end)) : NULL;
    unsigned int shift = unit ? 10 * (unsigned int)(unit - units + 1) : 0;
    if (!isdigit((unsigned char)*s) || errno || (*end && (!unit || end[1])) || n > UINT64_MAX >> shift)
        bad(name, s);
    else
        *out = n << shift;
}

static void read_int(const char *name, int *out, int low, int high)
{
    const char *s = getenv(name);
    if (!s)
        return;
    char *end;
    long n = strtol(s, &end, 10);
    if (!*s || *end || n < low || n > high)
        bad(name, s);
    else
        *out = (int)n;
}

/* The position of the value in a NULL-terminated list, the first one being the default. */
static int read_choice(const char *name, const char *const *choices)
{
    const char *s = getenv(name);
    if (!s)
        return 0;
    for (int i = 0; choices[i]; i++)
        if (!strcmp(s, choices[i]))
            return i;
    bad(name, s);
    return 0;
}

/* "entry:nth=code" or "entry:nth*count=code", separated by commas. */
static void read_failures(const char *name)
{
    const char *s = getenv(name);
    char *copy = s ? strdup(s) : NULL, *save = NULL;
    for (char *item = copy ? strtok_r(copy, ",", &save) : NULL; item; item = strtok_r(NULL, ",", &save)) {
        char entry[80];
        unsigned long nth, count = 1;
        int code, used = 0;
        bool ok = sscanf(item, "%79[^:]:%lu=%d%n", entry, &nth, &code, &used) == 3 && !item[used];
        if (!ok)
            ok = sscanf(item, "%79[^:]:%lu*%lu=%d%n", entry, &nth, &count, &code, &used) == 4 && !item[used];
        if (!ok || sim_entry_fail(entry, nth, count, code))
            bad(name, item);
    }
    free(copy);
}

static void read_hidden(const char *name)
{
    const char *s = getenv(name);
    char *copy = s ? strdup(s) : NULL, *save = NULL;
    for (char *item = copy ? strtok_r(copy, ",", &save) : NULL; item; item = strtok_r(NULL, ",", &save))
        if (sim_entry_hide(item))
            bad(name, item);
    free(copy);
}

void sim_config_read(void)
{
    struct sim_config *c = &sim.config;
    c->devices = 1;
    read_int("SIMCUDA_DEVICES", &c->devices, 0, SIM_MAX_DEVICES);
    c->capacity = (uint64_t)16 << 30;
    read_size("SIMCUDA_CAPACITY", &c->capacity);
    c->capacity -= c->capacity % SIM_PAGE;
    read_size("SIMCUDA_CTX_COST", &c->context_cost);
    c->lazy = read_choice("SIMCUDA_CLOCK", (const char *const[]){"real", "lazy", NULL}) == 1;
    c->judge = read_choice("SIMCUDA_JUDGE", (const char *const[]){"1", "0", NULL}) == 0;
    c->hazards = (unsigned int)read_choice("SIMCUDA_HAZARDS", (const char *const[]){"count", "print", "abort", NULL});
    c->version = 13000;
    read_int("SIMCUDA_VERSION", &c->version, 2000, 99990);
    c->native_cost = read_choice("SIMCUDA_COST", (const char *const[]){"0", "native", NULL}) == 1;
    c->report = getenv("SIMCUDA_REPORT");
    read_failures("SIMCUDA_FAIL");
    read_hidden("SIMCUDA_HIDE");
}

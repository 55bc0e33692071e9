#include "config/options.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/compiler.h"
#include "base/say.h"
#include "vramshim/nearest.h"
#include "vramshim/quote.h"
#include "vramshim/vramshim.h"

enum { COMPLAINTS_MAX = 8, SHOWN = 200 /* bytes of a name or a value in a line of ours */ };

static struct vram_options options;
const struct vram_options *const vram_options = &options;

/* What was wrong, until it may be said. Written at load only. */
static char complaints[COMPLAINTS_MAX][600];
static unsigned complaint_count;

static const char *const free_modes[] = {
    [VRAM_FREE_SYNC] = "sync",
    [VRAM_FREE_FENCED] = "fenced",
    [VRAM_FREE_ORDERED] = "ordered",
};

static int parse_free_mode(const char *s, enum vram_free_mode *ret_mode)
{
    for (size_t i = 0; i < VRAM_LENGTH(free_modes); i++) {
        if (vram_parse_word(s, free_modes[i])) {
            *ret_mode = (enum vram_free_mode)i;
            return 0;
        }
    }
    return -EINVAL;
}

/* How each type is parsed and written; what its user may write, for the complaint. */
#define PARSE_BOOL(s, f, why) vram_parse_bool(s, f)
#define PARSE_BOUND(s, f, why) vram_parse_bound(s, f)
#define PARSE_KEEP(s, f, why) vram_parse_keep(s, f)
#define PARSE_PERCENT(s, f, why) vram_parse_percent(s, f)
#define PARSE_FACTOR(s, f, why) vram_parse_factor(s, f)
#define PARSE_SECONDS(s, f, why) vram_parse_seconds(s, f)
#define PARSE_FREE(s, f, why) parse_free_mode(s, f)
#define PARSE_SIGNAL(s, f, why) vram_parse_signal(s, f, why)
#define PARSE_OUTPUT(s, f, why) vram_parse_output(s, f, why)

enum type { BOOL, BOUND, KEEP, PERCENT, FACTOR, SECONDS, FREE, SIGNAL, OUTPUT };

static const char *const takes[] = {
    [BOOL] = "0 or 1",
    [BOUND] = "a size such as 512M or 4G, 0, or unlimited",
    [KEEP] = "a size such as 512M or 4G, none, or unlimited",
    [PERCENT] = "a percentage from 0 to 100",
    [FACTOR] = "a factor from 1 to 1000, such as 1.25, or unlimited",
    [SECONDS] = "a number of seconds above 0 and up to 100000000, or none",
    [FREE] = "sync, fenced or ordered",
    [SIGNAL] = "a signal such as USR1, USR2 or RTMIN+3, or none",
    [OUTPUT] = "stderr, none, or a path, in which %p is the pid, %h the host and %% a percent sign",
};

static const struct {
    const char *name, *initial;
    enum type type;
} table[] = {
#define VRAM_OPTION(NAME, field, TYPE, initial, help) {#NAME, initial, TYPE},
#include "vramshim/options.def"
#undef VRAM_OPTION
};

static int set(struct vram_options *into, size_t index, const char *value, const char **ret_reason)
{
    size_t i = 0;
#define VRAM_OPTION(NAME, field, TYPE, initial, help)                                                                  \
    if (index == i++)                                                                                                  \
        return PARSE_##TYPE(value, &into->field, ret_reason);
#include "vramshim/options.def"
#undef VRAM_OPTION
    return -ENOENT;
}

static char large(char c) { return c >= 'a' && c <= 'z' ? (char)(c - 'a' + 'A') : c; }

static void complain_unknown(const char *name, size_t len, bool reading, char *ret_why, size_t cap)
{
    const char *done = reading ? " and was ignored" : "";
    char shown[SHOWN], in_capitals[VRAM_NEAREST_MAX];
    const char *nearest = NULL;
    size_t best = 4; /* further away is not a slip of the finger */
    for (size_t i = 0; i < len && i < sizeof(in_capitals); i++)
        in_capitals[i] = large(name[i]);
    for (size_t i = 0; len < sizeof(in_capitals) && i < VRAM_LENGTH(table); i++) {
        size_t d = vram_nearest_distance(in_capitals, len, table[i].name);
        if (d < best) {
            best = d;
            nearest = table[i].name;
        }
    }
    vram_quote(shown, sizeof(shown), name, len);
    if (nearest)
        snprintf(ret_why, cap, "VRAMSHIM_%s is not an option%s; did you mean VRAMSHIM_%s?", shown, done, nearest);
    else
        snprintf(ret_why, cap, "VRAMSHIM_%s is not an option%s; VRAMSHIM_VERBOSE=1 lists them all", shown, done);
}

/* Sets one option, its name given without the prefix and with its length. 0, or -ENOENT or -EINVAL and the line about it: what was
 * done instead where the environment is read, else what is wrong. */
static int take(struct vram_options *into, const char *name, size_t len, const char *value, char *ret_why, size_t cap)
{
    const bool reading = into == &options;
    size_t i = 0;
    while (i < VRAM_LENGTH(table) && (strlen(table[i].name) != len || strncmp(table[i].name, name, len) != 0))
        i++;
    if (i == VRAM_LENGTH(table)) {
        complain_unknown(name, len, reading, ret_why, cap);
        return -ENOENT;
    }
    const char *reason = NULL;
    if (set(into, i, value, &reason) == 0)
        return 0;
    char shown[SHOWN];
    vram_quote(shown, sizeof(shown), value, strlen(value));
    snprintf(ret_why, cap, "VRAMSHIM_%s=%s %s: %s%sit takes %s%s%s", table[i].name, shown, reading ? "was ignored" : "is not taken",
             reason ? reason : "", reason ? "; " : "", takes[table[i].type], reading ? "; using " : "", reading ? table[i].initial : "");
    set(into, i, table[i].initial, &reason); /* also where the environment holds the name twice */
    return -EINVAL;
}

VRAM_EXPORT int vramshim_check_option(const char *name, const char *value, char *ret_why, size_t cap)
{
    struct vram_options scratch;
    return take(&scratch, name, strlen(name), value, ret_why, cap);
}

void vram_options_read(char *const *environ_strings)
{
    static const char prefix[] = "VRAMSHIM_";
    const char *no_reason;
    complaint_count = 0;
    for (size_t i = 0; i < VRAM_LENGTH(table); i++)
        set(&options, i, table[i].initial, &no_reason);

    for (; environ_strings && *environ_strings; environ_strings++) {
        const char *name = *environ_strings;
        char line[sizeof(complaints[0])];
        if (strncmp(name, prefix, sizeof(prefix) - 1) != 0)
            continue;
        name += sizeof(prefix) - 1;
        size_t len = strcspn(name, "=");
        if (take(&options, name, len, name[len] ? name + len + 1 : "", line, sizeof(line)) == 0)
            continue;
        if (complaint_count < COMPLAINTS_MAX)
            memcpy(complaints[complaint_count], line, sizeof(line));
        complaint_count++;
    }
}

void vram_option_format(struct vram_text *t, size_t index)
{
    static const char *const output_names[] = {[VRAM_OUTPUT_STDERR] = "stderr", [VRAM_OUTPUT_NONE] = "none"};
#define FORMAT_BOOL(f) vram_text_add(t, "%d", f)
#define FORMAT_BOUND(f)                                                                                                \
    do {                                                                                                               \
        if ((f) == UINT64_MAX)                                                                                         \
            vram_text_add(t, "unlimited");                                                                             \
        else                                                                                                           \
            vram_text_add(t, "%llu", (unsigned long long)(f));                                                         \
    } while (0)
#define FORMAT_KEEP(f)                                                                                                 \
    do {                                                                                                               \
        if ((f) == 0)                                                                                                  \
            vram_text_add(t, "none");                                                                                  \
        else                                                                                                           \
            FORMAT_BOUND(f);                                                                                           \
    } while (0)
#define FORMAT_PERCENT(f) vram_text_add(t, "%u.%02u", (f) / 100, (f) % 100)
#define FORMAT_FACTOR(f)                                                                                               \
    do {                                                                                                               \
        if ((f) == VRAM_SLACK_UNLIMITED)                                                                               \
            vram_text_add(t, "unlimited");                                                                             \
        else                                                                                                           \
            vram_text_add(t, "%u.%04u", (f) / 10000, (f) % 10000);                                                     \
    } while (0)
#define FORMAT_SECONDS(f)                                                                                              \
    do {                                                                                                               \
        if ((f) == UINT64_MAX)                                                                                         \
            vram_text_add(t, "none");                                                                                  \
        else                                                                                                           \
            vram_text_add(t, "%llu.%03u", (unsigned long long)(f) / 1000, (unsigned)((f) % 1000));                     \
    } while (0)
#define FORMAT_FREE(f) vram_text_add(t, "%s", free_modes[f])
#define FORMAT_SIGNAL(f) vram_signal_format(t, f)
#define FORMAT_OUTPUT(f)                                                                                               \
    vram_text_add(t, "%s", (f).kind < VRAM_LENGTH(output_names) ? output_names[(f).kind] : (f).pattern)
    size_t i = 0;
#define VRAM_OPTION(NAME, field, TYPE, initial, help)                                                                  \
    if (index == i++) {                                                                                                \
        FORMAT_##TYPE(options.field);                                                                                  \
        return;                                                                                                        \
    }
#include "vramshim/options.def"
#undef VRAM_OPTION
}

void vram_options_complain(void)
{
    for (unsigned i = 0; i < complaint_count && i < COMPLAINTS_MAX; i++)
        vram_say("%s", complaints[i]);
    if (complaint_count > COMPLAINTS_MAX)
        vram_say("and %u more VRAMSHIM_ variables were ignored", complaint_count - COMPLAINTS_MAX);
    if (!options.verbose)
        return;
    static const char *const help[] = {
#define VRAM_OPTION(NAME, field, TYPE, initial, text) text,
#include "vramshim/options.def"
#undef VRAM_OPTION
    };
    for (size_t i = 0; i < VRAM_LENGTH(table); i++) {
        char buf[VRAM_PATH_MAX];
        struct vram_text value = VRAM_TEXT(buf);
        vram_option_format(&value, i);
        vram_say("VRAMSHIM_%s=%s  (%s)", table[i].name, buf, help[i]);
    }
}

/*
 * The options, read once from the environment at load, constant afterwards: no lock. Reading is silent, so that a program
 * without CUDA prints nothing (law 6); what was wrong is kept and said by vram_options_complain() at the first use of
 * GPU memory. A bad value keeps the default.
 */
#ifndef VRAM_CONFIG_OPTIONS_H
#define VRAM_CONFIG_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/identity.h"
#include "base/text.h"

enum { VRAM_PATH_MAX = 4096 };

enum vram_free_mode { VRAM_FREE_SYNC, VRAM_FREE_FENCED, VRAM_FREE_ORDERED };

enum vram_output_kind { VRAM_OUTPUT_STDERR, VRAM_OUTPUT_NONE, VRAM_OUTPUT_DESCRIPTOR, VRAM_OUTPUT_PATH };

#define VRAM_SLACK_UNLIMITED UINT32_MAX

/* A name of descriptor 2 (/dev/stderr and the like) is STDERR; that of another descriptor of the process (/dev/stdout, /dev/fd/3,
 * /proc/self/fd/3) is DESCRIPTOR, and means the file that it is of at load. */
struct vram_output {
    enum vram_output_kind kind;
    char pattern[VRAM_PATH_MAX]; /* absolute; %p and %h not yet replaced */
    int fd;
    bool open_at_load;
    struct vram_identity identity;
};

struct vram_options {
    bool cache;
    uint64_t cache_max; /* bytes; UINT64_MAX: no bound, as in the next two */
    uint64_t host_cache; /* bytes; 0: nothing is kept */
    uint64_t virtual_cache; /* the same, on each device */
    uint32_t waste;     /* hundredths of a percent */
    uint32_t slack;     /* the same, of what is live; VRAM_SLACK_UNLIMITED: no bound */
    uint64_t decay;     /* ms; UINT64_MAX: never */
    enum vram_free_mode free_mode;
    int signal; /* 0: none */
    bool drain;
    uint64_t idle_drain; /* ms; UINT64_MAX: never */
    struct vram_output report;
    struct vram_output trace;
    bool verbose;
};

extern const struct vram_options *const vram_options;

/* Launches are of interest to whoever waits for the program to be idle, and to nobody else. */
static inline bool vram_options_watch_launches(void) { return vram_options->idle_drain != UINT64_MAX; }

/* From `environ` (NULL-terminated "NAME=value" strings). At load, and by the unit tests as often as they like. */
void vram_options_read(char *const *environ_strings);

/* One line for each value that could not be taken and each unknown VRAMSHIM_ name, beyond some the number of the others; with
 * VERBOSE, every effective value. */
void vram_options_complain(void);

/* The effective value of the option `index` (in the order of options.def) as its user would write it. */
void vram_option_format(struct vram_text *t, size_t index);

enum { VRAM_PID_ROOM = 12 /* for ".PID" behind a path */ };

/* Expands %p and %h. Returns 0, or -ENAMETOOLONG. */
int vram_output_path(const struct vram_output *output, int pid, char *ret_path, size_t cap);

/* Of a DESCRIPTOR: it is still that of the file that it was of at load. */
bool vram_output_is_open(const struct vram_output *output);

/* Parsers, each returning 0 or -EINVAL and leaving *ret_ untouched then. Words are taken in any case, units too. "none" always
 * means that there is none of it, "unlimited" that it has no bound. Numbers are decimal, with a fraction only where parts are
 * meant. Where more is to be said than what is taken, *ret_reason says it. */
int vram_parse_bound(const char *s, uint64_t *ret_bytes);
int vram_parse_keep(const char *s, uint64_t *ret_bytes); /* "none" is 0 */
int vram_parse_percent(const char *s, uint32_t *ret_hundredths);
int vram_parse_factor(const char *s, uint32_t *ret_hundredths); /* "1.25" is 12500; "unlimited" VRAM_SLACK_UNLIMITED */
int vram_parse_seconds(const char *s, uint64_t *ret_ms);
int vram_parse_bool(const char *s, bool *ret_value);
int vram_parse_signal(const char *s, int *ret_signal, const char **ret_reason);
int vram_parse_output(const char *s, struct vram_output *ret_output, const char **ret_reason);
bool vram_parse_word(const char *s, const char *word); /* s is the word, in any case */

void vram_signal_format(struct vram_text *t, int sig); /* "USR1", "RTMIN+3", "none" */

#endif

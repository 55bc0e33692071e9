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

#include "base/text.h"

enum { VRAM_PATH_MAX = 4096 };

enum vram_free_mode { VRAM_FREE_SYNC, VRAM_FREE_FENCED, VRAM_FREE_ORDERED };

enum vram_output_kind { VRAM_OUTPUT_STDERR, VRAM_OUTPUT_NONE, VRAM_OUTPUT_PATH };

#define VRAM_SLACK_NONE UINT32_MAX

struct vram_output {
    enum vram_output_kind kind;
    char pattern[VRAM_PATH_MAX]; /* absolute; %p and %h not yet replaced */
};

struct vram_options {
    bool cache;
    uint64_t cache_max; /* bytes; UINT64_MAX: no limit */
    uint64_t host_cache; /* bytes; 0: none is kept */
    uint64_t virtual_cache; /* the same, on each device */
    uint32_t waste;     /* hundredths of a percent */
    uint32_t slack;     /* the same, of what is live; VRAM_SLACK_NONE: no bound */
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

/* One line for each value that could not be taken and each unknown VRAMSHIM_ name; with VERBOSE, every effective value. */
void vram_options_complain(void);

/* The effective value of the option `index` (in the order of options.def) as its user would write it. */
void vram_option_format(struct vram_text *t, size_t index);

/* Expands %p and %h. Returns 0, or -ENAMETOOLONG. */
int vram_output_path(const struct vram_output *output, int pid, char *ret_path, size_t cap);

/* Parsers, each returning 0 or -EINVAL and leaving *ret_ untouched then. */
int vram_parse_size(const char *s, uint64_t *ret_bytes);
int vram_parse_percent(const char *s, uint32_t *ret_hundredths);
int vram_parse_factor(const char *s, uint32_t *ret_hundredths); /* "1.25" is 12500; "none" VRAM_SLACK_NONE */
int vram_parse_seconds(const char *s, uint64_t *ret_ms);
int vram_parse_bool(const char *s, bool *ret_value);
int vram_parse_signal(const char *s, int *ret_signal);

void vram_signal_format(struct vram_text *t, int sig); /* "USR1", "RTMIN+3", "none" */

#endif

/* Where reports and traces go: what the option says, and the name of the file. Declared in options.h. */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "config/options.h"

/* The number of the descriptor that this names in this process, or -1. */
static int descriptor_named(const char *s)
{
    static const char *const streams[] = {"/dev/stdin", "/dev/stdout", "/dev/stderr"};
    char own[32];
    snprintf(own, sizeof(own), "/proc/%d/fd/", (int)getpid());
    const char *const folders[] = {"/dev/fd/", "/proc/self/fd/", "/proc/thread-self/fd/", "/proc/%p/fd/", own};
    for (int fd = 0; fd < 3; fd++)
        if (strcmp(s, streams[fd]) == 0)
            return fd;
    for (size_t i = 0; i < VRAM_LENGTH(folders); i++) {
        size_t n = strlen(folders[i]);
        if (strncmp(s, folders[i], n) != 0)
            continue;
        int fd = 0;
        s += n;
        if (!*s || (*s == '0' && s[1]))
            return -1;
        for (; *s; s++)
            if (*s < '0' || *s > '9' || __builtin_mul_overflow(fd, 10, &fd) || __builtin_add_overflow(fd, *s - '0', &fd))
                return -1;
        return fd;
    }
    return -1;
}

bool vram_output_is_open(const struct vram_output *output)
{
    struct vram_identity now;
    return output->open_at_load && vram_identify(output->fd, &now) && vram_identity_same(&now, &output->identity);
}

/* Blanks at an end are left over from a script, not meant. */
static bool is_blank(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

static const char *what_is_wrong(const char *s)
{
    size_t len = strlen(s);
    if (len && (is_blank(s[0]) || is_blank(s[len - 1])))
        return "there are blanks at an end";
    if (len && s[len - 1] == '/')
        return "a file is to be named, not a folder";
    for (const char *c = s; *c; c++)
        if (*c == '%' && *++c != 'p' && *c != 'h' && *c != '%')
            return "a percent sign is followed by none of p, h and %";
    return NULL;
}

/* Adds a path, without what means nothing in it: doubled slashes and "." */
static bool add_path(struct vram_output *o, size_t *at, const char *s, bool literally)
{
    for (; *s; s++) {
        bool begins = *at > 0 && o->pattern[*at - 1] == '/';
        if (begins && (*s == '/' || (*s == '.' && (s[1] == '/' || !s[1]))))
            continue;
        if (*at + 2 >= sizeof(o->pattern))
            return false;
        o->pattern[(*at)++] = *s;
        if (*s == '%' && literally)
            o->pattern[(*at)++] = '%';
    }
    o->pattern[*at] = 0;
    return true;
}

int vram_parse_output(const char *s, struct vram_output *ret_output, const char **ret_reason)
{
    struct vram_output o = {.kind = vram_parse_word(s, "none") ? VRAM_OUTPUT_NONE : VRAM_OUTPUT_STDERR};
    if (o.kind == VRAM_OUTPUT_NONE || vram_parse_word(s, "stderr")) {
        *ret_output = o;
        return 0;
    }
    *ret_reason = what_is_wrong(s);
    if (!*s || *ret_reason)
        return -EINVAL;
    /* A relative path is made absolute now, before the program changes its directory (law 26). */
    size_t at = 0;
    bool fits = true;
    char path[VRAM_PATH_MAX];
    if (*s != '/') {
        if (!getcwd(path, sizeof(path))) {
            *ret_reason = errno == ERANGE || errno == ENAMETOOLONG
                              ? "the name of the current folder is too long"
                              : "the current folder is not there any more, or cannot be read, so no path can begin there";
            return -EINVAL;
        }
        fits = add_path(&o, &at, path, true) && add_path(&o, &at, "/", false); /* a percent sign of the directory is no pattern */
    }
    fits = fits && add_path(&o, &at, s, false);
    if (!fits || vram_output_path(&o, INT_MAX, path, sizeof(path) - VRAM_PID_ROOM) != 0) {
        *ret_reason = "it is too long for a path";
        return -EINVAL;
    }
    o.fd = descriptor_named(o.pattern);
    o.kind = o.fd == STDERR_FILENO ? VRAM_OUTPUT_STDERR : o.fd >= 0 ? VRAM_OUTPUT_DESCRIPTOR : VRAM_OUTPUT_PATH;
    o.open_at_load = o.kind == VRAM_OUTPUT_DESCRIPTOR && vram_identify(o.fd, &o.identity);
    *ret_output = o;
    return 0;
}

int vram_output_path(const struct vram_output *output, int pid, char *ret_path, size_t cap)
{
    struct vram_text t = {ret_path, cap, 0};
    *ret_path = 0;
    for (const char *c = output->pattern; *c; c++) {
        if (c[0] != '%' || !c[1]) {
            vram_text_add(&t, "%c", *c);
            continue;
        }
        switch (*++c) {
        case 'p': vram_text_add(&t, "%d", pid); break;
        case 'h': {
            char host[HOST_NAME_MAX + 1] = "localhost";
            gethostname(host, sizeof(host));
            host[HOST_NAME_MAX] = 0;
            vram_text_add(&t, "%s", host);
            break;
        }
        default: vram_text_add(&t, "%%"); break;
        }
    }
    return t.len + 1 < cap ? 0 : -ENAMETOOLONG;
}

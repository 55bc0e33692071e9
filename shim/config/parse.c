/* The values that options take. Declared in options.h. */
#include <ctype.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "config/options.h"

/* An unsigned decimal with an optional fraction, as value = whole + millionths / 10^6. No strtod: its locale may want a
 * comma. */
static const char *read_decimal(const char *s, uint64_t *ret_whole, uint64_t *ret_millionths)
{
    uint64_t whole = 0, millionths = 0;
    if (!isdigit((unsigned char)*s))
        return NULL;
    for (; isdigit((unsigned char)*s); s++) {
        if (__builtin_mul_overflow(whole, 10u, &whole) ||
            __builtin_add_overflow(whole, (uint64_t)(*s - '0'), &whole))
            return NULL;
    }
    if (*s == '.') {
        uint64_t unit = 100000;
        if (!isdigit((unsigned char)*++s))
            return NULL;
        for (; isdigit((unsigned char)*s); s++, unit /= 10)
            millionths += unit * (uint64_t)(*s - '0');
    }
    *ret_whole = whole;
    *ret_millionths = millionths;
    return s;
}

int vram_parse_size(const char *s, uint64_t *ret_bytes)
{
    static const char units[] = "KMGT";
    uint64_t whole, millionths, bytes;
    unsigned shift = 0;

    if (strcasecmp(s, "none") == 0 || strcasecmp(s, "unlimited") == 0) {
        *ret_bytes = UINT64_MAX;
        return 0;
    }
    s = read_decimal(s, &whole, &millionths);
    if (!s)
        return -EINVAL;
    while (*s == ' ')
        s++;
    const char *unit = *s ? strchr(units, toupper((unsigned char)*s)) : NULL;
    if (unit) {
        shift = 10 * (unsigned)(unit - units + 1);
        s++;
    }
    /* 512M, 512MB and 512MiB are one thing here, as everywhere in this field. */
    if (*s == 'i' && shift)
        s++;
    if (*s == 'B' || *s == 'b')
        s++;
    if (*s || (millionths && !shift))
        return -EINVAL;
    if (__builtin_mul_overflow(whole, (uint64_t)1 << shift, &bytes))
        return -EINVAL;
    uint64_t fraction = shift ? ((millionths << (shift > 40 ? 40 : shift)) / 1000000) : 0;
    if (__builtin_add_overflow(bytes, fraction, &bytes))
        return -EINVAL;
    *ret_bytes = bytes;
    return 0;
}

int vram_parse_percent(const char *s, uint32_t *ret_hundredths)
{
    uint64_t whole, millionths;
    s = read_decimal(s, &whole, &millionths);
    if (!s)
        return -EINVAL;
    if (*s == '%')
        s++;
    if (*s || whole > 100 || (whole == 100 && millionths))
        return -EINVAL;
    *ret_hundredths = (uint32_t)(whole * 100 + millionths / 10000);
    return 0;
}

int vram_parse_factor(const char *s, uint32_t *ret_hundredths)
{
    uint64_t whole, millionths;
    if (strcasecmp(s, "none") == 0) {
        *ret_hundredths = VRAM_SLACK_NONE;
        return 0;
    }
    s = read_decimal(s, &whole, &millionths);
    if (s && *s == 'x')
        s++;
    if (!s || *s || whole < 1 || whole > 1000)
        return -EINVAL;
    *ret_hundredths = (uint32_t)(whole * 10000 + millionths / 100);
    return 0;
}

int vram_parse_seconds(const char *s, uint64_t *ret_ms)
{
    uint64_t whole, millionths;
    if (strcasecmp(s, "none") == 0) {
        *ret_ms = UINT64_MAX;
        return 0;
    }
    s = read_decimal(s, &whole, &millionths);
    if (s && *s == 's')
        s++;
    if (!s || *s || whole > 100000000 || (!whole && millionths < 1000))
        return -EINVAL;
    *ret_ms = whole * 1000 + millionths / 1000;
    return 0;
}

int vram_parse_bool(const char *s, bool *ret_value)
{
    static const char *const words[2][4] = {{"0", "off", "no", "false"}, {"1", "on", "yes", "true"}};
    for (int v = 0; v < 2; v++) {
        for (size_t i = 0; i < 4; i++) {
            if (strcasecmp(s, words[v][i]) == 0) {
                *ret_value = v;
                return 0;
            }
        }
    }
    return -EINVAL;
}

/* Names that users write. sigabbrev_np() would be a symbol of glibc 2.32; we load on older ones. */
static const struct {
    const char *name;
    int number;
} names[] = {
    {"HUP", SIGHUP},   {"INT", SIGINT},   {"QUIT", SIGQUIT}, {"USR1", SIGUSR1}, {"USR2", SIGUSR2},   {"PIPE", SIGPIPE},
    {"ALRM", SIGALRM}, {"TERM", SIGTERM}, {"CONT", SIGCONT}, {"URG", SIGURG},   {"XCPU", SIGXCPU},   {"WINCH", SIGWINCH},
    {"IO", SIGIO},     {"PWR", SIGPWR},   {"TTIN", SIGTTIN}, {"TTOU", SIGTTOU}, {"TSTP", SIGTSTP},   {"VTALRM", SIGVTALRM},
};

void vram_signal_format(struct vram_text *t, int sig)
{
    if (!sig) {
        vram_text_add(t, "none");
        return;
    }
    for (size_t i = 0; i < VRAM_LENGTH(names); i++) {
        if (names[i].number == sig) {
            vram_text_add(t, "%s", names[i].name);
            return;
        }
    }
    if (sig >= SIGRTMIN)
        vram_text_add(t, "RTMIN+%d", sig - SIGRTMIN);
    else
        vram_text_add(t, "%d", sig);
}

int vram_parse_signal(const char *s, int *ret_signal)
{
    uint64_t number, millionths;
    int base = 0;

    if (strcasecmp(s, "none") == 0) {
        *ret_signal = 0;
        return 0;
    }
    const char *end = read_decimal(s, &number, &millionths);
    if (!end) {
        if (strncasecmp(s, "SIG", 3) == 0)
            s += 3;
        for (size_t i = 0; i < VRAM_LENGTH(names); i++) {
            if (strcasecmp(s, names[i].name) == 0) {
                *ret_signal = names[i].number;
                return 0;
            }
        }
        if (strncasecmp(s, "RTMIN", 5) != 0)
            return -EINVAL;
        base = SIGRTMIN;
        number = 0;
        s += 5;
        if (*s == '+' && !(end = read_decimal(s + 1, &number, &millionths)))
            return -EINVAL;
        if (*s != '+')
            end = s;
    }
    /* A signal that cannot be caught, or that a fault raises, cannot mean "flush". */
    if (*end || number > (uint64_t)SIGRTMAX || base + (int)number > SIGRTMAX)
        return -EINVAL;
    int sig = base + (int)number;
    if (sig == 0 || sig == SIGKILL || sig == SIGSTOP || sig == SIGSEGV || sig == SIGBUS || sig == SIGILL || sig == SIGFPE ||
        sig == SIGABRT || sig == SIGTRAP || sig == SIGSYS || sig == SIGCHLD || (sig > 31 && sig < SIGRTMIN))
        return -EINVAL;
    *ret_signal = sig;
    return 0;
}

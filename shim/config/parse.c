/* The values that options take. Declared in options.h. */
#include <errno.h>
#include <signal.h>
#include <string.h>

#include "config/options.h"

/* ASCII, whatever the program's locale is by the time that somebody asks. */
static char small(char c) { return c >= 'A' && c <= 'Z' ? (char)(c - 'A' + 'a') : c; }
static bool is_digit(char c) { return c >= '0' && c <= '9'; }

bool vram_parse_word(const char *s, const char *word)
{
    while (*s && small(*s) == small(*word))
        s++, word++;
    return !*s && !*word;
}

/* Behind the prefix, if s begins with it; or NULL. */
static const char *after(const char *s, const char *prefix)
{
    for (; *prefix; s++, prefix++)
        if (small(*s) != small(*prefix))
            return NULL;
    return s;
}

/* Digits and nothing else: no sign, no blank, no base but ten. What is behind them, or NULL. */
static const char *read_whole(const char *s, uint64_t *ret_whole)
{
    uint64_t whole = 0;
    if (!is_digit(*s))
        return NULL;
    for (; is_digit(*s); s++)
        if (__builtin_mul_overflow(whole, 10u, &whole) || __builtin_add_overflow(whole, (uint64_t)(*s - '0'), &whole))
            return NULL;
    *ret_whole = whole;
    return s;
}

/* The same with an optional fraction, as value = whole + millionths / 10^6, rounded down. No strtod: its locale may want a
 * comma. */
static const char *read_decimal(const char *s, uint64_t *ret_whole, uint64_t *ret_millionths)
{
    uint64_t millionths = 0;
    s = read_whole(s, ret_whole);
    if (s && *s == '.') {
        uint64_t unit = 100000;
        if (!is_digit(*++s))
            return NULL;
        for (; is_digit(*s); s++, unit /= 10)
            millionths += unit * (uint64_t)(*s - '0');
    }
    *ret_millionths = millionths;
    return s;
}

static int parse_size(const char *s, uint64_t *ret_bytes)
{
    static const char units[] = "kmgt";
    uint64_t whole, millionths, bytes;
    unsigned shift = 0;

    const char *end = read_decimal(s, &whole, &millionths);
    if (!end)
        return -EINVAL;
    bool fraction = memchr(s, '.', (size_t)(end - s)) != NULL;
    if (*end == ' ' && end[1])
        end++;
    const char *unit = *end ? strchr(units, small(*end)) : NULL;
    if (unit) {
        shift = 10 * (unsigned)(unit - units + 1);
        end++;
        if (small(*end) == 'i')
            end++;
    }
    /* 512M, 512MB and 512MiB are one thing here, as everywhere in this field. A byte has no parts. */
    if (small(*end) == 'b')
        end++;
    if (*end || (fraction && !shift))
        return -EINVAL;
    if (__builtin_mul_overflow(whole, (uint64_t)1 << shift, &bytes) ||
        __builtin_add_overflow(bytes, (millionths << shift) / 1000000, &bytes))
        return -EINVAL;
    *ret_bytes = bytes;
    return 0;
}

int vram_parse_bound(const char *s, uint64_t *ret_bytes)
{
    if (!vram_parse_word(s, "unlimited"))
        return parse_size(s, ret_bytes);
    *ret_bytes = UINT64_MAX;
    return 0;
}

int vram_parse_keep(const char *s, uint64_t *ret_bytes)
{
    if (!vram_parse_word(s, "none"))
        return vram_parse_bound(s, ret_bytes);
    *ret_bytes = 0;
    return 0;
}

int vram_parse_percent(const char *s, uint32_t *ret_hundredths)
{
    uint64_t whole, millionths;
    s = read_decimal(s, &whole, &millionths);
    if (s && *s == '%')
        s++;
    if (!s || *s || whole > 100 || (whole == 100 && millionths))
        return -EINVAL;
    *ret_hundredths = (uint32_t)(whole * 100 + millionths / 10000);
    return 0;
}

int vram_parse_factor(const char *s, uint32_t *ret_hundredths)
{
    uint64_t whole, millionths;
    if (vram_parse_word(s, "unlimited")) {
        *ret_hundredths = VRAM_SLACK_UNLIMITED;
        return 0;
    }
    s = read_decimal(s, &whole, &millionths);
    if (s && small(*s) == 'x')
        s++;
    if (!s || *s || whole < 1 || whole > 1000)
        return -EINVAL;
    *ret_hundredths = (uint32_t)(whole * 10000 + millionths / 100);
    return 0;
}

int vram_parse_seconds(const char *s, uint64_t *ret_ms)
{
    uint64_t whole, millionths;
    if (vram_parse_word(s, "none")) {
        *ret_ms = UINT64_MAX;
        return 0;
    }
    s = read_decimal(s, &whole, &millionths);
    if (s && small(*s) == 's')
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
            if (vram_parse_word(s, words[v][i])) {
                *ret_value = v;
                return 0;
            }
        }
    }
    return -EINVAL;
}

/* All that Linux has, the name that we write first. sigabbrev_np() would be a symbol of glibc 2.32; we load on older ones. */
static const struct {
    const char *name;
    int number;
} names[] = {
    {"HUP", SIGHUP},     {"INT", SIGINT},   {"QUIT", SIGQUIT},     {"ILL", SIGILL},   {"TRAP", SIGTRAP},   {"ABRT", SIGABRT},
    {"IOT", SIGIOT},     {"BUS", SIGBUS},   {"FPE", SIGFPE},       {"KILL", SIGKILL}, {"USR1", SIGUSR1},   {"SEGV", SIGSEGV},
    {"USR2", SIGUSR2},   {"PIPE", SIGPIPE}, {"ALRM", SIGALRM},     {"TERM", SIGTERM}, {"STKFLT", SIGSTKFLT}, {"CHLD", SIGCHLD},
    {"CLD", SIGCLD},     {"CONT", SIGCONT}, {"STOP", SIGSTOP},     {"TSTP", SIGTSTP}, {"TTIN", SIGTTIN},   {"TTOU", SIGTTOU},
    {"URG", SIGURG},     {"XCPU", SIGXCPU}, {"XFSZ", SIGXFSZ},     {"VTALRM", SIGVTALRM}, {"PROF", SIGPROF}, {"WINCH", SIGWINCH},
    {"IO", SIGIO},       {"POLL", SIGPOLL}, {"PWR", SIGPWR},       {"SYS", SIGSYS},
};

/* What lies between 31 and RTMIN is libc's own. */
static bool is_there(uint64_t sig)
{
    return sig >= 1 && sig <= (uint64_t)SIGRTMAX && (sig <= 31 || sig >= (uint64_t)SIGRTMIN);
}

/*
 * Which signals can mean "give back", by what they are and not by how they are written: those that end a program which does not
 * handle them, and that are sent to it.
 *
 *   KILL, STOP                        cannot be caught
 *   SEGV, BUS, ILL, FPE, TRAP, SYS, ABRT, PIPE, XFSZ
 *                                     a thread raises them by what it does: a fault, an abort, a write that cannot be. Returned
 *                                     from, a fault comes again; the last two we hold back around our own writes (law 32)
 *   TTIN, TTOU, TSTP                  stop it. With a handler the read that raised it would be tried again, for ever
 *   CHLD, CONT, URG, WINCH            end nobody: with a handler calls would be interrupted that are not so natively
 */
static bool can_be_taken(uint64_t sig)
{
    static const int not[] = {SIGKILL, SIGSTOP, SIGSEGV, SIGBUS,  SIGILL,  SIGFPE,  SIGTRAP, SIGSYS, SIGABRT,
                              SIGPIPE, SIGXFSZ, SIGTTIN, SIGTTOU, SIGTSTP, SIGCHLD, SIGCONT, SIGURG, SIGWINCH};
    for (size_t i = 0; i < VRAM_LENGTH(not); i++)
        if (sig == (uint64_t)not[i])
            return false;
    return is_there(sig);
}

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
    vram_text_add(t, "RTMIN+%d", sig - SIGRTMIN);
}

/* A signal of this system, whether it can be taken or not. */
static bool read_signal(const char *s, uint64_t *ret_signal)
{
    uint64_t number = 0;
    const char *end = read_whole(s, &number), *name = after(s, "SIG");
    if (end) {
        *ret_signal = number;
        return !*end;
    }
    name = name ? name : s;
    for (size_t i = 0; i < VRAM_LENGTH(names); i++) {
        if (vram_parse_word(name, names[i].name)) {
            *ret_signal = (uint64_t)names[i].number;
            return true;
        }
    }
    const uint64_t span = (uint64_t)(SIGRTMAX - SIGRTMIN);
    bool from_last = false;
    const char *offset = after(name, "RTMIN");
    if (!offset) {
        offset = after(name, "RTMAX");
        from_last = true;
    }
    if (!offset || (*offset && (*offset != (from_last ? '-' : '+') || !(offset = read_whole(offset + 1, &number)))))
        return false;
    *ret_signal = from_last ? (uint64_t)SIGRTMAX - number : (uint64_t)SIGRTMIN + number;
    return !*offset && number <= span;
}

int vram_parse_signal(const char *s, int *ret_signal, const char **ret_reason)
{
    uint64_t sig;
    if (vram_parse_word(s, "none")) {
        *ret_signal = 0;
        return 0;
    }
    if (!read_signal(s, &sig))
        return -EINVAL;
    if (!can_be_taken(sig)) {
        *ret_reason = is_there(sig) ? "it must be one that is sent and that ends whoever does not handle it" : "there is no such signal";
        return -EINVAL;
    }
    *ret_signal = (int)sig;
    return 0;
}

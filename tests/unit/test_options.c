#include "config/options.h"

#include <criterion/criterion.h>
#include <criterion/redirect.h>
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "base/say.h"
#include "vramshim/vramshim.h"

#define READ(...) vram_options_read((char *const *)(const char *const[]){__VA_ARGS__, NULL})

static const char *complaints(void)
{
    static char text[8192];
    int fds[2];
    cr_assert_eq(pipe(fds), 0);
    dup2(fds[1], STDERR_FILENO);
    vram_say_adopt();
    vram_options_complain();
    close(fds[1]);
    close(STDERR_FILENO);
    size_t n = 0;
    for (ssize_t r; n < sizeof(text) - 1 && (r = read(fds[0], text + n, sizeof(text) - 1 - n)) > 0;)
        n += (size_t)r;
    text[n] = 0;
    return text;
}

Test(options, defaults)
{
    READ("PATH=/bin", "VRAMSHIM=1");
    cr_assert(vram_options->cache);
    cr_assert_eq(vram_options->cache_max, UINT64_MAX);
    cr_assert_eq(vram_options->waste, 1250);
    cr_assert_eq(vram_options->signal, SIGUSR1);
    cr_assert_eq(vram_options->report.kind, VRAM_OUTPUT_STDERR);
    cr_assert_str_empty(complaints());
}

Test(options, each_is_read)
{
    READ("VRAMSHIM_CACHE=off", "VRAMSHIM_CACHE_MAX=1.5GiB", "VRAMSHIM_WASTE=3.25%", "VRAMSHIM_SIGNAL=SIGUSR2",
         "VRAMSHIM_REPORT=/tmp/r.%p", "VRAMSHIM_FREE=sync");
    cr_assert_not(vram_options->cache);
    cr_assert_eq(vram_options->cache_max, 3ull << 29);
    cr_assert_eq(vram_options->waste, 325);
    cr_assert_eq(vram_options->signal, SIGUSR2);
    cr_assert_str_eq(vram_options->report.pattern, "/tmp/r.%p");
    cr_assert_str_empty(complaints());
}

Test(options, a_bad_value_keeps_the_default_and_is_told_once)
{
    READ("VRAMSHIM_CACHE_MAX=lots", "VRAMSHIM_SIGNAL=KILL");
    cr_assert_eq(vram_options->cache_max, UINT64_MAX);
    cr_assert_eq(vram_options->signal, SIGUSR1);
    cr_assert_str_eq(complaints(),
                     "vramshim: VRAMSHIM_CACHE_MAX=lots was ignored: it takes a size such as 512M or 4G, 0, or unlimited; "
                     "using unlimited\n"
                     "vramshim: VRAMSHIM_SIGNAL=KILL was ignored: it must be one that is sent and that ends whoever does not "
                     "handle it; it takes a signal such as USR1, USR2 or RTMIN+3, or none; using USR1\n");
}

Test(options, an_unknown_name_gets_the_nearest)
{
    READ("VRAMSHIM_REPROT=none", "VRAMSHIM_QQQQQQQQ=1");
    const char *said = complaints();
    cr_assert(strstr(said, "VRAMSHIM_REPROT is not an option and was ignored; did you mean VRAMSHIM_REPORT?"), "%s", said);
    cr_assert(strstr(said, "VRAMSHIM_QQQQQQQQ is not an option and was ignored; VRAMSHIM_VERBOSE=1 lists them all"), "%s", said);
}

Test(options, verbose_says_every_effective_value)
{
    READ("VRAMSHIM_VERBOSE=1", "VRAMSHIM_CACHE_MAX=1K");
    const char *said = complaints();
    cr_assert(strstr(said, "VRAMSHIM_CACHE_MAX=1024 "), "%s", said);
    cr_assert(strstr(said, "VRAMSHIM_WASTE=12.50 "), "%s", said);
    cr_assert(strstr(said, "VRAMSHIM_SIGNAL=USR1 "), "%s", said);
}

Test(options, a_relative_path_is_absolute_from_load_on)
{
    char expected[64];
    cr_assert_eq(chdir("/tmp"), 0);
    READ("VRAMSHIM_REPORT=out/%h.%p");
    snprintf(expected, sizeof(expected), "/tmp/out/%%h.%%p");
    cr_assert_str_eq(vram_options->report.pattern, expected);
}

Test(options, patterns)
{
    char path[256], host[128], expected[256];
    struct vram_output o = {.kind = VRAM_OUTPUT_PATH, .pattern = "/a/%h-%p-%%"};
    gethostname(host, sizeof(host));
    snprintf(expected, sizeof(expected), "/a/%s-42-%%", host);
    cr_assert_eq(vram_output_path(&o, 42, path, sizeof(path)), 0);
    cr_assert_str_eq(path, expected);
    cr_assert_eq(vram_output_path(&o, 42, path, 6), -ENAMETOOLONG);
}

Test(options, sizes)
{
    static const struct {
        const char *text;
        uint64_t bytes;
    } good[] = {{"0", 0},           {"512", 512},       {"512B", 512},         {"1k", 1024},
                {"512M", 512ull << 20}, {"4G", 4ull << 30}, {"4GB", 4ull << 30},   {"1.5GiB", 3ull << 29},
                {"4 gib", 4ull << 30}, {"2T", 2ull << 40}, {"Unlimited", UINT64_MAX}, {"0.5K", 512}};
    static const char *const bad[] = {"",     "M",   "-1",   "+5", "1.5",  "1.0", "1.5B", "1..5M", "1.M",  ".5M",  "4 G x",
                                      "4X",   "1e9", "0x10", " 1", "1 ",   "1\n", "4  G", "4G ",   "4iB",  "none",
                                      "99999999999999999999", "20000000T"};
    for (size_t i = 0; i < VRAM_LENGTH(good); i++) {
        uint64_t bytes = 1;
        cr_assert_eq(vram_parse_bound(good[i].text, &bytes), 0, "%s", good[i].text);
        cr_assert_eq(bytes, good[i].bytes, "%s", good[i].text);
    }
    for (size_t i = 0; i < VRAM_LENGTH(bad); i++) {
        uint64_t bytes = 77;
        cr_assert_eq(vram_parse_bound(bad[i], &bytes), -EINVAL, "%s", bad[i]);
        cr_assert_eq(bytes, 77);
    }
    uint64_t kept = 77;
    cr_assert_eq(vram_parse_keep("None", &kept), 0);
    cr_assert_eq(kept, 0);
    cr_assert_eq(vram_parse_keep("unlimited", &kept), 0);
    cr_assert_eq(kept, UINT64_MAX);
}

static int signal_of(const char *s)
{
    const char *reason = NULL;
    int sig = -1;
    return vram_parse_signal(s, &sig, &reason) == 0 ? sig : -1;
}

Test(options, signals)
{
    cr_assert_eq(signal_of("none"), 0);
    cr_assert_eq(signal_of("12"), 12);
    cr_assert_eq(signal_of("sigrtmin+3"), SIGRTMIN + 3);
    cr_assert_eq(signal_of("RTMAX-1"), SIGRTMAX - 1);
    cr_assert_eq(signal_of("RTMAX"), SIGRTMAX);
    cr_assert_eq(signal_of("poll"), SIGIO);
    static const char *const bad[] = {"",        "0",       "SEGV",      "9",      "19",       "32",      "1000",     "RTMIN+99",
                                      "USR3",    "RTMIN-1", "10x",       "10.9",   "10.0",     "RTMIN+1.5", "RTMIN+", "RTMIN+-1",
                                      "RTMAX+1", "RTMAX-99", "+10",      "-10",    " 10",      "SIG10",   "SIG",      "iot",
                                      "RTMIN+18446744073709551615"};
    for (size_t i = 0; i < VRAM_LENGTH(bad); i++)
        cr_assert_eq(signal_of(bad[i]), -1, "%s", bad[i]);
}

/* What is written for a number is read as that number, and one is refused as the other is. */
Test(options, signals_by_name_and_by_number)
{
    for (int sig = 1; sig <= SIGRTMAX; sig++) {
        char number[16], name[16];
        struct vram_text t = VRAM_TEXT(name);
        snprintf(number, sizeof(number), "%d", sig);
        if (sig > 31 && sig < SIGRTMIN) {
            cr_assert_eq(signal_of(number), -1, "%s", number);
            continue;
        }
        vram_signal_format(&t, sig);
        cr_assert_eq(signal_of(number), signal_of(name), "%s %s", number, name);
        cr_assert(signal_of(number) == sig || signal_of(number) == -1, "%s", number);
    }
}

static enum vram_output_kind kind_of(const char *s)
{
    struct vram_output o;
    const char *reason = NULL;
    return vram_parse_output(s, &o, &reason) == 0 ? o.kind : (enum vram_output_kind)-1;
}

Test(options, outputs)
{
    static const char *const error[] = {"stderr", "STDERR", "/dev/stderr", "/dev//./stderr", "/dev/fd/2", "/proc/self/fd/2",
                                        "/proc/thread-self/fd/2", "/proc/%p/fd/2"};
    static const char *const other[] = {"/dev/stdin", "/dev/stdout", "/dev/fd/0", "/dev/fd/1", "/proc/self/fd/77"};
    static const char *const path[] = {"/dev/fd/02", "/dev/fd/2x", "/dev/fd/99999999999", "/dev/null", "/proc/1/fd/2", "./none",
                                       "-1", ".", "100%%"};
    static const char *const bad[] = {"", " ", "\t", " x", "x\n", "none ", "%", "x%", "%%%", "%q", "%P", "/tmp/", "/"};
    for (size_t i = 0; i < VRAM_LENGTH(error); i++)
        cr_assert_eq(kind_of(error[i]), VRAM_OUTPUT_STDERR, "%s", error[i]);
    for (size_t i = 0; i < VRAM_LENGTH(other); i++)
        cr_assert_eq(kind_of(other[i]), VRAM_OUTPUT_DESCRIPTOR, "%s", other[i]);
    for (size_t i = 0; i < VRAM_LENGTH(path); i++)
        cr_assert_eq(kind_of(path[i]), VRAM_OUTPUT_PATH, "%s", path[i]);
    for (size_t i = 0; i < VRAM_LENGTH(bad); i++)
        cr_assert_eq(kind_of(bad[i]), (enum vram_output_kind)-1, "%s", bad[i]);
    cr_assert_eq(kind_of("None"), VRAM_OUTPUT_NONE);
}

/* At the bound: what is taken can be named, with the pid behind it. */
Test(options, long_paths)
{
    static char value[VRAM_PATH_MAX + 8], path[VRAM_PATH_MAX];
    size_t longest = 0;
    for (size_t n = VRAM_PATH_MAX - 64; n < VRAM_PATH_MAX + 4; n++) {
        struct vram_output o;
        const char *reason = NULL;
        memset(value, 'x', n);
        value[0] = '/';
        value[n] = 0;
        if (vram_parse_output(value, &o, &reason) == 0) {
            longest = n;
            cr_assert_eq(vram_output_path(&o, 1, path, sizeof(path) - VRAM_PID_ROOM), 0);
            cr_assert_str_eq(path, value);
        } else {
            cr_assert_str_eq(reason, "it is too long for a path");
        }
    }
    cr_assert_eq(longest, VRAM_PATH_MAX - VRAM_PID_ROOM - 2);
}

Test(options, percentages_and_switches)
{
    uint32_t p;
    bool b;
    cr_assert_eq(vram_parse_percent("100", &p), 0);
    cr_assert_eq(p, 10000);
    cr_assert_eq(vram_parse_percent("100.1", &p), -EINVAL);
    cr_assert_eq(vram_parse_percent("12,5", &p), -EINVAL);
    uint64_t ms;
    cr_assert_eq(vram_parse_seconds("30", &ms), 0);
    cr_assert_eq(ms, 30000);
    cr_assert_eq(vram_parse_seconds("0.25s", &ms), 0);
    cr_assert_eq(ms, 250);
    cr_assert_eq(vram_parse_seconds("none", &ms), 0);
    cr_assert_eq(ms, UINT64_MAX);
    cr_assert_eq(vram_parse_seconds("0", &ms), -EINVAL);
    cr_assert_eq(vram_parse_seconds("-1", &ms), -EINVAL);
    cr_assert_eq(vram_parse_seconds("5m", &ms), -EINVAL);
    cr_assert_eq(vram_parse_bool("YES", &b), 0);
    cr_assert(b);
    cr_assert_eq(vram_parse_bool("2", &b), -EINVAL);
}

Test(options, factors)
{
    uint32_t f = 7;
    cr_assert_eq(vram_parse_factor("0.9", &f), -EINVAL);
    cr_assert_eq(vram_parse_factor("1.1y", &f), -EINVAL);
    cr_assert_eq(vram_parse_factor("", &f), -EINVAL);
    cr_assert_eq(vram_parse_factor("none", &f), -EINVAL);
    cr_assert_eq(f, 7);
    cr_assert_eq(vram_parse_factor("1", &f), 0);
    cr_assert_eq(f, 10000);
    cr_assert_eq(vram_parse_factor("1.25x", &f), 0);
    cr_assert_eq(f, 12500);
    cr_assert_eq(vram_parse_factor("UNLIMITED", &f), 0);
    cr_assert_eq(f, VRAM_SLACK_UNLIMITED);
}

Test(options, a_check_says_what_is_wrong_and_changes_nothing)
{
    char why[512] = "untouched", small[16];
    READ("VRAMSHIM_CACHE_MAX=1G", "VRAMSHIM_VERBOSE=no");
    cr_assert_eq(vramshim_check_option("CACHE_MAX", "2G", why, sizeof(why)), 0);
    cr_assert_str_eq(why, "untouched");
    cr_assert_eq(vramshim_check_option("CACHE_MAX", "lots\n", why, sizeof(why)), -EINVAL);
    cr_assert(strstr(why, "VRAMSHIM_CACHE_MAX=lots\\n is not taken: it takes a size such as 512M"), "%s", why);
    cr_assert_eq(vramshim_check_option("CASH", "1", why, sizeof(why)), -ENOENT);
    cr_assert_str_eq(why, "VRAMSHIM_CASH is not an option; did you mean VRAMSHIM_CACHE?");
    cr_assert_eq(vramshim_check_option("CASH", "1", small, sizeof(small)), -ENOENT);
    cr_assert_str_eq(small, "VRAMSHIM_CASH i");
    cr_assert_eq(vramshim_check_option("CACHE", "2", NULL, 0), -EINVAL);
    cr_assert_eq(vram_options->cache_max, 1 << 30);
    cr_assert(vram_options->cache);
    cr_assert_str_empty(complaints());
}

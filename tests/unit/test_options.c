#include "config/options.h"

#include <criterion/criterion.h>
#include <criterion/redirect.h>
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "base/say.h"

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
                     "vramshim: VRAMSHIM_CACHE_MAX=lots was ignored: it takes a size such as 512M or 4G, or none; using none\n"
                     "vramshim: VRAMSHIM_SIGNAL=KILL was ignored: it takes a signal such as USR1, USR2 or RTMIN+3, or none; "
                     "using USR1\n");
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
    struct vram_output o = {VRAM_OUTPUT_PATH, "/a/%h-%p-%%-%q"};
    gethostname(host, sizeof(host));
    snprintf(expected, sizeof(expected), "/a/%s-42-%%-%%q", host);
    cr_assert_eq(vram_output_path(&o, 42, path, sizeof(path)), 0);
    cr_assert_str_eq(path, expected);
    cr_assert_eq(vram_output_path(&o, 42, path, 6), -ENAMETOOLONG);
}

Test(options, sizes)
{
    static const struct {
        const char *text;
        uint64_t bytes;
    } good[] = {{"0", 0},        {"512", 512},       {"512B", 512},   {"1k", 1024},       {"512M", 512ull << 20},
                {"4G", 4ull << 30}, {"4GB", 4ull << 30}, {"1.5GiB", 3ull << 29}, {"none", UINT64_MAX}, {"2T", 2ull << 40}};
    static const char *const bad[] = {"", "M", "-1", "1.5", "1..5M", "4 G x", "4X", "99999999999999999999", "20000000T"};
    for (size_t i = 0; i < VRAM_LENGTH(good); i++) {
        uint64_t bytes = 1;
        cr_assert_eq(vram_parse_size(good[i].text, &bytes), 0, "%s", good[i].text);
        cr_assert_eq(bytes, good[i].bytes, "%s", good[i].text);
    }
    for (size_t i = 0; i < VRAM_LENGTH(bad); i++) {
        uint64_t bytes = 77;
        cr_assert_eq(vram_parse_size(bad[i], &bytes), -EINVAL, "%s", bad[i]);
        cr_assert_eq(bytes, 77);
    }
}

Test(options, signals)
{
    int sig;
    cr_assert_eq(vram_parse_signal("none", &sig), 0);
    cr_assert_eq(sig, 0);
    cr_assert_eq(vram_parse_signal("12", &sig), 0);
    cr_assert_eq(sig, 12);
    cr_assert_eq(vram_parse_signal("sigrtmin+3", &sig), 0);
    cr_assert_eq(sig, SIGRTMIN + 3);
    static const char *const bad[] = {"", "0", "SEGV", "9", "19", "32", "1000", "RTMIN+99", "USR3", "RTMIN-1", "10x"};
    for (size_t i = 0; i < VRAM_LENGTH(bad); i++)
        cr_assert_eq(vram_parse_signal(bad[i], &sig), -EINVAL, "%s", bad[i]);
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
    cr_assert_eq(f, 7);
    cr_assert_eq(vram_parse_factor("1", &f), 0);
    cr_assert_eq(f, 10000);
    cr_assert_eq(vram_parse_factor("1.25x", &f), 0);
    cr_assert_eq(f, 12500);
    cr_assert_eq(vram_parse_factor("none", &f), 0);
    cr_assert_eq(f, VRAM_SLACK_NONE);
}

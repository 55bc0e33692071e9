#include "heard.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

#include "base/say.h"

static int from_it = -1;
static char text[1 << 17];
static size_t len;

void listen_to_it(void)
{
    int fds[2];
    cr_assert_eq(pipe2(fds, O_CLOEXEC | O_NONBLOCK), 0);
    cr_assert_geq(dup2(fds[1], STDERR_FILENO), 0);
    close(fds[1]);
    from_it = fds[0];
    vram_say_adopt();
}

const char *heard(void)
{
    for (ssize_t n; len < sizeof(text) - 1 && (n = read(from_it, text + len, sizeof(text) - 1 - len)) > 0;)
        len += (size_t)n;
    text[len] = 0;
    return text;
}

void hear(const char *wanted)
{
    struct pollfd p = {.fd = from_it, .events = POLLIN};
    for (int i = 0; i < 3000 && !strstr(heard(), wanted); i++)
        poll(&p, 1, 10);
    cr_assert(strstr(text, wanted), "\"%s\" was not said, but: %s", wanted, text);
}

unsigned times_heard(const char *wanted)
{
    unsigned n = 0;
    for (const char *at = heard(); (at = strstr(at, wanted)); at++)
        n++;
    return n;
}

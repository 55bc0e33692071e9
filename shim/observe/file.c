#include "observe/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

#include "base/proc.h"
#include "base/say.h"
#include "base/text.h"

static bool names_the_pid(const char *pattern)
{
    for (const char *c = pattern; *c; c++)
        if (*c == '%' && c[1] && *++c == 'p')
            return true;
    return false;
}

static int path_of(const struct vram_output *output, char *ret_path, size_t cap)
{
    int r = vram_output_path(output, vram_proc_pid(), ret_path, cap);
    struct vram_text path = {ret_path, cap, strlen(ret_path)};
    if (!names_the_pid(output->pattern))
        vram_text_add(&path, ".%d", (int)vram_proc_pid());
    return r == 0 && path.len + 1 == cap ? -ENAMETOOLONG : r;
}

int vram_file_append(const struct vram_output *output, const char *bytes, size_t len, char *ret_path, size_t cap)
{
    int saved = errno, r = path_of(output, ret_path, cap);
    if (r < 0)
        return r;
    int fd = open(ret_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOCTTY | O_NONBLOCK, 0644);
    if (fd < 0) {
        r = -errno;
    } else {
        r = vram_write_gently(fd, bytes, len);
        if (close(fd) != 0 && r == 0)
            r = -errno;
    }
    errno = saved;
    return r;
}

#include "base/identity.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/sandbox.h"

/* 0: nobody says, or it may not be asked. */
static uint64_t birth_of(int fd)
{
    struct statx now;
    if (vram_sandboxed() || syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_BTIME, &now) != 0 || !(now.stx_mask & STATX_BTIME))
        return 0;
    return (uint64_t)now.stx_btime.tv_sec * 1000000000u + now.stx_btime.tv_nsec;
}

bool vram_identify(int fd, struct vram_identity *ret_identity)
{
    int saved = errno;
    struct stat now;
    bool open = syscall(SYS_fstat, fd, &now) == 0; /* fstat() has a version of glibc 2.33 */
    if (open)
        *ret_identity = (struct vram_identity){now.st_dev, now.st_ino, now.st_rdev, S_ISREG(now.st_mode) ? birth_of(fd) : 0,
                                               now.st_mode};
    errno = saved;
    return open;
}

bool vram_identity_same(const struct vram_identity *a, const struct vram_identity *b)
{
    return a->dev == b->dev && a->ino == b->ino && a->rdev == b->rdev && (a->born == b->born || !a->born || !b->born);
}

#include "observe/file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/proc.h"
#include "base/sandbox.h"
#include "base/say.h"
#include "base/text.h"
#include "vramshim/quote.h"

enum { AT_ONCE = 512 /* a pipe takes so much whole, or nothing of it */ };

/* stat() has a version of glibc 2.33. */
static bool look(const char *path, struct stat *ret_stat) { return syscall(SYS_newfstatat, AT_FDCWD, path, ret_stat, 0) == 0; }

static bool begins(const char *path, const char *with) { return strncmp(path, with, strlen(with)) == 0; }

static bool names_the_pid(const char *pattern)
{
    for (const char *c = pattern; *c; c++)
        if (*c == '%' && c[1] && *++c == 'p')
            return true;
    return false;
}

/* Its folder is on the file system of /dev, by whatever name. */
static bool is_within_dev(char *path)
{
    struct stat folder, dev, root;
    char *slash = strrchr(path, '/');
    if (begins(path, "/dev/shm/"))
        return false;
    if (begins(path, "/dev/"))
        return true;
    *slash = 0;
    bool known = look(slash == path ? "/" : path, &folder) && look("/dev", &dev) && look("/", &root);
    *slash = '/';
    return known && folder.st_dev == dev.st_dev && dev.st_dev != root.st_dev;
}

static int open_end(const char *path, mode_t mode, bool may_create)
{
    if (S_ISDIR(mode) || S_ISBLK(mode)) {
        errno = S_ISDIR(mode) ? EISDIR : ENOTBLK;
        return -1;
    }
    return open(path, O_WRONLY | O_APPEND | O_CLOEXEC | O_NOCTTY | O_NONBLOCK | (may_create ? O_CREAT : 0), 0644);
}

/* What a person does about it. `mode`: what is there, 0 for nothing. */
static const char *words_of(int error, mode_t mode, bool may_create)
{
    switch (error) {
    case ENOENT: return may_create ? "its folder is not there" : "it is not there, and is not made";
    case ENOTDIR: return "what stands for its folder is none";
    case EISDIR: return "this is a folder: name a file in it";
    case ENOTBLK: return "this is a disk: name a file on it";
    case EACCES:
    case EPERM: return "there is no permission to write there";
    case EROFS: return "nothing can be written there: it is read-only";
    case ENOSPC: return "no space is left there";
    case EDQUOT: return "the quota is used up";
    case EFBIG: return "no file may grow so large: ulimit -f";
    case ENXIO: return S_ISFIFO(mode) ? "nobody reads this pipe" : S_ISSOCK(mode) ? "a socket has to be open already"
                                                                       : "nothing is behind it";
    case EPIPE: return "its reader has gone";
    case EAGAIN: return "its reader does not take it";
    case EMFILE:
    case ENFILE: return "no descriptor is free for it";
    case ENAMETOOLONG: return "the name is too long";
    case ELOOP: return "its links lead in a circle";
    default: return strerror(error);
    }
}

static off_t end_of(int fd) { return vram_sandboxed() ? 0 : lseek(fd, 0, SEEK_CUR); }

/* Where nothing is written, the offset stays; a pipe, which has none, takes the first bytes whole. */
static int write_out(struct vram_file *file, int fd, const char *bytes, size_t len)
{
    size_t first = len < AT_ONCE ? len : AT_ONCE;
    off_t before = end_of(fd);
    int r = vram_write_gently(fd, bytes, first);
    file->begun = r == 0;
    if (r == 0 && len > first)
        r = vram_write_gently(fd, bytes + first, len - first);
    if (r < 0 && end_of(fd) > before)
        file->begun = true;
    return r;
}

static int append_to_path(struct vram_file *file, const struct vram_output *output, const char *bytes, size_t len,
                          const char **ret_words)
{
    struct stat st;
    struct vram_text path = {file->path, sizeof(file->path), 0};
    int r = vram_output_path(output, vram_proc_pid(), file->path, sizeof(file->path) - VRAM_PID_ROOM);
    if (r < 0) {
        *ret_words = words_of(-r, 0, true);
        return r;
    }
    bool there = look(file->path, &st);
    mode_t mode = there ? st.st_mode : 0;
    path.len = strlen(file->path);
    if (!begins(file->path, "/proc/") && (!there || S_ISREG(mode)) && !names_the_pid(output->pattern)) {
        vram_text_add(&path, ".%d", (int)vram_proc_pid());
        there = false;
    }
    bool may_create = !there && !begins(file->path, "/proc/") && !is_within_dev(file->path);
    int fd = open_end(file->path, mode, may_create);
    if (fd < 0) {
        r = -errno;
    } else {
        r = write_out(file, fd, bytes, len);
        if (close(fd) != 0 && r == 0)
            r = -errno;
    }
    if (r < 0)
        *ret_words = words_of(-r, mode, may_create);
    return r;
}

static int append_to_descriptor(struct vram_file *file, const struct vram_output *output, const char *bytes, size_t len,
                                const char **ret_words)
{
    vram_text_add(&(struct vram_text){file->path, sizeof(file->path), 0}, "%s", output->pattern);
    if (!vram_output_is_open(output)) {
        *ret_words = output->open_at_load ? "it is not any more what it was when the program started"
                                          : "it was not open when the program started";
        return -EBADF;
    }
    int r = write_out(file, output->fd, bytes, len);
    if (r < 0)
        *ret_words = r == -EBADF ? "it is open for reading only" : words_of(-r, S_IFIFO, false);
    return r;
}

int vram_file_append(struct vram_file *file, const struct vram_output *output, const char *bytes, size_t len)
{
    int saved = errno;
    const char *words = "";
    file->begun = false;
    int r = output->kind == VRAM_OUTPUT_DESCRIPTOR ? append_to_descriptor(file, output, bytes, len, &words)
                                                   : append_to_path(file, output, bytes, len, &words);
    if (r < 0) {
        char shown[300];
        vram_quote(shown, sizeof(shown), file->path, strlen(file->path));
        vram_text_add(&(struct vram_text){file->trouble, sizeof(file->trouble), 0}, "%s (%s)", shown, words);
    }
    errno = saved;
    return r;
}

#include "loadable.h"

#include <endian.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/capability.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "say.h"

enum {
    SCRIPT_HEAD = 256, /* as much as the kernel reads (BINPRM_BUF_SIZE) */
    DEPTH_MAX = 6,     /* the kernel follows fewer scripts that are run by scripts */
    UNMAPPED = 65534,  /* the owner as shown in a user namespace that does not know it: nobody becomes that */
};

struct question {
    const char *name;              /* as the command line has it */
    const struct vram_elf *library;
    int depth;                     /* of scripts so far */
    char *ret_why;
    size_t cap;
};

static bool look_at(struct question *q, const char *path);

/* "PATH REASON", where PATH was not what the person named: "PATH, which runs NAME, REASON". */
static bool refuse(const struct question *q, const char *path, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static bool refuse(const struct question *q, const char *path, const char *fmt, ...)
{
    char reason[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(reason, sizeof(reason), fmt, ap);
    va_end(ap);
    if (q->depth == 0)
        snprintf(q->ret_why, q->cap, "%s %s", QUOTED(path), reason);
    else
        snprintf(q->ret_why, q->cap, "%s, which runs %s, %s", QUOTED(path), QUOTED(q->name), reason);
    return false;
}

static bool is_executable(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 && S_ISREG(st.st_mode) && faccessat(AT_FDCWD, path, X_OK, AT_EACCESS) == 0;
}

/* As execvp does: by its path if there is a slash in it, else in PATH, whose empty parts mean the current folder. */
static bool find_program(const char *name, char ret_path[PATH_MAX])
{
    if (!*name)
        return false;
    if (strchr(name, '/'))
        return snprintf(ret_path, PATH_MAX, "%s", name) < PATH_MAX && is_executable(ret_path);
    char standard[256] = "";
    const char *path = getenv("PATH");
    if (!path && confstr(_CS_PATH, standard, sizeof(standard)) > 0)
        path = standard;
    for (const char *end; path; path = *end ? end + 1 : NULL) {
        end = strchrnul(path, ':');
        int n = snprintf(ret_path, PATH_MAX, "%.*s%s%s", (int)(end - path), path, end == path ? "" : "/", name);
        if (n < PATH_MAX && is_executable(ret_path))
            return true;
    }
    return false;
}

/*
 * In a program that gets rights which its caller has not, the loader forgets LD_PRELOAD, for its children too (AT_SECURE). The
 * kernel's rule (security/commoncap.c): effective and real ids differ, or one who is not root gets capabilities from the file.
 */
static bool keeps_rights(const struct question *q, const char *path)
{
    struct stat st;
    struct statvfs fs;
    struct vfs_cap_data caps = {0};
    static const char ignored[] = "and the loader preloads nothing into such a program";
    if (stat(path, &st) != 0 || statvfs(path, &fs) != 0)
        return true;
    bool nosuid = fs.f_flag & ST_NOSUID, no_new = prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1, may = !nosuid && !no_new;
    bool set_uid = may && (st.st_mode & S_ISUID) && st.st_uid != UNMAPPED;
    bool set_gid = may && (st.st_mode & S_ISGID) && (st.st_mode & S_IXGRP) && st.st_gid != UNMAPPED;
    if ((set_uid ? st.st_uid : geteuid()) != getuid())
        return refuse(q, path, "%s, %s: run vramctl as that user instead, as in sudo vramctl run -- PROGRAM",
                      set_uid ? "runs as another user (set-user-ID)" : "would run with two users, as vramctl does", ignored);
    if ((set_gid ? st.st_gid : getegid()) != getgid())
        return refuse(q, path, "%s, %s: run vramctl as that group instead, as in sg GROUP 'vramctl run -- PROGRAM'",
                      set_gid ? "runs as another group (set-group-ID)" : "would run with two groups, as vramctl does", ignored);
    if (nosuid || getuid() == 0 || getxattr(path, "security.capability", &caps, sizeof(caps)) < (ssize_t)XATTR_CAPS_SZ_1)
        return true;
    bool effective = le32toh(caps.magic_etc) & VFS_CAP_FLAGS_EFFECTIVE;
    bool permitted = caps.data[0].permitted || caps.data[1].permitted;
    if (effective || (permitted && !no_new))
        return refuse(q, path, "has capabilities of its own (getcap shows them), %s: run vramctl as root, or a copy of the "
                      "program, which has none", ignored);
    return true;
}

static bool is_of_glibc(const char *loader)
{
    static const char *const others[] = {"ld-musl-", "ld-uClibc", "ld64-uClibc", "linker"};
    const char *slash = strrchr(loader, '/'), *name = slash ? slash + 1 : loader;
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++)
        if (strncmp(name, others[i], strlen(others[i])) == 0)
            return false;
    return true;
}

static bool takes_library(const struct question *q, const char *path, const struct vram_elf *elf)
{
    const struct vram_elf *library = q->library;
    if (elf->machine != library->machine || elf->bits != library->bits || elf->foreign_order != library->foreign_order)
        return refuse(q, path, "is built for %s, and the library for %s",
                      vram_elf_machine(elf, (char[VRAM_ELF_NAME_MAX]){0}),
                      vram_elf_machine(library, (char[VRAM_ELF_NAME_MAX]){0}));
    const char *loader = *elf->interpreter ? elf->interpreter : path;
    if ((*elf->interpreter || elf->has_soname) && !is_of_glibc(loader))
        return refuse(q, path, "has another C library than glibc (its loader is %s), and the library needs glibc",
                      QUOTED(loader));
    if (!*elf->interpreter && !elf->has_soname)
        return refuse(q, path, "is statically linked, and nothing can be preloaded into it: link it dynamically; if it only "
                      "starts the programs that use the GPU, vramctl run -- env %s", QUOTED(q->name));
    return true;
}

static bool is_gap(char c) { return c == ' ' || c == '\t'; }

/* Splits the first line of a script, which is cut off in place. *ret_argument: NULL, or all that follows the interpreter. */
static bool read_first_line(char head[SCRIPT_HEAD + 1], char **ret_interpreter, char **ret_argument)
{
    if (head[0] != '#' || head[1] != '!')
        return false;
    char *end = head + strcspn(head, "\n"), *at = head + 2;
    while (end > at && is_gap(end[-1]))
        end--;
    *end = 0;
    while (is_gap(*at))
        at++;
    if (!*at)
        return false;
    *ret_interpreter = at;
    while (*at && !is_gap(*at))
        at++;
    *ret_argument = NULL;
    if (*at) {
        *at++ = 0;
        while (is_gap(*at))
            at++;
        *ret_argument = at;
    }
    return true;
}

/* What env starts with this one argument: NAME, or -S NAME and more. Returns false where that is not plain to see. */
static bool started_by_env(char *argument, char ret_path[PATH_MAX])
{
    char *rest;
    bool split = strncmp(argument, "-S", 2) == 0;
    argument += split ? 2 : 0;
    while (split && is_gap(*argument))
        argument++;
    if (split && strpbrk(argument, "\"'\\$#"))
        return false;
    char *name = split ? strtok_r(argument, " \t", &rest) : argument;
    while (split && name && strchr(name, '='))
        name = strncmp(name, "PATH=", 5) == 0 ? NULL : strtok_r(NULL, " \t", &rest);
    return name && *name != '-' && !strchr(name, '=') && find_program(name, ret_path);
}

static bool look_at_script(struct question *q, char *interpreter, char *argument)
{
    char path[PATH_MAX];
    if (++q->depth == DEPTH_MAX || !is_executable(interpreter))
        return true;
    if (!look_at(q, interpreter))
        return false;
    const char *slash = strrchr(interpreter, '/');
    if (!argument || strcmp(slash ? slash + 1 : interpreter, "env") != 0 || !started_by_env(argument, path))
        return true;
    return look_at(q, path);
}

static bool look_at(struct question *q, const char *path)
{
    char head[SCRIPT_HEAD + 1] = "", *interpreter, *argument;
    struct vram_elf elf;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return keeps_rights(q, path); /* executable, not readable: no script */
    bool is_script = pread(fd, head, SCRIPT_HEAD, 0) > 0 && read_first_line(head, &interpreter, &argument);
    bool is_elf = !is_script && vram_elf_read(fd, &elf) == 0;
    close(fd);
    if (is_script)
        return look_at_script(q, interpreter, argument);
    return !is_elf || (keeps_rights(q, path) && takes_library(q, path, &elf));
}

bool vram_loadable(const char *name, const struct vram_elf *library, char *ret_why, size_t cap)
{
    struct question q = {.name = name, .library = library, .ret_why = ret_why, .cap = cap};
    char path[PATH_MAX];
    return !find_program(name, path) || look_at(&q, path);
}

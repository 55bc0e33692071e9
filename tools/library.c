#include "library.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "say.h"
#include "vramshim/vramshim.h"

#define WHY(...) snprintf(ret_why, cap, __VA_ARGS__)

static const char question[] = "vramshim_check_option";

/* Seen from this program's own place, so that a build tree, a prefix and a DESTDIR all work. */
static bool find_beside(char ret_path[PATH_MAX])
{
    static const char *const places[] = {"shim/libvramshim.so", VRAM_LIBDIR "/libvramshim.so", "lib/libvramshim.so",
                                         "lib64/libvramshim.so"};
    char self[PATH_MAX], folder[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
    if (n <= 0)
        return false;
    self[n] = 0;
    for (int up = 0; up < 2; up++) {
        char *slash = strrchr(self, '/');
        if (!slash)
            return false;
        *slash = 0;
        if (up == 0)
            strcpy(folder, self);
    }
    if (snprintf(ret_path, PATH_MAX, "%s/libvramshim.so", folder) < PATH_MAX && access(ret_path, F_OK) == 0)
        return true;
    for (size_t i = 0; i < sizeof(places) / sizeof(places[0]); i++)
        if (snprintf(ret_path, PATH_MAX, "%s/%s", self, places[i]) < PATH_MAX && access(ret_path, F_OK) == 0)
            return true;
    return false;
}

/* Absolute, for programs that change their directory; symbolic links stay, since a person may have made one for us. */
static int make_absolute(const char *named, char ret_path[PATH_MAX])
{
    char cwd[PATH_MAX] = "";
    if (!*named)
        return -ENOENT;
    if (*named != '/' && !getcwd(cwd, sizeof(cwd)))
        return -errno;
    int n = snprintf(ret_path, PATH_MAX, "%s%s%s", cwd, *named == '/' ? "" : "/", named);
    return n < PATH_MAX ? 0 : -ENAMETOOLONG;
}

/* What of a path the loader would not take as it is in LD_PRELOAD (ld.so(8)), or NULL. */
static const char *misread_by_loader(const char *path)
{
    static const char *const tokens[] = {"ORIGIN", "LIB", "PLATFORM"};
    if (strchr(path, ' '))
        return "a blank";
    if (strchr(path, ':'))
        return "a colon";
    while ((path = strchr(path, '$')) != NULL) {
        path += path[1] == '{' ? 2 : 1;
        for (size_t i = 0; i < sizeof(tokens) / sizeof(tokens[0]); i++)
            if (strncmp(path, tokens[i], strlen(tokens[i])) == 0)
                return "a $ that it replaces";
    }
    return NULL;
}

/* Whether the file's bytes hold those of a name. Asked before the loader is: it would run a stranger's constructors. */
static bool mentions(int fd, size_t size, const char *name, size_t length)
{
    void *bytes = mmap(NULL, size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (bytes == MAP_FAILED)
        return true; /* the loader will say why */
    bool found = memmem(bytes, size, name, length);
    munmap(bytes, size);
    return found;
}

/* By looking at the file alone. */
static int examine(struct vram_library *library, int fd, char *ret_why, size_t cap)
{
    const char *path = QUOTED(library->path);
    struct vram_elf own = {0};
    struct stat st;
    if (fstat(fd, &st) != 0)
        return WHY("%s: %s", path, strerror(errno)), -errno;
    if (S_ISDIR(st.st_mode))
        return WHY("%s is a folder, not a libvramshim.so", path), -EISDIR;
    if (!S_ISREG(st.st_mode) || st.st_size == 0 || vram_elf_read(fd, &library->elf) != 0)
        return WHY("%s is no libvramshim.so: it is no library at all", path), -ENOEXEC;
    int self = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
    if (self >= 0) {
        bool known = vram_elf_read(self, &own) == 0;
        close(self);
        if (known && (own.machine != library->elf.machine || own.bits != library->elf.bits ||
                      own.foreign_order != library->elf.foreign_order))
            return WHY("%s is built for %s, this vramctl for %s", path,
                       vram_elf_machine(&library->elf, (char[VRAM_ELF_NAME_MAX]){0}),
                       vram_elf_machine(&own, (char[VRAM_ELF_NAME_MAX]){0})),
                   -ENOEXEC;
    }
    if ((uint64_t)st.st_size < library->elf.size) /* the loader would touch what is not there */
        return WHY("%s is not whole: copy it anew", path), -ENOEXEC;
    if (library->elf.has_soname && mentions(fd, (size_t)st.st_size, question, sizeof(question)))
        return 0;
    static const char prefix[] = "VRAMSHIM_"; /* in what a libvramshim.so of any version says */
    if (library->elf.has_soname && mentions(fd, (size_t)st.st_size, prefix, strlen(prefix)))
        return WHY("%s is a libvramshim.so older than this vramctl (%s), which cannot check its options: name it in LD_PRELOAD "
                   "yourself, or install the newer one", path, VRAM_VERSION),
               -ENOTSUP;
    return WHY("%s is no libvramshim.so", path), -EINVAL;
}

/*
 * vramctl was started with the same LD_PRELOAD, so the loader has loaded what it names and tells which object a name means,
 * whatever folders and links lead to it. Asked before the library itself is loaded, whose name it would be.
 */
static bool is_first_named(const struct vram_library *library, const char *before)
{
    struct stat wanted, found;
    char *names = strdup(before ? before : ""), *rest = names, *name;
    bool named = false;
    while (!named && names && (name = strsep(&rest, " :")) != NULL) {
        struct link_map *map;
        void *handle = *name ? dlopen(name, RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD) : NULL;
        if (!handle)
            continue;
        bool other = dlsym(handle, question);
        named = dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && stat(library->path, &wanted) == 0 && stat(map->l_name, &found) == 0 &&
                wanted.st_dev == found.st_dev && wanted.st_ino == found.st_ino;
        dlclose(handle);
        if (other)
            break;
    }
    free(names);
    return named;
}

/* By letting the loader load it. */
static int load(struct vram_library *library, char *ret_why, size_t cap)
{
    struct statvfs fs;
    library->first_named = is_first_named(library, getenv("LD_PRELOAD"));
    library->handle = dlopen(library->path, RTLD_NOW | RTLD_LOCAL);
    if (!library->handle) {
        const char *why = QUOTED(dlerror());
        bool noexec = statvfs(library->path, &fs) == 0 && (fs.f_flag & ST_NOEXEC);
        return WHY("%s%s", why, noexec ? ": nothing can be run from there (mounted noexec)" : ""), -ENOEXEC;
    }
    library->check_option = (int (*)(const char *, const char *, char *, size_t))dlsym(library->handle, question);
    if (!library->check_option)
        return WHY("%s is no libvramshim.so", QUOTED(library->path)), -EINVAL;
    return 0;
}

int vram_library_open(struct vram_library *ret_library, const char *named, char *ret_why, size_t cap)
{
    struct vram_library *library = ret_library;
    int r = 0;
    if (!named && !find_beside(library->path))
        return WHY("libvramshim.so is not beside this vramctl; name it by --library=PATH"), -ENOENT;
    if (named && (r = make_absolute(named, library->path)) != 0)
        return WHY("%s: %s", QUOTED(named), strerror(-r)), r;

    int fd = open(library->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0)
        return r = -errno, WHY("%s: %s", QUOTED(library->path), strerror(-r)), r;
    r = examine(library, fd, ret_why, cap);
    close(fd);
    if (r != 0)
        return r;
    const char *misread = misread_by_loader(library->path);
    if (misread)
        return WHY("%s: the loader takes no path with %s in LD_PRELOAD; install or copy the library elsewhere, or link to it "
                   "from there (ln -s), and name that by --library", QUOTED(library->path), misread),
               -EINVAL;
    return load(library, ret_why, cap);
}

char *vram_library_preload(const struct vram_library *library, const char *before)
{
    char *both;
    if (!before || !*before)
        return strdup(library->path);
    if (library->first_named)
        return strdup(before);
    return asprintf(&both, "%s:%s", library->path, before) < 0 ? NULL : both;
}

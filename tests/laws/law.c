#include "law.h"

#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { EXIT_FAILED = 1, EXIT_SKIPPED = 77, CASE_SECONDS = 60 };

struct law_entries cu;
enum law_route law_route;

static const char *const route_names[ROUTES] = {"direct", "dlsym", "procaddress", "procaddress1"};
static struct law_case *cases, *children;
static const char *self;

static void append(struct law_case **list, struct law_case *c)
{
    while (*list)
        list = &(*list)->next;
    *list = c;
}

void law_register(struct law_case *c) { append(&cases, c); }
void law_register_child(struct law_case *c) { append(&children, c); }

void law_fail(const char *file, int line, const char *fmt, ...)
{
    va_list ap;
    const char *slash = strrchr(file, '/');
    va_start(ap, fmt);
    printf("    %s:%d: ", slash ? slash + 1 : file, line);
    vprintf(fmt, ap);
    printf("\n");
    va_end(ap);
    fflush(stdout);
    _exit(EXIT_FAILED);
}

void law_skip(const char *why)
{
    printf("    skipped: %s\n", why);
    fflush(stdout);
    _exit(EXIT_SKIPPED);
}

static int is_shim(struct dl_phdr_info *info, size_t size, void *found)
{
    (void)size;
    if (strstr(info->dlpi_name, "libvramshim"))
        *(bool *)found = true;
    return 0;
}

bool under_shim(void)
{
    bool found = false;
    dl_iterate_phdr(is_shim, &found);
    return found;
}

static void *driver_handle(void)
{
    static void *handle;
    if (!handle && !(handle = dlopen("libcuda.so.1", RTLD_NOW)))
        law_fail(__FILE__, __LINE__, "%s", dlerror());
    return handle;
}

void *law_sim(const char *name) { return dlsym(driver_handle(), name); }
bool simulated(void) { return law_sim("sim_calls") != NULL; }

static bool free_mode_is(const char *mode)
{
    const char *set = getenv("VRAMSHIM_FREE");
    return under_shim() && set && strcmp(set, mode) == 0;
}

bool frees_order(void) { return free_mode_is("ordered"); }
bool frees_wait(void) { return !free_mode_is("ordered") && !free_mode_is("fenced"); }

unsigned long driver_calls(const char *entry)
{
    unsigned long (*calls)(const char *) = (unsigned long (*)(const char *))law_sim("sim_calls");
    return calls ? calls(entry) : 0;
}

enum { CUDA_NEWEST = 13000 };

static void find_entries(void)
{
    switch (law_route) {
    case ROUTE_DIRECT:
#define LAW_ENTRY(name, lookup_name) cu.name = &name;
#include "entries.def"
#undef LAW_ENTRY
        return;
    case ROUTE_DLSYM:
#define LAW_ENTRY(name, lookup_name) cu.name = (__typeof__(&name))dlsym(driver_handle(), #name);
#include "entries.def"
#undef LAW_ENTRY
        return;
    case ROUTE_PROCADDRESS: {
        __typeof__(&cuGetProcAddress_v2) get = (__typeof__(get))dlsym(driver_handle(), "cuGetProcAddress_v2");
        CUdriverProcAddressQueryResult status;
        /* cudart asks for the function itself once more, through itself. */
        if (get("cuGetProcAddress", (void **)&get, 12000, 0, &status) != CUDA_SUCCESS || !get)
            law_fail(__FILE__, __LINE__, "cuGetProcAddress does not find itself");
#define LAW_ENTRY(name, lookup_name)                                                                                   \
    if (get(lookup_name, (void **)&cu.name, CUDA_NEWEST, 0, &status) != CUDA_SUCCESS)                                  \
        cu.name = NULL;
#include "entries.def"
#undef LAW_ENTRY
        break;
    }
    default: {
        __typeof__(&cuGetProcAddress) get = (__typeof__(get))dlsym(driver_handle(), "cuGetProcAddress");
#define LAW_ENTRY(name, lookup_name)                                                                                   \
    if (get(lookup_name, (void **)&cu.name, CUDA_NEWEST, 0) != CUDA_SUCCESS)                                           \
        cu.name = NULL;
#include "entries.def"
#undef LAW_ENTRY
    }
    }
    /* Today's cuCtxCreate by lookup has more arguments: the scenarios use the old one, which is exported. */
    cu.cuCtxCreate_v2 = (__typeof__(cu.cuCtxCreate_v2))dlsym(driver_handle(), "cuCtxCreate_v2");
}

CUcontext law_context(void)
{
    CUdevice device;
    CUcontext ctx;
    OK(cu.cuInit(0));
    OK(cu.cuDeviceGet(&device, 0));
    OK(cu.cuDevicePrimaryCtxRetain(&ctx, device));
    OK(cu.cuCtxSetCurrent(ctx));
    return ctx;
}

static int spawn(const char *name, enum law_route route, const char *const *env, int stderr_fd)
{
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        for (; env && *env; env++)
            putenv((char *)*env);
        if (stderr_fd >= 0)
            dup2(stderr_fd, STDERR_FILENO);
        execl(self, self, "--case", name, "--route", route_names[route], (char *)NULL);
        _exit(126);
    }
    return pid;
}

static int wait_for(pid_t pid)
{
    int status = -1;
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
        ;
    return status;
}

int law_run_child(const char *name, const char *const *env, char *ret_stderr, size_t cap)
{
    int fds[2];
    size_t len = 0;
    if (pipe(fds) != 0)
        law_fail(__FILE__, __LINE__, "pipe: %s", strerror(errno));
    pid_t pid = spawn(name, law_route, env, fds[1]);
    close(fds[1]);
    for (;;) {
        char rest[4096];
        bool room = len + 1 < cap;
        ssize_t n = read(fds[0], room ? ret_stderr + len : rest, room ? cap - 1 - len : sizeof(rest));
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            break;
        len += room ? (size_t)n : 0;
    }
    close(fds[0]);
    if (cap)
        ret_stderr[len] = 0;
    return wait_for(pid);
}

static int run_one(const char *name, const char *route)
{
    for (int r = 0; r < ROUTES; r++)
        if (strcmp(route_names[r], route) == 0)
            law_route = (enum law_route)r;
    struct law_case *lists[] = {cases, children};
    for (int i = 0; i < 2; i++) {
        for (struct law_case *c = lists[i]; c; c = c->next) {
            if (strcmp(c->name, name) != 0)
                continue;
            alarm(CASE_SECONDS); /* a watchdog, not a measurement */
            if (c->simulated && !simulated())
                law_skip("needs the simulated driver");
            find_entries();
            c->run();
            return 0;
        }
    }
    fprintf(stderr, "no case %s\n", name);
    return 2;
}

int main(int argc, char **argv)
{
    unsigned passed = 0, failed = 0, skipped = 0;
    const char *name = strrchr(argv[0], '/');
    self = "/proc/self/exe";
    if (argc == 5 && strcmp(argv[1], "--case") == 0 && strcmp(argv[3], "--route") == 0)
        return run_one(argv[2], argv[4]);
    for (struct law_case *c = cases; c; c = c->next) {
        for (int r = 0; r < (c->once ? 1 : (int)ROUTES); r++) {
            int status = wait_for(spawn(c->name, c->once ? ROUTE_DLSYM : (enum law_route)r, NULL, -1));
            bool ok = WIFEXITED(status) && WEXITSTATUS(status) == 0;
            bool skip = WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SKIPPED;
            passed += ok;
            skipped += skip;
            failed += !ok && !skip;
            printf("%s %s/%s%s%s", ok ? "ok  " : skip ? "skip" : "FAIL", name ? name + 1 : argv[0], c->name,
                   c->once ? "" : " by ", c->once ? "" : route_names[r]);
            if (WIFSIGNALED(status))
                printf(": killed by signal %d", WTERMSIG(status));
            printf("\n");
        }
    }
    printf("%u passed, %u failed, %u skipped\n", passed, failed, skipped);
    return failed ? 1 : 0;
}

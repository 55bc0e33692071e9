/*
 * An unmodified program in the company of other libraries: threads that use host and device memory at once, a handler of
 * its own for SIGUSR1, one block that it forgets. Prints the same whatever is preloaded.
 *
 *   company dlsym               the driver by dlopen and dlsym
 *   company static              by a runtime that is linked into the program (runtime.c), as a static cudart is
 *   company deepbind PLUGIN     by a plugin that is loaded with RTLD_DEEPBIND, mixed with the program's own calls
 *   company plugins PLUGIN      a plugin is loaded and unloaded all the while
 *   company constructor PLUGIN  the driver is loaded while another thread is inside a plugin's constructor
 *   company namespace           a second driver in a namespace of its own (dlmopen)
 */
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "company.h"

enum { THREADS = 3, ROUNDS = 400, HELD = 8 };

static struct runtime cuda;
static CUcontext context;
static atomic_uint failures, handled;
static atomic_bool done;
static const char *plugin_path;

static void count(int sig)
{
    (void)sig;
    handled++;
}

static void expect(bool condition) { failures += !condition; }

/* Host memory of all sizes, with contents, beside what the driver is asked for. */
static void *work(void *seed)
{
    unsigned x = (unsigned)(uintptr_t)seed;
    CUdeviceptr device[HELD] = {0};
    unsigned char *host[HELD] = {0};
    size_t size[HELD] = {0};
    expect(cuda.set_current(context) == CUDA_SUCCESS);
    for (int i = 0; i < ROUNDS; i++) {
        int k = i % HELD;
        x = x * 1103515245u + 12345u;
        if (host[k]) {
            expect(host[k][0] == (unsigned char)k && host[k][size[k] - 1] == (unsigned char)k);
            free(host[k]);
            expect(cuda.mem_free(device[k]) == CUDA_SUCCESS);
        }
        size[k] = 1 + (x >> 8) % 300000;
        host[k] = malloc(size[k]);
        memset(host[k], k, size[k]);
        device[k] = 0;
        expect(cuda.mem_alloc(&device[k], (size_t)1 << (12 + (x >> 20) % 11)) == CUDA_SUCCESS && device[k]);
    }
    for (int k = 0; k < HELD; k++) {
        free(host[k]);
        expect(cuda.mem_free(device[k]) == CUDA_SUCCESS);
    }
    return NULL;
}

static void run_threads(void)
{
    pthread_t threads[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++)
        expect(pthread_create(&threads[i], NULL, work, (void *)(i + 1)) == 0);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
}

static void *load_and_unload(void *unused)
{
    while (!done) {
        void *plugin = dlopen(plugin_path, RTLD_NOW | RTLD_LOCAL);
        expect(plugin && dlsym(plugin, "plugin_run"));
        if (plugin)
            expect(dlclose(plugin) == 0);
    }
    return unused;
}

/* A block that one side allocates the other frees, both ways. */
static void cross(void)
{
    void *plugin = dlopen(plugin_path, RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
    int (*plugin_run)(void *) = plugin ? (int (*)(void *))dlsym(plugin, "plugin_run") : NULL;
    CUresult (*plugin_alloc)(CUdeviceptr *, size_t) = plugin ? dlsym(plugin, "plugin_alloc") : NULL;
    CUresult (*plugin_free)(CUdeviceptr) = plugin ? dlsym(plugin, "plugin_free") : NULL;
    expect(plugin_run && plugin_alloc && plugin_free && plugin_run(cuda.library) == 0);
    if (failures)
        return;
    for (int i = 0; i < 50; i++) {
        CUdeviceptr a, b;
        expect(plugin_alloc(&a, 1 << 20) == CUDA_SUCCESS && cuda.mem_alloc(&b, 1 << 20) == CUDA_SUCCESS && a != b);
        expect(cuda.mem_free(a) == CUDA_SUCCESS && plugin_free(b) == CUDA_SUCCESS);
        expect(cuda.mem_free(a) == CUDA_ERROR_INVALID_VALUE);
    }
}

static void second_namespace(void)
{
    void *other = dlmopen(LM_ID_NEWLM, "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    struct runtime there;
    CUdeviceptr p;
    CUcontext ctx;
    expect(other && runtime_from(&there, other));
    if (failures)
        return;
    expect(there.init(0) == CUDA_SUCCESS && there.retain(&ctx, 0) == CUDA_SUCCESS && there.set_current(ctx) == CUDA_SUCCESS);
    for (int i = 0; i < 50; i++) {
        expect(there.mem_alloc(&p, 1 << 20) == CUDA_SUCCESS);
        expect(there.mem_free(p) == CUDA_SUCCESS);
        expect(there.mem_free(p) == CUDA_ERROR_INVALID_VALUE);
    }
}

static void *load_plugin(void *unused)
{
    expect(dlopen(plugin_path, RTLD_NOW | RTLD_LOCAL) != NULL);
    return unused;
}

int main(int argc, char **argv)
{
    const char *how = argc > 1 ? argv[1] : "dlsym";
    pthread_t other;
    CUdeviceptr forgotten;
    plugin_path = argc > 2 ? argv[2] : NULL;
    signal(SIGUSR1, count);

    bool beside = strcmp(how, "plugins") == 0, in_constructor = strcmp(how, "constructor") == 0;
    if (beside)
        expect(pthread_create(&other, NULL, load_and_unload, NULL) == 0);
    if (in_constructor) {
        setenv("COMPANY_SLOW_CONSTRUCTOR", "1", 1);
        expect(pthread_create(&other, NULL, load_plugin, NULL) == 0);
    }
    bool found = strcmp(how, "static") == 0 ? runtime_load(&cuda) : runtime_from(&cuda, dlopen("libcuda.so.1", RTLD_NOW));
    if (!found || cuda.init(0) != CUDA_SUCCESS || cuda.retain(&context, 0) != CUDA_SUCCESS ||
        cuda.set_current(context) != CUDA_SUCCESS) {
        fprintf(stderr, "company: no driver\n");
        return 2;
    }
    run_threads();
    if (strcmp(how, "deepbind") == 0)
        cross();
    if (strcmp(how, "namespace") == 0)
        second_namespace();
    raise(SIGUSR1);
    /* Somebody may give memory back now: a moment, so that it is seen to do so while others work. */
    nanosleep(&(struct timespec){0, 100000000}, NULL);
    run_threads();
    done = true;
    if (beside || in_constructor)
        pthread_join(other, NULL);
    expect(cuda.mem_alloc(&forgotten, 1 << 20) == CUDA_SUCCESS);
    printf("%s: %d rounds, %u failures, %u signals handled\n", how, 2 * THREADS * ROUNDS, failures, handled);
    return failures != 0;
}

/*
 * What a pair of an allocation and a free costs. An unmodified program of the driver API, which finds the driver as
 * cudart does; scripts/bench and tests/bench/instructions run it with and without the shim.
 *
 *   pairs [--api alloc|async] [--pattern turn|single|random|flush|start] [--size BYTES,...] [--threads N,...] [--live
 * N,...]
 *         [--repeats N] [--seconds S | --pairs N] [--worst]
 *
 * --api      alloc: cuMemAlloc and cuMemFree. async: cuMemAllocAsync and cuMemFreeAsync on a non-blocking stream of
 * each thread; the pool keeps what it has
 * --pattern  turn: each thread frees the oldest of its blocks and allocates anew. single: it has one block only.
 * random: any of its blocks. flush: frees --live blocks and waits for the end of standard input. start: one pair, and
 * the end
 * --live     how many blocks there are at a time: of each thread for turn (16), of all threads for random
 * --size, --threads, --live take lists: a measurement is made for each combination
 * --seconds, --pairs  how long a repeat takes, or how many pairs each thread makes
 * --worst    also the longest of all calls, in nanoseconds, from a pass of its own and from the first allocations
 *
 * Prints a line of JSON for each measurement. "ns" has for each repeat the median of what a pair took each thread.
 */
#include <dlfcn.h>
#include <errno.h>
#include <getopt.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#if __has_include(<valgrind/callgrind.h>)
#include <valgrind/callgrind.h>
#else /* tests/bench/instructions is then skipped */
#define CALLGRIND_START_INSTRUMENTATION
#define CALLGRIND_STOP_INSTRUMENTATION
#endif

#include "vramshim/cuda_abi.h"

enum { LIST_MAX = 16, THREADS_MAX = 256, REPEATS_MAX = 1000, TURN_LIVE = 16 };

enum pattern { TURN, SINGLE, RANDOM, FLUSH, START };
static const char *const pattern_names[] = {"turn", "single", "random", "flush", "start", NULL};
static const char *const api_names[] = {"alloc", "async", NULL};

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void *library;

static void *entry(const char *name)
{
    void *p = dlsym(library, name);
    if (!p) {
        fprintf(stderr, "pairs: %s\n", dlerror());
        exit(2);
    }
    return p;
}

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        CUresult result_ = (call);                                                                                     \
        if (result_ != CUDA_SUCCESS) {                                                                                 \
            fprintf(stderr, "pairs: %s: error %d\n", #call, result_);                                                  \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* The driver, found once by main. */
static bool async;
static CUcontext context;
static size_t card; /* bytes */
static __typeof__(&cuMemAlloc_v2) mem_alloc;
static __typeof__(&cuMemFree_v2) mem_free;
static __typeof__(&cuMemAllocAsync) mem_alloc_async;
static __typeof__(&cuMemFreeAsync) mem_free_async;
static __typeof__(&cuCtxSetCurrent) set_current;
static __typeof__(&cuCtxSynchronize) synchronise;
static __typeof__(&cuStreamCreate) stream_create;

static void connect(void)
{
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "pairs: %s\n", dlerror());
        exit(2);
    }
    __typeof__(&cuInit) init = entry("cuInit");
    __typeof__(&cuDeviceGet) device_get = entry("cuDeviceGet");
    __typeof__(&cuDeviceTotalMem_v2) total = entry("cuDeviceTotalMem_v2");
    __typeof__(&cuDevicePrimaryCtxRetain) retain = entry("cuDevicePrimaryCtxRetain");
    mem_alloc = entry("cuMemAlloc_v2");
    mem_free = entry("cuMemFree_v2");
    set_current = entry("cuCtxSetCurrent");
    synchronise = entry("cuCtxSynchronize");

    CUdevice device;
    CHECK(init(0));
    CHECK(device_get(&device, 0));
    CHECK(total(&card, device));
    CHECK(retain(&context, device));
    CHECK(set_current(context));
    if (!async)
        return;
    __typeof__(&cuDeviceGetDefaultMemPool) get_pool = entry("cuDeviceGetDefaultMemPool");
    __typeof__(&cuMemPoolSetAttribute) set_pool = entry("cuMemPoolSetAttribute");
    mem_alloc_async = entry("cuMemAllocAsync");
    mem_free_async = entry("cuMemFreeAsync");
    stream_create = entry("cuStreamCreate");
    CUmemoryPool pool;
    uint64_t keep_all = UINT64_MAX;
    CHECK(get_pool(&pool, device));
    CHECK(set_pool(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep_all));
}

/* One measurement, as all its threads see it. */
static struct {
    enum pattern pattern;
    size_t size;
    unsigned threads;
    unsigned long pairs; /* of a thread in a repeat, at most */
    bool worst, last;
    enum { WARM, MEASURE, CLOCK, END } round; /* the next one; written by main before the barrier */
    pthread_barrier_t barrier;
    atomic_bool over; /* the round's time is */
} job;

enum call { FILL, ALLOC, FREE, CALLS };

struct worker {
    pthread_t thread;
    CUstream stream;
    CUdeviceptr *blocks;
    size_t live, at;
    uint64_t random;
    unsigned long done; /* pairs of the last round */
    double ns;          /* that one of them took */
    double worst[CALLS];
} __attribute__((aligned(128))); /* no thread writes where another one reads */

static inline void take(struct worker *w, size_t i)
{
    CHECK(async ? mem_alloc_async(&w->blocks[i], job.size, w->stream) : mem_alloc(&w->blocks[i], job.size));
}

static inline void release(struct worker *w, size_t i)
{
    CHECK(async ? mem_free_async(w->blocks[i], w->stream) : mem_free(w->blocks[i]));
}

static inline size_t next(struct worker *w)
{
    if (job.pattern == RANDOM) {
        w->random = w->random * 6364136223846793005u + 1442695040888963407u;
        return (size_t)((w->random >> 32) * w->live >> 32);
    }
    size_t i = w->at;
    w->at = i + 1 == w->live ? 0 : i + 1;
    return i;
}

/* No clock is read in between: what ends the round is a flag that nobody writes before. */
static unsigned long exchange(struct worker *w, unsigned long most)
{
    unsigned long n = 0;
    do {
        size_t i = next(w);
        release(w, i);
        take(w, i);
    } while (++n < most && !atomic_load_explicit(&job.over, memory_order_relaxed));
    return n;
}

static void measured(struct worker *w)
{
    CALLGRIND_START_INSTRUMENTATION; /* nothing, where valgrind does not run the program */
    double start = now();
    w->done = exchange(w, job.pairs);
    w->ns = (now() - start) / (double)w->done;
    CALLGRIND_STOP_INSTRUMENTATION;
}

static void clocked(struct worker *w, enum call call, void (*make)(struct worker *, size_t), size_t i)
{
    double start = now();
    make(w, i);
    double ns = now() - start;
    if (ns > w->worst[call])
        w->worst[call] = ns;
}

static void exchange_clocked(struct worker *w)
{
    unsigned long n = 0;
    do {
        size_t i = next(w);
        clocked(w, FREE, release, i);
        clocked(w, ALLOC, take, i);
    } while (++n < job.pairs && !atomic_load_explicit(&job.over, memory_order_relaxed));
}

static void *work(void *arg)
{
    struct worker *w = arg;
    CHECK(set_current(context));
    if (async)
        CHECK(stream_create(&w->stream, CU_STREAM_NON_BLOCKING));
    for (size_t i = 0; i < w->live; i++)
        clocked(w, FILL, take, i);
    for (;;) {
        pthread_barrier_wait(&job.barrier);
        switch (job.round) {
        case WARM:
            exchange(w, job.pairs / 10 + 1);
            break;
        case MEASURE:
            measured(w);
            break;
        case CLOCK:
            exchange_clocked(w);
            break;
        case END:
            for (size_t i = 0; i < w->live && !job.last; i++)
                release(w, i);
            return NULL;
        }
        pthread_barrier_wait(&job.barrier);
    }
}

static void play(int round, double seconds)
{
    CHECK(synchronise());
    job.round = round;
    atomic_store(&job.over, false);
    pthread_barrier_wait(&job.barrier);
    if (round == END)
        return;
    if (seconds > 0) {
        if (round == WARM)
            seconds /= 4;
        nanosleep(&(struct timespec){(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)}, NULL);
        atomic_store(&job.over, true);
    }
    pthread_barrier_wait(&job.barrier);
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *of, unsigned n)
{
    qsort(of, n, sizeof(*of), ascending);
    return n % 2 ? of[n / 2] : (of[n / 2 - 1] + of[n / 2]) / 2;
}

/* Sixteen blocks of a turn are too many where they are large: two, if these fit. 0: not even these. */
static size_t that_fit(size_t live)
{
    size_t room = card / 2 / job.size / job.threads;
    if (live <= room)
        return live;
    return job.pattern == TURN && room >= 2 ? 2 : 0;
}

static void measure(size_t live, unsigned repeats, double seconds)
{
    static struct worker workers[THREADS_MAX];
    static double ns[REPEATS_MAX], of_threads[THREADS_MAX];
    unsigned long pairs = 0;
    size_t each = that_fit(job.pattern == RANDOM ? live / job.threads : live);
    printf("{\"name\": \"%s\", \"api\": \"%s\", \"size\": %zu, \"threads\": %u, ", pattern_names[job.pattern],
           api_names[async], job.size, job.threads);
    if (!each) {
        printf("\"skipped\": \"%zu blocks do not fit in half of the card\"}\n", live * job.threads);
        return;
    }
    memset(workers, 0, sizeof(workers));
    pthread_barrier_init(&job.barrier, NULL, job.threads + 1);
    for (unsigned t = 0; t < job.threads; t++) {
        workers[t].live = each;
        workers[t].blocks = calloc(each, sizeof(CUdeviceptr));
        workers[t].random = t + 1;
        if (!workers[t].blocks || pthread_create(&workers[t].thread, NULL, work, &workers[t])) {
            fprintf(stderr, "pairs: no thread, or no memory for it\n");
            exit(2);
        }
    }
    play(WARM, seconds);
    for (unsigned r = 0; r < repeats; r++) {
        play(MEASURE, seconds);
        for (unsigned t = 0; t < job.threads; t++) {
            of_threads[t] = workers[t].ns;
            pairs += workers[t].done;
        }
        ns[r] = median(of_threads, job.threads);
    }
    if (job.worst)
        play(CLOCK, seconds);
    play(END, 0);

    double worst[CALLS] = {0};
    for (unsigned t = 0; t < job.threads; t++) {
        pthread_join(workers[t].thread, NULL);
        free(workers[t].blocks);
        for (int c = 0; c < CALLS; c++)
            worst[c] = workers[t].worst[c] > worst[c] ? workers[t].worst[c] : worst[c];
    }
    pthread_barrier_destroy(&job.barrier);
    printf("\"live\": %zu, \"pairs\": %lu, \"ns\": [", each * (job.pattern == RANDOM ? job.threads : 1), pairs);
    for (unsigned r = 0; r < repeats; r++)
        printf("%s%.2f", r ? ", " : "", ns[r]);
    printf("]");
    if (job.worst)
        printf(", \"worst\": {\"fill\": %.0f, \"alloc\": %.0f, \"free\": %.0f}", worst[FILL], worst[ALLOC],
               worst[FREE]);
    printf("}\n");
    fflush(stdout);
}

/* Leaves it to others to send a signal, and to see what comes of it. */
static void flush(size_t live)
{
    CUdeviceptr *blocks = calloc(live, sizeof(CUdeviceptr));
    if (!blocks)
        exit(2);
    double start = now();
    for (size_t i = 0; i < live; i++)
        CHECK(mem_alloc(&blocks[i], job.size));
    double full = now();
    for (size_t i = 0; i < live; i++)
        CHECK(mem_free(blocks[i]));
    double end = now();
    free(blocks);
    printf("{\"name\": \"flush\", \"api\": \"alloc\", \"size\": %zu, \"live\": %zu, \"fill_ns\": %.0f, \"free_ns\": "
           "%.0f}\n",
           job.size, live, full - start, end - full);
    fflush(stdout);
    char c;
    while (read(STDIN_FILENO, &c, 1) > 0 || errno == EINTR)
        errno = 0;
}

static int usage(void)
{
    fprintf(stderr,
            "usage: pairs [--api alloc|async] [--pattern turn|single|random|flush|start] [--size BYTES,...]\n"
            "             [--threads N,...] [--live N,...] [--repeats N] [--seconds S | --pairs N] [--worst]\n");
    exit(2);
}

static unsigned choice(const char *const *names, const char *name)
{
    for (unsigned i = 0; names[i]; i++)
        if (!strcmp(names[i], name))
            return i;
    usage();
    return 0;
}

struct list {
    size_t of[LIST_MAX];
    unsigned count;
};

static struct list list(const char *s)
{
    struct list l = {.count = 0};
    for (;;) {
        char *end;
        size_t n = strtoull(s, &end, 0);
        int shift = *end == 'G' ? 30 : *end == 'M' ? 20 : *end == 'K' ? 10 : 0;
        end += shift > 0;
        if (!n || (*end && *end != ',') || l.count == LIST_MAX)
            usage();
        l.of[l.count++] = n << shift;
        if (!*end)
            return l;
        s = end + 1;
    }
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"api", required_argument, NULL, 'a'},     {"pattern", required_argument, NULL, 'p'},
        {"size", required_argument, NULL, 'b'},    {"threads", required_argument, NULL, 't'},
        {"live", required_argument, NULL, 'l'},    {"repeats", required_argument, NULL, 'r'},
        {"seconds", required_argument, NULL, 's'}, {"pairs", required_argument, NULL, 'n'},
        {"worst", no_argument, NULL, 'w'},         {NULL, 0, NULL, 0},
    };
    struct list sizes = list("64K"), threads = list("1"), live = {.count = 0};
    unsigned long repeats = 3;
    double seconds = 0;
    int option;
    while ((option = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (option) {
        case 'a':
            async = choice(api_names, optarg);
            break;
        case 'p':
            job.pattern = choice(pattern_names, optarg);
            break;
        case 'b':
            sizes = list(optarg);
            break;
        case 't':
            threads = list(optarg);
            break;
        case 'l':
            live = list(optarg);
            break;
        case 'r':
            repeats = strtoul(optarg, NULL, 0);
            break;
        case 's':
            seconds = atof(optarg);
            break;
        case 'n':
            job.pairs = strtoul(optarg, NULL, 0);
            break;
        case 'w':
            job.worst = true;
            break;
        default:
            usage();
        }
    }
    if (optind < argc || repeats < 1 || repeats > REPEATS_MAX)
        usage();
    if (!live.count)
        live = list(job.pattern == FLUSH ? "10000" : "16");
    if (job.pattern == SINGLE)
        live = list("1");
    if (job.pairs)
        seconds = 0;
    else if (seconds <= 0)
        seconds = 0.2;
    if (!job.pairs)
        job.pairs = ULONG_MAX;

    connect();
    if (job.pattern == START) {
        CUdeviceptr block;
        CHECK(mem_alloc(&block, sizes.of[0]));
        CHECK(mem_free(block));
        return 0;
    }
    if (job.pattern == FLUSH) {
        job.size = sizes.of[0];
        flush(live.of[0]);
        return 0;
    }
    for (unsigned s = 0; s < sizes.count; s++) {
        for (unsigned t = 0; t < threads.count; t++) {
            for (unsigned l = 0; l < live.count; l++) {
                job.size = sizes.of[s];
                job.threads = (unsigned)threads.of[t];
                if (job.threads > THREADS_MAX || (job.pattern == RANDOM && live.of[l] < job.threads))
                    usage();
                /* What is left then goes with the process: a million frees take the driver half a minute. */
                job.last = s + 1 == sizes.count && t + 1 == threads.count && l + 1 == live.count;
                measure(live.of[l], (unsigned)repeats, seconds);
            }
        }
    }
    return 0;
}

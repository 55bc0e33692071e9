/*
 * A flush gives back what the driver's pools keep unused, beside the program that uses and destroys them, and never
 * during a capture; then it tells what is in use on the device, and by whom: the parts and the rest are the driver's
 * own figure.
 */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>

#include "family.h"

static void __attribute__((constructor)) two_devices(void)
{
    setenv("SIMCUDA_DEVICES", "2", 1);
}

/* What is waited for after it comes soon, or never. */
static void flush(void)
{
    if (!under_shim())
        return;
    alarm(5);
    raise(SIGUSR1);
}

/* Whatever pools keep beyond what is used goes, from the device's own and the program's; what is used stays. */
LAW_CASE_SIM(pools_are_trimmed)
{
    CUmemoryPool pools[3];
    CUdeviceptr used[3];
    law_context();
    pools[0] = default_pool();
    pools[1] = pool_on(0);
    pools[2] = pool_on(0);
    for (int i = 0; i < 3; i++) {
        used[i] = in_order_from(pools[i], 6 * MIB);
        OK(cu.cuMemsetD8_v2(used[i], (unsigned char)(i + 1), 6 * MIB));
        idle_in(pools[i], (size_t)(10 + 10 * i) * MIB);
    }
    for (int round = 0; round < 2; round++) { /* again, when there is nothing left */
        flush();
        for (int i = 0; under_shim() && i < 3; i++) {
            unsigned char first = 0, last = 0;
            WAIT_UNTIL(reserved(pools[i]) == 6 * MIB);
            OK(cu.cuMemcpyDtoH_v2(&first, used[i], 1));
            OK(cu.cuMemcpyDtoH_v2(&last, used[i] + 6 * MIB - 1, 1));
            CHECK_EQ(first, i + 1);
            CHECK_EQ(last, i + 1);
        }
        CHECK(!under_shim() || SIM(sim_used)(0) == (uint64_t)18 * MIB);
    }
    for (int i = 0; i < 3; i++)
        OK(cu.cuMemFreeAsync(used[i], NULL));
}

/* The device's own pool is left alone where the program never took from it: the question alone may make the driver do
 * work. */
LAW_CASE_SIM_ONCE(a_program_without_pools)
{
    law_context();
    OK(cu.cuMemRelease(piece(4 * MIB)));
    cached_block(4 * MIB);
    flush();
    WAIT_UNTIL(!under_shim() || SIM(sim_used)(0) == 0);
    LINGER(driver_calls("cuDeviceGetDefaultMemPool"));
    CHECK_EQ(driver_calls("cuDeviceGetDefaultMemPool"), 0);
    CHECK_EQ(driver_calls("cuMemPoolGetAttribute"), 0);
}

/* A pool that is used on another device than the current one. */
LAW_CASE_SIM_ONCE(pools_of_another_device)
{
    CUcontext first = law_context(), second;
    OK(cu.cuDevicePrimaryCtxRetain(&second, 1));
    OK(cu.cuCtxSetCurrent(second));
    CUmemoryPool pool = pool_on(1);
    idle_in(pool, 20 * MIB);
    OK(cu.cuCtxSetCurrent(first));
    flush();
    WAIT_UNTIL(!under_shim() || SIM(sim_used)(1) == 0);
}

/* A destroyed pool is no pool any more: its end waits until we are done with it, and we know of none that has ended. */
static atomic_bool inside, destroyed, left;

static void hold(const char *entry, void *unused)
{
    (void)entry, (void)unused;
    atomic_store(&inside, true);
    LINGER(driver_calls("cuMemPoolDestroy"));
    atomic_store(&destroyed, driver_calls("cuMemPoolDestroy") > 0);
    atomic_store(&left, true);
}

LAW_CASE_SIM(a_pool_is_destroyed_while_it_is_trimmed)
{
    law_context();
    CUmemoryPool pool = pool_on(0);
    idle_in(pool, 20 * MIB);
    if (under_shim()) {
        CHECK(SIM(sim_on_call)("cuMemPoolTrimTo", hold, NULL) == 0);
        flush();
        WAIT_UNTIL(atomic_load(&inside));
    }
    OK(cu.cuMemPoolDestroy(pool));
    WAIT_UNTIL(!under_shim() || atomic_load(&left));
    CHECK(!atomic_load(&destroyed));
    CHECK_EQ(cu.cuMemPoolDestroy(pool), CUDA_ERROR_INVALID_VALUE);
}

LAW_CASE_SIM_ONCE(a_pool_that_has_ended)
{
    law_context();
    OK(cu.cuMemPoolDestroy(pool_on(0)));
    cached_block(4 * MIB);
    flush();
    WAIT_UNTIL(!under_shim() || SIM(sim_used)(0) == 0);
    for (int n = 0; under_shim() && n < 20; n++)
        nap();
    CHECK_EQ(driver_calls("cuMemPoolGetAttribute"), 0);
}

LAW_CASE_SIM_ONCE(a_pool_whose_end_was_refused)
{
    law_context();
    CUmemoryPool pool = pool_on(0);
    idle_in(pool, 20 * MIB);
    CHECK(SIM(sim_fail)("cuMemPoolDestroy", 1, 1, CUDA_ERROR_UNKNOWN) == 0);
    CHECK_EQ(cu.cuMemPoolDestroy(pool), CUDA_ERROR_UNKNOWN);
    flush();
    WAIT_UNTIL(!under_shim() || SIM(sim_used)(0) == 0);
    OK(cu.cuMemPoolDestroy(pool));
}

static CUcontext context;
static atomic_bool over;

static void *make_and_destroy(void *unused)
{
    OK(cu.cuCtxSetCurrent(context));
    for (int i = 0; i < 300; i++) {
        CUmemoryPool pool = pool_on(0);
        OK(cu.cuMemFreeAsync(in_order_from(pool, (size_t)(1 + i % 5) * 2 * MIB), NULL));
        OK(cu.cuStreamSynchronize(NULL)); /* it is idle; perhaps trimmed already */
        if (i % 50 == 0) {                /* refused: it lives on */
            CHECK(SIM(sim_fail)("cuMemPoolDestroy", 1, 1, CUDA_ERROR_UNKNOWN) == 0);
            (void)cu.cuMemPoolDestroy(pool);
        }
        CUresult r = cu.cuMemPoolDestroy(pool);
        CHECK(r == CUDA_SUCCESS || r == CUDA_ERROR_INVALID_VALUE || r == CUDA_ERROR_UNKNOWN);
        if (r == CUDA_ERROR_UNKNOWN)
            OK(cu.cuMemPoolDestroy(pool));
    }
    return unused;
}

static void *flush_often(void *unused)
{
    while (!atomic_load(&over)) {
        flush();
        nap();
    }
    return unused;
}

LAW_CASE_SIM_ONCE(pools_come_and_go)
{
    pthread_t threads[3];
    context = law_context();
    CUmemoryPool mine = pool_on(0);
    CUdeviceptr p = in_order_from(mine, 2 * MIB);
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&threads[i], NULL, make_and_destroy, NULL) == 0);
    CHECK(pthread_create(&threads[2], NULL, flush_often, NULL) == 0);
    pthread_join(threads[0], NULL);
    pthread_join(threads[1], NULL);
    atomic_store(&over, true);
    pthread_join(threads[2], NULL);
    OK(cu.cuMemFreeAsync(p, NULL));
    OK(cu.cuStreamSynchronize(NULL));
    flush();
    WAIT_UNTIL(!under_shim() || SIM(sim_used)(0) == 0);
}

/* A signal during a capture waits for its end; then pools are trimmed. */
static unsigned long ours_during_capture(void)
{
    return SIM(sim_calls_during_capture)("cuMemPoolTrimTo") + SIM(sim_calls_during_capture)("cuMemPoolGetAttribute") +
           SIM(sim_calls_during_capture)("cuDeviceGetDefaultMemPool") +
           SIM(sim_calls_during_capture)("cuMemGetInfo_v2");
}

LAW_CASE_SIM_ONCE(not_during_a_capture)
{
    CUstream stream;
    CUgraph graph;
    law_context();
    CUmemoryPool pool = default_pool();
    idle_in(pool, 20 * MIB);
    OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cu.cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    flush();
    LINGER(ours_during_capture());
    CHECK_EQ(ours_during_capture(), 0);
    CHECK_EQ(SIM(sim_used)(0), 20 * MIB);
    OK(cu.cuStreamEndCapture(stream, &graph));
    CHECK(graph);
    OK(cu.cuGraphDestroy(graph));
    WAIT_UNTIL(!under_shim() || SIM(sim_used)(0) == 0);
}

/* One that begins when the blocks are given back, and the pools not yet: they follow when it is over. */
static atomic_bool begins;

static void let_a_capture_begin(const char *entry, void *unused)
{
    (void)entry, (void)unused;
    atomic_store(&inside, true);
    WAIT_UNTIL(atomic_load(&begins));
    for (int i = 0; i < 30; i++) /* it is announced then, and waits for us */
        nap();
}

LAW_CASE_SIM_ONCE(a_capture_begins_between_blocks_and_pools)
{
    CUstream stream;
    CUgraph graph;
    law_context();
    idle_in(pool_on(0), 20 * MIB);
    cached_block(4 * MIB);
    OK(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    if (under_shim()) {
        CHECK(SIM(sim_on_call)("cuMemFree_v2", let_a_capture_begin, NULL) == 0);
        flush();
        WAIT_UNTIL(atomic_load(&inside));
    }
    atomic_store(&begins, true);
    OK(cu.cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    LINGER(ours_during_capture());
    CHECK_EQ(ours_during_capture(), 0);
    OK(cu.cuStreamEndCapture(stream, &graph));
    OK(cu.cuGraphDestroy(graph));
    WAIT_UNTIL(!under_shim() || SIM(sim_used)(0) == 0);
}

/* What cannot be trimmed harms nobody. */
LAW_CASE_SIM_ONCE(a_driver_that_refuses)
{
    static const char *const entries[] = {"cuMemPoolTrimTo", "cuMemPoolGetAttribute", "cuDeviceGetDefaultMemPool",
                                          "cuDeviceGetGraphMemAttribute", "cuMemGetInfo_v2"};
    law_context();
    CUmemoryPool pool = default_pool();
    for (size_t i = 0; i < sizeof(entries) / sizeof(*entries); i++) {
        CUdeviceptr cached = cached_block(4 * MIB);
        idle_in(pool, 20 * MIB);
        CHECK(SIM(sim_fail)(entries[i], 1, 1000, CUDA_ERROR_UNKNOWN) == 0);
        flush();
        WAIT_UNTIL(!under_shim() || !SIM(sim_is_allocated)(cached));
        for (int n = 0; under_shim() && n < 10; n++)
            nap();
        CHECK(SIM(sim_fail)(entries[i], 1, 0, 0) == 0);
    }
    flush();
    WAIT_UNTIL(!under_shim() || SIM(sim_used)(0) == 0);
}

/* The thread behind the signal starts with the first memory of any family. */
static void one_of(int family)
{
    static char own[4096];
    const CUDA_ARRAY3D_DESCRIPTOR d = deep(2 * MIB);
    CUarray a;
    CUmipmappedArray m;
    CUdeviceptr p;
    CUipcMemHandle handle;
    void *h;
    switch (family) {
    case 0:
        managed(MIB);
        break;
    case 1:
        in_order(MIB);
        break;
    case 2:
        in_order_from(pool_on(0), MIB);
        break;
    case 3:
        piece(2 * MIB);
        break;
    case 4:
        array(MIB);
        break;
    case 5:
        OK(cu.cuArray3DCreate_v2(&a, &d));
        break;
    case 6:
        OK(cu.cuMipmappedArrayCreate(&m, &d, 1));
        break;
    case 7:
        pinned(MIB);
        break;
    case 8:
        OK(cu.cuMemAllocHost_v2(&h, MIB));
        break;
    case 9:
        OK(cu.cuMemHostRegister_v2(own, sizeof(own), 0));
        break;
    case 10:
        external(MIB);
        break;
    default:
        handle = donated();
        OK(cu.cuIpcOpenMemHandle_v2(&p, handle, 1));
    }
}
enum { KINDS = 12 };

LAW_CHILD(asks_for_a_flush)
{
    law_context();
    unsigned without = thread_count();
    one_of(atoi(getenv("FAMILY_KIND")));
    CHECK_EQ(thread_count(), without + under_shim());
    CHECK_EQ(driver_calls("cuMemAlloc_v2"), 0);
    flush();
    for (int i = 0; under_shim() && i < 20; i++)
        nap();
}

LAW_CASE_SIM_ONCE(every_family_starts_the_thread)
{
    for (int kind = 0; kind < KINDS; kind++) {
        char variable[4];
        snprintf(variable, sizeof(variable), "%d", kind);
        setenv("FAMILY_KIND", variable, 1);
        run("asks_for_a_flush");
        summary_says("vramshim: flush (SIGUSR1): nothing was kept");
    }
}

/* The view. What is told of the device is looked at here as a whole. */
static double amount(const char **at)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB"};
    char *end;
    double n = strtod(*at, &end);
    CHECK(end != *at && *end == ' ');
    for (int u = 0; u < 4; u++) {
        size_t len = strlen(units[u]);
        if (strncmp(end + 1, units[u], len) == 0 && (end[1 + len] == ' ')) {
            *at = end + 1 + len + 1;
            return n * (double)(1ull << (10 * u));
        }
    }
    law_fail(__FILE__, __LINE__, "no amount: %s", *at);
}

/* The n-th line of the device adds up, and is what the driver says ("used N", the child's own n-th line). */
static void adds_up(unsigned n)
{
    const char *line = text, *own = text;
    for (unsigned i = 0; i <= n; i++) {
        line = strstr(line + (i > 0), "vramshim: device 0: ");
        own = strstr(own + (i > 0), "used by the driver's count: ");
        CHECK(line && own);
    }
    const char *at = line + strlen("vramshim: device 0: "), *end = strchr(at, '\n');
    double used = amount(&at), sum = 0, driver = strtod(own + strlen("used by the driver's count: "), NULL);
    at = strstr(at, " in use");
    CHECK(at && at < end);
    at += strlen(" in use");
    while (at < end && (*at == ':' || *at == ',')) {
        at += 2;
        sum += amount(&at);
        while (at < end && *at != ',' && strncmp(at, " (managed", 9) != 0) {
            if (*at == '(') /* "(contexts, other programs)" */
                at = strchr(at, ')');
            at++;
        }
    }
    if (fabs(used - driver) > 1024 || fabs(sum - used) > 1024)
        law_fail(__FILE__, __LINE__, "the parts are %.0f, in use %.0f, by the driver %.0f: %.*s", sum, used, driver,
                 (int)(end - line), line);
}

/* Asks for a flush, waits until its last word is out, and says what the driver says. */
static void look(void)
{
    if (under_shim()) {
        unsigned long before = driver_calls("cuMemGetInfo_v2");
        flush();
        WAIT_UNTIL(driver_calls("cuMemGetInfo_v2") > before);
        for (int i = 0; i < 20; i++)
            nap();
    }
    fprintf(stderr, "used by the driver's count: %llu\n", (unsigned long long)SIM(sim_used)(0));
}

LAW_CHILD(holds_some_of_each)
{
    CUdeviceptr p;
    CUipcMemHandle handle = donated();
    law_context();
    piece(32 * MIB);
    look();
    OK(cu.cuMemAlloc_v2(&p, 64 * MIB));
    cached_block(128 * MIB);
    array(24 * MIB);
    CUmemoryPool pool = default_pool();
    in_order(48 * MIB);
    idle_in(pool, 16 * MIB);
    pinned(8 * MIB);
    OK(cu.cuIpcOpenMemHandle_v2(&p, handle, 1));
    external(7 * MIB);
    /* Mapped twice and imported: it is there once. */
    CUmemGenericAllocationHandle one = piece(10 * MIB), import = imported(one);
    CUdeviceptr place = reserve(40 * MIB);
    OK(cu.cuMemMap(place, 10 * MIB, 0, one, 0));
    OK(cu.cuMemMap(place + 10 * MIB, 10 * MIB, 0, one, 0));
    OK(cu.cuMemMap(place + 20 * MIB, 10 * MIB, 0, import, 0));
    /* So that there is something idle, and something kept. */
    CHECK(SIM(sim_fail)("cuMemPoolTrimTo", 1, 1000, CUDA_ERROR_UNKNOWN) == 0);
    CHECK(SIM(sim_fail)("cuMemFree_v2", 1, 1000, CUDA_ERROR_UNKNOWN) == 0);
    look();
    managed(20 * MIB);
    look();
}

LAW_CASE_SIM_ONCE(the_view_adds_up)
{
    setenv("SIMCUDA_CTX_COST", "100M", 1);
    run("holds_some_of_each");
    if (!under_shim())
        return;
    adds_up(0);
    adds_up(1);
    adds_up(2);
    CHECK(strstr(text,
                 "132.0 MiB of 16.0 GiB in use: 100.0 MiB before the first allocation (contexts, other programs), "
                 "32.0 MiB virtual\n"));
    CHECK(strstr(text,
                 "422.0 MiB of 16.0 GiB in use: 128.0 MiB kept by the shim, "
                 "100.0 MiB before the first allocation (contexts, other programs), 64.0 MiB in blocks, 48.0 MiB stream-ordered, 42.0 MiB virtual, 24.0 MiB in arrays, "
                 "16.0 MiB idle in the driver's pools\n"));
    CHECK(strstr(text,
                 "20.0 MiB since then by the driver and other programs (managed, here or on the host: 20.0 MiB)\n"));
}

/* What was there before, and is gone: the parts are not more than the whole. */
LAW_CHILD(lets_go_of_what_was_before)
{
    CUdevice device;
    CUcontext first = law_context(), other;
    OK(cu.cuDeviceGet(&device, 0));
    OK(cu.cuCtxCreate_v2(&other, 0, device));
    OK(cu.cuCtxSetCurrent(first));
    piece(32 * MIB);
    look();
    OK(cu.cuCtxDestroy_v2(other));
    look();
}

LAW_CASE_SIM_ONCE(what_was_before_is_gone)
{
    setenv("SIMCUDA_CTX_COST", "100M", 1);
    run("lets_go_of_what_was_before");
    if (!under_shim())
        return;
    adds_up(0);
    adds_up(1);
    CHECK(strstr(text,
                 "132.0 MiB of 16.0 GiB in use: 100.0 MiB before the first allocation (contexts, other programs), "
                 "32.0 MiB virtual\n"));
}

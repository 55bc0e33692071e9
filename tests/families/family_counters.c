/*
 * The figures of each family: what is held, its peak, all that there was; what a free that is refused, unknown or made
 * twice changes (nothing); what ends with a context; what keeps physical memory; what is never the program's.
 */
#include "family.h"

/* Of each family two, one of them freed, and once more. */
LAW_CHILD(uses_every_family)
{
    static char own[2][65536];
    CUdeviceptr p, place = 0;
    CUipcMemHandle handle = donated();
    CUmemGenericAllocationHandle one;
    CUarray a;
    CUmipmappedArray m;
    CUexternalMemory e;
    law_context();
    p = managed(3 * MIB);
    managed(2 * MIB);
    OK(cu.cuMemFree_v2(p));
    OK(cu.cuMemFree_v2(managed(MIB)));

    p = in_order(4 * MIB);
    in_order_from(pool_on(0), 2 * MIB);
    OK(cu.cuMemFreeAsync(p, NULL));
    OK(cu.cuMemFree_v2(in_order(MIB)));

    one = piece(6 * MIB);
    piece(2 * MIB);
    OK(cu.cuMemRelease(one));
    OK(cu.cuMemRelease(piece(4 * MIB)));

    const CUDA_ARRAY3D_DESCRIPTOR d = deep(8 * MIB), levels = {.Width = 1024,
                                                               .Height = 1024,
                                                               .Format = CU_AD_FORMAT_UNSIGNED_INT8,
                                                               .NumChannels = 4};
    a = array(6 * MIB);
    OK(cu.cuArrayDestroy(a));
    OK(cu.cuArray3DCreate_v2(&a, &d));
    OK(cu.cuMipmappedArrayCreate(&m, &levels, 2)); /* 4 MiB and 1 MiB: three pages */
    OK(cu.cuMipmappedArrayDestroy(m));

    void *h;
    OK(cu.cuMemAllocHost_v2(&h, 3 * MIB));
    pinned(MIB);
    OK(cu.cuMemFreeHost(h));
    OK(cu.cuMemHostRegister_v2(own[0], 65536, 0));
    OK(cu.cuMemHostRegister_v2(own[1], 32768, 0));
    OK(cu.cuMemHostUnregister(own[0]));

    OK(cu.cuIpcOpenMemHandle_v2(&p, handle, 1));
    OK(cu.cuIpcOpenMemHandle_v2(&p, handle, 1)); /* one, opened twice */
    OK(cu.cuIpcCloseMemHandle(p));

    one = piece(10 * MIB);
    place = reserve(10 * MIB);
    CUmemGenericAllocationHandle import = imported(one);
    OK(cu.cuMemMap(place, 10 * MIB, 0, import, 0));
    OK(cu.cuMemRelease(one));

    e = external(7 * MIB);
    external(MIB);
    OK(cu.cuDestroyExternalMemory(e));
}

LAW_CASE_SIM(every_family_is_told)
{
    run("uses_every_family");
    reported("managed", "2.0 MiB in 1 at exit, peak 5.0 MiB; in all 6.0 MiB in 3");
    reported("stream-ordered", "2.0 MiB in 1 at exit, peak 6.0 MiB; in all 7.0 MiB in 3");
    reported("virtual", "2.0 MiB in 1 at exit, peak 12.0 MiB; in all 22.0 MiB in 4");
    reported("array", "8.0 MiB in 1 at exit, peak 14.0 MiB; in all 20.0 MiB in 3");
    reported("pinned host", "1.0 MiB in 1 at exit, peak 4.0 MiB; in all 4.0 MiB in 2");
    reported("registered host", "32.0 KiB in 1 at exit, peak 96.0 KiB; in all 96.0 KiB in 2");
    reported("opened by IPC", "3.0 MiB in 1 at exit, peak 3.0 MiB; in all 3.0 MiB in 1");
    reported("imported", "10.0 MiB in 1 at exit, peak 10.0 MiB; in all 10.0 MiB in 1");
    reported("of another API", "1.0 MiB in 1 at exit, peak 8.0 MiB; in all 8.0 MiB in 2");
    /* The device's own alone: 2 + 2 + 2 + 8. */
    reported("never freed", "14.0 MiB in 4 blocks");
    not_reported("ended with its context");
}

/* Everything is given up twice, and what never was anything. */
LAW_CHILD(frees_twice)
{
    static char own[4096];
    CUdeviceptr p;
    CUarray a;
    CUmipmappedArray m;
    CUmemGenericAllocationHandle one;
    law_context();
    for (int i = 0; i < 3; i++) {
        p = managed(3 * MIB);
        OK(cu.cuMemFree_v2(p));
        CHECK_EQ(cu.cuMemFree_v2(p), CUDA_ERROR_INVALID_VALUE);
        p = in_order(3 * MIB);
        OK(cu.cuMemFreeAsync(p, NULL));
        CHECK_EQ(cu.cuMemFreeAsync(p, NULL), CUDA_ERROR_INVALID_VALUE);
        CHECK_EQ(cu.cuMemFree_v2(p), CUDA_ERROR_INVALID_VALUE);
        one = piece(2 * MIB);
        OK(cu.cuMemRelease(one));
        CHECK_EQ(cu.cuMemRelease(one), CUDA_ERROR_INVALID_VALUE);
        CHECK_EQ(cu.cuMemUnmap(reserve(2 * MIB), 2 * MIB), CUDA_ERROR_INVALID_VALUE);
        a = array(MIB);
        OK(cu.cuArrayDestroy(a));
        CHECK_EQ(cu.cuArrayDestroy(a), CUDA_ERROR_INVALID_HANDLE);
        const CUDA_ARRAY3D_DESCRIPTOR d = deep(2 * MIB);
        OK(cu.cuMipmappedArrayCreate(&m, &d, 1));
        CHECK_EQ(cu.cuArrayDestroy((CUarray)(void *)m), CUDA_ERROR_INVALID_HANDLE); /* of the other kind */
        OK(cu.cuMipmappedArrayDestroy(m));
        CHECK_EQ(cu.cuMipmappedArrayDestroy(m), CUDA_ERROR_INVALID_HANDLE);
        void *h = pinned(MIB);
        CHECK(cu.cuMemHostUnregister(h) != CUDA_SUCCESS);
        OK(cu.cuMemFreeHost(h));
        CHECK_EQ(cu.cuMemFreeHost(h), CUDA_ERROR_INVALID_VALUE);
        OK(cu.cuMemHostRegister_v2(own, sizeof(own), 0));
        CHECK(cu.cuMemHostRegister_v2(own, sizeof(own), 0) != CUDA_SUCCESS); /* it is already */
        CHECK(cu.cuMemFreeHost(own) != CUDA_SUCCESS);
        OK(cu.cuMemHostUnregister(own));
        CHECK(cu.cuMemHostUnregister(own) != CUDA_SUCCESS);
        CUexternalMemory e = external(MIB);
        OK(cu.cuDestroyExternalMemory(e));
        CHECK(cu.cuDestroyExternalMemory(e) != CUDA_SUCCESS);
        CHECK_EQ(cu.cuIpcCloseMemHandle(0x1000), CUDA_ERROR_INVALID_VALUE);
    }
}

LAW_CASE_SIM(freed_twice)
{
    run("frees_twice");
    summary_says("nothing leaked");
    reported("managed", "0 B in 0 at exit, peak 3.0 MiB; in all 9.0 MiB in 3");
    reported("stream-ordered", "0 B in 0 at exit, peak 3.0 MiB; in all 9.0 MiB in 3");
    reported("virtual", "0 B in 0 at exit, peak 2.0 MiB; in all 6.0 MiB in 3");
    reported("array", "0 B in 0 at exit, peak 2.0 MiB; in all 9.0 MiB in 6");
    reported("pinned host", "0 B in 0 at exit, peak 1.0 MiB; in all 3.0 MiB in 3");
    reported("registered host", "0 B in 0 at exit, peak 4.0 KiB; in all 12.0 KiB in 3");
    reported("of another API", "0 B in 0 at exit, peak 1.0 MiB; in all 3.0 MiB in 3");
}

/* The driver refuses each first free; what was refused is still held, and the second frees it. */
#define REFUSED(entry, ...)                                                                                            \
    do {                                                                                                               \
        CHECK(SIM(sim_fail)(#entry, 1, 1, CUDA_ERROR_UNKNOWN) == 0);                                                   \
        CHECK_EQ(cu.entry(__VA_ARGS__), CUDA_ERROR_UNKNOWN);                                                           \
    } while (0)

LAW_CHILD(is_refused)
{
    static char own[4096];
    CUdeviceptr p, place;
    CUipcMemHandle handle = donated();
    law_context();
    place = reserve(4 * MIB);
    for (int really = 0; really < 2; really++) { /* the second time it stays refused */
#define FREE(entry, ...)                                                                                               \
    REFUSED(entry, __VA_ARGS__);                                                                                       \
    if (!really)                                                                                                       \
    OK(cu.entry(__VA_ARGS__))
        p = managed(3 * MIB);
        FREE(cuMemFree_v2, p);
        p = in_order(4 * MIB);
        FREE(cuMemFreeAsync, p, NULL);
        CUmemGenericAllocationHandle one = piece(2 * MIB), two = piece(2 * MIB);
        OK(cu.cuMemMap(place, 2 * MIB, 0, one, 0));
        OK(cu.cuMemRelease(one));
        FREE(cuMemUnmap, place, 2 * MIB);
        FREE(cuMemRelease, two);
        CUarray a = array(6 * MIB);
        FREE(cuArrayDestroy, a);
        void *h = pinned(6 * MIB);
        FREE(cuMemFreeHost, h);
        OK(cu.cuMemHostRegister_v2(own, sizeof(own), 0));
        FREE(cuMemHostUnregister, own);
        OK(cu.cuIpcOpenMemHandle_v2(&p, handle, 1));
        FREE(cuIpcCloseMemHandle, p);
        CUexternalMemory e = external(7 * MIB);
        FREE(cuDestroyExternalMemory, e);
    }
}

LAW_CASE_SIM(a_refused_free_changes_nothing)
{
    run("is_refused");
    reported("managed", "3.0 MiB in 1 at exit, peak 3.0 MiB; in all 6.0 MiB in 2");
    reported("stream-ordered", "4.0 MiB in 1 at exit, peak 4.0 MiB; in all 8.0 MiB in 2");
    reported("virtual", "4.0 MiB in 2 at exit, peak 4.0 MiB; in all 8.0 MiB in 4");
    reported("array", "6.0 MiB in 1 at exit, peak 6.0 MiB; in all 12.0 MiB in 2");
    reported("pinned host", "6.0 MiB in 1 at exit, peak 6.0 MiB; in all 12.0 MiB in 2");
    reported("registered host", "4.0 KiB in 1 at exit, peak 4.0 KiB; in all 8.0 KiB in 2");
    reported("opened by IPC", "3.0 MiB in 1 at exit, peak 3.0 MiB; in all 6.0 MiB in 2");
    reported("of another API", "7.0 MiB in 1 at exit, peak 7.0 MiB; in all 14.0 MiB in 2");
}

/* An allocation that the driver refuses is none. */
LAW_CHILD(is_given_nothing)
{
    CUdeviceptr p;
    CUmemGenericAllocationHandle one;
    CUarray a;
    CUmemAllocationProp prop = on_device(0);
    const CUDA_ARRAY_DESCRIPTOR d = flat((size_t)64 << 20);
    void *h;
    law_context();
    managed(MIB);
    REFUSED(cuMemAllocManaged, &p, MIB, 1);
    CHECK_EQ(cu.cuMemAllocManaged(NULL, MIB, 1), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemAllocManaged(&p, 0, 1), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemAllocAsync, &p, MIB, NULL);
    CHECK_EQ(cu.cuMemAllocAsync(NULL, MIB, NULL), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemCreate, &one, 2 * MIB, &prop, 0);
    CHECK_EQ(cu.cuMemCreate(NULL, 2 * MIB, &prop, 0), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemCreate(&one, 2 * MIB, NULL, 0), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemCreate(&one, 5, &prop, 0), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuArrayCreate_v2, &a, &d);
    CHECK_EQ(cu.cuArrayCreate_v2(&a, NULL), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuArray3DCreate_v2(&a, NULL), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMipmappedArrayCreate(NULL, NULL, 1), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu.cuMemHostAlloc(NULL, MIB, 0), CUDA_ERROR_INVALID_VALUE);
    REFUSED(cuMemHostAlloc, &h, MIB, 0);
    CHECK(cu.cuImportExternalMemory(NULL, NULL) != CUDA_SUCCESS);
    CHECK(cu.cuMemPoolCreate(NULL, NULL) != CUDA_SUCCESS);
    OK(cu.cuCtxSetCurrent(NULL));
    CHECK_EQ(cu.cuMemAllocManaged(&p, MIB, 1), CUDA_ERROR_INVALID_CONTEXT);
}

LAW_CASE_SIM(a_refused_allocation_is_none)
{
    run("is_given_nothing");
    reported("managed", "1.0 MiB in 1 at exit, peak 1.0 MiB; in all 1.0 MiB in 1");
    not_reported("stream-ordered");
    not_reported("virtual");
    not_reported("array");
    not_reported("pinned host");
    not_reported("of another API");
}

/* What ends with a context, and what does not. */
LAW_CHILD(destroys_its_context)
{
    static char own[4096];
    CUcontext first = law_context(), ctx;
    CUdevice device;
    CUdeviceptr p, opened;
    CUipcMemHandle handle = donated();
    OK(cu.cuDeviceGet(&device, 0));
    managed(16 * MIB); /* of a context that lives on */
    OK(cu.cuCtxCreate_v2(&ctx, 0, device));
    managed(3 * MIB);
    array(6 * MIB);
    pinned(6 * MIB);
    OK(cu.cuMemHostRegister_v2(own, sizeof(own), 0));
    OK(cu.cuIpcOpenMemHandle_v2(&opened, handle, 1));
    p = in_order(4 * MIB);
    CUmemGenericAllocationHandle one = piece(2 * MIB);
    external(7 * MIB);
    CHECK(SIM(sim_fail)("cuCtxDestroy_v2", 1, 1, CUDA_ERROR_UNKNOWN) == 0);
    CHECK_EQ(cu.cuCtxDestroy_v2(ctx), CUDA_ERROR_UNKNOWN); /* then it did not end */
    OK(cu.cuCtxDestroy_v2(ctx));
    OK(cu.cuCtxSetCurrent(first));
    if (getenv("FAMILY_FREES")) { /* both can still be freed */
        OK(cu.cuMemFree_v2(p));
        OK(cu.cuMemRelease(one));
    }
}

LAW_CASE_SIM(the_end_of_a_context)
{
    run("destroys_its_context");
    reported("managed", "16.0 MiB in 1 at exit, peak 19.0 MiB; in all 19.0 MiB in 2");
    reported("array", "0 B in 0 at exit, peak 6.0 MiB; in all 6.0 MiB in 1");
    reported("pinned host", "0 B in 0 at exit, peak 6.0 MiB; in all 6.0 MiB in 1");
    reported("registered host", "0 B in 0 at exit, peak 4.0 KiB; in all 4.0 KiB in 1");
    reported("opened by IPC", "0 B in 0 at exit, peak 3.0 MiB; in all 3.0 MiB in 1");
    reported("stream-ordered", "4.0 MiB in 1 at exit, peak 4.0 MiB; in all 4.0 MiB in 1");
    reported("virtual", "2.0 MiB in 1 at exit, peak 2.0 MiB; in all 2.0 MiB in 1");
    reported("of another API", "7.0 MiB in 1 at exit, peak 7.0 MiB; in all 7.0 MiB in 1");
    reported("never freed", "22.0 MiB in 3 blocks");
    reported("ended with its context", "9.0 MiB in 2 blocks"); /* of the device: managed and array */
    setenv("FAMILY_FREES", "1", 1);
    run("destroys_its_context");
    reported("never freed", "16.0 MiB in 1 block");
}

/* Physical memory is there until its last handle is released and its last mapping gone, in whatever order. */
LAW_CHILD(names_physical_memory)
{
    CUmemGenericAllocationHandle one, again, third;
    const char *stage = getenv("FAMILY_STAGE");
    law_context();
    CUdeviceptr place = reserve(32 * MIB);
    one = piece(2 * MIB);
    OK(cu.cuMemMap(place, 2 * MIB, 0, one, 0));
    OK(cu.cuMemMap(place + 2 * MIB, 2 * MIB, 0, one, 0));
    OK(cu.cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)(place + 3 * MIB)));
    OK(cu.cuMemRetainAllocationHandle(&third, (void *)(uintptr_t)place));
    for (char c = 'a'; c <= *stage; c++) {
        CHECK_EQ(SIM(sim_used)(0), 2 * MIB);
        switch (c) {
        case 'a':
            OK(cu.cuMemRelease(one));
            break;
        case 'b':
            OK(cu.cuMemUnmap(place, 2 * MIB));
            break;
        case 'c':
            OK(cu.cuMemRelease(again));
            break;
        case 'd':
            OK(cu.cuMemUnmap(place + 2 * MIB, 2 * MIB)); /* one handle is left */
            break;
        case 'e':
            OK(cu.cuMemMap(place + 8 * MIB, 2 * MIB, 0, third, 0));
            OK(cu.cuMemRelease(third));
            break;
        case 'f':
            OK(cu.cuMemUnmap(place + 8 * MIB, 2 * MIB));
            CHECK_EQ(SIM(sim_used)(0), 0);
        }
    }
}

LAW_CASE_SIM(physical_memory_has_several_names)
{
    for (char c = 'a'; c <= 'f'; c++) {
        setenv("FAMILY_STAGE", (char[]){c, 0}, 1);
        run("names_physical_memory");
        reported("virtual", c == 'f' ? "0 B in 0 at exit, peak 2.0 MiB; in all 2.0 MiB in 1"
                                     : "2.0 MiB in 1 at exit, peak 2.0 MiB; in all 2.0 MiB in 1");
        reported("never freed", c == 'f' ? "0 B in 0 blocks" : "2.0 MiB in 1 block");
    }
}

/* A row of mappings that goes at once, and some of it before; places that are used again. */
LAW_CHILD(unmaps_in_one_call)
{
    enum { N = 6 };
    law_context();
    CUdeviceptr place = reserve((size_t)2 * N * MIB);
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < N; i++) {
            CUmemGenericAllocationHandle h = piece(2 * MIB);
            OK(cu.cuMemMap(place + (size_t)2 * i * MIB, 2 * MIB, 0, h, 0));
            OK(cu.cuMemRelease(h));
        }
        CHECK(cu.cuMemUnmap(place + MIB, 2 * MIB) != CUDA_SUCCESS);
        CHECK(cu.cuMemUnmap(place, 3 * MIB) != CUDA_SUCCESS);
        REFUSED(cuMemUnmap, place, (size_t)2 * N * MIB);
        CHECK_EQ(SIM(sim_used)(0), 2 * N * MIB);
        OK(cu.cuMemUnmap(place + 4 * MIB, 2 * MIB));
        CHECK(cu.cuMemUnmap(place, (size_t)2 * N * MIB) != CUDA_SUCCESS); /* there is a hole in it */
        OK(cu.cuMemUnmap(place, 4 * MIB));
        if (round < 2)
            OK(cu.cuMemUnmap(place + 6 * MIB, 6 * MIB));
    }
}

LAW_CASE_SIM(many_mappings_at_once)
{
    run("unmaps_in_one_call");
    reported("virtual", "6.0 MiB in 3 at exit, peak 12.0 MiB; in all 36.0 MiB in 18");
}

/* Memory of others: held at the end, and nobody's leak. */
LAW_CHILD(holds_what_belongs_to_others)
{
    CUdeviceptr p, place;
    CUipcMemHandle handle = donated();
    CUmemGenericAllocationHandle own, import;
    law_context();
    place = reserve(4 * MIB);
    OK(cu.cuIpcOpenMemHandle_v2(&p, handle, 1));
    external(7 * MIB);
    own = piece(4 * MIB);
    import = imported(own);
    OK(cu.cuMemMap(place, 4 * MIB, 0, import, 0));
    OK(cu.cuMemRelease(own)); /* the import keeps it */
    CHECK_EQ(SIM(sim_used)(0), 4 * MIB);
}

LAW_CASE_SIM(what_belongs_to_others)
{
    run("holds_what_belongs_to_others");
    summary_says("nothing leaked");
    reported("never freed", "0 B in 0 blocks");
    reported("opened by IPC", "3.0 MiB in 1 at exit, peak 3.0 MiB; in all 3.0 MiB in 1");
    reported("imported", "4.0 MiB in 1 at exit, peak 4.0 MiB; in all 4.0 MiB in 1");
    reported("of another API", "7.0 MiB in 1 at exit, peak 7.0 MiB; in all 7.0 MiB in 1");
}

/* Of which device it is, nobody can say: then it is nobody's. */
LAW_CHILD(is_given_by_a_silent_driver)
{
    law_context();
    CHECK(SIM(sim_fail)("cuCtxGetCurrent", 1, 1, CUDA_ERROR_UNKNOWN) == 0);
    managed(3 * MIB);
    managed(2 * MIB);
}

LAW_CASE_SIM(memory_of_which_nothing_is_known)
{
    run("is_given_by_a_silent_driver");
    summary_says("cannot account for managed memory (nothing is known of its context)");
    reported("managed", "2.0 MiB in 1 at exit, peak 2.0 MiB; in all 2.0 MiB in 1");
    CHECK_EQ(count_of(text, "\n  device "), under_shim());
}

/* Memory is counted on its device, whichever is current. */
LAW_CHILD(uses_another_device)
{
    const CUmemAllocationProp prop = on_device(1);
    CUmemGenericAllocationHandle one;
    law_context();
    in_order_from(pool_on(1), 4 * MIB);
    OK(cu.cuMemCreate(&one, 6 * MIB, &prop, 0));
    CHECK_EQ(SIM(sim_used)(0), 0);
    CHECK_EQ(SIM(sim_used)(1), 10 * MIB);
}

LAW_CASE_SIM(memory_of_another_device)
{
    setenv("SIMCUDA_DEVICES", "2", 1);
    run("uses_another_device");
    CHECK_EQ(count_of(text, "\n  device 1\n"), under_shim());
    CHECK_EQ(count_of(text, "\n  device "), under_shim());
    reported("never freed", "10.0 MiB in 2 blocks");
}

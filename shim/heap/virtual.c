#include "heap/virtual.h"

#include <string.h>

#include "base/check.h"
#include "base/compiler.h"
#include "base/futex.h"
#include "base/lock.h"
#include "base/meta.h"
#include "driver/capture.h"
#include "driver/driver.h"
#include "heap/heap.h"
#include "heap/life.h"

static atomic_uint undone; /* counts pairs that have been undone: a futex */

/* The physical memory that this thread was given again last: it asks for its addresses next. */
static VRAM_TLS CUmemGenericAllocationHandle last_given;

static struct vram_virtual *all(void)
{
    return &vram_heap.virtual_memory;
}

static struct vram_physical *find(CUmemGenericAllocationHandle handle)
{
    struct vram_physical *p;
    HASH_FIND(hh, all()->physical, &handle, sizeof(handle), p);
    return p;
}

static struct vram_reservation *find_at(uint64_t addr)
{
    struct vram_reservation *r;
    HASH_FIND(hh, all()->reservations, &addr, sizeof(addr), r);
    return r;
}

static struct vram_reservation *containing(uint64_t addr)
{
    struct vram_reservation *r = find_at(addr);
    for (r = r ? r : all()->reservations; r; r = r->hh.next)
        if (addr - r->addr < r->size)
            return r;
    return NULL;
}

static uint64_t size_of(const struct vram_physical *p)
{
    return p->of->key.size;
}
static struct vram_account *books_of(const struct vram_physical *p)
{
    return vram_books(p->of->key.prop.location.id);
}

static bool may_keep(const struct vram_physical *p)
{
    return p->at && !p->shared && p->at->access_count && !p->at->access_forgotten;
}

/* Whether the mapping is there for the driver and not for the program. */
static bool is_spare(const struct vram_reservation *r)
{
    return r->behind && !r->mapped;
}

static void keep(struct vram_physical *p)
{
    p->kept = true;
    p->kept_prev = NULL;
    if ((p->kept_next = p->of->kept))
        p->kept_next->kept_prev = p;
    p->of->kept = p;
    books_of(p)->virtual_kept += size_of(p);
}

static void unkeep(struct vram_physical *p)
{
    p->kept = false;
    if (p->kept_prev)
        p->kept_prev->kept_next = p->kept_next;
    else
        p->of->kept = p->kept_next;
    if (p->kept_next)
        p->kept_next->kept_prev = p->kept_prev;
    VRAM_CHECK(books_of(p)->virtual_kept >= size_of(p));
    books_of(p)->virtual_kept -= size_of(p);
}

/* After every change of who holds what. */
static void settle(struct vram_physical *p)
{
    bool wanted = may_keep(p) && !p->held && !p->at->mapped;
    if (wanted && !p->kept)
        keep(p);
    else if (!wanted && p->kept)
        unkeep(p);
}

/* The two halves are a pair no more. */
static void part(struct vram_physical *p)
{
    struct vram_reservation *r = p->at;
    if (p->kept)
        unkeep(p);
    p->at = NULL;
    r->behind = NULL;
    r->mapped = false;
    r->access_count = 0;
    r->access_forgotten = false;
}

/* What the driver refuses once, it may grant the second time. */
static CUresult with_patience(CUresult (*call)(CUdeviceptr, size_t), CUdeviceptr addr, size_t size)
{
    CUresult r = call(addr, size);
    return r == CUDA_SUCCESS ? r : call(addr, size);
}

/* At the driver. False: the mapping is still there, and nothing else was tried. */
static bool take_apart(CUdeviceptr addr, size_t size, CUmemGenericAllocationHandle release, size_t give_up)
{
    if (with_patience(VRAM_DRV(cuMemUnmap), addr, size) != CUDA_SUCCESS)
        return false;
    if (release && VRAM_DRV(cuMemRelease)(release) != CUDA_SUCCESS)
        VRAM_DRV(cuMemRelease)(release);
    if (give_up && vram_driver()->cuMemAddressFree)
        with_patience(VRAM_DRV(cuMemAddressFree), addr, give_up);
    return true;
}

/*
 * Undoes a pair at the driver: its mapping, and what else of it the program has given up. Under HEAP, which it gives up and
 * takes again; whoever finds the addresses or the handle meanwhile waits (await_undoing), because it would meet a mapping
 * that is still there. False: the driver refuses, and all is as before.
 */
static bool undo(struct vram_physical *p)
{
    struct vram_reservation *r = p->at;
    const struct vram_reservation before = *r;
    struct vram_account *books = books_of(p);
    const bool was_kept = p->kept, release = !p->held, give_up = !r->held;
    const uint64_t pages = was_kept ? size_of(p) >> VRAM_PAGE_SHIFT : 0;

    part(p);
    if (was_kept) {
        books->returning_pages += pages;
        books->returning_blocks++;
    }
    if (release)
        HASH_DELETE(hh, all()->physical, p);
    if (give_up)
        HASH_DELETE(hh, all()->reservations, r);
    all()->undoing++;
    vram_unlock(VRAM_RANK_HEAP);
    bool done = take_apart(r->addr, size_of(p), release ? p->handle : 0, give_up ? r->size : 0);
    vram_lock(VRAM_RANK_HEAP);
    all()->undoing--;
    if (was_kept) {
        books->returning_pages -= pages;
        books->returning_blocks--;
        books->returned++;
        atomic_fetch_add(&vram_heap.arrivals, 1);
        vram_futex_wake(&vram_heap.arrivals);
    }
    if (!done) {
        if (release)
            HASH_ADD(hh, all()->physical, handle, sizeof(p->handle), p);
        if (give_up)
            HASH_ADD(hh, all()->reservations, addr, sizeof(r->addr), r);
        p->at = r;
        r->behind = p;
        r->access_count = before.access_count;
        r->access_forgotten = before.access_forgotten;
        settle(p);
    }
    if (done && release)
        vram_meta_free(p, sizeof(*p));
    if (done && give_up)
        vram_meta_free(r, sizeof(*r));
    atomic_fetch_add(&undone, 1);
    vram_futex_wake(&undone);
    return done;
}

/* Under HEAP, which it may give up. */
static void await_undoing(void)
{
    while (all()->undoing) {
        unsigned seen = atomic_load(&undone);
        vram_unlock(VRAM_RANK_HEAP);
        vram_futex_wait(&undone, seen, VRAM_FOR_EVER);
        vram_lock(VRAM_RANK_HEAP);
    }
}

/* No mapping that the program has given up lies in the range any more. */
static void clear(uint64_t addr, uint64_t size)
{
    await_undoing();
    struct vram_reservation *r = find_at(addr);
    if (r && size <= r->size) { /* as nearly always: nothing else can lie there */
        if (is_spare(r))
            undo(r->behind);
        return;
    }
    do {
        for (r = all()->reservations; r; r = r->hh.next)
            if (is_spare(r) && r->addr < addr + size && addr < r->addr + size_of(r->behind))
                break;
    } while (r && undo(r->behind));
}

static struct vram_physical_class *need_class(const struct vram_physical_key *key)
{
    struct vram_physical_class *c;
    HASH_FIND(hh, all()->classes, key, sizeof(*key), c);
    if (c || !(c = vram_meta_alloc(sizeof(*c))))
        return c;
    *c = (struct vram_physical_class){.key = *key};
    HASH_ADD(hh, all()->classes, key, sizeof(c->key), c);
    if (c->hh.tbl)
        return c;
    vram_meta_free(c, sizeof(*c));
    return NULL;
}

/* What a request of the program may be served with at all. */
static bool usual(const CUmemAllocationProp *prop)
{
    return prop && prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE && prop->location.id >= 0 &&
           prop->location.id < VRAM_DEVICES_MAX && !prop->win32HandleMetaData;
}

static bool serving(void)
{
    return !vram_heap_is_exiting() && !vram_capture_active();
}

bool vram_virtual_create(CUmemGenericAllocationHandle *ret_handle, size_t size, const CUmemAllocationProp *prop,
                         unsigned long long flags)
{
    struct vram_physical_class *c;
    struct vram_physical *p = NULL;
    if (!ret_handle || !usual(prop) || !serving())
        return false;
    const struct vram_physical_key key = {*prop, size, flags};
    vram_lock(VRAM_RANK_HEAP);
    all()->asked++;
    HASH_FIND(hh, all()->classes, &key, sizeof(key), c);
    if (c && (p = c->kept) != NULL) {
        all()->hits++;
        p->held = true;
        settle(p);
        last_given = p->handle;
        *ret_handle = p->handle;
    }
    vram_unlock(VRAM_RANK_HEAP);
    return p != NULL;
}

void vram_virtual_created(CUmemGenericAllocationHandle handle, size_t size, const CUmemAllocationProp *prop,
                          unsigned long long flags)
{
    if (!usual(prop))
        return;
    const struct vram_physical_key key = {*prop, size, flags};
    last_given = 0;
    vram_lock(VRAM_RANK_HEAP);
    struct vram_physical_class *c = need_class(&key);
    struct vram_physical *p = c && !find(handle) ? vram_meta_alloc(sizeof(*p)) : NULL;
    if (p) {
        *p = (struct vram_physical){.handle = handle, .of = c, .held = true};
        HASH_ADD(hh, all()->physical, handle, sizeof(handle), p);
        if (!p->hh.tbl)
            vram_meta_free(p, sizeof(*p)); /* then it is not kept */
    }
    vram_unlock(VRAM_RANK_HEAP);
}

/* Over the limit, it goes. Under HEAP, which it may give up. */
static void keep_within_limit(struct vram_physical *p)
{
    if (p->kept && (books_of(p)->virtual_kept > vram_options->virtual_cache || !serving()))
        undo(p);
}

/* The physical memory is forgotten; where it is mapped, no pair is left. Under HEAP. */
static void forget(struct vram_physical *p)
{
    if (p->at) {
        p->at->odd = true;
        part(p);
    }
    HASH_DELETE(hh, all()->physical, p);
    vram_meta_free(p, sizeof(*p));
}

bool vram_virtual_release(CUmemGenericAllocationHandle handle, CUresult *ret_result)
{
    bool answered = true;
    *ret_result = CUDA_SUCCESS;
    vram_lock(VRAM_RANK_HEAP);
    await_undoing();
    struct vram_physical *p = find(handle);
    if (p && !p->held) {
        *ret_result = CUDA_ERROR_INVALID_VALUE; /* released already: to the program there is no such handle */
    } else if (p && may_keep(p) && serving()) {
        p->held = false;
        settle(p);
        keep_within_limit(p);
    } else {
        answered = false;
        if (p && p->at && !p->at->mapped)
            undo(p); /* before the driver hears of the release, as the program had it */
        if (p && (p = find(handle)) != NULL)
            forget(p);
    }
    vram_unlock(VRAM_RANK_HEAP);
    return answered;
}

/* Takes the addresses of a pair that the program has given up, if they fit. Under HEAP. */
static bool take_addresses(struct vram_reservation *r, size_t size, size_t alignment)
{
    if (!r || r->held || !r->behind || r->size != size || (alignment && r->addr & (alignment - 1)))
        return false;
    r->held = true;
    return true;
}

bool vram_virtual_reserve(CUdeviceptr *ret_ptr, size_t size, size_t alignment)
{
    if (!ret_ptr || !serving())
        return false;
    vram_lock(VRAM_RANK_HEAP);
    const struct vram_physical *p = last_given ? find(last_given) : NULL;
    struct vram_reservation *r = p ? p->at : NULL;
    last_given = 0;
    bool taken = take_addresses(r, size, alignment);
    if (taken)
        *ret_ptr = r->addr;
    vram_unlock(VRAM_RANK_HEAP);
    return taken;
}

void vram_virtual_reserved(CUdeviceptr ptr, size_t size)
{
    vram_lock(VRAM_RANK_HEAP);
    struct vram_reservation *r = find_at(ptr);
    if (r) { /* given up without our seeing it */
        if (r->behind) {
            r->behind->shared = true;
            part(r->behind);
        }
        HASH_DELETE(hh, all()->reservations, r);
        vram_meta_free(r, sizeof(*r));
    }
    r = vram_meta_alloc(sizeof(*r));
    if (r) {
        *r = (struct vram_reservation){.addr = ptr, .size = size, .held = true};
        HASH_ADD(hh, all()->reservations, addr, sizeof(r->addr), r);
        if (!r->hh.tbl)
            vram_meta_free(r, sizeof(*r));
    }
    vram_unlock(VRAM_RANK_HEAP);
}

bool vram_virtual_free(CUdeviceptr ptr, size_t size, CUresult *ret_result, bool *ret_taken_out)
{
    bool answered = true;
    *ret_taken_out = false;
    *ret_result = CUDA_SUCCESS;
    vram_lock(VRAM_RANK_HEAP);
    await_undoing();
    struct vram_reservation *r = find_at(ptr);
    if (r && !r->held) {
        *ret_result = CUDA_ERROR_INVALID_VALUE;
    } else if (r && is_spare(r) && r->size == size && serving()) {
        r->held = false;
    } else {
        answered = false;
        clear(ptr, size);
        r = find_at(ptr);
        if (r && r->size == size && !r->behind) {
            *ret_taken_out = true;
            HASH_DELETE(hh, all()->reservations, r);
            vram_meta_free(r, sizeof(*r));
        }
    }
    vram_unlock(VRAM_RANK_HEAP);
    return answered;
}

void vram_virtual_not_freed(CUdeviceptr ptr, size_t size)
{
    vram_virtual_reserved(ptr, size);
    vram_lock(VRAM_RANK_HEAP);
    struct vram_reservation *r = find_at(ptr);
    if (r)
        r->odd = true; /* something is in it that we do not know of */
    vram_unlock(VRAM_RANK_HEAP);
}

bool vram_virtual_map(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                      unsigned long long flags)
{
    vram_lock(VRAM_RANK_HEAP);
    await_undoing();
    struct vram_physical *p = find(handle);
    struct vram_reservation *r = find_at(ptr);
    bool there = p && r && p->at == r && p->held && r->held && !r->mapped && size == size_of(p) && !offset && !flags;
    if (there) {
        r->mapped = true;
    } else {
        clear(ptr, size);
        p = find(handle);
        if (p && p->at && !p->at->mapped)
            undo(p);
    }
    vram_unlock(VRAM_RANK_HEAP);
    return there;
}

void vram_virtual_mapped(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle)
{
    vram_lock(VRAM_RANK_HEAP);
    struct vram_physical *p = find(handle);
    struct vram_reservation *r = containing(ptr);
    if (p && r && !p->at && !p->shared && !r->behind && !r->odd && r->addr == ptr && size == size_of(p) && !offset) {
        p->at = r;
        r->behind = p;
        r->mapped = true;
        r->access_count = 0;
        r->access_forgotten = false;
    } else {
        if (p)
            p->shared = true;
        if (r && !r->behind)
            r->odd = true;
        else if (r)
            r->access_forgotten = true; /* a second mapping beside the pair */
    }
    vram_unlock(VRAM_RANK_HEAP);
}

bool vram_virtual_unmap(CUdeviceptr ptr, size_t size)
{
    vram_lock(VRAM_RANK_HEAP);
    await_undoing();
    struct vram_reservation *r = find_at(ptr);
    struct vram_physical *p = r ? r->behind : NULL;
    bool kept = p && r->mapped && size == size_of(p) && may_keep(p) && serving();
    if (kept) {
        r->mapped = false;
        settle(p);
        keep_within_limit(p);
    } else {
        clear(ptr, size);
    }
    vram_unlock(VRAM_RANK_HEAP);
    return kept;
}

/* The program has unmapped a pair at the driver. Under HEAP, which it may give up. */
static void unmapped(struct vram_physical *p)
{
    CUmemGenericAllocationHandle handle = p->handle;
    part(p);
    if (p->held)
        return;
    /* Its release was only noted; with the mapping gone, it is due. */
    HASH_DELETE(hh, all()->physical, p);
    vram_meta_free(p, sizeof(*p));
    vram_unlock(VRAM_RANK_HEAP);
    VRAM_DRV(cuMemRelease)(handle);
    vram_lock(VRAM_RANK_HEAP);
}

void vram_virtual_unmapped(CUdeviceptr ptr, size_t size)
{
    vram_lock(VRAM_RANK_HEAP);
    struct vram_reservation *r = find_at(ptr);
    if (r && r->behind && size == size_of(r->behind)) {
        if (r->mapped)
            unmapped(r->behind);
    } else {
        do {
            for (r = all()->reservations; r; r = r->hh.next)
                if (r->behind && r->mapped && r->addr >= ptr && r->addr - ptr < size)
                    break;
            if (r)
                unmapped(r->behind);
        } while (r);
    }
    vram_unlock(VRAM_RANK_HEAP);
}

bool vram_virtual_access(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count)
{
    vram_lock(VRAM_RANK_HEAP);
    await_undoing();
    const struct vram_reservation *r = find_at(ptr);
    bool same = desc && r && r->behind && r->mapped && size == size_of(r->behind) && count &&
                count == r->access_count && !r->access_forgotten && memcmp(desc, r->access, count * sizeof(*desc)) == 0;
    if (!same)
        clear(ptr, size); /* to the program, what it has given up is not mapped, and access to it is an error */
    vram_unlock(VRAM_RANK_HEAP);
    return same;
}

void vram_virtual_accessed(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count)
{
    vram_lock(VRAM_RANK_HEAP);
    for (struct vram_reservation *r = all()->reservations; r; r = r->hh.next) {
        if (!r->behind || r->addr + size_of(r->behind) <= ptr || r->addr >= ptr + size)
            continue;
        if (r->access_count || r->access_forgotten || r->addr != ptr || size != size_of(r->behind) ||
            count > VRAM_ACCESS_MAX) {
            r->access_forgotten = true; /* what was given before goes on beside it */
            continue;
        }
        r->access_count = (unsigned)count;
        memcpy(r->access, desc, count * sizeof(*desc));
    }
    vram_unlock(VRAM_RANK_HEAP);
}

/* Under HEAP. */
static void share(struct vram_physical *p)
{
    if (!p || p->shared)
        return;
    p->shared = true;
    if (p->at && !p->at->mapped && p->held)
        undo(p);
}

void vram_virtual_shared(CUmemGenericAllocationHandle handle)
{
    vram_lock(VRAM_RANK_HEAP);
    await_undoing();
    share(find(handle));
    vram_unlock(VRAM_RANK_HEAP);
}

void vram_virtual_shared_at(uint64_t address)
{
    vram_lock(VRAM_RANK_HEAP);
    await_undoing();
    struct vram_reservation *r = containing(address);
    if (r && r->behind && r->mapped)
        share(r->behind);
    vram_unlock(VRAM_RANK_HEAP);
}

void vram_virtual_retained(CUmemGenericAllocationHandle handle, uint64_t address)
{
    vram_virtual_shared_at(address);
    vram_lock(VRAM_RANK_HEAP);
    struct vram_physical *p = find(handle);
    bool due = p && !p->held; /* the driver has counted one reference more than the program */
    if (due)
        p->held = true;
    vram_unlock(VRAM_RANK_HEAP);
    if (due)
        VRAM_DRV(cuMemRelease)(handle);
}

bool vram_virtual_is_spare(uint64_t address)
{
    const struct vram_reservation *r = containing(address);
    return r && is_spare(r) && address - r->addr < size_of(r->behind);
}

uint64_t vram_virtual_trim(int device)
{
    uint64_t bytes = 0;
    bool more = vram_virtual_on();
    while (more && vram_gate_enter()) {
        struct vram_physical *p = NULL;
        vram_lock(VRAM_RANK_HEAP);
        for (struct vram_physical_class *c = all()->classes; c && !p && !vram_heap_is_exiting(); c = c->hh.next)
            if (device == VRAM_EVERY_DEVICE || c->key.prop.location.id == device)
                p = c->kept;
        more = p != NULL;
        if (p) {
            uint64_t size = size_of(p);
            more = undo(p);
            bytes += more ? size : 0;
        }
        vram_unlock(VRAM_RANK_HEAP);
        vram_gate_leave();
    }
    return bytes;
}

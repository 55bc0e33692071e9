#include "memory.h"

#include "context.h"
#include "graphmem.h"
#include "judge.h"
#include "pool.h"
#include "sim.h"
#include "vmm.h"
#include "work.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define GRANULES (SIM_PAGE / SIM_GRANULE)
#define KEPT_BELOW ((size_t)16 << 20)
#define LOW_PAGES 32 /* of the arena for the 32-bit entries */

/* A stretch of address space in pages; a page belongs to nobody, to one chunk of small blocks, or to one large block.
 */
struct sim_arena {
    uint64_t base;
    size_t pages;
    struct page {
        struct sim_chunk *chunk;
        struct sim_block *block;
    } * page;
    size_t first_free; /* no page below is free */
};
static struct sim_arena arenas[SIM_MAX_DEVICES][2]; /* [.][1]: below 4 GiB */

struct sim_chunk {
    uint64_t address;
    struct sim_arena *arena;
    int device;
    CUmemoryPool pool; /* NULL: its memory is the context's own */
    struct sim_chunk **list;
    unsigned int used;    /* granules */
    unsigned int longest; /* no free run is longer, in granules */
    struct sim_block *granule[GRANULES];
    bool hidden_granule[GRANULES]; /* taken by a block on its way out */
    struct sim_chunk *next;        /* in *list, by rising address */
};

/* Everything that is not device memory, by rising address. */
static struct sim_block **foreign;
static size_t foreign_count, foreign_size;

#ifndef MAP_32BIT /* of x86 alone: elsewhere the entries of CUDA 2 give away half of an address, as their callers must know */
#define MAP_32BIT 0
#endif

static struct sim_arena *arena_of(int device, bool low)
{
    struct sim_arena *a = &arenas[device][low];
    if (a->base)
        return a;
    /* Twice the capacity, so that holes in the addresses never refuse what fits in the memory. */
    size_t pages = low ? LOW_PAGES : 2 * (sim.config.capacity / SIM_PAGE) + 2;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (low ? MAP_32BIT : 0);
    char *p = mmap(NULL, (pages + 1) * SIM_PAGE, PROT_READ | PROT_WRITE, flags, -1, 0);
    void *table =
        mmap(NULL, pages * sizeof *a->page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED || table == MAP_FAILED)
        return NULL;
    madvise(p, (pages + 1) * SIM_PAGE, MADV_DONTDUMP);
    a->base = ((uint64_t)(uintptr_t)p + SIM_PAGE - 1) / SIM_PAGE * SIM_PAGE;
    a->pages = pages;
    a->page = table;
    return a;
}

CUresult sim_memory_take(int device, size_t size)
{
    if (size > sim.config.capacity - sim.device[device].used)
        sim_vmm_reclaim();
    uint64_t avail = sim.config.capacity - sim.device[device].used;
    if (size > avail && sim_pool_spare(device, size - avail) < size - avail)
        return CUDA_ERROR_OUT_OF_MEMORY;
    sim.device[device].used += size;
    return CUDA_SUCCESS;
}

void sim_memory_give(int device, size_t size)
{
    sim.device[device].used -= size;
}

static CUresult take(int device, CUmemoryPool pool, size_t size)
{
    return pool ? sim_pool_back(pool, size) : sim_memory_take(device, size);
}

static void give(int device, CUmemoryPool pool, size_t size)
{
    if (pool)
        sim_pool_unback(pool, size);
    else
        sim_memory_give(device, size);
}

/* Lowest address first. */
static struct page *take_pages(struct sim_arena *a, size_t count)
{
    size_t run = 0;
    for (size_t i = a->first_free; i < a->pages; i++) {
        if (a->page[i].chunk || a->page[i].block) {
            if (run == 0 && i == a->first_free)
                a->first_free++;
            run = 0;
            if (a->page[i].block) /* over the rest of it in one step */
                i = (a->page[i].block->map_address - a->base + a->page[i].block->map_size) / SIM_PAGE - 1;
        } else if (++run == count) {
            return &a->page[i + 1 - count];
        }
    }
    return NULL;
}

static uint64_t page_address(const struct sim_arena *a, const struct page *p)
{
    return a->base + (uint64_t)(p - a->page) * SIM_PAGE;
}

static void drop_pages(struct sim_arena *a, uint64_t address, size_t size)
{
    size_t first = (address - a->base) / SIM_PAGE;
    memset(&a->page[first], 0, size / SIM_PAGE * sizeof *a->page);
    if (first < a->first_free)
        a->first_free = first;
    /* Host memory goes back where it counts; for small blocks the page faults of the next use would cost more. */
    if (size >= KEPT_BELOW)
        madvise((void *)(uintptr_t)address, size, MADV_DONTNEED);
}

static CUresult chunk_create(const struct sim_block *b, struct sim_chunk **list, struct sim_chunk **ret)
{
    struct page *page = take_pages(b->arena, 1);
    CUresult r = page ? take(b->device, b->pool, SIM_PAGE) : CUDA_ERROR_OUT_OF_MEMORY;
    if (r)
        return r;
    struct sim_chunk *c = sim_xcalloc(sizeof *c), **at = list;
    *c = (struct sim_chunk){.address = page_address(b->arena, page),
                            .arena = b->arena,
                            .device = b->device,
                            .pool = b->pool,
                            .list = list,
                            .longest = GRANULES};
    page->chunk = c;
    while (*at && (*at)->address < c->address)
        at = &(*at)->next;
    c->next = *at;
    *at = c;
    *ret = c;
    return CUDA_SUCCESS;
}

static void chunk_destroy(struct sim_chunk *c)
{
    struct sim_chunk **at = c->list;
    while (*at != c)
        at = &(*at)->next;
    *at = c->next;
    drop_pages(c->arena, c->address, SIM_PAGE);
    give(c->device, c->pool, SIM_PAGE);
    free(c);
}

/* First free run of n granules, or GRANULES. */
static unsigned int chunk_fit(struct sim_chunk *c, unsigned int n)
{
    unsigned int run = 0, longest = 0;
    if (n > c->longest || n > GRANULES - c->used)
        return GRANULES;
    for (unsigned int i = 0; i < GRANULES; i++) {
        run = c->granule[i] || c->hidden_granule[i] ? 0 : run + 1;
        if (run == n)
            return i + 1 - n;
        if (run > longest)
            longest = run;
    }
    c->longest = longest;
    return GRANULES;
}

static bool ends_with_context(const struct sim_block *b)
{
    return b->ctx && b->kind != MEMORY_POOL && b->kind != MEMORY_GRAPH;
}

static void enlist(struct sim_block *b)
{
    static uint64_t buffer_id;
    b->buffer_id = ++buffer_id;
    if (!ends_with_context(b))
        return;
    b->next = b->ctx->blocks;
    if (b->next)
        b->next->prev = b;
    b->ctx->blocks = b;
}

static CUresult alloc_small(struct sim_block *b)
{
    unsigned int n = (unsigned int)((b->size + SIM_GRANULE - 1) / SIM_GRANULE), at = GRANULES;
    struct sim_chunk *c, **list = b->pool ? &b->pool->chunks : &b->ctx->chunks;
    for (c = *list; c; c = c->next)
        if (c->arena == b->arena && (at = chunk_fit(c, n)) < GRANULES)
            break;
    if (!c) {
        CUresult r = chunk_create(b, list, &c);
        if (r)
            return r;
        at = 0;
    }
    b->chunk = c;
    b->address = c->address + at * SIM_GRANULE;
    b->map_address = c->address;
    b->map_size = SIM_PAGE;
    for (unsigned int i = at; i < at + n; i++)
        c->granule[i] = b;
    c->used += n;
    return CUDA_SUCCESS;
}

static CUresult alloc_large(struct sim_block *b)
{
    size_t size = (b->size + SIM_PAGE - 1) / SIM_PAGE * SIM_PAGE;
    bool counts = b->kind != MEMORY_GRAPH;
    CUresult r = counts ? take(b->device, b->pool, size) : CUDA_SUCCESS;
    if (r)
        return r;
    struct page *page = take_pages(b->arena, size / SIM_PAGE);
    if (!page) {
        if (counts)
            give(b->device, b->pool, size);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    b->address = b->map_address = page_address(b->arena, page);
    b->map_size = size;
    for (size_t i = 0; i < size / SIM_PAGE; i++)
        page[i].block = b;
    return CUDA_SUCCESS;
}

static CUresult alloc(struct sim_block block, bool low, struct sim_block **ret)
{
    block.arena = arena_of(block.device, low);
    if (!block.arena || block.size > sim.config.capacity)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct sim_block *b = sim_xcalloc(sizeof *b);
    *b = block;
    CUresult r = b->size < SIM_PAGE && b->kind != MEMORY_GRAPH ? alloc_small(b) : alloc_large(b);
    if (r) {
        free(b);
        return r;
    }
    enlist(b);
    *ret = b;
    return CUDA_SUCCESS;
}

CUresult sim_memory_alloc(CUcontext ctx, size_t size, enum sim_memory_kind kind, bool low, struct sim_block **ret)
{
    return alloc((struct sim_block){.size = size, .kind = kind, .ctx = ctx, .device = ctx->device}, low, ret);
}

CUresult sim_memory_alloc_pool(CUcontext ctx, CUmemoryPool pool, size_t size, struct sim_block **ret)
{
    struct sim_block block = {.size = size, .kind = MEMORY_POOL, .ctx = ctx, .device = pool->device, .pool = pool};
    return alloc(block, false, ret);
}

/* Index of the first foreign block that ends above the address. */
static size_t foreign_at(uint64_t address)
{
    size_t a = 0, b = foreign_count;
    while (a < b) {
        size_t m = (a + b) / 2;
        if (foreign[m]->address + foreign[m]->size > address)
            b = m;
        else
            a = m + 1;
    }
    return a;
}

struct sim_block *sim_memory_adopt(CUcontext ctx, uint64_t address, size_t size, enum sim_memory_kind kind)
{
    struct sim_block *b = sim_xcalloc(sizeof *b);
    *b = (struct sim_block){.address = address,
                            .size = size,
                            .kind = kind,
                            .ctx = ctx,
                            .map_address = address,
                            .map_size = size,
                            .device = ctx ? ctx->device : 0};
    if (foreign_count == foreign_size) {
        foreign_size = foreign_size ? foreign_size * 2 : 64;
        foreign = sim_xrealloc(foreign, foreign_size * sizeof(struct sim_block *));
    }
    size_t i = foreign_at(address);
    memmove(&foreign[i + 1], &foreign[i], (foreign_count++ - i) * sizeof(struct sim_block *));
    foreign[i] = b;
    enlist(b);
    return b;
}

static struct sim_arena *arena_with(uint64_t address)
{
    for (int d = 0; d < sim.config.devices; d++)
        for (int low = 0; low < 2; low++)
            if (address - arenas[d][low].base < arenas[d][low].pages * SIM_PAGE && arenas[d][low].base)
                return &arenas[d][low];
    return NULL;
}

bool sim_memory_is_device(uint64_t address)
{
    return arena_with(address) != NULL;
}

struct sim_block *sim_memory_find(uint64_t address)
{
    struct sim_block *b = NULL;
    struct sim_arena *a = arena_with(address);
    if (a) {
        struct page *p = &a->page[(address - a->base) / SIM_PAGE];
        b = p->chunk ? p->chunk->granule[(address - p->chunk->address) / SIM_GRANULE] : p->block;
    } else {
        size_t i = foreign_at(address);
        b = i < foreign_count && foreign[i]->address <= address ? foreign[i] : NULL;
    }
    return b && address - b->address < b->size ? b : NULL;
}

bool sim_memory_covers(uint64_t low, uint64_t high)
{
    /* Mappings of VMM memory may lie side by side and count as one; so do all others, only that they never touch. */
    while (low < high) {
        struct sim_block *b = sim_memory_find(low);
        if (!b || b->no_access || (b->kind != MEMORY_MAPPED && b->address + b->size < high))
            return false;
        low = b->address + b->size;
    }
    return true;
}

bool sim_memory_reachable(uint64_t low, uint64_t high)
{
    struct sim_arena *a = arena_with(low);
    return (a && high <= a->base + a->pages * SIM_PAGE) || sim_memory_covers(low, high);
}

void sim_memory_hide(struct sim_block *b)
{
    if (ends_with_context(b)) {
        if (b->prev)
            b->prev->next = b->next;
        else
            b->ctx->blocks = b->next;
        if (b->next)
            b->next->prev = b->prev;
        b->prev = b->next = NULL;
    }
    if (!b->arena) {
        size_t i = foreign_at(b->address);
        memmove(&foreign[i], &foreign[i + 1], (--foreign_count - i) * sizeof(struct sim_block *));
    } else if (b->chunk) {
        size_t first = (b->address - b->chunk->address) / SIM_GRANULE;
        for (size_t i = first; i < GRANULES && b->chunk->granule[i] == b; i++) {
            b->chunk->granule[i] = NULL;
            b->chunk->hidden_granule[i] = true;
        }
    } else {
        b->size = 0; /* its pages stay taken, no address is inside it */
    }
}

void sim_memory_release(struct sim_block *b)
{
    if (b->chunk) {
        struct sim_chunk *c = b->chunk;
        size_t first = (b->address - c->address) / SIM_GRANULE, n = (b->size + SIM_GRANULE - 1) / SIM_GRANULE;
        memset(&c->hidden_granule[first], 0, n);
        c->used -= (unsigned int)n;
        c->longest = GRANULES;
        if (!c->used)
            chunk_destroy(c);
    } else if (b->arena) {
        drop_pages(b->arena, b->map_address, b->map_size);
        if (b->kind != MEMORY_GRAPH)
            give(b->device, b->pool, b->map_size);
    } else if (b->kind == MEMORY_HOST || b->kind == MEMORY_EXTERNAL || b->kind == MEMORY_IPC) {
        munmap((void *)(uintptr_t)b->map_address, b->map_size);
    }
    free(b);
}

void sim_memory_end_context(CUcontext ctx)
{
    for (struct sim_block *b = ctx->blocks, *next; b; b = next) {
        next = b->next;
        sim_judge_release(b->address, b->address + b->size, false);
        sim_memory_hide(b);
        sim_memory_release(b);
    }
}

void sim_memory_wait_owner(CUcontext owner)
{
    struct vclock at = {0};
    sim_work_context_clock(owner, &at);
    for (size_t i = 0; i < owner->accessor_count; i++)
        if (owner->accessors[i]->alive)
            sim_work_context_clock(owner->accessors[i], &at);
    sim_work_wait(&at);
    sim_vclock_clear(&at);
}

CUresult sim_memory_retire(struct sim_block *b)
{
    uint64_t low = b->address, high = low + b->size;
    /* Pool memory may have outlived its context. */
    CUcontext owner = b->ctx->alive ? b->ctx : sim_context_current();
    sim_pool_forget(b);
    sim_memory_hide(b); /* before the wait gives the lock up: a second free of it must not find it */
    if (owner)
        sim_memory_wait_owner(owner);
    sim_judge_release(low, high, true);
    sim_memory_release(b);
    return owner ? owner->error : CUDA_SUCCESS;
}

CUresult sim_memory_free(uint64_t address, bool host)
{
    CUcontext current = sim_context_current();
    if (current && current->alive && current->error) /* before the address is looked at, once it is known (measured) */
        return current->error;
    if (!address)
        return host ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    if (current && !current->alive)
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    struct sim_block *b = sim_memory_find(address);
    if (!b || b->address != address || (host ? b->kind != MEMORY_HOST : b->kind > MEMORY_EXTERNAL) ||
        (b->kind == MEMORY_GRAPH && !sim_graph_memory_live(b))) {
        sim.refused_frees++;
        return CUDA_ERROR_INVALID_VALUE;
    }
    sim_work_poll();
    if (b->ctx->alive && b->ctx->error)
        return b->ctx->error;
    return b->kind == MEMORY_GRAPH ? sim_graph_memory_free(b) : sim_memory_retire(b);
}

#define CONTROL __attribute__((visibility("default")))

CONTROL uint64_t sim_used(int device)
{
    sim_lock();
    sim_vmm_reclaim();
    uint64_t n = device >= 0 && device < SIM_MAX_DEVICES ? sim.device[device].used : 0;
    sim_unlock();
    return n;
}

CONTROL int sim_is_allocated(uint64_t address)
{
    sim_lock();
    int yes = sim_memory_find(address) != NULL;
    sim_unlock();
    return yes;
}

CONTROL unsigned long sim_refused_frees(void)
{
    sim_lock();
    unsigned long n = sim.refused_frees;
    sim_unlock();
    return n;
}

#include "base/meta.h"

#include <sys/mman.h>

#include "base/check.h"
#include "base/compiler.h"
#include "base/lock.h"

enum { MIN_SHIFT = 4, MAX_SHIFT = 15, CLASSES = MAX_SHIFT - MIN_SHIFT + 1, ARENA = 256 * 1024 };

struct free_slot {
    struct free_slot *next;
};

/* Stands at the start of every mapping, arena or large, so that a child can unmap them all. */
struct mapping {
    struct mapping *next, *prev;
    size_t size;
    size_t pad; /* keeps what follows 16-byte aligned */
};

/* All under META. */
static struct free_slot *free_lists[CLASSES];
static char *bump, *bump_end;
static struct mapping mappings = {&mappings, &mappings, 0, 0};
static uint64_t mapped;

static int class_of(size_t size)
{
    if (size <= (size_t)1 << MIN_SHIFT)
        return 0;
    return 64 - __builtin_clzl(size - 1) - MIN_SHIFT;
}

static struct mapping *map(size_t size)
{
    struct mapping *m = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (m == MAP_FAILED)
        return NULL;
    m->size = size;
    m->next = mappings.next;
    m->prev = &mappings;
    mappings.next->prev = m;
    mappings.next = m;
    mapped += size;
    return m;
}

static void unmap(struct mapping *m)
{
    m->next->prev = m->prev;
    m->prev->next = m->next;
    mapped -= m->size;
    munmap(m, m->size);
}

static size_t large_size(size_t size) { return (size + sizeof(struct mapping) + 4095) & ~(size_t)4095; }

static void *carve(int class)
{
    size_t size = (size_t)1 << (class + MIN_SHIFT);
    if ((size_t)(bump_end - bump) < size) {
        struct mapping *m = map(ARENA);
        if (!m)
            return NULL;
        bump = (char *)(m + 1);
        bump_end = (char *)m + ARENA;
    }
    void *p = bump;
    bump += size;
    return p;
}

void *vram_meta_alloc(size_t size)
{
    void *p = NULL;
    vram_lock(VRAM_RANK_META);
    if (size > (size_t)1 << MAX_SHIFT) {
        struct mapping *m = size < SIZE_MAX - 8192 ? map(large_size(size)) : NULL;
        p = m ? m + 1 : NULL;
    } else {
        int class = class_of(size);
        if (free_lists[class]) {
            p = free_lists[class];
            free_lists[class] = free_lists[class]->next;
        } else {
            p = carve(class);
        }
    }
    vram_unlock(VRAM_RANK_META);
    return p;
}

void vram_meta_free(void *ptr, size_t size)
{
    if (!ptr)
        return;
    vram_lock(VRAM_RANK_META);
    if (size > (size_t)1 << MAX_SHIFT) {
        struct mapping *m = (struct mapping *)ptr - 1;
        VRAM_CHECK(m->size == large_size(size));
        unmap(m);
    } else {
        struct free_slot *slot = ptr;
        int class = class_of(size);
        slot->next = free_lists[class];
        free_lists[class] = slot;
    }
    vram_unlock(VRAM_RANK_META);
}

uint64_t vram_meta_bytes(void)
{
    vram_lock(VRAM_RANK_META);
    uint64_t bytes = mapped;
    vram_unlock(VRAM_RANK_META);
    return bytes;
}

void vram_meta_forget(void)
{
    vram_lock(VRAM_RANK_META);
    while (mappings.next != &mappings)
        unmap(mappings.next);
    for (int i = 0; i < CLASSES; i++)
        free_lists[i] = NULL;
    bump = bump_end = NULL;
    vram_unlock(VRAM_RANK_META);
}

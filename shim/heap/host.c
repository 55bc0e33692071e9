#include "heap/host.h"

#include "base/check.h"
#include "base/lock.h"
#include "base/meta.h"
#include "config/options.h"
#include "driver/capture.h"
#include "driver/driver.h"
#include "heap/families.h"
#include "heap/heap.h"
#include "heap/life.h"

enum { LIVES = 64 };

static struct vram_host_cache *cache(void)
{
    return &vram_heap.host;
}

static bool at_work(void)
{
    return vram_options->host_cache && vram_options->cache && !vram_capture_active() && !vram_heap_is_exiting();
}

static struct vram_host_class *find_class(const struct vram_host_key *key)
{
    struct vram_host_class *c;
    HASH_FIND(hh, cache()->classes, key, sizeof(*key), c);
    return c;
}

static struct vram_host_class *need_class(const struct vram_host_key *key)
{
    struct vram_host_class *c = find_class(key);
    if (c || !(c = vram_meta_alloc(sizeof(*c))))
        return c;
    *c = (struct vram_host_class){.key = *key};
    HASH_ADD(hh, cache()->classes, key, sizeof(c->key), c);
    if (c->hh.tbl)
        return c;
    vram_meta_free(c, sizeof(*c));
    return NULL;
}

static bool put(uint64_t addr, const struct vram_host_key *key)
{
    struct vram_host_class *c = need_class(key);
    struct vram_host_block *b = c ? vram_meta_alloc(sizeof(*b)) : NULL;
    if (!b)
        return false;
    *b = (struct vram_host_block){.addr = addr, .of = c, .next = c->top};
    HASH_ADD(hh, cache()->blocks, addr, sizeof(b->addr), b);
    if (!b->hh.tbl) {
        vram_meta_free(b, sizeof(*b));
        return false;
    }
    c->top = b;
    cache()->count++;
    cache()->bytes += key->size;
    if (cache()->bytes > cache()->peak_bytes)
        cache()->peak_bytes = cache()->bytes;
    return true;
}

/* The block that was kept last. */
static uint64_t pop(struct vram_host_class *c)
{
    struct vram_host_block *b = c->top;
    uint64_t addr = b->addr;
    VRAM_CHECK(cache()->count > 0 && cache()->bytes >= c->key.size);
    c->top = b->next;
    HASH_DELETE(hh, cache()->blocks, b);
    cache()->count--;
    cache()->bytes -= c->key.size;
    vram_meta_free(b, sizeof(*b));
    return addr;
}

void *vram_host_take(CUcontext ctx, size_t size, unsigned flags)
{
    uint64_t addr = 0;
    if (!ctx || !size || !at_work() || vram_life_failed())
        return NULL;
    vram_lock(VRAM_RANK_HEAP);
    const struct vram_life *life = vram_life_find(ctx);
    struct vram_host_class *c = life ? find_class(&(struct vram_host_key){life, size, flags}) : NULL;
    cache()->asked++;
    if (c && c->top) {
        cache()->hits++;
        addr = pop(c);
    }
    vram_unlock(VRAM_RANK_HEAP);
    return (void *)(uintptr_t)addr;
}

bool vram_host_is_kept(uint64_t base)
{
    struct vram_host_block *b;
    HASH_FIND(hh, cache()->blocks, &base, sizeof(base), b);
    return b != NULL;
}

/* Waits for all work of every context. False: there is one that cannot be waited for, or has something to say. Inside
 * the gate. */
static bool settle_all(void)
{
    struct vram_life *lives[LIVES], *life;
    unsigned n = 0;
    vram_lock(VRAM_RANK_HEAP);
    bool good = vram_life_all_known();
    for (life = vram_heap.lives; life && good; life = life->hh.next) {
        if (life->closing || life->uncached || n == LIVES) {
            good = false;
        } else {
            vram_life_pin(life);
            lives[n++] = life;
        }
    }
    vram_unlock(VRAM_RANK_HEAP);
    for (unsigned i = 0; i < n; i++) {
        good = good && vram_life_synchronise(lives[i]) == CUDA_SUCCESS;
        vram_life_unpin(lives[i]);
    }
    return good;
}

/* What the program frees: its holding, where it may be kept. Under HEAP. */
static const struct vram_holding *keepable(void *p, struct vram_host_key *ret_key)
{
    struct vram_name *n = vram_holding_find(&vram_heap.holdings, (struct vram_key){VRAM_AT_HOST, (uintptr_t)p});
    const struct vram_holding *h = n ? n->holding : NULL;
    if (!h || h->family != VRAM_HOST || !h->life || h->identity_left || cache()->bytes >= vram_options->host_cache ||
        h->bytes > vram_options->host_cache - cache()->bytes)
        return NULL;
    *ret_key = (struct vram_host_key){h->life, h->bytes, h->kind};
    return h;
}

bool vram_host_keep(void *p)
{
    struct vram_host_key key;
    if (!p || !at_work())
        return false;
    vram_lock(VRAM_RANK_HEAP);
    bool kept = keepable(p, &key) != NULL;
    vram_unlock(VRAM_RANK_HEAP);
    if (!kept || !vram_gate_enter())
        return false;
    kept = settle_all() && !vram_life_failed();
    if (kept) {
        vram_lock(VRAM_RANK_HEAP);
        /* Looked at again: another thread may have freed it, or its context may be ending. */
        const struct vram_holding *h = keepable(p, &key);
        const struct vram_life *life = h ? h->life : NULL;
        kept = life && !life->closing && put((uintptr_t)p, &key);
        if (kept) {
            struct vram_leaving leaving =
                vram_holding_leave(&vram_heap.holdings, (struct vram_key){VRAM_AT_HOST, (uintptr_t)p});
            vram_holding_left(&vram_heap.holdings, &leaving, false);
        }
        vram_unlock(VRAM_RANK_HEAP);
    }
    vram_gate_leave();
    return kept;
}

void vram_host_identity_left(uint64_t base)
{
    struct vram_name *n = vram_holding_find(&vram_heap.holdings, (struct vram_key){VRAM_AT_HOST, base});
    if (n)
        n->holding->identity_left = true;
}

void vram_host_end_life(const struct vram_life *life)
{
    struct vram_host_class *c, *next;
    HASH_ITER(hh, cache()->classes, c, next)
    {
        if (c->key.life != life)
            continue;
        while (c->top)
            pop(c);
        HASH_DELETE(hh, cache()->classes, c);
        vram_meta_free(c, sizeof(*c));
    }
}

/* Takes one block out, and pins its life. 0: there is none left. */
static uint64_t depart(CUcontext ctx, struct vram_life **ret_life, uint64_t *ret_size)
{
    uint64_t addr = 0;
    vram_lock(VRAM_RANK_HEAP);
    for (struct vram_host_block *b = cache()->blocks; b && !addr; b = b->hh.next) {
        struct vram_host_class *c = b->of;
        struct vram_life *life = vram_life_find(c->key.life->ctx);
        if (!life || life != c->key.life || (ctx && life->ctx != ctx))
            continue;
        *ret_life = life;
        *ret_size = c->key.size;
        vram_life_pin(life);
        addr = pop(c);
    }
    vram_unlock(VRAM_RANK_HEAP);
    return addr;
}

uint64_t vram_host_trim(CUcontext ctx)
{
    uint64_t bytes = 0, addr, size;
    struct vram_life *life;
    if (!vram_options->host_cache)
        return 0;
    while (vram_gate_enter()) {
        addr = vram_heap_is_exiting() ? 0 : depart(ctx, &life, &size);
        if (addr) {
            CUcontext before;
            CUresult r = vram_life_enter(life->ctx, &before);
            if (r == CUDA_SUCCESS) {
                r = VRAM_DRV(cuMemFreeHost)((void *)(uintptr_t)addr);
                vram_life_leave(life->ctx, before);
            }
            bytes += r == CUDA_SUCCESS ? size : 0; /* else the driver keeps it until the context ends */
            vram_life_unpin(life);
        }
        vram_gate_leave();
        if (!addr)
            break;
    }
    return bytes;
}

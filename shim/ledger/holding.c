#include "ledger/holding.h"

#include "base/check.h"
#include "base/meta.h"

struct vram_name *vram_holding_find(const struct vram_holdings *h, struct vram_key key)
{
    struct vram_name *n;
    HASH_FIND(hh, h->names, &key, sizeof(key), n);
    return n;
}

struct vram_name *vram_holding_mapping(const struct vram_holdings *h, uint64_t address)
{
    struct vram_name *n = vram_holding_find(h, (struct vram_key){VRAM_MAPPED_AT, address});
    if (n)
        return n;
    for (n = h->names; n; n = n->hh.next)
        if (n->key.space == VRAM_MAPPED_AT && address - n->key.value < n->size)
            return n;
    return NULL;
}

/* Ends a holding that has neither names nor pins left. */
static bool end_if_unused(struct vram_holding *holding)
{
    if (holding->names || holding->pins)
        return false;
    if (holding->counted)
        vram_figures_less(holding->figures, holding->bytes);
    vram_meta_free(holding, sizeof(*holding));
    return true;
}

static void detach(struct vram_holdings *h, struct vram_name *n)
{
    HASH_DELETE(hh, h->names, n);
    n->holding->names--;
}

static bool attach(struct vram_holdings *h, struct vram_name *n)
{
    HASH_ADD(hh, h->names, key, sizeof(n->key), n);
    if (!n->hh.tbl)
        return false;
    n->holding->names++;
    return true;
}

static void drop(struct vram_holdings *h, struct vram_name *n)
{
    struct vram_holding *holding = n->holding;
    detach(h, n);
    vram_meta_free(n, sizeof(*n));
    end_if_unused(holding);
}

bool vram_holding_name(struct vram_holdings *h, struct vram_key key, uint64_t size, struct vram_holding *holding)
{
    struct vram_name *n = vram_holding_find(h, key);
    if (n && n->holding == holding) {
        n->references++;
        return true;
    }
    if (n)
        drop(h, n);
    n = vram_meta_alloc(sizeof(*n));
    if (!n)
        return false;
    *n = (struct vram_name){.key = key, .size = size, .references = 1, .holding = holding};
    if (attach(h, n))
        return true;
    vram_meta_free(n, sizeof(*n));
    return false;
}

bool vram_holding_born(struct vram_holdings *h, struct vram_key key, const struct vram_holding *what)
{
    struct vram_holding *holding = vram_meta_alloc(sizeof(*holding));
    if (!holding)
        return false;
    *holding = *what;
    holding->names = holding->pins = 0;
    holding->counted = false;
    if (!vram_holding_name(h, key, 0, holding)) {
        vram_meta_free(holding, sizeof(*holding));
        return false;
    }
    holding->counted = true;
    vram_figures_more(holding->figures, holding->bytes);
    return true;
}

void vram_holding_grow(struct vram_holding *holding, uint64_t bytes)
{
    if (bytes <= holding->bytes || !holding->counted)
        return;
    struct vram_figures *f = holding->figures;
    vram_figures_less(f, holding->bytes);
    f->total_bytes -= holding->bytes;
    f->total_count--;
    holding->bytes = bytes;
    vram_figures_more(f, bytes);
}

void vram_holding_pin(struct vram_holding *holding)
{
    holding->pins++;
}

void vram_holding_unpin(struct vram_holding *holding)
{
    VRAM_CHECK(holding->pins > 0);
    holding->pins--;
    end_if_unused(holding);
}

struct vram_leaving vram_holding_leave(struct vram_holdings *h, struct vram_key key)
{
    struct vram_name *n = vram_holding_find(h, key);
    if (!n)
        return (struct vram_leaving){.key = key};
    struct vram_leaving leaving = {key, n->size, n->holding};
    leaving.holding->pins++;
    if (--n->references == 0) {
        detach(h, n);
        vram_meta_free(n, sizeof(*n));
    }
    return leaving;
}

bool vram_holding_left(struct vram_holdings *h, const struct vram_leaving *leaving, bool refused)
{
    struct vram_holding *holding = leaving->holding;
    if (!holding)
        return false;
    struct vram_name *n = vram_holding_find(h, leaving->key);
    /* Somebody else's by now: the driver gave the name out again. A context that ended has taken its holdings' names.
     */
    if (refused && holding->counted && (!n || n->holding == holding))
        vram_holding_name(h, leaving->key, leaving->size, holding);
    holding->pins--;
    return end_if_unused(holding);
}

struct vram_name *vram_holding_unmap(struct vram_holdings *h, uint64_t address, uint64_t size)
{
    struct vram_name *chain = NULL, *n;
    for (uint64_t at = address; at - address < size; at += n->size) {
        n = vram_holding_find(h, (struct vram_key){VRAM_MAPPED_AT, at});
        if (!n || n->size == 0)
            break; /* of an unknown handle; the driver may be of another opinion about what is there */
        detach(h, n);
        n->holding->pins++;
        n->next = chain;
        chain = n;
    }
    return chain;
}

void vram_holding_unmapped(struct vram_holdings *h, struct vram_name *chain, bool refused)
{
    while (chain) {
        struct vram_name *n = chain;
        struct vram_holding *holding = n->holding;
        chain = n->next;
        if (!refused || vram_holding_find(h, n->key) || !attach(h, n))
            vram_meta_free(n, sizeof(*n));
        holding->pins--;
        end_if_unused(holding);
    }
}

void vram_holding_end_life(struct vram_holdings *h, const struct vram_life *life)
{
    struct vram_name *n, *next;
    HASH_ITER(hh, h->names, n, next)
    {
        struct vram_holding *holding = n->holding;
        if (holding->life != life)
            continue;
        if (holding->counted) {
            struct vram_figures *f = holding->figures;
            vram_figures_less(f, holding->bytes);
            f->ended_bytes += holding->bytes;
            f->ended_count++;
            holding->counted = false;
        }
        drop(h, n);
    }
}

void vram_holding_check(const struct vram_holdings *h)
{
#ifdef VRAM_CHECKS
    for (const struct vram_name *n = h->names; n; n = n->hh.next) {
        uint32_t names = 0;
        for (const struct vram_name *other = h->names; other; other = other->hh.next)
            names += other->holding == n->holding;
        VRAM_CHECK(names == n->holding->names && n->references > 0);
    }
#else
    (void)h;
#endif
}

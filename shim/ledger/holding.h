/*
 * Holdings: memory of the families that are accounted for and not kept in the cache. Pure: no driver call, no lock
 * (heap/ holds HEAP), no clock.
 *
 * The driver knows an allocation by an address, a handle or both, some by several: physical memory has a handle for
 * each cuMemRetainAllocationHandle and an address for each mapping, and lives until the last of them is gone. So a
 * holding has names, a name has references, and a holding goes with its last name.
 *
 * As with blocks (law 16), a name leaves before the call of the driver that gives it up, because the driver may hand it
 * out again before the call has come back; what is leaving pins its holding, and comes back if the driver refuses.
 *
 *   invariants: a name is in the table exactly once; holding->names = its names in the table; a holding exists while
 *   names + pins > 0, and is counted in the figures for as long, or until its context ended.
 */
#ifndef VRAM_LEDGER_HOLDING_H
#define VRAM_LEDGER_HOLDING_H

#include <stdbool.h>
#include <stdint.h>

#include "base/hash.h"
#include "ledger/block.h"
#include "ledger/family.h"

/* What a number means to the driver: the same number may be two things. */
enum vram_space {
    VRAM_AT_ADDRESS, /* of a device */
    VRAM_AT_HOST,
    VRAM_MAPPED_AT, /* physical memory, by cuMemMap */
    VRAM_BY_HANDLE, /* physical memory */
    VRAM_BY_ARRAY,  /* CUarray or CUmipmappedArray */
    VRAM_BY_EXTERNAL,
};

struct vram_key {
    uint64_t space, value; /* without padding: it is hashed */
};

struct vram_holding {
    enum vram_family family;
    struct vram_figures *figures; /* of its family on its device; the owner's */
    bool counted;                 /* in the figures */
    uint64_t bytes;
    struct vram_life *life; /* of the context that it ends with, or NULL */
    uint32_t kind;          /* of its family: pinned memory by its flags */
    bool identity_left;     /* exported, or given attributes (law 19) */
    struct vram_site born;
    uint64_t visited; /* by the last walk over names that wanted each holding once */
    uint32_t names, pins;
};

struct vram_name {
    struct vram_key key;
    uint64_t size;       /* of a mapping */
    uint64_t references; /* calls that give it up, until it is gone */
    struct vram_holding *holding;
    struct vram_name *next; /* in a chain of names that are leaving */
    UT_hash_handle hh;
};

struct vram_holdings {
    struct vram_name *names;
};

/* The driver gave a holding under this name. A name that is known already was given up without our seeing it: it is
 * dropped. False: no host memory, nothing is changed. */
bool vram_holding_born(struct vram_holdings *h, struct vram_key key, const struct vram_holding *what);

struct vram_name *vram_holding_find(const struct vram_holdings *h, struct vram_key key);
/* The mapping that contains the address. Slow where it is not the first byte of one. */
struct vram_name *vram_holding_mapping(const struct vram_holdings *h, uint64_t address);

/* One more name, or one more reference to it if it is the holding's already. */
bool vram_holding_name(struct vram_holdings *h, struct vram_key key, uint64_t size, struct vram_holding *holding);

/* A holding's size became known later. */
void vram_holding_grow(struct vram_holding *holding, uint64_t bytes);

void vram_holding_pin(struct vram_holding *holding);
void vram_holding_unpin(struct vram_holding *holding);

/* A name, or one of its references, on its way out. holding NULL: it was not known. */
struct vram_leaving {
    struct vram_key key;
    uint64_t size;
    struct vram_holding *holding;
};
struct vram_leaving vram_holding_leave(struct vram_holdings *h, struct vram_key key);
/* The driver's answer to that. True: it was the holding's last name, and the holding is gone. */
bool vram_holding_left(struct vram_holdings *h, const struct vram_leaving *leaving, bool refused);

/* All mappings that lie in a range, on their way out / the driver's answer. A chain, or NULL. */
struct vram_name *vram_holding_unmap(struct vram_holdings *h, uint64_t address, uint64_t size);
void vram_holding_unmapped(struct vram_holdings *h, struct vram_name *chain, bool refused);

/* A context ended, and all that ends with it. */
void vram_holding_end_life(struct vram_holdings *h, const struct vram_life *life);

void vram_holding_check(const struct vram_holdings *h); /* the invariants, in builds with checks */

#endif

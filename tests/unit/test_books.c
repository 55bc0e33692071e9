/* ledger/ and the books of heap/account.h, against a model that knows only an array. */
#include <criterion/criterion.h>
#include <stdlib.h>

#include "heap/account.h"
#include "ledger/ledger.h"

Test(ledger, finds_what_is_in_it)
{
    struct vram_ledger ledger = {NULL};
    enum { N = 5000 };
    struct vram_block *blocks = calloc(N, sizeof(*blocks));
    for (uint64_t i = 0; i < N; i++) {
        blocks[i].addr = 0x7f0000000000 + i * 512;
        cr_assert(vram_ledger_add(&ledger, &blocks[i]));
    }
    cr_assert_eq(vram_ledger_count(&ledger), N);
    for (uint64_t i = 0; i < N; i++) {
        cr_assert_eq(vram_ledger_find(&ledger, 0x7f0000000000 + i * 512), &blocks[i]);
        cr_assert_null(vram_ledger_find(&ledger, 0x7f0000000000 + i * 512 + 1));
    }
    for (uint64_t i = 0; i < N; i += 2)
        vram_ledger_remove(&ledger, &blocks[i]);
    cr_assert_null(vram_ledger_find(&ledger, blocks[0].addr));
    cr_assert_eq(vram_ledger_find(&ledger, blocks[1].addr), &blocks[1]);
    cr_assert_eq(vram_ledger_count(&ledger), N / 2);
    free(blocks);
}

Test(footprint, as_the_driver_was_measured)
{
    cr_assert_eq(vram_footprint(1), 512);
    cr_assert_eq(vram_footprint(512), 512);
    cr_assert_eq(vram_footprint(VRAM_PAGE - 512), VRAM_PAGE - 512);
    cr_assert_eq(vram_footprint(VRAM_PAGE), VRAM_PAGE);
    cr_assert_eq(vram_footprint(VRAM_PAGE + 1), 2 * VRAM_PAGE);
    cr_assert_eq(vram_footprint((100 << 20) + 1), 102 << 20);
    cr_assert_eq(vram_footprint(UINT64_MAX), UINT64_MAX);
}

/* Pages that would natively be free: each 2 MiB that a cached block covers and no live one does. */
static uint64_t pages_by_hand(struct vram_block *const *b, unsigned n)
{
    uint64_t pages = 0;
    for (unsigned i = 0; i < n; i++) {
        if (b[i]->state != VRAM_CACHED)
            continue;
        if (!vram_is_small(b[i]->capacity)) {
            pages += vram_footprint(b[i]->capacity) >> VRAM_PAGE_SHIFT;
            continue;
        }
        bool first = true, live = false;
        for (unsigned k = 0; k < n; k++) {
            if (!vram_is_small(b[k]->capacity) || b[k]->addr >> VRAM_PAGE_SHIFT != b[i]->addr >> VRAM_PAGE_SHIFT)
                continue;
            live |= b[k]->state != VRAM_CACHED;
            first &= k >= i || b[k]->state != VRAM_CACHED;
        }
        pages += first && !live;
    }
    return pages;
}

Test(books, random_lives_of_blocks_keep_the_equations)
{
    enum { MAX = 120 };
    struct vram_account a = {0};
    struct vram_chunk *chunks = NULL;
    struct vram_block *held[MAX];
    unsigned n = 0;
    srand(11);
    for (int i = 0; i < 20000; i++) {
        unsigned k = n ? (unsigned)rand() % n : 0;
        switch (rand() % 4) {
        case 0:
            if (n < MAX) {
                struct vram_block *b = calloc(1, sizeof(*b));
                bool small = rand() % 2;
                b->capacity = b->size = small ? 1 + (uint64_t)(rand() % 100000) : VRAM_PAGE + (uint64_t)(rand() % (8 << 20));
                b->addr = small ? VRAM_PAGE * (1 + (uint64_t)(rand() % 4)) + 512 * (uint64_t)(rand() % 4000)
                                : VRAM_PAGE * (1000 + 100 * (uint64_t)i);
                b->chunk = small ? vram_chunk_join(&chunks, b->addr) : NULL;
                vram_account_born(&a, b);
                held[n++] = b;
            }
            break;
        case 1:
            if (n && held[k]->state == VRAM_LIVE) {
                held[k]->state = VRAM_CACHED;
                vram_account_cached(&a, held[k]);
            }
            break;
        case 2:
            if (n && held[k]->state == VRAM_CACHED) {
                held[k]->state = VRAM_LIVE;
                held[k]->size = held[k]->capacity - held[k]->capacity / 20;
                vram_account_reused(&a, held[k]);
            }
            break;
        default:
            if (n) {
                vram_account_gone(&a, held[k]);
                vram_chunk_leave(&chunks, held[k]->chunk);
                free(held[k]);
                held[k] = held[--n];
            }
        }
        uint64_t live = 0, held_bytes = 0, cached = 0, wasted = 0;
        for (unsigned m = 0; m < n; m++) {
            held_bytes += held[m]->capacity;
            if (held[m]->state == VRAM_CACHED) {
                cached += held[m]->capacity;
            } else {
                live += held[m]->size;
                wasted += vram_footprint(held[m]->capacity) - vram_footprint(held[m]->size);
            }
        }
        cr_assert_eq(a.live_bytes, live);
        cr_assert_eq(a.held_bytes, held_bytes);
        cr_assert_eq(a.cached_bytes, cached);
        cr_assert_eq(a.wasted_bytes, wasted);
        cr_assert_eq(a.held_blocks, n);
        cr_assert_eq(a.cached_pages, pages_by_hand(held, n));
    }
    while (n) {
        vram_account_gone(&a, held[--n]);
        vram_chunk_leave(&chunks, held[n]->chunk);
    }
    cr_assert_eq(a.cached_pages, 0);
    cr_assert_null(chunks);
}

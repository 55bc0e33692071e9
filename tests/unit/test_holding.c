/* ledger/holding.h and the figures of ledger/family.h. */
#include <criterion/criterion.h>
#include <stdlib.h>

#include "ledger/holding.h"

static struct vram_holdings h;
static struct vram_figures figures[VRAM_FAMILIES];
/* Only told apart. */
static char lives[2];
#define A_LIFE ((struct vram_life *)(void *)&lives[0])
#define ANOTHER_LIFE ((struct vram_life *)(void *)&lives[1])

static struct vram_key key(enum vram_space space, uint64_t value) { return (struct vram_key){space, value}; }

static void born(enum vram_family family, struct vram_key name, uint64_t bytes, struct vram_life *life)
{
    struct vram_holding what = {.family = family, .figures = &figures[family], .bytes = bytes, .life = life};
    cr_assert(vram_holding_born(&h, name, &what));
}

static bool freed(struct vram_key name, bool refused)
{
    struct vram_leaving leaving = vram_holding_leave(&h, name);
    cr_assert(!leaving.holding || !vram_holding_find(&h, name) || vram_holding_find(&h, name)->references > 0);
    return vram_holding_left(&h, &leaving, refused);
}

static void are(enum vram_family family, uint64_t count, uint64_t bytes)
{
    cr_assert_eq(figures[family].count, count, "%llu held", (unsigned long long)figures[family].count);
    cr_assert_eq(figures[family].bytes, bytes, "%llu bytes", (unsigned long long)figures[family].bytes);
    vram_holding_check(&h);
}

Test(holding, is_counted_from_its_birth_to_its_free)
{
    born(VRAM_MANAGED, key(VRAM_AT_ADDRESS, 0x1000), 300, NULL);
    born(VRAM_MANAGED, key(VRAM_AT_ADDRESS, 0x2000), 500, NULL);
    born(VRAM_HOST, key(VRAM_AT_HOST, 0x1000), 7, NULL);
    are(VRAM_MANAGED, 2, 800);
    are(VRAM_HOST, 1, 7);
    cr_assert(freed(key(VRAM_AT_ADDRESS, 0x1000), false));
    are(VRAM_MANAGED, 1, 500);
    are(VRAM_HOST, 1, 7);
    cr_assert_eq(figures[VRAM_MANAGED].peak_bytes, 800);
    cr_assert_eq(figures[VRAM_MANAGED].total_bytes, 800);
    cr_assert_eq(figures[VRAM_MANAGED].total_count, 2);
}

Test(holding, a_free_of_what_is_not_known_changes_nothing)
{
    born(VRAM_ASYNC, key(VRAM_AT_ADDRESS, 0x1000), 300, NULL);
    cr_assert_not(freed(key(VRAM_AT_ADDRESS, 0x1100), false));
    cr_assert_not(freed(key(VRAM_AT_HOST, 0x1000), false));
    cr_assert(freed(key(VRAM_AT_ADDRESS, 0x1000), false));
    cr_assert_not(freed(key(VRAM_AT_ADDRESS, 0x1000), false));
    are(VRAM_ASYNC, 0, 0);
}

Test(holding, a_refused_free_leaves_it_as_it_was)
{
    born(VRAM_ARRAY, key(VRAM_BY_ARRAY, 5), 300, NULL);
    cr_assert_not(freed(key(VRAM_BY_ARRAY, 5), true));
    are(VRAM_ARRAY, 1, 300);
    cr_assert(freed(key(VRAM_BY_ARRAY, 5), false));
    are(VRAM_ARRAY, 0, 0);
    cr_assert_eq(figures[VRAM_ARRAY].total_count, 1);
}

Test(holding, the_driver_gives_the_name_out_again_before_the_free_came_back)
{
    born(VRAM_ASYNC, key(VRAM_AT_ADDRESS, 0x1000), 300, NULL);
    struct vram_leaving leaving = vram_holding_leave(&h, key(VRAM_AT_ADDRESS, 0x1000));
    are(VRAM_ASYNC, 1, 300);
    born(VRAM_ASYNC, key(VRAM_AT_ADDRESS, 0x1000), 40, NULL);
    are(VRAM_ASYNC, 2, 340);
    cr_assert(vram_holding_left(&h, &leaving, false));
    are(VRAM_ASYNC, 1, 40);

    leaving = vram_holding_leave(&h, key(VRAM_AT_ADDRESS, 0x1000));
    born(VRAM_ASYNC, key(VRAM_AT_ADDRESS, 0x1000), 50, NULL);
    cr_assert(vram_holding_left(&h, &leaving, true), "refused, but the name is somebody else's now");
    are(VRAM_ASYNC, 1, 50);
}

Test(holding, a_name_that_comes_back_was_given_up_unseen)
{
    born(VRAM_MANAGED, key(VRAM_AT_ADDRESS, 0x1000), 300, NULL);
    born(VRAM_ASYNC, key(VRAM_AT_ADDRESS, 0x1000), 40, NULL);
    are(VRAM_MANAGED, 0, 0);
    are(VRAM_ASYNC, 1, 40);
}

Test(holding, physical_memory_lives_until_its_last_handle_and_mapping)
{
    born(VRAM_VIRTUAL, key(VRAM_BY_HANDLE, 9), 4096, NULL);
    struct vram_holding *holding = vram_holding_find(&h, key(VRAM_BY_HANDLE, 9))->holding;
    cr_assert(vram_holding_name(&h, key(VRAM_MAPPED_AT, 0x10000), 4096, holding));
    cr_assert(vram_holding_name(&h, key(VRAM_MAPPED_AT, 0x20000), 4096, holding));
    cr_assert(vram_holding_name(&h, key(VRAM_BY_HANDLE, 9), 0, holding), "retained: the same handle once more");
    cr_assert(vram_holding_name(&h, key(VRAM_BY_HANDLE, 10), 0, holding), "or another");
    are(VRAM_VIRTUAL, 1, 4096);
    cr_assert_not(freed(key(VRAM_BY_HANDLE, 9), false));
    cr_assert_not(freed(key(VRAM_BY_HANDLE, 9), false));
    cr_assert_null(vram_holding_find(&h, key(VRAM_BY_HANDLE, 9)));
    cr_assert_not(freed(key(VRAM_BY_HANDLE, 10), false));
    are(VRAM_VIRTUAL, 1, 4096);
    vram_holding_unmapped(&h, vram_holding_unmap(&h, 0x10000, 4096), false);
    are(VRAM_VIRTUAL, 1, 4096);
    vram_holding_unmapped(&h, vram_holding_unmap(&h, 0x20000, 4096), true);
    are(VRAM_VIRTUAL, 1, 4096);
    vram_holding_unmapped(&h, vram_holding_unmap(&h, 0x20000, 4096), false);
    are(VRAM_VIRTUAL, 0, 0);
}

Test(holding, one_unmapping_for_a_row_of_mappings)
{
    for (uint64_t i = 0; i < 4; i++) {
        born(VRAM_VIRTUAL, key(VRAM_BY_HANDLE, i), 4096, NULL);
        vram_holding_name(&h, key(VRAM_MAPPED_AT, 0x10000 + i * 4096), 4096,
                          vram_holding_find(&h, key(VRAM_BY_HANDLE, i))->holding);
        cr_assert_not(freed(key(VRAM_BY_HANDLE, i), false));
    }
    are(VRAM_VIRTUAL, 4, 4 * 4096);
    cr_assert_eq(vram_holding_mapping(&h, 0x11010), vram_holding_find(&h, key(VRAM_MAPPED_AT, 0x11000)));
    cr_assert_null(vram_holding_mapping(&h, 0x14000));
    vram_holding_unmapped(&h, vram_holding_unmap(&h, 0x11000, 2 * 4096), false);
    are(VRAM_VIRTUAL, 2, 2 * 4096);
    cr_assert_null(vram_holding_unmap(&h, 0x11000, 4096));
    vram_holding_unmapped(&h, vram_holding_unmap(&h, 0x10000, 4096), false);
    vram_holding_unmapped(&h, vram_holding_unmap(&h, 0x13000, 4096), false);
    are(VRAM_VIRTUAL, 0, 0);
}

Test(holding, a_pin_keeps_it_while_the_driver_maps)
{
    born(VRAM_IMPORTED, key(VRAM_BY_HANDLE, 9), 0, NULL);
    struct vram_holding *holding = vram_holding_find(&h, key(VRAM_BY_HANDLE, 9))->holding;
    vram_holding_pin(holding);
    cr_assert_not(freed(key(VRAM_BY_HANDLE, 9), false), "by another thread, meanwhile");
    vram_holding_name(&h, key(VRAM_MAPPED_AT, 0x10000), 4096, holding);
    vram_holding_grow(holding, 4096);
    vram_holding_unpin(holding);
    are(VRAM_IMPORTED, 1, 4096);
    cr_assert_eq(figures[VRAM_IMPORTED].total_count, 1);
    vram_holding_unmapped(&h, vram_holding_unmap(&h, 0x10000, 4096), false);
    are(VRAM_IMPORTED, 0, 0);
}

Test(holding, ends_with_its_context_and_not_with_another)
{
    born(VRAM_MANAGED, key(VRAM_AT_ADDRESS, 0x1000), 300, A_LIFE);
    born(VRAM_MANAGED, key(VRAM_AT_ADDRESS, 0x2000), 500, ANOTHER_LIFE);
    born(VRAM_ASYNC, key(VRAM_AT_ADDRESS, 0x3000), 700, NULL);
    struct vram_leaving leaving = vram_holding_leave(&h, key(VRAM_AT_ADDRESS, 0x1000));
    born(VRAM_ARRAY, key(VRAM_BY_ARRAY, 0x1000), 11, A_LIFE);
    vram_holding_end_life(&h, A_LIFE);
    are(VRAM_MANAGED, 2, 800); /* one of them is at the driver just now */
    cr_assert(vram_holding_left(&h, &leaving, false));
    are(VRAM_MANAGED, 1, 500);
    are(VRAM_ARRAY, 0, 0);
    are(VRAM_ASYNC, 1, 700);
    cr_assert_eq(figures[VRAM_ARRAY].ended_count, 1);
    cr_assert_eq(figures[VRAM_ARRAY].ended_bytes, 11);
    vram_holding_end_life(&h, A_LIFE);
    are(VRAM_MANAGED, 1, 500);
}

Test(figures, never_go_below_nothing)
{
    struct vram_figures f = {0};
    vram_figures_less(&f, 100);
    cr_assert(f.bytes == 0 && f.count == 0);
    vram_figures_more(&f, 50);
    vram_figures_less(&f, 100);
    cr_assert(f.bytes == 0 && f.count == 0);
    vram_figures_more(&f, UINT64_MAX);
    vram_figures_more(&f, UINT64_MAX);
    cr_assert_eq(f.bytes, UINT64_MAX);
    cr_assert_eq(f.peak_bytes, UINT64_MAX);
}

Test(families, each_has_words_of_its_own)
{
    for (int f = 0; f < VRAM_FAMILIES; f++) {
        cr_assert(vram_family_traits[f].words && *vram_family_traits[f].words);
        for (int other = 0; other < f; other++)
            cr_assert_str_neq(vram_family_traits[f].words, vram_family_traits[other].words);
    }
}

/* Any order of births, frees, refusals, mappings and ends of contexts, against counting by hand. */
Test(holding, at_random)
{
    enum { NAMES = 64, STEPS = 200000 };
    static uint64_t held[NAMES];
    uint64_t bytes = 0, count = 0;
    srand(1);
    for (int step = 0; step < STEPS; step++) {
        unsigned i = (unsigned)rand() % NAMES;
        struct vram_key name = key(VRAM_AT_ADDRESS, i * 512);
        if (rand() % 2) {
            uint64_t size = 1 + (uint64_t)rand() % 1000;
            count += !held[i];
            bytes += size - held[i];
            held[i] = size;
            born(VRAM_ASYNC, name, size, i % 2 ? A_LIFE : NULL);
        } else if (rand() % 1000 == 0) {
            for (unsigned odd = 1; odd < NAMES; odd += 2) {
                count -= held[odd] > 0;
                bytes -= held[odd];
                held[odd] = 0;
            }
            vram_holding_end_life(&h, A_LIFE);
        } else {
            bool refused = rand() % 4 == 0;
            cr_assert_eq(freed(name, refused), held[i] && !refused);
            if (!refused) {
                count -= held[i] > 0;
                bytes -= held[i];
                held[i] = 0;
            }
        }
        cr_assert(figures[VRAM_ASYNC].bytes == bytes && figures[VRAM_ASYNC].count == count, "step %d", step);
    }
}

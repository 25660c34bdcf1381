#include "space.h"

/* The progress of the walk. */
typedef struct {
    const space_t* space;
    uint8_t* seen;     /* per unit below the frontier */
    uint64_t num_tags; /* that the free blocks seen so far must have */
    const char* broken;
} walk_t;

static void
hold(walk_t* walk, bool invariant, const char* in_words) {
    if (!invariant && walk->broken == NULL) {
        walk->broken = in_words;
    }
}

static void
see_units(walk_t* walk, uint64_t first, uint64_t num_units) {
    for (uint64_t unit = first; unit < first + num_units; unit++) {
        hold(walk, walk->seen[unit] == 0, "a unit is taken or in one free block");
        walk->seen[unit] = 1;
    }
}

static void
see_block(walk_t* walk, uint32_t first, unsigned order) {
    const space_t* space = walk->space;
    uint64_t num_units = UINT64_C(1) << order;
    hold(walk, first + num_units <= space->frontier, "a free block lies below the frontier");
    if (walk->broken != NULL) {
        return;
    }
    see_units(walk, first, num_units);
    uint64_t sibling = first ^ num_units;
    hold(walk, space->tag[first] == order + 1, "tag[first unit] == order + 1");
    hold(walk, space->tag[first + num_units - 1] == order + 1, "tag[last unit] == order + 1");
    hold(walk, sibling >= space->frontier || space->tag[sibling] != order + 1,
         "two free buddies of one order never exist");
    walk->num_tags += order == 0 ? 1 : 2;
}

static void
see_order(walk_t* walk, unsigned order) {
    const bitmap_t* blocks = &walk->space->free_blocks[order];
    bool is_listed = (walk->space->orders >> order & 1) != 0;
    hold(walk, is_listed == !bitmap_is_empty(blocks), "orders names the sets that are not empty");
    uint32_t index = 0;
    while (walk->broken == NULL && bitmap_next(blocks, index, &index)) {
        see_block(walk, index << order, order);
        index++;
    }
}

static void
see_all_units(walk_t* walk) {
    const space_t* space = walk->space;
    uint64_t num_tags = 0;
    for (uint64_t unit = 0; unit < space->frontier; unit++) {
        hold(walk, walk->seen[unit] != 0, "runs and free blocks cover all below the frontier");
        num_tags += space->tag[unit] != 0;
    }
    for (uint64_t unit = space->frontier; unit < space->peak_frontier; unit++) {
        hold(walk, space->tag[unit] == 0, "no tag lies above the frontier");
    }
    hold(walk, num_tags == walk->num_tags, "only edges of free blocks have a tag");
}

const char*
space_check(const space_t* space, uint8_t* taken) {
    walk_t walk = {.space = space, .seen = taken};
    hold(&walk, space->frontier <= space->peak_frontier, "frontier <= peak_frontier");
    hold(&walk, space->peak_frontier <= space->num_units, "peak_frontier <= num_units");
    hold(&walk, space->frontier == 0 || taken[space->frontier - 1] == 1,
         "the unit below the frontier is taken");
    for (unsigned order = 0; order < SPACE_MAX_ORDERS; order++) {
        see_order(&walk, order);
    }
    see_all_units(&walk);
    return walk.broken;
}

#include "space.h"

#include <assert.h>

enum { NUM_QUICK_PROBES = 4 }; /* gaps looked at before a larger block is split */

static unsigned
floor_log2(uint32_t value) {
    return 31 - (unsigned)__builtin_clz(value);
}

static unsigned
ceil_log2(uint32_t value) {
    return value == 1 ? 0 : floor_log2(value - 1) + 1;
}

static uint32_t
units_of(unsigned order) {
    return UINT32_C(1) << order;
}

size_t
space_num_bytes(uint32_t num_units) {
    size_t num_words = 0;
    for (unsigned order = 0; order < SPACE_MAX_ORDERS; order++) {
        num_words += bitmap_num_words(num_units >> order);
    }
    return num_words * sizeof(uint64_t) + num_units;
}

void
space_init(space_t* space, void* memory, uint32_t num_units) {
    uint64_t* words = memory;
    for (unsigned order = 0; order < SPACE_MAX_ORDERS; order++) {
        words = bitmap_init(&space->free_blocks[order], words, num_units >> order);
    }
    space->tag = (uint8_t*)words;
    space->num_units = num_units;
}

/* ---- blocks ---- */

static void
block_insert(space_t* space, uint32_t first, unsigned order) {
    space->tag[first] = (uint8_t)(order + 1);
    space->tag[first + units_of(order) - 1] = (uint8_t)(order + 1);
    bitmap_set(&space->free_blocks[order], first >> order);
    space->orders |= units_of(order);
}

static void
block_remove(space_t* space, uint32_t first, unsigned order) {
    assert(space->tag[first] == order + 1);
    space->tag[first] = 0;
    space->tag[first + units_of(order) - 1] = 0;
    bitmap_clear(&space->free_blocks[order], first >> order);
    if (bitmap_is_empty(&space->free_blocks[order])) {
        space->orders &= ~units_of(order);
    }
}

/* At a multiple of 2^order a tag of `order` marks a first unit: a last unit is odd. No tag lies at
 * or above the frontier. */
static bool
is_free_block(const space_t* space, uint32_t first, unsigned order) {
    return first < space->frontier && space->tag[first] == order + 1;
}

static void
block_taken_to_free(space_t* space, uint32_t first, unsigned order) {
    while (order + 1 < SPACE_MAX_ORDERS && is_free_block(space, first ^ units_of(order), order)) {
        block_remove(space, first ^ units_of(order), order);
        first &= ~units_of(order);
        order++;
    }
    block_insert(space, first, order);
}

/* ---- runs ---- */

static void
run_taken_to_free(space_t* space, uint32_t first, uint32_t num_units) {
    while (num_units > 0) {
        unsigned order = floor_log2(num_units);
        if (first != 0 && (unsigned)__builtin_ctz(first) < order) {
            order = (unsigned)__builtin_ctz(first);
        }
        block_taken_to_free(space, first, order);
        first += units_of(order);
        num_units -= units_of(order);
    }
}

/* Takes the blocks that cover the run, and gives back the tail of the last one. */
static void
run_free_to_taken(space_t* space, uint32_t first, uint32_t num_units) {
    uint32_t end = first;
    while (end - first < num_units) {
        unsigned order = space->tag[end] - 1u;
        block_remove(space, end, order);
        end += units_of(order);
    }
    run_taken_to_free(space, first + num_units, end - first - num_units);
}

static uint32_t
gap_start(const space_t* space, uint32_t unit) {
    while (unit > 0 && space->tag[unit - 1] != 0) {
        unit -= units_of(space->tag[unit - 1] - 1u);
    }
    return unit;
}

static uint32_t
gap_end(const space_t* space, uint32_t unit) {
    while (unit < space->frontier && space->tag[unit] != 0) {
        unit += units_of(space->tag[unit] - 1u);
    }
    return unit;
}

/* Looks at the gaps around the lowest blocks of this order. */
static bool
probe_order(const space_t* space, unsigned order, uint32_t num_units, uint32_t num_probes,
            uint32_t* first) {
    uint32_t index = 0;
    while (num_probes-- > 0 && bitmap_next(&space->free_blocks[order], index, &index)) {
        *first = gap_start(space, index << order);
        if (gap_end(space, index << order) - *first >= num_units) {
            return true;
        }
        index++;
    }
    return false;
}

/* Blocks too small by themselves may form a gap that is large enough. Any gap of n units contains a
 * whole block of order floor(log2((n + 1) / 2)) or more, so with enough probes none is missed. */
static bool
find_gap(const space_t* space, uint32_t num_units, uint32_t num_probes, uint32_t* first) {
    unsigned order = floor_log2(num_units / 2 + num_units % 2);
    for (; order < ceil_log2(num_units); order++) {
        if (probe_order(space, order, num_units, num_probes, first)) {
            return true;
        }
    }
    return false;
}

/* The lowest one of the smallest blocks that are large enough. */
static bool
find_block(const space_t* space, uint32_t num_units, uint32_t* first) {
    unsigned smallest = ceil_log2(num_units);
    uint32_t orders = smallest < SPACE_MAX_ORDERS ? space->orders >> smallest << smallest : 0;
    if (orders == 0) {
        return false;
    }
    unsigned order = (unsigned)__builtin_ctz(orders);
    uint32_t index = 0;
    bool is_found = bitmap_next(&space->free_blocks[order], 0, &index);
    *first = gap_start(space, index << order);
    return is_found;
}

/* ---- frontier ---- */

static uint32_t
frontier_advance(space_t* space, uint32_t num_units) {
    uint32_t first = space->frontier;
    space->frontier += num_units;
    if (space->frontier > space->peak_frontier) {
        space->peak_frontier = space->frontier;
    }
    return first;
}

static void
frontier_retreat(space_t* space, uint32_t first) {
    while (first > 0 && space->tag[first - 1] != 0) {
        unsigned order = space->tag[first - 1] - 1u;
        first -= units_of(order);
        block_remove(space, first, order);
    }
    space->frontier = first;
}

/* ---- public ---- */

bool
space_take(space_t* space, uint32_t num_units, uint32_t* first) {
    bool is_found =
        find_gap(space, num_units, NUM_QUICK_PROBES, first) || find_block(space, num_units, first);
    if (!is_found && num_units <= space->num_units - space->frontier) {
        *first = frontier_advance(space, num_units);
        return true;
    }
    if (!is_found && !find_gap(space, num_units, UINT32_MAX, first)) {
        return false;
    }
    run_free_to_taken(space, *first, num_units);
    return true;
}

void
space_give(space_t* space, uint32_t first, uint32_t num_units) {
    if (first + num_units == space->frontier) {
        frontier_retreat(space, first);
    } else {
        run_taken_to_free(space, first, num_units);
    }
}

uint32_t
space_largest(const space_t* space) {
    uint32_t above = space->num_units - space->frontier;
    uint32_t block = space->orders != 0 ? units_of(floor_log2(space->orders)) : 0;
    return block > above ? block : above;
}

/* The allocator's state, shared by buddy.c, its walker, and the tests that break it on purpose. */
#ifndef P2P_BUDDY_INTERNAL_H
#define P2P_BUDDY_INTERNAL_H

#include "space.h"

/* A live run, or a free slot (num_units == 0) in the list of free slots. */
typedef struct {
    uint32_t first_unit;
    uint32_t num_units;
    uint32_t generation;
    uint32_t slack_or_next; /* live: reserved - requested bytes; free: next free slot + 1, 0 ends */
} slot_t;
_Static_assert(sizeof(slot_t) == 16, "one slot is a quarter of a cache line");

struct buddy {
    size_t map_bytes; /* of the one mapping that holds all of this */
    unsigned min_block_shift;
    uint32_t salt;
    uint32_t used_units;
    uint32_t num_live;
    uint32_t num_slots;  /* slots ever used; those behind are untouched zero pages */
    uint32_t free_slots; /* first free slot + 1, 0 when none */
    uint64_t requested_bytes;
    space_t space;
    slot_t slots[]; /* one per unit, then the space's memory */
};

#endif

/* The free space of an arena, counted in units: which runs of units are free, and which one to
 * take.
 *
 * Free units are kept as the maximal buddy blocks: a block of order k is 2^k units that start at a
 * multiple of 2^k. Units above the frontier were never taken, or were given back; they are free
 * and belong to no block.
 *
 *   [0, frontier)    == the disjoint union of the taken runs and the free blocks
 *   frontier         == 0, or unit frontier - 1 is taken
 *   two free buddies of one order never exist (they would be one block)
 *   tag[first unit of a free block] == tag[its last unit] == k + 1; every other tag is 0
 *   a free block of order k at unit u is member u >> k of free_blocks[k], and of no other set
 *   bit k of orders  == free_blocks[k] is not empty
 *
 * All zero is a space that is wholly free: fresh pages need no initialisation but space_init. */
#ifndef P2P_SPACE_H
#define P2P_SPACE_H

#include "bitmap.h"

enum { SPACE_MAX_ORDERS = 32 };

typedef struct {
    uint32_t num_units;
    uint32_t frontier;
    uint32_t peak_frontier; /* units at or above were never taken */
    uint32_t orders;
    uint8_t* tag; /* per unit */
    bitmap_t free_blocks[SPACE_MAX_ORDERS];
} space_t;

/* How many zeroed bytes, 8-aligned, a space needs. */
size_t space_num_bytes(uint32_t num_units);
void space_init(space_t* space, void* memory, uint32_t num_units);

/* Takes num_units (> 0) that follow each other. Low ones are preferred, and small gaps before large
 * ones. False only when no such run is free. */
bool space_take(space_t* space, uint32_t num_units, uint32_t* first);

/* Gives a run back that was taken. */
void space_give(space_t* space, uint32_t first, uint32_t num_units);

/* A run of this many units can be taken. */
uint32_t space_largest(const space_t* space);

/* Walks the invariants above, given a byte per unit below the frontier that is 1 where the unit is
 * taken. Returns NULL, or the one that is broken, in words. Writes to `taken`. */
const char* space_check(const space_t* space, uint8_t* taken);

#endif

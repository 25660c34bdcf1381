/* A set of small integers that finds its smallest member in a few loads.
 *
 *   bit i of level 0     == i is a member
 *   bit i of level l + 1 == word i of level l is not zero
 *
 * All zero is the empty set: memory that was never touched needs no initialisation. */
#ifndef P2P_BITMAP_H
#define P2P_BITMAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { BITMAP_MAX_LEVELS = 6 }; /* 64^6 > 2^32 members */

typedef struct {
    uint64_t* level[BITMAP_MAX_LEVELS];
    unsigned num_levels;
} bitmap_t;

/* How many zeroed words a set of the integers [0, num_bits) needs. */
size_t bitmap_num_words(uint32_t num_bits);

/* Lays the set over `words`; returns the first word behind it. */
uint64_t* bitmap_init(bitmap_t* bitmap, uint64_t* words, uint32_t num_bits);

void bitmap_set(bitmap_t* bitmap, uint32_t bit);
void bitmap_clear(bitmap_t* bitmap, uint32_t bit);
bool bitmap_is_empty(const bitmap_t* bitmap);

/* Finds the smallest member that is not below `from`. */
bool bitmap_next(const bitmap_t* bitmap, uint32_t from, uint32_t* found);

#endif

#include "bitmap.h"

/* One word of padding behind each level lets bitmap_next look one past the end. */
static size_t
level_num_words(size_t num_bits) {
    return (num_bits + 63) / 64 + 1;
}

size_t
bitmap_num_words(uint32_t num_bits) {
    size_t total = 0;
    size_t bits = num_bits;
    do {
        total += level_num_words(bits);
        bits = (bits + 63) / 64;
    } while (bits > 1);
    return total;
}

uint64_t*
bitmap_init(bitmap_t* bitmap, uint64_t* words, uint32_t num_bits) {
    size_t bits = num_bits;
    bitmap->num_levels = 0;
    do {
        bitmap->level[bitmap->num_levels++] = words;
        words += level_num_words(bits);
        bits = (bits + 63) / 64;
    } while (bits > 1);
    return words;
}

void
bitmap_set(bitmap_t* bitmap, uint32_t bit) {
    for (unsigned level = 0; level < bitmap->num_levels; level++) {
        uint64_t* word = &bitmap->level[level][bit >> 6];
        bool was_zero = *word == 0;
        *word |= UINT64_C(1) << (bit & 63);
        if (!was_zero) {
            return;
        }
        bit >>= 6;
    }
}

void
bitmap_clear(bitmap_t* bitmap, uint32_t bit) {
    for (unsigned level = 0; level < bitmap->num_levels; level++) {
        uint64_t* word = &bitmap->level[level][bit >> 6];
        *word &= ~(UINT64_C(1) << (bit & 63));
        if (*word != 0) {
            return;
        }
        bit >>= 6;
    }
}

bool
bitmap_is_empty(const bitmap_t* bitmap) {
    return bitmap->level[bitmap->num_levels - 1][0] == 0;
}

static uint32_t
lowest_below(const bitmap_t* bitmap, unsigned level, uint32_t position) {
    while (level-- > 0) {
        uint64_t word = bitmap->level[level][position];
        position = (position << 6) | (uint32_t)__builtin_ctzll(word);
    }
    return position;
}

bool
bitmap_next(const bitmap_t* bitmap, uint32_t from, uint32_t* found) {
    for (unsigned level = 0; level < bitmap->num_levels; level++) {
        uint64_t word = bitmap->level[level][from >> 6] & (~UINT64_C(0) << (from & 63));
        if (word != 0) {
            uint32_t position = (from & ~UINT32_C(63)) | (uint32_t)__builtin_ctzll(word);
            *found = lowest_below(bitmap, level, position);
            return true;
        }
        from = (from >> 6) + 1;
    }
    return false;
}

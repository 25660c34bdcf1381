#include "bitmap.h"
#include "check.h"
#include "random.h"

#include <string.h>

static uint64_t*
make(bitmap_t* bitmap, uint32_t num_bits) {
    uint64_t* words = calloc(bitmap_num_words(num_bits), sizeof *words);
    CHECK(bitmap_init(bitmap, words, num_bits) == words + bitmap_num_words(num_bits));
    return words;
}

static void
an_empty_set_has_no_next(void) {
    for (uint32_t num_bits = 0; num_bits < 70; num_bits++) {
        bitmap_t bitmap;
        uint64_t* words = make(&bitmap, num_bits);
        uint32_t found = 0;
        CHECK(bitmap_is_empty(&bitmap));
        CHECK(!bitmap_next(&bitmap, 0, &found));
        CHECK(!bitmap_next(&bitmap, num_bits, &found));
        free(words);
    }
}

static void
next_starts_at_from_itself(void) {
    bitmap_t bitmap;
    uint64_t* words = make(&bitmap, 100000);
    uint32_t found = 0;
    bitmap_set(&bitmap, 77777);
    CHECK(bitmap_next(&bitmap, 77777, &found) && found == 77777);
    CHECK(bitmap_next(&bitmap, 0, &found) && found == 77777);
    CHECK(!bitmap_next(&bitmap, 77778, &found));
    free(words);
}

static void
the_last_bit_of_each_size_is_found(void) {
    const uint32_t sizes[] = {1, 63, 64, 65, 4095, 4096, 4097, 262144, 262145};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        bitmap_t bitmap;
        uint64_t* words = make(&bitmap, sizes[i]);
        uint32_t found = 0;
        bitmap_set(&bitmap, sizes[i] - 1);
        CHECK(bitmap_next(&bitmap, 0, &found) && found == sizes[i] - 1);
        CHECK(!bitmap_next(&bitmap, sizes[i], &found));
        bitmap_clear(&bitmap, sizes[i] - 1);
        CHECK(bitmap_is_empty(&bitmap));
        free(words);
    }
}

static void
clearing_one_leaves_the_others(void) {
    bitmap_t bitmap;
    uint64_t* words = make(&bitmap, 5000);
    uint32_t found = 0;
    bitmap_set(&bitmap, 64);
    bitmap_set(&bitmap, 65);
    bitmap_set(&bitmap, 4999);
    bitmap_clear(&bitmap, 64);
    CHECK(bitmap_next(&bitmap, 0, &found) && found == 65);
    bitmap_clear(&bitmap, 65);
    CHECK(bitmap_next(&bitmap, 0, &found) && found == 4999);
    free(words);
}

static void
agrees_with_an_array_of_bytes(void) {
    enum { NUM_BITS = 9000, NUM_STEPS = 20000 };
    static uint8_t model[NUM_BITS];
    random_t random = {.state = 20240601};
    bitmap_t bitmap;
    uint64_t* words = make(&bitmap, NUM_BITS);
    memset(model, 0, sizeof model);
    for (int step = 0; step < NUM_STEPS; step++) {
        uint32_t bit = (uint32_t)random_below(&random, NUM_BITS);
        if (random_below(&random, 8) < 5) {
            bitmap_set(&bitmap, bit);
            model[bit] = 1;
        } else {
            bitmap_clear(&bitmap, bit);
            model[bit] = 0;
        }
        uint32_t from = (uint32_t)random_below(&random, NUM_BITS + 1);
        uint32_t expected = from;
        while (expected < NUM_BITS && model[expected] == 0) {
            expected++;
        }
        uint32_t found = 0;
        CHECK(bitmap_next(&bitmap, from, &found) == (expected < NUM_BITS));
        CHECK(expected == NUM_BITS || found == expected);
    }
    free(words);
}

int
main(void) {
    RUN(an_empty_set_has_no_next);
    RUN(next_starts_at_from_itself);
    RUN(the_last_bit_of_each_size_is_found);
    RUN(clearing_one_leaves_the_others);
    RUN(agrees_with_an_array_of_bytes);
    return 0;
}

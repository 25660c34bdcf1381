/* A seeded generator, so that a failure can be repeated. */
#ifndef P2P_TESTS_RANDOM_H
#define P2P_TESTS_RANDOM_H

#include <stdint.h>

typedef struct {
    uint64_t state;
} random_t;

/* splitmix64 */
static inline uint64_t
random_next(random_t* random) {
    uint64_t z = (random->state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static inline uint64_t
random_below(random_t* random, uint64_t limit) {
    return random_next(random) % limit;
}

#endif

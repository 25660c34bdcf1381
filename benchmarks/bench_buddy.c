/* One timing of the allocator without Python around it: prints nanoseconds per alloc + free pair.
 *
 *   bench_buddy CAPACITY MIN_BLOCK NUM_LIVE MAX_BYTES NUM_PAIRS SEED
 *
 * NUM_LIVE blocks of 1 to MAX_BYTES bytes stay allocated; each pair frees a random one of them and
 * allocates another size in its place. Without live blocks, one block goes in and out. */
#include "buddy.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static uint64_t random_state;

/* splitmix64 */
static uint64_t
random_below(uint64_t limit) {
    uint64_t z = (random_state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return (z ^ (z >> 31)) % limit;
}

static buddy_handle_t
alloc_or_die(buddy_t* buddy, uint64_t max_bytes) {
    buddy_handle_t handle = 0;
    if (buddy_alloc(buddy, 1 + random_below(max_bytes), &handle) != BUDDY_OK) {
        fprintf(stderr, "the capacity is too small for so many live blocks\n");
        exit(1);
    }
    return handle;
}

static double
cpu_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

int
main(int argc, char** argv) {
    if (argc != 7) {
        return 2;
    }
    uint64_t numbers[6];
    for (int i = 0; i < 6; i++) {
        numbers[i] = strtoull(argv[i + 1], NULL, 10);
    }
    const uint64_t num_live = numbers[2];
    const uint64_t max_bytes = numbers[3];
    const uint64_t num_pairs = numbers[4];
    random_state = numbers[5];
    buddy_t* buddy = NULL;
    buddy_handle_t* live = calloc(num_live + 1, sizeof *live);
    if (live == NULL || buddy_create(numbers[0], numbers[1], 1, &buddy) != BUDDY_OK) {
        return 1;
    }
    for (uint64_t i = 0; i < num_live; i++) {
        live[i] = alloc_or_die(buddy, max_bytes);
    }
    double before = cpu_seconds();
    for (uint64_t i = 0; i < num_pairs; i++) {
        uint64_t slot = num_live > 0 ? random_below(num_live) : 0;
        buddy_free(buddy, live[slot]); /* the very first one on an empty pool is refused */
        live[slot] = alloc_or_die(buddy, max_bytes);
    }
    printf("%.2f\n", (cpu_seconds() - before) * 1e9 / (double)num_pairs);
    buddy_destroy(buddy);
    free(live);
    return 0;
}

/* Random allocs and frees against a map of bytes, with the walker after each step.
 *
 *   fuzz_buddy [seed] [num_steps]
 *
 * It holds what the allocator promises: runs never overlap, a request fails only when no free run
 * is long enough, and wrong handles change nothing. */
#include "buddy.h"
#include "check.h"
#include "random.h"

#include <stdbool.h>
#include <string.h>

enum { UNIT = 64, MAX_UNITS = 512, MAX_LIVE = MAX_UNITS };

typedef struct {
    buddy_t* buddy;
    uint64_t num_units;
    uint8_t is_used[MAX_UNITS];
    buddy_handle_t live[MAX_LIVE];
    size_t num_live;
    buddy_handle_t freed; /* the latest one */
    random_t random;
} fuzz_t;

static uint64_t
longest_free_run(const fuzz_t* fuzz) {
    uint64_t longest = 0;
    uint64_t length = 0;
    for (uint64_t unit = 0; unit < fuzz->num_units; unit++) {
        length = fuzz->is_used[unit] ? 0 : length + 1;
        longest = length > longest ? length : longest;
    }
    return longest;
}

static void
mark(fuzz_t* fuzz, buddy_handle_t handle, uint8_t used) {
    buddy_run_t run;
    CHECK(buddy_run(fuzz->buddy, handle, &run) == BUDDY_OK);
    uint64_t end = (run.offset_bytes + run.reserved_bytes) / UNIT;
    CHECK(end <= fuzz->num_units);
    for (uint64_t unit = run.offset_bytes / UNIT; unit < end; unit++) {
        CHECK(fuzz->is_used[unit] != used);
        fuzz->is_used[unit] = used;
    }
}

static void
step_alloc(fuzz_t* fuzz) {
    uint64_t max = random_below(&fuzz->random, 4) == 0 ? fuzz->num_units : 12;
    uint64_t nbytes = random_below(&fuzz->random, max * UNIT + 1);
    uint64_t needed = nbytes == 0 ? 1 : (nbytes + UNIT - 1) / UNIT;
    buddy_handle_t handle = 0;
    buddy_status_t status = buddy_alloc(fuzz->buddy, nbytes, &handle);
    CHECK((status == BUDDY_OK) == (needed <= longest_free_run(fuzz)));
    if (status == BUDDY_OK) {
        mark(fuzz, handle, 1);
        fuzz->live[fuzz->num_live++] = handle;
    }
}

static void
step_free(fuzz_t* fuzz) {
    if (fuzz->num_live == 0) {
        return;
    }
    size_t index = (size_t)random_below(&fuzz->random, fuzz->num_live);
    buddy_handle_t handle = fuzz->live[index];
    fuzz->live[index] = fuzz->live[--fuzz->num_live];
    mark(fuzz, handle, 0);
    CHECK(buddy_free(fuzz->buddy, handle) == BUDDY_OK);
    fuzz->freed = handle;
}

static void
step_wrong_free(fuzz_t* fuzz) {
    CHECK(buddy_free(fuzz->buddy, random_next(&fuzz->random)) == BUDDY_STALE);
    if (fuzz->freed != 0) {
        CHECK(buddy_free(fuzz->buddy, fuzz->freed) == BUDDY_STALE);
    }
}

static void
check_all(const fuzz_t* fuzz) {
    const char* broken = buddy_check(fuzz->buddy);
    if (broken != NULL) {
        fprintf(stderr, "broken: %s\n", broken);
    }
    CHECK(broken == NULL);
    buddy_stats_t stats;
    buddy_stats(fuzz->buddy, &stats);
    CHECK(stats.num_blocks == fuzz->num_live);
    CHECK(stats.largest_free_bytes / UNIT <= longest_free_run(fuzz));
    CHECK(stats.used_bytes - stats.requested_bytes <= stats.num_blocks * UNIT);
}

static void
fuzz_round(uint64_t seed, int num_steps) {
    fuzz_t fuzz = {.random = {.state = seed}};
    fuzz.num_units = 1 + random_below(&fuzz.random, MAX_UNITS);
    CHECK(buddy_create(fuzz.num_units * UNIT, UNIT, (uint32_t)seed | 1, &fuzz.buddy) == BUDDY_OK);
    bool is_growing = true;
    for (int step = 0; step < num_steps; step++) {
        is_growing = random_below(&fuzz.random, 200) == 0 ? !is_growing : is_growing;
        uint64_t dice = random_below(&fuzz.random, 10);
        if (dice == 0) {
            step_wrong_free(&fuzz);
        } else if ((dice < 7) == is_growing) {
            step_alloc(&fuzz);
        } else {
            step_free(&fuzz);
        }
        check_all(&fuzz);
    }
    while (fuzz.num_live > 0) {
        step_free(&fuzz);
    }
    check_all(&fuzz);
    CHECK(longest_free_run(&fuzz) == fuzz.num_units);
    buddy_destroy(fuzz.buddy);
}

int
main(int argc, char** argv) {
    enum { STEPS_PER_ROUND = 2000 };
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : 1;
    long num_steps = argc > 2 ? strtol(argv[2], NULL, 0) : 100000;
    for (long done = 0; done < num_steps; done += STEPS_PER_ROUND, seed++) {
        printf("seed %llu\n", (unsigned long long)seed);
        fflush(stdout);
        fuzz_round(seed, STEPS_PER_ROUND);
    }
    return 0;
}

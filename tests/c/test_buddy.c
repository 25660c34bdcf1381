#include "buddy.h"
#include "buddy_internal.h"
#include "check.h"
#include "random.h"

#include <stdbool.h>
#include <string.h>
#include <unistd.h>

enum { UNIT = 512 };

static buddy_t*
make(uint64_t num_units) {
    buddy_t* buddy = NULL;
    CHECK(buddy_create(num_units * UNIT, UNIT, 1, &buddy) == BUDDY_OK);
    return buddy;
}

/* Allocates units and checks everything. */
static buddy_handle_t
take(buddy_t* buddy, uint64_t num_units) {
    buddy_handle_t handle = 0;
    CHECK(buddy_alloc(buddy, num_units * UNIT, &handle) == BUDDY_OK);
    CHECK(buddy_check(buddy) == NULL);
    return handle;
}

static void
give(buddy_t* buddy, buddy_handle_t handle) {
    CHECK(buddy_free(buddy, handle) == BUDDY_OK);
    CHECK(buddy_check(buddy) == NULL);
}

static uint64_t
unit_of(const buddy_t* buddy, buddy_handle_t handle) {
    buddy_run_t run;
    CHECK(buddy_run(buddy, handle, &run) == BUDDY_OK);
    return run.offset_bytes / UNIT;
}

static buddy_stats_t
stats_of(const buddy_t* buddy) {
    buddy_stats_t stats;
    buddy_stats(buddy, &stats);
    CHECK(stats.free_bytes + stats.used_bytes == stats.capacity_bytes);
    return stats;
}

static void
create_refuses_odd_sizes(void) {
    buddy_t* buddy = NULL;
    CHECK(buddy_create(1 << 20, 0, 1, &buddy) == BUDDY_INVALID);
    CHECK(buddy_create(1 << 20, 4, 1, &buddy) == BUDDY_INVALID);
    CHECK(buddy_create(1 << 20, 1000, 1, &buddy) == BUDDY_INVALID);
    CHECK(buddy_create(1 << 20, UINT64_C(1) << 32, 1, &buddy) == BUDDY_INVALID);
    CHECK(buddy_create(511, 512, 1, &buddy) == BUDDY_INVALID);
    CHECK(buddy_create(UINT64_C(512) << 32, 512, 1, &buddy) == BUDDY_INVALID);
}

static void
create_fails_when_the_metadata_cannot_be_mapped(void) {
    buddy_t* buddy = NULL;
    /* Enough of these and the address space is full. */
    enum { MAX = 4096 };
    static buddy_t* made[MAX];
    int num_made = 0;
    buddy_status_t status = BUDDY_OK;
    while (num_made < MAX) {
        status = buddy_create(UINT64_C(512) * (UINT32_MAX - 1), 512, 1, &buddy);
        if (status != BUDDY_OK) {
            break;
        }
        made[num_made++] = buddy;
    }
    CHECK(status == BUDDY_NO_MEMORY);
    while (num_made > 0) {
        buddy_destroy(made[--num_made]);
    }
}

static void
capacity_is_rounded_down_to_whole_blocks(void) {
    buddy_t* buddy = NULL;
    CHECK(buddy_create(10 * UNIT + 511, UNIT, 1, &buddy) == BUDDY_OK);
    CHECK(stats_of(buddy).capacity_bytes == 10 * UNIT);
    buddy_destroy(buddy);
}

static void
requests_are_rounded_up_to_one_block_only(void) {
    buddy_t* buddy = make(64);
    for (uint64_t nbytes = 0; nbytes < 20 * UNIT; nbytes += 37) {
        buddy_handle_t handle = 0;
        buddy_run_t run;
        CHECK(buddy_alloc(buddy, nbytes, &handle) == BUDDY_OK);
        CHECK(buddy_run(buddy, handle, &run) == BUDDY_OK);
        CHECK(run.requested_bytes == nbytes);
        CHECK(run.reserved_bytes >= nbytes && run.reserved_bytes % UNIT == 0);
        CHECK(run.reserved_bytes - nbytes < UNIT || nbytes == 0);
        CHECK(stats_of(buddy).used_bytes == run.reserved_bytes);
        CHECK(stats_of(buddy).requested_bytes == nbytes);
        give(buddy, handle);
    }
    buddy_destroy(buddy);
}

static void
an_empty_request_gets_a_block_of_its_own(void) {
    buddy_t* buddy = make(4);
    buddy_handle_t left = take(buddy, 0);
    buddy_handle_t right = take(buddy, 0);
    CHECK(unit_of(buddy, left) != unit_of(buddy, right));
    CHECK(stats_of(buddy).used_bytes == 2 * UNIT);
    buddy_destroy(buddy);
}

static void
all_of_an_odd_capacity_can_be_taken_at_once(void) {
    buddy_t* buddy = make(4093);
    buddy_handle_t handle = take(buddy, 4093);
    buddy_handle_t none = 0;
    CHECK(stats_of(buddy).free_bytes == 0);
    CHECK(stats_of(buddy).largest_free_bytes == 0);
    CHECK(buddy_alloc(buddy, 0, &none) == BUDDY_FULL);
    give(buddy, handle);
    CHECK(stats_of(buddy).largest_free_bytes == 4093 * UNIT);
    buddy_destroy(buddy);
}

static void
more_than_the_capacity_is_refused(void) {
    buddy_t* buddy = make(4);
    buddy_handle_t handle = 0;
    CHECK(buddy_alloc(buddy, 4 * UNIT + 1, &handle) == BUDDY_FULL);
    CHECK(buddy_alloc(buddy, UINT64_MAX, &handle) == BUDDY_FULL);
    CHECK(stats_of(buddy).used_bytes == 0);
    buddy_destroy(buddy);
}

static void
a_hole_is_taken_again_by_its_own_size(void) {
    buddy_t* buddy = make(1000);
    buddy_handle_t handles[10];
    for (int i = 0; i < 10; i++) {
        handles[i] = take(buddy, 5); /* no power of two, at odd places */
    }
    for (int i = 1; i < 9; i++) {
        uint64_t unit = unit_of(buddy, handles[i]);
        give(buddy, handles[i]);
        handles[i] = take(buddy, 5);
        CHECK(unit_of(buddy, handles[i]) == unit);
    }
    CHECK(stats_of(buddy).high_water_bytes == 50 * UNIT);
    buddy_destroy(buddy);
}

/* Blocks of one size, of which some come and go, always find the holes of their own size. */
static void
equal_blocks_leave_no_waste(void) {
    enum { NUM = 40, STEPS = 5000 };
    random_t random = {.state = 11};
    for (uint64_t size = 1; size <= 9; size++) {
        buddy_t* buddy = make(NUM * size);
        buddy_handle_t handles[NUM];
        bool is_live[NUM] = {false};
        for (int step = 0; step < STEPS; step++) {
            size_t i = (size_t)random_below(&random, NUM);
            if (is_live[i]) {
                CHECK(buddy_free(buddy, handles[i]) == BUDDY_OK);
            } else {
                CHECK(buddy_alloc(buddy, size * UNIT, &handles[i]) == BUDDY_OK);
                CHECK(unit_of(buddy, handles[i]) % size == 0);
            }
            is_live[i] = !is_live[i];
        }
        CHECK(buddy_check(buddy) == NULL);
        buddy_destroy(buddy);
    }
}

static void
neighbouring_holes_become_one(void) {
    buddy_t* buddy = make(30);
    buddy_handle_t handles[10];
    for (int i = 0; i < 10; i++) {
        handles[i] = take(buddy, 3);
    }
    give(buddy, handles[2]);
    give(buddy, handles[4]);
    give(buddy, handles[3]);
    CHECK(unit_of(buddy, take(buddy, 9)) == 6);
    buddy_destroy(buddy);
}

/* A free block of one unit at an even place, then two at odd places: no aligned block of four. */
static void
a_gap_of_small_blocks_is_found_when_nothing_else_is_left(void) {
    enum { NUM_UNITS = 400 };
    buddy_t* buddy = make(NUM_UNITS);
    buddy_handle_t handles[NUM_UNITS];
    for (int i = 0; i < NUM_UNITS; i++) {
        handles[i] = take(buddy, 1);
    }
    /* Many gaps that are too small come first. */
    for (int i = 0; i < 300; i += 6) {
        give(buddy, handles[i]);
        give(buddy, handles[i + 1]);
    }
    for (int i = 361; i < 366; i++) {
        give(buddy, handles[i]);
    }
    buddy_handle_t none = 0;
    CHECK(buddy_alloc(buddy, 6 * UNIT, &none) == BUDDY_FULL);
    CHECK(unit_of(buddy, take(buddy, 5)) == 361);
    buddy_destroy(buddy);
}

static void
low_addresses_come_first(void) {
    buddy_t* buddy = make(100);
    buddy_handle_t handles[20];
    for (int i = 0; i < 20; i++) {
        handles[i] = take(buddy, 1);
        CHECK(unit_of(buddy, handles[i]) == (uint64_t)i);
    }
    give(buddy, handles[15]);
    give(buddy, handles[3]);
    give(buddy, handles[9]);
    CHECK(unit_of(buddy, take(buddy, 1)) == 3);
    CHECK(unit_of(buddy, take(buddy, 1)) == 9);
    CHECK(unit_of(buddy, take(buddy, 1)) == 15);
    CHECK(stats_of(buddy).high_water_bytes == 20 * UNIT);
    buddy_destroy(buddy);
}

static void
everything_comes_back_in_any_order(void) {
    enum { NUM = 7 };
    const int orders[][NUM] = {
        {0, 1, 2, 3, 4, 5, 6}, {6, 5, 4, 3, 2, 1, 0}, {3, 1, 5, 0, 6, 2, 4}, {1, 3, 5, 0, 2, 4, 6}};
    for (size_t order = 0; order < sizeof orders / sizeof orders[0]; order++) {
        buddy_t* buddy = make(64);
        buddy_handle_t handles[NUM];
        for (uint64_t i = 0; i < NUM; i++) {
            handles[i] = take(buddy, i + 1);
        }
        for (int i = 0; i < NUM; i++) {
            give(buddy, handles[orders[order][i]]);
        }
        CHECK(stats_of(buddy).largest_free_bytes == 64 * UNIT);
        CHECK(stats_of(buddy).num_blocks == 0);
        buddy_destroy(buddy);
    }
}

static void
a_double_free_is_refused_and_harms_nothing(void) {
    buddy_t* buddy = make(16);
    buddy_handle_t first = take(buddy, 2);
    buddy_handle_t second = take(buddy, 2);
    give(buddy, first);
    CHECK(buddy_free(buddy, first) == BUDDY_STALE);
    buddy_handle_t third = take(buddy, 2); /* the same slot and place, a new generation */
    CHECK(third != first && (uint32_t)third == (uint32_t)first);
    CHECK(buddy_free(buddy, first) == BUDDY_STALE);
    CHECK(buddy_check(buddy) == NULL);
    CHECK(stats_of(buddy).num_blocks == 2);
    give(buddy, second);
    give(buddy, third);
    buddy_destroy(buddy);
}

static void
foreign_handles_are_refused(void) {
    buddy_t* ours = make(16);
    buddy_t* theirs = NULL;
    CHECK(buddy_create(16 * UNIT, UNIT, 2, &theirs) == BUDDY_OK);
    buddy_handle_t handle = take(ours, 1);
    buddy_handle_t foreign = take(theirs, 1);
    buddy_run_t run;
    CHECK(buddy_free(ours, foreign) == BUDDY_STALE);
    CHECK(buddy_run(ours, foreign, &run) == BUDDY_STALE);
    CHECK(buddy_free(ours, 0) == BUDDY_STALE);
    CHECK(buddy_free(ours, UINT64_MAX) == BUDDY_STALE);
    CHECK(buddy_free(ours, handle + 1) == BUDDY_STALE);
    give(ours, handle);
    buddy_destroy(ours);
    buddy_destroy(theirs);
}

static void
generations_wrap_below_two_to_the_63(void) {
    buddy_t* buddy = NULL;
    CHECK(buddy_create(16 * UNIT, UNIT, 0xffffffff, &buddy) == BUDDY_OK);
    buddy_handle_t before = take(buddy, 1);
    give(buddy, before);
    buddy_handle_t after = take(buddy, 1);
    CHECK(before >> 63 == 0 && before >> 32 == 0x7fffffff && after >> 32 == 0);
    give(buddy, after);
    buddy_destroy(buddy);
}

static long
resident_pages(void) {
    long size = 0;
    long resident = 0;
    FILE* file = fopen("/proc/self/statm", "r");
    CHECK(file != NULL && fscanf(file, "%ld %ld", &size, &resident) == 2);
    fclose(file);
    return resident;
}

static void
a_huge_capacity_costs_little_memory(void) {
    long before = resident_pages();
    buddy_t* buddy = NULL;
    CHECK(buddy_create(UINT64_C(64) << 30, UNIT, 1, &buddy) == BUDDY_OK);
    for (int i = 0; i < 1000; i++) {
        buddy_handle_t handle = 0;
        CHECK(buddy_alloc(buddy, UINT64_C(1) << 20, &handle) == BUDDY_OK);
    }
    CHECK((resident_pages() - before) * sysconf(_SC_PAGESIZE) < 8 << 20);
    buddy_destroy(buddy);
}

/* Each kind of damage is seen: the walker itself can fail. */
static void
the_walker_sees_every_kind_of_damage(void) {
    enum { NUM_DAMAGES = 12 };
    for (int damage = 0; damage < NUM_DAMAGES; damage++) {
        buddy_t* buddy = make(64);
        buddy_handle_t first = take(buddy, 3);
        take(buddy, 4);
        buddy_handle_t third = take(buddy, 2);
        take(buddy, 1);
        give(buddy, first); /* free blocks: units 0-1, unit 2 */
        give(buddy, third); /* units 7, 8 */
        space_t* space = &buddy->space;
        switch (damage) {
        case 0:
            space->tag[1] = 0;
            break;
        case 1:
            space->tag[0] = 1;
            break;
        case 2:
            space->tag[4] = 1;
            break;
        case 3:
            space->tag[40] = 1;
            space->peak_frontier = 64;
            break;
        case 4:
            bitmap_clear(&space->free_blocks[0], 2);
            break;
        case 5:
            bitmap_set(&space->free_blocks[1], 20);
            break;
        case 6:
            space->orders = 0;
            break;
        case 7:
            space->frontier++;
            break;
        case 8:
            buddy->used_units++;
            break;
        case 9:
            buddy->requested_bytes--;
            break;
        case 10:
            buddy->free_slots = 0;
            break;
        default:
            buddy->slots[1].first_unit = 2;
            break;
        }
        CHECK(buddy_check(buddy) != NULL);
        buddy_destroy(buddy);
    }
}

int
main(void) {
    RUN(create_refuses_odd_sizes);
    RUN(capacity_is_rounded_down_to_whole_blocks);
    RUN(requests_are_rounded_up_to_one_block_only);
    RUN(an_empty_request_gets_a_block_of_its_own);
    RUN(all_of_an_odd_capacity_can_be_taken_at_once);
    RUN(more_than_the_capacity_is_refused);
    RUN(a_hole_is_taken_again_by_its_own_size);
    RUN(equal_blocks_leave_no_waste);
    RUN(neighbouring_holes_become_one);
    RUN(a_gap_of_small_blocks_is_found_when_nothing_else_is_left);
    RUN(low_addresses_come_first);
    RUN(everything_comes_back_in_any_order);
    RUN(a_double_free_is_refused_and_harms_nothing);
    RUN(foreign_handles_are_refused);
    RUN(generations_wrap_below_two_to_the_63);
    RUN(a_huge_capacity_costs_little_memory);
    RUN(the_walker_sees_every_kind_of_damage);
    RUN(create_fails_when_the_metadata_cannot_be_mapped);
    return 0;
}

#include "buddy.h"

#include "buddy_internal.h"

#include <stdlib.h>

/* Marks the units of a live run; false where they are not the run's alone. */
static bool
take_units(const buddy_t* buddy, const slot_t* slot, uint8_t* taken) {
    uint64_t end = (uint64_t)slot->first_unit + slot->num_units;
    if (end > buddy->space.frontier) {
        return false;
    }
    for (uint64_t unit = slot->first_unit; unit < end; unit++) {
        if (taken[unit] != 0) {
            return false;
        }
        taken[unit] = 1;
    }
    return true;
}

static const char*
check_live_slots(const buddy_t* buddy, uint8_t* taken) {
    uint64_t used_units = 0;
    uint64_t num_live = 0;
    uint64_t slack_bytes = 0;
    for (uint32_t i = 0; i < buddy->num_slots; i++) {
        const slot_t* slot = &buddy->slots[i];
        if (slot->num_units == 0) {
            continue;
        }
        if (!take_units(buddy, slot, taken)) {
            return "live runs are disjoint and lie below the frontier";
        }
        used_units += slot->num_units;
        slack_bytes += slot->slack_or_next;
        num_live++;
    }
    if (used_units != buddy->used_units || num_live != buddy->num_live) {
        return "used == sum of the runs of all live handles";
    }
    if ((used_units << buddy->min_block_shift) - slack_bytes != buddy->requested_bytes) {
        return "requested == sum of what the callers asked for";
    }
    return NULL;
}

static const char*
check_free_slots(const buddy_t* buddy) {
    uint64_t num_free = 0;
    for (uint32_t next = buddy->free_slots; next != 0; num_free++) {
        if (next > buddy->num_slots || num_free == buddy->num_slots ||
            buddy->slots[next - 1].num_units != 0) {
            return "the list of free slots holds free slots and ends";
        }
        next = buddy->slots[next - 1].slack_or_next;
    }
    return num_free + buddy->num_live == buddy->num_slots
               ? NULL
               : "number of slots == live handles + listed free slots";
}

const char*
buddy_check(const buddy_t* buddy) {
    uint8_t* taken = calloc((size_t)buddy->space.frontier + 1, 1);
    if (taken == NULL) {
        return "no memory for the walk";
    }
    const char* broken = check_live_slots(buddy, taken);
    broken = broken != NULL ? broken : check_free_slots(buddy);
    broken = broken != NULL ? broken : space_check(&buddy->space, taken);
    free(taken);
    return broken;
}

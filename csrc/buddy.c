#include "buddy.h"

#include "buddy_internal.h"

#include <sys/mman.h>

static const uint32_t GENERATION_MASK = 0x7fffffff;

/* ---- slots ---- */

static uint32_t
slot_free_to_live(buddy_t* buddy) {
    if (buddy->free_slots == 0) {
        buddy->slots[buddy->num_slots].generation = buddy->salt & GENERATION_MASK;
        return buddy->num_slots++;
    }
    uint32_t index = buddy->free_slots - 1;
    buddy->free_slots = buddy->slots[index].slack_or_next;
    return index;
}

static void
slot_live_to_free(buddy_t* buddy, uint32_t index) {
    slot_t* slot = &buddy->slots[index];
    slot->num_units = 0;
    slot->generation = (slot->generation + 1) & GENERATION_MASK;
    slot->slack_or_next = buddy->free_slots;
    buddy->free_slots = index + 1;
}

/* The slot of a live handle; NULL for any other number. */
static const slot_t*
slot_of(const buddy_t* buddy, buddy_handle_t handle) {
    uint32_t index = (uint32_t)handle;
    if (index >= buddy->num_slots) {
        return NULL;
    }
    const slot_t* slot = &buddy->slots[index];
    return slot->num_units > 0 && slot->generation == handle >> 32 ? slot : NULL;
}

static uint64_t
bytes_of(const buddy_t* buddy, uint32_t num_units) {
    return (uint64_t)num_units << buddy->min_block_shift;
}

/* ---- public ---- */

buddy_status_t
buddy_create(uint64_t capacity, uint64_t min_block, uint32_t salt, buddy_t** out) {
    if (min_block < 8 || min_block > UINT64_C(1) << 31 || (min_block & (min_block - 1)) != 0 ||
        capacity / min_block == 0 || capacity / min_block >= UINT32_MAX) {
        return BUDDY_INVALID;
    }
    uint32_t num_units = (uint32_t)(capacity / min_block);
    size_t own_bytes = sizeof(buddy_t) + num_units * sizeof(slot_t);
    size_t map_bytes = own_bytes + space_num_bytes(num_units);
    char* map = mmap(NULL, map_bytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) {
        return BUDDY_NO_MEMORY;
    }
    buddy_t* buddy = (buddy_t*)(void*)map;
    buddy->map_bytes = map_bytes;
    buddy->min_block_shift = (unsigned)__builtin_ctzll(min_block);
    buddy->salt = salt;
    space_init(&buddy->space, map + own_bytes, num_units);
    *out = buddy;
    return BUDDY_OK;
}

void
buddy_destroy(buddy_t* buddy) {
    munmap(buddy, buddy->map_bytes);
}

buddy_status_t
buddy_alloc(buddy_t* buddy, uint64_t nbytes, buddy_handle_t* out) {
    if (nbytes > bytes_of(buddy, buddy->space.num_units)) {
        return BUDDY_FULL;
    }
    uint64_t last = nbytes > 0 ? nbytes - 1 : 0; /* of the bytes, counted from 0 */
    uint32_t num_units = (uint32_t)(last >> buddy->min_block_shift) + 1;
    uint32_t first = 0;
    if (!space_take(&buddy->space, num_units, &first)) {
        return BUDDY_FULL;
    }
    uint32_t index = slot_free_to_live(buddy);
    slot_t* slot = &buddy->slots[index];
    slot->first_unit = first;
    slot->num_units = num_units;
    slot->slack_or_next = (uint32_t)(bytes_of(buddy, num_units) - nbytes);
    buddy->used_units += num_units;
    buddy->num_live++;
    buddy->requested_bytes += nbytes;
    *out = (uint64_t)slot->generation << 32 | index;
    return BUDDY_OK;
}

buddy_status_t
buddy_free(buddy_t* buddy, buddy_handle_t handle) {
    const slot_t* slot = slot_of(buddy, handle);
    if (slot == NULL) {
        return BUDDY_STALE;
    }
    space_give(&buddy->space, slot->first_unit, slot->num_units);
    buddy->used_units -= slot->num_units;
    buddy->num_live--;
    buddy->requested_bytes -= bytes_of(buddy, slot->num_units) - slot->slack_or_next;
    slot_live_to_free(buddy, (uint32_t)handle);
    return BUDDY_OK;
}

buddy_status_t
buddy_run(const buddy_t* buddy, buddy_handle_t handle, buddy_run_t* out) {
    const slot_t* slot = slot_of(buddy, handle);
    if (slot == NULL) {
        return BUDDY_STALE;
    }
    out->offset_bytes = bytes_of(buddy, slot->first_unit);
    out->reserved_bytes = bytes_of(buddy, slot->num_units);
    out->requested_bytes = out->reserved_bytes - slot->slack_or_next;
    return BUDDY_OK;
}

void
buddy_stats(const buddy_t* buddy, buddy_stats_t* out) {
    out->capacity_bytes = bytes_of(buddy, buddy->space.num_units);
    out->used_bytes = bytes_of(buddy, buddy->used_units);
    out->free_bytes = out->capacity_bytes - out->used_bytes;
    out->requested_bytes = buddy->requested_bytes;
    out->num_blocks = buddy->num_live;
    out->largest_free_bytes = bytes_of(buddy, space_largest(&buddy->space));
    out->high_water_bytes = bytes_of(buddy, buddy->space.peak_frontier);
}

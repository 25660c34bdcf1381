/* A buddy allocator over offsets. It never touches the memory it hands out, which may be pinned,
 * shared with other processes, or on a device.
 *
 * The arena is counted in units of min_block bytes. An allocation is a run of
 * max(1, ceil(nbytes / min_block)) units that may start at any unit; how free units are kept is
 * space.h's business.
 *
 *   capacity  == free + used
 *   used      == sum of the runs of all live handles
 *   requested == sum of what their callers asked for
 *   reserved(handle) - requested(handle) < min_block      (== min_block when 0 bytes were
 * requested) number of slots == live handles + listed free slots
 *
 * An allocation fails only when no run of that many free units exists. Low addresses are preferred,
 * so that pages above the high-water mark are never touched.
 *
 * Handles carry a generation: a stale, double or foreign handle is BUDDY_STALE and harms nothing
 * (a slot's generation repeats after 2^31 frees of that slot).
 *
 * One owner at a time: the caller holds a lock. All memory is mapped by buddy_create and becomes
 * resident only where it is touched. */
#ifndef P2P_BUDDY_H
#define P2P_BUDDY_H

#include <stdint.h>

typedef struct buddy buddy_t;
typedef uint64_t buddy_handle_t; /* below 2^63 */

typedef enum {
    BUDDY_OK,
    BUDDY_INVALID,   /* capacity or min_block out of range */
    BUDDY_NO_MEMORY, /* the metadata cannot be mapped */
    BUDDY_FULL,      /* no run of free units is long enough */
    BUDDY_STALE,     /* not a live handle of this allocator */
} buddy_status_t;

typedef struct {
    uint64_t offset_bytes;
    uint64_t reserved_bytes;
    uint64_t requested_bytes;
} buddy_run_t;

typedef struct {
    uint64_t capacity_bytes;
    uint64_t free_bytes;
    uint64_t used_bytes;
    uint64_t requested_bytes;
    uint64_t num_blocks;         /* live handles */
    uint64_t largest_free_bytes; /* a request of this size succeeds */
    uint64_t high_water_bytes;   /* no byte at or above was ever handed out */
} buddy_stats_t;

/* min_block is a power of two, 8 .. 2^31; capacity holds 1 .. 2^32 - 2 of them and is rounded down
 * to a multiple. Allocators with different salts do not accept each other's handles. */
buddy_status_t buddy_create(uint64_t capacity, uint64_t min_block, uint32_t salt, buddy_t** out);
void buddy_destroy(buddy_t* buddy);

buddy_status_t buddy_alloc(buddy_t* buddy, uint64_t nbytes, buddy_handle_t* out);
buddy_status_t buddy_free(buddy_t* buddy, buddy_handle_t handle);
buddy_status_t buddy_run(const buddy_t* buddy, buddy_handle_t handle, buddy_run_t* out);
void buddy_stats(const buddy_t* buddy, buddy_stats_t* out);

/* Walks every invariant, space.h's too. Returns NULL, or the one that is broken, in words. For
 * tests: takes time and scratch memory in proportion to the frontier. */
const char* buddy_check(const buddy_t* buddy);

#endif

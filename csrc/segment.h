/* The frame of a stream. A job's payload is cut into segments, so that several jobs share one
 * socket fairly and one of them can stop without breaking the others:
 *
 *   u32 magic, u32 flags, u64 seq, u64 offset, u64 nbytes     little endian, then nbytes of payload
 *
 * Segments of one seq come in order. LAST says that everything was sent: an empty segment of its
 * own, so that a sender which stops inside a payload can fill it up and then say ABORTED. */
#ifndef P2P_SEGMENT_H
#define P2P_SEGMENT_H

#include <stdbool.h>
#include <stdint.h>

enum {
    SEGMENT_HEADER_BYTES = 32,
    SEGMENT_LAST = 1,
    SEGMENT_ABORTED = 2,
};

typedef struct {
    uint32_t flags;
    uint64_t seq;
    uint64_t offset;
    uint64_t nbytes;
} segment_t;

void segment_encode(const segment_t* segment, char header[SEGMENT_HEADER_BYTES]);

/* False: not a header of ours. */
bool segment_decode(segment_t* segment, const char header[SEGMENT_HEADER_BYTES]);

/* NULL, or why the segment does not continue a payload of which `moved` of `total` bytes are here.
 */
const char* segment_mismatch(const segment_t* segment, uint64_t moved, uint64_t total);

#endif

#include "segment.h"

#include <endian.h>
#include <string.h>

static const uint32_t MAGIC = 0x31763270; /* "p2v1" */

static void
put_u32(char* at, uint32_t value) {
    value = htole32(value);
    memcpy(at, &value, sizeof value);
}

static void
put_u64(char* at, uint64_t value) {
    value = htole64(value);
    memcpy(at, &value, sizeof value);
}

static uint32_t
get_u32(const char* at) {
    uint32_t value = 0;
    memcpy(&value, at, sizeof value);
    return le32toh(value);
}

static uint64_t
get_u64(const char* at) {
    uint64_t value = 0;
    memcpy(&value, at, sizeof value);
    return le64toh(value);
}

void
segment_encode(const segment_t* segment, char header[SEGMENT_HEADER_BYTES]) {
    put_u32(header, MAGIC);
    put_u32(header + 4, segment->flags);
    put_u64(header + 8, segment->seq);
    put_u64(header + 16, segment->offset);
    put_u64(header + 24, segment->nbytes);
}

bool
segment_decode(segment_t* segment, const char header[SEGMENT_HEADER_BYTES]) {
    segment->flags = get_u32(header + 4);
    segment->seq = get_u64(header + 8);
    segment->offset = get_u64(header + 16);
    segment->nbytes = get_u64(header + 24);
    bool is_last = (segment->flags & SEGMENT_LAST) != 0;
    bool is_aborted = (segment->flags & SEGMENT_ABORTED) != 0;
    bool is_known = (segment->flags & ~(uint32_t)(SEGMENT_LAST | SEGMENT_ABORTED)) == 0;
    return get_u32(header) == MAGIC && is_known && (segment->nbytes > 0 || is_last || is_aborted) &&
           (segment->nbytes == 0 || !is_aborted) && segment->nbytes <= UINT64_C(1) << 62;
}

const char*
segment_mismatch(const segment_t* segment, uint64_t moved, uint64_t total) {
    uint64_t left = total - moved;
    if ((segment->flags & SEGMENT_ABORTED) != 0) {
        return NULL;
    }
    if (segment->offset != moved) {
        return "the peer skipped or repeated bytes";
    }
    if (segment->nbytes > left) {
        return "the peer sent more than was expected";
    }
    if ((segment->flags & SEGMENT_LAST) != 0 && segment->nbytes < left) {
        return "the peer sent less than was expected";
    }
    return NULL;
}

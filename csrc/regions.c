#include "regions.h"

#include "copy.h"
#include "crc32c.h"

#include <stdbool.h>
#include <stdlib.h>

static const int64_t MAX_BYTES = INT64_C(1) << 62;

enum { FAULT_AROUND_BYTES = 64 << 10 }; /* what Linux maps at a read fault, by default */

static bool
is_valid(const int64_t* addresses, size_t index, int64_t length) {
    return addresses == NULL || length == 0 || addresses[index] > 0;
}

static bool
are_valid(const int64_t* sources, const int64_t* destinations, const int64_t* lengths,
          size_t num_spans) {
    int64_t total = 0;
    for (size_t i = 0; i < num_spans; i++) {
        if (lengths[i] < 0 || lengths[i] > MAX_BYTES - total || !is_valid(sources, i, lengths[i]) ||
            !is_valid(destinations, i, lengths[i])) {
            return false;
        }
        total += lengths[i];
    }
    return true;
}

static bool
is_adjacent(const span_t* left, const span_t* right) {
    return (left->source == NULL || left->source + left->nbytes == right->source) &&
           (left->destination == NULL || left->destination + left->nbytes == right->destination);
}

static void
append(regions_t* regions, span_t span) {
    span_t* last = regions->num_spans > 0 ? &regions->spans[regions->num_spans - 1] : NULL;
    regions->nbytes += span.nbytes;
    if (last != NULL && is_adjacent(last, &span)) {
        last->nbytes += span.nbytes;
    } else if (span.nbytes > 0) {
        regions->spans[regions->num_spans++] = span;
    }
}

regions_status_t
regions_create(regions_t* out, const int64_t* sources, const int64_t* destinations,
               const int64_t* lengths, size_t num_spans) {
    if (!are_valid(sources, destinations, lengths, num_spans)) {
        return REGIONS_INVALID;
    }
    *out = (regions_t){.spans = malloc((num_spans + 1) * sizeof(span_t))};
    if (out->spans == NULL) {
        return REGIONS_NO_MEMORY;
    }
    for (size_t i = 0; i < num_spans; i++) {
        append(out,
               (span_t){
                   .source = sources != NULL ? (const char*)(uintptr_t)sources[i] : NULL,
                   .destination = destinations != NULL ? (char*)(uintptr_t)destinations[i] : NULL,
                   .nbytes = (size_t)lengths[i],
               });
    }
    out->spans[out->num_spans] = (span_t){0};
    return REGIONS_OK;
}

void
regions_destroy(regions_t* regions) {
    free(regions->spans);
    *regions = (regions_t){0};
}

static size_t
smaller(size_t left, size_t right) {
    return left < right ? left : right;
}

/* The part of the cursor's span that is left, at most `limit` bytes of it. */
static span_t
rest_of_span(const regions_t* regions, cursor_t cursor, size_t limit) {
    span_t span = regions->spans[cursor.span];
    return (span_t){
        .source = span.source != NULL ? span.source + cursor.offset : NULL,
        .destination = span.destination != NULL ? span.destination + cursor.offset : NULL,
        .nbytes = smaller(span.nbytes - cursor.offset, limit),
    };
}

static void
advance_in_span(const regions_t* regions, cursor_t* cursor, size_t nbytes) {
    cursor->offset += nbytes;
    if (cursor->offset == regions->spans[cursor->span].nbytes) {
        *cursor = (cursor_t){.span = cursor->span + 1};
    }
}

size_t
regions_copy(const regions_t* regions, cursor_t* cursor, size_t limit) {
    size_t copied = 0;
    while (copied < limit && cursor->span < regions->num_spans) {
        span_t span = rest_of_span(regions, *cursor, limit - copied);
        span_t next = regions->spans[cursor->span + 1]; /* one is always there */
        copy_prefetch(next.source, next.nbytes);
        copy_bytes(span.destination, span.source, span.nbytes);
        advance_in_span(regions, cursor, span.nbytes);
        copied += span.nbytes;
    }
    return copied;
}

void
regions_map_destination(const regions_t* regions, cursor_t cursor, size_t limit) {
    uintptr_t read_upto = 0; /* the window of the last read ends here */
    while (limit > 0 && cursor.span < regions->num_spans) {
        span_t span = rest_of_span(regions, cursor, limit);
        for (size_t offset = 0; offset < span.nbytes;) {
            const char* byte = span.destination + offset;
            uintptr_t window = (uintptr_t)byte & ~(uintptr_t)(FAULT_AROUND_BYTES - 1);
            if (window + FAULT_AROUND_BYTES != read_upto) {
                (void)__atomic_load_n(byte, __ATOMIC_RELAXED);
                read_upto = window + FAULT_AROUND_BYTES;
            }
            offset = read_upto - (uintptr_t)span.destination;
        }
        advance_in_span(regions, &cursor, span.nbytes);
        limit -= span.nbytes;
    }
}

size_t
regions_vectors(const regions_t* regions, cursor_t cursor, size_t limit, regions_side_t side,
                struct iovec* vectors, size_t capacity) {
    size_t count = 0;
    while (count < capacity && limit > 0 && cursor.span < regions->num_spans) {
        span_t span = rest_of_span(regions, cursor, limit);
        uintptr_t base = (uintptr_t)(side == REGIONS_SOURCE ? span.source : span.destination);
        vectors[count++] = (struct iovec){.iov_base = (void*)base, .iov_len = span.nbytes};
        advance_in_span(regions, &cursor, span.nbytes);
        limit -= span.nbytes;
    }
    return count;
}

uint32_t
regions_crc32c(const regions_t* regions, cursor_t cursor, size_t nbytes, regions_side_t side,
               uint32_t crc) {
    while (nbytes > 0 && cursor.span < regions->num_spans) {
        span_t span = rest_of_span(regions, cursor, nbytes);
        crc = crc32c(crc, side == REGIONS_SOURCE ? span.source : span.destination, span.nbytes);
        advance_in_span(regions, &cursor, span.nbytes);
        nbytes -= span.nbytes;
    }
    return crc;
}

void
regions_advance(const regions_t* regions, cursor_t* cursor, size_t nbytes) {
    while (nbytes > 0) {
        span_t span = rest_of_span(regions, *cursor, nbytes);
        advance_in_span(regions, cursor, span.nbytes);
        nbytes -= span.nbytes;
    }
}

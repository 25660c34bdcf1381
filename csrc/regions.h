/* Gather and scatter lists: spans of memory that together form one stream of bytes. */
#ifndef P2P_REGIONS_H
#define P2P_REGIONS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

typedef struct {
    char* destination;
    const char* source;
    size_t nbytes; /* never 0 */
} span_t;

typedef struct {
    span_t* spans; /* and an empty one behind the last */
    size_t num_spans;
    uint64_t nbytes; /* == sum over the spans */
} regions_t;

/* A position in the stream. All zero is its beginning. */
typedef struct {
    size_t span;
    size_t offset; /* within the span */
} cursor_t;

typedef enum {
    REGIONS_OK,
    REGIONS_INVALID, /* a negative length, a null address, or more than 2^62 bytes in all */
    REGIONS_NO_MEMORY,
} regions_status_t;

typedef enum { REGIONS_SOURCE, REGIONS_DESTINATION } regions_side_t;

/* Copies the lists, and joins spans that are adjacent on both sides. Either side may be NULL. */
regions_status_t regions_create(regions_t* out, const int64_t* sources, const int64_t* destinations,
                                const int64_t* lengths, size_t num_spans);
void regions_destroy(regions_t* regions);

/* Copies up to `limit` bytes from the cursor on and moves it. Returns how many. */
size_t regions_copy(const regions_t* regions, cursor_t* cursor, size_t limit);

/* Lets the kernel map the destination of the next `limit` bytes by as few faults as it can, if it
 * is a file's memory: a read fault maps the pages around it that are there, writable too, where a
 * write fault maps one. Touches no page but those that will be written. */
void regions_map_destination(const regions_t* regions, cursor_t cursor, size_t limit);

/* Describes up to `limit` bytes from the cursor on in at most `capacity` vectors. Returns how many
 * vectors. */
size_t regions_vectors(const regions_t* regions, cursor_t cursor, size_t limit, regions_side_t side,
                       struct iovec* vectors, size_t capacity);

/* Continues a CRC-32C over nbytes from the cursor on. */
uint32_t regions_crc32c(const regions_t* regions, cursor_t cursor, size_t nbytes,
                        regions_side_t side, uint32_t crc);

void regions_advance(const regions_t* regions, cursor_t* cursor, size_t nbytes);

#endif

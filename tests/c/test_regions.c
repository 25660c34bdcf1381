#include "check.h"
#include "copy.h"
#include "random.h"
#include "regions.h"

#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static int64_t
address_of(const void* pointer) {
    return (int64_t)(intptr_t)pointer;
}

/* Copies once and looks at every byte, inside and around. */
static void
check_copy(copy_way_t way, size_t to, size_t from, size_t nbytes) {
    enum { MAX = 4096 };
    static unsigned char source[MAX];
    static unsigned char destination[MAX];
    CHECK(to + nbytes <= MAX && from + nbytes <= MAX);
    for (size_t i = 0; i < MAX; i++) {
        source[i] = (unsigned char)(i * 31 + i / 256);
    }
    memset(destination, 0xee, MAX);
    copy_bytes_by(way, destination + to, source + from, nbytes);
    copy_publish();
    CHECK(memcmp(destination + to, source + from, nbytes) == 0);
    for (size_t i = 0; i < MAX; i++) {
        CHECK((i >= to && i < to + nbytes) || destination[i] == 0xee);
    }
}

static void
every_way_copies_exactly_at_every_alignment_and_length(void) {
    random_t random = {.state = 7};
    for (copy_way_t way = COPY_PLAIN; way <= copy_best_way(); way++) {
        for (size_t nbytes = 0; nbytes <= 3000; nbytes++) {
            check_copy(way, (size_t)random_below(&random, 1000),
                       (size_t)random_below(&random, 1000), nbytes);
        }
    }
}

static void
wrong_lists_are_refused(void) {
    char byte = 0;
    int64_t good = address_of(&byte);
    int64_t null = 0;
    int64_t one = 1;
    int64_t negative = -1;
    const int64_t huge[] = {INT64_C(1) << 62, 1};
    const int64_t goods[] = {good, good};
    regions_t regions;
    CHECK(regions_create(&regions, &good, &good, &negative, 1) == REGIONS_INVALID);
    CHECK(regions_create(&regions, &null, &good, &one, 1) == REGIONS_INVALID);
    CHECK(regions_create(&regions, &good, &null, &one, 1) == REGIONS_INVALID);
    CHECK(regions_create(&regions, &good, &negative, &one, 1) == REGIONS_INVALID);
    CHECK(regions_create(&regions, goods, NULL, huge, 2) == REGIONS_INVALID);
}

static void
empty_spans_may_be_anywhere(void) {
    char from[4] = "abc";
    char to[4] = "";
    const int64_t sources[] = {0, address_of(from), 0, address_of(from + 2), 0};
    const int64_t destinations[] = {0, address_of(to), 0, address_of(to + 2), 0};
    const int64_t lengths[] = {0, 2, 0, 2, 0};
    regions_t regions;
    cursor_t cursor = {0};
    CHECK(regions_create(&regions, sources, destinations, lengths, 5) == REGIONS_OK);
    CHECK(regions.nbytes == 4);
    CHECK(regions_copy(&regions, &cursor, SIZE_MAX) == 4);
    CHECK(regions_copy(&regions, &cursor, SIZE_MAX) == 0);
    CHECK(strcmp(to, "abc") == 0);
    regions_destroy(&regions);
}

static void
adjacent_spans_are_joined(void) {
    char from[8];
    char to[8];
    const int64_t sources[] = {address_of(from), address_of(from + 2), address_of(from + 4)};
    const int64_t same[] = {address_of(to), address_of(to + 2), address_of(to + 4)};
    const int64_t apart[] = {address_of(to), address_of(to + 2), address_of(to + 5)};
    const int64_t lengths[] = {2, 2, 2};
    regions_t regions;
    CHECK(regions_create(&regions, sources, same, lengths, 3) == REGIONS_OK);
    CHECK(regions.num_spans == 1 && regions.nbytes == 6);
    regions_destroy(&regions);
    CHECK(regions_create(&regions, sources, apart, lengths, 3) == REGIONS_OK);
    CHECK(regions.num_spans == 2 && regions.nbytes == 6);
    regions_destroy(&regions);
    CHECK(regions_create(&regions, sources, NULL, lengths, 3) == REGIONS_OK);
    CHECK(regions.num_spans == 1);
    regions_destroy(&regions);
}

/* Spans of random lengths at random places, moved in random steps, arrive in order. */
static void
steps_of_any_size_move_every_byte_once(void) {
    enum { NUM_SPANS = 50, STRIDE = 100 };
    static char from[NUM_SPANS * STRIDE];
    static char to[NUM_SPANS * STRIDE];
    random_t random = {.state = 99};
    for (int round = 0; round < 200; round++) {
        int64_t sources[NUM_SPANS];
        int64_t destinations[NUM_SPANS];
        int64_t lengths[NUM_SPANS];
        for (int i = 0; i < NUM_SPANS; i++) {
            sources[i] = address_of(from + i * STRIDE);
            destinations[i] = address_of(to + (NUM_SPANS - 1 - i) * STRIDE);
            lengths[i] = (int64_t)random_below(&random, STRIDE + 1);
        }
        for (size_t i = 0; i < sizeof from; i++) {
            from[i] = (char)random_next(&random);
        }
        memset(to, 0, sizeof to);
        regions_t regions;
        cursor_t cursor = {0};
        CHECK(regions_create(&regions, sources, destinations, lengths, NUM_SPANS) == REGIONS_OK);
        size_t moved = 0;
        for (size_t step = 1; step > 0; moved += step) {
            step = regions_copy(&regions, &cursor, 1 + (size_t)random_below(&random, 300));
        }
        CHECK(moved == regions.nbytes);
        for (int i = 0; i < NUM_SPANS; i++) {
            CHECK(memcmp(from + i * STRIDE, to + (NUM_SPANS - 1 - i) * STRIDE,
                         (size_t)lengths[i]) == 0);
        }
        regions_destroy(&regions);
    }
}

/* In a file of holes, a page that is there was touched. */
static void
mapping_a_destination_touches_no_page_that_is_not_written(void) {
    enum { NUM_SPANS = 3, NUM_BYTES = 4 << 20 };
    int fd = memfd_create("holes", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, NUM_BYTES) == 0);
    char* file = mmap(NULL, NUM_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(file != MAP_FAILED);
    const size_t starts[NUM_SPANS] = {3 << 20, (1 << 20) + 100, (2 << 20) - 8};
    const int64_t lengths[NUM_SPANS] = {32, 300000, 16};
    int64_t destinations[NUM_SPANS];
    for (int i = 0; i < NUM_SPANS; i++) {
        destinations[i] = address_of(file + starts[i]);
    }
    regions_t regions;
    cursor_t cursor = {0};
    CHECK(regions_create(&regions, NULL, destinations, lengths, NUM_SPANS) == REGIONS_OK);
    regions_map_destination(&regions, cursor, SIZE_MAX);
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    unsigned char there[NUM_BYTES / 4096];
    CHECK(mincore(file, NUM_BYTES, there) == 0);
    for (size_t start = 0; start < NUM_BYTES; start += page) {
        bool is_written = false;
        for (int i = 0; i < NUM_SPANS; i++) {
            is_written |= start < starts[i] + (size_t)lengths[i] && starts[i] < start + page;
        }
        CHECK(is_written || (there[start / page] & 1) == 0);
    }
    regions_destroy(&regions);
    munmap(file, NUM_BYTES);
    close(fd);
}

static void
vectors_describe_what_the_cursor_would_move(void) {
    char memory[30];
    const int64_t addresses[] = {address_of(memory), address_of(memory + 10),
                                 address_of(memory + 25)};
    const int64_t lengths[] = {4, 6, 5};
    struct iovec vectors[8];
    regions_t regions;
    cursor_t cursor = {0};
    CHECK(regions_create(&regions, addresses, NULL, lengths, 3) == REGIONS_OK);
    regions_advance(&regions, &cursor, 5);
    CHECK(regions_vectors(&regions, cursor, 7, REGIONS_SOURCE, vectors, 8) == 2);
    CHECK(vectors[0].iov_base == memory + 11 && vectors[0].iov_len == 5);
    CHECK(vectors[1].iov_base == memory + 25 && vectors[1].iov_len == 2);
    CHECK(regions_vectors(&regions, cursor, 100, REGIONS_SOURCE, vectors, 1) == 1);
    regions_advance(&regions, &cursor, 10);
    CHECK(regions_vectors(&regions, cursor, 100, REGIONS_SOURCE, vectors, 8) == 0);
    regions_destroy(&regions);
}

int
main(void) {
    RUN(every_way_copies_exactly_at_every_alignment_and_length);
    RUN(wrong_lists_are_refused);
    RUN(empty_spans_may_be_anywhere);
    RUN(adjacent_spans_are_joined);
    RUN(steps_of_any_size_move_every_byte_once);
    RUN(mapping_a_destination_touches_no_page_that_is_not_written);
    RUN(vectors_describe_what_the_cursor_would_move);
    return 0;
}

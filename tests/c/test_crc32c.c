#include "check.h"
#include "crc32c.h"
#include "random.h"

#include <string.h>

/* RFC 3720, appendix B.4, and the usual check value. */
static void
known_sums_come_out(void) {
    unsigned char data[32];
    memset(data, 0, sizeof data);
    CHECK(crc32c(0, data, sizeof data) == 0x8a9136aa);
    memset(data, 0xff, sizeof data);
    CHECK(crc32c(0, data, sizeof data) == 0x62a8ab43);
    for (size_t i = 0; i < sizeof data; i++) {
        data[i] = (unsigned char)i;
    }
    CHECK(crc32c(0, data, sizeof data) == 0x46dd794e);
    CHECK(crc32c(0, "123456789", 9) == 0xe3069283);
    CHECK(crc32c(0, data, 0) == 0);
}

static void
every_way_says_the_same_at_every_alignment_and_cut(void) {
    static unsigned char data[20000];
    random_t random = {.state = 4};
    for (size_t i = 0; i < sizeof data; i++) {
        data[i] = (unsigned char)random_next(&random);
    }
    for (int round = 0; round < 500; round++) {
        size_t start = random_below(&random, 70);
        size_t nbytes = random_below(&random, sizeof data - start);
        size_t cut = nbytes > 0 ? random_below(&random, nbytes) : 0;
        uint32_t whole = crc32c_by(CRC32C_TABLE, 0, data + start, nbytes);
        CHECK(crc32c(0, data + start, nbytes) == whole);
        uint32_t first = crc32c(0, data + start, cut);
        CHECK(crc32c(first, data + start + cut, nbytes - cut) == whole);
    }
}

int
main(void) {
    RUN(known_sums_come_out);
    RUN(every_way_says_the_same_at_every_alignment_and_cut);
    return 0;
}

#include "crc32c.h"

#include <pthread.h>
#include <string.h>

/* The instruction takes three cycles and can be started in each: three runs side by side. */
enum { RUN_BYTES = 1024, NUM_RUNS = 3, LINE_BYTES = 64 };

static const uint32_t POLYNOMIAL = 0x82f63b78; /* reflected */

static uint32_t BYTE_TABLE[256];
static uint32_t SKIP_TABLE[4][256]; /* each byte of a state after RUN_BYTES of zeros */

static uint32_t
step_table(uint32_t state, const unsigned char* data, size_t nbytes) {
    for (size_t i = 0; i < nbytes; i++) {
        state = BYTE_TABLE[(state ^ data[i]) & 0xff] ^ (state >> 8);
    }
    return state;
}

static void
make_tables(void) {
    static const unsigned char ZEROS[RUN_BYTES];
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t state = i;
        for (int bit = 0; bit < 8; bit++) {
            state = (state >> 1) ^ (POLYNOMIAL & -(state & 1));
        }
        BYTE_TABLE[i] = state;
    }
    for (uint32_t bit = 0; bit < 32; bit++) { /* a state is the sum of its bits, so is its future */
        uint32_t future = step_table(UINT32_C(1) << bit, ZEROS, sizeof ZEROS);
        for (uint32_t value = 0; value < 256; value++) {
            if ((value >> (bit % 8) & 1) != 0) {
                SKIP_TABLE[bit / 8][value] ^= future;
            }
        }
    }
}

static void
prepare(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, make_tables);
}

#if defined(__x86_64__)

#include <nmmintrin.h>

#if defined(__clang__) /* may have been told to leave the one instruction out that is meant */
#define SSE42 __attribute__((target("sse4.2,crc32")))
#else
#define SSE42 __attribute__((target("sse4.2")))
#endif

static uint32_t
skip(uint32_t state) {
    return SKIP_TABLE[0][state & 0xff] ^ SKIP_TABLE[1][state >> 8 & 0xff] ^
           SKIP_TABLE[2][state >> 16 & 0xff] ^ SKIP_TABLE[3][state >> 24];
}

SSE42 static inline uint64_t
step_word(uint64_t state, const unsigned char* data) {
    uint64_t word = 0;
    memcpy(&word, data, sizeof word);
    return _mm_crc32_u64(state, word);
}

SSE42 static uint32_t
step_three_runs(uint32_t state, const unsigned char* data) {
    uint64_t first = state;
    uint64_t second = 0;
    uint64_t third = 0;
    for (size_t line = 0; line < RUN_BYTES; line += LINE_BYTES) {
        for (size_t ahead = 0; ahead < NUM_RUNS; ahead++) { /* the next three runs */
            __builtin_prefetch(data + (NUM_RUNS + ahead) * RUN_BYTES + line);
        }
        for (size_t i = line; i < line + LINE_BYTES; i += sizeof(uint64_t)) {
            first = step_word(first, data + i);
            second = step_word(second, data + RUN_BYTES + i);
            third = step_word(third, data + 2 * (size_t)RUN_BYTES + i);
        }
    }
    return skip(skip((uint32_t)first) ^ (uint32_t)second) ^ (uint32_t)third;
}

SSE42 static uint32_t
step_sse42(uint32_t state, const unsigned char* data, size_t nbytes) {
    for (; nbytes >= NUM_RUNS * RUN_BYTES; nbytes -= NUM_RUNS * RUN_BYTES) {
        state = step_three_runs(state, data);
        data += NUM_RUNS * RUN_BYTES;
    }
    uint64_t rest = state;
    for (; nbytes >= sizeof(uint64_t); nbytes -= sizeof(uint64_t)) {
        rest = step_word(rest, data);
        data += sizeof(uint64_t);
    }
    return step_table((uint32_t)rest, data, nbytes);
}

crc32c_way_t
crc32c_best_way(void) {
    return __builtin_cpu_supports("sse4.2") ? CRC32C_SSE42 : CRC32C_TABLE;
}

uint32_t
crc32c_by(crc32c_way_t way, uint32_t crc, const void* data, size_t nbytes) {
    prepare();
    return ~(way == CRC32C_SSE42 ? step_sse42(~crc, data, nbytes) : step_table(~crc, data, nbytes));
}

#else

crc32c_way_t
crc32c_best_way(void) {
    return CRC32C_TABLE;
}

uint32_t
crc32c_by(crc32c_way_t way, uint32_t crc, const void* data, size_t nbytes) {
    (void)way;
    prepare();
    return ~step_table(~crc, data, nbytes);
}

#endif

uint32_t
crc32c(uint32_t crc, const void* data, size_t nbytes) {
    return crc32c_by(crc32c_best_way(), crc, data, nbytes);
}

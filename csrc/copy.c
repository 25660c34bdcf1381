#include "copy.h"

#include <stdint.h>
#include <string.h>

enum {
    LINE_BYTES = 64,
    STREAM_MIN_BYTES = 1024, /* below, a plain copy wins: see benchmarks/bench_pool.py */
    PREFETCH_BYTES = 4 * LINE_BYTES,
};

void
copy_bytes(void* destination, const void* source, size_t nbytes) {
    copy_bytes_by(copy_best_way(), destination, source, nbytes);
}

void
copy_prefetch(const void* source, size_t nbytes) {
    for (size_t i = 0; i < nbytes && i < PREFETCH_BYTES; i += LINE_BYTES) {
        __builtin_prefetch((const char*)source + i);
    }
}

#if defined(__x86_64__)

#include <immintrin.h>

/* Copies whole lines to a line-aligned destination. */
typedef void (*stream_lines_t)(char* destination, const char* source, size_t nbytes);

__attribute__((target("avx2"))) static void
stream_lines_avx2(char* destination, const char* source, size_t nbytes) {
    for (size_t i = 0; i < nbytes; i += LINE_BYTES) {
        __m256i low = _mm256_loadu_si256((const void*)(source + i));
        __m256i high = _mm256_loadu_si256((const void*)(source + i + 32));
        _mm256_stream_si256((void*)(destination + i), low);
        _mm256_stream_si256((void*)(destination + i + 32), high);
    }
}

__attribute__((target("avx512f"))) static void
stream_lines_avx512(char* destination, const char* source, size_t nbytes) {
    for (size_t i = 0; i < nbytes; i += LINE_BYTES) {
        _mm512_stream_si512((void*)(destination + i), _mm512_loadu_si512(source + i));
    }
}

copy_way_t
copy_best_way(void) {
    if (__builtin_cpu_supports("avx512f")) {
        return COPY_AVX512;
    }
    return __builtin_cpu_supports("avx2") ? COPY_AVX2 : COPY_PLAIN;
}

void
copy_bytes_by(copy_way_t way, void* destination, const void* source, size_t nbytes) {
    static const stream_lines_t STREAM_LINES[] = {
        [COPY_PLAIN] = NULL,
        [COPY_AVX2] = stream_lines_avx2,
        [COPY_AVX512] = stream_lines_avx512,
    };
    if (nbytes < STREAM_MIN_BYTES || way == COPY_PLAIN) {
        memcpy(destination, source, nbytes);
        return;
    }
    char* to = destination;
    const char* from = source;
    size_t head = -(uintptr_t)to & (LINE_BYTES - 1);
    size_t lines = (nbytes - head) & ~(size_t)(LINE_BYTES - 1);
    memcpy(to, from, head);
    STREAM_LINES[way](to + head, from + head, lines);
    memcpy(to + head + lines, from + head + lines, nbytes - head - lines);
}

void
copy_publish(void) {
    _mm_sfence();
}

#else

copy_way_t
copy_best_way(void) {
    return COPY_PLAIN;
}

void
copy_bytes_by(copy_way_t way, void* destination, const void* source, size_t nbytes) {
    (void)way;
    memcpy(destination, source, nbytes);
}

void
copy_publish(void) {
    /* Plain stores need no more than the release store of whoever tells. */
}

#endif

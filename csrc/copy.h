/* Copies memory with non-temporal stores where that wins: a large destination that nobody on this
 * core reads next is written without first being read into the cache. */
#ifndef P2P_COPY_H
#define P2P_COPY_H

#include <stddef.h>

/* Each needs a processor that has all before it. */
typedef enum { COPY_PLAIN, COPY_AVX2, COPY_AVX512 } copy_way_t;

copy_way_t copy_best_way(void);

/* Copies in the best way. The stores may still be in flight when this returns: copy_publish()
 * before anybody is told. */
void copy_bytes(void* destination, const void* source, size_t nbytes);

/* For tests and benchmarks. */
void copy_bytes_by(copy_way_t way, void* destination, const void* source, size_t nbytes);

/* Starts to fetch what will be copied next: scattered pieces are too short for the processor to
 * notice by itself. */
void copy_prefetch(const void* source, size_t nbytes);

/* Makes everything copied by this thread visible before any later store of it. */
void copy_publish(void);

#endif

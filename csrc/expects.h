/* The receives that are expected, by channel and sequence number. Finding one costs the same
 * however many there are. All zero is empty. The caller's lock guards it. */
#ifndef P2P_EXPECTS_H
#define P2P_EXPECTS_H

#include "job.h"

enum { EXPECTS_NUM_BUCKETS = 1024 }; /* a power of two; at 10,000 receives a look-up passes ten */

typedef struct {
    job_t* buckets[EXPECTS_NUM_BUCKETS];
} expects_t;

void expects_add(expects_t* expects, job_t* job);
job_t* expects_find(expects_t* expects, uint64_t channel, uint64_t seq);
void expects_remove(expects_t* expects, job_t* job);

#endif

#include "expects.h"

/* The link that points to the job, or the empty one at the end of its bucket. */
static job_t**
find(expects_t* expects, uint64_t channel, uint64_t seq) {
    /* Fibonacci hashing (Knuth, volume 3, 6.4); channels and numbers both count from near 1. */
    uint64_t hash = (channel * UINT64_C(0xD6E8FEB86659FD93) + seq) * UINT64_C(0x9E3779B97F4A7C15);
    job_t** link = &expects->buckets[hash >> 32 & (EXPECTS_NUM_BUCKETS - 1)];
    while (*link != NULL && ((*link)->channel != channel || (*link)->seq != seq)) {
        link = &(*link)->next_in_bucket;
    }
    return link;
}

void
expects_add(expects_t* expects, job_t* job) {
    job->next_in_bucket = NULL;
    *find(expects, job->channel, job->seq) = job;
}

job_t*
expects_find(expects_t* expects, uint64_t channel, uint64_t seq) {
    return *find(expects, channel, seq);
}

void
expects_remove(expects_t* expects, job_t* job) {
    *find(expects, job->channel, job->seq) = job->next_in_bucket;
}

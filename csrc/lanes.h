/* The mover's copies. Jobs of one lane are done in order, lanes take turns, and every operation
 * costs the same however many jobs and lanes wait. All zero is empty. The caller's lock guards it.
 */
#ifndef P2P_LANES_H
#define P2P_LANES_H

#include "job.h"

enum { LANES_NUM_BUCKETS = 1024 }; /* a power of two; at 10,000 lanes a look-up passes ten */

typedef struct lane {
    uint64_t id; /* 0: of one job alone, in no bucket */
    job_queue_t jobs;
    struct lane* next; /* in the order of turns */
    struct lane* previous;
    struct lane* next_in_bucket;
} lane_t;

typedef struct {
    lane_t* first; /* has the next turn */
    lane_t* last;
    lane_t* buckets[LANES_NUM_BUCKETS];
} lanes_t;

/* False for want of memory. */
bool lanes_push(lanes_t* lanes, job_t* job);

/* The job whose turn it is, which stays queued; NULL when there is none. */
job_t* lanes_current(const lanes_t* lanes);

/* The lane whose turn it was goes behind all others. */
void lanes_turn(lanes_t* lanes);

/* Takes a queued job out; its lane ends with its last job. */
void lanes_remove(lanes_t* lanes, job_t* job);

#endif

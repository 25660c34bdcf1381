#include "lanes.h"

#include <stdlib.h>

static lane_t**
bucket_of(lanes_t* lanes, uint64_t id) {
    /* Fibonacci hashing (Knuth, volume 3, 6.4): neighbouring ids spread over the buckets. */
    return &lanes->buckets[(id * UINT64_C(0x9E3779B97F4A7C15)) >> 32 & (LANES_NUM_BUCKETS - 1)];
}

/* The link that points to the lane, or the empty one at the end of its bucket. */
static lane_t**
find(lanes_t* lanes, uint64_t id) {
    lane_t** link = bucket_of(lanes, id);
    while (*link != NULL && (*link)->id != id) {
        link = &(*link)->next_in_bucket;
    }
    return link;
}

static void
append(lanes_t* lanes, lane_t* lane) {
    lane->next = NULL;
    lane->previous = lanes->last;
    if (lanes->last != NULL) {
        lanes->last->next = lane;
    } else {
        lanes->first = lane;
    }
    lanes->last = lane;
}

static void
unlink_lane(lanes_t* lanes, lane_t* lane) {
    if (lane->previous != NULL) {
        lane->previous->next = lane->next;
    } else {
        lanes->first = lane->next;
    }
    if (lane->next != NULL) {
        lane->next->previous = lane->previous;
    } else {
        lanes->last = lane->previous;
    }
}

static lane_t*
open_lane(lanes_t* lanes, uint64_t id) {
    lane_t** link = id != 0 ? find(lanes, id) : NULL;
    if (link != NULL && *link != NULL) {
        return *link;
    }
    lane_t* lane = calloc(1, sizeof *lane);
    if (lane == NULL) {
        return NULL;
    }
    lane->id = id;
    if (link != NULL) {
        *link = lane;
    }
    append(lanes, lane);
    return lane;
}

static void
close_lane(lanes_t* lanes, lane_t* lane) {
    unlink_lane(lanes, lane);
    if (lane->id != 0) {
        *find(lanes, lane->id) = lane->next_in_bucket;
    }
    free(lane);
}

bool
lanes_push(lanes_t* lanes, job_t* job) {
    lane_t* lane = open_lane(lanes, job->lane);
    if (lane == NULL) {
        return false;
    }
    job_queue_push(&lane->jobs, job);
    job->queued_in = lane;
    return true;
}

job_t*
lanes_current(const lanes_t* lanes) {
    return lanes->first != NULL ? lanes->first->jobs.head : NULL;
}

void
lanes_turn(lanes_t* lanes) {
    lane_t* lane = lanes->first;
    if (lane != lanes->last) {
        unlink_lane(lanes, lane);
        append(lanes, lane);
    }
}

void
lanes_remove(lanes_t* lanes, job_t* job) {
    lane_t* lane = job->queued_in;
    job_queue_remove(&lane->jobs, job);
    job->queued_in = NULL;
    if (lane->jobs.head == NULL) {
        close_lane(lanes, lane);
    }
}

/* One piece of work for the mover: a copy, a send, an expected receive, or a look at each byte for
 * its checksum.
 *
 *   QUEUED -> RUNNING -> DONE | FAILED | CANCELLED      (RUNNING may be skipped)
 *
 * Once a job has ended, no byte of its regions is touched any more. */
#ifndef P2P_JOB_H
#define P2P_JOB_H

#include "regions.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum { JOB_ERROR_BYTES = 160 };

typedef enum { JOB_COPY, JOB_CHECK, JOB_SEND, JOB_EXPECT } job_kind_t;
typedef enum { JOB_QUEUED, JOB_RUNNING, JOB_DONE, JOB_FAILED, JOB_CANCELLED } job_state_t;

typedef struct mover mover_t; /* known here by name only */

typedef struct job {
    job_kind_t kind;
    regions_t regions;
    uint64_t* word; /* copy: receives word_value once all bytes are visible; may be NULL */
    uint64_t word_value;
    uint64_t lane;    /* copy, check: jobs of one lane are done in order; 0 is a lane of its own */
    uint64_t channel; /* send, expect */
    uint64_t seq;
    bool is_checked; /* the checksum is wanted too */
    void* owner;     /* the caller's; handed back by mover_drain */

    atomic_int state;
    char error[JOB_ERROR_BYTES]; /* written before the state that tells of it */

    /* The mover's. */
    mover_t* mover; /* lives at least as long as the job; NULL: none yet */
    void (*release_mover)(mover_t* mover);
    atomic_uint num_references;
    cursor_t cursor;
    uint64_t moved_bytes;
    uint32_t checksum;        /* CRC-32C of the bytes that were moved; whole when it is DONE */
    bool is_cancel_requested; /* under the mover's lock */
    bool is_aborting;         /* a send that has ended, whose peer must still be told */
    struct job* next;         /* in one of the mover's queues */
    struct job* previous;
    struct lane* queued_in;     /* copy, check: the lane that it waits in, or NULL */
    struct job* next_in_bucket; /* expect */
    struct job* next_cancelled;
    struct job* next_ended;
} job_t;

/* Takes the regions over, also when it returns NULL for want of memory. */
job_t* job_create(job_kind_t kind, regions_t* regions, uint64_t channel, uint64_t seq);
void job_retain(job_t* job);
void job_release(job_t* job);

/* Takes the next nbytes into the checksum, if one is wanted. */
void job_check(job_t* job, regions_side_t side, size_t nbytes);

job_state_t job_state(const job_t* job);
bool job_has_ended(const job_t* job);

/* A queue of jobs, first in first out. All zero is empty. Every operation costs the same, however
 * long the queue is. */
typedef struct {
    job_t* head;
    job_t* tail;
} job_queue_t;

void job_queue_push(job_queue_t* queue, job_t* job);
job_t* job_queue_pop(job_queue_t* queue);

/* The job must be in this queue. */
void job_queue_remove(job_queue_t* queue, job_t* job);

#endif

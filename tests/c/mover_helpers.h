/* What the tests of the mover share: jobs over arrays, and a mover that stands still. */
#ifndef P2P_TESTS_MOVER_HELPERS_H
#define P2P_TESTS_MOVER_HELPERS_H

#include "check.h"
#include "mover.h"
#include "mover_thread.h"

#include <string.h>
#include <sys/eventfd.h>

static const double LONG_SECONDS = 30.0; /* nobody waits that long unless something is broken */

static inline int64_t
address_of(const void* pointer) {
    return (int64_t)(intptr_t)pointer;
}

/* A job over one span; NULL where its kind has no such side. */
static inline job_t*
make_job(job_kind_t kind, uint64_t channel, uint64_t seq, const void* source, void* destination,
         size_t nbytes) {
    int64_t from = address_of(source);
    int64_t to = address_of(destination);
    int64_t length = (int64_t)nbytes;
    regions_t regions;
    CHECK(regions_create(&regions, source != NULL ? &from : NULL, destination != NULL ? &to : NULL,
                         &length, 1) == REGIONS_OK);
    job_t* job = job_create(kind, &regions, channel, seq);
    CHECK(job != NULL);
    return job;
}

static inline mover_t*
make_mover(size_t slice_bytes) {
    mover_t* mover = mover_create(slice_bytes);
    CHECK(mover != NULL);
    return mover;
}

static inline int
release_all(job_t* ended) {
    int count = 0;
    for (job_t* next = NULL; ended != NULL; ended = next, count++) {
        next = ended->next_ended;
        job_release(ended);
    }
    return count;
}

static inline void
end_mover(mover_t* mover) {
    CHECK(mover_close(mover, LONG_SECONDS));
    release_all(mover_drain(mover));
    mover_release(mover);
}

static inline job_t*
submit(mover_t* mover, job_t* job) {
    CHECK(mover_submit(mover, job) == MOVER_OK);
    return job;
}

/* Queues a copy while the caller holds the lock, so that the thread cannot start. */
static inline job_t*
queue_locked(mover_t* mover, job_t* job) {
    job_retain(job);
    mover_retain(mover);
    job->mover = mover;
    job->release_mover = mover_release;
    CHECK(lanes_push(&mover->copies, job));
    return job;
}

static inline void
wake_and_unlock(mover_t* mover) {
    CHECK(eventfd_write(mover->wake_fd, 1) == 0);
    pthread_mutex_unlock(&mover->lock);
}

/* Waits, checks how it ended, and lets it go. */
static inline void
expect_end(job_t* job, job_state_t state, const char* error) {
    CHECK(mover_wait(job, LONG_SECONDS));
    if (job_state(job) != state || strstr(job->error, error) == NULL) {
        fprintf(stderr, "state %d, error '%s'\n", (int)job_state(job), job->error);
    }
    CHECK(job_state(job) == state);
    CHECK(strstr(job->error, error) != NULL);
    job_release(job);
}

static inline mover_stats_t
stats_of(mover_t* mover) {
    mover_stats_t stats;
    mover_stats(mover, &stats);
    return stats;
}

#endif

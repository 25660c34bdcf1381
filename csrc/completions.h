/* The jobs that ended and were not drained yet, in order: waiters sleep on a condition, and an
 * eventfd tells the owner. The caller's lock guards it. */
#ifndef P2P_COMPLETIONS_H
#define P2P_COMPLETIONS_H

#include "job.h"

#include <pthread.h>
#include <time.h>

typedef struct {
    job_t* head; /* linked by next_ended */
    job_t* tail;
    int fd;                 /* readable while the list is not empty; -1 once closed */
    pthread_cond_t changed; /* a job ended, or the thread that ends them */
    uint64_t num_ended;     /* ever */
} completions_t;

/* False: see errno, and destroy it all the same. */
bool completions_init(completions_t* completions);
void completions_close(completions_t* completions); /* only the descriptor; idempotent */
void completions_destroy(completions_t* completions);

/* Ends the job and takes the caller's reference to it over. */
void completions_add(completions_t* completions, job_t* job, job_state_t state, const char* error);

/* All of them, with their references; NULL when there are none. */
job_t* completions_take(completions_t* completions);

/* Waits until the job has ended, and lets go of the lock meanwhile. False at the deadline, a time
 * of CLOCK_MONOTONIC. */
bool completions_wait(completions_t* completions, pthread_mutex_t* lock, const job_t* job,
                      const struct timespec* deadline);

#endif

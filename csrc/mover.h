/* One native thread that copies memory and moves framed streams over sockets, without the
 * interpreter: its progress does not depend on who holds a lock elsewhere in the process.
 *
 * It serves its copies in slices, round robin over their lanes, sleeps when there is nothing to do,
 * and tells of ended jobs by an eventfd. All functions may be called from any thread and none
 * blocks, except mover_close and mover_wait, which take a limit. */
#ifndef P2P_MOVER_H
#define P2P_MOVER_H

#include "job.h"

typedef enum {
    MOVER_OK,
    MOVER_ERRNO,           /* see errno */
    MOVER_CLOSED,          /* takes no more work */
    MOVER_UNKNOWN_CHANNEL, /* never attached, or detached */
    MOVER_DUPLICATE,       /* the channel, or the seq that is expected on it, exists */
} mover_status_t;

typedef struct {
    uint64_t jobs_ended;
    uint64_t bytes_copied;
    uint64_t bytes_sent;     /* payload */
    uint64_t bytes_received; /* payload that somebody expected */
    uint64_t bytes_dropped;  /* payload that nobody expected (any more) */
    uint64_t num_channels;   /* attached and not broken */
    uint64_t protocol_errors;
    bool is_alive; /* the thread runs, and is this process's */
} mover_stats_t;

/* NULL: see errno. The caller holds one reference. */
mover_t* mover_create(size_t slice_bytes);
void mover_retain(mover_t* mover);
void mover_release(mover_t* mover); /* the last one frees it: mover_close must have returned true */

/* Stops the thread, cancels what is open, closes all descriptors. Idempotent. False when the thread
 * did not end in time (call again) or belongs to the process that forked this one. */
bool mover_close(mover_t* mover, double timeout_seconds);

/* Readable while there are ended jobs to drain; -1 once closed. */
int mover_fileno(mover_t* mover);

/* The jobs that ended since the last call, in order, linked by next_ended. The caller gets the
 * mover's reference to each. */
job_t* mover_drain(mover_t* mover);

/* A channel is both directions of one connected stream socket; its descriptor is dup'ed. */
mover_status_t mover_attach(mover_t* mover, int fd, uint64_t channel);
void mover_detach(mover_t* mover, uint64_t channel); /* its jobs end as failed */

/* Takes a reference of its own when it returns MOVER_OK. A job on a broken channel ends as failed.
 */
mover_status_t mover_submit(mover_t* mover, job_t* job);

/* Asynchronous: a copy stops at the next slice, a receive drops the rest, a send stops at once and
 * tells its peer. */
void mover_cancel(job_t* job);

/* True if the job ended in time. */
bool mover_wait(job_t* job, double timeout_seconds);

void mover_stats(mover_t* mover, mover_stats_t* out);

#endif

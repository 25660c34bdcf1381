/* One connected stream socket of the mover, and the jobs that use it in both directions. */
#ifndef P2P_CHANNEL_H
#define P2P_CHANNEL_H

#include "job.h"
#include "segment.h"

#include <sys/types.h>

enum { CHANNEL_MAX_VECTORS = 256 };

/* One direction: the segment in progress. Touched by the mover's thread only. */
typedef struct {
    char header[SEGMENT_HEADER_BYTES];
    size_t header_bytes; /* of the header, moved so far */
    segment_t segment;
    uint64_t payload_left;
    job_t* job;     /* NULL: payload is dropped (receiving) or zeros (sending) */
    bool is_active; /* sending only: a segment is in progress */
} half_t;

typedef struct channel {
    uint64_t id;
    int fd;            /* -1: broken */
    unsigned interest; /* epoll events asked for */
    half_t receiving;
    half_t sending;
    job_queue_t sends;           /* under the mover's lock */
    job_queue_t expects;         /* under the mover's lock */
    char error[JOB_ERROR_BYTES]; /* why it is broken */
    struct channel* next;
} channel_t;

/* What one attempt to move bytes came to. */
typedef enum { PUMP_MOVED, PUMP_WOULD_BLOCK, PUMP_IDLE, PUMP_BROKEN } pump_t;

/* Move up to about one slice; called by the mover's thread without its lock. False: the channel
 * must be broken, and its error says why. */
bool channel_receive(mover_t* mover, channel_t* channel);
bool channel_send(mover_t* mover, channel_t* channel);

/* What the result of `call` means; sets the channel's error. */
pump_t channel_io_result(channel_t* channel, const char* call, ssize_t result);

/* With the mover's lock held: */

bool channel_has_output(const channel_t* channel);

/* Ends one of its jobs that has not ended. An expected payload goes on by being dropped, a segment
 * on its way goes on with zeros and is followed by an abort. */
void channel_cancel(mover_t* mover, channel_t* channel, job_t* job);
void channel_cancel_expect(mover_t* mover, channel_t* channel, job_t* job);
void channel_cancel_send(mover_t* mover, channel_t* channel, job_t* job);

/* Closes the socket and ends all jobs in this state, for the channel's error. */
void channel_break(mover_t* mover, channel_t* channel, job_state_t state);

#endif

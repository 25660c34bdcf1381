/* One connected stream socket of the mover, its jobs, and the parts common to both directions. */
#ifndef P2P_CHANNEL_H
#define P2P_CHANNEL_H

#include "completions.h"
#include "expects.h"
#include "segment.h"

#include <sys/types.h>

enum { CHANNEL_MAX_VECTORS = 256, CHANNEL_SCRATCH_BYTES = 64 << 10 };

/* State that all channels of a mover share. `lock` guards everything below it, and the queues of
 * each channel. */
typedef struct {
    size_t slice_bytes;
    char scratch[CHANNEL_SCRATCH_BYTES]; /* the thread's: receives unwanted payload */

    pthread_mutex_t* lock;      /* the mover's */
    completions_t* completions; /* the mover's */
    int epoll_fd;
    expects_t expects; /* of all channels */
    uint64_t bytes_sent;
    uint64_t bytes_received;
    uint64_t bytes_dropped;
    uint64_t num_channels;
    uint64_t protocol_errors;
} channel_shared_t;

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
    channel_shared_t* shared;
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

/* The result of one attempt to move bytes. */
typedef enum { PUMP_MOVED, PUMP_WOULD_BLOCK, PUMP_IDLE, PUMP_BROKEN } pump_t;

/* The descriptor is dup'ed. NULL: see errno. */
channel_t* channel_create(channel_shared_t* shared, uint64_t id, int fd);

/* It has no jobs. Leaves errno as it is. */
void channel_free(channel_t* channel);

/* Says why the channel must be broken. Returns PUMP_BROKEN. */
pump_t channel_fail(channel_t* channel, const char* error);

/* Maps the result of `call` to a pump_t; sets the channel's error. */
pump_t channel_io_result(channel_t* channel, const char* call, ssize_t result);

#endif

/* All channels of a mover, by their ids: both directions joined. With the mover's lock held, but
 * for channel_serve. */
#ifndef P2P_CHANNELS_H
#define P2P_CHANNELS_H

#include "channel.h"

enum { CHANNELS_NUM_BUCKETS = 1024 }; /* a power of two */

typedef struct {
    channel_shared_t shared;
    channel_t* buckets[CHANNELS_NUM_BUCKETS]; /* the attached ones */
    channel_t* detached;                      /* for the thread to free */
} channels_t;

/* NULL: none is attached under this id. */
channel_t* channels_find(channels_t* channels, uint64_t id);

/* Its id must be free. False: see errno. */
bool channels_attach(channels_t* channels, channel_t* channel);

/* False: there is none. */
bool channels_detach(channels_t* channels, uint64_t id);

/* For the thread: frees them. Jobs of the detached ones end as failed, those of all others as
 * cancelled. */
void channels_free_detached(channels_t* channels);
void channels_free_attached(channels_t* channels, const char* reason);

/* A job on a broken channel ends as failed. False: its seq is expected already. */
bool channel_submit(channel_t* channel, job_t* job);

/* For the thread: ends one of its jobs that has not ended. */
void channel_cancel(channel_t* channel, job_t* job);

/* For the thread, without the lock: moves up to about one slice each way, as these epoll events
 * allow. */
void channel_serve(channel_t* channel, unsigned events);

#endif

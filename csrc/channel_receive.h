/* Receives on a channel: payload lands in the jobs that expect it, and other payload is dropped. */
#ifndef P2P_CHANNEL_RECEIVE_H
#define P2P_CHANNEL_RECEIVE_H

#include "channel.h"

/* Receives up to about one slice; called by the mover's thread without its lock. False: the channel
 * must be broken, and its error says why. */
bool channel_receive(channel_t* channel);

/* With the lock held: ends a job that has not ended. Its payload goes on by being dropped. */
void channel_cancel_expect(channel_t* channel, job_t* job);

#endif

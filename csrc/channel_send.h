/* Sends on a channel: its jobs take turns, segment by segment. */
#ifndef P2P_CHANNEL_SEND_H
#define P2P_CHANNEL_SEND_H

#include "channel.h"

/* Sends up to about one slice; called by the mover's thread without its lock. False: the channel
 * must be broken, and its error says why. */
bool channel_send(channel_t* channel);

/* With the lock held: something waits to be sent. */
bool channel_has_output(const channel_t* channel);

/* With the lock held: ends a job that has not ended. A segment on its way goes on with zeros and is
 * followed by an abort. */
void channel_cancel_send(channel_t* channel, job_t* job);

#endif

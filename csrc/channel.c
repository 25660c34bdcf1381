#include "mover_internal.h"

#include <errno.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <unistd.h>

pump_t
channel_io_result(channel_t* channel, const char* call, ssize_t result) {
    if (result > 0) {
        return PUMP_MOVED;
    }
    if (result < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
        return PUMP_WOULD_BLOCK;
    }
    if (result < 0) {
        snprintf(channel->error, sizeof channel->error, "%s: %m", call);
    } else {
        snprintf(channel->error, sizeof channel->error, "the peer closed the connection");
    }
    return PUMP_BROKEN;
}

bool
channel_has_output(const channel_t* channel) {
    return channel->sending.is_active || channel->sends.head != NULL;
}

void
channel_cancel(mover_t* mover, channel_t* channel, job_t* job) {
    if (job->kind == JOB_SEND) {
        channel_cancel_send(mover, channel, job);
    } else {
        channel_cancel_expect(mover, channel, job);
    }
}

void
channel_break(mover_t* mover, channel_t* channel, job_state_t state) {
    /* Closing alone would not end the events: the caller still has a descriptor of this socket. */
    epoll_ctl(mover->epoll_fd, EPOLL_CTL_DEL, channel->fd, NULL);
    close(channel->fd);
    channel->fd = -1;
    mover->stats.num_channels--;
    channel->receiving = (half_t){0};
    channel->sending = (half_t){0};
    for (job_t* job = NULL; (job = job_queue_pop(&channel->expects)) != NULL;) {
        expects_remove(&mover->expects, job);
        mover_end_job(mover, job, state, channel->error);
    }
    for (job_t* job = NULL; (job = job_queue_pop(&channel->sends)) != NULL;) {
        if (job->is_aborting) {
            job_release(job);
        } else {
            mover_end_job(mover, job, state, channel->error);
        }
    }
}

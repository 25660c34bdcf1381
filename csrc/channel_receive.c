#include "channel_receive.h"

#include <sys/socket.h>

static void
expect_end(channel_t* channel, job_t* job, job_state_t state, const char* error) {
    job_queue_remove(&channel->expects, job);
    expects_remove(&channel->shared->expects, job);
    if (channel->receiving.job == job) {
        channel->receiving.job = NULL;
    }
    completions_add(channel->shared->completions, job, state, error);
}

static void
segment_received(channel_t* channel) {
    half_t* half = &channel->receiving;
    if (half->job != NULL && (half->segment.flags & SEGMENT_LAST) != 0) {
        expect_end(channel, half->job, JOB_DONE, "");
    }
    half->job = NULL;
    half->header_bytes = 0;
}

static pump_t
protocol_error(channel_t* channel, const char* error) {
    channel->shared->protocol_errors++;
    return channel_fail(channel, error);
}

/* The header is complete: finds out whose bytes come next. */
static pump_t
segment_announced(channel_t* channel) {
    half_t* half = &channel->receiving;
    if (!segment_decode(&half->segment, half->header)) {
        return protocol_error(channel, "the peer sent something that is not a segment");
    }
    job_t* job = expects_find(&channel->shared->expects, channel->id, half->segment.seq);
    const char* mismatch =
        job != NULL ? segment_mismatch(&half->segment, job->moved_bytes, job->regions.nbytes)
                    : NULL;
    if (mismatch != NULL) {
        return protocol_error(channel, mismatch);
    }
    if (job != NULL && (half->segment.flags & SEGMENT_ABORTED) != 0) {
        expect_end(channel, job, JOB_FAILED, "the sender aborted");
        job = NULL;
    }
    if (job != NULL) {
        atomic_store(&job->state, JOB_RUNNING);
    }
    half->job = job;
    half->payload_left = half->segment.nbytes;
    if (half->payload_left == 0) {
        segment_received(channel);
    }
    return PUMP_MOVED;
}

static pump_t
receive_header(channel_t* channel) {
    half_t* half = &channel->receiving;
    ssize_t got = recv(channel->fd, half->header + half->header_bytes,
                       SEGMENT_HEADER_BYTES - half->header_bytes, MSG_DONTWAIT);
    pump_t pump = channel_io_result(channel, "recv", got);
    if (pump != PUMP_MOVED) {
        return pump;
    }
    half->header_bytes += (size_t)got;
    if (half->header_bytes == SEGMENT_HEADER_BYTES) {
        pthread_mutex_lock(channel->shared->lock);
        pump = segment_announced(channel);
        pthread_mutex_unlock(channel->shared->lock);
    }
    return pump;
}

static ssize_t
receive_into_job(channel_t* channel, job_t* job, size_t limit) {
    struct iovec vectors[CHANNEL_MAX_VECTORS];
    struct msghdr message = {.msg_iov = vectors};
    message.msg_iovlen = regions_vectors(&job->regions, job->cursor, limit, REGIONS_DESTINATION,
                                         vectors, CHANNEL_MAX_VECTORS);
    return recvmsg(channel->fd, &message, MSG_DONTWAIT);
}

static ssize_t
receive_into_scratch(channel_t* channel, size_t limit) {
    size_t nbytes = limit < CHANNEL_SCRATCH_BYTES ? limit : CHANNEL_SCRATCH_BYTES;
    return recv(channel->fd, channel->shared->scratch, nbytes, MSG_DONTWAIT);
}

static pump_t
receive_payload(channel_t* channel, size_t limit, size_t* moved) {
    half_t* half = &channel->receiving;
    job_t* job = half->job;
    limit = limit < half->payload_left ? limit : (size_t)half->payload_left;
    ssize_t got =
        job != NULL ? receive_into_job(channel, job, limit) : receive_into_scratch(channel, limit);
    pump_t pump = channel_io_result(channel, "recv", got);
    if (pump != PUMP_MOVED) {
        return pump;
    }
    *moved = (size_t)got;
    half->payload_left -= (uint64_t)got;
    if (job != NULL) {
        job_check(job, REGIONS_DESTINATION, *moved);
    }
    pthread_mutex_lock(channel->shared->lock);
    if (job != NULL) {
        regions_advance(&job->regions, &job->cursor, *moved);
        job->moved_bytes += *moved;
        channel->shared->bytes_received += *moved;
    } else {
        channel->shared->bytes_dropped += *moved;
    }
    if (half->payload_left == 0) {
        segment_received(channel);
    }
    pthread_mutex_unlock(channel->shared->lock);
    return PUMP_MOVED;
}

bool
channel_receive(channel_t* channel) {
    pump_t pump = PUMP_MOVED;
    for (size_t total = 0; pump == PUMP_MOVED && total < channel->shared->slice_bytes;) {
        size_t moved = SEGMENT_HEADER_BYTES;
        pump = channel->receiving.header_bytes < SEGMENT_HEADER_BYTES
                   ? receive_header(channel)
                   : receive_payload(channel, channel->shared->slice_bytes - total, &moved);
        total += moved;
    }
    return pump != PUMP_BROKEN;
}

void
channel_cancel_expect(channel_t* channel, job_t* job) {
    expect_end(channel, job, JOB_CANCELLED, "cancelled");
}

#include "channel_send.h"

#include <sys/socket.h>

static void
segment_begin(channel_t* channel, job_t* job) {
    half_t* half = &channel->sending;
    uint64_t left = job->is_aborting ? 0 : job->regions.nbytes - job->moved_bytes;
    uint64_t slice = channel->shared->slice_bytes;
    half->segment = (segment_t){
        .seq = job->seq,
        .offset = job->moved_bytes,
        .nbytes = left < slice ? left : slice,
    };
    if (half->segment.nbytes == 0) {
        half->segment.flags = job->is_aborting ? SEGMENT_LAST | SEGMENT_ABORTED : SEGMENT_LAST;
    }
    segment_encode(&half->segment, half->header);
    half->header_bytes = 0;
    half->payload_left = half->segment.nbytes;
    half->job = job;
    half->is_active = true;
    if (!job_has_ended(job)) {
        atomic_store(&job->state, JOB_RUNNING);
    }
}

/* The segment is with the kernel: the next one is the next job's. */
static void
segment_sent(channel_t* channel) {
    half_t* half = &channel->sending;
    job_t* job = half->job;
    half->is_active = false;
    half->job = NULL;
    if (job == NULL) {
        return;
    }
    job_queue_remove(&channel->sends, job);
    if (half->segment.flags == 0) {
        job_queue_push(&channel->sends, job);
    } else if (job->is_aborting) {
        job_release(job);
    } else {
        completions_add(channel->shared->completions, job, JOB_DONE, "");
    }
}

static bool
next_segment(channel_t* channel) {
    pthread_mutex_lock(channel->shared->lock);
    job_t* job = channel->sends.head;
    if (job != NULL) {
        segment_begin(channel, job);
    }
    pthread_mutex_unlock(channel->shared->lock);
    return job != NULL;
}

/* Fills a segment whose job has stopped; its receiver will be told to forget it. */
static size_t
zero_vectors(size_t limit, struct iovec* vectors, size_t capacity) {
    static const char ZEROS[4096];
    size_t count = 0;
    while (count < capacity && limit > 0) {
        size_t nbytes = limit < sizeof ZEROS ? limit : sizeof ZEROS;
        vectors[count++] = (struct iovec){.iov_base = (void*)(uintptr_t)ZEROS, .iov_len = nbytes};
        limit -= nbytes;
    }
    return count;
}

static ssize_t
send_vectors(channel_t* channel) {
    half_t* half = &channel->sending;
    size_t limit = (size_t)half->payload_left;
    struct iovec vectors[CHANNEL_MAX_VECTORS + 1];
    struct msghdr message = {.msg_iov = vectors, .msg_iovlen = 1};
    vectors[0] = (struct iovec){.iov_base = half->header + half->header_bytes,
                                .iov_len = SEGMENT_HEADER_BYTES - half->header_bytes};
    message.msg_iovlen += half->job != NULL
                              ? regions_vectors(&half->job->regions, half->job->cursor, limit,
                                                REGIONS_SOURCE, vectors + 1, CHANNEL_MAX_VECTORS)
                              : zero_vectors(limit, vectors + 1, CHANNEL_MAX_VECTORS);
    /* Something always follows a payload, so let the kernel fill its packets. */
    int more = half->segment.nbytes > 0 ? MSG_MORE : 0;
    return sendmsg(channel->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL | more);
}

static pump_t
send_some(channel_t* channel, size_t* moved) {
    half_t* half = &channel->sending;
    if (!half->is_active && !next_segment(channel)) {
        return PUMP_IDLE;
    }
    ssize_t sent = send_vectors(channel);
    pump_t pump = channel_io_result(channel, "send", sent);
    if (pump != PUMP_MOVED) {
        return pump;
    }
    size_t header = SEGMENT_HEADER_BYTES - half->header_bytes;
    header = header < (size_t)sent ? header : (size_t)sent;
    size_t payload = (size_t)sent - header;
    half->header_bytes += header;
    half->payload_left -= payload;
    *moved = (size_t)sent;
    if (half->job != NULL) {
        job_check(half->job, REGIONS_SOURCE, payload);
    }
    pthread_mutex_lock(channel->shared->lock);
    if (half->job != NULL && payload > 0) {
        regions_advance(&half->job->regions, &half->job->cursor, payload);
        half->job->moved_bytes += payload;
        channel->shared->bytes_sent += payload;
    }
    if (half->payload_left == 0 && half->header_bytes == SEGMENT_HEADER_BYTES) {
        segment_sent(channel);
    }
    pthread_mutex_unlock(channel->shared->lock);
    return PUMP_MOVED;
}

bool
channel_send(channel_t* channel) {
    pump_t pump = PUMP_MOVED;
    for (size_t total = 0; pump == PUMP_MOVED && total < channel->shared->slice_bytes;) {
        size_t moved = 0;
        pump = send_some(channel, &moved);
        total += moved;
    }
    return pump != PUMP_BROKEN;
}

bool
channel_has_output(const channel_t* channel) {
    return channel->sending.is_active || channel->sends.head != NULL;
}

/* A job whose last segment is on its way needs no abort: all its bytes have left. */
void
channel_cancel_send(channel_t* channel, job_t* job) {
    half_t* half = &channel->sending;
    bool is_in_progress = half->is_active && half->job == job;
    if (is_in_progress) {
        half->job = NULL;
        half->is_active = half->header_bytes > 0;
    }
    if (is_in_progress && half->is_active && half->segment.flags != 0) {
        job_queue_remove(&channel->sends, job);
    } else {
        job->is_aborting = true;
        job_retain(job);
    }
    completions_add(channel->shared->completions, job, JOB_CANCELLED, "cancelled");
}

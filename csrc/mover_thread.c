#include "mover_internal.h"

#include "copy.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>

enum {
    MAX_EVENTS = 64,
    CHECKED_BYTES = 128 << 10, /* are still in the cache when they are copied */
};

static void
copy_end(mover_t* mover, job_t* job) {
    lanes_remove(&mover->copies, job);
    if (job->is_cancel_requested) {
        mover_end_job(mover, job, JOB_CANCELLED, "cancelled");
        return;
    }
    if (job->word != NULL) {
        __atomic_store_n(job->word, job->word_value, __ATOMIC_RELEASE);
    }
    mover_end_job(mover, job, JOB_DONE, "");
}

/* Copies, or only looks at, up to `limit` bytes. Returns how many. */
static size_t
copy_some(job_t* job, size_t limit) {
    if (job->kind == JOB_COPY && !job->is_checked) {
        return regions_copy(&job->regions, &job->cursor, limit);
    }
    uint64_t left = job->regions.nbytes - job->moved_bytes;
    limit = limit < left ? limit : (size_t)left;
    for (size_t done = 0, piece = 0; done < limit; done += piece) {
        piece = limit - done < CHECKED_BYTES ? limit - done : CHECKED_BYTES;
        job_check(job, REGIONS_SOURCE, piece);
        if (job->kind == JOB_COPY) {
            regions_copy(&job->regions, &job->cursor, piece);
        } else {
            regions_advance(&job->regions, &job->cursor, piece);
        }
    }
    return limit;
}

/* Serves one slice of the lane whose turn it is. Called and returns without the lock. */
static void
copy_slice(mover_t* mover, job_t* job) {
    size_t copied = copy_some(job, mover->slice_bytes);
    copy_publish();
    pthread_mutex_lock(&mover->lock);
    job->moved_bytes += copied;
    mover->stats.bytes_copied += job->kind == JOB_COPY ? copied : 0;
    lanes_turn(&mover->copies);
    if (job->is_cancel_requested || job->moved_bytes == job->regions.nbytes) {
        copy_end(mover, job);
    }
    pthread_mutex_unlock(&mover->lock);
}

/* A job that has not ended is in a lane, or in a channel that is attached: `serve_detached` ended
 * those of all others. */
static void
serve_cancel(mover_t* mover, job_t* job) {
    if (job->kind == JOB_COPY || job->kind == JOB_CHECK) {
        copy_end(mover, job);
        return;
    }
    channel_t* channel = *mover_find_channel(mover, job->channel);
    channel_cancel(mover, channel, job);
    mover_update_interest(mover, channel);
}

static void
serve_cancels(mover_t* mover) {
    while (mover->cancelled != NULL) {
        job_t* job = mover->cancelled;
        mover->cancelled = job->next_cancelled;
        if (!job_has_ended(job)) {
            serve_cancel(mover, job);
        }
        job_release(job);
    }
}

static void
free_channel(mover_t* mover, channel_t* channel, job_state_t state, const char* reason) {
    if (channel->fd >= 0) {
        snprintf(channel->error, sizeof channel->error, "%s", reason);
        channel_break(mover, channel, state);
    }
    free(channel);
}

static void
serve_detached(mover_t* mover) {
    while (mover->detached != NULL) {
        channel_t* channel = mover->detached;
        mover->detached = channel->next;
        free_channel(mover, channel, JOB_FAILED, "the channel was detached");
    }
}

/* What the callers asked for. Returns the next copy, if any. */
static job_t*
serve_callers(mover_t* mover, bool* is_closing) {
    pthread_mutex_lock(&mover->lock);
    serve_detached(mover);
    serve_cancels(mover);
    job_t* job = lanes_current(&mover->copies);
    if (job != NULL) {
        atomic_store(&job->state, JOB_RUNNING);
    }
    *is_closing = mover->is_closing;
    mover->is_asleep = job == NULL && !mover->is_closing;
    pthread_mutex_unlock(&mover->lock);
    return job;
}

static void
serve_channel(mover_t* mover, channel_t* channel, unsigned events) {
    if (channel->fd < 0) {
        return; /* an earlier event of this round broke it */
    }
    bool is_whole = true;
    if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) {
        is_whole = channel_receive(mover, channel);
    }
    if (is_whole && (events & EPOLLOUT) != 0) {
        is_whole = channel_send(mover, channel);
    }
    pthread_mutex_lock(&mover->lock);
    if (is_whole) {
        mover_update_interest(mover, channel);
    } else {
        channel_break(mover, channel, JOB_FAILED);
    }
    pthread_mutex_unlock(&mover->lock);
}

static void
serve_sockets(mover_t* mover, int timeout) {
    struct epoll_event events[MAX_EVENTS];
    int count = epoll_wait(mover->epoll_fd, events, MAX_EVENTS, timeout);
    for (int i = 0; i < count; i++) {
        if (events[i].data.ptr == NULL) {
            mover_clear_eventfd(mover->wake_fd);
        } else {
            serve_channel(mover, events[i].data.ptr, events[i].events);
        }
    }
}

/* Ends everything that is still open. */
static void
thread_exit(mover_t* mover) {
    pthread_mutex_lock(&mover->lock);
    serve_detached(mover);
    serve_cancels(mover);
    for (job_t* job = NULL; (job = lanes_current(&mover->copies)) != NULL;) {
        lanes_remove(&mover->copies, job);
        mover_end_job(mover, job, JOB_CANCELLED, "the mover was closed");
    }
    for (size_t i = 0; i < MOVER_CHANNEL_BUCKETS; i++) {
        while (mover->channels[i] != NULL) {
            channel_t* channel = mover->channels[i];
            mover->channels[i] = channel->next;
            free_channel(mover, channel, JOB_CANCELLED, "the mover was closed");
        }
    }
    mover->has_exited = true;
    pthread_cond_broadcast(&mover->changed);
    pthread_mutex_unlock(&mover->lock);
}

void*
mover_main(void* argument) {
    mover_t* mover = argument;
    thread_prepare("p2p-mover");
    for (;;) {
        bool is_closing = false;
        job_t* job = serve_callers(mover, &is_closing);
        if (is_closing) {
            thread_exit(mover);
            return NULL;
        }
        if (job != NULL) {
            copy_slice(mover, job);
        }
        serve_sockets(mover, job != NULL ? 0 : -1);
    }
}

#include "mover_thread.h"

#include "copy.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

enum {
    MAX_EVENTS = 64,
    CHECKED_BYTES = 128 << 10, /* are still in the cache when they are copied */
};

static void
copy_end(mover_t* mover, job_t* job) {
    lanes_remove(&mover->copies, job);
    if (job->is_cancel_requested) {
        completions_add(&mover->completions, job, JOB_CANCELLED, "cancelled");
        return;
    }
    if (job->word != NULL) {
        __atomic_store_n(job->word, job->word_value, __ATOMIC_RELEASE);
    }
    completions_add(&mover->completions, job, JOB_DONE, "");
}

/* Copies, or only looks at, up to `limit` bytes. Returns how many. */
static size_t
copy_some(job_t* job, size_t limit) {
    if (job->word != NULL) { /* the destination is a peer's memory file, perhaps new to us */
        regions_map_destination(&job->regions, job->cursor, limit);
    }
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
    mover->bytes_copied += job->kind == JOB_COPY ? copied : 0;
    lanes_turn(&mover->copies);
    if (job->is_cancel_requested || job->moved_bytes == job->regions.nbytes) {
        copy_end(mover, job);
    }
    pthread_mutex_unlock(&mover->lock);
}

/* A job that has not ended is in a lane, or in a channel that is attached: `channels_free_detached`
 * ended those of all others. */
static void
serve_cancel(mover_t* mover, job_t* job) {
    if (job->kind == JOB_COPY || job->kind == JOB_CHECK) {
        copy_end(mover, job);
        return;
    }
    channel_cancel(channels_find(&mover->channels, job->channel), job);
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

/* Serves the callers' requests. Returns the next copy, if any. */
static job_t*
serve_callers(mover_t* mover, bool* is_closing) {
    pthread_mutex_lock(&mover->lock);
    channels_free_detached(&mover->channels);
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
serve_sockets(mover_t* mover, int timeout) {
    struct epoll_event events[MAX_EVENTS];
    int count = epoll_wait(mover->channels.shared.epoll_fd, events, MAX_EVENTS, timeout);
    for (int i = 0; i < count; i++) {
        if (events[i].data.ptr == NULL) {
            eventfd_t wakes = 0;
            eventfd_read(mover->wake_fd, &wakes);
        } else {
            channel_serve(events[i].data.ptr, events[i].events);
        }
    }
}

/* Ends everything that is still open. */
static void
thread_exit(mover_t* mover) {
    pthread_mutex_lock(&mover->lock);
    channels_free_detached(&mover->channels);
    serve_cancels(mover);
    for (job_t* job = NULL; (job = lanes_current(&mover->copies)) != NULL;) {
        lanes_remove(&mover->copies, job);
        completions_add(&mover->completions, job, JOB_CANCELLED, "the mover was closed");
    }
    channels_free_attached(&mover->channels, "the mover was closed");
    mover->has_exited = true;
    pthread_cond_broadcast(&mover->completions.changed);
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

void
mover_wake(mover_t* mover) {
    if (mover->is_asleep) {
        mover->is_asleep = false;
        eventfd_write(mover->wake_fd, 1);
    }
}

void
mover_list_cancelled(mover_t* mover, job_t* job) {
    if (job_has_ended(job) || job->is_cancel_requested) {
        return;
    }
    job->is_cancel_requested = true;
    job_retain(job);
    job->next_cancelled = mover->cancelled;
    mover->cancelled = job;
    mover_wake(mover);
}

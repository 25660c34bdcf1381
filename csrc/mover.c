#include "mover.h"

#include "mover_thread.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* ---- life ---- */

static bool
open_descriptors(mover_t* mover) {
    int epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    mover->channels.shared.epoll_fd = epoll_fd;
    mover->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN};
    return epoll_fd >= 0 && mover->wake_fd >= 0 &&
           epoll_ctl(epoll_fd, EPOLL_CTL_ADD, mover->wake_fd, &event) == 0;
}

static void
close_descriptors(mover_t* mover) {
    int* const descriptors[] = {&mover->channels.shared.epoll_fd, &mover->wake_fd};
    for (size_t i = 0; i < sizeof descriptors / sizeof descriptors[0]; i++) {
        if (*descriptors[i] >= 0) {
            close(*descriptors[i]);
        }
        *descriptors[i] = -1;
    }
    completions_close(&mover->completions);
}

static void
destroy(mover_t* mover) {
    int error = errno;
    close_descriptors(mover);
    completions_destroy(&mover->completions);
    pthread_mutex_destroy(&mover->lock);
    free(mover);
    errno = error;
}

mover_t*
mover_create(size_t slice_bytes) {
    mover_t* mover = calloc(1, sizeof *mover);
    if (mover == NULL) {
        return NULL;
    }
    mover->slice_bytes = slice_bytes;
    mover->channels.shared.slice_bytes = slice_bytes;
    mover->channels.shared.lock = &mover->lock;
    mover->channels.shared.completions = &mover->completions;
    atomic_init(&mover->num_references, 1);
    pthread_mutex_init(&mover->lock, NULL);
    bool has_completions = completions_init(&mover->completions);
    bool is_open = open_descriptors(mover) && has_completions;
    if (is_open) {
        int error = thread_start(&mover->thread, mover_main, mover);
        is_open = error == 0;
        errno = error;
    }
    if (!is_open) {
        destroy(mover);
        return NULL;
    }
    return mover;
}

void
mover_retain(mover_t* mover) {
    atomic_fetch_add(&mover->num_references, 1);
}

void
mover_release(mover_t* mover) {
    if (atomic_fetch_sub(&mover->num_references, 1) == 1) {
        destroy(mover);
    }
}

bool
mover_close(mover_t* mover, double timeout_seconds) {
    if (!thread_is_ours(&mover->thread)) {
        return false; /* a forked child has neither the thread nor a lock it can trust */
    }
    struct timespec deadline = deadline_after(timeout_seconds);
    pthread_mutex_lock(&mover->lock);
    mover->is_closing = true;
    mover_wake(mover);
    int error = 0;
    while (!mover->has_exited && error == 0) {
        error = pthread_cond_timedwait(&mover->completions.changed, &mover->lock, &deadline);
    }
    if (mover->has_exited) {
        thread_join(&mover->thread); /* it needs the lock no more */
        close_descriptors(mover);
    }
    bool has_exited = mover->has_exited;
    pthread_mutex_unlock(&mover->lock);
    return has_exited;
}

int
mover_fileno(mover_t* mover) {
    pthread_mutex_lock(&mover->lock);
    int fd = mover->completions.fd;
    pthread_mutex_unlock(&mover->lock);
    return fd;
}

/* ---- for callers ---- */

job_t*
mover_drain(mover_t* mover) {
    pthread_mutex_lock(&mover->lock);
    job_t* ended = completions_take(&mover->completions);
    pthread_mutex_unlock(&mover->lock);
    return ended;
}

/* With the lock held. */
static mover_status_t
attach(mover_t* mover, channel_t* channel) {
    if (mover->is_closing) {
        return MOVER_CLOSED;
    }
    if (channels_find(&mover->channels, channel->id) != NULL) {
        return MOVER_DUPLICATE;
    }
    return channels_attach(&mover->channels, channel) ? MOVER_OK : MOVER_ERRNO;
}

mover_status_t
mover_attach(mover_t* mover, int fd, uint64_t id) {
    channel_t* channel = channel_create(&mover->channels.shared, id, fd);
    if (channel == NULL) {
        return MOVER_ERRNO;
    }
    pthread_mutex_lock(&mover->lock);
    mover_status_t status = attach(mover, channel);
    pthread_mutex_unlock(&mover->lock);
    if (status != MOVER_OK) {
        channel_free(channel);
    }
    return status;
}

void
mover_detach(mover_t* mover, uint64_t id) {
    pthread_mutex_lock(&mover->lock);
    if (channels_detach(&mover->channels, id)) {
        mover_wake(mover);
    }
    pthread_mutex_unlock(&mover->lock);
}

/* With the lock held. */
static mover_status_t
submit(mover_t* mover, job_t* job) {
    if (mover->is_closing) {
        return MOVER_CLOSED;
    }
    if (job->kind == JOB_SEND || job->kind == JOB_EXPECT) {
        channel_t* channel = channels_find(&mover->channels, job->channel);
        if (channel == NULL) {
            return MOVER_UNKNOWN_CHANNEL;
        }
        return channel_submit(channel, job) ? MOVER_OK : MOVER_DUPLICATE;
    }
    if (!lanes_push(&mover->copies, job)) {
        errno = ENOMEM;
        return MOVER_ERRNO;
    }
    mover_wake(mover);
    return MOVER_OK;
}

mover_status_t
mover_submit(mover_t* mover, job_t* job) {
    job_retain(job);
    mover_retain(mover);
    job->mover = mover;
    job->release_mover = mover_release;
    pthread_mutex_lock(&mover->lock);
    mover_status_t status = submit(mover, job);
    pthread_mutex_unlock(&mover->lock);
    if (status != MOVER_OK) {
        job->mover = NULL;
        mover_release(mover);
        job_release(job);
    }
    return status;
}

void
mover_cancel(job_t* job) {
    mover_t* mover = job->mover;
    pthread_mutex_lock(&mover->lock);
    mover_list_cancelled(mover, job);
    pthread_mutex_unlock(&mover->lock);
}

bool
mover_wait(job_t* job, double timeout_seconds) {
    mover_t* mover = job->mover;
    struct timespec deadline = deadline_after(timeout_seconds);
    pthread_mutex_lock(&mover->lock);
    bool has_ended = completions_wait(&mover->completions, &mover->lock, job, &deadline);
    pthread_mutex_unlock(&mover->lock);
    return has_ended;
}

void
mover_stats(mover_t* mover, mover_stats_t* out) {
    const channel_shared_t* shared = &mover->channels.shared;
    pthread_mutex_lock(&mover->lock);
    *out = (mover_stats_t){
        .jobs_ended = mover->completions.num_ended,
        .bytes_copied = mover->bytes_copied,
        .bytes_sent = shared->bytes_sent,
        .bytes_received = shared->bytes_received,
        .bytes_dropped = shared->bytes_dropped,
        .num_channels = shared->num_channels,
        .protocol_errors = shared->protocol_errors,
        .is_alive = thread_is_ours(&mover->thread) && !mover->has_exited,
    };
    pthread_mutex_unlock(&mover->lock);
}

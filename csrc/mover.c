#include "mover_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* ---- signals between the thread and its callers, with the lock held ---- */

static void
signal_eventfd(int fd) {
    uint64_t one = 1;
    /* It can only fail when the counter is full, and then it is readable as it should be. */
    ssize_t written = write(fd, &one, sizeof one);
    (void)written;
}

void
mover_clear_eventfd(int fd) {
    uint64_t count = 0;
    ssize_t got = read(fd, &count, sizeof count);
    (void)got;
}

static void
wake_thread(mover_t* mover) {
    if (mover->is_asleep) {
        mover->is_asleep = false;
        signal_eventfd(mover->wake_fd);
    }
}

void
mover_end_job(mover_t* mover, job_t* job, job_state_t state, const char* error) {
    snprintf(job->error, sizeof job->error, "%s", error);
    job->next_ended = NULL;
    if (mover->ended_tail != NULL) {
        mover->ended_tail->next_ended = job;
    } else {
        mover->ended_head = job;
        signal_eventfd(mover->ended_fd);
    }
    mover->ended_tail = job;
    mover->stats.jobs_ended++;
    atomic_store_explicit(&job->state, state, memory_order_release);
    pthread_cond_broadcast(&mover->changed);
}

void
mover_update_interest(mover_t* mover, channel_t* channel) {
    unsigned interest = EPOLLIN | (channel_has_output(channel) ? EPOLLOUT : 0u);
    if (interest != channel->interest && channel->fd >= 0) {
        struct epoll_event event = {.events = interest, .data.ptr = channel};
        epoll_ctl(mover->epoll_fd, EPOLL_CTL_MOD, channel->fd, &event);
        channel->interest = interest;
    }
}

/* ---- life ---- */

static bool
open_descriptors(mover_t* mover) {
    mover->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    mover->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    mover->ended_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN};
    return mover->epoll_fd >= 0 && mover->wake_fd >= 0 && mover->ended_fd >= 0 &&
           epoll_ctl(mover->epoll_fd, EPOLL_CTL_ADD, mover->wake_fd, &event) == 0;
}

static void
close_descriptors(mover_t* mover) {
    int* const descriptors[] = {&mover->epoll_fd, &mover->wake_fd, &mover->ended_fd};
    for (size_t i = 0; i < sizeof descriptors / sizeof descriptors[0]; i++) {
        if (*descriptors[i] >= 0) {
            close(*descriptors[i]);
        }
        *descriptors[i] = -1;
    }
}

static void
destroy(mover_t* mover) {
    int error = errno;
    close_descriptors(mover);
    pthread_cond_destroy(&mover->changed);
    pthread_mutex_destroy(&mover->lock);
    free(mover->scratch);
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
    mover->scratch = malloc(MOVER_SCRATCH_BYTES);
    atomic_init(&mover->num_references, 1);
    pthread_mutex_init(&mover->lock, NULL);
    condition_init(&mover->changed);
    bool is_open = open_descriptors(mover) && mover->scratch != NULL;
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
    wake_thread(mover);
    int error = 0;
    while (!mover->has_exited && error == 0) {
        error = pthread_cond_timedwait(&mover->changed, &mover->lock, &deadline);
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
    int fd = mover->ended_fd;
    pthread_mutex_unlock(&mover->lock);
    return fd;
}

/* ---- for callers ---- */

job_t*
mover_drain(mover_t* mover) {
    pthread_mutex_lock(&mover->lock);
    job_t* ended = mover->ended_head;
    mover->ended_head = NULL;
    mover->ended_tail = NULL;
    if (mover->ended_fd >= 0) {
        mover_clear_eventfd(mover->ended_fd);
    }
    pthread_mutex_unlock(&mover->lock);
    return ended;
}

channel_t**
mover_find_channel(mover_t* mover, uint64_t id) {
    /* Fibonacci hashing (Knuth, volume 3, 6.4) */
    uint64_t hash = (id * UINT64_C(0x9E3779B97F4A7C15)) >> 32;
    channel_t** link = &mover->channels[hash & (MOVER_CHANNEL_BUCKETS - 1)];
    while (*link != NULL && (*link)->id != id) {
        link = &(*link)->next;
    }
    return link;
}

static mover_status_t
link_channel(mover_t* mover, channel_t* channel) {
    if (mover->is_closing) {
        return MOVER_CLOSED;
    }
    channel_t** link = mover_find_channel(mover, channel->id);
    if (*link != NULL) {
        return MOVER_DUPLICATE;
    }
    struct epoll_event event = {.events = channel->interest, .data.ptr = channel};
    if (epoll_ctl(mover->epoll_fd, EPOLL_CTL_ADD, channel->fd, &event) != 0) {
        return MOVER_ERRNO;
    }
    *link = channel;
    mover->stats.num_channels++;
    return MOVER_OK;
}

mover_status_t
mover_attach(mover_t* mover, int fd, uint64_t id) {
    channel_t* channel = calloc(1, sizeof *channel);
    if (channel == NULL) {
        return MOVER_ERRNO;
    }
    channel->id = id;
    channel->interest = EPOLLIN;
    channel->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    mover_status_t status = MOVER_ERRNO;
    if (channel->fd >= 0) {
        pthread_mutex_lock(&mover->lock);
        status = link_channel(mover, channel);
        pthread_mutex_unlock(&mover->lock);
    }
    if (status != MOVER_OK) {
        int error = errno;
        if (channel->fd >= 0) {
            close(channel->fd);
        }
        free(channel);
        errno = error;
    }
    return status;
}

void
mover_detach(mover_t* mover, uint64_t id) {
    pthread_mutex_lock(&mover->lock);
    channel_t** link = mover_find_channel(mover, id);
    channel_t* channel = *link;
    if (channel != NULL) {
        *link = channel->next;
        channel->next = mover->detached;
        mover->detached = channel;
        wake_thread(mover);
    }
    pthread_mutex_unlock(&mover->lock);
}

/* With the lock held. */
static mover_status_t
submit_to_channel(mover_t* mover, job_t* job) {
    channel_t* channel = *mover_find_channel(mover, job->channel);
    if (channel == NULL) {
        return MOVER_UNKNOWN_CHANNEL;
    }
    if (job->kind == JOB_EXPECT && expects_find(&mover->expects, job->channel, job->seq) != NULL) {
        return MOVER_DUPLICATE;
    }
    if (channel->fd < 0) {
        mover_end_job(mover, job, JOB_FAILED, channel->error);
        return MOVER_OK;
    }
    if (job->kind == JOB_SEND) {
        job_queue_push(&channel->sends, job);
    } else {
        job_queue_push(&channel->expects, job);
        expects_add(&mover->expects, job);
    }
    mover_update_interest(mover, channel);
    return MOVER_OK;
}

static mover_status_t
submit(mover_t* mover, job_t* job) {
    if (mover->is_closing) {
        return MOVER_CLOSED;
    }
    if (job->kind == JOB_SEND || job->kind == JOB_EXPECT) {
        return submit_to_channel(mover, job);
    }
    if (!lanes_push(&mover->copies, job)) {
        errno = ENOMEM;
        return MOVER_ERRNO;
    }
    wake_thread(mover);
    return MOVER_OK;
}

mover_status_t
mover_submit(mover_t* mover, job_t* job) {
    job_retain(job);
    mover_retain(mover);
    job->mover = mover;
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
mover_list_cancelled(mover_t* mover, job_t* job) {
    if (job_has_ended(job) || job->is_cancel_requested) {
        return;
    }
    job->is_cancel_requested = true;
    job_retain(job);
    job->next_cancelled = mover->cancelled;
    mover->cancelled = job;
    wake_thread(mover);
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
    int error = 0;
    pthread_mutex_lock(&mover->lock);
    while (!job_has_ended(job) && error == 0) {
        error = pthread_cond_timedwait(&mover->changed, &mover->lock, &deadline);
    }
    pthread_mutex_unlock(&mover->lock);
    return job_has_ended(job);
}

void
mover_stats(mover_t* mover, mover_stats_t* out) {
    pthread_mutex_lock(&mover->lock);
    *out = mover->stats;
    out->is_alive = thread_is_ours(&mover->thread) && !mover->has_exited;
    pthread_mutex_unlock(&mover->lock);
}

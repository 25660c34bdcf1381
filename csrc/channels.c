#include "channels.h"

#include "channel_receive.h"
#include "channel_send.h"

#include <sys/epoll.h>
#include <unistd.h>

/* ---- one channel ---- */

/* Asks epoll for what the channel can use now. */
static void
update_interest(channel_t* channel) {
    unsigned interest = EPOLLIN | (channel_has_output(channel) ? EPOLLOUT : 0u);
    if (interest != channel->interest && channel->fd >= 0) {
        struct epoll_event event = {.events = interest, .data.ptr = channel};
        epoll_ctl(channel->shared->epoll_fd, EPOLL_CTL_MOD, channel->fd, &event);
        channel->interest = interest;
    }
}

/* Closes the socket and ends all jobs in this state, for the channel's error. */
static void
break_channel(channel_t* channel, job_state_t state) {
    channel_shared_t* shared = channel->shared;
    /* Closing alone would not end the events: the caller still has a descriptor of this socket. */
    epoll_ctl(shared->epoll_fd, EPOLL_CTL_DEL, channel->fd, NULL);
    close(channel->fd);
    channel->fd = -1;
    shared->num_channels--;
    channel->receiving = (half_t){0};
    channel->sending = (half_t){0};
    for (job_t* job = NULL; (job = job_queue_pop(&channel->expects)) != NULL;) {
        expects_remove(&shared->expects, job);
        completions_add(shared->completions, job, state, channel->error);
    }
    for (job_t* job = NULL; (job = job_queue_pop(&channel->sends)) != NULL;) {
        if (job->is_aborting) {
            job_release(job);
        } else {
            completions_add(shared->completions, job, state, channel->error);
        }
    }
}

bool
channel_submit(channel_t* channel, job_t* job) {
    channel_shared_t* shared = channel->shared;
    if (job->kind == JOB_EXPECT && expects_find(&shared->expects, channel->id, job->seq) != NULL) {
        return false;
    }
    if (channel->fd < 0) {
        completions_add(shared->completions, job, JOB_FAILED, channel->error);
        return true;
    }
    if (job->kind == JOB_SEND) {
        job_queue_push(&channel->sends, job);
    } else {
        job_queue_push(&channel->expects, job);
        expects_add(&shared->expects, job);
    }
    update_interest(channel);
    return true;
}

void
channel_cancel(channel_t* channel, job_t* job) {
    if (job->kind == JOB_SEND) {
        channel_cancel_send(channel, job);
    } else {
        channel_cancel_expect(channel, job);
    }
    update_interest(channel);
}

void
channel_serve(channel_t* channel, unsigned events) {
    if (channel->fd < 0) {
        return; /* an earlier event of this round broke it */
    }
    bool is_whole = true;
    if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) {
        is_whole = channel_receive(channel);
    }
    if (is_whole && (events & EPOLLOUT) != 0) {
        is_whole = channel_send(channel);
    }
    pthread_mutex_lock(channel->shared->lock);
    if (is_whole) {
        update_interest(channel);
    } else {
        break_channel(channel, JOB_FAILED);
    }
    pthread_mutex_unlock(channel->shared->lock);
}

/* ---- all channels ---- */

/* The link that points to the channel, or the empty one at the end of its bucket. */
static channel_t**
find(channels_t* channels, uint64_t id) {
    /* Fibonacci hashing (Knuth, volume 3, 6.4) */
    uint64_t hash = (id * UINT64_C(0x9E3779B97F4A7C15)) >> 32;
    channel_t** link = &channels->buckets[hash & (CHANNELS_NUM_BUCKETS - 1)];
    while (*link != NULL && (*link)->id != id) {
        link = &(*link)->next;
    }
    return link;
}

channel_t*
channels_find(channels_t* channels, uint64_t id) {
    return *find(channels, id);
}

bool
channels_attach(channels_t* channels, channel_t* channel) {
    channel->interest = EPOLLIN;
    struct epoll_event event = {.events = channel->interest, .data.ptr = channel};
    if (epoll_ctl(channels->shared.epoll_fd, EPOLL_CTL_ADD, channel->fd, &event) != 0) {
        return false;
    }
    *find(channels, channel->id) = channel;
    channels->shared.num_channels++;
    return true;
}

bool
channels_detach(channels_t* channels, uint64_t id) {
    channel_t** link = find(channels, id);
    channel_t* channel = *link;
    if (channel == NULL) {
        return false;
    }
    *link = channel->next;
    channel->next = channels->detached;
    channels->detached = channel;
    return true;
}

/* Breaks and frees the channels of a list. */
static void
free_list(channel_t** list, job_state_t state, const char* reason) {
    while (*list != NULL) {
        channel_t* channel = *list;
        *list = channel->next;
        if (channel->fd >= 0) {
            channel_fail(channel, reason);
            break_channel(channel, state);
        }
        channel_free(channel);
    }
}

void
channels_free_detached(channels_t* channels) {
    free_list(&channels->detached, JOB_FAILED, "the channel was detached");
}

void
channels_free_attached(channels_t* channels, const char* reason) {
    for (size_t i = 0; i < CHANNELS_NUM_BUCKETS; i++) {
        free_list(&channels->buckets[i], JOB_CANCELLED, reason);
    }
}

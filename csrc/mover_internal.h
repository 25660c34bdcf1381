/* The mover's state, shared by mover.c (for callers), mover_thread.c and the channels. */
#ifndef P2P_MOVER_INTERNAL_H
#define P2P_MOVER_INTERNAL_H

#include "channel.h"
#include "expects.h"
#include "lanes.h"
#include "mover.h"
#include "thread.h"

enum {
    MOVER_SCRATCH_BYTES = 64 << 10,
    MOVER_CHANNEL_BUCKETS = 1024, /* a power of two */
};

/* `lock` guards everything below it, and the queues of the channels. The thread alone ends jobs
 * that it has accepted and frees channels, so it may use both without the lock while they are open.
 */
struct mover {
    size_t slice_bytes;
    atomic_uint num_references;
    thread_t thread;
    char* scratch; /* receives what nobody wants */

    pthread_mutex_t lock;
    pthread_cond_t changed; /* a job ended, or the thread */
    int epoll_fd;
    int wake_fd;  /* ends the thread's sleep */
    int ended_fd; /* tells the owner of ended jobs */
    bool is_closing;
    bool is_asleep;
    bool has_exited;
    job_t* cancelled; /* linked by next_cancelled; for the thread to end */
    lanes_t copies;
    expects_t expects; /* of all channels */
    channel_t* channels[MOVER_CHANNEL_BUCKETS];
    channel_t* detached; /* for the thread to free */
    job_t* ended_head;
    job_t* ended_tail;
    mover_stats_t stats;
};

/* The thread's main function. */
void* mover_main(void* mover);

void mover_clear_eventfd(int fd);

/* With the lock held. Takes over the queue's reference to the job. */
void mover_end_job(mover_t* mover, job_t* job, job_state_t state, const char* error);

/* With the lock held. The link that points to the channel, or an empty one. */
channel_t** mover_find_channel(mover_t* mover, uint64_t id);

/* With the lock held: lists the job for the thread, unless it has ended or is listed. */
void mover_list_cancelled(mover_t* mover, job_t* job);

/* With the lock held: asks epoll for what the channel can use now. */
void mover_update_interest(mover_t* mover, channel_t* channel);

#endif

/* The mover's state and its thread. mover.h is for callers. */
#ifndef P2P_MOVER_THREAD_H
#define P2P_MOVER_THREAD_H

#include "channels.h"
#include "lanes.h"
#include "thread.h"

/* `lock` guards everything below it, and the state that channels share. Only the thread ends jobs
 * that it has accepted and frees channels, so it may use both without the lock while they are open.
 */
struct mover {
    size_t slice_bytes;
    atomic_uint num_references;
    thread_t thread;

    pthread_mutex_t lock;
    int wake_fd; /* ends the thread's sleep */
    bool is_closing;
    bool is_asleep;
    bool has_exited;
    job_t* cancelled; /* linked by next_cancelled; for the thread to end */
    lanes_t copies;
    uint64_t bytes_copied;
    completions_t completions;
    channels_t channels;
};

/* The thread's main function. */
void* mover_main(void* mover);

/* With the lock held: ends the thread's sleep. */
void mover_wake(mover_t* mover);

/* With the lock held: lists the job for the thread, unless it has ended or is listed. */
void mover_list_cancelled(mover_t* mover, job_t* job);

#endif

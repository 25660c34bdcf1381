/* Native helper threads: they take no signals, carry a name, and are not bound to the cores that
 * the thread which started them was pinned to. */
#ifndef P2P_THREAD_H
#define P2P_THREAD_H

#include <pthread.h>
#include <stdbool.h>
#include <sys/types.h>
#include <time.h>

typedef struct {
    pthread_t id;
    pid_t owner; /* the process that runs it */
    bool is_started;
} thread_t;

/* Returns 0 or an errno. */
int thread_start(thread_t* thread, void* (*main)(void*), void* argument);

/* Called first by the new thread. */
void thread_prepare(const char* name);

/* False in a forked child, which has no such thread. */
bool thread_is_ours(const thread_t* thread);

/* Waits for the end of a thread that was told to stop; a no-op for one that was never started. */
void thread_join(thread_t* thread);

/* A condition variable whose timed waits are immune to changes of the wall clock. */
void condition_init(pthread_cond_t* condition);

/* The CLOCK_MONOTONIC time that is `seconds` from now; at most a year ahead. */
struct timespec deadline_after(double seconds);

#endif

#include "thread.h"

#include <sched.h>
#include <signal.h>
#include <unistd.h>

int
thread_start(thread_t* thread, void* (*main)(void*), void* argument) {
    /* The mask is inherited, so that no signal can reach the thread before it blocks them. */
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&thread->id, NULL, main, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    thread->is_started = error == 0;
    thread->owner = getpid();
    return error;
}

/* vLLM pins its workers to a few cores and threads inherit that, so a helper would compete with the
 * compute threads for the very cores they need. The parent process is not pinned. */
static void
take_parent_affinity(void) {
    cpu_set_t own;
    cpu_set_t parent;
    cpu_set_t both;
    if (sched_getaffinity(0, sizeof own, &own) != 0 ||
        sched_getaffinity(getppid(), sizeof parent, &parent) != 0) {
        return;
    }
    CPU_AND(&both, &own, &parent);
    if (CPU_EQUAL(&both, &own) && !CPU_EQUAL(&own, &parent)) {
        sched_setaffinity(0, sizeof parent, &parent);
    }
}

void
thread_prepare(const char* name) {
    pthread_setname_np(pthread_self(), name);
    take_parent_affinity();
}

bool
thread_is_ours(const thread_t* thread) {
    return thread->owner == getpid();
}

void
thread_join(thread_t* thread) {
    if (thread->is_started && thread_is_ours(thread)) {
        pthread_join(thread->id, NULL);
    }
    thread->is_started = false;
}

void
condition_init(pthread_cond_t* condition) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

struct timespec
deadline_after(double seconds) {
    const double year = 365.0 * 86400.0;
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    seconds = seconds > year ? year : seconds > 0 ? seconds : 0; /* NaN is 0 */
    time_t whole = (time_t)seconds;
    now.tv_sec += whole;
    now.tv_nsec += (long)((seconds - (double)whole) * 1e9);
    if (now.tv_nsec >= 1000000000) {
        now.tv_nsec -= 1000000000;
        now.tv_sec++;
    }
    return now;
}

#include "completions.h"

#include "thread.h"

#include <stdio.h>
#include <sys/eventfd.h>
#include <unistd.h>

bool
completions_init(completions_t* completions) {
    *completions = (completions_t){.fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
    condition_init(&completions->changed);
    return completions->fd >= 0;
}

void
completions_close(completions_t* completions) {
    if (completions->fd >= 0) {
        close(completions->fd);
    }
    completions->fd = -1;
}

void
completions_destroy(completions_t* completions) {
    completions_close(completions);
    pthread_cond_destroy(&completions->changed);
}

void
completions_add(completions_t* completions, job_t* job, job_state_t state, const char* error) {
    snprintf(job->error, sizeof job->error, "%s", error);
    job->next_ended = NULL;
    if (completions->tail != NULL) {
        completions->tail->next_ended = job;
    } else {
        completions->head = job;
        eventfd_write(completions->fd, 1);
    }
    completions->tail = job;
    completions->num_ended++;
    atomic_store_explicit(&job->state, state, memory_order_release);
    pthread_cond_broadcast(&completions->changed);
}

job_t*
completions_take(completions_t* completions) {
    job_t* ended = completions->head;
    completions->head = NULL;
    completions->tail = NULL;
    if (completions->fd >= 0) {
        eventfd_t count = 0;
        eventfd_read(completions->fd, &count);
    }
    return ended;
}

bool
completions_wait(completions_t* completions, pthread_mutex_t* lock, const job_t* job,
                 const struct timespec* deadline) {
    int error = 0;
    while (!job_has_ended(job) && error == 0) {
        error = pthread_cond_timedwait(&completions->changed, lock, deadline);
    }
    return job_has_ended(job);
}

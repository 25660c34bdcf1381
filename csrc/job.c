#include "job.h"

#include <stdlib.h>

job_t*
job_create(job_kind_t kind, regions_t* regions, uint64_t channel, uint64_t seq) {
    job_t* job = calloc(1, sizeof *job);
    if (job == NULL) {
        regions_destroy(regions);
        return NULL;
    }
    job->kind = kind;
    job->regions = *regions;
    *regions = (regions_t){0};
    job->channel = channel;
    job->seq = seq;
    atomic_init(&job->num_references, 1);
    atomic_init(&job->state, JOB_QUEUED);
    return job;
}

void
job_retain(job_t* job) {
    atomic_fetch_add(&job->num_references, 1);
}

void
job_release(job_t* job) {
    if (atomic_fetch_sub(&job->num_references, 1) > 1) {
        return;
    }
    if (job->mover != NULL) {
        job->release_mover(job->mover);
    }
    regions_destroy(&job->regions);
    free(job);
}

void
job_check(job_t* job, regions_side_t side, size_t nbytes) {
    if (job->is_checked) {
        job->checksum = regions_crc32c(&job->regions, job->cursor, nbytes, side, job->checksum);
    }
}

job_state_t
job_state(const job_t* job) {
    return (job_state_t)atomic_load_explicit(&job->state, memory_order_acquire);
}

bool
job_has_ended(const job_t* job) {
    return job_state(job) >= JOB_DONE;
}

void
job_queue_push(job_queue_t* queue, job_t* job) {
    job->next = NULL;
    job->previous = queue->tail;
    if (queue->tail != NULL) {
        queue->tail->next = job;
    } else {
        queue->head = job;
    }
    queue->tail = job;
}

job_t*
job_queue_pop(job_queue_t* queue) {
    job_t* job = queue->head;
    if (job != NULL) {
        job_queue_remove(queue, job);
    }
    return job;
}

void
job_queue_remove(job_queue_t* queue, job_t* job) {
    if (job->previous != NULL) {
        job->previous->next = job->next;
    } else {
        queue->head = job->next;
    }
    if (job->next != NULL) {
        job->next->previous = job->previous;
    } else {
        queue->tail = job->previous;
    }
    job->next = NULL;
    job->previous = NULL;
}

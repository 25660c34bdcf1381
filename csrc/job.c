#include "job.h"

#include "mover.h"

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
        mover_release(job->mover);
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
        queue->head = job->next;
        queue->tail = queue->head != NULL ? queue->tail : NULL;
    }
    return job;
}

void
job_queue_remove(job_queue_t* queue, job_t* job) {
    job_t* previous = NULL;
    for (job_t* each = queue->head; each != NULL; previous = each, each = each->next) {
        if (each != job) {
            continue;
        }
        if (previous != NULL) {
            previous->next = job->next;
        } else {
            queue->head = job->next;
        }
        queue->tail = queue->tail == job ? previous : queue->tail;
        return;
    }
}

job_t*
job_queue_find(const job_queue_t* queue, uint64_t seq) {
    job_t* job = queue->head;
    while (job != NULL && job->seq != seq) {
        job = job->next;
    }
    return job;
}

void
job_queue_rotate(job_queue_t* queue, uint64_t lane, job_t* first) {
    job_queue_t others = {0};
    job_queue_t behind = {0};
    if (first != NULL) {
        job_queue_push(&behind, first);
    }
    for (job_t* job = NULL; (job = job_queue_pop(queue)) != NULL;) {
        job_queue_push(lane != 0 && job->lane == lane ? &behind : &others, job);
    }
    for (job_t* job = NULL; (job = job_queue_pop(&behind)) != NULL;) {
        job_queue_push(&others, job);
    }
    *queue = others;
}

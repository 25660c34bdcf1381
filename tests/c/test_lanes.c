/* The mover's queues against models that are slow and plain, and what a cancel costs. */
#include "mover_helpers.h"
#include "random.h"

#include "expects.h"

enum { NUM_JOBS = 400, NUM_STEPS = 20000, NUM_LANES = 7, SLICE = 4096 };

/* The model: jobs in the order of turns, as one list. */
typedef struct {
    job_t* jobs[NUM_JOBS];
    size_t count;
} model_t;

static void
model_take(model_t* model, size_t index) {
    for (size_t i = index + 1; i < model->count; i++) {
        model->jobs[i - 1] = model->jobs[i];
    }
    model->count--;
}

static size_t
model_find(const model_t* model, const job_t* job) {
    size_t index = 0;
    while (model->jobs[index] != job) {
        index++;
    }
    return index;
}

/* The jobs of the first one's lane go behind all others, in their order. */
static void
model_turn(model_t* model) {
    job_t* first = model->jobs[0];
    job_t* behind[NUM_JOBS];
    size_t num_behind = 0;
    for (size_t i = 0; i < model->count;) {
        job_t* job = model->jobs[i];
        if (job == first || (first->lane != 0 && job->lane == first->lane)) {
            behind[num_behind++] = job;
            model_take(model, i);
        } else {
            i++;
        }
    }
    for (size_t i = 0; i < num_behind; i++) {
        model->jobs[model->count++] = behind[i];
    }
}

static void
lanes_are_as_a_plain_list_would_be(void) {
    static lanes_t lanes;
    static model_t model;
    static const char byte = 0;
    static char to;
    random_t random = {.state = 77};
    for (int step = 0; step < NUM_STEPS; step++) {
        uint64_t choice = random_below(&random, 4);
        if (choice == 0 && model.count < NUM_JOBS) {
            job_t* job = make_job(JOB_COPY, 0, 0, &byte, &to, 1);
            job->lane = random_below(&random, NUM_LANES);
            CHECK(lanes_push(&lanes, job));
            model.jobs[model.count++] = job;
        } else if (choice == 1 && model.count > 0) {
            lanes_turn(&lanes);
            model_turn(&model);
        } else if (choice == 2 && model.count > 0) {
            job_t* job = model.jobs[random_below(&random, model.count)];
            lanes_remove(&lanes, job);
            model_take(&model, model_find(&model, job));
            job_release(job);
        }
        /* The order of lanes may differ from the model's after a removal; within one it may not. */
        job_t* current = lanes_current(&lanes);
        CHECK((current == NULL) == (model.count == 0));
        for (size_t i = 0; current != NULL && i < model_find(&model, current); i++) {
            CHECK(current->lane == 0 || model.jobs[i]->lane != current->lane);
        }
    }
    while (model.count > 0) {
        job_t* job = lanes_current(&lanes);
        CHECK(job != NULL);
        lanes_remove(&lanes, job);
        model_take(&model, model_find(&model, job));
        job_release(job);
    }
    CHECK(lanes_current(&lanes) == NULL && lanes.last == NULL);
    for (size_t i = 0; i < LANES_NUM_BUCKETS; i++) {
        CHECK(lanes.buckets[i] == NULL);
    }
}

static void
every_lane_gets_a_turn_before_any_gets_two(void) {
    enum { NUM = 1000 };
    static lanes_t lanes;
    static job_t* jobs[NUM];
    static const char byte = 0;
    static char to;
    for (uint64_t i = 0; i < NUM; i++) {
        jobs[i] = make_job(JOB_COPY, 0, 0, &byte, &to, 1);
        jobs[i]->lane = i * i + 1;
        CHECK(lanes_push(&lanes, jobs[i]));
    }
    for (int round = 0; round < 3; round++) {
        for (size_t i = 0; i < NUM; i++) {
            CHECK(lanes_current(&lanes) == jobs[i]);
            lanes_turn(&lanes);
        }
    }
    for (size_t i = 0; i < NUM; i++) {
        lanes_remove(&lanes, jobs[i]);
        job_release(jobs[i]);
    }
}

static void
a_receive_is_found_by_its_channel_and_number_only(void) {
    enum { NUM = 3000 };
    static expects_t expects;
    static job_t* jobs[NUM];
    static char to;
    for (uint64_t i = 0; i < NUM; i++) {
        jobs[i] = make_job(JOB_EXPECT, i % 3, i / 3, NULL, &to, 1);
        expects_add(&expects, jobs[i]);
    }
    for (uint64_t i = 0; i < NUM; i += 2) {
        expects_remove(&expects, jobs[i]);
    }
    for (uint64_t i = 0; i < NUM; i++) {
        CHECK(expects_find(&expects, i % 3, i / 3) == (i % 2 == 0 ? NULL : jobs[i]));
    }
    CHECK(expects_find(&expects, 3, 0) == NULL);
    for (uint64_t i = 0; i < NUM; i++) {
        if (i % 2 != 0) {
            expects_remove(&expects, jobs[i]);
        }
        job_release(jobs[i]);
    }
}

/* Cancels from the middle of a lane, and twice: each job ends once, the others are copied. */
static void
what_is_cancelled_among_thousands_ends_and_nothing_else(void) {
    enum { NUM = 5000 };
    static job_t* jobs[NUM];
    static const char from[64] = {1};
    static char to[NUM][sizeof from];
    mover_t* mover = make_mover(SLICE);
    pthread_mutex_lock(&mover->lock); /* the thread cannot begin */
    for (uint64_t i = 0; i < NUM; i++) {
        jobs[i] = make_job(JOB_COPY, 0, i, from, to[i], sizeof from);
        jobs[i]->lane = i % 50;
        queue_locked(mover, jobs[i]);
    }
    for (uint64_t i = 0; i < NUM; i += 3) {
        mover_list_cancelled(mover, jobs[i]);
        mover_list_cancelled(mover, jobs[i]);
    }
    wake_and_unlock(mover);
    for (uint64_t i = 0; i < NUM; i++) {
        CHECK(mover_wait(jobs[i], LONG_SECONDS));
        CHECK(job_state(jobs[i]) == (i % 3 == 0 ? JOB_CANCELLED : JOB_DONE));
        CHECK(to[i][0] == (i % 3 == 0 ? 0 : 1));
        job_release(jobs[i]);
    }
    CHECK(release_all(mover_drain(mover)) == NUM);
    CHECK(mover_close(mover, LONG_SECONDS));
    mover_release(mover);
}

int
main(void) {
    RUN(lanes_are_as_a_plain_list_would_be);
    RUN(every_lane_gets_a_turn_before_any_gets_two);
    RUN(a_receive_is_found_by_its_channel_and_number_only);
    RUN(what_is_cancelled_among_thousands_ends_and_nothing_else);
    return 0;
}

#include "mover_helpers.h"

#include <dirent.h>
#include <poll.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SLICE = 4096 };

static void
a_copy_arrives_and_its_word_is_written(void) {
    static char from[100000];
    static char to[sizeof from];
    uint64_t word = 0;
    memset(from, 7, sizeof from);
    mover_t* mover = make_mover(SLICE);
    job_t* job = make_job(JOB_COPY, 0, 0, from, to, sizeof from);
    job->word = &word;
    job->word_value = UINT64_MAX;
    expect_end(submit(mover, job), JOB_DONE, "");
    CHECK(__atomic_load_n(&word, __ATOMIC_ACQUIRE) == UINT64_MAX);
    CHECK(memcmp(from, to, sizeof from) == 0);
    CHECK(stats_of(mover).bytes_copied == sizeof from);
    end_mover(mover);
}

static void
an_empty_copy_ends_too(void) {
    char byte = 0;
    uint64_t word = 0;
    mover_t* mover = make_mover(SLICE);
    job_t* job = make_job(JOB_COPY, 0, 0, &byte, &byte, 0);
    job->word = &word;
    job->word_value = 1;
    expect_end(submit(mover, job), JOB_DONE, "");
    CHECK(word == 1);
    end_mover(mover);
}

static bool
is_readable(int fd) {
    struct pollfd poll_fd = {.fd = fd, .events = POLLIN};
    return poll(&poll_fd, 1, 0) == 1;
}

static void
each_ended_job_is_drained_exactly_once(void) {
    char from = 1;
    char to = 0;
    mover_t* mover = make_mover(SLICE);
    CHECK(!is_readable(mover_fileno(mover)));
    for (int i = 0; i < 10; i++) {
        expect_end(submit(mover, make_job(JOB_COPY, 0, 0, &from, &to, 1)), JOB_DONE, "");
    }
    CHECK(is_readable(mover_fileno(mover)));
    CHECK(release_all(mover_drain(mover)) == 10);
    CHECK(!is_readable(mover_fileno(mover)));
    CHECK(mover_drain(mover) == NULL);
    expect_end(submit(mover, make_job(JOB_COPY, 0, 0, &from, &to, 1)), JOB_DONE, "");
    CHECK(is_readable(mover_fileno(mover)));
    CHECK(release_all(mover_drain(mover)) == 1);
    end_mover(mover);
}

static void
copies_take_turns_slice_by_slice(void) {
    static char from[5 * SLICE];
    static char to[3][sizeof from];
    mover_t* mover = make_mover(SLICE);
    pthread_mutex_lock(&mover->lock);
    job_t* jobs[] = {
        queue_locked(mover, make_job(JOB_COPY, 0, 0, from, to[0], 5 * SLICE)),
        queue_locked(mover, make_job(JOB_COPY, 0, 1, from, to[1], 1 * SLICE)),
        queue_locked(mover, make_job(JOB_COPY, 0, 2, from, to[2], 3 * SLICE)),
    };
    wake_and_unlock(mover);
    for (int i = 0; i < 3; i++) {
        expect_end(jobs[i], JOB_DONE, "");
    }
    job_t* ended = mover_drain(mover);
    CHECK(ended->seq == 1 && ended->next_ended->seq == 2 &&
          ended->next_ended->next_ended->seq == 0);
    release_all(ended);
    end_mover(mover);
}

static void
copies_of_one_lane_go_in_order_and_lanes_take_turns(void) {
    static char from[3 * SLICE];
    static char to[3][sizeof from];
    mover_t* mover = make_mover(SLICE);
    pthread_mutex_lock(&mover->lock);
    job_t* jobs[] = {
        make_job(JOB_COPY, 0, 0, from, to[0], 3 * SLICE),
        make_job(JOB_COPY, 0, 1, from, to[1], 1 * SLICE),
        make_job(JOB_COPY, 0, 2, from, to[2], 2 * SLICE),
    };
    jobs[0]->lane = 7;
    jobs[1]->lane = 7;
    for (int i = 0; i < 3; i++) {
        queue_locked(mover, jobs[i]);
    }
    wake_and_unlock(mover);
    for (int i = 0; i < 3; i++) {
        expect_end(jobs[i], JOB_DONE, "");
    }
    job_t* ended = mover_drain(mover);
    CHECK(ended->seq == 2 && ended->next_ended->seq == 0 &&
          ended->next_ended->next_ended->seq == 1);
    release_all(ended);
    end_mover(mover);
}

static void
a_cancelled_copy_that_has_not_begun_touches_nothing(void) {
    static char from[2 * SLICE];
    static char to[2 * SLICE];
    uint64_t word = 0;
    memset(from, 1, sizeof from);
    mover_t* mover = make_mover(SLICE);
    pthread_mutex_lock(&mover->lock);
    job_t* job = queue_locked(mover, make_job(JOB_COPY, 0, 0, from, to, sizeof from));
    job->word = &word;
    job->word_value = 1;
    mover_list_cancelled(mover, job);
    wake_and_unlock(mover);
    expect_end(job, JOB_CANCELLED, "cancelled");
    CHECK(word == 0 && to[0] == 0);
    end_mover(mover);
}

/* Copies one page onto another so often that it could not end by itself in time. */
static job_t*
make_endless_copy(const char* from, char* to, size_t nbytes) {
    enum { NUM_SPANS = 1 << 16 };
    int64_t* lists = malloc(3 * NUM_SPANS * sizeof *lists);
    CHECK(lists != NULL);
    for (int i = 0; i < NUM_SPANS; i++) {
        lists[i] = address_of(from);
        lists[NUM_SPANS + i] = address_of(to);
        lists[2 * NUM_SPANS + i] = (int64_t)nbytes;
    }
    regions_t regions;
    CHECK(regions_create(&regions, lists, lists + NUM_SPANS, lists + 2 * NUM_SPANS, NUM_SPANS) ==
          REGIONS_OK);
    free(lists);
    job_t* job = job_create(JOB_COPY, &regions, 0, 0);
    CHECK(job != NULL);
    return job;
}

static void
wait_until_running(const job_t* job) {
    while (job_state(job) == JOB_QUEUED) {
        sched_yield();
    }
}

static void
a_cancel_in_the_middle_stops_the_copy(void) {
    static char from[1 << 20];
    static char to[sizeof from];
    uint64_t word = 0;
    mover_t* mover = make_mover(SLICE);
    job_t* job = make_endless_copy(from, to, sizeof from);
    job->word = &word;
    job->word_value = 1;
    submit(mover, job);
    wait_until_running(job);
    mover_cancel(job);
    job_retain(job);
    expect_end(job, JOB_CANCELLED, "cancelled");
    CHECK(word == 0);
    CHECK(stats_of(mover).bytes_copied < job->regions.nbytes);
    mover_cancel(job); /* a no-op */
    CHECK(job_state(job) == JOB_CANCELLED);
    job_release(job);
    end_mover(mover);
}

static void
a_wait_ends_at_its_limit(void) {
    static char from[1 << 20];
    static char to[sizeof from];
    mover_t* mover = make_mover(SLICE);
    job_t* job = submit(mover, make_endless_copy(from, to, sizeof from));
    CHECK(!mover_wait(job, 0.0));
    CHECK(!mover_wait(job, -1.0));
    CHECK(!mover_wait(job, 0.001));
    mover_cancel(job);
    expect_end(job, JOB_CANCELLED, "cancelled");
    end_mover(mover);
}

static void
close_cancels_what_is_open(void) {
    static char from[1 << 20];
    static char to[sizeof from];
    mover_t* mover = make_mover(SLICE);
    job_t* first = submit(mover, make_endless_copy(from, to, sizeof from));
    job_t* second = submit(mover, make_endless_copy(from, to, sizeof from));
    CHECK(mover_close(mover, LONG_SECONDS));
    CHECK(mover_close(mover, LONG_SECONDS));
    expect_end(first, JOB_CANCELLED, "the mover was closed");
    expect_end(second, JOB_CANCELLED, "the mover was closed");
    job_t* late = make_job(JOB_COPY, 0, 0, from, to, 1);
    CHECK(mover_submit(mover, late) == MOVER_CLOSED);
    job_release(late);
    CHECK(mover_fileno(mover) == -1);
    CHECK(release_all(mover_drain(mover)) == 2);
    mover_release(mover);
}

static int
count_entries(const char* path) {
    int count = 0;
    DIR* directory = opendir(path);
    CHECK(directory != NULL);
    while (readdir(directory) != NULL) {
        count++;
    }
    closedir(directory);
    return count;
}

static void
nothing_is_left_after_close(void) {
    int num_tasks = count_entries("/proc/self/task");
    int num_descriptors = count_entries("/proc/self/fd");
    mover_t* mover = make_mover(SLICE);
    CHECK(count_entries("/proc/self/task") == num_tasks + 1);
    CHECK(mover_close(mover, LONG_SECONDS));
    CHECK(count_entries("/proc/self/task") == num_tasks);
    CHECK(count_entries("/proc/self/fd") == num_descriptors);
    mover_release(mover);
}

/* Reads a line of the mover thread's status into `value`. */
static void
read_thread_status(const char* key, char* value, size_t size) {
    DIR* directory = opendir("/proc/self/task");
    CHECK(directory != NULL);
    bool is_mover = false;
    for (struct dirent* entry = NULL; !is_mover && (entry = readdir(directory)) != NULL;) {
        char path[300];
        char line[256];
        snprintf(path, sizeof path, "/proc/self/task/%s/status", entry->d_name);
        FILE* file = fopen(path, "r");
        while (file != NULL && fgets(line, sizeof line, file) != NULL) {
            is_mover = is_mover || strcmp(line, "Name:\tp2p-mover\n") == 0;
            if (is_mover && strncmp(line, key, strlen(key)) == 0) {
                snprintf(value, size, "%s", line + strlen(key));
                value[strcspn(value, "\n")] = '\0';
            }
        }
        if (file != NULL) {
            fclose(file);
        }
    }
    closedir(directory);
}

/* The name is set by the thread itself, a moment after it was created. */
static void
wait_for_thread_status(const char* key, const char* expected) {
    char value[256] = "";
    while (strcmp(value, expected) != 0) {
        sched_yield();
        read_thread_status(key, value, sizeof value);
    }
}

static void
the_idle_thread_sleeps_and_takes_no_signals(void) {
    mover_t* mover = make_mover(SLICE);
    wait_for_thread_status("State:\t", "S (sleeping)");
    char blocked[256] = "";
    read_thread_status("SigBlk:\t", blocked, sizeof blocked);
    /* All but KILL (9), STOP (19) and the two that belong to the C library (32, 33). */
    CHECK(strcmp(blocked, "fffffffe7ffbfeff") == 0);
    end_mover(mover);
}

static void
run_in_child(void (*body)(void)) {
    fflush(stdout);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        body();
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static char parent_cpus[256];

static void
pin_and_look(void) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET((size_t)sched_getcpu(), &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    mover_t* mover = make_mover(SLICE);
    wait_for_thread_status("Cpus_allowed_list:\t", parent_cpus);
    end_mover(mover);
}

static void
the_thread_takes_back_the_parents_cores(void) {
    mover_t* mover = make_mover(SLICE);
    while (parent_cpus[0] == '\0') {
        read_thread_status("Cpus_allowed_list:\t", parent_cpus, sizeof parent_cpus);
    }
    end_mover(mover);
    run_in_child(pin_and_look);
}

static mover_t* inherited;

static void
use_inherited(void) {
    CHECK(!mover_close(inherited, LONG_SECONDS));
}

static void
a_forked_child_does_not_wait_for_a_thread_it_has_not(void) {
    inherited = make_mover(SLICE);
    run_in_child(use_inherited);
    end_mover(inherited);
}

int
main(void) {
    RUN(a_copy_arrives_and_its_word_is_written);
    RUN(an_empty_copy_ends_too);
    RUN(each_ended_job_is_drained_exactly_once);
    RUN(copies_take_turns_slice_by_slice);
    RUN(copies_of_one_lane_go_in_order_and_lanes_take_turns);
    RUN(a_cancelled_copy_that_has_not_begun_touches_nothing);
    RUN(a_cancel_in_the_middle_stops_the_copy);
    RUN(a_wait_ends_at_its_limit);
    RUN(close_cancels_what_is_open);
    RUN(nothing_is_left_after_close);
    RUN(the_idle_thread_sleeps_and_takes_no_signals);
    RUN(the_thread_takes_back_the_parents_cores);
    RUN(a_forked_child_does_not_wait_for_a_thread_it_has_not);
    return 0;
}

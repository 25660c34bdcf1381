/* What a second copying thread gives, and what it takes from others: copies scattered blocks into
 * shared memory, in chunks, by slices that the threads take from one list, as the mover would.
 *
 *   bench_threads TOTAL_MIB BLOCK_KIB CHUNK_MIB SLICE_KIB ROUNDS SEED
 *
 * The contenders are one thread and two, each beside no, one and two processes that spin. They take
 * turns, round by round. Prints for each the median, least and most GB/s, the median of its rate
 * over that of one thread in the same round, the longest chunk in ms (median of the rounds), and
 * what one spinning process got of a core. */
#include "copy.h"
#include "regions.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MAX_SPINNERS = 2, NUM_WAYS = 2, MAX_ROUNDS = 1000 };

/* ---- shared work ---- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards all of this */
static pthread_cond_t begun = PTHREAD_COND_INITIALIZER;
static pthread_cond_t ended = PTHREAD_COND_INITIALIZER;
static const regions_t* work;
static cursor_t next_slice;
static uint64_t taken_bytes;
static uint64_t copied_bytes;
static bool is_helped;
static size_t slice_bytes;

/* With the lock held, which it lets go of meanwhile: copies one slice. False: none is left. */
static bool
copy_slice(void) {
    if (work == NULL || taken_bytes == work->nbytes) {
        return false;
    }
    const regions_t* regions = work;
    cursor_t cursor = next_slice;
    uint64_t left = regions->nbytes - taken_bytes;
    size_t nbytes = left < slice_bytes ? (size_t)left : slice_bytes;
    regions_advance(regions, &next_slice, nbytes);
    taken_bytes += nbytes;
    pthread_mutex_unlock(&lock);
    regions_copy(regions, &cursor, nbytes);
    copy_publish();
    pthread_mutex_lock(&lock);
    copied_bytes += nbytes;
    return true;
}

static void*
help(void* unused) {
    (void)unused;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!is_helped || !copy_slice()) {
            pthread_cond_wait(&begun, &lock);
        }
        if (copied_bytes == work->nbytes) {
            pthread_cond_signal(&ended);
        }
    }
    return NULL;
}

static void
copy_all(const regions_t* regions) {
    pthread_mutex_lock(&lock);
    work = regions;
    next_slice = (cursor_t){0};
    taken_bytes = 0;
    copied_bytes = 0;
    if (is_helped) {
        pthread_cond_signal(&begun);
    }
    while (copy_slice()) {
    }
    while (copied_bytes < work->nbytes) {
        pthread_cond_wait(&ended, &lock);
    }
    pthread_mutex_unlock(&lock);
}

/* ---- spinning processes ---- */

static pid_t spinners[MAX_SPINNERS];

static double
seconds_of(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static pid_t
start_spinner(void) {
    pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        for (volatile unsigned long turns = 0;; turns++) {
        }
    }
    kill(child, SIGSTOP);
    return child;
}

static double
spinner_seconds(void) {
    clockid_t clock;
    return clock_getcpuclockid(spinners[0], &clock) == 0 ? seconds_of(clock) : 0;
}

static void
pause_briefly(void) {
    struct timespec pause = {.tv_nsec = 20 * 1000 * 1000};
    nanosleep(&pause, NULL);
}

/* ---- measuring ---- */

typedef struct {
    double rate;
    double longest; /* seconds of a chunk */
    double spun;    /* by one spinning process, of a core */
} sample_t;

static int
compare(const void* left, const void* right) {
    double a = *(const double*)left;
    double b = *(const double*)right;
    return (a > b) - (a < b);
}

static double
sorted_median(double* values, size_t count) {
    qsort(values, count, sizeof *values, compare);
    return values[count / 2];
}

static sample_t
measure(bool helped, int num_spinners, const regions_t* chunks, size_t num_chunks) {
    is_helped = helped;
    for (int i = 0; i < num_spinners; i++) {
        kill(spinners[i], SIGCONT);
    }
    pause_briefly();
    uint64_t total = 0;
    double longest = 0;
    double spun = spinner_seconds();
    double start = seconds_of(CLOCK_MONOTONIC);
    for (size_t i = 0; i < num_chunks; i++) {
        double before = seconds_of(CLOCK_MONOTONIC);
        copy_all(&chunks[i]);
        double seconds = seconds_of(CLOCK_MONOTONIC) - before;
        longest = seconds > longest ? seconds : longest;
        total += chunks[i].nbytes;
    }
    double seconds = seconds_of(CLOCK_MONOTONIC) - start;
    spun = spinner_seconds() - spun;
    for (int i = 0; i < num_spinners; i++) {
        kill(spinners[i], SIGSTOP);
    }
    pause_briefly();
    return (sample_t){
        .rate = (double)total / seconds / 1e9,
        .longest = longest,
        .spun = spun / seconds,
    };
}

static void
report(int way, int num_spinners, sample_t samples[][NUM_WAYS], size_t rounds) {
    static double rates[MAX_ROUNDS];
    static double ratios[MAX_ROUNDS];
    static double longest[MAX_ROUNDS];
    static double spun[MAX_ROUNDS];
    for (size_t i = 0; i < rounds; i++) {
        rates[i] = samples[i][way].rate;
        ratios[i] = samples[i][way].rate / samples[i][0].rate;
        longest[i] = samples[i][way].longest * 1e3;
        spun[i] = samples[i][way].spun;
    }
    double rate = sorted_median(rates, rounds);
    printf("%d spinning, %d copying: %6.2f [%.2f-%.2f] GB/s  x %.2f  longest %.2f ms  spun %.2f\n",
           num_spinners, way + 1, rate, rates[0], rates[rounds - 1], sorted_median(ratios, rounds),
           sorted_median(longest, rounds), sorted_median(spun, rounds));
}

/* ---- memory ---- */

/* splitmix64 */
static uint64_t
random_below(uint64_t* state, uint64_t limit) {
    uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return (z ^ (z >> 31)) % limit;
}

/* Memory with every page touched. */
static char*
map(int fd, size_t nbytes) {
    int flags = fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
    char* memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (memory == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    memset(memory, 1, nbytes);
    return memory;
}

/* Half of the source's blocks in random order, cut into chunks. */
static regions_t*
make_chunks(size_t total, size_t block, size_t chunk, uint64_t seed) {
    int fd = memfd_create("bench", 0);
    if (ftruncate(fd, (off_t)total) != 0) {
        perror("ftruncate");
        exit(1);
    }
    char* source = map(-1, 2 * total);
    char* target = map(fd, total);
    size_t out_of = 2 * total / block;
    size_t* order = calloc(out_of, sizeof *order);
    for (size_t i = 0; i < out_of; i++) {
        size_t j = random_below(&seed, i + 1);
        order[i] = order[j];
        order[j] = i;
    }
    size_t piece = block < chunk ? block : chunk;
    size_t per_chunk = chunk / piece;
    regions_t* chunks = calloc(total / chunk, sizeof *chunks);
    int64_t* lists = calloc(3 * per_chunk, sizeof *lists);
    for (size_t i = 0; i < total / chunk; i++) {
        for (size_t j = 0; j < per_chunk; j++) {
            size_t at = i * chunk + j * piece;
            lists[j] = (int64_t)(intptr_t)(source + order[at / block] * block + at % block);
            lists[per_chunk + j] = (int64_t)(intptr_t)(target + at);
            lists[2 * per_chunk + j] = (int64_t)piece;
        }
        regions_create(&chunks[i], lists, lists + per_chunk, lists + 2 * per_chunk, per_chunk);
    }
    free(lists);
    free(order);
    return chunks;
}

int
main(int argc, char** argv) {
    size_t numbers[6];
    for (int i = 0; i < 6 && i + 1 < argc; i++) {
        numbers[i] = strtoull(argv[i + 1], NULL, 10);
    }
    if (argc != 7 || numbers[4] < 1 || numbers[4] > MAX_ROUNDS) {
        return 2;
    }
    const size_t total = numbers[0] << 20;
    const size_t block = numbers[1] << 10;
    const size_t chunk = numbers[2] << 20;
    const size_t rounds = numbers[4];
    slice_bytes = numbers[3] << 10;
    for (int i = 0; i < MAX_SPINNERS; i++) {
        spinners[i] = start_spinner();
    }
    regions_t* chunks = make_chunks(total, block, chunk, numbers[5]);
    pthread_t helper;
    pthread_create(&helper, NULL, help, NULL);
    static sample_t samples[MAX_SPINNERS + 1][MAX_ROUNDS + 1][NUM_WAYS];
    for (size_t i = 0; i <= rounds; i++) { /* the first one warms up */
        for (int busy = 0; busy <= MAX_SPINNERS; busy++) {
            for (int way = 0; way < NUM_WAYS; way++) {
                samples[busy][i][way] = measure(way > 0, busy, chunks, total / chunk);
            }
        }
    }
    for (int busy = 0; busy <= MAX_SPINNERS; busy++) {
        for (int way = 0; way < NUM_WAYS; way++) {
            report(way, busy, samples[busy] + 1, rounds);
        }
    }
    for (int i = 0; i < MAX_SPINNERS; i++) {
        kill(spinners[i], SIGKILL);
        waitpid(spinners[i], NULL, 0);
    }
    return 0;
}

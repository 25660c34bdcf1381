/* Whatever a peer writes on its data connection: each expected payload ends, and nothing around it
 * is touched. For libFuzzer (make fuzz-c); built without it, a seeded generator of nearly right
 * streams takes its place.
 *
 *   fuzz_stream [seed] [num_streams] */
#include "mover_helpers.h"
#include "random.h"

#include <sys/socket.h>
#include <unistd.h>

enum { PAYLOAD = 300, GUARD = 64, FIRST_SEQ = 5, NUM_EXPECTED = 2, MAX_STREAM = 4096 };

static const char GUARD_BYTE = 0x5a;

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

/* One payload between two guards. */
typedef struct {
    char bytes[GUARD + PAYLOAD + GUARD];
} landing_t;

static void
check_guards(const landing_t* landing) {
    for (size_t i = 0; i < GUARD; i++) {
        CHECK(landing->bytes[i] == GUARD_BYTE);
        CHECK(landing->bytes[GUARD + PAYLOAD + i] == GUARD_BYTE);
    }
}

static mover_t*
the_mover(void) {
    static mover_t* mover = NULL;
    if (mover == NULL) {
        mover = make_mover(128);
    }
    return mover;
}

int
LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static uint64_t channel = 0;
    static landing_t landings[NUM_EXPECTED];
    mover_t* mover = the_mover();
    int sockets[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) == 0);
    CHECK(mover_attach(mover, sockets[0], ++channel) == MOVER_OK);
    close(sockets[0]);
    job_t* jobs[NUM_EXPECTED];
    for (size_t i = 0; i < NUM_EXPECTED; i++) {
        memset(&landings[i], GUARD_BYTE, sizeof landings[i]);
        jobs[i] =
            make_job(JOB_EXPECT, channel, FIRST_SEQ + i, NULL, landings[i].bytes + GUARD, PAYLOAD);
        jobs[i]->is_checked = true;
        submit(mover, jobs[i]);
    }
    size = size < MAX_STREAM ? size : MAX_STREAM;
    ssize_t sent = send(sockets[1], data, size, MSG_NOSIGNAL);
    CHECK(sent >= 0 || size == 0);
    close(sockets[1]);
    for (size_t i = 0; i < NUM_EXPECTED; i++) {
        CHECK(mover_wait(jobs[i], LONG_SECONDS));
        check_guards(&landings[i]);
        job_release(jobs[i]);
    }
    mover_detach(mover, channel);
    release_all(mover_drain(mover));
    return 0;
}

#ifndef LIBFUZZER

#include <stdlib.h>

static uint64_t
number(random_t* random) {
    const uint64_t likely[] = {0, 1, 127, 128, PAYLOAD - 1, PAYLOAD, PAYLOAD + 1, UINT64_MAX};
    return random_below(random, 3) != 0 ? likely[random_below(random, 8)] : random_next(random);
}

/* A few segments, right or nearly, one after the other. Returns how many bytes. */
static size_t
make_stream(random_t* random, uint8_t* stream) {
    size_t size = 0;
    for (uint64_t left = random_below(random, 6); left > 0; left--) {
        segment_t segment = {
            .flags = (uint32_t)random_below(random, 4),
            .seq = FIRST_SEQ + random_below(random, 3),
            .offset = random_below(random, 2) != 0 ? 0 : number(random),
            .nbytes = number(random),
        };
        segment_encode(&segment, (char*)stream + size);
        if (random_below(random, 8) == 0) {
            stream[size + random_below(random, SEGMENT_HEADER_BYTES)] ^= 1;
        }
        size += SEGMENT_HEADER_BYTES;
        uint64_t payload = segment.nbytes < 600 ? segment.nbytes : random_below(random, 600);
        memset(stream + size, 1, (size_t)payload);
        size += (size_t)payload;
    }
    return size;
}

int
main(int argc, char** argv) {
    random_t random = {.state = argc > 1 ? strtoull(argv[1], NULL, 10) : 1};
    long num_streams = argc > 2 ? atol(argv[2]) : 5000;
    static uint8_t stream[8 * (SEGMENT_HEADER_BYTES + 600)];
    for (long i = 0; i < num_streams; i++) {
        LLVMFuzzerTestOneInput(stream, make_stream(&random, stream));
    }
    end_mover(the_mover());
    printf("ok %ld streams\n", num_streams);
    return 0;
}

#endif

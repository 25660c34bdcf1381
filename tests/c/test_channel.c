#include "mover_helpers.h"
#include "random.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { SLICE = 4096, CHANNEL = 5, SMALL_BUFFER = 8192 };

/* One end of a socket pair belongs to a mover, the other to a test that speaks the frames by hand.
 */
typedef struct {
    mover_t* mover;
    int peer;
} pair_t;

static int
attach_new_socket(mover_t* mover, uint64_t channel) {
    int sockets[2];
    int buffer = SMALL_BUFFER;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) == 0);
    CHECK(setsockopt(sockets[0], SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer) == 0);
    CHECK(mover_attach(mover, sockets[0], channel) == MOVER_OK);
    close(sockets[0]);
    return sockets[1];
}

static pair_t
make_pair(void) {
    mover_t* mover = make_mover(SLICE);
    return (pair_t){.mover = mover, .peer = attach_new_socket(mover, CHANNEL)};
}

static void
end_pair(pair_t pair) {
    end_mover(pair.mover);
    close(pair.peer);
}

/* ---- the peer's side ---- */

static void
write_all(int fd, const void* bytes, size_t nbytes) {
    CHECK(send(fd, bytes, nbytes, MSG_NOSIGNAL) == (ssize_t)nbytes);
}

static void
write_header(int fd, segment_t segment) {
    char header[SEGMENT_HEADER_BYTES];
    segment_encode(&segment, header);
    write_all(fd, header, sizeof header);
}

static void
write_segment(int fd, segment_t segment, const void* payload) {
    write_header(fd, segment);
    write_all(fd, payload, (size_t)segment.nbytes);
}

static void
read_all(int fd, void* bytes, size_t nbytes) {
    CHECK(nbytes == 0 || recv(fd, bytes, nbytes, MSG_WAITALL) == (ssize_t)nbytes);
}

static segment_t
read_header(int fd) {
    char header[SEGMENT_HEADER_BYTES];
    segment_t segment;
    read_all(fd, header, sizeof header);
    CHECK(segment_decode(&segment, header));
    return segment;
}

/* Reads segments of one seq into `payload` until LAST. Returns how many bytes came. */
static uint64_t
read_stream(int fd, uint64_t seq, char* payload) {
    uint64_t moved = 0;
    for (;;) {
        segment_t segment = read_header(fd);
        CHECK(segment.seq == seq && segment.offset == moved && segment.nbytes <= SLICE);
        read_all(fd, payload + moved, (size_t)segment.nbytes);
        moved += segment.nbytes;
        if (segment.flags != 0) {
            CHECK(segment.flags == SEGMENT_LAST && segment.nbytes == 0);
            return moved;
        }
    }
}

static bool
is_at_end(int fd) {
    char byte = 0;
    return recv(fd, &byte, 1, 0) == 0;
}

static void
fill(char* bytes, size_t nbytes, uint64_t seed) {
    random_t random = {.state = seed};
    for (size_t i = 0; i < nbytes; i++) {
        bytes[i] = (char)random_next(&random);
    }
}

static job_t*
submit_send(pair_t pair, uint64_t seq, const void* source, size_t nbytes) {
    return submit(pair.mover, make_job(JOB_SEND, CHANNEL, seq, source, NULL, nbytes));
}

static job_t*
submit_expect(pair_t pair, uint64_t seq, void* destination, size_t nbytes) {
    return submit(pair.mover, make_job(JOB_EXPECT, CHANNEL, seq, NULL, destination, nbytes));
}

/* ---- frames ---- */

static void
headers_survive_a_round_trip(void) {
    const segment_t segments[] = {
        {.seq = UINT64_MAX, .offset = 1, .nbytes = 2},
        {.flags = SEGMENT_LAST, .seq = 3, .offset = 4, .nbytes = 5},
        {.flags = SEGMENT_LAST, .seq = 3, .offset = 9},
        {.flags = SEGMENT_LAST | SEGMENT_ABORTED, .seq = 3},
    };
    for (size_t i = 0; i < sizeof segments / sizeof segments[0]; i++) {
        char header[SEGMENT_HEADER_BYTES];
        segment_t back;
        segment_encode(&segments[i], header);
        CHECK(segment_decode(&back, header));
        CHECK(back.flags == segments[i].flags && back.seq == segments[i].seq);
        CHECK(back.offset == segments[i].offset && back.nbytes == segments[i].nbytes);
    }
}

static void
headers_that_say_nothing_are_refused(void) {
    const segment_t segments[] = {
        {.flags = 4, .nbytes = 1},
        {.nbytes = 0},
        {.flags = SEGMENT_ABORTED, .nbytes = 1},
        {.nbytes = UINT64_MAX},
    };
    char header[SEGMENT_HEADER_BYTES];
    segment_t back;
    for (size_t i = 0; i < sizeof segments / sizeof segments[0]; i++) {
        segment_encode(&segments[i], header);
        CHECK(!segment_decode(&back, header));
    }
    memset(header, 0, sizeof header);
    CHECK(!segment_decode(&back, header));
}

/* ---- sending ---- */

static void
a_send_is_cut_into_slices_and_ends_with_last(void) {
    static char from[10 * SLICE + 77];
    static char got[sizeof from];
    pair_t pair = make_pair();
    fill(from, sizeof from, 1);
    job_t* job = submit_send(pair, 9, from, sizeof from);
    CHECK(read_stream(pair.peer, 9, got) == sizeof from);
    CHECK(memcmp(from, got, sizeof from) == 0);
    expect_end(job, JOB_DONE, "");
    CHECK(stats_of(pair.mover).bytes_sent == sizeof from);
    end_pair(pair);
}

static void
an_empty_send_is_one_empty_segment(void) {
    char byte = 0;
    pair_t pair = make_pair();
    job_t* job = submit_send(pair, 9, &byte, 0);
    CHECK(read_stream(pair.peer, 9, &byte) == 0);
    expect_end(job, JOB_DONE, "");
    end_pair(pair);
}

static void
sends_on_one_channel_take_turns(void) {
    static char from[100 * SLICE];
    static char sink[SLICE];
    pair_t pair = make_pair();
    job_t* large = submit_send(pair, 1, from, sizeof from);
    job_t* small = submit_send(pair, 2, from, SLICE);
    uint64_t last_seq = 0;
    uint64_t first_end = 0;
    for (int num_ended = 0; num_ended < 2;) {
        segment_t segment = read_header(pair.peer);
        read_all(pair.peer, sink, (size_t)segment.nbytes);
        last_seq = segment.seq;
        if (segment.flags == SEGMENT_LAST) {
            first_end = num_ended == 0 ? last_seq : first_end;
            num_ended++;
        }
    }
    CHECK(first_end == 2);
    expect_end(large, JOB_DONE, "");
    expect_end(small, JOB_DONE, "");
    end_pair(pair);
}

/* Bytes a slow reader has not taken yet do not keep other channels waiting. */
static void
a_reader_that_sleeps_stops_nobody_else(void) {
    static char from[64 * SLICE];
    static char got[sizeof from];
    pair_t pair = make_pair();
    int other = attach_new_socket(pair.mover, CHANNEL + 1);
    fill(from, sizeof from, 2);
    job_t* stuck = submit_send(pair, 1, from, sizeof from);
    job_t* free_to_go =
        submit(pair.mover, make_job(JOB_SEND, CHANNEL + 1, 2, from, NULL, sizeof from));
    CHECK(read_stream(other, 2, got) == sizeof from);
    expect_end(free_to_go, JOB_DONE, "");
    CHECK(!job_has_ended(stuck));
    CHECK(read_stream(pair.peer, 1, got) == sizeof from);
    CHECK(memcmp(from, got, sizeof from) == 0);
    expect_end(stuck, JOB_DONE, "");
    close(other);
    end_pair(pair);
}

static void
wait_for_sent(pair_t pair, uint64_t nbytes) {
    while (stats_of(pair.mover).bytes_sent < nbytes) {
        sched_yield();
    }
}

/* The socket is full in the middle of a segment. The job ends although nobody reads; the segment is
 * filled up with zeros, and the peer is told to forget it. */
static void
a_cancelled_send_ends_at_once_and_tells_the_peer(void) {
    enum { SEGMENT = 1 << 20 };
    static char from[SEGMENT];
    static char got[SEGMENT];
    mover_t* mover = make_mover(SEGMENT);
    pair_t pair = {.mover = mover, .peer = attach_new_socket(mover, CHANNEL)};
    memset(from, 0x55, sizeof from);
    job_t* job = submit_send(pair, 1, from, sizeof from);
    wait_for_sent(pair, 1);
    mover_cancel(job);
    expect_end(job, JOB_CANCELLED, "cancelled");
    memset(from, 0x66, sizeof from); /* the memory is ours again */
    segment_t segment = read_header(pair.peer);
    CHECK(segment.flags == 0 && segment.nbytes == SEGMENT);
    read_all(pair.peer, got, SEGMENT);
    CHECK(got[0] == 0x55 && got[SEGMENT - 1] == 0);
    CHECK(memchr(got, 0x66, SEGMENT) == NULL);
    segment = read_header(pair.peer);
    CHECK(segment.flags == (SEGMENT_LAST | SEGMENT_ABORTED) && segment.seq == 1);
    job = submit_send(pair, 2, from, 100);
    segment = read_header(pair.peer);
    CHECK(segment.seq == 2 && segment.nbytes == 100);
    read_all(pair.peer, got, 100);
    CHECK(read_header(pair.peer).flags == SEGMENT_LAST);
    expect_end(job, JOB_DONE, "");
    end_pair(pair);
}

static void
a_send_cancelled_before_its_turn_is_only_an_abort(void) {
    static char from[100 * SLICE];
    static char sink[SLICE];
    pair_t pair = make_pair();
    job_t* first = submit_send(pair, 1, from, sizeof from);
    wait_for_sent(pair, 1);
    job_t* second = submit_send(pair, 2, from, sizeof from);
    mover_cancel(second);
    job_retain(second);
    expect_end(second, JOB_CANCELLED, "cancelled");
    CHECK(second->moved_bytes == 0);
    job_release(second);
    int num_aborts = 0;
    for (segment_t segment = {0}; segment.seq != 1 || segment.flags == 0;) {
        segment = read_header(pair.peer);
        read_all(pair.peer, sink, (size_t)segment.nbytes);
        if (segment.seq == 2) {
            CHECK(segment.flags == (SEGMENT_LAST | SEGMENT_ABORTED));
            num_aborts++;
        }
    }
    CHECK(num_aborts == 1);
    expect_end(first, JOB_DONE, "");
    end_pair(pair);
}

static void
sends_fail_when_the_peer_goes(void) {
    static char from[100 * SLICE];
    pair_t pair = make_pair();
    job_t* first = submit_send(pair, 1, from, sizeof from);
    job_t* second = submit_send(pair, 2, from, sizeof from);
    wait_for_sent(pair, 1);
    close(pair.peer);
    expect_end(first, JOB_FAILED, "");
    expect_end(second, JOB_FAILED, "");
    end_mover(pair.mover);
}

/* ---- receiving ---- */

static void
an_expected_stream_lands(void) {
    static char from[3 * SLICE];
    static char to[sizeof from];
    pair_t pair = make_pair();
    fill(from, sizeof from, 3);
    job_t* job = submit_expect(pair, 1, to, sizeof to);
    write_segment(pair.peer, (segment_t){.seq = 1, .nbytes = SLICE}, from);
    write_segment(pair.peer, (segment_t){SEGMENT_LAST, 1, SLICE, 2 * SLICE}, from + SLICE);
    expect_end(job, JOB_DONE, "");
    CHECK(memcmp(from, to, sizeof from) == 0);
    CHECK(stats_of(pair.mover).bytes_received == sizeof from);
    end_pair(pair);
}

static void
all_the_bytes_without_last_are_not_enough(void) {
    char from[8] = "1234567";
    char to[8];
    pair_t pair = make_pair();
    job_t* job = submit_expect(pair, 1, to, sizeof to);
    write_segment(pair.peer, (segment_t){.seq = 1, .nbytes = 8}, from);
    while (stats_of(pair.mover).bytes_received < 8) {
        sched_yield();
    }
    CHECK(!job_has_ended(job));
    write_header(pair.peer, (segment_t){SEGMENT_LAST, 1, 8, 0});
    expect_end(job, JOB_DONE, "");
    end_pair(pair);
}

static void
a_stream_may_come_byte_by_byte(void) {
    char stream[SEGMENT_HEADER_BYTES + 5];
    char to[5];
    pair_t pair = make_pair();
    job_t* job = submit_expect(pair, 1, to, sizeof to);
    segment_encode(&(segment_t){SEGMENT_LAST, 1, 0, 5}, stream);
    memcpy(stream + SEGMENT_HEADER_BYTES, "hello", 5);
    for (size_t i = 0; i < sizeof stream; i++) {
        write_all(pair.peer, stream + i, 1);
    }
    expect_end(job, JOB_DONE, "");
    CHECK(memcmp(to, "hello", 5) == 0);
    end_pair(pair);
}

static void
bytes_nobody_expects_are_dropped_and_counted(void) {
    static char from[3 * SLICE];
    char to[1];
    pair_t pair = make_pair();
    write_segment(pair.peer, (segment_t){SEGMENT_LAST, 77, 0, sizeof from}, from);
    write_header(pair.peer, (segment_t){SEGMENT_LAST | SEGMENT_ABORTED, 78, 0, 0});
    job_t* job = submit_expect(pair, 1, to, sizeof to);
    write_segment(pair.peer, (segment_t){SEGMENT_LAST, 1, 0, 1}, "x");
    expect_end(job, JOB_DONE, "");
    CHECK(to[0] == 'x');
    CHECK(stats_of(pair.mover).bytes_dropped == sizeof from);
    CHECK(stats_of(pair.mover).protocol_errors == 0);
    end_pair(pair);
}

static void
an_abort_fails_the_expect_only(void) {
    char to[8];
    pair_t pair = make_pair();
    job_t* aborted = submit_expect(pair, 1, to, sizeof to);
    job_t* other = submit_expect(pair, 2, to, 1);
    write_segment(pair.peer, (segment_t){.seq = 1, .nbytes = 4}, "abcd");
    write_header(pair.peer, (segment_t){SEGMENT_LAST | SEGMENT_ABORTED, 1, 4, 0});
    expect_end(aborted, JOB_FAILED, "the sender aborted");
    write_segment(pair.peer, (segment_t){SEGMENT_LAST, 2, 0, 1}, "x");
    expect_end(other, JOB_DONE, "");
    end_pair(pair);
}

/* The second half must not be written into memory that may be another's by then. */
static void
an_expect_cancelled_in_the_middle_drops_the_rest(void) {
    char to[8] = {0};
    pair_t pair = make_pair();
    job_t* job = submit_expect(pair, 1, to, sizeof to);
    write_header(pair.peer, (segment_t){SEGMENT_LAST, 1, 0, 8});
    write_all(pair.peer, "aaaa", 4);
    while (stats_of(pair.mover).bytes_received < 4) {
        sched_yield();
    }
    mover_cancel(job);
    expect_end(job, JOB_CANCELLED, "cancelled");
    memset(to, 'z', sizeof to);
    write_all(pair.peer, "bbbb", 4);
    char next[1];
    job = submit_expect(pair, 2, next, 1);
    write_segment(pair.peer, (segment_t){SEGMENT_LAST, 2, 0, 1}, "x");
    expect_end(job, JOB_DONE, "");
    CHECK(memcmp(to, "zzzzzzzz", 8) == 0);
    CHECK(stats_of(pair.mover).bytes_dropped == 4);
    end_pair(pair);
}

static void
an_expect_cancelled_before_it_began_leaves_its_seq_free(void) {
    char to[1] = {0};
    pair_t pair = make_pair();
    job_t* job = submit_expect(pair, 1, to, 1);
    mover_cancel(job);
    expect_end(job, JOB_CANCELLED, "cancelled");
    job = submit_expect(pair, 1, to, 1);
    write_segment(pair.peer, (segment_t){SEGMENT_LAST, 1, 0, 1}, "x");
    expect_end(job, JOB_DONE, "");
    end_pair(pair);
}

/* Sends what is wrong after half of a good payload; the channel and both expects must fail. */
static void
check_breaks(segment_t segment, const char* error) {
    char to[8];
    pair_t pair = make_pair();
    job_t* first = submit_expect(pair, 1, to, sizeof to);
    job_t* second = submit_expect(pair, 2, to, sizeof to);
    write_segment(pair.peer, (segment_t){.seq = 1, .nbytes = 4}, "abcd");
    write_header(pair.peer, segment);
    expect_end(first, JOB_FAILED, error);
    expect_end(second, JOB_FAILED, error);
    CHECK(is_at_end(pair.peer));
    CHECK(stats_of(pair.mover).protocol_errors == 1);
    CHECK(stats_of(pair.mover).num_channels == 0);
    expect_end(submit_send(pair, 3, to, 1), JOB_FAILED, error);
    expect_end(submit_expect(pair, 3, to, 1), JOB_FAILED, error);
    end_pair(pair);
}

static void
a_wrong_segment_breaks_the_channel(void) {
    check_breaks((segment_t){.flags = 64, .seq = 1, .offset = 4, .nbytes = 4}, "not a segment");
    check_breaks((segment_t){.seq = 1, .offset = 5, .nbytes = 3}, "skipped or repeated");
    check_breaks((segment_t){.seq = 1, .offset = 0, .nbytes = 4}, "skipped or repeated");
    check_breaks((segment_t){.seq = 1, .offset = 4, .nbytes = 5}, "more than was expected");
    check_breaks((segment_t){SEGMENT_LAST, 1, 4, 3}, "less than was expected");
    check_breaks((segment_t){SEGMENT_LAST, 1, 4, 0}, "less than was expected");
}

static void
expects_fail_when_the_peer_goes_inside_a_frame(void) {
    char to[8];
    pair_t pair = make_pair();
    job_t* begun = submit_expect(pair, 1, to, sizeof to);
    job_t* waiting = submit_expect(pair, 2, to, sizeof to);
    write_header(pair.peer, (segment_t){.seq = 1, .nbytes = 8});
    write_all(pair.peer, "abc", 3);
    close(pair.peer);
    expect_end(begun, JOB_FAILED, "the peer closed the connection");
    expect_end(waiting, JOB_FAILED, "the peer closed the connection");
    CHECK(stats_of(pair.mover).protocol_errors == 0);
    end_mover(pair.mover);
}

/* ---- channels ---- */

static void
detach_ends_the_jobs_and_frees_the_number(void) {
    static char memory[100 * SLICE];
    pair_t pair = make_pair();
    job_t* sending = submit_send(pair, 1, memory, sizeof memory);
    job_t* expecting = submit_expect(pair, 1, memory, 1);
    mover_detach(pair.mover, CHANNEL);
    mover_detach(pair.mover, CHANNEL);
    job_t* late = make_job(JOB_SEND, CHANNEL, 2, memory, NULL, 1);
    CHECK(mover_submit(pair.mover, late) == MOVER_UNKNOWN_CHANNEL);
    job_release(late);
    expect_end(sending, JOB_FAILED, "detached");
    expect_end(expecting, JOB_FAILED, "detached");
    close(pair.peer);
    pair.peer = attach_new_socket(pair.mover, CHANNEL);
    expecting = submit_expect(pair, 1, memory, 1);
    write_segment(pair.peer, (segment_t){SEGMENT_LAST, 1, 0, 1}, "x");
    expect_end(expecting, JOB_DONE, "");
    mover_detach(pair.mover, CHANNEL);
    CHECK(is_at_end(pair.peer));
    end_pair(pair);
}

static void
what_exists_is_not_made_twice(void) {
    char to[1];
    pair_t pair = make_pair();
    CHECK(mover_attach(pair.mover, pair.peer, CHANNEL) == MOVER_DUPLICATE);
    CHECK(mover_attach(pair.mover, -1, CHANNEL + 1) == MOVER_ERRNO);
    job_t* job = submit_expect(pair, 1, to, 1);
    job_t* again = make_job(JOB_EXPECT, CHANNEL, 1, NULL, to, 1);
    CHECK(mover_submit(pair.mover, again) == MOVER_DUPLICATE);
    job_release(again);
    mover_cancel(job);
    expect_end(job, JOB_CANCELLED, "cancelled");
    end_pair(pair);
}

static void
close_cancels_streams_and_closes_sockets(void) {
    static char memory[100 * SLICE];
    pair_t pair = make_pair();
    job_t* sending = submit_send(pair, 1, memory, sizeof memory);
    job_t* expecting = submit_expect(pair, 1, memory, 1);
    CHECK(mover_close(pair.mover, LONG_SECONDS));
    expect_end(sending, JOB_CANCELLED, "the mover was closed");
    expect_end(expecting, JOB_CANCELLED, "the mover was closed");
    CHECK(mover_attach(pair.mover, pair.peer, CHANNEL) == MOVER_CLOSED);
    end_pair(pair);
}

/* Both ends in one mover, scattered on both sides, many jobs both ways, some of them cancelled. */
static void
random_traffic_arrives_whole_or_not_at_all(void) {
    enum { NUM_JOBS = 40, MAX_BYTES = 5 * SLICE };
    static char from[NUM_JOBS][MAX_BYTES];
    static char to[NUM_JOBS][MAX_BYTES];
    random_t random = {.state = 42};
    mover_t* mover = make_mover(SLICE);
    int sockets[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) == 0);
    for (uint64_t end = 0; end < 2; end++) {
        CHECK(mover_attach(mover, sockets[end], end) == MOVER_OK);
    }
    for (int round = 0; round < 30; round++) {
        job_t* sends[NUM_JOBS];
        job_t* expects[NUM_JOBS];
        memset(to, 0, sizeof to);
        for (uint64_t i = 0; i < NUM_JOBS; i++) {
            size_t nbytes = (size_t)random_below(&random, MAX_BYTES + 1);
            fill(from[i], nbytes, random_next(&random));
            uint64_t seq = (uint64_t)round * NUM_JOBS + i;
            expects[i] = submit(mover, make_job(JOB_EXPECT, i % 2, seq, NULL, to[i], nbytes));
            sends[i] = submit(mover, make_job(JOB_SEND, 1 - i % 2, seq, from[i], NULL, nbytes));
            if (random_below(&random, 4) == 0) {
                mover_cancel(random_below(&random, 2) == 0 ? sends[i] : expects[i]);
            }
        }
        for (int i = 0; i < NUM_JOBS; i++) {
            CHECK(mover_wait(sends[i], LONG_SECONDS) && mover_wait(expects[i], LONG_SECONDS));
            bool is_whole = memcmp(from[i], to[i], (size_t)expects[i]->regions.nbytes) == 0;
            CHECK(job_state(expects[i]) != JOB_DONE || is_whole);
            CHECK(job_state(expects[i]) != JOB_FAILED || job_state(sends[i]) == JOB_CANCELLED);
            job_release(sends[i]);
            job_release(expects[i]);
        }
        release_all(mover_drain(mover));
    }
    CHECK(stats_of(mover).protocol_errors == 0 && stats_of(mover).num_channels == 2);
    end_mover(mover);
    close(sockets[0]);
    close(sockets[1]);
}

int
main(void) {
    RUN(headers_survive_a_round_trip);
    RUN(headers_that_say_nothing_are_refused);
    RUN(a_send_is_cut_into_slices_and_ends_with_last);
    RUN(an_empty_send_is_one_empty_segment);
    RUN(sends_on_one_channel_take_turns);
    RUN(a_reader_that_sleeps_stops_nobody_else);
    RUN(a_cancelled_send_ends_at_once_and_tells_the_peer);
    RUN(a_send_cancelled_before_its_turn_is_only_an_abort);
    RUN(sends_fail_when_the_peer_goes);
    RUN(an_expected_stream_lands);
    RUN(all_the_bytes_without_last_are_not_enough);
    RUN(a_stream_may_come_byte_by_byte);
    RUN(bytes_nobody_expects_are_dropped_and_counted);
    RUN(an_abort_fails_the_expect_only);
    RUN(an_expect_cancelled_in_the_middle_drops_the_rest);
    RUN(an_expect_cancelled_before_it_began_leaves_its_seq_free);
    RUN(a_wrong_segment_breaks_the_channel);
    RUN(expects_fail_when_the_peer_goes_inside_a_frame);
    RUN(detach_ends_the_jobs_and_frees_the_number);
    RUN(what_exists_is_not_made_twice);
    RUN(close_cancels_streams_and_closes_sockets);
    RUN(random_traffic_arrives_whole_or_not_at_all);
    return 0;
}

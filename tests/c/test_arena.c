#include "arena.h"
#include "check.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MIB = 1 << 20 };

static void
a_peer_sees_the_same_bytes(void) {
    arena_t ours;
    arena_t theirs;
    CHECK(arena_create(&ours, MIB, (arena_options_t){0}) == ARENA_OK);
    CHECK(arena_attach(&theirs, ours.fd, MIB) == ARENA_OK);
    CHECK(theirs.fd < 0 && theirs.address != ours.address);
    strcpy(ours.address + 12345, "hello");
    CHECK(strcmp(theirs.address + 12345, "hello") == 0);
    arena_destroy(&ours);
    strcpy(theirs.address + 12345, "still here");
    arena_destroy(&theirs);
}

static void
the_file_cannot_change_its_size(void) {
    arena_t arena;
    CHECK(arena_create(&arena, MIB, (arena_options_t){0}) == ARENA_OK);
    CHECK(ftruncate(arena.fd, 4096) != 0);
    CHECK(ftruncate(arena.fd, 2 * MIB) != 0);
    CHECK(fcntl(arena.fd, F_ADD_SEALS, F_SEAL_WRITE) != 0);
    CHECK((fcntl(arena.fd, F_GETFD) & FD_CLOEXEC) != 0);
    arena_destroy(&arena);
}

/* Where vm.memfd_noexec is 2, the kernel makes no other. */
static void
the_file_cannot_be_executed(void) {
    const unsigned noexec_seal = 8; /* MFD_NOEXEC_SEAL, F_SEAL_EXEC: Linux 6.3 */
    const int seal_exec = 0x20;
    int probe = memfd_create("probe", MFD_CLOEXEC | noexec_seal);
    arena_t arena;
    CHECK(arena_create(&arena, MIB, (arena_options_t){0}) == ARENA_OK);
    CHECK(((fcntl(arena.fd, F_GET_SEALS) & seal_exec) != 0) == (probe >= 0));
    arena_destroy(&arena);
    if (probe >= 0) {
        close(probe);
    }
}

static void
attach_refuses_what_could_vanish(void) {
    arena_t arena;
    int unsealed = memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(unsealed >= 0 && ftruncate(unsealed, MIB) == 0);
    CHECK(arena_attach(&arena, unsealed, MIB) == ARENA_UNSEALED);
    CHECK(fcntl(unsealed, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    CHECK(arena_attach(&arena, unsealed, MIB + 1) == ARENA_TOO_SMALL);
    CHECK(arena_attach(&arena, unsealed, MIB) == ARENA_OK);
    arena_destroy(&arena);
    close(unsealed);
    CHECK(arena_attach(&arena, unsealed, MIB) == ARENA_ERRNO);
}

/* Reserved huge pages may run out after they were mapped, and then a write ends in SIGBUS. */
static void
attach_refuses_huge_pages(void) {
    arena_t arena;
    const size_t nbytes = (size_t)2 * MIB;
    int fd = memfd_create("huge", MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB);
    if (fd < 0) {
        return; /* the kernel has none */
    }
    CHECK(ftruncate(fd, (off_t)nbytes) == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
    CHECK(arena_attach(&arena, fd, nbytes) == ARENA_HUGE_PAGES);
    close(fd);
}

static void
a_size_that_cannot_be_mapped_is_an_error(void) {
    arena_t arena;
    CHECK(arena_create(&arena, (size_t)1 << 62, (arena_options_t){0}) == ARENA_ERRNO);
}

static void
options_never_fail_and_report_in_words(void) {
    arena_t arena;
    CHECK(arena_create(&arena, 16 * MIB, (arena_options_t){true, true, true}) == ARENA_OK);
    CHECK(strlen(arena.huge_pages) > 0 && strcmp(arena.huge_pages, "off") != 0);
    CHECK(strlen(arena.page_lock) > 0 && strcmp(arena.page_lock, "off") != 0);
    CHECK(strcmp(arena.cuda_register, "no CUDA library is loaded in this process") == 0);
    memset(arena.address, 1, arena.nbytes);
    arena_destroy(&arena);
}

static size_t
num_resident_pages(const arena_t* arena) {
    static unsigned char pages[64 * MIB / 4096];
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    CHECK(arena->nbytes / page <= sizeof pages);
    CHECK(mincore(arena->address, arena->nbytes, pages) == 0);
    size_t count = 0;
    for (size_t i = 0; i < arena->nbytes / page; i++) {
        count += pages[i] & 1;
    }
    return count;
}

/* A hang here is a failure by the test's time limit. */
static void
wait_for_prefault(arena_t* arena, size_t upto) {
    while (atomic_load(&arena->touched) < upto) {
        sched_yield();
    }
}

static void
prefault_touches_what_was_asked_and_keeps_data(void) {
    arena_t arena;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    CHECK(arena_create(&arena, 64 * MIB, (arena_options_t){0}) == ARENA_OK);
    CHECK(num_resident_pages(&arena) == 0);
    strcpy(arena.address + MIB, "data");
    CHECK(arena_prefault(&arena, 8 * MIB) == 0);
    CHECK(arena_prefault(&arena, 4 * MIB) == 0); /* never goes back */
    wait_for_prefault(&arena, 8 * MIB);
    CHECK(num_resident_pages(&arena) == 8 * MIB / page);
    CHECK(arena_prefault(&arena, SIZE_MAX) == 0);
    wait_for_prefault(&arena, 64 * MIB);
    CHECK(num_resident_pages(&arena) == 64 * MIB / page);
    CHECK(strcmp(arena.address + MIB, "data") == 0);
    arena_destroy(&arena);
}

/* Where nothing is mapped, the kernel refuses pages as it does when it has none. */
static void
prefault_does_not_pass_pages_that_cannot_be_had(void) {
    arena_t arena;
    CHECK(arena_create(&arena, 16 * MIB, (arena_options_t){0}) == ARENA_OK);
    CHECK(munmap(arena.address + 4 * MIB, 12 * MIB) == 0);
    CHECK(arena_prefault(&arena, 16 * MIB) == 0);
    while (atomic_load(&arena.prefault_error) == 0) {
        sched_yield();
    }
    CHECK(atomic_load(&arena.touched) == 4 * MIB);
    CHECK(mmap(arena.address + 4 * MIB, 12 * MIB, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
               arena.fd, 4 * MIB) == arena.address + 4 * MIB);
    wait_for_prefault(&arena, 16 * MIB); /* it tries again */
    CHECK(atomic_load(&arena.prefault_error) == 0);
    arena_destroy(&arena);
}

static void
prefault_stops_when_the_arena_goes(void) {
    arena_t arena;
    CHECK(arena_create(&arena, (size_t)64 << 30, (arena_options_t){0}) == ARENA_OK);
    CHECK(arena_prefault(&arena, arena.nbytes) == 0);
    arena_destroy(&arena);
}

/* The parent's thread waits on the condition that the child has a copy of. */
static void
a_forked_child_drops_an_arena_and_hurts_nobody(void) {
    arena_t arena;
    CHECK(arena_create(&arena, 16 * MIB, (arena_options_t){0}) == ARENA_OK);
    CHECK(arena_prefault(&arena, MIB) == 0);
    wait_for_prefault(&arena, MIB);
    for (int i = 0; i < 20; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            alarm(20); /* ends a child that hangs */
            CHECK(arena_prefault(&arena, 2 * MIB) == 0);
            arena_destroy(&arena);
            _exit(0);
        }
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    CHECK(arena_prefault(&arena, 16 * MIB) == 0);
    wait_for_prefault(&arena, 16 * MIB);
    arena_destroy(&arena);
}

/* What the child maps where the peer's memory was stays, too. */
static void
a_forked_child_inherits_nothing_of_a_peer(void) {
    arena_t ours;
    arena_t theirs;
    CHECK(arena_create(&ours, MIB, (arena_options_t){0}) == ARENA_OK);
    CHECK(arena_attach(&theirs, ours.fd, MIB) == ARENA_OK);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        unsigned char page = 0;
        CHECK(mincore(theirs.address, 4096, &page) != 0);
        CHECK(mmap(theirs.address, 4096, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == theirs.address);
        arena_destroy(&theirs);
        CHECK(mincore(theirs.address, 4096, &page) == 0);
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    strcpy(theirs.address, "still here");
    arena_destroy(&theirs);
    arena_destroy(&ours);
}

int
main(void) {
    RUN(the_file_cannot_be_executed);
    RUN(a_forked_child_drops_an_arena_and_hurts_nobody);
    RUN(a_forked_child_inherits_nothing_of_a_peer);
    RUN(a_peer_sees_the_same_bytes);
    RUN(the_file_cannot_change_its_size);
    RUN(attach_refuses_what_could_vanish);
    RUN(attach_refuses_huge_pages);
    RUN(a_size_that_cannot_be_mapped_is_an_error);
    RUN(options_never_fail_and_report_in_words);
    RUN(prefault_touches_what_was_asked_and_keeps_data);
    RUN(prefault_does_not_pass_pages_that_cannot_be_had);
    RUN(prefault_stops_when_the_arena_goes);
    return 0;
}

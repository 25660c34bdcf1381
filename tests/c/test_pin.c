/* A CUDA runtime of this program's own, which the arena must find as it finds the real one. */
#include "arena.h"
#include "check.h"

#include <string.h>

enum { MIB = 1 << 20, NOT_PERMITTED = 800 };

int cudaHostRegister(void* address, size_t nbytes, unsigned flags);
int cudaHostUnregister(void* address);

static int register_result;
static void* registered;
static size_t registered_bytes;

int
cudaHostRegister(void* address, size_t nbytes, unsigned flags) {
    CHECK(flags == 3); /* portable, mapped */
    if (register_result == 0) {
        registered = address;
        registered_bytes = nbytes;
    }
    return register_result;
}

int
cudaHostUnregister(void* address) {
    CHECK(address == registered);
    registered = NULL;
    return 0;
}

static void
the_whole_arena_is_registered_and_unregistered(void) {
    arena_t arena;
    register_result = 0;
    CHECK(arena_create(&arena, MIB, (arena_options_t){.cuda_register = true}) == ARENA_OK);
    CHECK(registered == arena.address && registered_bytes == MIB);
    CHECK(strcmp(arena.cuda_register, "registered by cudaHostRegister") == 0);
    arena_destroy(&arena);
    CHECK(registered == NULL);
}

static void
a_refusal_is_reported_and_not_fatal(void) {
    arena_t arena;
    register_result = NOT_PERMITTED;
    CHECK(arena_create(&arena, MIB, (arena_options_t){.cuda_register = true}) == ARENA_OK);
    CHECK(strcmp(arena.cuda_register, "refused: cudaHostRegister returned 800") == 0);
    arena_destroy(&arena);
}

static void
nothing_is_registered_unasked(void) {
    arena_t arena;
    register_result = 0;
    CHECK(arena_create(&arena, MIB, (arena_options_t){0}) == ARENA_OK);
    CHECK(registered == NULL && strcmp(arena.cuda_register, "off") == 0);
    arena_destroy(&arena);
}

static void
locking_more_than_the_limit_is_reported(void) {
    arena_t arena;
    CHECK(arena_create(&arena, (size_t)1 << 46, (arena_options_t){.page_lock = true}) == ARENA_OK);
    CHECK(strlen(arena.page_lock) > 0 && strcmp(arena.page_lock, "off") != 0);
    arena_destroy(&arena);
}

int
main(void) {
    RUN(the_whole_arena_is_registered_and_unregistered);
    RUN(a_refusal_is_reported_and_not_fatal);
    RUN(nothing_is_registered_unasked);
    RUN(locking_more_than_the_limit_is_reported);
    return 0;
}

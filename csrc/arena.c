#include "arena.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#ifndef MFD_NOEXEC_SEAL /* Linux 6.3 */
#define MFD_NOEXEC_SEAL 8U
#endif
#ifndef MADV_POPULATE_WRITE /* Linux 5.14 */
#define MADV_POPULATE_WRITE 23
#endif

enum { PREFAULT_SLICE_BYTES = 4 << 20 };          /* bounds how long a stop waits */
static const double PREFAULT_PAUSE_SECONDS = 1.0; /* after pages that cannot be had */

/* ---- the memory file ---- */

/* Where vm.memfd_noexec is 2, the kernel refuses a file that could be executed. A kernel that does
 * not know the flag says EINVAL. */
static int
open_memory_file(void) {
    const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
    int fd = memfd_create("p2p-kv-arena", flags | MFD_NOEXEC_SEAL);
    return fd < 0 && errno == EINVAL ? memfd_create("p2p-kv-arena", flags) : fd;
}

static int
create_file(size_t nbytes) {
    int fd = open_memory_file();
    if (fd < 0) {
        return -1;
    }
    if (ftruncate(fd, (off_t)nbytes) != 0 ||
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        int error = errno;
        close(fd);
        errno = error;
        return -1;
    }
    return fd;
}

static arena_status_t
map_file(arena_t* arena, int fd, size_t nbytes) {
    void* address = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (address == MAP_FAILED) {
        return ARENA_ERRNO;
    }
    memset(arena, 0, sizeof *arena);
    arena->address = address;
    arena->nbytes = nbytes;
    arena->fd = -1;
    arena->owner = getpid();
    snprintf(arena->huge_pages, PIN_REPORT_BYTES, "off");
    snprintf(arena->page_lock, PIN_REPORT_BYTES, "off");
    snprintf(arena->cuda_register, PIN_REPORT_BYTES, "off");
    pthread_mutex_init(&arena->prefault_lock, NULL);
    condition_init(&arena->prefault_changed);
    return ARENA_OK;
}

arena_status_t
arena_create(arena_t* arena, size_t nbytes, arena_options_t options) {
    int fd = create_file(nbytes);
    if (fd < 0) {
        return ARENA_ERRNO;
    }
    arena_status_t status = map_file(arena, fd, nbytes);
    if (status != ARENA_OK) {
        int error = errno;
        close(fd);
        errno = error;
        return status;
    }
    arena->fd = fd;
    if (options.huge_pages) {
        pin_huge_pages(arena->address, nbytes, arena->huge_pages);
    }
    if (options.page_lock) {
        pin_page_lock(arena->address, nbytes, arena->page_lock);
    }
    if (options.cuda_register) {
        arena->cuda_unregister = pin_cuda_register(arena->address, nbytes, arena->cuda_register);
    }
    return ARENA_OK;
}

arena_status_t
arena_attach(arena_t* arena, int fd, size_t nbytes) {
    struct stat status;
    if (fstat(fd, &status) != 0) {
        return ARENA_ERRNO;
    }
    if (status.st_size < 0 || (size_t)status.st_size < nbytes) {
        return ARENA_TOO_SMALL;
    }
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
        return ARENA_UNSEALED;
    }
    /* The reserved huge pages of a system may run out, and then a write ends in SIGBUS. */
    struct statfs system;
    if (fstatfs(fd, &system) != 0 || system.f_type != TMPFS_MAGIC) {
        return ARENA_HUGE_PAGES;
    }
    arena_status_t mapped = map_file(arena, fd, nbytes);
    if (mapped == ARENA_OK) {
        (void)madvise(arena->address, nbytes, MADV_DONTFORK);
    }
    return mapped;
}

/* ---- prefault ---- */

/* For kernels without MADV_POPULATE_WRITE. The atomic leaves alone what others write meanwhile. */
static void
touch_pages(char* address, size_t nbytes) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (size_t offset = 0; offset < nbytes; offset += page) {
        __atomic_fetch_or(&address[offset], 0, __ATOMIC_RELAXED);
    }
}

/* Touches one slice. Returns false if its pages cannot be had now. */
static bool
prefault_slice(arena_t* arena, size_t target) {
    size_t start = atomic_load(&arena->touched);
    size_t nbytes = target - start < PREFAULT_SLICE_BYTES ? target - start : PREFAULT_SLICE_BYTES;
    int error = madvise(arena->address + start, nbytes, MADV_POPULATE_WRITE) != 0 ? errno : 0;
    /* EINVAL: the kernel does not know the advice. After any other error the page cannot be had,
     * and to touch it would end the process with SIGBUS. */
    if (error == EINVAL) {
        touch_pages(arena->address + start, nbytes);
        error = 0;
    }
    atomic_store(&arena->prefault_error, error);
    if (error == 0) {
        atomic_store(&arena->touched, start + nbytes);
    }
    return error == 0;
}

/* Waits until there is work, or after a failure for a pause. Returns false when it is time to
 * stop. */
static bool
prefault_wait(arena_t* arena, bool has_failed, size_t* target) {
    struct timespec pause = deadline_after(PREFAULT_PAUSE_SECONDS);
    pthread_mutex_lock(&arena->prefault_lock);
    while (!arena->is_stopping && has_failed) {
        has_failed = pthread_cond_timedwait(&arena->prefault_changed, &arena->prefault_lock,
                                            &pause) != ETIMEDOUT;
    }
    while (!arena->is_stopping &&
           atomic_load(&arena->prefault_target) <= atomic_load(&arena->touched)) {
        pthread_cond_wait(&arena->prefault_changed, &arena->prefault_lock);
    }
    *target = atomic_load(&arena->prefault_target);
    bool is_stopping = arena->is_stopping;
    pthread_mutex_unlock(&arena->prefault_lock);
    return !is_stopping;
}

static void*
prefault_main(void* argument) {
    arena_t* arena = argument;
    thread_prepare("p2p-prefault");
    size_t target = 0;
    for (bool has_failed = false; prefault_wait(arena, has_failed, &target);) {
        has_failed = !prefault_slice(arena, target);
    }
    return NULL;
}

static bool
is_ours(const arena_t* arena) {
    return arena->owner == getpid();
}

int
arena_prefault(arena_t* arena, size_t upto) {
    if (!is_ours(arena)) {
        return 0;
    }
    int error = 0;
    upto = upto < arena->nbytes ? upto : arena->nbytes;
    pthread_mutex_lock(&arena->prefault_lock);
    if (upto > atomic_load(&arena->prefault_target)) {
        atomic_store(&arena->prefault_target, upto);
        if (!arena->prefault_thread.is_started) {
            error = thread_start(&arena->prefault_thread, prefault_main, arena);
        }
        pthread_cond_signal(&arena->prefault_changed);
    }
    pthread_mutex_unlock(&arena->prefault_lock);
    return error;
}

static void
prefault_stop(arena_t* arena) {
    pthread_mutex_lock(&arena->prefault_lock);
    arena->is_stopping = true;
    pthread_cond_signal(&arena->prefault_changed);
    pthread_mutex_unlock(&arena->prefault_lock);
    thread_join(&arena->prefault_thread);
}

void
arena_destroy(arena_t* arena) {
    /* In a forked child the copied condition still counts the parent's thread as waiting, and to
     * destroy it would wait for that. */
    if (is_ours(arena)) {
        prefault_stop(arena);
        pthread_cond_destroy(&arena->prefault_changed);
        pthread_mutex_destroy(&arena->prefault_lock);
        if (arena->cuda_unregister != NULL) {
            arena->cuda_unregister(arena->address);
        }
    }
    /* A forked child has no mapping of a peer's file. Something else may lie there. */
    bool is_attached = arena->fd < 0;
    if (is_ours(arena) || !is_attached) {
        munmap(arena->address, arena->nbytes);
    }
    if (!is_attached) {
        close(arena->fd);
    }
}

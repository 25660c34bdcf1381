/* Host memory that other processes can map: an anonymous memory file, mapped shared.
 *
 * Nothing has a name that could leak after a crash, and only a process that was handed the
 * descriptor can map it. The file is sealed, so that a peer's access can never end in SIGBUS
 * because somebody shrank it. Pages are taken from the system when they are first touched, or by
 * the prefault thread ahead of need. */
#ifndef P2P_ARENA_H
#define P2P_ARENA_H

#include "pin.h"
#include "thread.h"

#include <stdatomic.h>
#include <stdint.h>

typedef struct {
    char* address;
    size_t nbytes;
    int fd;      /* -1: it was attached, and no descriptor is kept */
    pid_t owner; /* the process that made or attached it: a forked child has the mapping at most */
    pin_unregister_t cuda_unregister;
    char huge_pages[PIN_REPORT_BYTES];
    char page_lock[PIN_REPORT_BYTES];
    char cuda_register[PIN_REPORT_BYTES];

    thread_t prefault_thread;
    pthread_mutex_t prefault_lock; /* guards prefault_thread and is_stopping */
    pthread_cond_t prefault_changed;
    bool is_stopping;
    atomic_size_t prefault_target;
    atomic_size_t touched;     /* all pages below were touched here */
    atomic_int prefault_error; /* an errno: why the next page cannot be had now; 0: it can */
} arena_t;

typedef struct {
    bool huge_pages;
    bool page_lock;     /* lock pages in memory as they are touched */
    bool cuda_register; /* touches every page */
} arena_options_t;

typedef enum {
    ARENA_OK,
    ARENA_ERRNO,      /* see errno */
    ARENA_TOO_SMALL,  /* the file does not hold nbytes */
    ARENA_UNSEALED,   /* the file could be shrunk under us */
    ARENA_HUGE_PAGES, /* the file is of reserved huge pages, or not in memory */
} arena_status_t;

/* Both fill *arena only on ARENA_OK. Attach keeps no descriptor, and a forked child inherits
 * nothing of an attached file: a child that lives on would keep a peer's memory. */
arena_status_t arena_create(arena_t* arena, size_t nbytes, arena_options_t options);
arena_status_t arena_attach(arena_t* arena, int fd, size_t nbytes);

/* Lets a background thread touch the pages of [0, upto). Never goes back. If the system has no
 * page, the thread tries again each second. Returns 0 or an errno. In a forked child, which has no
 * such thread, it does nothing. */
int arena_prefault(arena_t* arena, size_t upto);

/* Stops the prefault thread (within one slice), unmaps, closes. A forked child only unmaps and
 * closes what it has: the thread, its lock and CUDA's registration are the parent's. */
void arena_destroy(arena_t* arena);

#endif

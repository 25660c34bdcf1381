/* A double for one host's GPUs: the small part of the driver's ABI, of NVRTC's and of NCCL's that
 * the engine uses, over host memory. Streams are threads, device memory is memory files, a
 * communicator is a Unix socket. Built by the test run, never shipped.
 *
 * What it keeps of the real ones, because deadlocks and races come from it: order within a stream;
 * sends and receives that block until the other side runs, without any buffering; communicators
 * whose operations are serialised whatever their streams, and whose kernels are launched some time
 * after the call, the first ones when both ranks have called; a bounded number of kernels that can
 * be resident on a device; calls that wait for the whole device; an abort that leaves garbage
 * behind and waits for the peer's.
 *
 * Hardware queues are off unless a test sets their number: streams of one device and priority then
 * take them in turn, and a command holds the head of its queue until it starts. All engines of a
 * process that use one device share them; real instances have a process each. */
#ifndef DOUBLE_H
#define DOUBLE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { MAX_DEVICES = 16 };

/* What a test sets, per process, and what it counts; see double_set and double_get. */
typedef enum {
    /* set by a test */
    NUM_DEVICES,  /* how many there are */
    KERNEL_SLOTS, /* communication kernels that are resident on a device at once */
    NCCL_VERSION, /* what ncclGetVersion says and peers compare */
    INIT_HANGS,   /* communicators stay in progress */
    INIT_FAILS,   /* the result that initialisation ends with, 0: success */
    ASYNC_ERROR,  /* what ncclCommGetAsyncError says from now on, 0: nothing */
    SEND_HANGS,   /* no send completes once so many have, until it grows; 0: all do */
    LAUNCH_HANGS, /* calls that move bytes stay in progress, their kernels are not launched */
    ABORT_HANGS,  /* aborts do not return while it is set */
    IS_NETWORK,   /* communicators run over a network: dead peers are noticed, aborts are local */
    MALLOC_FAILS, /* cuMemAlloc has no memory */
    COPIES_HANG,  /* copies into registered host memory wait while it is set */
    IPC_FAILS,    /* handles of other processes cannot be opened */
    EXPORT_FAILS, /* the result of making a handle, 0: success */
    DRIVER_FAILS, /* the result of cuInit, 0: success */
    IPC_HANGS,    /* they are not opened yet */
    COPY_MILLISECONDS,     /* that a copy into another process's memory takes */
    REGISTER_HANGS,        /* host memory is not registered yet */
    REGISTER_MICROSECONDS, /* for each MiB that is registered, during which all other calls wait */
    REGISTER_LIMIT_BYTES,  /* that one call may register, 0: any number */
    REGISTER_TOTAL_BYTES,  /* that may be registered at a time, 0: any number */
    IS_CAPTURING, /* another thread captures a graph: unsafe calls fail, unless theirs is relaxed */
    TOTAL_BYTES,  /* of each device */
    TAKEN_PERCENT,     /* of them, by others: vLLM takes 92 before we start */
    MULTIPROCESSORS,   /* of each device */
    HARDWARE_QUEUES,   /* for the streams of a device and priority made from now on, 0: no limit */
    PEERS_APART,       /* no device reaches the memory of another one */
    INIT_MILLISECONDS, /* that it takes to initialise a communicator */
    CAPABILITY,        /* of each device, such as 90 */
    COMPILER_FAILS,    /* NVRTC compiles nothing */
    KERNEL_FAILS,      /* the result of launching a kernel that was compiled, 0: success */
    MPS_ENABLED,       /* this process is a client of MPS */
    COPY_FAILS,        /* the result of a copy, 0: success */
    LOST_WRITES,       /* what is written to another process's or device's memory is lost: */
    LOST_ABOVE_BYTES,  /* copies of more bytes only, not what kernels write, */
    LOST_AFTER,        /* and only after so many copies */
    STICKY_ERROR, /* of each call while it is set, as after a kernel's fault; nothing is copied */
    /* counted */
    LONGEST_LOCK_MILLISECONDS, /* for which one call kept all others waiting */
    REGISTERED_BYTES,          /* of host memory */
    CONTEXTS,                  /* a bit for each device that this process has made a context on */
    LIVE_COMMS,
    LIVE_ALLOCATIONS,
    LIVE_IMPORTS, /* opened handles */
    LIVE_STREAMS,
    HELD_STREAMS, /* whose next command is behind another stream's in their queue, now */
    LIVE_EVENTS,
    LIVE_HOST_REGISTRATIONS,
    LIVE_MODULES,
    KERNELS,            /* of modules, that have run */
    PEER_COPIES,        /* into another process's or device's memory, while some are lost */
    HANGING_COPIES,     /* now */
    LIVE_REGISTRATIONS, /* of memory with communicators */
    LEFT_REGISTRATIONS, /* that the end of a communicator has undone */
    LATE_WRITES,        /* of a network card, after the kernel's end, before the abort returned */
    FREED_PROXY_USES,   /* ends that undid registrations which a network card had used */
    RACING_CALLS,       /* deregistrations while another call of the communicator runs */
    MIXED_MEMORY,       /* operations on other memory than what is registered */
    MIXED_SIDES, /* transfers of which one side's memory is registered, and the other's is not */
    OPEN_ROOTS,  /* unique ids whose peer has not come */
    UNIQUE_IDS,
    ABORTS,
    DOUBLE_ABORTS,     /* of one communicator */
    WRONG_THREADS,     /* operations on a communicator from another thread than made it */
    SIZE_MISMATCHES,   /* a send met a receive of another size */
    SENT_OPERATIONS,   /* sends that completed */
    EAGER_OPERATIONS,  /* sends of one byte that completed */
    MOST_KERNELS,      /* resident at once on a device */
    PEER_CHANNELS,     /* of the last communicator: that its two ranks use */
    RESIDENT_KERNELS,  /* now, on all devices */
    STAGED_COPIES,     /* between devices that may not reach each other: they go by the host */
    DEVICE_WAITS,      /* calls that wait for the whole device while a kernel runs */
    BAD_CONFIGURATION, /* configurations that the library would not accept */
    NUM_VALUES,
} value_t;

extern atomic_llong double_values[NUM_VALUES];

/* One lock and one condition for all state: clarity before speed. */
extern pthread_mutex_t double_lock;
extern pthread_cond_t double_changed;

typedef struct context context_t;
typedef struct stream stream_t;
typedef struct event event_t;
typedef struct operation operation_t;

struct operation {
    /* Whether it starts now, with the lock held; asked again when something changes. NULL: yes */
    bool (*start)(operation_t* self);
    void (*run)(operation_t* self); /* on the stream's thread, without the lock */
    operation_t* next;              /* in its stream */
    operation_t* next_queued;       /* in its hardware queue */
};

/* NULL is the device's default stream. Takes the operation over. */
void stream_enqueue(stream_t* stream, operation_t* operation);
/* Those of a library, which makes no context; NULL: there is no thread for it. */
stream_t* stream_new(int device, int priority);
void stream_close(stream_t* stream); /* once its work is done */
event_t* event_new(int device);
void event_close(event_t* event);
void stream_record(stream_t* stream, event_t* event);
void stream_wait(stream_t* stream, event_t* event);
int current_device(void);
int device_of(stream_t* stream);
void wait_for_device(int device); /* as the calls of the real ones that do: for all streams */
size_t device_bytes_at(const void* address);
void add_device_bytes(int device, long long nbytes);
bool take_device_bytes(int device, long long nbytes); /* false if so much is not free */
int failure_of(value_t call); /* what it returns instead of working; 0: it works */
void sleep_milliseconds(long long milliseconds);

/* Waits, at most a few milliseconds, for something to change; with the lock held. */
void wait_briefly(void);

#endif

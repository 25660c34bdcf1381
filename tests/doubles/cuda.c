/* The double of the driver, libcuda.so.1: contexts, streams, events and memory; kernels.c has the
 * rest. Its functions have the names by which NVIDIA's bindings ask for them. */
#include "driver.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { HANDLE_MAGIC = 0x43554950 };
enum {
    MULTIPROCESSOR_COUNT = 16,
    CAPABILITY_MAJOR = 75,
    CAPABILITY_MINOR = 76,
    SHARED_BY_MPS = 133
};
enum { PRIORITIES = 6, MAX_QUEUES = 32, MAX_CONTEXTS = 16 };

/* The primary context of a device. */
struct context {
    int device;
};

struct event {
    int device;
    unsigned references;
    uint64_t recorded;
    uint64_t completed;
};

/* Commands that have not started, in the order of the calls. */
typedef struct {
    operation_t* head;
    operation_t* tail;
} queue_t;

struct stream {
    int device;
    queue_t* queue; /* NULL: its own */
    operation_t* head;
    operation_t* tail;
    bool is_busy;
    bool is_held;
    bool is_closing;
};

/* Device memory, an opened handle or a registered range. */
typedef struct range {
    char* address;
    size_t nbytes;
    int descriptor;
    int device;
    atomic_llong* count;
    struct range* next;
} range_t;

typedef struct {
    uint32_t magic;
    int32_t pid;
    int32_t descriptor;
    int32_t device;
    uint64_t inode;
    uint64_t nbytes;
    char padding[32];
} ipc_handle_t;
_Static_assert(sizeof(ipc_handle_t) == 64, "as large as the real one");

atomic_llong double_values[NUM_VALUES] = {
    [NUM_DEVICES] = 1,         [KERNEL_SLOTS] = 32,     [NCCL_VERSION] = 22809,
    [TOTAL_BYTES] = 8LL << 30, [MULTIPROCESSORS] = 132, [CAPABILITY] = 90,
};
pthread_mutex_t double_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t double_changed = PTHREAD_COND_INITIALIZER;

static pthread_mutex_t driver_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER; /* taken last */
static atomic_bool is_initialised;
static context_t contexts[MAX_DEVICES];
static _Thread_local context_t* current[MAX_CONTEXTS]; /* the last one is the current one */
static _Thread_local int num_current;
static _Thread_local int capture_mode; /* global, until it is exchanged */
static stream_t* default_streams[MAX_DEVICES];
static bool peer_access[MAX_DEVICES][MAX_DEVICES]; /* under the lock */
static range_t* ranges;
static atomic_llong used_bytes[MAX_DEVICES];
static int num_busy[MAX_DEVICES];                           /* streams with work; under the lock */
static queue_t queues[MAX_DEVICES][PRIORITIES][MAX_QUEUES]; /* under the lock */
static atomic_uint num_queued[MAX_DEVICES][PRIORITIES];     /* streams that were given one */

/* ---- the test's side ---- */

static const char* const NAMES[NUM_VALUES] = {
    [NUM_DEVICES] = "num_devices",
    [KERNEL_SLOTS] = "kernel_slots",
    [NCCL_VERSION] = "nccl_version",
    [INIT_HANGS] = "init_hangs",
    [INIT_FAILS] = "init_fails",
    [ASYNC_ERROR] = "async_error",
    [SEND_HANGS] = "send_hangs",
    [LAUNCH_HANGS] = "launch_hangs",
    [ABORT_HANGS] = "abort_hangs",
    [IS_NETWORK] = "is_network",
    [MALLOC_FAILS] = "malloc_fails",
    [COPIES_HANG] = "copies_hang",
    [IPC_FAILS] = "ipc_fails",
    [EXPORT_FAILS] = "export_fails",
    [DRIVER_FAILS] = "driver_fails",
    [IPC_HANGS] = "ipc_hangs",
    [COPY_MILLISECONDS] = "copy_milliseconds",
    [REGISTER_HANGS] = "register_hangs",
    [REGISTER_MICROSECONDS] = "register_microseconds",
    [REGISTER_LIMIT_BYTES] = "register_limit_bytes",
    [REGISTER_TOTAL_BYTES] = "register_total_bytes",
    [LONGEST_LOCK_MILLISECONDS] = "longest_lock_milliseconds",
    [REGISTERED_BYTES] = "registered_bytes",
    [IS_CAPTURING] = "is_capturing",
    [TOTAL_BYTES] = "total_bytes",
    [TAKEN_PERCENT] = "taken_percent",
    [MULTIPROCESSORS] = "multiprocessors",
    [HARDWARE_QUEUES] = "hardware_queues",
    [PEERS_APART] = "peers_apart",
    [INIT_MILLISECONDS] = "init_milliseconds",
    [CAPABILITY] = "capability",
    [COMPILER_FAILS] = "compiler_fails",
    [KERNEL_FAILS] = "kernel_fails",
    [MPS_ENABLED] = "mps_enabled",
    [COPY_FAILS] = "copy_fails",
    [LOST_WRITES] = "lost_writes",
    [LOST_ABOVE_BYTES] = "lost_above_bytes",
    [LOST_AFTER] = "lost_after",
    [STICKY_ERROR] = "sticky_error",
    [CONTEXTS] = "contexts",
    [LIVE_COMMS] = "live_comms",
    [LIVE_ALLOCATIONS] = "live_allocations",
    [LIVE_IMPORTS] = "live_imports",
    [LIVE_STREAMS] = "live_streams",
    [HELD_STREAMS] = "held_streams",
    [LIVE_EVENTS] = "live_events",
    [LIVE_HOST_REGISTRATIONS] = "live_host_registrations",
    [LIVE_MODULES] = "live_modules",
    [KERNELS] = "kernels",
    [PEER_COPIES] = "peer_copies",
    [HANGING_COPIES] = "hanging_copies",
    [LIVE_REGISTRATIONS] = "live_registrations",
    [LEFT_REGISTRATIONS] = "left_registrations",
    [LATE_WRITES] = "late_writes",
    [FREED_PROXY_USES] = "freed_proxy_uses",
    [RACING_CALLS] = "racing_calls",
    [MIXED_MEMORY] = "mixed_memory",
    [MIXED_SIDES] = "mixed_sides",
    [OPEN_ROOTS] = "open_roots",
    [UNIQUE_IDS] = "unique_ids",
    [ABORTS] = "aborts",
    [DOUBLE_ABORTS] = "double_aborts",
    [WRONG_THREADS] = "wrong_threads",
    [SIZE_MISMATCHES] = "size_mismatches",
    [SENT_OPERATIONS] = "sent_operations",
    [EAGER_OPERATIONS] = "eager_operations",
    [MOST_KERNELS] = "most_kernels",
    [RESIDENT_KERNELS] = "resident_kernels",
    [PEER_CHANNELS] = "peer_channels",
    [STAGED_COPIES] = "staged_copies",
    [DEVICE_WAITS] = "device_waits",
    [BAD_CONFIGURATION] = "bad_configuration",
};

static int
index_of(const char* name) {
    for (int i = 0; i < NUM_VALUES; i++) {
        if (strcmp(NAMES[i], name) == 0) {
            return i;
        }
    }
    return -1;
}

int
double_set(const char* name, long long value) {
    int index = index_of(name);
    if (index < 0) {
        return -1;
    }
    atomic_store(&double_values[index], value);
    pthread_mutex_lock(&double_lock);
    pthread_cond_broadcast(&double_changed);
    pthread_mutex_unlock(&double_lock);
    return 0;
}

long long
double_get(const char* name) {
    int index = index_of(name);
    return index < 0 ? -1 : atomic_load(&double_values[index]);
}

void
sleep_milliseconds(long long milliseconds) {
    struct timespec rest = {milliseconds / 1000, milliseconds % 1000 * 1000000};
    nanosleep(&rest, NULL);
}

/* Dies as a process with work on a GPU does: the kernel closes its sockets first, and CUDA's
 * descriptors after `milliseconds`; the copies that it has submitted go on until then. Only Unix
 * sockets are closed: others would tell the threads that still run here. */
void
double_die(int milliseconds) {
    for (int descriptor = 3; descriptor < 1024; descriptor++) {
        struct sockaddr_storage address;
        socklen_t length = sizeof address;
        if (getsockname(descriptor, (struct sockaddr*)&address, &length) == 0 &&
            address.ss_family == AF_UNIX) {
            close(descriptor);
        }
    }
    sleep_milliseconds(milliseconds);
    kill(getpid(), SIGKILL);
}

/* ---- shared ---- */

/* As NCCL sees it, which asks the runtime: a thread that has named no device is on device 0. */
int
current_device(void) {
    return num_current > 0 ? current[num_current - 1]->device : 0;
}

int
device_of(stream_t* stream) {
    return stream != NULL ? stream->device : current_device();
}

/* Every call but those for devices needs a context that the thread has made current: no call makes
 * one by itself. Others may be at a call that keeps everybody waiting. */
int
enter(void) {
    if (!atomic_load(&is_initialised)) {
        return NOT_INITIALIZED;
    }
    pthread_mutex_lock(&driver_lock);
    pthread_mutex_unlock(&driver_lock);
    return num_current > 0 ? SUCCESS : INVALID_CONTEXT;
}

void
add_device_bytes(int device, long long nbytes) {
    atomic_fetch_add(&used_bytes[device], nbytes);
}

static long long
free_device_bytes(int device) {
    long long total = atomic_load(&double_values[TOTAL_BYTES]);
    long long taken = total / 100 * atomic_load(&double_values[TAKEN_PERCENT]);
    long long left = total - taken - atomic_load(&used_bytes[device]);
    return left > 0 ? left : 0;
}

bool
take_device_bytes(int device, long long nbytes) {
    pthread_mutex_lock(&memory_lock);
    bool fits = nbytes <= free_device_bytes(device);
    if (fits) {
        add_device_bytes(device, nbytes);
    }
    pthread_mutex_unlock(&memory_lock);
    return fits;
}

void
wait_briefly(void) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 2000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_nsec -= 1000000000;
        until.tv_sec += 1;
    }
    pthread_cond_timedwait(&double_changed, &double_lock, &until);
}

int
failure_of(value_t call) {
    long long sticky = atomic_load(&double_values[STICKY_ERROR]);
    return (int)(sticky != 0 ? sticky : atomic_load(&double_values[call]));
}

/* ---- streams ---- */

static void
hold(stream_t* stream, bool is_held) { /* with the lock held */
    atomic_fetch_add(&double_values[HELD_STREAMS], (int)is_held - (int)stream->is_held);
    stream->is_held = is_held;
}

/* Starts the first command of a stream: only at the head of its queue, which it leaves then. What
 * comes before it in the stream has ended. */
static bool
start_next(stream_t* stream) { /* with the lock held */
    operation_t* operation = stream->head;
    queue_t* queue = stream->queue;
    hold(stream, queue != NULL && queue->head != operation);
    if (stream->is_held || (operation->start != NULL && !operation->start(operation))) {
        return false;
    }
    if (queue != NULL) {
        queue->head = operation->next_queued;
        queue->tail = queue->head != NULL ? queue->tail : NULL;
        pthread_cond_broadcast(&double_changed);
    }
    stream->head = operation->next;
    stream->tail = stream->head != NULL ? stream->tail : NULL;
    return true;
}

static void*
stream_main(void* argument) {
    stream_t* stream = argument;
    pthread_setname_np(pthread_self(), "double-stream");
    pthread_mutex_lock(&double_lock);
    while (true) {
        operation_t* operation = stream->head;
        if (operation == NULL && stream->is_closing) {
            break;
        }
        if (operation == NULL || !start_next(stream)) {
            pthread_cond_wait(&double_changed, &double_lock);
            continue;
        }
        pthread_mutex_unlock(&double_lock);
        operation->run(operation);
        free(operation);
        pthread_mutex_lock(&double_lock);
        if (stream->head == NULL) {
            stream->is_busy = false;
            num_busy[stream->device]--;
        }
        pthread_cond_broadcast(&double_changed);
    }
    atomic_fetch_sub(&double_values[LIVE_STREAMS], 1);
    pthread_mutex_unlock(&double_lock);
    free(stream);
    return NULL;
}

static queue_t*
queue_for(int device, int priority) {
    long long count = atomic_load(&double_values[HARDWARE_QUEUES]);
    if (count <= 0) {
        return NULL;
    }
    int level = priority > 0 ? 0 : priority <= -PRIORITIES ? PRIORITIES - 1 : -priority;
    unsigned number = atomic_fetch_add(&num_queued[device][level], 1);
    return &queues[device][level][number % (count < MAX_QUEUES ? count : MAX_QUEUES)];
}

stream_t*
stream_new(int device, int priority) {
    stream_t* stream = calloc(1, sizeof *stream);
    stream->device = device;
    stream->queue = queue_for(device, priority);
    pthread_t thread;
    if (pthread_create(&thread, NULL, stream_main, stream) != 0) {
        free(stream);
        return NULL;
    }
    pthread_detach(thread);
    atomic_fetch_add(&double_values[LIVE_STREAMS], 1);
    return stream;
}

static stream_t*
resolve(stream_t* stream) { /* with the lock held */
    if (stream != NULL) {
        return stream;
    }
    stream_t** standard = &default_streams[current_device()];
    if (*standard == NULL) {
        *standard = stream_new(current_device(), 0);
    }
    return *standard;
}

void
stream_enqueue(stream_t* stream, operation_t* operation) {
    pthread_mutex_lock(&double_lock);
    stream = resolve(stream);
    operation->next = operation->next_queued = NULL;
    *(stream->tail != NULL ? &stream->tail->next : &stream->head) = operation;
    stream->tail = operation;
    queue_t* queue = stream->queue;
    if (queue != NULL) {
        *(queue->tail != NULL ? &queue->tail->next_queued : &queue->head) = operation;
        queue->tail = operation;
    }
    if (!stream->is_busy) {
        stream->is_busy = true;
        num_busy[stream->device]++;
    }
    pthread_cond_broadcast(&double_changed);
    pthread_mutex_unlock(&double_lock);
}

/* Whether a thread may not make a call that could disturb the capture of another one. */
static bool
is_prohibited(void) {
    return atomic_load(&double_values[IS_CAPTURING]) && capture_mode == 0;
}

/* As the real ones do: waits for all that runs on the device. */
void
wait_for_device(int device) {
    pthread_mutex_lock(&double_lock);
    if (num_busy[device] > 0) {
        atomic_fetch_add(&double_values[DEVICE_WAITS], 1);
    }
    while (num_busy[device] > 0) {
        pthread_cond_wait(&double_changed, &double_lock);
    }
    pthread_mutex_unlock(&double_lock);
}

int
cuCtxGetStreamPriorityRange(int* least, int* most) {
    ENTER();
    *least = 0;
    *most = -5;
    return SUCCESS;
}

int
cuStreamCreateWithPriority(stream_t** stream, unsigned flags, int priority) {
    ENTER();
    (void)flags;
    *stream = stream_new(current_device(), priority);
    return *stream != NULL ? SUCCESS : OUT_OF_MEMORY;
}

void
stream_close(stream_t* stream) {
    pthread_mutex_lock(&double_lock);
    stream->is_closing = true;
    pthread_cond_broadcast(&double_changed);
    pthread_mutex_unlock(&double_lock);
}

int
cuStreamDestroy(stream_t* stream) {
    ENTER();
    stream_close(stream);
    return SUCCESS;
}

int
cuStreamSynchronize(stream_t* stream) {
    ENTER();
    pthread_mutex_lock(&double_lock);
    stream = resolve(stream);
    while (stream->is_busy) {
        pthread_cond_wait(&double_changed, &double_lock);
    }
    pthread_mutex_unlock(&double_lock);
    return SUCCESS;
}

/* ---- events ---- */

typedef struct {
    operation_t base;
    event_t* event;
    uint64_t generation;
} event_operation_t;

static void
event_release(event_t* event) { /* with the lock held */
    if (--event->references == 0) {
        atomic_fetch_sub(&double_values[LIVE_EVENTS], 1);
        free(event);
    }
}

static void
run_record(operation_t* base) {
    event_operation_t* self = (event_operation_t*)base;
    pthread_mutex_lock(&double_lock);
    if (self->event->completed < self->generation) { /* else it has been recorded again since */
        self->event->completed = self->generation;
    }
    event_release(self->event);
    pthread_cond_broadcast(&double_changed);
    pthread_mutex_unlock(&double_lock);
}

static bool
has_been_reached(operation_t* base) { /* with the lock held */
    event_operation_t* self = (event_operation_t*)base;
    return self->event->completed >= self->generation;
}

static void
run_wait(operation_t* base) {
    event_close(((event_operation_t*)base)->event);
}

static event_operation_t*
event_operation(event_t* event, bool is_record) {
    event_operation_t* operation = calloc(1, sizeof *operation);
    operation->event = event;
    pthread_mutex_lock(&double_lock);
    event->references++;
    event->recorded += is_record ? 1 : 0;
    operation->generation = event->recorded;
    pthread_mutex_unlock(&double_lock);
    return operation;
}

void
stream_record(stream_t* stream, event_t* event) {
    event_operation_t* operation = event_operation(event, true);
    operation->base.run = run_record;
    stream_enqueue(stream, &operation->base);
}

void
stream_wait(stream_t* stream, event_t* event) {
    event_operation_t* operation = event_operation(event, false);
    operation->base.start = has_been_reached;
    operation->base.run = run_wait;
    stream_enqueue(stream, &operation->base);
}

event_t*
event_new(int device) {
    event_t* event = calloc(1, sizeof *event);
    event->device = device;
    event->references = 1;
    atomic_fetch_add(&double_values[LIVE_EVENTS], 1);
    return event;
}

void
event_close(event_t* event) {
    pthread_mutex_lock(&double_lock);
    event_release(event);
    pthread_mutex_unlock(&double_lock);
}

int
cuEventCreate(event_t** event, unsigned flags) {
    ENTER();
    (void)flags;
    *event = event_new(current_device());
    return SUCCESS;
}

int
cuEventDestroy(event_t* event) {
    ENTER();
    event_close(event);
    return SUCCESS;
}

int
cuEventRecord(event_t* event, stream_t* stream) {
    ENTER();
    if (failure_of(STICKY_ERROR) != 0) {
        return failure_of(STICKY_ERROR);
    }
    if (event->device != (stream != NULL ? stream->device : current_device())) {
        return INVALID_HANDLE;
    }
    stream_record(stream, event);
    return SUCCESS;
}

int
cuStreamWaitEvent(stream_t* stream, event_t* event, unsigned flags) {
    ENTER();
    (void)flags;
    stream_wait(stream, event);
    return SUCCESS;
}

int
cuEventQuery(event_t* event) {
    ENTER();
    if (is_prohibited() || failure_of(STICKY_ERROR) != 0) {
        return is_prohibited() ? CAPTURE_UNSUPPORTED : failure_of(STICKY_ERROR);
    }
    pthread_mutex_lock(&double_lock);
    bool is_complete = event->completed >= event->recorded;
    pthread_mutex_unlock(&double_lock);
    return is_complete ? SUCCESS : NOT_READY;
}

/* ---- what streams do ---- */

typedef struct {
    operation_t base;
    char* destination;
    const char* source;
    size_t nbytes;
    int value;
    int device; /* of the stream */
} copy_operation_t;

static range_t*
range_of(const char* address, value_t count) { /* with the lock held */
    for (range_t* range = ranges; range != NULL; range = range->next) {
        if (range->count == &double_values[count] && address >= range->address &&
            address < range->address + range->nbytes) {
            return range;
        }
    }
    return NULL;
}

/* Whether a copy gets lost on the way to another device: the bus leads it elsewhere. */
static bool
is_lost(const copy_operation_t* self) { /* with the lock held */
    range_t* range = range_of(self->destination, LIVE_ALLOCATIONS);
    bool is_to_peer = range_of(self->destination, LIVE_IMPORTS) != NULL ||
                      (range != NULL && range->device != self->device);
    if (!is_to_peer || atomic_load(&double_values[LOST_WRITES]) == 0) {
        return false;
    }
    long long number = atomic_fetch_add(&double_values[PEER_COPIES], 1);
    return number >= atomic_load(&double_values[LOST_AFTER]) &&
           (long long)self->nbytes > atomic_load(&double_values[LOST_ABOVE_BYTES]);
}

static void
run_copy(operation_t* base) {
    copy_operation_t* self = (copy_operation_t*)base;
    pthread_mutex_lock(&double_lock);
    bool is_gone = is_lost(self);
    bool is_to_host = range_of(self->destination, LIVE_HOST_REGISTRATIONS) != NULL;
    bool is_to_other = range_of(self->destination, LIVE_IMPORTS) != NULL;
    if (atomic_load(&double_values[COPIES_HANG]) && is_to_host) {
        atomic_fetch_add(&double_values[HANGING_COPIES], 1);
        while (atomic_load(&double_values[COPIES_HANG])) {
            wait_briefly();
        }
        atomic_fetch_sub(&double_values[HANGING_COPIES], 1);
    }
    pthread_mutex_unlock(&double_lock);
    if (is_to_other) {
        sleep_milliseconds(atomic_load(&double_values[COPY_MILLISECONDS]));
    }
    if (failure_of(STICKY_ERROR) == 0 && !is_gone) {
        memcpy(self->destination, self->source, self->nbytes);
    }
}

static void
run_fill(operation_t* base) {
    copy_operation_t* self = (copy_operation_t*)base;
    memset(self->destination, self->value, self->nbytes);
}

/* Counts copies that need access to another device's memory which was not asked for. */
static void
check_access(const char* address, stream_t* stream) {
    pthread_mutex_lock(&double_lock);
    int device = stream != NULL ? stream->device : current_device();
    range_t* range = range_of(address, LIVE_ALLOCATIONS);
    if (range != NULL && range->device != device && !peer_access[device][range->device]) {
        atomic_fetch_add(&double_values[STAGED_COPIES], 1);
    }
    pthread_mutex_unlock(&double_lock);
}

/* Whether memory begins in a registered range and ends outside of it. */
static bool
crosses_registration(const char* address, size_t nbytes) {
    pthread_mutex_lock(&double_lock);
    range_t* range = range_of(address, LIVE_HOST_REGISTRATIONS);
    bool crosses = range != NULL && address + nbytes > range->address + range->nbytes;
    pthread_mutex_unlock(&double_lock);
    return crosses;
}

int
cuMemcpyAsync(void* destination, const void* source, size_t nbytes, stream_t* stream) {
    ENTER();
    if (failure_of(COPY_FAILS) != 0) {
        return failure_of(COPY_FAILS);
    }
    if (crosses_registration(destination, nbytes) || crosses_registration(source, nbytes)) {
        return INVALID_VALUE;
    }
    check_access(destination, stream);
    check_access(source, stream);
    copy_operation_t* operation = calloc(1, sizeof *operation);
    operation->base.run = run_copy;
    operation->destination = destination;
    operation->source = source;
    operation->nbytes = nbytes;
    operation->device = stream != NULL ? stream->device : current_device();
    stream_enqueue(stream, &operation->base);
    return SUCCESS;
}

/* Makes the default stream of device 0, which stays, and whose thread has its name by then. */
void
double_start(void) {
    pthread_mutex_lock(&double_lock);
    stream_t* stream = resolve(NULL);
    pthread_mutex_unlock(&double_lock);
    copy_operation_t* nothing = calloc(1, sizeof *nothing);
    nothing->base.run = run_copy;
    stream_enqueue(stream, &nothing->base);
    wait_for_device(0);
}

int
cuMemsetD8Async(void* destination, unsigned char value, size_t nbytes, stream_t* stream) {
    ENTER();
    copy_operation_t* operation = calloc(1, sizeof *operation);
    operation->base.run = run_fill;
    operation->destination = destination;
    operation->value = value;
    operation->nbytes = nbytes;
    stream_enqueue(stream, &operation->base);
    return SUCCESS;
}

typedef struct {
    operation_t base;
    void (*function)(void*);
    void* argument;
} host_operation_t;

static void
run_host(operation_t* base) {
    host_operation_t* self = (host_operation_t*)base;
    self->function(self->argument);
}

int
cuLaunchHostFunc(stream_t* stream, void (*function)(void*), void* argument) {
    ENTER();
    host_operation_t* operation = calloc(1, sizeof *operation);
    operation->base.run = run_host;
    operation->function = function;
    operation->argument = argument;
    stream_enqueue(stream, &operation->base);
    return SUCCESS;
}

/* ---- memory ---- */

static range_t*
find_range(const void* address, const atomic_llong* count) { /* with the lock held */
    for (range_t* range = ranges; range != NULL; range = range->next) {
        if (range->address == address && range->count == count) {
            return range;
        }
    }
    return NULL;
}

static void
keep_range(char* address, size_t nbytes, int descriptor, value_t count) {
    range_t* range = calloc(1, sizeof *range);
    *range = (range_t){address, nbytes, descriptor, current_device(), &double_values[count], NULL};
    pthread_mutex_lock(&double_lock);
    range->next = ranges;
    ranges = range;
    pthread_mutex_unlock(&double_lock);
    atomic_fetch_add(range->count, 1);
}

static bool
drop_range(const void* address, value_t count, range_t* out) {
    pthread_mutex_lock(&double_lock);
    range_t* found = find_range(address, &double_values[count]);
    if (found != NULL) {
        range_t** link = &ranges;
        while (*link != found) {
            link = &(*link)->next;
        }
        *link = found->next;
        *out = *found;
        free(found);
        atomic_fetch_sub(&double_values[count], 1);
    }
    pthread_mutex_unlock(&double_lock);
    return found != NULL;
}

int
cuMemAlloc(void** address, size_t nbytes) {
    ENTER();
    if (is_prohibited()) {
        return CAPTURE_UNSUPPORTED;
    }
    if (failure_of(MALLOC_FAILS) != 0 || !take_device_bytes(current_device(), (long long)nbytes)) {
        return OUT_OF_MEMORY;
    }
    int descriptor = memfd_create("double-device", MFD_CLOEXEC);
    if (descriptor < 0 || ftruncate(descriptor, (off_t)nbytes) != 0) {
        add_device_bytes(current_device(), -(long long)nbytes);
        return OUT_OF_MEMORY;
    }
    *address = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (*address == MAP_FAILED) {
        close(descriptor);
        add_device_bytes(current_device(), -(long long)nbytes);
        return OUT_OF_MEMORY;
    }
    keep_range(*address, nbytes, descriptor, LIVE_ALLOCATIONS);
    return SUCCESS;
}

int
cuMemFree(void* address) {
    ENTER();
    if (is_prohibited()) {
        return CAPTURE_UNSUPPORTED;
    }
    wait_for_device(current_device());
    range_t range;
    if (!drop_range(address, LIVE_ALLOCATIONS, &range)) {
        return INVALID_VALUE;
    }
    munmap(range.address, range.nbytes);
    close(range.descriptor);
    add_device_bytes(range.device, -(long long)range.nbytes);
    return SUCCESS;
}

int
cuMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
    ENTER();
    if (failure_of(STICKY_ERROR) != 0) {
        return failure_of(STICKY_ERROR);
    }
    *total_bytes = (size_t)atomic_load(&double_values[TOTAL_BYTES]);
    *free_bytes = (size_t)free_device_bytes(current_device());
    return SUCCESS;
}

/* As the real driver: page after page is locked, and calls of all processes wait. */
static void
lock_driver(long long nbytes) {
    long long each = atomic_load(&double_values[REGISTER_MICROSECONDS]);
    long long milliseconds = each * (nbytes >> 20) / 1000;
    pthread_mutex_lock(&driver_lock);
    sleep_milliseconds(milliseconds);
    pthread_mutex_unlock(&driver_lock);
    if (milliseconds > atomic_load(&double_values[LONGEST_LOCK_MILLISECONDS])) {
        atomic_store(&double_values[LONGEST_LOCK_MILLISECONDS], milliseconds);
    }
}

int
cuMemHostRegister(void* address, size_t nbytes, unsigned flags) {
    ENTER();
    (void)flags;
    if (is_prohibited()) {
        return CAPTURE_UNSUPPORTED;
    }
    wait_for_device(current_device());
    pthread_mutex_lock(&double_lock);
    while (atomic_load(&double_values[REGISTER_HANGS])) {
        wait_briefly();
    }
    bool is_known = find_range(address, &double_values[LIVE_HOST_REGISTRATIONS]) != NULL;
    pthread_mutex_unlock(&double_lock);
    if (is_known) {
        return ALREADY_REGISTERED;
    }
    long long limit = atomic_load(&double_values[REGISTER_LIMIT_BYTES]);
    long long total = atomic_load(&double_values[REGISTER_TOTAL_BYTES]);
    long long after = atomic_load(&double_values[REGISTERED_BYTES]) + (long long)nbytes;
    if ((limit != 0 && (long long)nbytes > limit) || (total != 0 && after > total)) {
        return OUT_OF_MEMORY;
    }
    lock_driver((long long)nbytes);
    atomic_fetch_add(&double_values[REGISTERED_BYTES], (long long)nbytes);
    keep_range(address, nbytes, -1, LIVE_HOST_REGISTRATIONS);
    return SUCCESS;
}

int
cuMemHostUnregister(void* address) {
    ENTER();
    wait_for_device(current_device());
    range_t range;
    if (!drop_range(address, LIVE_HOST_REGISTRATIONS, &range)) {
        return NOT_REGISTERED;
    }
    atomic_fetch_sub(&double_values[REGISTERED_BYTES], (long long)range.nbytes);
    return SUCCESS;
}

/* ---- memory of other processes ---- */

/* Returns the size of the device memory, ours or opened, that begins at an address; 0 if none does.
 */
size_t
device_bytes_at(const void* address) {
    pthread_mutex_lock(&double_lock);
    range_t* range = find_range(address, &double_values[LIVE_IMPORTS]);
    if (range == NULL) {
        range = find_range(address, &double_values[LIVE_ALLOCATIONS]);
    }
    size_t nbytes = range != NULL ? range->nbytes : 0;
    pthread_mutex_unlock(&double_lock);
    return nbytes;
}

int
cuIpcGetMemHandle(void* out, void* address) {
    ENTER();
    if (failure_of(EXPORT_FAILS) != 0) {
        return failure_of(EXPORT_FAILS);
    }
    ipc_handle_t handle = {.magic = HANDLE_MAGIC, .pid = getpid()};
    struct stat status;
    pthread_mutex_lock(&double_lock);
    range_t* range = find_range(address, &double_values[LIVE_ALLOCATIONS]);
    if (range != NULL) {
        handle.descriptor = range->descriptor;
        handle.device = range->device;
        handle.nbytes = range->nbytes;
    }
    pthread_mutex_unlock(&double_lock);
    if (range == NULL || fstat(handle.descriptor, &status) != 0) {
        return INVALID_VALUE;
    }
    handle.inode = status.st_ino;
    memcpy(out, &handle, sizeof handle);
    return SUCCESS;
}

typedef struct {
    char bytes[64];
} opaque_handle_t;

int
cuIpcOpenMemHandle(void** address, opaque_handle_t opaque, unsigned flags) {
    ENTER();
    (void)flags;
    ipc_handle_t handle;
    memcpy(&handle, &opaque, sizeof handle);
    if (handle.magic != HANDLE_MAGIC || atomic_load(&double_values[IPC_FAILS])) {
        return INVALID_HANDLE;
    }
    pthread_mutex_lock(&double_lock);
    while (atomic_load(&double_values[IPC_HANGS])) {
        wait_briefly();
    }
    pthread_mutex_unlock(&double_lock);
    if (handle.pid == getpid()) {
        return INVALID_CONTEXT; /* not in the process that exported it */
    }
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.descriptor);
    int descriptor = open(path, O_RDWR | O_CLOEXEC);
    struct stat status;
    if (descriptor < 0) {
        return INVALID_HANDLE;
    }
    bool is_same = fstat(descriptor, &status) == 0 && status.st_ino == handle.inode;
    /* Kernels write by themselves: what they write stays with us, where all of it is lost. */
    bool is_cut_off = atomic_load(&double_values[LOST_WRITES]) != 0 &&
                      atomic_load(&double_values[LOST_ABOVE_BYTES]) == 0 &&
                      atomic_load(&double_values[LOST_AFTER]) == 0;
    int flags_of_map = is_cut_off ? MAP_PRIVATE : MAP_SHARED;
    void* mapped =
        is_same ? mmap(NULL, handle.nbytes, PROT_READ | PROT_WRITE, flags_of_map, descriptor, 0)
                : MAP_FAILED;
    close(descriptor);
    if (mapped == MAP_FAILED) {
        return INVALID_HANDLE;
    }
    keep_range(mapped, handle.nbytes, -1, LIVE_IMPORTS);
    *address = mapped;
    return SUCCESS;
}

int
cuIpcCloseMemHandle(void* address) {
    ENTER();
    range_t range;
    if (!drop_range(address, LIVE_IMPORTS, &range)) {
        return INVALID_VALUE;
    }
    munmap(range.address, range.nbytes);
    return SUCCESS;
}

int
cuMemGetAddressRange(const void** start, size_t* nbytes, const void* address) {
    ENTER();
    *start = address;
    *nbytes = device_bytes_at(address);
    return *nbytes != 0 ? SUCCESS : NOT_FOUND;
}

/* ---- devices and contexts ---- */

int
cuInit(unsigned flags) {
    (void)flags;
    int failure = (int)atomic_load(&double_values[DRIVER_FAILS]);
    if (failure == SUCCESS) {
        atomic_store(&is_initialised, true);
    }
    return failure;
}

int
cuDriverGetVersion(int* version) {
    *version = 13000;
    return SUCCESS;
}

int
cuDeviceGetCount(int* count) {
    *count = (int)atomic_load(&double_values[NUM_DEVICES]);
    return atomic_load(&is_initialised) ? SUCCESS : NOT_INITIALIZED;
}

int
cuDeviceGet(int* out, int device) {
    if (device < 0 || device >= atomic_load(&double_values[NUM_DEVICES]) || device >= MAX_DEVICES) {
        return INVALID_DEVICE;
    }
    *out = device;
    return SUCCESS;
}

int
cuDeviceGetAttribute(int* value, int attribute, int device) {
    (void)device;
    int capability = (int)atomic_load(&double_values[CAPABILITY]);
    switch (attribute) {
    case MULTIPROCESSOR_COUNT:
        *value = (int)atomic_load(&double_values[MULTIPROCESSORS]);
        return SUCCESS;
    case SHARED_BY_MPS:
        *value = (int)atomic_load(&double_values[MPS_ENABLED]);
        return SUCCESS;
    case CAPABILITY_MAJOR:
        *value = capability / 10;
        return SUCCESS;
    case CAPABILITY_MINOR:
        *value = capability % 10;
        return SUCCESS;
    default:
        return INVALID_VALUE;
    }
}

/* Makes the context if there is none, which takes half a gigabyte of a real device. */
int
cuDevicePrimaryCtxRetain(context_t** out, int device) {
    if (!atomic_load(&is_initialised)) {
        return NOT_INITIALIZED;
    }
    contexts[device].device = device;
    atomic_fetch_or(&double_values[CONTEXTS], 1LL << device);
    *out = &contexts[device];
    return SUCCESS;
}

int
cuCtxSetCurrent(context_t* context) {
    num_current = num_current > 0 ? num_current : 1;
    current[num_current - 1] = context;
    atomic_fetch_or(&double_values[CONTEXTS], 1LL << context->device);
    return SUCCESS;
}

int
cuCtxPushCurrent(context_t* context) {
    if (num_current == MAX_CONTEXTS) {
        return INVALID_VALUE;
    }
    current[num_current++] = context;
    atomic_fetch_or(&double_values[CONTEXTS], 1LL << context->device);
    return SUCCESS;
}

int
cuCtxPopCurrent(context_t** out) {
    ENTER();
    *out = current[--num_current];
    return SUCCESS;
}

int
cuCtxGetDevice(int* device) {
    ENTER();
    *device = current_device();
    return SUCCESS;
}

int
cuDeviceCanAccessPeer(int* can, int device, int peer) {
    *can = device != peer && !atomic_load(&double_values[PEERS_APART]);
    return SUCCESS;
}

int
cuCtxEnablePeerAccess(context_t* peer, unsigned flags) {
    ENTER();
    int device = current_device();
    if (flags != 0 || peer->device == device || atomic_load(&double_values[PEERS_APART])) {
        return INVALID_DEVICE;
    }
    pthread_mutex_lock(&double_lock);
    bool was_enabled = peer_access[device][peer->device];
    peer_access[device][peer->device] = true;
    pthread_mutex_unlock(&double_lock);
    return was_enabled ? PEER_ACCESS_ALREADY_ENABLED : SUCCESS;
}

int
cuThreadExchangeStreamCaptureMode(int* mode) {
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return SUCCESS;
}

/* ---- what a caller is told ---- */

int
cuGetErrorString(int code, const char** text) {
    switch (code) {
    case SUCCESS:
        *text = "no error";
        break;
    case INVALID_VALUE:
        *text = "invalid argument";
        break;
    case OUT_OF_MEMORY:
        *text = "out of memory";
        break;
    case NOT_INITIALIZED:
        *text = "initialization error";
        break;
    case INVALID_CONTEXT:
        *text = "invalid device context";
        break;
    case NO_BINARY_FOR_GPU:
        *text = "no kernel image is available for execution on the device";
        break;
    case INVALID_HANDLE:
        *text = "invalid resource handle";
        break;
    case NOT_FOUND:
        *text = "named symbol not found";
        break;
    default:
        *text = "an error of the double";
    }
    return SUCCESS;
}

/* How NVIDIA's bindings find every other function; those that the double lacks, they call not
 * found. */
int
cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags, int* status) {
    (void)version, (void)flags;
    void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    *function = driver != NULL ? dlsym(driver, name) : NULL;
    if (status != NULL) {
        *status = *function != NULL ? 0 : 1;
    }
    return *function != NULL ? SUCCESS : NOT_FOUND;
}

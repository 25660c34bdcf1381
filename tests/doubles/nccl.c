#include "double.h"

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

typedef enum {
    SUCCESS = 0,
    UNHANDLED_CUDA_ERROR = 1,
    SYSTEM_ERROR = 2,
    INVALID_ARGUMENT = 4,
    INVALID_USAGE = 5,
    REMOTE_ERROR = 6,
    IN_PROGRESS = 7,
} result_t;

enum { UNDEFINED = INT32_MIN, NAME_BYTES = 48 };
enum { CLEAR_TO_SEND = 1, POLL_MILLISECONDS = 2, MAX_GROUPED = 64 };
static const long long MIB = 1 << 20;
static const int KIND_BYTES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

typedef struct {
    char bytes[128];
} unique_id_t;

/* The fields up to those of 2.28. */
typedef struct {
    size_t size;
    unsigned magic;
    unsigned version;
    int blocking;
    int cga_cluster_size;
    int min_ctas;
    int max_ctas;
    const char* net_name;
    int split_share;
    int traffic_class;
    const char* comm_name;
    int collnet_enable;
    int cta_policy;
    int shrink_share;
    int nvls_ctas;
    int channels_per_net_peer;
    int nvlink_centric_sched;
} config_t;
_Static_assert(offsetof(config_t, channels_per_net_peer) == 72, "as in nccl.h");

typedef struct {
    int32_t rank;
    int32_t version;
} greeting_t;

typedef struct {
    uint64_t kind;
    uint64_t nbytes;
    uint64_t is_registered;
} header_t;

typedef struct registration {
    char* address;
    size_t nbytes;
    bool is_used; /* a network card knows it */
    struct registration* next;
} registration_t;

/* What the other side's network card may write until the communicator has ended. */
typedef struct late_write {
    char* address;
    size_t nbytes;
    struct late_write* next;
} late_write_t;

/* Never freed: a handle that is used again after its end is noticed instead of followed. */
typedef struct comm {
    int rank;
    int num_ranks;
    int device;
    int channels;
    int socket;
    int listener;
    int wake;
    char peer[NAME_BYTES];
    pthread_t issuer;
    atomic_int state;
    atomic_int async_error;
    atomic_bool is_aborted;
    bool has_ended;
    stream_t* own[2]; /* NULL without hardware queues; nothing is ever put into the second one */
    event_t* before;
    event_t* behind;
    bool is_initialising; /* these under the lock */
    bool is_made;
    bool is_launching;
    bool is_connected;
    uint64_t next_ticket;
    uint64_t serving;
    bool has_sent;
    bool has_received;
    long long bytes;
    registration_t* registrations;
    late_write_t* late_writes;
} comm_t;

typedef struct root {
    char name[NAME_BYTES];
    int listener;
    struct root* next;
} root_t;

typedef struct {
    operation_t base;
    comm_t* comm;
    char* buffer;
    size_t nbytes;
    uint64_t ticket;
    bool is_send;
    bool is_registered;
    bool is_direct; /* a network card reaches its memory */
    bool has_started;
} transfer_t;

typedef struct {
    operation_t base;
    char* destination;
    const char* source;
    size_t nbytes;
} local_copy_t;

static root_t* roots;
static int num_resident[MAX_DEVICES];
static _Thread_local int group_depth;
static _Thread_local int num_grouped;
static _Thread_local struct {
    transfer_t* transfer;
    stream_t* stream;
} grouped[MAX_GROUPED];

/* ---- sockets that an abort interrupts ---- */

static bool
wait_until_ready(comm_t* comm, short events) {
    struct pollfd descriptors[] = {{comm->socket, events, 0}, {comm->wake, POLLIN, 0}};
    while (!atomic_load(&comm->is_aborted)) {
        poll(descriptors, 2, POLL_MILLISECONDS);
        if (descriptors[0].revents != 0) {
            return true;
        }
    }
    return false;
}

/* As a kernel whose peer does not answer: for ever, or until it is aborted. */
static void
spin_until_aborted(comm_t* comm) {
    pthread_mutex_lock(&double_lock);
    while (!atomic_load(&comm->is_aborted)) {
        wait_briefly();
    }
    pthread_mutex_unlock(&double_lock);
}

static void
peer_is_gone(comm_t* comm) {
    if (atomic_load(&double_values[IS_NETWORK])) {
        atomic_store(&comm->async_error, REMOTE_ERROR);
    }
    spin_until_aborted(comm);
}

static bool
read_all(comm_t* comm, void* buffer, size_t nbytes) {
    for (size_t done = 0; done < nbytes;) {
        if (!wait_until_ready(comm, POLLIN)) {
            return false;
        }
        ssize_t count = recv(comm->socket, (char*)buffer + done, nbytes - done, MSG_DONTWAIT);
        if (count > 0) {
            done += (size_t)count;
        } else if (count == 0 || (errno != EAGAIN && errno != EINTR)) {
            peer_is_gone(comm);
            return false;
        }
    }
    return true;
}

static bool
write_all(comm_t* comm, const void* buffer, size_t nbytes) {
    for (size_t done = 0; done < nbytes;) {
        if (!wait_until_ready(comm, POLLOUT)) {
            return false;
        }
        ssize_t count = send(comm->socket, (const char*)buffer + done, nbytes - done,
                             MSG_DONTWAIT | MSG_NOSIGNAL);
        if (count > 0) {
            done += (size_t)count;
        } else if (errno != EAGAIN && errno != EINTR) {
            peer_is_gone(comm);
            return false;
        }
    }
    return true;
}

/* ---- making a communicator ---- */

static void
set_address(struct sockaddr_un* address, socklen_t* length, const char* name) {
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    memcpy(address->sun_path + 1, name, strlen(name));
    *length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + strlen(name));
}

result_t
ncclGetUniqueId(unique_id_t* id) {
    uint64_t noise;
    root_t* root = calloc(1, sizeof *root);
    if (getrandom(&noise, sizeof noise, 0) != sizeof noise) {
        return SYSTEM_ERROR;
    }
    snprintf(root->name, sizeof root->name, "nccl-double-%d-%016llx", getpid(),
             (unsigned long long)noise);
    struct sockaddr_un address;
    socklen_t length;
    set_address(&address, &length, root->name);
    root->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(root->listener, (struct sockaddr*)&address, length) != 0 ||
        listen(root->listener, 4) != 0) {
        return SYSTEM_ERROR;
    }
    memset(id, 0, sizeof *id);
    memcpy(id->bytes, root->name, sizeof root->name);
    pthread_mutex_lock(&double_lock);
    root->next = roots;
    roots = root;
    pthread_mutex_unlock(&double_lock);
    atomic_fetch_add(&double_values[UNIQUE_IDS], 1);
    atomic_fetch_add(&double_values[OPEN_ROOTS], 1);
    return SUCCESS;
}

static int
take_root(const char* name) {
    int listener = -1;
    pthread_mutex_lock(&double_lock);
    for (root_t** link = &roots; *link != NULL; link = &(*link)->next) {
        if (strcmp((*link)->name, name) == 0) {
            root_t* found = *link;
            listener = found->listener;
            *link = found->next;
            free(found);
            break;
        }
    }
    pthread_mutex_unlock(&double_lock);
    return listener;
}

static bool
meet_peer(comm_t* comm) {
    if (comm->rank == 0) {
        comm->socket = comm->listener;
        bool has_come = wait_until_ready(comm, POLLIN);
        comm->socket = has_come ? accept4(comm->listener, NULL, NULL, SOCK_CLOEXEC) : -1;
        close(comm->listener);
        /* Of the real one, a root that nobody comes to keeps thread and descriptor for ever, and
         * nobody can end it: here it is counted, so that who looks for leaks finds his own. */
        atomic_fetch_sub(&double_values[OPEN_ROOTS], has_come ? 1 : 0);
        return comm->socket >= 0;
    }
    struct sockaddr_un address;
    socklen_t length;
    set_address(&address, &length, comm->peer);
    comm->socket = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    return connect(comm->socket, (struct sockaddr*)&address, length) == 0;
}

static result_t
initialise(comm_t* comm) {
    if (atomic_load(&double_values[INIT_HANGS])) {
        spin_until_aborted(comm);
        return SYSTEM_ERROR;
    }
    sleep_milliseconds(atomic_load(&double_values[INIT_MILLISECONDS]));
    result_t failure = (result_t)atomic_load(&double_values[INIT_FAILS]);
    if (failure != SUCCESS || comm->num_ranks == 1) {
        return failure;
    }
    greeting_t ours = {comm->rank, (int32_t)atomic_load(&double_values[NCCL_VERSION])};
    greeting_t theirs;
    if (!meet_peer(comm) || !write_all(comm, &ours, sizeof ours) ||
        !read_all(comm, &theirs, sizeof theirs)) {
        return SYSTEM_ERROR;
    }
    if (ours.version != theirs.version || ours.rank == theirs.rank) {
        return INVALID_USAGE;
    }
    long long needed = (4 + 6LL * comm->channels) * MIB;
    if (!take_device_bytes(comm->device, needed)) {
        return UNHANDLED_CUDA_ERROR;
    }
    comm->bytes = needed;
    return SUCCESS;
}

static void*
initialise_main(void* argument) {
    comm_t* comm = argument;
    pthread_setname_np(pthread_self(), "double-init");
    result_t result = initialise(comm);
    pthread_mutex_lock(&double_lock);
    atomic_store(&comm->state, (int)result);
    comm->is_made = result == SUCCESS;
    comm->is_initialising = false;
    pthread_cond_broadcast(&double_changed);
    pthread_mutex_unlock(&double_lock);
    return NULL;
}

static bool
is_power_of_two(int number) {
    return number > 0 && (number & (number - 1)) == 0;
}

static bool
read_config(comm_t* comm, const config_t* config, bool* is_blocking) {
    comm->channels = 16;
    *is_blocking = true;
    if (config == NULL) {
        return true;
    }
    if (config->size < sizeof *config || config->magic != 0xcafebeef) {
        return false;
    }
    *is_blocking = config->blocking != 0;
    if (config->max_ctas != UNDEFINED) {
        comm->channels = config->max_ctas;
    }
    /* Between hosts, two for each network card unless it is told otherwise. */
    int per_peer = config->channels_per_net_peer;
    int used = per_peer == UNDEFINED ? 2 : per_peer;
    bool is_limited = atomic_load(&double_values[IS_NETWORK]) && used < comm->channels;
    atomic_store(&double_values[PEER_CHANNELS], is_limited ? used : comm->channels);
    bool is_range = config->min_ctas == UNDEFINED || config->min_ctas <= comm->channels;
    return is_range && is_power_of_two(comm->channels) && comm->channels <= 64;
}

/* Its streams are of normal priority, whatever those are in which it is told to launch. */
static void
make_streams(comm_t* comm) {
    if (atomic_load(&double_values[HARDWARE_QUEUES]) > 0) {
        comm->own[0] = stream_new(comm->device, 0);
        comm->own[1] = stream_new(comm->device, 0);
        comm->before = event_new(comm->device);
        comm->behind = event_new(comm->device);
    }
}

static void
close_streams(comm_t* comm) {
    if (comm->own[0] != NULL) {
        stream_close(comm->own[0]);
        stream_close(comm->own[1]);
        event_close(comm->before);
        event_close(comm->behind);
    }
}

result_t
ncclCommInitRankConfig(comm_t** out, int num_ranks, unique_id_t id, int rank,
                       const config_t* config) {
    bool is_blocking;
    comm_t* comm = calloc(1, sizeof *comm);
    comm->rank = rank;
    comm->num_ranks = num_ranks;
    comm->device = current_device();
    comm->socket = comm->listener = -1;
    comm->issuer = pthread_self();
    if (num_ranks < 1 || num_ranks > 2 || !read_config(comm, config, &is_blocking)) {
        atomic_fetch_add(&double_values[BAD_CONFIGURATION], 1);
        free(comm);
        return INVALID_ARGUMENT;
    }
    memcpy(comm->peer, id.bytes, sizeof comm->peer - 1);
    comm->listener = rank == 0 && num_ranks == 2 ? take_root(comm->peer) : -1;
    if (rank == 0 && num_ranks == 2 && comm->listener < 0) {
        free(comm);
        return INVALID_ARGUMENT; /* of the real ones, the root may be any process */
    }
    comm->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    make_streams(comm);
    atomic_fetch_add(&double_values[LIVE_COMMS], 1);
    atomic_store(&comm->state, IN_PROGRESS);
    comm->is_initialising = true;
    *out = comm;
    pthread_t thread;
    pthread_create(&thread, NULL, initialise_main, comm);
    pthread_detach(thread);
    pthread_mutex_lock(&double_lock);
    while (is_blocking && comm->is_initialising) {
        pthread_cond_wait(&double_changed, &double_lock);
    }
    pthread_mutex_unlock(&double_lock);
    return is_blocking ? (result_t)atomic_load(&comm->state) : IN_PROGRESS;
}

result_t
ncclCommGetAsyncError(comm_t* comm, result_t* error) {
    int injected = (int)atomic_load(&double_values[ASYNC_ERROR]);
    int state = atomic_load(&comm->state);
    int async_error = atomic_load(&comm->async_error);
    *error = (result_t)(state != SUCCESS ? state : async_error != 0 ? async_error : injected);
    return SUCCESS;
}

/* ---- ending a communicator ---- */

static void
wait_for_peers_end(comm_t* comm) {
    char scratch[4096];
    shutdown(comm->socket, SHUT_WR);
    while (!atomic_load(&double_values[IS_NETWORK])) {
        struct pollfd descriptor = {comm->socket, POLLIN, 0};
        poll(&descriptor, 1, POLL_MILLISECONDS);
        ssize_t count = recv(comm->socket, scratch, sizeof scratch, MSG_DONTWAIT);
        if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR)) {
            break;
        }
    }
}

/* With registered memory, the card writes straight into it, whatever becomes of the kernel: until
 * its connection is closed, which an abort does last. */
static void
write_late(comm_t* comm) { /* with the lock held */
    while (comm->late_writes != NULL) {
        late_write_t* late = comm->late_writes;
        comm->late_writes = late->next;
        memset(late->address, 0xEE, late->nbytes);
        atomic_fetch_add(&double_values[LATE_WRITES], 1);
        free(late);
    }
}

static result_t
end(comm_t* comm, bool is_abort) {
    pthread_mutex_lock(&double_lock);
    if (comm->has_ended) {
        atomic_fetch_add(&double_values[DOUBLE_ABORTS], 1);
        pthread_mutex_unlock(&double_lock);
        return INVALID_ARGUMENT;
    }
    comm->has_ended = true;
    if (is_abort) {
        atomic_fetch_add(&double_values[ABORTS], 1);
        atomic_store(&comm->is_aborted, true);
        eventfd_write(comm->wake, 1);
    }
    pthread_cond_broadcast(&double_changed);
    while (comm->is_initialising || comm->is_launching || comm->serving < comm->next_ticket ||
           (is_abort && atomic_load(&double_values[ABORT_HANGS]))) {
        pthread_cond_wait(&double_changed, &double_lock);
    }
    write_late(comm);
    while (comm->registrations != NULL) {
        registration_t* left = comm->registrations;
        comm->registrations = left->next;
        /* The real one frees the proxy first, and then asks it to undo these. */
        atomic_fetch_add(&double_values[FREED_PROXY_USES], left->is_used ? 1 : 0);
        free(left);
        atomic_fetch_sub(&double_values[LIVE_REGISTRATIONS], 1);
        atomic_fetch_add(&double_values[LEFT_REGISTRATIONS], 1);
    }
    pthread_mutex_unlock(&double_lock);
    if (comm->socket >= 0) {
        if (comm->is_made) {
            wait_for_peers_end(comm);
        }
        close(comm->socket);
    }
    close(comm->wake);
    close_streams(comm);
    add_device_bytes(comm->device, -comm->bytes);
    atomic_fetch_sub(&double_values[LIVE_COMMS], 1);
    return SUCCESS;
}

result_t
ncclCommAbort(comm_t* comm) {
    return end(comm, true);
}

result_t
ncclCommDestroy(comm_t* comm) {
    return end(comm, false);
}

result_t
ncclCommFinalize(comm_t* comm) {
    (void)comm;
    return SUCCESS;
}

/* ---- moving bytes ---- */

/* All operations of a communicator run in order, whatever their streams; then for room on the
 * device, where a kernel that waits for its peer keeps others out. An aborted one does nothing. */
static bool
start_kernel(operation_t* base) { /* with the lock held */
    transfer_t* self = (transfer_t*)base;
    comm_t* comm = self->comm;
    if (atomic_load(&comm->is_aborted)) {
        return true;
    }
    if (comm->serving != self->ticket ||
        num_resident[comm->device] >= atomic_load(&double_values[KERNEL_SLOTS])) {
        return false;
    }
    self->has_started = true;
    int count = ++num_resident[comm->device];
    atomic_fetch_add(&double_values[RESIDENT_KERNELS], 1);
    if (count > atomic_load(&double_values[MOST_KERNELS])) {
        atomic_store(&double_values[MOST_KERNELS], count);
    }
    bool* is_first = self->is_send ? &comm->has_sent : &comm->has_received;
    long long more = *is_first ? 0 : (self->is_send ? 2 : 10) * comm->channels * MIB;
    *is_first = true;
    comm->bytes += more;
    add_device_bytes(comm->device, more);
    return true;
}

/* Returns whether one more send may complete; false if the communicator was aborted before. */
static bool
wait_for_turn(comm_t* comm) {
    pthread_mutex_lock(&double_lock);
    while (!atomic_load(&comm->is_aborted) && atomic_load(&double_values[SENT_OPERATIONS]) >=
                                                  atomic_load(&double_values[SEND_HANGS])) {
        wait_briefly();
    }
    pthread_mutex_unlock(&double_lock);
    return !atomic_load(&comm->is_aborted);
}

static bool
send_now(transfer_t* self) {
    comm_t* comm = self->comm;
    header_t header;
    if (atomic_load(&double_values[SEND_HANGS]) != 0 && !wait_for_turn(comm)) {
        return false;
    }
    if (!read_all(comm, &header, sizeof header)) {
        return false;
    }
    if (header.kind != CLEAR_TO_SEND || header.nbytes != self->nbytes) {
        atomic_fetch_add(&double_values[SIZE_MISMATCHES], 1);
        spin_until_aborted(comm);
        return false;
    }
    if ((header.is_registered != 0) != self->is_registered) {
        atomic_fetch_add(&double_values[MIXED_SIDES], 1); /* they cut a piece differently */
    }
    return write_all(comm, self->buffer, self->nbytes);
}

static bool
receive_now(transfer_t* self) {
    header_t header = {CLEAR_TO_SEND, self->nbytes, self->is_registered};
    return write_all(self->comm, &header, sizeof header) &&
           read_all(self->comm, self->buffer, self->nbytes);
}

/* Returns the registration that holds memory of a communicator, or NULL; with the lock held. */
static registration_t*
find_registration(comm_t* comm, const char* buffer, size_t nbytes) {
    for (registration_t* item = comm->registrations; item != NULL; item = item->next) {
        if (buffer >= item->address && buffer + nbytes <= item->address + item->nbytes) {
            return item;
        }
    }
    return NULL;
}

/* Between hosts: tells the network card of registered memory, before the kernel starts. */
static bool
tell_card(transfer_t* self) {
    pthread_mutex_lock(&double_lock);
    registration_t* found = find_registration(self->comm, self->buffer, self->nbytes);
    self->is_registered = found != NULL;
    bool is_used = found != NULL && atomic_load(&double_values[IS_NETWORK]) != 0;
    if (is_used) {
        found->is_used = true;
    }
    pthread_mutex_unlock(&double_lock);
    return is_used;
}

static void
expect_late_write(transfer_t* self) {
    late_write_t* late = calloc(1, sizeof *late);
    pthread_mutex_lock(&double_lock);
    *late = (late_write_t){self->buffer, self->nbytes, self->comm->late_writes};
    self->comm->late_writes = late;
    pthread_mutex_unlock(&double_lock);
}

/* An aborted kernel stores nothing more, and counts all the same: on one host, the peer's kernel
 * then ends as if all had come (genericOp and postPeer in prims_simple.h). */
static void
post_without_data(transfer_t* self) {
    char garbage[4096];
    memset(garbage, 0xEE, sizeof garbage);
    for (size_t done = 0; done < self->nbytes;) {
        struct pollfd descriptor = {self->comm->socket, POLLOUT, 0};
        size_t rest = self->nbytes - done;
        ssize_t count = 0;
        if (poll(&descriptor, 1, POLL_MILLISECONDS) == 1) {
            count = send(self->comm->socket, garbage, rest < sizeof garbage ? rest : sizeof garbage,
                         MSG_DONTWAIT | MSG_NOSIGNAL);
        }
        if (count <= 0) {
            return; /* nobody receives */
        }
        done += (size_t)count;
    }
}

static void
run_transfer(operation_t* base) {
    transfer_t* self = (transfer_t*)base;
    comm_t* comm = self->comm;
    bool has_started = self->has_started;
    bool has_moved = has_started && (self->is_send ? send_now(self) : receive_now(self));
    if (self->is_direct && has_started && !has_moved && !self->is_send) {
        expect_late_write(self);
    }
    if (has_started && !has_moved && self->is_send && !atomic_load(&double_values[IS_NETWORK])) {
        post_without_data(self);
    }
    if (has_moved && self->is_send) {
        atomic_fetch_add(&double_values[SENT_OPERATIONS], 1);
        atomic_fetch_add(&double_values[EAGER_OPERATIONS], self->nbytes == 1 ? 1 : 0);
    }
    pthread_mutex_lock(&double_lock);
    num_resident[comm->device] -= has_started ? 1 : 0;
    atomic_fetch_sub(&double_values[RESIDENT_KERNELS], has_started ? 1 : 0);
    comm->serving++;
    pthread_cond_broadcast(&double_changed);
    pthread_mutex_unlock(&double_lock);
}

static void
run_local_copy(operation_t* base) {
    local_copy_t* self = (local_copy_t*)base;
    memcpy(self->destination, self->source, self->nbytes);
}

/* The kernel waits for the communicator's own stream, which then waits for the kernel, as in
 * strongstream.cc: where streams share queues, others wait with them. */
static void
launch(transfer_t* transfer, stream_t* stream) {
    comm_t* comm = transfer->comm;
    transfer->is_direct = tell_card(transfer);
    pthread_mutex_lock(&double_lock);
    transfer->ticket = comm->next_ticket++;
    pthread_mutex_unlock(&double_lock);
    if (comm->own[0] != NULL) {
        stream_record(comm->own[0], comm->before);
        stream_wait(stream, comm->before);
    }
    stream_enqueue(stream, &transfer->base);
    if (comm->own[0] != NULL) {
        stream_record(stream, comm->behind);
        stream_wait(comm->own[0], comm->behind);
    }
}

/* Both ranks come here before their first kernel is launched; so does the real one. */
static bool
connect_ranks(comm_t* comm) {
    char byte = 0;
    bool is_done = comm->is_connected || (write_all(comm, &byte, 1) && read_all(comm, &byte, 1));
    comm->is_connected = is_done;
    return is_done;
}

typedef struct {
    transfer_t* transfer;
    stream_t* stream;
} launch_t;

static void*
launch_main(void* argument) {
    launch_t self = *(launch_t*)argument;
    comm_t* comm = self.transfer->comm;
    free(argument);
    pthread_setname_np(pthread_self(), "double-launch");
    pthread_mutex_lock(&double_lock);
    while (atomic_load(&double_values[LAUNCH_HANGS]) && !atomic_load(&comm->is_aborted)) {
        wait_briefly();
    }
    pthread_mutex_unlock(&double_lock);
    bool is_connected = !atomic_load(&comm->is_aborted) && connect_ranks(comm);
    if (is_connected) {
        launch(self.transfer, self.stream);
    } else {
        free(self.transfer);
    }
    pthread_mutex_lock(&double_lock);
    atomic_store(&comm->state, is_connected ? SUCCESS : SYSTEM_ERROR);
    comm->is_launching = false;
    pthread_cond_broadcast(&double_changed);
    pthread_mutex_unlock(&double_lock);
    return NULL;
}

/* Of a communicator that does not block: the kernel comes some time after the call. */
static result_t
launch_later(transfer_t* transfer, stream_t* stream) {
    comm_t* comm = transfer->comm;
    launch_t* self = calloc(1, sizeof *self);
    *self = (launch_t){transfer, stream};
    comm->is_launching = true;
    atomic_store(&comm->state, IN_PROGRESS);
    pthread_t thread;
    pthread_create(&thread, NULL, launch_main, self);
    pthread_detach(thread);
    return IN_PROGRESS;
}

/* Either all that a communicator moves is registered, or nothing. */
static bool
is_mixture(comm_t* comm, const char* buffer, size_t nbytes) {
    pthread_mutex_lock(&double_lock);
    bool is_mixed = comm->registrations != NULL && find_registration(comm, buffer, nbytes) == NULL;
    pthread_mutex_unlock(&double_lock);
    return is_mixed;
}

static result_t
move(comm_t* comm, void* buffer, size_t count, int kind, int peer, stream_t* stream, bool is_send) {
    if (comm->has_ended || atomic_load(&comm->state) != SUCCESS || kind < 0 || kind > 11 ||
        peer < 0 || peer >= comm->num_ranks || (peer == comm->rank && comm->num_ranks > 1)) {
        return INVALID_ARGUMENT;
    }
    if (!pthread_equal(comm->issuer, pthread_self())) {
        atomic_fetch_add(&double_values[WRONG_THREADS], 1);
    }
    transfer_t* transfer = calloc(1, sizeof *transfer);
    transfer->base.start = start_kernel;
    transfer->base.run = run_transfer;
    transfer->comm = comm;
    transfer->buffer = buffer;
    transfer->nbytes = count * (size_t)KIND_BYTES[kind];
    transfer->is_send = is_send;
    if (is_mixture(comm, buffer, transfer->nbytes)) {
        atomic_fetch_add(&double_values[MIXED_MEMORY], 1);
    }
    if (group_depth == 0 && comm->num_ranks > 1) {
        return launch_later(transfer, stream);
    }
    if (group_depth == 0 || num_grouped == MAX_GROUPED) {
        free(transfer);
        return INVALID_USAGE; /* to itself only within a group */
    }
    grouped[num_grouped].transfer = transfer;
    grouped[num_grouped++].stream = stream;
    return SUCCESS;
}

result_t
ncclSend(const void* buffer, size_t count, int kind, int peer, comm_t* comm, stream_t* stream) {
    return move(comm, (void*)(uintptr_t)buffer, count, kind, peer, stream, true);
}

result_t
ncclRecv(void* buffer, size_t count, int kind, int peer, comm_t* comm, stream_t* stream) {
    return move(comm, buffer, count, kind, peer, stream, false);
}

result_t
ncclGroupStart(void) {
    group_depth++;
    return SUCCESS;
}

/* Sends to itself are paired with its receives, in order; others are launched one after the other.
 */
static result_t
launch_grouped(int index) {
    transfer_t* transfer = grouped[index].transfer;
    if (transfer->comm->num_ranks > 1) {
        launch(transfer, grouped[index].stream);
        return SUCCESS;
    }
    for (int other = 0; transfer->is_send && other < num_grouped; other++) {
        transfer_t* receive = grouped[other].transfer;
        if (receive == NULL || receive->is_send || receive->comm != transfer->comm ||
            receive->nbytes != transfer->nbytes) {
            continue;
        }
        local_copy_t* copy = calloc(1, sizeof *copy);
        *copy = (local_copy_t){
            {.run = run_local_copy}, receive->buffer, transfer->buffer, transfer->nbytes};
        stream_enqueue(grouped[other].stream, &copy->base);
        grouped[other].transfer = NULL;
        free(receive);
        free(transfer);
        return SUCCESS;
    }
    return INVALID_USAGE;
}

result_t
ncclGroupEnd(void) {
    if (group_depth == 0) {
        return INVALID_USAGE;
    }
    result_t result = SUCCESS;
    if (--group_depth == 0) {
        for (int i = 0; i < num_grouped; i++) {
            transfer_t* transfer = grouped[i].transfer;
            bool is_later = transfer != NULL && transfer->comm->num_ranks == 1 &&
                            !transfer->is_send; /* its send comes yet, or has taken it */
            if (transfer != NULL && !is_later && launch_grouped(i) != SUCCESS) {
                result = INVALID_USAGE;
            }
        }
        num_grouped = 0;
    }
    return result;
}

/* ---- the rest ---- */

result_t
ncclGetVersion(int* version) {
    *version = (int)atomic_load(&double_values[NCCL_VERSION]);
    return SUCCESS;
}

const char*
ncclGetErrorString(result_t result) {
    static const char* const TEXTS[] = {"no error",       "unhandled cuda error", "system error",
                                        "internal error", "bad argument",         "invalid usage",
                                        "remote process", "in progress"};
    return (unsigned)result <= IN_PROGRESS ? TEXTS[result] : "unknown result code";
}

const char*
ncclGetLastError(comm_t* comm) {
    (void)comm;
    return "";
}

result_t
ncclCommCount(const comm_t* comm, int* count) {
    *count = comm->num_ranks;
    return SUCCESS;
}

result_t
ncclCommUserRank(const comm_t* comm, int* rank) {
    *rank = comm->rank;
    return SUCCESS;
}

result_t
ncclCommCuDevice(const comm_t* comm, int* device) {
    *device = comm->device;
    return SUCCESS;
}

result_t
ncclCommRegister(comm_t* comm, void* buffer, size_t nbytes, void** handle) {
    registration_t* made = calloc(1, sizeof *made);
    pthread_mutex_lock(&double_lock);
    bool has_ended = comm->has_ended;
    if (!has_ended) {
        *made = (registration_t){buffer, nbytes, false, comm->registrations};
        comm->registrations = made;
        atomic_fetch_add(&double_values[LIVE_REGISTRATIONS], 1);
    }
    pthread_mutex_unlock(&double_lock);
    *handle = made;
    return has_ended ? INVALID_ARGUMENT : SUCCESS;
}

result_t
ncclCommDeregister(comm_t* comm, void* handle) {
    pthread_mutex_lock(&double_lock);
    /* The other call may be registering, too, and waits for the same proxy's answers. */
    atomic_fetch_add(&double_values[RACING_CALLS], comm->is_launching ? 1 : 0);
    registration_t** link = comm->has_ended ? NULL : &comm->registrations;
    while (link != NULL && *link != NULL && *link != handle) {
        link = &(*link)->next;
    }
    bool is_known = link != NULL && *link != NULL;
    if (is_known) {
        *link = (*link)->next;
        free(handle);
        atomic_fetch_sub(&double_values[LIVE_REGISTRATIONS], 1);
    }
    pthread_mutex_unlock(&double_lock);
    return is_known ? SUCCESS : INVALID_ARGUMENT;
}

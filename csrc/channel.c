#include "channel.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

channel_t*
channel_create(channel_shared_t* shared, uint64_t id, int fd) {
    channel_t* channel = calloc(1, sizeof *channel);
    if (channel == NULL) {
        return NULL;
    }
    channel->shared = shared;
    channel->id = id;
    channel->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (channel->fd < 0) {
        channel_free(channel);
        return NULL;
    }
    return channel;
}

void
channel_free(channel_t* channel) {
    int error = errno;
    if (channel->fd >= 0) {
        close(channel->fd);
    }
    free(channel);
    errno = error;
}

pump_t
channel_fail(channel_t* channel, const char* error) {
    snprintf(channel->error, sizeof channel->error, "%s", error);
    return PUMP_BROKEN;
}

pump_t
channel_io_result(channel_t* channel, const char* call, ssize_t result) {
    if (result > 0) {
        return PUMP_MOVED;
    }
    if (result == 0) {
        return channel_fail(channel, "the peer closed the connection");
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) {
        return PUMP_WOULD_BLOCK;
    }
    snprintf(channel->error, sizeof channel->error, "%s: %m", call);
    return PUMP_BROKEN;
}

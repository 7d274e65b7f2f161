// Blocking socket with a deadline: the engine's thread waits here while the swarm computes.

#include "link.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static const char REQUEST_MAGIC[4] = {'S', 'W', 'R', 'Q'};
static const char REPLY_MAGIC[4] = {'S', 'W', 'R', 'P'};
enum { REQUEST_HEAD = 32, REPLY_HEAD = 20, MAX_ERROR_TEXT = 4096, SMALL = 256 };
enum {
    REQUEST_LENGTH_AFTER = 8,
    REPLY_LENGTH_AFTER = 8
}; // the length field counts what follows it

#ifndef MSG_NOSIGNAL
#define MSG_NOSIGNAL 0 // macOS: SO_NOSIGPIPE instead
#endif

static struct sockaddr_un address;
static double timeout_s;
static int sock = -1;
static uint64_t sequence;
static char *buffer; // grows to the largest request or reply
static size_t buffer_size;
static char *reason;
static size_t reason_size;

static int fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

static int fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(reason, reason_size, format, arguments);
    va_end(arguments);
    return -1;
}

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void hang_up(void) {
    if (sock >= 0) close(sock);
    sock = -1;
}

static int dial(void) {
    sock = socket(AF_UNIX, SOCK_STREAM, 0);
    if (sock < 0) return fail("no socket: %s", strerror(errno));
    fcntl(sock, F_SETFD, FD_CLOEXEC);
    fcntl(sock, F_SETFL, O_NONBLOCK); // before connect: a full backlog is a failure, not a hang
#ifdef SO_NOSIGPIPE
    int on = 1;
    setsockopt(sock, SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof on);
#endif
    if (connect(sock, (struct sockaddr *)&address, sizeof address)) {
        int error = errno;
        hang_up();
        return fail("the dispatcher does not listen on %s: %s", address.sun_path, strerror(error));
    }
    return 0;
}

// Wait until the socket can be read or written, or the deadline has passed.
static int wait_for(short events, double deadline) {
    for (;;) {
        double left = deadline - now_s();
        if (left <= 0) return fail("no answer within %.1f s", timeout_s);
        struct pollfd p = {.fd = sock, .events = events};
        int wait_ms = left > 60 ? 60000 : (int)(left * 1000) + 1;
        int n = poll(&p, 1, wait_ms);
        if (n > 0) return 0;
        if (n < 0 && errno != EINTR) return fail("poll: %s", strerror(errno));
    }
}

static int send_all(const char *data, size_t size, double deadline) {
    while (size) {
        ssize_t n = send(sock, data, size, MSG_NOSIGNAL);
        if (n >= 0) {
            data += n;
            size -= (size_t)n;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            if (wait_for(POLLOUT, deadline)) return -1;
        } else if (errno != EINTR) {
            return fail("the dispatcher is gone: %s", strerror(errno));
        }
    }
    return 0;
}

static int receive_all(char *data, size_t size, double deadline) {
    while (size) {
        ssize_t n = recv(sock, data, size, 0);
        if (n > 0) {
            data += n;
            size -= (size_t)n;
        } else if (n == 0) {
            return fail("the dispatcher closed the connection");
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            if (wait_for(POLLIN, deadline)) return -1;
        } else if (errno != EINTR) {
            return fail("the dispatcher is gone: %s", strerror(errno));
        }
    }
    return 0;
}

static int reserve(size_t size) {
    if (size <= buffer_size) return 0;
    char *grown = realloc(buffer, size);
    if (!grown) return fail("no memory for %zu bytes", size);
    buffer = grown;
    buffer_size = size;
    return 0;
}

static void put(char **at, const void *value, size_t size) {
    memcpy(*at, value, size);
    *at += size;
}

// Write the whole request into `buffer`; returns its size, 0 on failure.
static size_t encode(const struct link_call *c) {
    size_t row = 4 * (size_t)c->hidden_dim, picks = 4 * (size_t)c->top_k;
    size_t size = REQUEST_HEAD + c->num_tokens * (row + 2 * picks);
    if (size > UINT32_MAX) return fail("a call of %zu bytes is too large", size), 0;
    if (reserve(size)) return 0;
    uint32_t length = (uint32_t)(size - REQUEST_LENGTH_AFTER);
    char *at = buffer;
    put(&at, REQUEST_MAGIC, 4);
    put(&at, &length, 4);
    put(&at, &sequence, 8);
    put(&at, &c->layer, 4);
    put(&at, &c->num_tokens, 4);
    put(&at, &c->top_k, 4);
    put(&at, &c->hidden_dim, 4);
    for (size_t t = 0; t < c->num_tokens; t++) put(&at, c->x + t * c->x_stride, row);
    for (size_t t = 0; t < c->num_tokens; t++) put(&at, c->ids + t * c->ids_stride, picks);
    for (size_t t = 0; t < c->num_tokens; t++)
        for (size_t k = 0; k < c->top_k; k++)
            put(&at, c->weights + t * c->weights_stride + k * c->weight_pick_stride, 4);
    return size;
}

// Drop an error text that came instead of rows into `reason`; the connection stays good.
static int read_error(size_t size, double deadline) {
    char text[SMALL] = {0};
    char rest[SMALL];
    size_t kept = size < sizeof text - 1 ? size : sizeof text - 1;
    if (receive_all(text, kept, deadline)) return hang_up(), -1;
    for (size_t left = size - kept; left;) {
        size_t piece = left < sizeof rest ? left : sizeof rest;
        if (receive_all(rest, piece, deadline)) return hang_up(), -1;
        left -= piece;
    }
    return fail("%s", text);
}

static int read_reply(const struct link_call *c, double deadline) {
    char head[REPLY_HEAD];
    if (receive_all(head, sizeof head, deadline)) return hang_up(), -1;
    uint32_t length, status;
    uint64_t seq;
    memcpy(&length, head + 4, 4);
    memcpy(&seq, head + 8, 8);
    memcpy(&status, head + 16, 4);
    size_t row = 4 * (size_t)c->hidden_dim;
    size_t fixed = REPLY_HEAD - REPLY_LENGTH_AFTER, rows_size = c->num_tokens * row;
    bool sane = !memcmp(head, REPLY_MAGIC, 4) && seq == sequence && length >= fixed &&
                (status ? length - fixed <= MAX_ERROR_TEXT : length - fixed == rows_size);
    if (!sane) {
        hang_up();
        return fail("the dispatcher's reply is malformed (seq %llu for %llu, status %u, %u bytes)",
                    (unsigned long long)seq, (unsigned long long)sequence, status, length);
    }
    if (status) return read_error(length - fixed, deadline);
    if (reserve(rows_size)) return hang_up(), -1;
    if (receive_all(buffer, rows_size, deadline)) return hang_up(), -1;
    for (size_t t = 0; t < c->num_tokens; t++)
        memcpy(c->out + t * c->out_stride, buffer + t * row, row);
    return 0;
}

int link_open(const char *socket_path, double call_timeout_s, char *why, size_t why_size) {
    reason = why;
    reason_size = why_size;
    address.sun_family = AF_UNIX;
    if (strlen(socket_path) >= sizeof address.sun_path)
        return fail("the socket's path is too long: %s", socket_path);
    strcpy(address.sun_path, socket_path);
    timeout_s = call_timeout_s;
    return dial();
}

int link_ask(const struct link_call *call, char *why, size_t why_size) {
    reason = why;
    reason_size = why_size;
    double deadline = now_s() + timeout_s;
    sequence++;
    size_t size = encode(call);
    if (!size) return -1;
    // After a failure the next call dials again; replies to abandoned calls died with the old
    // connection.
    if (sock < 0 && dial()) return -1;
    if (send_all(buffer, size, deadline)) return hang_up(), -1;
    return read_reply(call, deadline);
}

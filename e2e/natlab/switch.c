/*
A learning switch whose ports have delay, loss and a rate; in place of netem, which not every kernel has.

    switch PORT[:one_way_ms[:loss_pct[:rate_mbit]]] …

A frame takes the delay of the port it came in at plus that of the port it leaves at; loss and rate likewise.
The delay counts from the kernel's own time of arrival, and the last moments before a frame is due are spent
awake, so that neither a late wake-up nor a busy turn adds to it. The delay of a pair of ports is constant, so
each pair is a queue in order and nothing is reordered. Linux.
*/

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>

enum { MAX_PORTS = 8, MAX_MACS = 64, FRAME_BYTES = 2048, BATCH = 32, MAX_QUEUED = 20000 };

static const int64_t SECOND = 1000000000;
static const int64_t AWAKE = 150000;      // ns before a frame is due
static const int64_t BUFFER = 200000000;  // ns of traffic that a port with a rate holds before it drops
static const int64_t STRANGE = 50000000;  // ns: an arrival stamped further away than this is not believed

typedef struct Frame {
  struct Frame *next;
  int64_t due;  // CLOCK_REALTIME, ns
  int size;     // bytes
  uint8_t data[];
} Frame;

typedef struct {
  Frame *first, **last;
  int count;
} Queue;

typedef struct {
  int fd;
  int64_t delay;     // ns
  double loss;       // 0 .. 1
  double bytes_per_s;  // 0: no bound
  int64_t busy_until;
} Port;

static Port ports[MAX_PORTS];
static int num_ports;
static Queue queues[MAX_PORTS][MAX_PORTS];  // [came][leaves]
static struct {
  uint8_t mac[6];
  int port;
} known[MAX_MACS];
static int num_known;

static int64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return t.tv_sec * SECOND + t.tv_nsec;
}

static void fail(const char *what) {
  perror(what);
  exit(1);
}

static void open_port(char *spec) {
  Port *port = &ports[num_ports++];
  char *name = strsep(&spec, ":"), *text;
  port->delay = (text = strsep(&spec, ":")) ? (int64_t)(atof(text) * 1e6) : 0;
  port->loss = (text = strsep(&spec, ":")) ? atof(text) / 100 : 0;
  port->bytes_per_s = (text = strsep(&spec, ":")) ? atof(text) * 125e3 : 0;
  port->fd = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK, htons(ETH_P_ALL));
  if (port->fd < 0) fail("socket");
  int one = 1, room = 16 << 20;
  if (setsockopt(port->fd, SOL_PACKET, PACKET_IGNORE_OUTGOING, &one, sizeof one)) fail("PACKET_IGNORE_OUTGOING");
  setsockopt(port->fd, SOL_SOCKET, SO_TIMESTAMPNS, &one, sizeof one);
  setsockopt(port->fd, SOL_SOCKET, SO_SNDBUFFORCE, &room, sizeof room);
  setsockopt(port->fd, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof room);
  struct sockaddr_ll address = {.sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL), .sll_ifindex = (int)if_nametoindex(name)};
  if (bind(port->fd, (struct sockaddr *)&address, sizeof address)) fail(name);
}

static void enqueue(int came, int leaves, const uint8_t *data, int size, int64_t arrived) {
  Port *in = &ports[came], *out = &ports[leaves];
  Queue *queue = &queues[came][leaves];
  if (drand48() < in->loss || drand48() < out->loss || queue->count > MAX_QUEUED) return;
  int64_t due = arrived + in->delay + out->delay;
  double rate = in->bytes_per_s;
  if (out->bytes_per_s && (!rate || out->bytes_per_s < rate)) rate = out->bytes_per_s;
  if (rate) {
    int64_t start = out->busy_until > arrived ? out->busy_until : arrived;
    if (start - arrived > BUFFER) return;
    out->busy_until = start + (int64_t)(size / rate * 1e9);
    due += out->busy_until - arrived;
  }
  Frame *frame = malloc(sizeof *frame + (size_t)size);
  if (!frame) fail("malloc");
  frame->next = NULL, frame->due = due, frame->size = size;
  memcpy(frame->data, data, (size_t)size);
  *queue->last = frame, queue->last = &frame->next, queue->count++;
}

static int port_of(const uint8_t *mac) {
  for (int i = 0; i < num_known; i++)
    if (!memcmp(known[i].mac, mac, 6)) return known[i].port;
  return -1;
}

static void take(int came, const uint8_t *data, int size, int64_t arrived) {
  if (size < ETH_HLEN) return;
  if (port_of(data + 6) < 0 && num_known < MAX_MACS) {
    memcpy(known[num_known].mac, data + 6, 6);
    known[num_known++].port = came;
  }
  int leaves = data[0] & 1 ? -1 : port_of(data);  // broadcast, or not known yet: to all
  for (int i = 0; i < num_ports; i++)
    if (i != came && (leaves < 0 || leaves == i)) enqueue(came, i, data, size, arrived);
}

static void receive(int came) {
  static uint8_t data[BATCH][FRAME_BYTES], control[BATCH][64];
  struct iovec parts[BATCH];
  struct mmsghdr messages[BATCH] = {0};
  for (int i = 0; i < BATCH; i++) {
    parts[i] = (struct iovec){data[i], FRAME_BYTES};
    messages[i].msg_hdr = (struct msghdr){.msg_iov = &parts[i], .msg_iovlen = 1, .msg_control = control[i], .msg_controllen = sizeof control[i]};
  }
  int count = recvmmsg(ports[came].fd, messages, BATCH, MSG_DONTWAIT, NULL);
  int64_t now = now_ns();
  for (int i = 0; i < count; i++) {
    struct msghdr *header = &messages[i].msg_hdr;
    if (header->msg_flags & MSG_TRUNC) continue;  // larger than any MTU here: offloads are off
    int64_t arrived = now;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(header); c; c = CMSG_NXTHDR(header, c))
      if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_TIMESTAMPNS) {
        struct timespec t;
        memcpy(&t, CMSG_DATA(c), sizeof t);
        int64_t stamp = t.tv_sec * SECOND + t.tv_nsec;
        if (stamp <= now && now - stamp < STRANGE) arrived = stamp;
      }
    take(came, data[i], (int)messages[i].msg_len, arrived);
  }
}

// Sends what is due; returns when the next frame will be.
static int64_t send_due(void) {
  int64_t next = INT64_MAX;
  for (int came = 0; came < num_ports; came++)
    for (int leaves = 0; leaves < num_ports; leaves++) {
      Queue *queue = &queues[came][leaves];
      while (queue->first) {
        Frame *frame = queue->first;
        if (frame->due > now_ns()) {
          if (frame->due < next) next = frame->due;
          break;
        }
        queue->first = frame->next, queue->count--;
        if (!queue->first) queue->last = &queue->first;
        // A full buffer, or a port that went down: lost.
        if (send(ports[leaves].fd, frame->data, (size_t)frame->size, MSG_DONTWAIT) < 0) errno = 0;
        free(frame);
      }
    }
  return next;
}

int main(int argc, char **argv) {
  if (argc < 2 || argc - 1 > MAX_PORTS) {
    fprintf(stderr, "usage: switch PORT[:one_way_ms[:loss_pct[:rate_mbit]]] … (at most %d)\n", MAX_PORTS);
    return 2;
  }
  for (int i = 1; i < argc; i++) open_port(argv[i]);
  for (int i = 0; i < MAX_PORTS; i++)
    for (int j = 0; j < MAX_PORTS; j++) queues[i][j].last = &queues[i][j].first;
  srand48(time(NULL));
  // Real time and no timer slack: else waking up is late by more than what is measured. Refused: go on without.
  struct sched_param priority = {.sched_priority = 10};
  sched_setscheduler(0, SCHED_RR, &priority);
  prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
  puts("up");
  fflush(stdout);
  struct pollfd readable[MAX_PORTS];
  for (int i = 0; i < num_ports; i++) readable[i] = (struct pollfd){ports[i].fd, POLLIN, 0};
  for (;;) {
    int64_t next = send_due(), left = next == INT64_MAX ? SECOND : next - now_ns() - AWAKE;
    struct timespec wait = {left > 0 ? left / SECOND : 0, left > 0 ? left % SECOND : 0};
    if (ppoll(readable, (nfds_t)num_ports, &wait, NULL) <= 0) continue;
    for (int i = 0; i < num_ports; i++)
      if (readable[i].revents & POLLIN) receive(i);
  }
}

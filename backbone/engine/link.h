// Ask the dispatcher: one request, one reply, over a Unix stream socket. Layout:
// backbone/engine/link.py.
#ifndef SWARM_LINK_H
#define SWARM_LINK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct link_call {
    uint32_t layer, num_tokens, top_k, hidden_dim;
    // rows are taken with their strides, in bytes
    const char *x, *ids, *weights;
    size_t x_stride, ids_stride, weights_stride, weight_pick_stride;
    char *out;
    size_t out_stride;
};

// Remember where and how long; connect. Returns 0, or -1 with a sentence in `why`.
int link_open(const char *socket_path, double call_timeout_s, char *why, size_t why_size);

// Returns 0 with every row of `out` written; or -1 with a sentence in `why`, and nothing written.
int link_ask(const struct link_call *call, char *why, size_t why_size);

#endif

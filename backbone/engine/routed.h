// Recognise the routed experts of one layer in a piece of llama.cpp's graph.
//
//     x                                 [hidden_dim, 1, num_tokens]; weight before the experts:
//                                       MUL(REPEAT(x), weights), [hidden_dim, top_k, num_tokens]
//     gate = MUL_MAT_ID(W_gate, x, ids) ids [top_k, num_tokens]
//     up   = MUL_MAT_ID(W_up, x, ids)   or gate and up one merged matrix, or no gate
//     h    = act(gate, up)              GLU; or UNARY, SQR, CLAMP, SCALE and MUL (match_hidden)
//     down = MUL_MAT_ID(W_down, h, ids) [hidden_dim, top_k, num_tokens]
//                                       after each product: MUL by GET_ROWS(REPEAT(scales), ids)
//                                       when scaled, ADD_ID when biased
//     y    = down * weights             weights [1, top_k, num_tokens]; not when they came before
//     out  = y[:,0] + y[:,1] + …        VIEWs and ADDs; CONT when top_k is 1
#ifndef SWARM_ROUTED_H
#define SWARM_ROUTED_H

#include "abi.h"
#include "swarm_device.h"

// Tells whether a tensor's bytes lie in a buffer of this device (a weight that the swarm holds).
typedef bool (*is_swarm_weight)(const struct ggml_tensor *);

struct routed {
    struct swarm_layer seen;
    const struct ggml_tensor *x, *ids, *weights, *out;
};

// Does this operation belong to the routed experts? Whatever touches the device's weights does,
// known or not: the unknown must come to routed_match(), which refuses it, and never to another
// backend, which would read them.
bool routed_claims(const struct ggml_tensor *op, is_swarm_weight is_weight);

// Find the experts in `graph`. Returns 0; or -1 and fills `refusal`; or 1 when the graph only moves
// no data.
int routed_match(struct ggml_cgraph *graph, is_swarm_weight is_weight, struct routed *found,
                 struct swarm_refusal *refusal);

#endif

// The device as its host process sees it (child.py, logits_child.py mirror these structs with
// ctypes).
#ifndef SWARM_DEVICE_H
#define SWARM_DEVICE_H

#include <stdint.h>

enum swarm_activation {
    SWARM_SILU = 0,
    SWARM_GELU = 1,
    SWARM_RELU = 2,
    SWARM_RELU2 = 3,
    SWARM_SWIGLU_OAI = 4,
    SWARM_SWIGLU_CLAMP = 5,
    SWARM_SITU = 6,
    SWARM_UNKNOWN = 7,
};

// The experts of one layer as found in llama.cpp's graph.
struct swarm_layer {
    int32_t layer;
    int32_t num_experts, top_k, hidden_dim, expert_dim;
    int32_t gate_type, up_type, down_type; // ggml type ids; gate_type -1: no gate
    int32_t activation;                    // enum swarm_activation
    float alpha, limit;                    // as in wasm/CONTRACT.md
    int32_t biased, scaled;
    int32_t weight_before; // the router weight multiplies x, not y
};

// Why the model cannot be served: the operation, layer and tensor where the graph left what is
// known.
struct swarm_refusal {
    int32_t layer;
    char op[32];
    char tensor[64];
    char why[160];
};

struct swarm_stats {
    uint64_t calls, rows, failures;
    uint64_t weight_bytes;   // address space given to expert weights; no byte of it is held
    uint64_t dropped_bytes;  // weight bytes that the loader offered and that were dropped
    uint64_t released_bytes; // of them, in pages of the mapped file that were given back
};

// Register device "Swarm" in the library (a path, already loaded in this process) and connect to
// the dispatcher's socket. Returns 0, or -1: swarm_error() says why. Once per process.
int swarm_open(const char *library_path, const char *socket_path, double call_timeout_s);

// The last failure, in words; empty when there was none.
const char *swarm_error(void);

// Copy what was seen of up to `capacity` layers; returns how many there are.
int swarm_layers(struct swarm_layer *out, int capacity);

// Returns 1 and fills `out` when the graph was refused, else 0. The first refusal stays.
int swarm_refused(struct swarm_refusal *out);

void swarm_read_stats(struct swarm_stats *out);

#endif

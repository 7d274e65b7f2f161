// The ggml device "Swarm": llama.cpp gives it the routed experts of each layer, it asks the
// dispatcher for their sum.
//
// How llama.cpp comes to call it, without a patch:
//  - `tensor_buft_overrides` places the tensors of routed experts in this device's buffers. Those
//  are address space
//    only: the loader's bytes are dropped, the pages allow no access, so that nobody can ever read
//    zeros as weights.
//  - the scheduler assigns an operation on such a weight to this device, and what hangs on it
//  (supports_op). The
//    whole of a layer's experts becomes one piece of graph: graph_optimize sees it at load,
//    graph_compute per step.
//  - graph_compute takes x, ids and weights from the tensors, asks (link.c), writes the one output
//  tensor. The
//    tensors in between are never computed. Any failure is GGML_STATUS_FAILED: llama-server answers
//    the requests of that step with an error and goes on.

#include "swarm_device.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "abi.h"
#include "link.h"
#include "pages.h"
#include "routed.h"

#define EXPORT __attribute__((visibility("default")))
enum { MAX_LAYERS = 512, ALIGNMENT = 64, SENTENCE = 512 };

static struct abi_words registry, device, buffer_type, backend;
static char guid[16] = {'e', 'x', 'p', 'e', 'r', 't', 's', 'w',
                        'a', 'r', 'm', '-', 'd', 'e', 'v', '1'};

// Under `lock`: several llama contexts of one process may compute at once.
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct swarm_layer layers[MAX_LAYERS];
static int num_layers;
static struct swarm_refusal refusal;
static int refused;
static struct swarm_stats stats;
static char error[2 * SENTENCE];
static bool reached; // graph_compute has been called: part of the self-test

// ---- names and properties ----

static const char *get_name(void *self) {
    (void)self;
    return "Swarm";
}

static const char *get_description(void *self) {
    (void)self;
    return "routed experts computed by the swarm";
}

static void get_memory(void *self, size_t *available, size_t *total) {
    (void)self;
    *available = *total = 0; // none to report: llama.cpp shall not plan with it
}

static int get_type(void *self) {
    (void)self;
    return ABI_DEVICE_ACCEL; // beside the CPU: takes tensors by name only, never whole layers
}

static void get_props(void *self, struct abi_device_props *props) {
    (void)self;
    props->name = get_name(NULL);
    props->description = get_description(NULL);
    props->type = ABI_DEVICE_ACCEL;
}

// ---- buffers: address space without access, opened only for results ----

struct region {
    char *base;
    size_t size;
    bool open;    // pages can be read and written: a buffer for results
    bool counted; // its weights are in the statistics
};

static struct region *region_of(void *buffer) { return abi_word(buffer, layout->buffer.context); }

static int usage_of(void *buffer) {
    int usage;
    memcpy(&usage, (void **)buffer + layout->buffer.usage, sizeof usage);
    return usage;
}

static void *get_base(void *buffer) { return region_of(buffer)->base; }

static void free_buffer(void *buffer) {
    struct region *region = region_of(buffer);
    munmap(region->base, region->size);
    free(region);
}

// llama.cpp says what a buffer is for after it is made and before a result is placed in it.
static int init_tensor(void *buffer, tensor_p tensor) {
    (void)tensor;
    struct region *region = region_of(buffer);
    if (region->open || usage_of(buffer) != ABI_USAGE_COMPUTE) return ABI_STATUS_SUCCESS;
    if (mprotect(region->base, region->size, PROT_READ | PROT_WRITE)) return ABI_STATUS_FAILED;
    region->open = true;
    return ABI_STATUS_SUCCESS;
}

static void set_tensor(void *buffer, tensor_p tensor, const void *data, size_t offset,
                       size_t size) {
    struct region *region = region_of(buffer);
    if (region->open) {
        memcpy((char *)tensor->data + offset, data, size);
        return;
    }
    // The loader mapped and touched them; the caller keeps them mapped until we return.
    stats.released_bytes += pages_give_back(data, size);
    stats.dropped_bytes += size;
    if (!region->counted) stats.weight_bytes += region->size;
    region->counted = true;
}

static void get_tensor(void *buffer, const struct ggml_tensor *tensor, void *data, size_t offset,
                       size_t size) {
    if (region_of(buffer)->open)
        memcpy(data, (const char *)tensor->data + offset, size);
    else
        memset(data, 0xff, size); // NaN in every float format: whoever uses it will notice
}

static void memset_tensor(void *buffer, tensor_p tensor, uint8_t value, size_t offset,
                          size_t size) {
    if (region_of(buffer)->open) memset((char *)tensor->data + offset, value, size);
}

static void clear(void *buffer, uint8_t value) {
    struct region *region = region_of(buffer);
    if (region->open) memset(region->base, value, region->size);
}

static void *alloc_buffer(void *type, size_t size) {
    struct region *region = calloc(1, sizeof *region);
    if (!region) return NULL;
    region->size = size ? size : ALIGNMENT;
    region->base =
        mmap(NULL, region->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (region->base == MAP_FAILED) {
        free(region);
        return NULL;
    }
    struct abi_buffer_slots slots = {0};
    slots.word[layout->buffer.free_buffer] = (void *)free_buffer;
    slots.word[layout->buffer.get_base] = (void *)get_base;
    slots.word[layout->buffer.init_tensor] = (void *)init_tensor;
    slots.word[layout->buffer.memset_tensor] = (void *)memset_tensor;
    slots.word[layout->buffer.set_tensor] = (void *)set_tensor;
    slots.word[layout->buffer.get_tensor] = (void *)get_tensor;
    slots.word[layout->buffer.clear] = (void *)clear;
    return lib.ggml_backend_buffer_init(type, slots, region, size);
}

static size_t get_alignment(void *type) {
    (void)type;
    return ALIGNMENT;
}

static bool is_host(void *type) {
    (void)type;
    return true; // results lie in ordinary memory: the CPU backend takes them without a copy
}

static bool is_weight(const struct ggml_tensor *tensor) {
    void *buffer = tensor->buffer;
    return buffer && abi_word(buffer, layout->buffer.buft) == (void *)&buffer_type &&
           usage_of(buffer) == ABI_USAGE_WEIGHTS;
}

// ---- graphs ----

static void note_failure(int layer, const char *why) {
    stats.failures++;
    snprintf(error, sizeof error, "layer %d: %s", layer, why);
    lib.ggml_log_internal(ABI_LOG_ERROR, "swarm: %s\n", error);
}

static void note_refusal(const struct swarm_refusal *found) {
    if (!refused) refusal = *found;
    refused = 1;
    snprintf(error, sizeof error, "refused: %s (op %s, layer %d, tensor %s)", found->why, found->op,
             found->layer, found->tensor);
    lib.ggml_log_internal(ABI_LOG_ERROR, "swarm: %s\n", error);
}

static void note_layer(const struct swarm_layer *seen) {
    int i = 0;
    while (i < num_layers && layers[i].layer != seen->layer) i++;
    if (i == MAX_LAYERS) {
        struct swarm_refusal full = {.layer = seen->layer, .op = "MUL_MAT_ID", .why = "too many layers"};
        note_refusal(&full);
        return;
    }
    layers[i] = *seen;
    if (i == num_layers) num_layers++;
}

// At load (and whenever the graph is built anew): learn the layer's formula, or refuse the model.
static void graph_optimize(void *self, struct ggml_cgraph *graph) {
    (void)self;
    struct routed found;
    struct swarm_refusal why;
    pthread_mutex_lock(&lock);
    int result = routed_match(graph, is_weight, &found, &why);
    if (result < 0) note_refusal(&why);
    if (result == 0) note_layer(&found.seen);
    pthread_mutex_unlock(&lock);
}

static int compute(struct ggml_cgraph *graph) {
    struct routed found;
    struct swarm_refusal why;
    int result = routed_match(graph, is_weight, &found, &why);
    if (result > 0) return ABI_STATUS_SUCCESS;
    if (result < 0) {
        note_refusal(&why);
        return ABI_STATUS_FAILED;
    }
    const struct ggml_tensor *x = found.x, *ids = found.ids, *weights = found.weights,
                             *out = found.out;
    if (ids->ne[1] == 0)
        return ABI_STATUS_SUCCESS; // last layer of a prompt's piece that wants no logits
    struct link_call call = {
        .layer = (uint32_t)found.seen.layer,
        .num_tokens = (uint32_t)ids->ne[1],
        .top_k = (uint32_t)found.seen.top_k,
        .hidden_dim = (uint32_t)found.seen.hidden_dim,
        .x = x->data,
        .x_stride = x->nb[2],
        .ids = ids->data,
        .ids_stride = ids->nb[1], // a view of the sorted experts: longer than top_k
        .weights = weights->data,
        .weights_stride = weights->nb[2],
        .weight_pick_stride = weights->nb[1],
        .out = out->data,
        .out_stride = out->nb[1],
    };
    char sentence[SENTENCE];
    if (link_ask(&call, sentence, sizeof sentence)) {
        note_failure(found.seen.layer, sentence);
        return ABI_STATUS_FAILED;
    }
    stats.calls++;
    stats.rows += call.num_tokens;
    return ABI_STATUS_SUCCESS;
}

static int graph_compute(void *self, struct ggml_cgraph *graph) {
    (void)self;
    pthread_mutex_lock(&lock);
    reached = true;
    int status = compute(graph);
    pthread_mutex_unlock(&lock);
    return status;
}

static bool supports_op(void *self, const struct ggml_tensor *op) {
    (void)self;
    return is_weight(op) || routed_claims(op, is_weight);
}

static bool supports_buft(void *self, void *type) {
    (void)self;
    return type == (void *)&buffer_type || lib.ggml_backend_buft_is_host(type);
}

// ---- registration ----

static void free_backend(void *self) { (void)self; }

static void *init_backend(void *self, const char *parameters) {
    (void)self;
    (void)parameters;
    return &backend;
}

static void *get_buffer_type(void *self) {
    (void)self;
    return &buffer_type;
}

static size_t get_device_count(void *self) {
    (void)self;
    return 1;
}

static void *get_device(void *self, size_t index) {
    (void)self;
    return index == 0 ? &device : NULL;
}

static void fill_vtables(void) {
    const struct abi_layout *l = layout;
    memcpy(&registry.word[0], &l->api_version, sizeof l->api_version);
    registry.word[l->registry.get_name] = (void *)get_name;
    registry.word[l->registry.get_device_count] = (void *)get_device_count;
    registry.word[l->registry.get_device] = (void *)get_device;

    device.word[l->device.get_name] = (void *)get_name;
    device.word[l->device.get_description] = (void *)get_description;
    device.word[l->device.get_memory] = (void *)get_memory;
    device.word[l->device.get_type] = (void *)get_type;
    device.word[l->device.get_props] = (void *)get_props;
    device.word[l->device.init_backend] = (void *)init_backend;
    device.word[l->device.get_buffer_type] = (void *)get_buffer_type;
    device.word[l->device.supports_op] = (void *)supports_op;
    device.word[l->device.supports_buft] = (void *)supports_buft;
    device.word[l->device.registry] = &registry;

    buffer_type.word[l->buft.get_name] = (void *)get_name;
    buffer_type.word[l->buft.alloc_buffer] = (void *)alloc_buffer;
    buffer_type.word[l->buft.get_alignment] = (void *)get_alignment;
    buffer_type.word[l->buft.is_host] = (void *)is_host;
    buffer_type.word[l->buft.device] = &device;

    backend.word[l->backend.guid] = guid;
    backend.word[l->backend.get_name] = (void *)get_name;
    backend.word[l->backend.free] = (void *)free_backend;
    backend.word[l->backend.graph_compute] = (void *)graph_compute;
    backend.word[l->backend.graph_optimize] = (void *)graph_optimize;
    backend.word[l->backend.device] = &device;
}

// ---- self-test ----

// Through the library's own front door: does it find, call and understand this device? One layer of
// experts is put together with ggml's functions and must be recognised, a changed one must be
// refused.
static int check_graph(context_p ctx, void *weights_buffer, char *why, size_t why_size) {
    enum { D = 8, F = 4, E = 5, K = 2, T = 3 };
    char *base = lib.ggml_backend_buffer_get_base(weights_buffer);
    tensor_p matrix[3];
    const int64_t rows[3] = {F, F, D}, columns[3] = {D, D, F};
    for (int i = 0; i < 3; i++) {
        matrix[i] = lib.ggml_new_tensor_3d(ctx, ABI_TYPE_F32, columns[i], rows[i], E);
        lib.ggml_set_name(matrix[i], "blk.7.probe");
        lib.ggml_backend_tensor_alloc(weights_buffer, matrix[i], base + i * 4096);
    }
    tensor_p x = lib.ggml_new_tensor_3d(ctx, ABI_TYPE_F32, D, 1, T);
    tensor_p sorted = lib.ggml_new_tensor_3d(ctx, ABI_TYPE_I32, E, T, 1);
    tensor_p ids = lib.ggml_view_2d(ctx, sorted, K, T, sorted->nb[1], 0);
    tensor_p router = lib.ggml_new_tensor_3d(ctx, ABI_TYPE_F32, 1, K, T);
    tensor_p gate = lib.ggml_mul_mat_id(ctx, matrix[0], x, ids);
    tensor_p up = lib.ggml_mul_mat_id(ctx, matrix[1], x, ids);
    tensor_p down = lib.ggml_mul_mat_id(ctx, matrix[2], lib.ggml_swiglu_split(ctx, gate, up), ids);
    tensor_p y = lib.ggml_mul(ctx, down, router);
    tensor_p first = lib.ggml_view_2d(ctx, y, D, T, y->nb[2], 0);
    tensor_p second = lib.ggml_view_2d(ctx, y, D, T, y->nb[2], y->nb[1]);
    tensor_p out = lib.ggml_add(ctx, first, second);
    tensor_p residual = lib.ggml_add(ctx, out, lib.ggml_new_tensor_3d(ctx, ABI_TYPE_F32, D, T, 1));

    struct ggml_cgraph *graph = lib.ggml_new_graph(ctx);
    lib.ggml_build_forward_expand(graph, out);
    struct routed found;
    struct swarm_refusal refused_here;
    if (routed_match(graph, is_weight, &found, &refused_here))
        return snprintf(why, why_size, "self-test: experts not recognised: %s (%s)",
                        refused_here.why, refused_here.op),
               -1;
    const struct swarm_layer *seen = &found.seen;
    bool right = seen->layer == 7 && seen->num_experts == E && seen->top_k == K &&
                 seen->hidden_dim == D && seen->expert_dim == F && seen->activation == SWARM_SILU &&
                 !seen->biased && !seen->weight_before && found.x == x && found.ids == ids &&
                 found.weights == router && found.out == out;
    bool claims = lib.ggml_backend_dev_supports_op(&device, gate) &&
                  lib.ggml_backend_dev_supports_op(&device, out) &&
                  !lib.ggml_backend_dev_supports_op(&device, residual);
    if (!right || !claims)
        return snprintf(why, why_size, "self-test: experts recognised wrongly"), -1;

    struct ggml_cgraph *partial = lib.ggml_new_graph(ctx);
    lib.ggml_build_forward_expand(partial, first);
    if (routed_match(partial, is_weight, &found, &refused_here) == 0)
        return snprintf(why, why_size, "self-test: half a layer passed for a whole one"), -1;
    // An empty graph must arrive at graph_compute: nothing to do, success.
    if (lib.ggml_backend_graph_compute(&backend, lib.ggml_new_graph(ctx)) != ABI_STATUS_SUCCESS ||
        !reached)
        return snprintf(why, why_size, "self-test: graph_compute was not reached"), -1;
    return 0;
}

static int self_test(char *why, size_t why_size) {
    bool found =
        lib.ggml_backend_dev_by_name("Swarm") == (void *)&device &&
        lib.ggml_backend_dev_type(&device) == ABI_DEVICE_ACCEL &&
        lib.ggml_backend_dev_buffer_type(&device) == (void *)&buffer_type &&
        lib.ggml_backend_get_device(lib.ggml_backend_dev_init(&device, NULL)) == (void *)&device;
    if (!found)
        return snprintf(why, why_size, "self-test: the library does not find the device"), -1;

    void *buffer = lib.ggml_backend_buft_alloc_buffer(&buffer_type, 4 * 4096);
    if (!buffer) return snprintf(why, why_size, "self-test: no address space"), -1;
    lib.ggml_backend_buffer_set_usage(buffer, ABI_USAGE_WEIGHTS);
    context_p ctx = lib.ggml_init((struct ggml_init_params){.mem_size = 1 << 20, .no_alloc = true});
    int result = ctx ? check_graph(ctx, buffer, why, why_size) : -1;
    if (ctx) lib.ggml_free(ctx);
    lib.ggml_backend_buffer_free(buffer);
    return result;
}

EXPORT int swarm_open(const char *library_path, const char *socket_path, double call_timeout_s) {
    if (abi_open(library_path, error, sizeof error)) return -1;
    fill_vtables();
    lib.ggml_backend_register(&registry);
    if (self_test(error, sizeof error)) return -1;
    if (link_open(socket_path, call_timeout_s, error, sizeof error)) return -1;
    error[0] = '\0';
    return 0;
}

EXPORT const char *swarm_error(void) { return error; }

EXPORT int swarm_layers(struct swarm_layer *out, int capacity) {
    pthread_mutex_lock(&lock);
    int count = num_layers;
    for (int i = 0; i < count && i < capacity; i++) out[i] = layers[i];
    pthread_mutex_unlock(&lock);
    return count;
}

EXPORT int swarm_refused(struct swarm_refusal *out) {
    pthread_mutex_lock(&lock);
    if (refused) *out = refusal;
    int result = refused;
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT void swarm_read_stats(struct swarm_stats *out) {
    pthread_mutex_lock(&lock);
    *out = stats;
    pthread_mutex_unlock(&lock);
}

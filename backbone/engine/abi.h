// What we must know of ggml in memory, and how we make sure of it.
//
// Two kinds of layout:
//  - `struct ggml_tensor` and the calls of ggml's public headers: stable; mirrored here, checked by
//  abi_open()
//    on tensors that the library itself makes.
//  - the vtables of backends (buffer type, buffer, backend, device, registry): they change with the
//  backend API
//    version. Each object is seen as an array of words; `struct abi_layout` says at which word what
//    stands. One row of the table in abi.c per version; an unknown version is refused, a known one
//    compared with the structs of the CPU backend in the loaded library.
#ifndef SWARM_ABI_H
#define SWARM_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

// ---- ggml.h ----

enum { ABI_MAX_DIMS = 4, ABI_MAX_SRC = 10, ABI_MAX_NAME = 64, ABI_OP_PARAMS = 64 };
enum { ABI_TYPE_F32 = 0, ABI_TYPE_Q8_0 = 8, ABI_TYPE_I32 = 26 };
enum { ABI_STATUS_FAILED = -1, ABI_STATUS_SUCCESS = 0 };
enum { ABI_USAGE_WEIGHTS = 1, ABI_USAGE_COMPUTE = 2 };
enum { ABI_DEVICE_ACCEL = 3 };
enum { ABI_LOG_WARN = 3, ABI_LOG_ERROR = 4 };

struct ggml_context;
struct ggml_cgraph;

struct ggml_tensor {
    int type;
    void *buffer;
    int64_t ne[ABI_MAX_DIMS]; // number of elements, innermost first
    size_t nb[ABI_MAX_DIMS];  // strides in bytes
    int op;
    int32_t op_params[ABI_OP_PARAMS / sizeof(int32_t)];
    int32_t flags;
    struct ggml_tensor *src[ABI_MAX_SRC];
    struct ggml_tensor *view_src;
    size_t view_offs;
    void *data;
    char name[ABI_MAX_NAME];
    void *extra;
    char padding[8];
};

struct ggml_init_params {
    size_t mem_size;
    void *mem_buffer;
    bool no_alloc;
};

// ---- ggml-backend-impl.h, as words ----

enum { ABI_MAX_WORDS = 32, ABI_MAX_BUFFER_SLOTS = 12 };

struct abi_words {
    void *word[ABI_MAX_WORDS];
};
struct abi_buffer_slots { // passed by value to ggml_backend_buffer_init: the callee reads as many
                          // as it knows
    void *word[ABI_MAX_BUFFER_SLOTS];
};

struct abi_layout {
    int api_version;
    struct {
        int get_name, alloc_buffer, get_alignment, is_host, device;
    } buft;
    struct {
        int free_buffer, get_base, init_tensor, memset_tensor, set_tensor, get_tensor, clear;
        int buft, context, size, usage;
    } buffer;
    struct {
        int guid, get_name, free, graph_compute, graph_optimize, device;
    } backend;
    struct {
        int get_name, get_description, get_memory, get_type, get_props, init_backend,
            get_buffer_type;
        int supports_op, supports_buft, registry;
    } device;
    struct {
        int get_name, get_device_count, get_device; // word 0 holds the API version as an int
    } registry;
};

struct abi_device_props { // the head of ggml_backend_dev_props; the caller zeroes the rest
    const char *name, *description;
    size_t memory_free, memory_total;
    int type;
};

// ---- the library's functions that we call ----

typedef struct ggml_tensor *tensor_p;
typedef struct ggml_context *context_p;

// X(result, name, arguments)
#define ABI_FUNCTIONS(X)                                                                           \
    X(context_p, ggml_init, (struct ggml_init_params))                                             \
    X(void, ggml_free, (context_p))                                                                \
    X(tensor_p, ggml_new_tensor_3d, (context_p, int, int64_t, int64_t, int64_t))                   \
    X(tensor_p, ggml_set_name, (tensor_p, const char *))                                           \
    X(tensor_p, ggml_mul_mat_id, (context_p, tensor_p, tensor_p, tensor_p))                        \
    X(tensor_p, ggml_add_id, (context_p, tensor_p, tensor_p, tensor_p))                            \
    X(tensor_p, ggml_swiglu_split, (context_p, tensor_p, tensor_p))                                \
    X(tensor_p, ggml_geglu_split, (context_p, tensor_p, tensor_p))                                 \
    X(tensor_p, ggml_reglu_split, (context_p, tensor_p, tensor_p))                                 \
    X(tensor_p, ggml_swiglu_oai, (context_p, tensor_p, tensor_p, float, float))                    \
    X(tensor_p, ggml_silu, (context_p, tensor_p))                                                  \
    X(tensor_p, ggml_gelu, (context_p, tensor_p))                                                  \
    X(tensor_p, ggml_relu, (context_p, tensor_p))                                                  \
    X(tensor_p, ggml_tanh, (context_p, tensor_p))                                                  \
    X(tensor_p, ggml_sigmoid, (context_p, tensor_p))                                               \
    X(tensor_p, ggml_sqr, (context_p, tensor_p))                                                   \
    X(tensor_p, ggml_scale, (context_p, tensor_p, float))                                          \
    X(tensor_p, ggml_clamp, (context_p, tensor_p, float, float))                                   \
    X(tensor_p, ggml_get_rows, (context_p, tensor_p, tensor_p))                                    \
    X(tensor_p, ggml_repeat_4d, (context_p, tensor_p, int64_t, int64_t, int64_t, int64_t))         \
    X(tensor_p, ggml_mul, (context_p, tensor_p, tensor_p))                                         \
    X(tensor_p, ggml_add, (context_p, tensor_p, tensor_p))                                         \
    X(tensor_p, ggml_cont, (context_p, tensor_p))                                                  \
    X(tensor_p, ggml_transpose, (context_p, tensor_p))                                             \
    X(tensor_p, ggml_permute, (context_p, tensor_p, int, int, int, int))                           \
    X(tensor_p, ggml_view_2d, (context_p, tensor_p, int64_t, int64_t, size_t, size_t))             \
    X(tensor_p, ggml_reshape_3d, (context_p, tensor_p, int64_t, int64_t, int64_t))                 \
    X(const char *, ggml_op_name, (int))                                                           \
    X(int, ggml_get_unary_op, (const struct ggml_tensor *))                                        \
    X(int, ggml_get_glu_op, (const struct ggml_tensor *))                                          \
    X(size_t, ggml_nbytes, (const struct ggml_tensor *))                                           \
    X(struct ggml_cgraph *, ggml_new_graph, (context_p))                                           \
    X(void, ggml_build_forward_expand, (struct ggml_cgraph *, tensor_p))                           \
    X(int, ggml_graph_n_nodes, (struct ggml_cgraph *))                                             \
    X(tensor_p, ggml_graph_node, (struct ggml_cgraph *, int))                                      \
    X(void, ggml_log_internal, (int, const char *, ...))                                           \
    X(void *, ggml_backend_reg_by_name, (const char *))                                            \
    X(const char *, ggml_backend_reg_name, (void *))                                               \
    X(size_t, ggml_backend_reg_dev_count, (void *))                                                \
    X(void *, ggml_backend_reg_dev_get, (void *, size_t))                                          \
    X(void *, ggml_backend_dev_by_name, (const char *))                                            \
    X(const char *, ggml_backend_dev_name, (void *))                                               \
    X(const char *, ggml_backend_dev_description, (void *))                                        \
    X(int, ggml_backend_dev_type, (void *))                                                        \
    X(void *, ggml_backend_dev_backend_reg, (void *))                                              \
    X(void *, ggml_backend_dev_buffer_type, (void *))                                              \
    X(bool, ggml_backend_dev_supports_op, (void *, const struct ggml_tensor *))                    \
    X(bool, ggml_backend_dev_supports_buft, (void *, void *))                                      \
    X(void *, ggml_backend_dev_init, (void *, const char *))                                       \
    X(const char *, ggml_backend_name, (void *))                                                   \
    X(void *, ggml_backend_get_device, (void *))                                                   \
    X(void, ggml_backend_free, (void *))                                                           \
    X(int, ggml_backend_graph_compute, (void *, struct ggml_cgraph *))                             \
    X(const char *, ggml_backend_buft_name, (void *))                                              \
    X(size_t, ggml_backend_buft_get_alignment, (void *))                                           \
    X(bool, ggml_backend_buft_is_host, (void *))                                                   \
    X(void *, ggml_backend_buft_get_device, (void *))                                              \
    X(void *, ggml_backend_buft_alloc_buffer, (void *, size_t))                                    \
    X(void *, ggml_backend_buffer_get_base, (void *))                                              \
    X(size_t, ggml_backend_buffer_get_size, (void *))                                              \
    X(void *, ggml_backend_buffer_get_type, (void *))                                              \
    X(void, ggml_backend_buffer_set_usage, (void *, int))                                          \
    X(void, ggml_backend_buffer_free, (void *))                                                    \
    X(int, ggml_backend_tensor_alloc, (void *, tensor_p, void *))                                  \
    X(void, ggml_backend_tensor_set, (tensor_p, const void *, size_t, size_t))                     \
    X(void *, ggml_backend_buffer_init, (void *, struct abi_buffer_slots, void *, size_t))         \
    X(void, ggml_backend_register, (void *))

// Functions that not every known version has; null where it has them not.
#define ABI_OPTIONAL_FUNCTIONS(X)                                                                  \
    X(tensor_p, ggml_swiglu_clamp, (context_p, tensor_p, tensor_p, float))

struct abi_library {
#define X(result, name, arguments) result(*name) arguments;
    ABI_FUNCTIONS(X)
    ABI_OPTIONAL_FUNCTIONS(X)
#undef X
};

// Operations and activations by number, learnt from the library: the numbers differ between
// versions.
struct abi_ops {
    int none, view, reshape, transpose, permute; // move no data
    int mul_mat_id, add_id, glu, unary, sqr, mul, add, cont, scale, clamp, get_rows, repeat;
    int unary_silu, unary_gelu, unary_relu, unary_tanh, unary_sigmoid;
    int glu_swiglu, glu_geglu, glu_reglu, glu_swiglu_oai;
    int glu_swiglu_clamp; // -1 where the library has none
    int swiglu_clamp_at;  // which of op_params is its limit
};

extern struct abi_library lib;
extern struct abi_ops ops;
extern const struct abi_layout *layout;

// Load the table of functions from the library (already in the process), choose the layout, check
// both. Returns 0, or -1 with a sentence in `why`.
int abi_open(const char *library_path, char *why, size_t why_size);

// A parameter of an operation that is a float.
static inline float abi_parameter(const struct ggml_tensor *tensor, int index) {
    float value;
    memcpy(&value, &tensor->op_params[index], sizeof value);
    return value;
}

static inline void *abi_word(const void *object, int index) {
    return ((void *const *)object)[index];
}

#endif

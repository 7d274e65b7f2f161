// Resolve ggml's functions, pick the struct layout of its backend API version, and check both at
// run time.

#define _GNU_SOURCE // dladdr
#include "abi.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

struct abi_library lib;
struct abi_ops ops;
const struct abi_layout *layout;

// One row per backend API version. Words count from 0; see ggml-backend-impl.h of that version.
#define BUFFER                                                                                     \
    {.free_buffer = 0,                                                                             \
     .get_base = 1,                                                                                \
     .init_tensor = 2,                                                                             \
     .memset_tensor = 3,                                                                           \
     .set_tensor = 4,                                                                              \
     .get_tensor = 5,                                                                              \
     .clear = 9,                                                                                   \
     .buft = 11,                                                                                   \
     .context = 12,                                                                                \
     .size = 13,                                                                                   \
     .usage = 14}
#define BACKEND                                                                                    \
    {.guid = 0, .get_name = 1, .free = 2, .graph_compute = 13, .graph_optimize = 16, .device = 17}
#define DEVICE                                                                                     \
    {.get_name = 0,                                                                                \
     .get_description = 1,                                                                         \
     .get_memory = 2,                                                                              \
     .get_type = 3,                                                                                \
     .get_props = 4,                                                                               \
     .init_backend = 5,                                                                            \
     .get_buffer_type = 6,                                                                         \
     .supports_op = 9,                                                                             \
     .supports_buft = 10,                                                                          \
     .registry = 15}
#define REGISTRY {.get_name = 1, .get_device_count = 2, .get_device = 3}

static const struct abi_layout LAYOUTS[] = {
    {
        .api_version = 2, // ggml 0.24; tried with xllamacpp 2026.9.11063
        .buft = {.get_name = 0, .alloc_buffer = 1, .get_alignment = 2, .is_host = 5, .device = 6},
        .buffer = BUFFER,
        .backend = BACKEND,
        .device = DEVICE,
        .registry = REGISTRY,
    },
    {
        .api_version = 3, // ggml 0.26, the pinned one
        .buft = {.get_name = 0, .alloc_buffer = 1, .get_alignment = 3, .is_host = 7, .device = 8},
        .buffer = BUFFER,
        .backend = BACKEND,
        .device = DEVICE,
        .registry = REGISTRY,
    },
};

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

#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition))                                                                          \
            return fail("the library's structs differ from the known layout: " #condition);        \
    } while (0)

static int resolve(const char *path) {
    void *handle = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    if (!handle) return fail("%s is not loaded in this process", path);
    void *address;
#define X(result, name, arguments)                                                                 \
    address = dlsym(handle, #name);                                                                \
    if (!address) return fail("the library does not export %s", #name);                            \
    memcpy(&lib.name, &address, sizeof address);
    ABI_FUNCTIONS(X)
#undef X
#define X(result, name, arguments)                                                                 \
    address = dlsym(handle, #name);                                                                \
    memcpy(&lib.name, &address, sizeof address);
    ABI_OPTIONAL_FUNCTIONS(X)
#undef X
    return 0;
}

// Number of an operation, from a tensor that the library made for it; -1 when its name is not the
// expected one.
static int op_of(const struct ggml_tensor *tensor, const char *name) {
    return tensor && strcmp(lib.ggml_op_name(tensor->op), name) == 0 ? tensor->op : -1;
}

static int learn_ops(context_p ctx) {
    // a [4, 3 picks, 2 tokens] like one inside the experts; w [4, 5] for each of 6 experts; ids [3,
    // 2]
    tensor_p a = lib.ggml_new_tensor_3d(ctx, ABI_TYPE_F32, 4, 3, 2);
    tensor_p b = lib.ggml_new_tensor_3d(ctx, ABI_TYPE_F32, 4, 3, 2);
    tensor_p w = lib.ggml_new_tensor_3d(ctx, ABI_TYPE_F32, 4, 5, 6);
    tensor_p ids = lib.ggml_new_tensor_3d(ctx, ABI_TYPE_I32, 3, 2, 1);
    tensor_p bias = lib.ggml_new_tensor_3d(ctx, ABI_TYPE_F32, 4, 6, 1);

    lib.ggml_set_name(w, "blk.7.probe");
    EXPECT(strcmp(w->name, "blk.7.probe") == 0);
    EXPECT(w->type == ABI_TYPE_F32 && ids->type == ABI_TYPE_I32);
    EXPECT(w->ne[0] == 4 && w->ne[1] == 5 && w->ne[2] == 6 && w->ne[3] == 1);
    EXPECT(w->nb[0] == 4 && w->nb[1] == 16 && w->nb[2] == 80);
    EXPECT(lib.ggml_nbytes(w) == 480);

    tensor_p product = lib.ggml_mul_mat_id(ctx, w, a, ids);
    EXPECT(product->src[0] == w && product->src[1] == a && product->src[2] == ids &&
           !product->src[3]);
    EXPECT(product->ne[0] == 5 && product->ne[1] == 3 && product->ne[2] == 2);
    tensor_p view = lib.ggml_view_2d(ctx, a, 4, 2, a->nb[2], 16);
    EXPECT(view->view_src == a && view->view_offs == 16 && view->nb[1] == 48);
    EXPECT(!a->buffer && !a->extra);
    tensor_p oai = lib.ggml_swiglu_oai(ctx, a, b, 1.5f, 7.0f);
    EXPECT(abi_parameter(oai, 2) == 1.5f && abi_parameter(oai, 3) == 7.0f);

    ops.none = op_of(a, "NONE");
    ops.view = op_of(view, "VIEW");
    ops.reshape = op_of(lib.ggml_reshape_3d(ctx, a, 12, 2, 1), "RESHAPE");
    ops.transpose = op_of(lib.ggml_transpose(ctx, a), "TRANSPOSE");
    ops.permute = op_of(lib.ggml_permute(ctx, a, 0, 2, 1, 3), "PERMUTE");
    ops.mul_mat_id = op_of(product, "MUL_MAT_ID");
    ops.add_id = op_of(lib.ggml_add_id(ctx, a, bias, ids), "ADD_ID");
    ops.glu = op_of(oai, "GLU");
    ops.unary = op_of(lib.ggml_silu(ctx, a), "UNARY");
    ops.sqr = op_of(lib.ggml_sqr(ctx, a), "SQR");
    ops.mul = op_of(lib.ggml_mul(ctx, a, b), "MUL");
    ops.add = op_of(lib.ggml_add(ctx, a, b), "ADD");
    ops.cont = op_of(lib.ggml_cont(ctx, view), "CONT");
    EXPECT(ops.none >= 0 && ops.view >= 0 && ops.reshape >= 0 && ops.transpose >= 0 &&
           ops.permute >= 0);
    EXPECT(ops.mul_mat_id >= 0 && ops.add_id >= 0 && ops.glu >= 0 && ops.unary >= 0 &&
           ops.sqr >= 0);
    EXPECT(ops.mul >= 0 && ops.add >= 0 && ops.cont >= 0);

    tensor_p scaled = lib.ggml_scale(ctx, a, 1.5f), clamped = lib.ggml_clamp(ctx, a, -2.5f, 7.0f);
    EXPECT(abi_parameter(scaled, 0) == 1.5f && abi_parameter(scaled, 1) == 0);
    EXPECT(abi_parameter(clamped, 0) == -2.5f && abi_parameter(clamped, 1) == 7.0f);
    ops.scale = op_of(scaled, "SCALE");
    ops.clamp = op_of(clamped, "CLAMP");
    tensor_p numbers = lib.ggml_new_tensor_3d(ctx, ABI_TYPE_F32, 1, 6, 2);
    tensor_p chosen = lib.ggml_get_rows(ctx, numbers, ids);
    EXPECT(chosen->src[0] == numbers && chosen->src[1] == ids && chosen->ne[1] == 3);
    ops.get_rows = op_of(chosen, "GET_ROWS");
    ops.repeat = op_of(lib.ggml_repeat_4d(ctx, numbers, 1, 6, 4, 1), "REPEAT");
    EXPECT(ops.scale >= 0 && ops.clamp >= 0 && ops.get_rows >= 0 && ops.repeat >= 0);

    ops.unary_silu = lib.ggml_get_unary_op(lib.ggml_silu(ctx, a));
    ops.unary_gelu = lib.ggml_get_unary_op(lib.ggml_gelu(ctx, a));
    ops.unary_relu = lib.ggml_get_unary_op(lib.ggml_relu(ctx, a));
    ops.glu_swiglu = lib.ggml_get_glu_op(lib.ggml_swiglu_split(ctx, a, b));
    ops.glu_geglu = lib.ggml_get_glu_op(lib.ggml_geglu_split(ctx, a, b));
    ops.glu_reglu = lib.ggml_get_glu_op(lib.ggml_reglu_split(ctx, a, b));
    ops.glu_swiglu_oai = lib.ggml_get_glu_op(oai);
    ops.unary_tanh = lib.ggml_get_unary_op(lib.ggml_tanh(ctx, a));
    ops.unary_sigmoid = lib.ggml_get_unary_op(lib.ggml_sigmoid(ctx, a));
    ops.glu_swiglu_clamp = -1;
    if (lib.ggml_swiglu_clamp) {
        tensor_p limited = lib.ggml_swiglu_clamp(ctx, a, b, 7.0f);
        ops.glu_swiglu_clamp = lib.ggml_get_glu_op(limited);
        ops.swiglu_clamp_at = 0;
        for (int i = 1; i < 8; i++)
            if (abi_parameter(limited, i) == 7.0f) ops.swiglu_clamp_at = i;
        EXPECT(ops.swiglu_clamp_at > 0);
    }
    return 0;
}

// Call a word of an object as a function that takes the object.
typedef const char *(*name_call)(void *);
typedef void *(*pointer_call)(void *);
typedef size_t (*size_call)(void *);
typedef bool (*bool_call)(void *);
typedef int (*int_call)(void *);
#define CALL(kind, object, index) ((kind)abi_word(object, index))(object)

// Is this word the address of something in the library? Asked before anything is called.
static bool in_library(const void *object, int index) {
    Dl_info word, library;
    void *known;
    memcpy(&known, &lib.ggml_init, sizeof known);
    return abi_word(object, index) && dladdr(abi_word(object, index), &word) &&
           dladdr(known, &library) && word.dli_fbase == library.dli_fbase;
}

static int compare_with_cpu(void *registry, void *device) {
    const struct abi_layout *l = layout;
    EXPECT(in_library(registry, l->registry.get_name) &&
           in_library(registry, l->registry.get_device_count) &&
           in_library(registry, l->registry.get_device));
    EXPECT(CALL(name_call, registry, l->registry.get_name) == lib.ggml_backend_reg_name(registry));
    EXPECT(CALL(size_call, registry, l->registry.get_device_count) ==
           lib.ggml_backend_reg_dev_count(registry));

    EXPECT(abi_word(device, l->device.registry) == lib.ggml_backend_dev_backend_reg(device));
    EXPECT(
        in_library(device, l->device.get_name) && in_library(device, l->device.get_description) &&
        in_library(device, l->device.get_memory) && in_library(device, l->device.get_type) &&
        in_library(device, l->device.get_props) && in_library(device, l->device.init_backend) &&
        in_library(device, l->device.get_buffer_type) &&
        in_library(device, l->device.supports_op) && in_library(device, l->device.supports_buft));
    EXPECT(CALL(name_call, device, l->device.get_name) == lib.ggml_backend_dev_name(device));
    EXPECT(CALL(name_call, device, l->device.get_description) ==
           lib.ggml_backend_dev_description(device));
    EXPECT(CALL(int_call, device, l->device.get_type) == lib.ggml_backend_dev_type(device));
    void *buft = lib.ggml_backend_dev_buffer_type(device);
    EXPECT(CALL(pointer_call, device, l->device.get_buffer_type) == buft);
    EXPECT(((bool (*)(void *, void *))abi_word(device, l->device.supports_buft))(device, buft));

    EXPECT(in_library(buft, l->buft.get_name) && in_library(buft, l->buft.alloc_buffer) &&
           in_library(buft, l->buft.get_alignment) && in_library(buft, l->buft.is_host));
    EXPECT(CALL(name_call, buft, l->buft.get_name) == lib.ggml_backend_buft_name(buft));
    EXPECT(CALL(size_call, buft, l->buft.get_alignment) ==
           lib.ggml_backend_buft_get_alignment(buft));
    EXPECT(CALL(bool_call, buft, l->buft.is_host) && lib.ggml_backend_buft_is_host(buft));
    EXPECT(abi_word(buft, l->buft.device) == lib.ggml_backend_buft_get_device(buft));

    void *buffer = lib.ggml_backend_buft_alloc_buffer(buft, 4096);
    EXPECT(buffer);
    lib.ggml_backend_buffer_set_usage(buffer, ABI_USAGE_COMPUTE);
    EXPECT(in_library(buffer, l->buffer.free_buffer) && in_library(buffer, l->buffer.get_base) &&
           in_library(buffer, l->buffer.memset_tensor) &&
           in_library(buffer, l->buffer.set_tensor) && in_library(buffer, l->buffer.get_tensor) &&
           in_library(buffer, l->buffer.clear));
    EXPECT(CALL(pointer_call, buffer, l->buffer.get_base) ==
           lib.ggml_backend_buffer_get_base(buffer));
    EXPECT(abi_word(buffer, l->buffer.buft) == buft);
    EXPECT((size_t)abi_word(buffer, l->buffer.size) == lib.ggml_backend_buffer_get_size(buffer));
    EXPECT((int)(intptr_t)abi_word(buffer, l->buffer.usage) == ABI_USAGE_COMPUTE);
    lib.ggml_backend_buffer_free(buffer);

    void *backend = lib.ggml_backend_dev_init(device, NULL);
    EXPECT(backend);
    EXPECT(in_library(backend, l->backend.get_name) && in_library(backend, l->backend.free) &&
           in_library(backend, l->backend.graph_compute));
    EXPECT(abi_word(backend, l->backend.device) == device);
    EXPECT(CALL(name_call, backend, l->backend.get_name) == lib.ggml_backend_name(backend));
    lib.ggml_backend_free(backend);
    return 0;
}

int abi_open(const char *library_path, char *why, size_t why_size) {
    reason = why;
    reason_size = why_size;
    if (resolve(library_path)) return -1;

    void *registry = lib.ggml_backend_reg_by_name("CPU");
    if (!registry) return fail("the library has no CPU backend");
    int version = *(int *)registry;
    layout = NULL;
    for (size_t i = 0; i < sizeof LAYOUTS / sizeof *LAYOUTS; i++)
        if (LAYOUTS[i].api_version == version) layout = &LAYOUTS[i];
    if (!layout)
        return fail("ggml backend API version %d is unknown to this device; "
                    "install the pinned xllamacpp or add a row to abi.c",
                    version);
    if (compare_with_cpu(registry, lib.ggml_backend_reg_dev_get(registry, 0))) return -1;

    context_p ctx = lib.ggml_init((struct ggml_init_params){.mem_size = 1 << 20, .no_alloc = true});
    if (!ctx) return fail("no memory for the self-test");
    int result = learn_ops(ctx);
    lib.ggml_free(ctx);
    return result;
}

// What bench/wasm_rows.py adds to llama.cpp's own sources: its dot products behind three exports.
#include <stdint.h>
#include <stdlib.h>

#include "ggml-cpu-impl.h"
#include "quants.h"
#include "simd-mappings.h"
#include "vec.h"

#define EXPORT(name) __attribute__((export_name(#name)))

float ggml_table_f32_f16[1 << 16];

typedef void (*dot_t)(int, float *, size_t, const void *, size_t, const void *, size_t, int);

static const struct {
    enum ggml_type type, x_type;
    void *dot;
} table[] = {
    {GGML_TYPE_F32, GGML_TYPE_F32, (void *)ggml_vec_dot_f32},
    {GGML_TYPE_F16, GGML_TYPE_F16, (void *)ggml_vec_dot_f16},
    {GGML_TYPE_BF16, GGML_TYPE_BF16, (void *)ggml_vec_dot_bf16},
    {GGML_TYPE_Q4_0, GGML_TYPE_Q8_0, (void *)ggml_vec_dot_q4_0_q8_0},
    {GGML_TYPE_Q4_1, GGML_TYPE_Q8_1, (void *)ggml_vec_dot_q4_1_q8_1},
    {GGML_TYPE_Q5_0, GGML_TYPE_Q8_0, (void *)ggml_vec_dot_q5_0_q8_0},
    {GGML_TYPE_Q5_1, GGML_TYPE_Q8_1, (void *)ggml_vec_dot_q5_1_q8_1},
    {GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, (void *)ggml_vec_dot_q8_0_q8_0},
    {GGML_TYPE_IQ4_NL, GGML_TYPE_Q8_0, (void *)ggml_vec_dot_iq4_nl_q8_0},
    {GGML_TYPE_MXFP4, GGML_TYPE_Q8_0, (void *)ggml_vec_dot_mxfp4_q8_0},
    {GGML_TYPE_NVFP4, GGML_TYPE_Q8_0, (void *)ggml_vec_dot_nvfp4_q8_0},
    {GGML_TYPE_Q2_K, GGML_TYPE_Q8_K, (void *)ggml_vec_dot_q2_K_q8_K},
    {GGML_TYPE_Q3_K, GGML_TYPE_Q8_K, (void *)ggml_vec_dot_q3_K_q8_K},
    {GGML_TYPE_Q4_K, GGML_TYPE_Q8_K, (void *)ggml_vec_dot_q4_K_q8_K},
    {GGML_TYPE_Q5_K, GGML_TYPE_Q8_K, (void *)ggml_vec_dot_q5_K_q8_K},
    {GGML_TYPE_Q6_K, GGML_TYPE_Q8_K, (void *)ggml_vec_dot_q6_K_q8_K},
    {GGML_TYPE_IQ4_XS, GGML_TYPE_Q8_K, (void *)ggml_vec_dot_iq4_xs_q8_K},
    {GGML_TYPE_IQ2_XXS, GGML_TYPE_Q8_K, (void *)ggml_vec_dot_iq2_xxs_q8_K},
    {GGML_TYPE_IQ2_XS, GGML_TYPE_Q8_K, (void *)ggml_vec_dot_iq2_xs_q8_K},
    {GGML_TYPE_IQ2_S, GGML_TYPE_Q8_K, (void *)ggml_vec_dot_iq2_s_q8_K},
    {GGML_TYPE_IQ3_XXS, GGML_TYPE_Q8_K, (void *)ggml_vec_dot_iq3_xxs_q8_K},
    {GGML_TYPE_IQ3_S, GGML_TYPE_Q8_K, (void *)ggml_vec_dot_iq3_s_q8_K},
    {GGML_TYPE_IQ1_S, GGML_TYPE_Q8_K, (void *)ggml_vec_dot_iq1_s_q8_K},
    {GGML_TYPE_IQ1_M, GGML_TYPE_Q8_K, (void *)ggml_vec_dot_iq1_m_q8_K},
    {GGML_TYPE_TQ1_0, GGML_TYPE_Q8_K, (void *)ggml_vec_dot_tq1_0_q8_K},
    {GGML_TYPE_TQ2_0, GGML_TYPE_Q8_K, (void *)ggml_vec_dot_tq2_0_q8_K},
};

static int find(int type) {
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        if ((int)table[i].type == type) return (int)i;
    abort();
}

EXPORT(take) void *take(size_t size_bytes) { return malloc(size_bytes); }

// The type in which x is wanted.
EXPORT(x_type) int x_type(int type) { return (int)table[find(type)].x_type; }

EXPORT(to_x) void to_x(int type, const float *x, int n, void *out) {
    for (int i = 0; i < 1 << 16; i++) { // what ggml_cpu_init() does
        const ggml_fp16_t half = (ggml_fp16_t)i;
        ggml_table_f32_f16[i] = GGML_COMPUTE_FP16_TO_FP32(half);
    }
    switch (table[find(type)].x_type) {
    case GGML_TYPE_Q8_0: quantize_row_q8_0(x, out, n); return;
    case GGML_TYPE_Q8_1: quantize_row_q8_1(x, out, n); return;
    case GGML_TYPE_Q8_K: quantize_row_q8_K(x, out, n); return;
    case GGML_TYPE_F16:
        for (int i = 0; i < n; i++) ((ggml_fp16_t *)out)[i] = GGML_COMPUTE_FP32_TO_FP16(x[i]);
        return;
    case GGML_TYPE_BF16:
        for (int i = 0; i < n; i++) ((ggml_bf16_t *)out)[i] = GGML_FP32_TO_BF16(x[i]);
        return;
    default: memcpy(out, x, (size_t)n * 4);
    }
}

EXPORT(products)
void products(int type, int n, size_t rows, const char *w, size_t row_bytes, size_t tokens,
              const char *x, size_t x_bytes, float *y) {
    const dot_t dot = (dot_t)table[find(type)].dot;
    for (size_t r = 0; r < rows; r++)
        for (size_t t = 0; t < tokens; t++)
            dot(n, y + t, 0, w + r * row_bytes, 0, x + t * x_bytes, 0, 1);
}

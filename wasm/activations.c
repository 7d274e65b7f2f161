// Activations: f32 rows to int8 blocks and back to the forms in which they travel and are
// multiplied.
#include "kernel.h"

enum { MAX_BLOCK = 256 };
// Below, a block counts as zero, so that its scale and 1 / scale stay normal numbers.
static const float MIN_AMAX = 0x1p-100f;

// Round to nearest even by adding and taking off 1.5 * 2^23; exact for |x| < 2^22.
INLINE float round_even(float x) { return (x + 0x1.8p23f) - 0x1.8p23f; }

float quantise_block(const float *x, size_t count, int8_t *ints) {
    const float amax = bits_to_f32(max_magnitude(x, count));
    if (!f32_is_finite(amax)) return bits_to_f32(0x7fc00000u);
    if (amax < MIN_AMAX) {
        __builtin_memset(ints, 0, count);
        return 0;
    }
    const float scale = amax / 127.0f, inverse = 1.0f / scale;
    for (size_t i = 0; i < count; i++) ints[i] = (int8_t)(int32_t)round_even(x[i] * inverse);
    return scale;
}

uint64_t activation_bytes(ActivationKind kind, uint64_t cols) {
    switch (kind) {
    case WANTS_Q8A32: return round_up(cols / 32 * sizeof(Block32), 16);
    case WANTS_Q8A256: return round_up(cols / 256 * sizeof(Block256), 16);
    default: return round_up(cols, F32_PAD) * 4;
    }
}

static void arrange_block32(float scale, const int8_t *ints, Block32 *out) {
    int32_t sum = 0;
    for (int i = 0; i < 32; i++) sum += ints[i];
    for (int i = 0; i < 8; i++) out->quads[i] = quad_of(ints + 4 * i);
    out->scale = scale;
    out->sum = sum;
}

static void arrange_block256(float scale, const int8_t *ints, Block256 *out) {
    for (int j = 0; j < 16; j++) {
        int32_t sum = 0;
        for (int i = 0; i < 16; i++) sum += ints[16 * j + i];
        out->sums16[j] = (int16_t)sum;
    }
    for (int j = 0; j < 8; j++)
        out->sums32[j] = (int16_t)(out->sums16[2 * j] + out->sums16[2 * j + 1]);
    for (int i = 0; i < 64; i++) out->quads[i] = quad_of(ints + 4 * i);
    out->scale = scale;
}

int32_t arrange_f32(const float *x, size_t cols, ActivationKind kind, uint8_t *out) {
    int8_t ints[MAX_BLOCK];
    if (kind == WANTS_F32) {
        if (max_magnitude(x, cols) > 0x7f7fffffu) return EXPERT_NON_FINITE;
        __builtin_memcpy(out, x, cols * 4);
        __builtin_memset(out + cols * 4, 0, ((size_t)round_up(cols, F32_PAD) - cols) * 4);
        return EXPERT_OK;
    }
    const size_t block = kind == WANTS_Q8A32 ? 32 : 256;
    for (size_t b = 0; b < cols / block; b++) {
        const float scale = quantise_block(x + b * block, block, ints);
        if (!f32_is_finite(scale)) return EXPERT_NON_FINITE;
        if (kind == WANTS_Q8A32)
            arrange_block32(scale, ints, (Block32 *)(void *)out + b);
        else
            arrange_block256(scale, ints, (Block256 *)(void *)out + b);
    }
    return EXPERT_OK;
}

int32_t arrange_q8(const uint8_t *scales, const int8_t *ints, size_t cols, ActivationKind kind,
                   uint8_t *out) {
    const size_t block = kind == WANTS_Q8A32 ? 32 : 256;
    int least = 0;
    for (size_t c = 0; c < cols; c++) least = ints[c] < least ? ints[c] : least;
    if (least == -128) return EXPERT_BAD_VALUE;
    for (size_t b = 0; b < cols / block; b++) {
        float scale;
        __builtin_memcpy(&scale, scales + 4 * b, 4);
        if (!f32_is_finite(scale)) return EXPERT_NON_FINITE;
        if (scale < 0) return EXPERT_BAD_VALUE;
        if (kind == WANTS_Q8A32)
            arrange_block32(scale, ints + b * block, (Block32 *)(void *)out + b);
        else
            arrange_block256(scale, ints + b * block, (Block256 *)(void *)out + b);
    }
    return EXPERT_OK;
}

uint16_t f32_to_f16(float value) {
    const uint32_t bits = f32_to_bits(value), sign = bits >> 16 & 0x8000,
                   magnitude = bits & 0x7fffffff;
    if (magnitude >= 0x7f800000)
        return (uint16_t)(sign | 0x7c00 | (magnitude > 0x7f800000 ? 0x200 : 0)); // inf, NaN
    if (magnitude >= 0x477ff000)
        return (uint16_t)(sign | 0x7c00);              // 65520 and above round to infinity
    if (magnitude < 0x33000001) return (uint16_t)sign; // 2^-25 and below round to zero
    uint32_t mantissa = magnitude, shift = 13;
    if (magnitude < 0x38800000) { // a subnormal f16: the hidden bit becomes visible
        shift = 13 + (113 - (magnitude >> 23));
        mantissa = (magnitude & 0x7fffff) | 0x800000;
    } else {
        mantissa -= 112u << 23; // change of exponent bias
    }
    const uint32_t half = (1u << (shift - 1)) - 1 +
                          (mantissa >> shift & 1); // nearest, ties to even; a carry is right
    return (uint16_t)(sign | (mantissa + half) >> shift);
}

__attribute__((noinline)) static void widen(const uint16_t *in, size_t count, float *out) {
    for (size_t i = 0; i < count; i++) out[i] = f16_to_f32(in[i]);
}

EXPERT_EXPORT(expert_f16_to_f32)
void expert_f16_to_f32(const uint16_t *in, size_t count, float *out) {
    const FloatMode mode = plain_floats();
    widen(in, count, out);
    restore_floats(mode);
}

EXPERT_EXPORT(expert_f32_to_f16)
void expert_f32_to_f16(const float *in, size_t count, uint16_t *out) {
    for (size_t i = 0; i < count; i++) out[i] = f32_to_f16(in[i]);
}

// ---- how activations travel

size_t encoded_row_bytes(size_t encoding, size_t hidden_dim) {
    switch (encoding) {
    case EXPERT_X_F32: return hidden_dim * 4;
    case EXPERT_X_F16: return hidden_dim * 2;
    case EXPERT_X_Q8A32: return hidden_dim % 32 ? 0 : hidden_dim / 32 * 4 + hidden_dim;
    case EXPERT_X_Q8A256: return hidden_dim % 256 ? 0 : hidden_dim / 256 * 4 + hidden_dim;
    default: return 0;
    }
}

static int32_t encode_row(const float *x, size_t hidden_dim, size_t encoding, uint8_t *out) {
    if (max_magnitude(x, hidden_dim) > 0x7f7fffffu) return EXPERT_NON_FINITE;
    if (encoding == EXPERT_X_F32) {
        __builtin_memcpy(out, x, hidden_dim * 4);
    } else if (encoding == EXPERT_X_F16) {
        for (size_t c = 0; c < hidden_dim; c++) {
            const uint16_t half = f32_to_f16(x[c]);
            if (!f16_is_finite(half)) return EXPERT_NON_FINITE; // does not fit f16
            __builtin_memcpy(out + 2 * c, &half, 2);
        }
    } else {
        const size_t block = encoding == EXPERT_X_Q8A32 ? 32 : 256, num_blocks = hidden_dim / block;
        for (size_t b = 0; b < num_blocks; b++) {
            const float scale =
                quantise_block(x + b * block, block, (int8_t *)out + 4 * num_blocks + b * block);
            __builtin_memcpy(out + 4 * b, &scale, 4);
        }
    }
    return EXPERT_OK;
}

__attribute__((noinline)) static int32_t encode_rows(const float *x, size_t num_tokens,
                                                     size_t hidden_dim, size_t encoding,
                                                     size_t row_bytes, uint8_t *out) {
    for (size_t t = 0; t < num_tokens; t++) {
        const int32_t error =
            encode_row(x + t * hidden_dim, hidden_dim, encoding, out + t * row_bytes);
        if (error) return error;
    }
    return EXPERT_OK;
}

EXPERT_EXPORT(expert_encode_x)
ptrdiff_t expert_encode_x(const float *x, size_t num_tokens, size_t hidden_dim, size_t encoding,
                          uint8_t *out, size_t out_bytes) {
    if (num_tokens > EXPERT_MAX_TOKENS || hidden_dim == 0 || hidden_dim > EXPERT_MAX_DIM)
        return EXPERT_BAD_SIZE;
    const size_t row_bytes = encoded_row_bytes(encoding, hidden_dim);
    if (row_bytes == 0 || out_bytes / row_bytes < num_tokens) return EXPERT_BAD_SIZE;
    const FloatMode mode = plain_floats();
    const int32_t error = encode_rows(x, num_tokens, hidden_dim, encoding, row_bytes, out);
    restore_floats(mode);
    return error ? error : (ptrdiff_t)(num_tokens * row_bytes);
}

// R with 2^(R-1) <= max|x| < 2^R, from the bits; 0 for a row of zeros.
static int row_exponent(uint32_t magnitude) {
    if (magnitude == 0) return 0;
    const int exponent =
        (int)(magnitude >> 23) - 126; // a subnormal gives -126 or less and is clamped anyway
    return exponent < MIN_ROW_EXPONENT   ? MIN_ROW_EXPONENT
           : exponent > MAX_ROW_EXPONENT ? MAX_ROW_EXPONENT
                                         : exponent;
}

EXPERT_EXPORT(expert_row_exponents)
int32_t expert_row_exponents(const float *x, size_t num_tokens, size_t hidden_dim, int16_t *out) {
    for (size_t t = 0; t < num_tokens; t++) {
        const uint32_t magnitude = max_magnitude(x + t * hidden_dim, hidden_dim);
        if (magnitude > 0x7f7fffffu) return EXPERT_NON_FINITE;
        out[t] = (int16_t)row_exponent(magnitude);
    }
    return EXPERT_OK;
}

// Partials: outputs on the grid, int64 sums, narrowed for the wire and widened again (CONTRACT.md "Wire
// form").
#include "kernel.h"

// n = rint(p / step) by adding and taking off 1.5 * 2^52; the low bits of that sum are n itself.
int32_t add_to_grid(const float *p, size_t count, const double *scale, int row_exponent,
                    int64_t *sums) {
    const double row_scale = power_of_two(-row_exponent), magic = 0x1.8p52;
    const int64_t magic_bits = 0x4338000000000000;
    int bad = 0;
    for (size_t c = 0; c < count; c++) {
        union {
            double d;
            int64_t i;
        } shifted = {(double)p[c] * (scale[c] * row_scale) + magic};
        const double n = shifted.d - magic;
        bad |= !(__builtin_fabs(n) < 0x1p51);
        sums[c] = (int64_t)((uint64_t)sums[c] + (uint64_t)(shifted.i - magic_bits));
    }
    if (!bad) return EXPERT_OK;
    for (size_t c = 0; c < count; c++)
        if (!f32_is_finite(p[c])) return EXPERT_NON_FINITE;
    return EXPERT_GRID_OVERFLOW;
}

static const size_t ROW_ALIGN = 8;

INLINE size_t padded_row(size_t hidden_dim, size_t width) {
    return (size_t)round_up(hidden_dim * width, ROW_ALIGN);
}

static size_t narrowest(const int64_t *row, size_t hidden_dim, size_t grid) {
    uint64_t bits = 0; // v ^ v>>63 has its highest bit where the magnitude has it
    for (size_t c = 0; c < hidden_dim; c++) bits |= (uint64_t)(row[c] ^ row[c] >> 63);
    if (grid == EXPERT_GRID_X16 && bits <= INT16_MAX) return 2;
    return bits <= INT32_MAX ? 4 : 8;
}

EXPERT_EXPORT(expert_encode_partial)
ptrdiff_t expert_encode_partial(const int64_t *sums, size_t num_tokens, size_t hidden_dim,
                                size_t grid, uint8_t *widths, uint8_t *out, size_t out_bytes) {
    if (num_tokens > EXPERT_MAX_TOKENS || hidden_dim == 0 || hidden_dim > EXPERT_MAX_DIM)
        return EXPERT_BAD_SIZE;
    if (grid > EXPERT_GRID_X16) return EXPERT_BAD_VALUE;
    size_t used = 0;
    for (size_t t = 0; t < num_tokens; t++, sums += hidden_dim) {
        const size_t width = narrowest(sums, hidden_dim, grid),
                     row_bytes = padded_row(hidden_dim, width);
        if (out_bytes - used < row_bytes) return EXPERT_BAD_SIZE;
        uint8_t *row = out + used;
        __builtin_memset(row + row_bytes - ROW_ALIGN, 0, ROW_ALIGN);
        if (width == 2) {
            for (size_t c = 0; c < hidden_dim; c++) {
                const int16_t v = (int16_t)sums[c];
                __builtin_memcpy(row + 2 * c, &v, 2);
            }
        } else if (width == 4) {
            for (size_t c = 0; c < hidden_dim; c++) {
                const int32_t v = (int32_t)sums[c];
                __builtin_memcpy(row + 4 * c, &v, 4);
            }
        } else {
            __builtin_memcpy(row, sums, hidden_dim * 8);
        }
        widths[t] = (uint8_t)width;
        used += row_bytes;
    }
    return (ptrdiff_t)used;
}

EXPERT_EXPORT(expert_add_partial)
int32_t expert_add_partial(const uint8_t *widths, const uint8_t *data, size_t data_bytes,
                           size_t num_tokens, size_t hidden_dim, size_t grid, int64_t *sums) {
    if (num_tokens > EXPERT_MAX_TOKENS || hidden_dim == 0 || hidden_dim > EXPERT_MAX_DIM)
        return EXPERT_BAD_SIZE;
    if (grid > EXPERT_GRID_X16) return EXPERT_BAD_VALUE;
    uint64_t needed = 0;
    for (size_t t = 0; t < num_tokens; t++) {
        if (widths[t] != 8 && widths[t] != 4 && !(widths[t] == 2 && grid == EXPERT_GRID_X16))
            return EXPERT_BAD_VALUE;
        needed += padded_row(hidden_dim, widths[t]);
    }
    if (needed != data_bytes) return EXPERT_BAD_SIZE;
    for (size_t t = 0; t < num_tokens; t++, sums += hidden_dim) {
        for (size_t c = 0; c < hidden_dim;
             c++) { // unsigned: a liar's sum may wrap, it may not be undefined
            int16_t v16;
            int32_t v32;
            int64_t v;
            if (widths[t] == 2) {
                __builtin_memcpy(&v16, data + 2 * c, 2);
                v = v16;
            } else if (widths[t] == 4) {
                __builtin_memcpy(&v32, data + 4 * c, 4);
                v = v32;
            } else {
                __builtin_memcpy(&v, data + 8 * c, 8);
            }
            sums[c] = (int64_t)((uint64_t)sums[c] + (uint64_t)v);
        }
        data += padded_row(hidden_dim, widths[t]);
    }
    return EXPERT_OK;
}

int32_t grid_scales(size_t grid, const int32_t *layer_exponents, size_t hidden_dim, double *scale) {
    if (grid > EXPERT_GRID_X16) return EXPERT_BAD_VALUE;
    const int bits = grid == EXPERT_GRID_X32 ? GRID_BITS_X32 : GRID_BITS_X16;
    for (size_t c = 0; c < hidden_dim; c++) {
        const int32_t exponent = layer_exponents[grid == EXPERT_GRID_X32 ? 0 : c];
        if (exponent < -MAX_LAYER_EXPONENT || exponent > MAX_LAYER_EXPONENT)
            return EXPERT_BAD_VALUE;
        scale[c] = power_of_two(bits - exponent);
    }
    return EXPERT_OK;
}

__attribute__((noinline)) static int32_t decode_rows(const int64_t *sums, size_t num_tokens,
                                                     size_t hidden_dim,
                                                     const int16_t *row_exponents, size_t grid,
                                                     const int32_t *layer_exponents, float *y) {
    const int bits = grid == EXPERT_GRID_X32 ? GRID_BITS_X32 : GRID_BITS_X16;
    for (size_t t = 0; t < num_tokens; t++) {
        const int row = row_exponents[t];
        if (row < MIN_ROW_EXPONENT || row > MAX_ROW_EXPONENT) return EXPERT_BAD_VALUE;
        for (size_t c = 0; c < hidden_dim; c++) {
            const int32_t exponent = layer_exponents[grid == EXPERT_GRID_X32 ? 0 : c];
            if (exponent < -MAX_LAYER_EXPONENT || exponent > MAX_LAYER_EXPONENT)
                return EXPERT_BAD_VALUE;
            const float value =
                (float)((double)sums[t * hidden_dim + c] * power_of_two(row + exponent - bits));
            if (!f32_is_finite(value)) return EXPERT_NON_FINITE;
            y[t * hidden_dim + c] = value;
        }
    }
    return EXPERT_OK;
}

EXPERT_EXPORT(expert_decode_sums)
int32_t expert_decode_sums(const int64_t *sums, size_t num_tokens, size_t hidden_dim,
                           const int16_t *row_exponents, size_t grid,
                           const int32_t *layer_exponents, float *y) {
    if (num_tokens > EXPERT_MAX_TOKENS || hidden_dim == 0 || hidden_dim > EXPERT_MAX_DIM)
        return EXPERT_BAD_SIZE;
    if (grid > EXPERT_GRID_X16) return EXPERT_BAD_VALUE;
    const FloatMode mode = plain_floats();
    const int32_t error =
        decode_rows(sums, num_tokens, hidden_dim, row_exponents, grid, layer_exponents, y);
    restore_floats(mode);
    return error;
}

// What F32, F16 and BF16 share: weights without blocks, multiplied as f32.
//
// Eight partial sums per row, one per (column mod 8), then the fixed tree
// ((0+4)+(2+6)) + ((1+5)+(3+7)). A padding column adds +0 to a sum that is never -0, so it changes
// no bit.
//
// The including file says: BYTES of a weight, EXPONENT, the bits that are all set in an infinity or
// NaN, and exponent_bits(p), which of them are; weight(p) -> f32, load8(p) -> f8 (not for scalar).
#include "format.h"

static uint64_t packed_bytes(uint64_t rows, uint64_t cols) {
    return rows * round_up(cols, F32_PAD) * BYTES;
}

static int are_finite(const uint8_t *blocks, size_t count) {
    uint32_t most = 0;
    for (size_t c = 0; c < count; c++) {
        const uint32_t exponent = exponent_bits(blocks + c * BYTES);
        most = exponent > most ? exponent : most;
    }
    return most < EXPONENT;
}

static int32_t pack(const uint8_t *blocks, size_t rows, size_t cols, uint8_t *packed) {
    const size_t padded_cols = (size_t)round_up(cols, F32_PAD);
    for (size_t r = 0; r < rows; r++, blocks += cols * BYTES, packed += padded_cols * BYTES) {
        if (!are_finite(blocks, cols)) return EXPERT_NON_FINITE;
        __builtin_memcpy(packed, blocks, cols * BYTES);
        __builtin_memset(packed + cols * BYTES, 0, (padded_cols - cols) * BYTES);
    }
    return EXPERT_OK;
}

#if defined(EXPERT_SCALAR)
static void rows(const uint8_t *packed, size_t num_rows, size_t cols, const uint8_t *const *x,
                 size_t num_tokens, float *y, size_t stride) {
    const size_t padded_cols = (size_t)round_up(cols, F32_PAD);
    for (size_t r = 0; r < num_rows; r++) {
        const uint8_t *w = packed + r * padded_cols * BYTES;
        for (size_t t = 0; t < num_tokens; t++) {
            const float *a = (const float *)(const void *)x[t];
            float sum[8] = {0};
            for (size_t c = 0; c < cols; c++) sum[c % 8] += weight(w + c * BYTES) * a[c];
            y[t * stride + r] =
                ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
        }
    }
}
#else
// A row is often no longer than a page, where the processor's own prefetcher begins anew: ask for the
// same place in the rows behind these. Not in wasm, which has no prefetch, and no memory behind.
INLINE void prefetch_rows(const uint8_t *w, size_t row_bytes, const int ROWS) {
#if defined(__wasm__)
    (void)w, (void)row_bytes, (void)ROWS;
#else
    EACH (r, ROWS) __builtin_prefetch(w + (size_t)r * row_bytes);
#endif
}

// ROWS rows of T tokens at once: enough independent sums to hide the latency of an addition.
INLINE void tile(const uint8_t *w, size_t row_bytes, const int ROWS, size_t cols,
                 const uint8_t *const *x, const int T, float *y, size_t stride) {
    f8 sum[4][2];
    EACH (r, ROWS)
        EACH (t, T) sum[r][t] = f8_zero();
    for (size_t c = 0; c < cols; c += 8) {
        if (c * BYTES % 64 == 0)
            prefetch_rows(w + (size_t)ROWS * row_bytes + c * BYTES, row_bytes, ROWS);
        f8 weights[4];
        EACH (r, ROWS) weights[r] = load8(w + (size_t)r * row_bytes + c * BYTES);
        EACH (t, T) {
            f8 a = f8_load(x[t] + c * 4);
            EACH (r, ROWS) sum[r][t] = f8_mul_add(sum[r][t], weights[r], a);
        }
    }
    EACH (r, ROWS)
        EACH (t, T) y[(size_t)t * stride + (size_t)r] = f8_sum(sum[r][t]);
}

static void rows(const uint8_t *packed, size_t num_rows, size_t cols, const uint8_t *const *x,
                 size_t num_tokens, float *y, size_t stride) {
    const size_t row_bytes = (size_t)round_up(cols, F32_PAD) * BYTES;
    size_t r = 0;
    for (; r + 4 <= num_rows; r += 4, packed += 4 * row_bytes) {
        size_t t = 0;
        for (; t + 2 <= num_tokens; t += 2)
            tile(packed, row_bytes, 4, cols, x + t, 2, y + t * stride + r, stride);
        if (t < num_tokens) tile(packed, row_bytes, 4, cols, x + t, 1, y + t * stride + r, stride);
    }
    for (; r < num_rows; r++, packed += row_bytes)
        for (size_t t = 0; t < num_tokens; t++)
            tile(packed, row_bytes, 1, cols, x + t, 1, y + t * stride + r, stride);
}
#endif

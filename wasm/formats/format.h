// What every weight format shares: its entry in the table, and the activations it is multiplied
// with.
//
// A new format is one new file in this folder that fills an ExpertFormat, and one line in table.c.
#ifndef EXPERT_FORMAT_H
#define EXPERT_FORMAT_H

#include "../expert.h"

#if !defined(EXPERT_SCALAR)
#include "../simd.h"
#else // the reference: one row at a time, over the blocks as they stand in the GGUF
#define INLINE static inline
enum { LANES = 1 };
typedef struct {
    int8_t v[4];
} Quad;
INLINE Quad quad_of(const int8_t *ints) { return (Quad){{ints[0], ints[1], ints[2], ints[3]}}; }
#endif

typedef enum { WANTS_F32, WANTS_Q8A32, WANTS_Q8A256, NUM_ACTIVATION_KINDS } ActivationKind;

// A row of activations, ready for the dot products. Quads hold the int8 activations, four columns
// each, in the order in which this build multiplies them (simd.h).
typedef struct { // 32 columns
    float scale;
    int32_t sum; // of the 32 ints
    Quad quads[8];
} Block32;

typedef struct { // 256 columns
    float scale;
    int16_t sums32[8];  // sum of the ints of each 32 columns: for formats with a minimum per 32
    int16_t sums16[16]; // of each 16 columns: for formats with an offset per 16
    Quad quads[64];
} Block256;

// WANTS_F32: float [cols rounded up to F32_PAD], the padding zero.
enum { F32_PAD = 8 };

typedef struct {
    int32_t type; // GGMLQuantizationType
    int32_t block_cols, block_bytes;
    ActivationKind wants;
    // Bytes of a packed [rows, cols] matrix.
    uint64_t (*packed_bytes)(uint64_t rows, uint64_t cols);
    // Rearrange [rows, cols]; EXPERT_NON_FINITE when a scale or weight is an infinity or NaN.
    int32_t (*pack)(const uint8_t *blocks, size_t rows, size_t cols, uint8_t *packed);
    // y[t * stride + r] = dot(row r, x[t]) for every r < rows, t < num_tokens. `stride` >= rows
    // rounded up to ROW_PAD: the padding rows are written too.
    void (*rows)(const uint8_t *packed, size_t rows, size_t cols, const uint8_t *const *x,
                 size_t num_tokens, float *y, size_t stride);
} ExpertFormat;

enum { ROW_PAD = 16, MAX_TILE = 4, PREFETCH_AHEAD = LANES == 16 ? 4096 : 2048, PACK_SLACK = 4096 };

extern const ExpertFormat expert_f32, expert_f16, expert_bf16, expert_q8_0, expert_q4_0;
extern const ExpertFormat expert_q4_1, expert_q5_0, expert_q5_1, expert_iq4_nl, expert_mxfp4;
extern const ExpertFormat expert_nvfp4, expert_q2_k, expert_q3_k, expert_q4_k, expert_q5_k;
extern const ExpertFormat expert_q6_k, expert_iq4_xs, expert_iq2_xxs, expert_iq2_xs, expert_iq2_s;
extern const ExpertFormat expert_iq3_xxs, expert_iq3_s, expert_iq1_s, expert_iq1_m, expert_tq1_0;
extern const ExpertFormat expert_tq2_0;
const ExpertFormat *expert_find_format(int32_t type); // null when unknown

INLINE uint64_t round_up(uint64_t n, uint64_t step) { return (n + step - 1) / step * step; }

INLINE uint16_t load_u16(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }
INLINE int f16_is_finite(uint16_t bits) { return (bits & 0x7c00) != 0x7c00; }

INLINE float bits_to_f32(uint32_t bits) {
    union {
        uint32_t u;
        float f;
    } both = {bits};
    return both.f;
}
INLINE uint32_t f32_to_bits(float value) {
    union {
        float f;
        uint32_t u;
    } both = {value};
    return both.u;
}
INLINE int f32_is_finite(float value) { return (f32_to_bits(value) & 0x7f800000u) != 0x7f800000u; }

// Shift the bits into place, then multiply by 2^112, the difference of the exponent biases: exact,
// subnormals included.
INLINE float f16_to_f32(uint16_t bits) {
    if (!f16_is_finite(bits))
        return bits_to_f32((uint32_t)(bits & 0x8000) << 16 | 0x7f800000u |
                           (uint32_t)(bits & 0x3ff) << 13);
    return bits_to_f32((uint32_t)(bits & 0x8000) << 16 | (uint32_t)(bits & 0x7fff) << 13) *
           0x1p112f;
}

// 2^(e - 128), down to the subnormal 2^-128: the product of two powers of two is exact.
INLINE float e8m0_to_f32(uint32_t e) {
    return bits_to_f32((e / 2 + 63) << 23) * bits_to_f32((e - e / 2 + 63) << 23);
}

// What the 4-bit codes of IQ4_NL and IQ4_XS, and of MXFP4 and NVFP4 (doubled), stand for.
static const int8_t iq4_levels[16] __attribute__((unused)) = {
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t fp4_levels[16]
    __attribute__((unused)) = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// Packs [rows, num_blocks] blocks into groups of LANES rows; rows that are missing in the last
// group are zero.
INLINE int32_t pack_groups(const uint8_t *blocks, size_t rows, size_t num_blocks,
                           size_t block_bytes, size_t group_bytes,
                           int (*block_is_finite)(const uint8_t *block),
                           void (*pack_block)(const uint8_t *block, size_t lane, uint8_t *group),
                           uint8_t *packed) {
    for (size_t first = 0; first < rows; first += LANES) {
        for (size_t b = 0; b < num_blocks; b++, packed += group_bytes) {
            if (rows - first < LANES) __builtin_memset(packed, 0, group_bytes);
            for (size_t lane = 0; lane < LANES && first + lane < rows; lane++) {
                const uint8_t *block = blocks + ((first + lane) * num_blocks + b) * block_bytes;
                if (!block_is_finite(block)) return EXPERT_NON_FINITE;
                pack_block(block, lane, packed);
            }
        }
    }
    return EXPERT_OK;
}

#if !defined(EXPERT_SCALAR)
// Ask for the weights some way ahead: with several tokens per group, and at every page, the
// processor's own prefetcher comes too late. wasm has no prefetch, so a byte is read; PACK_SLACK
// keeps that read inside the packed expert.
INLINE void prefetch_group(const uint8_t *group, size_t group_bytes) {
    const uint8_t *ahead = group + PREFETCH_AHEAD;
    EACH (line, (int)(group_bytes / 64) + 1) {
#if defined(__wasm__)
        (void)*(const volatile uint8_t *)(ahead + 64 * line);
#else
        __builtin_prefetch(ahead + 64 * line);
#endif
    }
}

// out[t] = Σ_j number_j sums[t][j], of a block: minimums or scales [count][LANES][2] bytes, and the
// sums of x that go with them.
INLINE void numbers_dot(const uint8_t *numbers, const int are_signed, const int count,
                        const int16_t **sums, const int T, vi *out) {
    PIN(numbers);
    EACH (t, T) {
        PIN(sums[t]);
        out[t] = vi_zero();
    }
    EACH (j, count) {
        const uint8_t *two = numbers + 2 * LANES * j;
        vi pairs = are_signed ? pairs_i8(two) : pairs_u8(two);
        EACH (t, T) {
            out[t] = pairs_dot(out[t], pairs, sums[t] + 2 * j);
            PIN(out[t]);
        }
    }
}

// The fifth bits of Q5_0 and Q5_1: from bit c of a u32 to bit v of byte i, c = 4v + i.
INLINE void transpose_top(const uint8_t *bits, uint8_t *bytes) {
    for (int i = 0; i < 4; i++) {
        unsigned byte = 0;
        for (int v = 0; v < 8; v++) byte |= (bits[v / 2] >> (4 * (v % 2) + i) & 1u) << v;
        bytes[i] = (uint8_t)byte;
    }
}
INLINE void fifth_bits(vi q, vi top, const int v, vi *low, vi *high) {
    *low = vi_or(low_nibbles(q), vi_and_bytes(vi_shl16(top, 4 - v), 0x10));
    *high = vi_or(high_nibbles(q), vi_and_bytes(v == 0 ? top : vi_shr16(top, v), 0x10));
}

// Walk a packed matrix: for each group of LANES rows, tokens in tiles of 4, 2, 1, so that its
// weights are read once from memory and then from the nearest cache. `TILE(group, num_blocks, x, T,
// y, stride)` computes LANES rows of T tokens, T a constant.
#define DEFINE_ROWS(NAME, TILE, BLOCK_COLS, GROUP_BYTES)                                           \
    static void NAME(const uint8_t *packed, size_t rows, size_t cols, const uint8_t *const *x,     \
                     size_t num_tokens, float *y, size_t stride) {                                 \
        const size_t num_blocks = cols / (BLOCK_COLS);                                             \
        for (size_t r = 0; r < rows; r += LANES, packed += num_blocks * (GROUP_BYTES)) {           \
            size_t t = 0;                                                                          \
            for (; t + 4 <= num_tokens; t += 4)                                                    \
                TILE(packed, num_blocks, x + t, 4, y + t * stride + r, stride);                    \
            if (t + 2 <= num_tokens) {                                                             \
                TILE(packed, num_blocks, x + t, 2, y + t * stride + r, stride);                    \
                t += 2;                                                                            \
            }                                                                                      \
            if (t < num_tokens) TILE(packed, num_blocks, x + t, 1, y + t * stride + r, stride);    \
        }                                                                                          \
    }
#endif

#endif

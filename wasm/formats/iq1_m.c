// IQ1_M (ggml type 29): blocks of 256 columns; 16 sub-blocks of 16 with a 3-bit scale; eight columns
// at a time are a point of a grid of 2048, with a delta of plus or minus an eighth.
//
//   in the GGUF, 56 bytes        | points 32 bytes | upper 16 bytes | u16 [4] |
//     upper, nibbles, low first  bits 0..2: bits 8..10 of the point; 3: delta < 0
//     u16 i                      bits 3n..3n+2: scale 4i + n; 12..15: nibble i of d f16, low first
//   packed                       the same, by words or by blocks (looked_up.h)
//
//   weight = d/8 * (2 scale + 1) * (8 level + 8 delta), levels -1 0 1
#include "looked_up.h"

enum { COLS = 256, BYTES = 56, HAS_MINIMUM = 0 };

static uint16_t d_of(const uint8_t *block) {
    unsigned d = 0;
    for (int i = 0; i < 4; i++) d |= (unsigned)(block[49 + 2 * i] >> 4) << 4 * i;
    return (uint16_t)d;
}

static int block_is_finite(const uint8_t *block) { return f16_is_finite(d_of(block)); }

#if defined(HAS_GATHER)
enum { D_SIZE = 0 };
#define D_UNIT 0.125f
INLINE vf d_of_group(const uint8_t *w) {
    uint16_t d[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        uint8_t block[56];
        for (int i = 12; i < 14; i++)
            __builtin_memcpy(block + 4 * i, w + 4 * (LANES * i + lane), 4);
        d[lane] = d_of(block);
    }
    return vf_of_f16(d);
}
INLINE void look_up(const uint8_t *w, int j, vi *q, vi *scale) {
    const vi points = word_of(w, j), bits = vi_shr32(word_of(w, 8 + j / 2), 16 * (j % 2));
    const vi upper = vi_shl32(bits, 8);
    EACH (k, 4) {
        const vi index = vi_or(bits_of(points, 8 * k, 255), bits_of(upper, 4 * k, 7 << 8));
        iq1_points(iq1_grid, index, bits_of(bits, 4 * k + 3, 1), q + 2 * k);
    }
    const vi scales = vi_shl32(vi_shr32(word_of(w, 12 + j / 4), 16 * (j / 2 % 2) + 6 * (j % 2)), 1);
    scale[0] = odd_bits(scales, 1, 7);
    scale[1] = odd_bits(scales, 4, 7);
}
#else
static void unpack(const uint8_t *block, Unpacked *w) {
    w->d = f16_to_f32(d_of(block)) * 0.125f;
    for (int j = 0; j < 16; j++)
        w->scale[j] = (int8_t)(2 * (load_u16(block + 48 + 2 * (j / 4)) >> 3 * (j % 4) & 7) + 1);
    for (int k = 0; k < 32; k++) {
        const int upper = block[32 + k / 2] >> 4 * (k % 2);
        put8(w, k, iq1_levels(iq1_grid[block[k] | (upper & 7) << 8], upper >> 3 & 1));
    }
}
#endif
DEFINE_LOOKED_UP
#include "block256.h"

const ExpertFormat expert_iq1_m = {29, COLS, BYTES, WANTS_Q8A256, packed_bytes, pack, rows};

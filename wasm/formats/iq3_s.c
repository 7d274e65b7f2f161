// IQ3_S (ggml type 21): blocks of 256 columns; 8 sub-blocks of 32 with a 4-bit scale each; four
// columns at a time are a point of a grid of 512, with signs.
//
//   in the GGUF, 110 bytes       | d f16 | points 64 bytes | upper 8 | signs 32 | scales 4 bytes |
//     upper                      bit i of byte j: bit 8 of point 8j + i
//     scales                     nibbles, low first
//   packed                       the same, by words or by blocks (looked_up.h)
//
//   weight = d * (2 scale + 1) * level, levels 1 3 5 7 9 11 13 15
#include "looked_up.h"

enum { COLS = 256, BYTES = 110, HAS_MINIMUM = 0 };

static int block_is_finite(const uint8_t *block) { return f16_is_finite(load_u16(block)); }

#if defined(HAS_GATHER)
enum { D_SIZE = 2 };
#define D_UNIT 1
INLINE vf d_of_group(const uint8_t *w) { return vf_of_f16(w); }
INLINE void look_up(const uint8_t *w, int j, vi *q, vi *scale) {
    const vi signs = word_of(w, 18 + j);
    const vi upper = vi_shl32(vi_shr32(word_of(w, 16 + j / 4), 8 * (j % 4)), 8);
    EACH (k, 8) {
        const vi index = vi_or(bits_of(word_of(w, 2 * j + k / 4), 8 * (k % 4), 255),
                               bits_of(upper, k, 1 << 8));
        q[k] = negated(gather4(iq3_s_grid, index), signs, k / 2, 4 * (k % 2));
    }
    scale[0] = scale[1] = odd_bits(vi_shl32(vi_shr32(word_of(w, 26), 4 * j), 1), 1, 15);
}
#else
static void unpack(const uint8_t *block, Unpacked *w) {
    w->d = f16_to_f32(load_u16(block));
    for (int j = 0; j < 16; j++)
        w->scale[j] = (int8_t)(2 * (block[106 + j / 4] >> 4 * (j / 2 % 2) & 15) + 1);
    for (int k = 0; k < 32; k++) {
        const unsigned upper = block[66 + k / 4] >> 2 * (k % 4);
        const uint32_t first = iq3_s_grid[block[2 + 2 * k] | (upper & 1) << 8],
                       second = iq3_s_grid[block[3 + 2 * k] | (upper >> 1 & 1) << 8];
        put8(w, k, with_signs(two_points(first, second), block[74 + k]));
    }
}
#endif
DEFINE_LOOKED_UP
#include "block256.h"

const ExpertFormat expert_iq3_s = {21, COLS, BYTES, WANTS_Q8A256, packed_bytes, pack, rows};

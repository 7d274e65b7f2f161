// IQ2_S (ggml type 22): blocks of 256 columns; 16 sub-blocks of 16 with a 4-bit scale each; eight
// columns at a time are a point of a grid of 1024, with signs.
//
//   in the GGUF, 82 bytes        | d f16 | points 32 bytes | signs 32 bytes | upper 8 | scales 8 |
//     upper                      bits 2i, 2i+1 of byte j: bits 8, 9 of point 4j + i
//     scales                     nibbles, low first
//   packed                       the same, by words or by blocks (looked_up.h)
//
//   weight = d/8 * (2 scale + 1) * level, levels 8 25 43
#include "looked_up.h"

enum { COLS = 256, BYTES = 82, HAS_MINIMUM = 0 };

static int block_is_finite(const uint8_t *block) { return f16_is_finite(load_u16(block)); }

#if defined(HAS_GATHER)
enum { D_SIZE = 2 };
#define D_UNIT 0.125f
INLINE vf d_of_group(const uint8_t *w) { return vf_of_f16(w); }
INLINE void look_up(const uint8_t *w, int j, vi *q, vi *scale) {
    const vi points = word_of(w, j), signs = word_of(w, 8 + j);
    const vi upper = vi_shl32(vi_shr32(word_of(w, 16 + j / 4), 8 * (j % 4)), 8);
    EACH (k, 4) {
        const vi index = vi_or(bits_of(points, 8 * k, 255), bits_of(upper, 2 * k, 3 << 8));
        signed_points8(iq2_s_grid, index, signs, k, q + 2 * k);
    }
    const vi scales = vi_shl32(vi_shr32(word_of(w, 18 + j / 4), 8 * (j % 4)), 1);
    scale[0] = odd_bits(scales, 1, 15);
    scale[1] = odd_bits(scales, 5, 15);
}
#else
static void unpack(const uint8_t *block, Unpacked *w) {
    w->d = f16_to_f32(load_u16(block)) * 0.125f;
    for (int j = 0; j < 16; j++)
        w->scale[j] = (int8_t)(2 * (block[74 + j / 2] >> 4 * (j % 2) & 15) + 1);
    for (int k = 0; k < 32; k++) {
        const int point = block[2 + k] | (block[66 + k / 4] >> 2 * (k % 4) & 3) << 8;
        put8(w, k, with_signs(iq2_s_grid[point], block[34 + k]));
    }
}
#endif
DEFINE_LOOKED_UP
#include "block256.h"

const ExpertFormat expert_iq2_s = {22, COLS, BYTES, WANTS_Q8A256, packed_bytes, pack, rows};

// IQ2_XS (ggml type 17): blocks of 256 columns; 16 sub-blocks of 16 with a 4-bit scale each; eight
// columns at a time are a point of a grid of 512, with signs.
//
//   in the GGUF, 74 bytes        | d f16 | points u16 [32] | scales 8 bytes |
//     point                      bits 0..8: which; 9..15: signs, the eighth is their parity
//     scales                     nibbles, low first
//   packed                       the same, by words or by blocks (looked_up.h)
//
//   weight = d/8 * (2 scale + 1) * level, levels 8 25 43
#include "looked_up.h"

enum { COLS = 256, BYTES = 74, HAS_MINIMUM = 0 };

static int block_is_finite(const uint8_t *block) { return f16_is_finite(load_u16(block)); }

#if defined(HAS_GATHER)
enum { D_SIZE = 2 };
#define D_UNIT 0.125f
INLINE vf d_of_group(const uint8_t *w) { return vf_of_f16(w); }
INLINE void look_up(const uint8_t *w, int j, vi *q, vi *scale) {
    EACH (half, 2) {
        const vi points = word_of(w, 2 * j + half), parity = signs_parity(points);
        EACH (k, 2) {
            const vi signs = eight_signs_of(points, parity, 16 * k + 9);
            const vi index = bits_of(points, 16 * k, 511);
            signed_points8(iq2_xs_grid, index, signs, 0, q + 4 * half + 2 * k);
        }
    }
    const vi scales = vi_shl32(vi_shr32(word_of(w, 16 + j / 4), 8 * (j % 4)), 1);
    scale[0] = odd_bits(scales, 1, 15);
    scale[1] = odd_bits(scales, 5, 15);
}
#else
static void unpack(const uint8_t *block, Unpacked *w) {
    w->d = f16_to_f32(load_u16(block)) * 0.125f;
    for (int j = 0; j < 16; j++)
        w->scale[j] = (int8_t)(2 * (block[66 + j / 2] >> 4 * (j % 2) & 15) + 1);
    for (int k = 0; k < 32; k++) {
        const unsigned point = load_u16(block + 2 + 2 * k);
        put8(w, k, with_signs(iq2_xs_grid[point & 511], eight_signs(point >> 9)));
    }
}
#endif
DEFINE_LOOKED_UP
#include "block256.h"

const ExpertFormat expert_iq2_xs = {17, COLS, BYTES, WANTS_Q8A256, packed_bytes, pack, rows};

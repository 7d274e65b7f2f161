// IQ3_XXS (ggml type 18): blocks of 256 columns; 8 sub-blocks of 32 with a 4-bit scale each; four
// columns at a time are a point of a grid of 256, with signs.
//
//   in the GGUF, 98 bytes        | d f16 | points 64 bytes | u32 [8] |
//     u32                        bits 7i..7i+6: signs of eight columns, the eighth is their parity
//                                bits 28..31: scale
//   packed                       the same, by words or by blocks (looked_up.h)
//
//   weight = d/4 * (2 scale + 1) * level, levels 4 12 20 28 36 44 52 62
#include "looked_up.h"

enum { COLS = 256, BYTES = 98, HAS_MINIMUM = 0 };

static int block_is_finite(const uint8_t *block) { return f16_is_finite(load_u16(block)); }

#if defined(HAS_GATHER)
enum { D_SIZE = 2 };
#define D_UNIT 0.25f
INLINE vf d_of_group(const uint8_t *w) { return vf_of_f16(w); }
INLINE void look_up(const uint8_t *w, int j, vi *q, vi *scale) {
    const vi bits = word_of(w, 16 + j), parity = signs_parity(bits);
    EACH (k, 4) {
        const vi points = word_of(w, 2 * j + k / 2);
        const vi signs = eight_signs_of(bits, parity, 7 * k);
        EACH (e, 2)
        q[2 * k + e] = negated(gather4(iq3_xxs_grid, bits_of(points, 16 * (k % 2) + 8 * e, 255)),
                               signs, 0, 4 * e);
    }
    scale[0] = scale[1] = odd_bits(bits, 28, 15);
}
#else
static void unpack(const uint8_t *block, Unpacked *w) {
    w->d = f16_to_f32(load_u16(block)) * 0.25f;
    for (int k = 0; k < 32; k++) {
        const uint8_t *points = block + 2 + 2 * k;
        const uint32_t bits = load_u32(block + 66 + 4 * (k / 4));
        w->scale[k / 2] = (int8_t)(2 * (bits >> 28) + 1);
        put8(w, k,
             with_signs(two_points(iq3_xxs_grid[points[0]], iq3_xxs_grid[points[1]]),
                        eight_signs(bits >> 7 * (k % 4) & 127)));
    }
}
#endif
DEFINE_LOOKED_UP
#include "block256.h"

const ExpertFormat expert_iq3_xxs = {18, COLS, BYTES, WANTS_Q8A256, packed_bytes, pack, rows};

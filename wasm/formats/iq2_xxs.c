// IQ2_XXS (ggml type 16): blocks of 256 columns; 8 sub-blocks of 32 with a 4-bit scale each; eight
// columns at a time are a point of a grid of 256, with signs.
//
//   in the GGUF, 66 bytes        | d f16 | 8 times (j): points 4 bytes, u32 |
//     u32                        bits 7i..7i+6: signs of point i, the eighth is their parity
//                                bits 28..31: scale
//   packed                       the same, by words or by blocks (looked_up.h)
//
//   weight = d/8 * (2 scale + 1) * level, levels 8 25 43
#include "looked_up.h"

enum { COLS = 256, BYTES = 66, HAS_MINIMUM = 0 };

static int block_is_finite(const uint8_t *block) { return f16_is_finite(load_u16(block)); }

#if defined(HAS_GATHER)
enum { D_SIZE = 2 };
#define D_UNIT 0.125f
INLINE vf d_of_group(const uint8_t *w) { return vf_of_f16(w); }
INLINE void look_up(const uint8_t *w, int j, vi *q, vi *scale) {
    const vi points = word_of(w, 2 * j), bits = word_of(w, 2 * j + 1), parity = signs_parity(bits);
    EACH (k, 4) {
        const vi signs = eight_signs_of(bits, parity, 7 * k);
        signed_points8(iq2_xxs_grid, bits_of(points, 8 * k, 255), signs, 0, q + 2 * k);
    }
    scale[0] = scale[1] = odd_bits(bits, 28, 15);
}
#else
static void unpack(const uint8_t *block, Unpacked *w) {
    w->d = f16_to_f32(load_u16(block)) * 0.125f;
    for (int k = 0; k < 32; k++) {
        const uint8_t *sub = block + 2 + 8 * (k / 4);
        const uint32_t bits = load_u32(sub + 4);
        w->scale[k / 2] = (int8_t)(2 * (bits >> 28) + 1);
        put8(w, k, with_signs(iq2_xxs_grid[sub[k % 4]], eight_signs(bits >> 7 * (k % 4) & 127)));
    }
}
#endif
DEFINE_LOOKED_UP
#include "block256.h"

const ExpertFormat expert_iq2_xxs = {16, COLS, BYTES, WANTS_Q8A256, packed_bytes, pack, rows};

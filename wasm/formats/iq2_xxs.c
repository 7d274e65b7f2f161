// IQ2_XXS (ggml type 16): blocks of 256 columns; 8 sub-blocks of 32 with a 4-bit scale each; eight
// columns at a time are a point of a grid of 256, with signs.
//
//   in the GGUF, 66 bytes        | d f16 | 8 times (j): points 4 bytes, u32 |
//     u32                        bits 7i..7i+6: signs of point i, the eighth is their parity
//                                bits 28..31: scale
//   packed                       the same (looked_up.h)
//
//   weight = d/8 * (2 scale + 1) * level, levels 8 25 43
#include "looked_up.h"

enum { COLS = 256, BYTES = 66, HAS_MINIMUM = 0 };

static int block_is_finite(const uint8_t *block) { return f16_is_finite(load_u16(block)); }

static void unpack(const uint8_t *block, Unpacked *w) {
    w->d = f16_to_f32(load_u16(block)) * 0.125f;
    for (int k = 0; k < 32; k++) {
        const uint8_t *sub = block + 2 + 8 * (k / 4);
        const uint32_t bits = load_u32(sub + 4);
        w->scale[k / 2] = (int8_t)(2 * (bits >> 28) + 1);
        put8(w, k, with_signs(iq2_xxs_grid[sub[k % 4]], eight_signs(bits >> 7 * (k % 4) & 127)));
    }
}
DEFINE_LOOKED_UP
#include "block256.h"

const ExpertFormat expert_iq2_xxs = {16, COLS, BYTES, WANTS_Q8A256, packed_bytes, pack, rows};

// TQ2_0 (ggml type 35): blocks of 256 columns, one scale, 2-bit codes.
//
//   in the GGUF, 66 bytes        | codes 64 bytes | d f16 |
//     codes, half h, c < 32      byte 32h+c: bits 2s, 2s+1 are column 128h + 32s + c
//   packed                       rows side by side (ternary.h)
//
//   weight[c] = d * (code - 1); the code 3 is taken as it is, 2 d
#include "unpacked.h"

enum { COLS = 256, BYTES = 66, HAS_MINIMUM = 0, D_AT = 64 };

#if defined(EXPERT_SCALAR)
static void unpack(const uint8_t *block, Unpacked *w) {
    *w = (Unpacked){.d = f16_to_f32(load_u16(block + D_AT))};
    __builtin_memset(w->scale, 1, sizeof w->scale);
    for (int i = 0; i < COLS; i++)
        w->q[i] = (int8_t)((block[32 * (i / 128) + i % 32] >> 2 * (i % 128 / 32) & 3) - 1);
}
#else
static const uint8_t *codes_of(const uint8_t *block, uint8_t *room) {
    (void)room;
    return block; // the order is that of the GGUF
}
#endif
#include "ternary.h"

const ExpertFormat expert_tq2_0 = {35, COLS, BYTES, WANTS_Q8A256, packed_bytes, pack, rows};

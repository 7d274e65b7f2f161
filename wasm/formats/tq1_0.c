// TQ1_0 (ggml type 34): blocks of 256 columns, one scale, five ternary digits in a byte.
//
//   in the GGUF, 54 bytes        | digits 48 bytes | last 4 bytes | d f16 |
//     a byte b holds a fraction b/256: digit n is floor(3 * ((b * 3^n) mod 256) / 256)
//     digits, c < 32             byte c: digit n is column 32n + c, n < 5
//             c < 16             byte 32+c: digit n is column 160 + 16n + c, n < 5
//     last, c < 4                byte c: digit n is column 240 + 4n + c, n < 4
//   packed                       as 2-bit codes (ternary.h)
//
//   weight[c] = d * (digit - 1)
#include "unpacked.h"

enum { COLS = 256, BYTES = 54, HAS_MINIMUM = 0, D_AT = 52 };

static void digits(const uint8_t *bytes, int count, int num_digits, int8_t *q) {
    for (int n = 0, power = 1; n < num_digits; n++, power *= 3)
        for (int c = 0; c < count; c++)
            q[count * n + c] = (int8_t)((3 * (bytes[c] * power & 255) >> 8) - 1);
}

static void unpack(const uint8_t *block, Unpacked *w) {
    *w = (Unpacked){.d = f16_to_f32(load_u16(block + D_AT))};
    __builtin_memset(w->scale, 1, sizeof w->scale);
    digits(block, 32, 5, w->q);
    digits(block + 32, 16, 5, w->q + 160);
    digits(block + 48, 4, 4, w->q + 240);
}
#if !defined(EXPERT_SCALAR)
static const uint8_t *codes_of(const uint8_t *block, uint8_t *room) {
    Unpacked w;
    unpack(block, &w);
    for (int h = 0; h < 2; h++) {
        const int8_t *q = w.q + 128 * h;
        for (int c = 0; c < 32; c++) // 85: the 1 that was taken off each of four codes
            room[32 * h + c] =
                (uint8_t)(q[c] + 4 * q[32 + c] + 16 * q[64 + c] + 64 * q[96 + c] + 85);
    }
    return room;
}
#endif
#include "ternary.h"

const ExpertFormat expert_tq1_0 = {34, COLS, BYTES, WANTS_Q8A256, packed_bytes, pack, rows};

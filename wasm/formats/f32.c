// F32 (ggml type 0): no blocks.
//
//   in the GGUF, row r           | w0 | w1 | ... |     4 * cols bytes
//   packed, row r                the same, zeros up to a multiple of 8 columns
#include "format.h"

enum { BYTES = 4, EXPONENT = 0x7f800000 };

static uint32_t exponent_bits(const uint8_t *p) {
    uint32_t bits;
    __builtin_memcpy(&bits, p, BYTES);
    return bits & EXPONENT;
}

#if defined(EXPERT_SCALAR)
static float weight(const uint8_t *p) {
    float w;
    __builtin_memcpy(&w, p, BYTES);
    return w;
}
#else
INLINE f8 load8(const uint8_t *p) { return f8_load(p); }
#endif
#include "floats.h"

const ExpertFormat expert_f32 = {0, 1, BYTES, WANTS_F32, packed_bytes, pack, rows};

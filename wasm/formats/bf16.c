// BF16 (ggml type 30): no blocks; the upper half of an f32.
//
//   in the GGUF, row r           | w0 | w1 | ... |     2 * cols bytes
//   packed, row r                the same, zeros up to a multiple of 8 columns
#include "format.h"

enum { BYTES = 2, EXPONENT = 0x7f80 };

static uint32_t exponent_bits(const uint8_t *p) {
    uint16_t bits;
    __builtin_memcpy(&bits, p, BYTES);
    return bits & EXPONENT;
}

#if defined(EXPERT_SCALAR)
static float weight(const uint8_t *p) { return bits_to_f32((uint32_t)load_u16(p) << 16); }
#else
INLINE f8 load8(const uint8_t *p) { return f8_of_bf16(p); }
#endif
#include "floats.h"

const ExpertFormat expert_bf16 = {30, 1, BYTES, WANTS_F32, packed_bytes, pack, rows};

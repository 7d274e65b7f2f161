// F16 (ggml type 1): no blocks; IEEE half precision, subnormals included.
//
//   in the GGUF, row r           | w0 | w1 | ... |     2 * cols bytes
//   packed, row r                the same, zeros up to a multiple of 8 columns
#include "format.h"

enum { BYTES = 2, EXPONENT = 0x7c00 };

static uint32_t exponent_bits(const uint8_t *p) {
    uint16_t bits;
    __builtin_memcpy(&bits, p, BYTES);
    return bits & EXPONENT;
}

#if defined(EXPERT_SCALAR)
static float weight(const uint8_t *p) { return f16_to_f32(load_u16(p)); }
#else
INLINE f8 load8(const uint8_t *p) { return f8_of_f16(p); }
#endif
#include "floats.h"

const ExpertFormat expert_f16 = {1, 1, BYTES, WANTS_F32, packed_bytes, pack, rows};

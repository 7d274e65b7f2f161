// What the formats of 256 columns share: sizes, packing, and the scalar reference.
//
// The including file says: COLS, BYTES, HAS_MINIMUM, block_is_finite(block); unpack() for the
// reference; GROUP, tile() and pack_block() for the fast path.
#include "unpacked.h"

#if defined(EXPERT_SCALAR)
DEFINE_ROWS_UNPACKED(rows)
#else
DEFINE_ROWS(rows, tile, COLS, GROUP)
#endif

static uint64_t packed_bytes(uint64_t num_rows, uint64_t cols) {
    return round_up(num_rows, LANES) / LANES * (cols / COLS) * GROUP;
}

static int32_t pack(const uint8_t *blocks, size_t num_rows, size_t cols, uint8_t *packed) {
    return pack_groups(blocks, num_rows, cols / COLS, BYTES, GROUP, block_is_finite, pack_block,
                       packed);
}

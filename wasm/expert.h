// The expert kernel: one routed expert of an MoE layer, computed the same way, bit for bit, on
// every machine.
//
// This header is the whole door: sizes, packing, one call per dispatch, the wire forms, a self-test.
// CONTRACT.md says what is computed; expert.c computes it in that order. For every function:
//   - no allocation, no statics that change, no exit, no printf: threads may call at once;
//   - the caller owns every buffer; nothing is kept but what was written to `packed`;
//   - sizes are checked before a byte is read: slices and dispatches come from the internet;
//   - failure is a negative number from `enum expert_error`.
#ifndef EXPERT_H
#define EXPERT_H

#include <stddef.h>
#include <stdint.h>

#if defined(__wasm__)
#define EXPERT_EXPORT(name) __attribute__((export_name(#name), used))
#elif defined(_WIN32)
#define EXPERT_EXPORT(name) __declspec(dllexport)
#else
#define EXPERT_EXPORT(name) __attribute__((visibility("default"), used))
#endif

enum { EXPERT_ABI_VERSION = 1 };

enum expert_error {
    EXPERT_OK = 0,
    EXPERT_NON_FINITE = -1,          // infinity or NaN in weights, activations or an output
    EXPERT_GRID_OVERFLOW = -2,       // an output does not fit the integer grid: |n| >= 2^51
    EXPERT_BAD_SIZE = -3,            // no multiple of the block, or a buffer of the wrong length
    EXPERT_UNSUPPORTED_FORMAT = -4,  // no file in formats/ knows this ggml type
    EXPERT_UNSUPPORTED_FORMULA = -5, // activation, clamp or position: not implemented
    EXPERT_BAD_INDEX = -6,           // a pick names an expert that was not passed
    EXPERT_ENCODING_MISMATCH = -7,   // x in blocks that gate or up do not want; send f32 or f16
    EXPERT_BAD_VALUE = -8,           // an int of -128, a scale below 0, a wild exponent, an unknown encoding or grid
    EXPERT_NOT_PACKED = -9,          // packed for another formula, by another build, or not at all
    EXPERT_SCRATCH_TOO_SMALL = -10,  // ask expert_scratch_bytes() first
    EXPERT_SELF_TEST_FAILED = -11,   // this machine does not keep the contract; it must not serve
};

// How x travels (PROTOCOL.md, "x encodings"). Q8A, per row: f32 scales [hidden_dim / block], i8 ints
// [hidden_dim], zeros to a multiple of 4 bytes.
enum expert_encoding {
    EXPERT_X_F32 = 0,   // f32 [num_tokens, hidden_dim]
    EXPERT_X_F16 = 1,   // f16 [num_tokens, hidden_dim]
    EXPERT_X_Q8A32 = 2, // blocks of 32
    EXPERT_X_Q8A256 = 3,
};

enum expert_grid { EXPERT_GRID_X32 = 0, EXPERT_GRID_X16 = 1 }; // CONTRACT.md "Grid"

enum expert_activation { // CONTRACT.md "Activation functions"
    EXPERT_SILU = 0,
    EXPERT_GELU,
    EXPERT_RELU,
    EXPERT_RELU2,
    EXPERT_SWIGLU_OAI,
    EXPERT_SWIGLU_CLAMP,
    EXPERT_SITU
};

enum expert_weight_position { EXPERT_WEIGHT_AFTER = 0, EXPERT_WEIGHT_BEFORE = 1 };

// What a slice holds behind its matrices, f32 each: biases of gate [expert_dim], up [expert_dim]
// and down [hidden_dim]; then one scale for each of gate, up and down.
enum { EXPERT_BIASED = 1, EXPERT_SCALED = 2 };

enum { // limits that keep every size below 2^63 and every int64 sum exact
    EXPERT_MAX_DIM = 1 << 17,
    EXPERT_MAX_TOKENS = 1 << 16,
    EXPERT_MAX_PICKS_PER_TOKEN = 1 << 12, // 2^12 addends below 2^51 stay below 2^63
};

typedef struct { // ten 32-bit words, so that every language can write it as an array
    int32_t hidden_dim, expert_dim;
    int32_t gate_type, up_type, down_type; // GGMLQuantizationType; gate_type -1: no gate
    int32_t activation;                    // enum expert_activation
    int32_t weight_position;               // enum expert_weight_position
    int32_t extras;                        // EXPERT_BIASED | EXPERT_SCALED
    float alpha, limit;                    // what they mean depends on the activation
} ExpertFormula;

typedef struct { // one machine word per field (4 bytes in wasm32, 8 native), for the same reason
    const ExpertFormula *formula;
    size_t num_tokens, num_picks, num_experts;
    size_t x_encoding; // enum expert_encoding
    const uint8_t *x;  // num_tokens rows in that encoding
    size_t x_bytes;
    const int16_t *row_exponents;   // [num_tokens]
    size_t grid;                    // enum expert_grid
    const int32_t *layer_exponents; // x32: [1]; x16: [hidden_dim]
    const uint16_t *counts;         // [num_tokens] picks of each row; they add up to num_picks
    const uint16_t *pick_expert;    // [num_picks] row by row; index into `experts`
    const float *pick_weight;       // [num_picks] router weights
    const uint8_t *const *experts;  // [num_experts] what expert_pack() wrote
    uint8_t *scratch;               // 64-byte aligned is fastest; any alignment works
    size_t scratch_bytes;
    int64_t *sums;  // out: [num_tokens, hidden_dim], or null: no grid, only `outputs`
    float *outputs; // out: [num_picks, hidden_dim] weighted outputs before the grid, or null
} ExpertCall;

// Some rows of an expert: units of the hidden layer (rows of gate and up) and channels (rows of
// down). Bounds are multiples of EXPERT_SPLIT or the end of the dimension; a range may be empty.
enum { EXPERT_SPLIT = 16 };
typedef struct {
    int32_t first_unit, end_unit;
    int32_t first_channel, end_channel;
} ExpertRows;

typedef struct { // bytes [offset, offset + size) of a slice
    size_t offset, size;
} ExpertPiece;

int32_t expert_abi_version(void);
const char *expert_build(void); // "scalar", "sse41", "avx2", "neon", "wasm-plain" ...
// What this CPU runs: 0 "scalar", 1 "sse41" or "neon", 2 "avx2", 3 "avx512vnni". Ask the scalar library.
int32_t expert_cpu_level(void);

// Number of formats, and the ggml type of each: what this build can hold.
int32_t expert_num_formats(void);
int32_t expert_format_type(int32_t index);

// Bytes of a slice as it stands in the GGUF (gate, up, down, extras one after another), and of its
// packed form.
ptrdiff_t expert_slice_bytes(const ExpertFormula *formula);
ptrdiff_t expert_packed_bytes(const ExpertFormula *formula);

// Rearrange a slice for this build; refuse it when a scale or weight is not finite.
int32_t expert_pack(const ExpertFormula *formula, const uint8_t *slice, size_t slice_bytes,
                    uint8_t *packed, size_t packed_bytes);

// The same by pieces, so that no second copy of the slice is needed; and in part: only these rows
// (null: all). expert_next_piece() turns a piece, at first {0, 0}, into the one to be packed behind
// it, of at most max_bytes where 16 rows are not more; size 0: that was all. Pieces must come in that
// order; until the last is in, the expert is refused as EXPERT_NOT_PACKED (so is a part without rows).
ptrdiff_t expert_part_bytes(const ExpertFormula *formula, const ExpertRows *rows);
int32_t expert_next_piece(const ExpertFormula *formula, const ExpertRows *rows, size_t max_bytes,
                          ExpertPiece *piece);
int32_t expert_pack_piece(const ExpertFormula *formula, const ExpertRows *rows,
                          const ExpertPiece *piece, const uint8_t *data, uint8_t *packed,
                          size_t packed_bytes);

// Bytes of scratch that expert_answer(), expert_hidden() and expert_finish() need.
ptrdiff_t expert_scratch_bytes(const ExpertFormula *formula, size_t num_tokens, size_t num_picks,
                               size_t num_experts);

// Compute a whole dispatch: every pick of every row, weighted, put on the grid and summed per row.
int32_t expert_answer(const ExpertCall *call);

// The same by several threads or memories, in two steps, with the same bits for any split; each needs
// experts that hold its rows (all of a call the same), scratch of its own, and the rest of the call.
//   1. expert_hidden: units [first_unit, end_unit) of h into h[pick * h_stride + unit - first_unit].
//   2. expert_finish: from whole rows of h, h[pick * h_stride + unit], the channels [first_channel,
//      end_channel) into sums[t * out_stride + channel - first_channel], and outputs alike. x may be
//      null.
int32_t expert_hidden(const ExpertCall *call, const ExpertRows *rows, float *h, size_t h_stride);
int32_t expert_finish(const ExpertCall *call, const ExpertRows *rows, const float *h,
                      size_t h_stride, size_t out_stride);

// Rows of f32 to the form in which they travel; returns the bytes written.
ptrdiff_t expert_encode_x(const float *x, size_t num_tokens, size_t hidden_dim, size_t encoding,
                          uint8_t *out, size_t out_bytes);
// CONTRACT.md "Row exponent".
int32_t expert_row_exponents(const float *x, size_t num_tokens, size_t hidden_dim, int16_t *out);

// Sums to the narrowest integers that hold each row, rows padded to 8 bytes; returns the bytes
// written to `out`.
ptrdiff_t expert_encode_partial(const int64_t *sums, size_t num_tokens, size_t hidden_dim,
                                size_t grid, uint8_t *widths, uint8_t *out, size_t out_bytes);
// The inverse, added to `sums`. Wrong widths or lengths are refused.
int32_t expert_add_partial(const uint8_t *widths, const uint8_t *data, size_t data_bytes,
                           size_t num_tokens, size_t hidden_dim, size_t grid, int64_t *sums);
// Sums back to f32: y = (f32)((double)sum * 2^s).
int32_t expert_decode_sums(const int64_t *sums, size_t num_tokens, size_t hidden_dim,
                           const int16_t *row_exponents, size_t grid,
                           const int32_t *layer_exponents, float *y);

void expert_f16_to_f32(const uint16_t *in, size_t count, float *out);
void expert_f32_to_f16(const float *in, size_t count, uint16_t *out);
void expert_sha256(const uint8_t *data, size_t size_bytes, uint8_t digest[32]);

// Known-answer test `index` with 1, 2 or 7 rows (CONTRACT.md "Known answers"): computes it, writes
// its digest, compares with hashes.txt. First one test for each format, in the order of
// expert_format_type(), then the formulas.
//
// expert_self_tests_for() names the tests (with 2 and with 7 rows) that must pass before slices of
// this formula are packed: its formats, and whatever else it has in common with a known formula. For
// null, those that must pass before anything: one format of each kind of product, under a
// millisecond. Returns how many were written, or why the formula cannot be computed.
enum { EXPERT_MAX_SELF_TESTS = 16 };
int32_t expert_self_tests_for(const ExpertFormula *formula, int32_t tests[EXPERT_MAX_SELF_TESTS]);
int32_t expert_num_self_tests(void);
ptrdiff_t expert_self_test_scratch_bytes(void);
int32_t expert_self_test(int32_t index, int32_t num_tokens, uint8_t *scratch, size_t scratch_bytes,
                         uint8_t digest[32]);

// The digest of any known answer, also of those that the kernel does not carry with it: known formula
// `number` (-1: silu) in any format. For tests, which know them all.
int32_t expert_known_digest(int32_t number, int32_t type, int32_t num_tokens, uint8_t *scratch,
                            size_t scratch_bytes, uint8_t digest[32]);

// Read memory and return a checksum: the bandwidth a kernel can hope for. For benchmarks only.
uint32_t expert_read_memory(const uint8_t *data, size_t size_bytes);

#endif

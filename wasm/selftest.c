// The known-answer test: three experts made from a counter, a small dispatch, and a digest that
// must be the one in hashes.txt, which the NumPy reference wrote. CONTRACT.md "Known answers"
// describes every step.
#include "kernel.h"

enum { NUM_EXPERTS = 3, TOP_K = 2, MAX_TOKENS = 7, DIGEST_BYTES = 32 };
enum { STREAM_X = 100, STREAM_WEIGHTS = 101, LAYER_EXPONENT = 6 };

typedef struct {
    int32_t type, num_tokens;
    const char *digest;
} Golden;
#define GOLDEN(type, num_tokens, digest) {type, num_tokens, digest},
static const Golden golden[] = {
#include "hashes.txt"
    {-1, 0, ""},
};
#undef GOLDEN

typedef struct {
    int32_t type, hidden_dim, expert_dim;
    size_t encoding; // of the second call
} Case;

// Two blocks or more along a row of gate, and the encoding in which a row of x loses nothing.
static Case case_of(const ExpertFormat *format) {
    switch (format->block_cols) {
    case 1: return (Case){format->type, 52, 28, EXPERT_X_F16};
    case 32: return (Case){format->type, 96, 64, EXPERT_X_Q8A32};
    case 64: return (Case){format->type, 128, 64, EXPERT_X_Q8A32};
    default: return (Case){format->type, 512, 256, EXPERT_X_Q8A256};
    }
}

// Random bytes make a block whose scales may be wild or not finite; these bytes of it become
// `bits & keep | set`: a small exponent, while sign and mantissa stay.
typedef struct {
    int32_t type, at;
    uint8_t keep, set;
} Tamed;
static const Tamed tamed[] = {
    {1, 1, 0x8f, 0x20},  {30, 1, 0x80, 0x3d}, {8, 1, 0x83, 0x14},  {2, 1, 0x83, 0x14},
    {3, 1, 0x83, 0x14},  {3, 3, 0x83, 0x14},  {6, 1, 0x83, 0x14},  {7, 1, 0x83, 0x14},
    {7, 3, 0x83, 0x14},  {20, 1, 0x83, 0x10}, {39, 0, 0x07, 0x70}, {12, 1, 0x83, 0x0c},
    {12, 3, 0x83, 0x0c}, {14, 209, 0x83, 0},
};

// Word `index` of a stream: a bijective mix of a counter, so that any language can make any word at
// once.
static uint32_t word(uint32_t stream, uint32_t index) {
    uint32_t x = stream * 0x9e3779b9u + index;
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

static void make_matrix(uint32_t stream, const ExpertFormat *format, size_t num_blocks,
                        uint8_t *out) {
    const size_t block = (size_t)format->block_bytes, size_bytes = num_blocks * block;
    for (size_t i = 0; i < size_bytes; i++)
        out[i] = (uint8_t)(word(stream, (uint32_t)(i / 4)) >> 8 * (i % 4));
    for (size_t b = 0; b < num_blocks && format->type == 0; b++) {
        const float w = (float)((int32_t)word(stream, (uint32_t)b) >> 8) * 0x1p-25f;
        __builtin_memcpy(out + 4 * b, &w, 4);
    }
    for (size_t i = 0; i < sizeof tamed / sizeof tamed[0]; i++) {
        if (tamed[i].type != format->type) continue;
        uint8_t *p = out + tamed[i].at;
        for (size_t b = 0; b < num_blocks; b++, p += block)
            *p = (uint8_t)((*p & tamed[i].keep) | tamed[i].set);
    }
}

typedef struct { // what one test needs besides the kernel's scratch, at the beginning of the
                 // caller's
    float x[MAX_TOKENS * 512];
    uint8_t encoded[MAX_TOKENS * 512 * 4];
    int64_t sums[2][MAX_TOKENS * 512];
    float outputs[MAX_TOKENS * TOP_K * 512];
    float weights[MAX_TOKENS * TOP_K];
    int32_t layer_exponents[512];
    int16_t row_exponents[MAX_TOKENS];
    uint16_t counts[MAX_TOKENS], picks[MAX_TOKENS * TOP_K];
    uint8_t digests[3][DIGEST_BYTES];
    const uint8_t *experts[NUM_EXPERTS];
} Work;

static ExpertFormula case_formula(const Case *c) {
    return (ExpertFormula){c->hidden_dim, c->expert_dim,       c->type, c->type, c->type,
                           EXPERT_SILU,   EXPERT_WEIGHT_AFTER, 0,       0,       0};
}

static uint64_t align64(uint64_t n) { return round_up(n, 64); }

static uint64_t case_bytes(const Case *c) {
    const ExpertFormula formula = case_formula(c);
    return 64 + align64(sizeof(Work)) + align64((uint64_t)expert_slice_bytes(&formula)) +
           NUM_EXPERTS * align64((uint64_t)expert_packed_bytes(&formula)) +
           (uint64_t)expert_scratch_bytes(&formula, MAX_TOKENS, MAX_TOKENS * TOP_K, NUM_EXPERTS);
}

EXPERT_EXPORT(expert_self_test_scratch_bytes) ptrdiff_t expert_self_test_scratch_bytes(void) {
    uint64_t most = 0;
    for (int32_t i = 0; i < expert_num_formats(); i++) {
        const Case c = case_of(expert_find_format(expert_format_type(i)));
        const uint64_t needed = case_bytes(&c);
        most = needed > most ? needed : most;
    }
    return (ptrdiff_t)most;
}

static int32_t run(const Case *c, size_t num_tokens, uint8_t *memory, uint8_t *digest) {
    const ExpertFormula formula = case_formula(c);
    const ExpertFormat *format = expert_find_format(c->type);
    const size_t d = (size_t)c->hidden_dim, f = (size_t)c->expert_dim,
                 num_picks = num_tokens * TOP_K;
    const size_t slice_bytes = (size_t)expert_slice_bytes(&formula),
                 packed_bytes = (size_t)expert_packed_bytes(&formula);
    uint8_t *slice = memory + align64(sizeof(Work)), *packed = slice + align64(slice_bytes);
    uint8_t *scratch = packed + NUM_EXPERTS * align64(packed_bytes);
    Work *w = (Work *)(void *)memory;

    for (uint32_t e = 0; e < NUM_EXPERTS; e++, packed += align64(packed_bytes)) {
        for (uint32_t m = 0; m < 3; m++)
            make_matrix(1 + 3 * e + m, format, d * f / (size_t)format->block_cols,
                        slice + m * (slice_bytes / 3));
        const int32_t error = expert_pack(&formula, slice, slice_bytes, packed, packed_bytes);
        if (error) return error;
        w->experts[e] = packed;
    }
    for (uint32_t i = 0; i < num_tokens * d; i++)
        w->x[i] = (float)((int32_t)word(STREAM_X, i) >> 8) * 0x1p-23f;
    for (uint32_t i = 0; i < num_picks; i++) {
        w->weights[i] = (float)(word(STREAM_WEIGHTS, i) >> 8) * 0x1p-24f;
        w->picks[i] = (uint16_t)((i / TOP_K + i % TOP_K) % NUM_EXPERTS);
    }
    for (size_t t = 0; t < num_tokens; t++) w->counts[t] = TOP_K;
    int32_t error = expert_row_exponents(w->x, num_tokens, d, w->row_exponents);
    if (error) return error;

    ExpertCall call = {
        .formula = &formula,
        .num_tokens = num_tokens,
        .num_picks = num_picks,
        .num_experts = NUM_EXPERTS,
        .x_encoding = EXPERT_X_F32,
        .x = (const uint8_t *)w->x,
        .x_bytes = num_tokens * d * 4,
        .row_exponents = w->row_exponents,
        .grid = EXPERT_GRID_X32,
        .layer_exponents = w->layer_exponents,
        .counts = w->counts,
        .pick_expert = w->picks,
        .pick_weight = w->weights,
        .experts = w->experts,
        .scratch = scratch,
        .scratch_bytes = (size_t)expert_scratch_bytes(&formula, num_tokens, num_picks, NUM_EXPERTS),
        .sums = w->sums[0],
        .outputs = w->outputs,
    };
    w->layer_exponents[0] = LAYER_EXPONENT;
    error = expert_answer(&call);
    if (error) return error;

    const ptrdiff_t encoded =
        expert_encode_x(w->x, num_tokens, d, c->encoding, w->encoded, sizeof w->encoded);
    if (encoded < 0) return (int32_t)encoded;
    for (size_t i = 0; i < d; i++) w->layer_exponents[i] = LAYER_EXPONENT - (int32_t)(i % 5);
    call.x_encoding = c->encoding;
    call.x = w->encoded;
    call.x_bytes = (size_t)encoded;
    call.grid = EXPERT_GRID_X16;
    call.sums = w->sums[1];
    call.outputs = NULL;
    error = expert_answer(&call);
    if (error) return error;

    expert_sha256((const uint8_t *)w->sums[0], num_tokens * d * 8, w->digests[0]);
    expert_sha256((const uint8_t *)w->sums[1], num_tokens * d * 8, w->digests[1]);
    expert_sha256((const uint8_t *)w->outputs, num_picks * d * 4, w->digests[2]);
    expert_sha256(w->digests[0], sizeof w->digests, digest);
    return EXPERT_OK;
}

static int matches(const uint8_t *digest, const char *hex) {
    int same = 1;
    for (int i = 0; i < DIGEST_BYTES; i++) {
        const char *digits = "0123456789abcdef";
        same &= hex[2 * i] == digits[digest[i] >> 4] && hex[2 * i + 1] == digits[digest[i] & 15];
    }
    return same;
}

EXPERT_EXPORT(expert_self_test)
int32_t expert_self_test(int32_t format_index, int32_t num_tokens, uint8_t *scratch,
                         size_t scratch_bytes, uint8_t digest[32]) {
    const int32_t type = expert_format_type(format_index);
    if (type < 0) return EXPERT_UNSUPPORTED_FORMAT;
    const Case known = case_of(expert_find_format(type)), *c = &known;
    if (num_tokens < 1 || num_tokens > MAX_TOKENS) return EXPERT_BAD_SIZE;
    if (scratch_bytes < case_bytes(c)) return EXPERT_SCRATCH_TOO_SMALL;
    const int32_t error =
        run(c, (size_t)num_tokens, scratch + (64 - (uintptr_t)scratch % 64) % 64, digest);
    if (error) return error;
    for (const Golden *g = golden; g->type >= 0; g++)
        if (g->type == type && g->num_tokens == num_tokens && matches(digest, g->digest))
            return EXPERT_OK;
    return EXPERT_SELF_TEST_FAILED;
}

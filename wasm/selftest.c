// The known-answer test: three experts made from a counter, a small dispatch, and a digest that
// must be the one in hashes.txt, which the NumPy reference wrote. CONTRACT.md "Known answers"
// describes every step.
#include "kernel.h"

enum { NUM_EXPERTS = 3, TOP_K = 2, MAX_TOKENS = 7, DIGEST_BYTES = 32 };
enum { STREAM_X = 100, STREAM_WEIGHTS = 101, STREAM_EXTRAS = 200, LAYER_EXPONENT = 6 };

typedef struct {
    int32_t formula, type, num_tokens;
    const char *digest;
} Golden;
#define GOLDEN(type, num_tokens, digest) {-1, type, num_tokens, digest},
#define GOLDEN_FORMULA(formula, type, num_tokens, digest) {formula, type, num_tokens, digest},
static const Golden golden[] = {
#include "hashes.txt"
    {-1, -1, 0, ""},
};
#undef GOLDEN
#undef GOLDEN_FORMULA

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
    {1, 1, 0x8f, 0x20},   {30, 1, 0x80, 0x3d},   {8, 1, 0x83, 0x14},    {2, 1, 0x83, 0x14},
    {3, 1, 0x83, 0x14},   {3, 3, 0x83, 0x14},    {6, 1, 0x83, 0x14},    {7, 1, 0x83, 0x14},
    {7, 3, 0x83, 0x14},   {20, 1, 0x83, 0x10},   {39, 0, 0x07, 0x70},   {40, 0, 0x8f, 0x00},
    {40, 1, 0x8f, 0x00},  {40, 2, 0x8f, 0x00},   {40, 3, 0x8f, 0x00},   {10, 81, 0x83, 0x0c},
    {10, 83, 0x83, 0x0c}, {11, 109, 0x83, 0x0c}, {12, 1, 0x83, 0x0c},   {12, 3, 0x83, 0x0c},
    {13, 1, 0x83, 0x08},  {13, 3, 0x83, 0x08},   {14, 209, 0x83, 0x00}, {23, 1, 0x83, 0x04},
    {16, 1, 0x83, 0x0c},  {17, 1, 0x83, 0x0c},   {22, 1, 0x83, 0x0c},   {18, 1, 0x83, 0x08},
    {21, 1, 0x83, 0x08},  {19, 1, 0x83, 0x18},   {29, 53, 0x3f, 0x80},  {29, 55, 0x8f, 0x10},
    {34, 53, 0x83, 0x28}, {35, 65, 0x83, 0x28},
};

// The formulas besides silu; each has an answer in every one of formula_types.
static const ExpertFormula formulas[] = {
    {.activation = EXPERT_GELU},
    {.activation = EXPERT_RELU, .weight_position = EXPERT_WEIGHT_BEFORE},
    {.activation = EXPERT_RELU2, .gate_type = -1},
    {.activation = EXPERT_SWIGLU_OAI, .alpha = 1.702f, .limit = 0.5f, .extras = EXPERT_BIASED},
    {.activation = EXPERT_SWIGLU_CLAMP, .limit = 0.5f},
    {.activation = EXPERT_SILU,
     .limit = 0.5f,
     .weight_position = EXPERT_WEIGHT_BEFORE,
     .extras = EXPERT_BIASED | EXPERT_SCALED},
    {.activation = EXPERT_SITU, .alpha = 0.5f, .limit = 0.25f},
    {.activation = EXPERT_GELU, .gate_type = -1, .extras = EXPERT_BIASED | EXPERT_SCALED},
};
static const int32_t formula_types[] = {0, 1, 8};
enum {
    NUM_FORMULAS = sizeof formulas / sizeof formulas[0],
    NUM_FORMULA_TYPES = sizeof formula_types / sizeof formula_types[0]
};
_Static_assert(3 + NUM_FORMULAS <= EXPERT_MAX_SELF_TESTS, "expert_self_tests_for() needs room");

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
    for (size_t i = 0; i < size_bytes; i += 4) {
        const uint32_t four = word(stream, (uint32_t)(i / 4));
        for (size_t k = 0; k < 4 && i + k < size_bytes; k++) out[i + k] = (uint8_t)(four >> 8 * k);
    }
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

// Silu, or formulas[number], with the shape and format of a case.
static ExpertFormula case_formula(const Case *c, int32_t number) {
    ExpertFormula formula = {0};
    if (number >= 0) formula = formulas[number];
    formula.hidden_dim = c->hidden_dim;
    formula.expert_dim = c->expert_dim;
    if (formula.gate_type >= 0) formula.gate_type = c->type;
    formula.up_type = formula.down_type = c->type;
    return formula;
}

static uint64_t align64(uint64_t n) { return round_up(n, 64); }

static uint64_t case_bytes(const Case *c, int32_t number) {
    const ExpertFormula formula = case_formula(c, number);
    return 64 + align64(sizeof(Work)) + align64((uint64_t)expert_slice_bytes(&formula)) +
           NUM_EXPERTS * align64((uint64_t)expert_packed_bytes(&formula)) +
           (uint64_t)expert_scratch_bytes(&formula, MAX_TOKENS, MAX_TOKENS * TOP_K, NUM_EXPERTS);
}

EXPERT_EXPORT(expert_self_test_scratch_bytes) ptrdiff_t expert_self_test_scratch_bytes(void) {
    uint64_t most = 0;
    for (int32_t i = 0; i < expert_num_formats(); i++) {
        const Case c = case_of(expert_find_format(expert_format_type(i)));
        for (int32_t number = -1; number < NUM_FORMULAS; number++) {
            const uint64_t needed = case_bytes(&c, number);
            most = needed > most ? needed : most;
        }
    }
    return (ptrdiff_t)most;
}

// The matrices of one expert, then its biases and scales: any numbers in [-1, 1).
static void make_slice(uint32_t e, const ExpertFormula *formula, uint8_t *slice,
                       size_t size_bytes) {
    const ExpertFormat *format = expert_find_format(formula->up_type);
    const size_t num_blocks =
        (size_t)formula->hidden_dim * (size_t)formula->expert_dim / (size_t)format->block_cols;
    uint8_t *const end = slice + size_bytes;
    for (uint32_t m = formula->gate_type < 0 ? 1 : 0; m < 3; m++) {
        make_matrix(1 + 3 * e + m, format, num_blocks, slice);
        slice += num_blocks * (size_t)format->block_bytes;
    }
    for (uint32_t i = 0; slice < end; i++, slice += 4) {
        const float value = (float)((int32_t)word(STREAM_EXTRAS + e, i) >> 8) * 0x1p-23f;
        __builtin_memcpy(slice, &value, 4);
    }
}

static int32_t run(const Case *c, int32_t number, size_t num_tokens, uint8_t *memory,
                   uint8_t *digest) {
    const ExpertFormula formula = case_formula(c, number);
    const size_t d = (size_t)c->hidden_dim, num_picks = num_tokens * TOP_K;
    const size_t slice_bytes = (size_t)expert_slice_bytes(&formula),
                 packed_bytes = (size_t)expert_packed_bytes(&formula);
    uint8_t *slice = memory + align64(sizeof(Work)), *packed = slice + align64(slice_bytes);
    uint8_t *scratch = packed + NUM_EXPERTS * align64(packed_bytes);
    Work *w = (Work *)(void *)memory;

    for (uint32_t e = 0; e < NUM_EXPERTS; e++, packed += align64(packed_bytes)) {
        make_slice(e, &formula, slice, slice_bytes);
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

// ---- which tests stand for what

// One format for each kind of product in simd.h (f8, dot_s8, part_dot), all of small shapes.
static const int32_t core_types[] = {0, 8, 2};

static int32_t test_of_type(int32_t type) {
    for (int32_t i = 0; i < expert_num_formats(); i++)
        if (expert_format_type(i) == type) return i;
    return EXPERT_UNSUPPORTED_FORMAT;
}

// Does known formula `number` take a way through hidden.c that `formula` takes as well?
static int shares_a_way(int32_t number, const ExpertFormula *formula) {
    const ExpertFormula *known = &formulas[number];
    const int plain_silu = formula->activation == EXPERT_SILU && formula->limit == 0;
    return (known->activation == formula->activation && !plain_silu) ||
           (known->weight_position && formula->weight_position) ||
           (known->extras & formula->extras);
}

static int32_t add_test(int32_t test, int32_t count, int32_t *tests) {
    for (int32_t i = 0; i < count; i++)
        if (tests[i] == test) return count;
    tests[count] = test;
    return count + 1;
}

EXPERT_EXPORT(expert_self_tests_for)
int32_t expert_self_tests_for(const ExpertFormula *formula, int32_t tests[EXPERT_MAX_SELF_TESTS]) {
    int32_t count = 0;
    if (!formula) {
        for (size_t i = 0; i < sizeof core_types / sizeof core_types[0]; i++)
            count = add_test(test_of_type(core_types[i]), count, tests);
        return count;
    }
    if (expert_slice_bytes(formula) < 0) return (int32_t)expert_slice_bytes(formula);
    if (formula->gate_type >= 0) count = add_test(test_of_type(formula->gate_type), count, tests);
    count = add_test(test_of_type(formula->up_type), count, tests);
    count = add_test(test_of_type(formula->down_type), count, tests);
    for (int32_t number = 0; number < NUM_FORMULAS; number++)
        if (shares_a_way(number, formula))
            count = add_test(expert_num_formats() + number * NUM_FORMULA_TYPES, count, tests);
    return count;
}

EXPERT_EXPORT(expert_num_self_tests) int32_t expert_num_self_tests(void) {
    return expert_num_formats() + NUM_FORMULAS * NUM_FORMULA_TYPES;
}

EXPERT_EXPORT(expert_known_digest)
int32_t expert_known_digest(int32_t number, int32_t type, int32_t num_tokens, uint8_t *scratch,
                            size_t scratch_bytes, uint8_t digest[32]) {
    const ExpertFormat *format = expert_find_format(type);
    if (!format) return EXPERT_UNSUPPORTED_FORMAT;
    if (number < -1 || number >= NUM_FORMULAS) return EXPERT_UNSUPPORTED_FORMULA;
    if (num_tokens < 1 || num_tokens > MAX_TOKENS) return EXPERT_BAD_SIZE;
    const Case known = case_of(format);
    if (scratch_bytes < case_bytes(&known, number)) return EXPERT_SCRATCH_TOO_SMALL;
    uint8_t *memory = scratch + (64 - (uintptr_t)scratch % 64) % 64;
    return run(&known, number, (size_t)num_tokens, memory, digest);
}

EXPERT_EXPORT(expert_self_test)
int32_t expert_self_test(int32_t index, int32_t num_tokens, uint8_t *scratch, size_t scratch_bytes,
                         uint8_t digest[32]) {
    if (index < 0 || index >= expert_num_self_tests()) return EXPERT_UNSUPPORTED_FORMAT;
    const int32_t beyond = index - expert_num_formats();
    const int32_t number = beyond < 0 ? -1 : beyond / NUM_FORMULA_TYPES;
    const int32_t type =
        beyond < 0 ? expert_format_type(index) : formula_types[beyond % NUM_FORMULA_TYPES];
    const int32_t error =
        expert_known_digest(number, type, num_tokens, scratch, scratch_bytes, digest);
    if (error) return error;
    for (const Golden *g = golden; g->type >= 0; g++)
        if (g->formula == number && g->type == type && g->num_tokens == num_tokens &&
            matches(digest, g->digest))
            return EXPERT_OK;
    return EXPERT_SELF_TEST_FAILED;
}

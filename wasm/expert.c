// The expert, in the order of the formula; CONTRACT.md says the same in words. Read this first.
//
//   y[t] = Σ over the picks of row t:  weight * down( act(gate(x[t]), up(x[t])) ),  summed on the
//   integer grid
//
// Picks are sorted by expert, so that the weights of an expert are read once for all its rows (up
// to CHUNK of them).
#include "kernel.h"

enum { CHUNK = 64, ALIGN = 64, HEADER_BYTES = 64 };
enum { MAGIC = 0x31505845 }; // "EXP1"

// ---- the formula

typedef struct {
    const ExpertFormat *gate, *up,
        *down; // gate, up: [expert_dim, hidden_dim]; down: [hidden_dim, expert_dim]; gate may be null
    size_t hidden_dim, expert_dim;
    size_t gate_rows;   // expert_dim, or 0 without a gate
    size_t num_biases;  // floats: gate, up, down; 0 when there are none
    size_t num_scales;  // 0, 2 or 3
    uint64_t slice_bytes, packed_bytes;
    uint64_t gate_at, up_at, down_at, extras_at; // offsets in the packed expert
} Plan;

static uint64_t matrix_bytes(const ExpertFormat *format, uint64_t rows, uint64_t cols) {
    return rows * (cols / (uint64_t)format->block_cols) * (uint64_t)format->block_bytes;
}

static int fits(const ExpertFormat *format, uint64_t cols) {
    return cols % (uint64_t)format->block_cols == 0;
}

static int32_t make_plan(const ExpertFormula *formula, Plan *plan) {
    const int32_t error = check_formula(formula);
    if (error) return error;
    const int has_gate = formula->gate_type >= 0;
    plan->gate = has_gate ? expert_find_format(formula->gate_type) : NULL;
    plan->up = expert_find_format(formula->up_type);
    plan->down = expert_find_format(formula->down_type);
    if ((has_gate && !plan->gate) || !plan->up || !plan->down) return EXPERT_UNSUPPORTED_FORMAT;
    if (formula->hidden_dim <= 0 || formula->hidden_dim > EXPERT_MAX_DIM) return EXPERT_BAD_SIZE;
    if (formula->expert_dim <= 0 || formula->expert_dim > EXPERT_MAX_DIM) return EXPERT_BAD_SIZE;
    const uint64_t d = (uint64_t)formula->hidden_dim, f = (uint64_t)formula->expert_dim;
    if ((has_gate && !fits(plan->gate, d)) || !fits(plan->up, d) || !fits(plan->down, f))
        return EXPERT_BAD_SIZE;
    plan->hidden_dim = (size_t)d;
    plan->expert_dim = (size_t)f;
    plan->gate_rows = has_gate ? plan->expert_dim : 0;
    plan->num_biases =
        formula->extras & EXPERT_BIASED ? plan->gate_rows + plan->expert_dim + plan->hidden_dim : 0;
    plan->num_scales = !(formula->extras & EXPERT_SCALED) ? 0 : has_gate ? 3 : 2;
    const uint64_t extras_bytes = (uint64_t)(plan->num_biases + plan->num_scales) * 4;
    const uint64_t gate_bytes = has_gate ? matrix_bytes(plan->gate, f, d) : 0;
    plan->slice_bytes =
        gate_bytes + matrix_bytes(plan->up, f, d) + matrix_bytes(plan->down, d, f) + extras_bytes;
    plan->gate_at = HEADER_BYTES;
    plan->up_at = plan->gate_at + round_up(has_gate ? plan->gate->packed_bytes(f, d) : 0, ALIGN);
    plan->down_at = plan->up_at + round_up(plan->up->packed_bytes(f, d), ALIGN);
    plan->extras_at = plan->down_at + round_up(plan->down->packed_bytes(d, f), ALIGN);
    plan->packed_bytes = plan->extras_at + round_up(extras_bytes, ALIGN) + PACK_SLACK;
    return plan->packed_bytes > PTRDIFF_MAX ? EXPERT_BAD_SIZE : EXPERT_OK;
}

EXPERT_EXPORT(expert_abi_version) int32_t expert_abi_version(void) { return EXPERT_ABI_VERSION; }

#if defined(EXPERT_SCALAR)
#define BUILD_NAME "scalar"
#endif
EXPERT_EXPORT(expert_build) const char *expert_build(void) { return BUILD_NAME; }

EXPERT_EXPORT(expert_slice_bytes) ptrdiff_t expert_slice_bytes(const ExpertFormula *formula) {
    Plan plan;
    const int32_t error = make_plan(formula, &plan);
    return error ? error : (ptrdiff_t)plan.slice_bytes;
}

EXPERT_EXPORT(expert_packed_bytes) ptrdiff_t expert_packed_bytes(const ExpertFormula *formula) {
    Plan plan;
    const int32_t error = make_plan(formula, &plan);
    return error ? error : (ptrdiff_t)plan.packed_bytes;
}

// A packed expert begins with what it was packed for, so that it cannot be used for anything else.
static void write_header(const ExpertFormula *formula, int32_t header[HEADER_BYTES / 4]) {
    __builtin_memset(header, 0, HEADER_BYTES);
    header[0] = MAGIC;
    header[1] = LANES << 8 | (int32_t)sizeof(Quad);
    __builtin_memcpy(header + 2, formula, sizeof *formula);
}

static int32_t pack_extras(const Plan *plan, const uint8_t *extras, uint8_t *packed) {
    const size_t count = plan->num_biases + plan->num_scales;
    for (size_t i = 0; i < count; i++) {
        float value;
        __builtin_memcpy(&value, extras + 4 * i, 4);
        if (!f32_is_finite(value)) return EXPERT_NON_FINITE;
    }
    __builtin_memcpy(packed, extras, 4 * count);
    return EXPERT_OK;
}

EXPERT_EXPORT(expert_pack)
int32_t expert_pack(const ExpertFormula *formula, const uint8_t *slice, size_t slice_bytes,
                    uint8_t *packed, size_t packed_bytes) {
    Plan plan;
    int32_t error = make_plan(formula, &plan);
    if (error) return error;
    if (slice_bytes != plan.slice_bytes || packed_bytes != plan.packed_bytes)
        return EXPERT_BAD_SIZE;
    const size_t d = plan.hidden_dim, f = plan.expert_dim;
    const uint8_t *up = slice + (plan.gate ? matrix_bytes(plan.gate, f, d) : 0),
                  *down = up + matrix_bytes(plan.up, f, d),
                  *extras = down + matrix_bytes(plan.down, d, f);
    int32_t header[HEADER_BYTES / 4];
    write_header(formula, header);
    __builtin_memset(packed, 0, HEADER_BYTES); // no header while the pack is half done or refused
    if (plan.gate) error = plan.gate->pack(slice, f, d, packed + plan.gate_at);
    if (!error) error = plan.up->pack(up, f, d, packed + plan.up_at);
    if (!error) error = plan.down->pack(down, d, f, packed + plan.down_at);
    if (!error) error = pack_extras(&plan, extras, packed + plan.extras_at);
    if (!error) __builtin_memcpy(packed, header, HEADER_BYTES);
    return error;
}

// ---- one step

// Put weight * o on the grid and add it to the sums of its row. `scale`: f64 [hidden_dim], see
// grid_scales. n = rint(p / step) by adding and taking off 1.5 * 2^52; the low bits of that sum are
// n itself.
static int32_t add_to_grid(const float *p, size_t hidden_dim, const double *scale, int row_exponent,
                           int64_t *sums) {
    const double row_scale = power_of_two(-row_exponent), magic = 0x1.8p52;
    const int64_t magic_bits = 0x4338000000000000;
    int bad = 0;
    for (size_t c = 0; c < hidden_dim; c++) {
        union {
            double d;
            int64_t i;
        } shifted = {(double)p[c] * (scale[c] * row_scale) + magic};
        const double n = shifted.d - magic;
        bad |= !(__builtin_fabs(n) < 0x1p51);
        sums[c] = (int64_t)((uint64_t)sums[c] + (uint64_t)(shifted.i - magic_bits));
    }
    if (!bad) return EXPERT_OK;
    for (size_t c = 0; c < hidden_dim; c++)
        if (!f32_is_finite(p[c])) return EXPERT_NON_FINITE;
    return EXPERT_GRID_OVERFLOW;
}

// ---- one call

typedef struct { // what one call works with; the arrays stand in the caller's scratch
    const ExpertCall *call;
    Plan plan;
    size_t d, f, d_stride, f_stride;       // dimensions, and padded to ROW_PAD
    size_t gate_row, up_row, h_row;        // bytes of a row of activations
    uint32_t *first_pick, *order, *row_of; // [num_experts + 1], [num_picks], [num_picks]
    uint8_t *x[NUM_ACTIVATION_KINDS];      // [num_tokens] rows, for the kinds that are wanted
    float *row;                            // [hidden_dim] a row as f32 while it is arranged
    float *gate, *up;                      // [chunk, f_stride]
    uint8_t *h;                            // [chunk] rows
    float *out;                            // [chunk, d_stride]
    double *grid;                          // [hidden_dim]
} Job;

static int wants(const Plan *plan, ActivationKind kind) {
    return (plan->gate && plan->gate->wants == kind) || plan->up->wants == kind;
}

// Hand out the next piece of scratch. 64-bit, so that no size wraps in wasm32 before it is refused.
static void *take(uint64_t *cursor, uint64_t size_bytes) {
    void *piece = (void *)(uintptr_t)*cursor;
    *cursor += round_up(size_bytes, ALIGN);
    return piece;
}

// Fill the job with pointers, the first at `cursor`; returns where the last piece ends. From 0,
// that is the size needed.
static uint64_t lay_out(Job *job, uint64_t num_tokens, uint64_t num_picks, uint64_t num_experts,
                        uint64_t cursor) {
    const Plan *plan = &job->plan;
    const uint64_t chunk = num_picks < CHUNK ? num_picks : CHUNK;
    job->d = plan->hidden_dim;
    job->f = plan->expert_dim;
    job->d_stride = (size_t)round_up(job->d, ROW_PAD);
    job->f_stride = (size_t)round_up(job->f, ROW_PAD);
    job->gate_row = plan->gate ? (size_t)activation_bytes(plan->gate->wants, job->d) : 0;
    job->up_row = (size_t)activation_bytes(plan->up->wants, job->d);
    job->h_row = (size_t)activation_bytes(plan->down->wants, job->f);
    job->first_pick = take(&cursor, (num_experts + 1) * 4);
    job->order = take(&cursor, num_picks * 4);
    job->row_of = take(&cursor, num_picks * 4);
    for (int i = 0; i < NUM_ACTIVATION_KINDS; i++) {
        const ActivationKind kind = (ActivationKind)i;
        const uint64_t row_bytes = wants(plan, kind) ? activation_bytes(kind, job->d) : 0;
        job->x[i] = take(&cursor, num_tokens * row_bytes);
    }
    job->row = take(&cursor, job->d * 4);
    job->gate = take(&cursor, chunk * job->f_stride * 4);
    job->up = take(&cursor, chunk * job->f_stride * 4);
    job->h = take(&cursor, chunk * job->h_row);
    job->out = take(&cursor, chunk * job->d_stride * 4);
    job->grid = take(&cursor, job->d * 8);
    return cursor;
}

EXPERT_EXPORT(expert_scratch_bytes)
ptrdiff_t expert_scratch_bytes(const ExpertFormula *formula, size_t num_tokens, size_t num_picks,
                               size_t num_experts) {
    Job job;
    const int32_t error = make_plan(formula, &job.plan);
    if (error) return error;
    if (num_tokens > EXPERT_MAX_TOKENS || num_experts > EXPERT_MAX_TOKENS) return EXPERT_BAD_SIZE;
    if (num_picks > (uint64_t)num_tokens * EXPERT_MAX_PICKS_PER_TOKEN) return EXPERT_BAD_SIZE;
    const uint64_t size_bytes = lay_out(&job, num_tokens, num_picks, num_experts, 0) + ALIGN;
    return size_bytes > PTRDIFF_MAX ? EXPERT_BAD_SIZE : (ptrdiff_t)size_bytes;
}

static int32_t check_call(const ExpertCall *call, const Plan *plan) {
    const size_t row_bytes = encoded_row_bytes(call->x_encoding, plan->hidden_dim);
    if (call->x_encoding > EXPERT_X_Q8A256) return EXPERT_BAD_VALUE;
    if (row_bytes == 0 || call->x_bytes / row_bytes != call->num_tokens ||
        call->x_bytes % row_bytes)
        return EXPERT_BAD_SIZE;
    if (call->x_encoding >= EXPERT_X_Q8A32) {
        const ActivationKind kind = call->x_encoding == EXPERT_X_Q8A32 ? WANTS_Q8A32 : WANTS_Q8A256;
        if ((plan->gate && plan->gate->wants != kind) || plan->up->wants != kind)
            return EXPERT_ENCODING_MISMATCH;
    }
    size_t num_picks = 0;
    for (size_t t = 0; t < call->num_tokens; t++) {
        if (call->counts[t] > EXPERT_MAX_PICKS_PER_TOKEN) return EXPERT_BAD_SIZE;
        if (call->row_exponents[t] < MIN_ROW_EXPONENT || call->row_exponents[t] > MAX_ROW_EXPONENT)
            return EXPERT_BAD_VALUE;
        num_picks += call->counts[t];
    }
    if (num_picks != call->num_picks) return EXPERT_BAD_SIZE;
    for (size_t i = 0; i < num_picks; i++) {
        if (call->pick_expert[i] >= call->num_experts) return EXPERT_BAD_INDEX;
        if (!f32_is_finite(call->pick_weight[i])) return EXPERT_NON_FINITE;
    }
    int32_t header[HEADER_BYTES / 4];
    write_header(call->formula, header);
    for (size_t e = 0; e < call->num_experts; e++)
        if (__builtin_memcmp(call->experts[e], header, HEADER_BYTES) != 0) return EXPERT_NOT_PACKED;
    return EXPERT_OK;
}

// order: the picks sorted by expert, stable; first_pick[e] is where those of expert e begin.
static void sort_picks(const Job *job) {
    const ExpertCall *call = job->call;
    uint32_t *const first = job->first_pick;
    __builtin_memset(first, 0, (call->num_experts + 1) * 4);
    for (size_t i = 0; i < call->num_picks; i++) first[call->pick_expert[i] + 1]++;
    for (size_t e = 0; e < call->num_experts; e++) first[e + 1] += first[e];
    size_t i = 0;
    for (size_t t = 0; t < call->num_tokens; t++) {
        for (size_t k = 0; k < call->counts[t]; k++, i++) {
            job->order[first[call->pick_expert[i]]++] = (uint32_t)i;
            job->row_of[i] = (uint32_t)t;
        }
    }
    for (size_t e = call->num_experts; e > 0; e--) first[e] = first[e - 1]; // undo the increments
    first[0] = 0;
}

// Bring row t into every form that gate and up multiply.
static int32_t arrange_row(const Job *job, size_t t) {
    const ExpertCall *call = job->call;
    const size_t d = job->d;
    const uint8_t *x = call->x + t * encoded_row_bytes(call->x_encoding, d);
    if (call->x_encoding >= EXPERT_X_Q8A32) {
        const int small = call->x_encoding == EXPERT_X_Q8A32;
        const ActivationKind kind = small ? WANTS_Q8A32 : WANTS_Q8A256;
        const int8_t *ints = (const int8_t *)x + d / (small ? 32 : 256) * 4;
        return arrange_q8(x, ints, d, kind, job->x[kind] + t * job->up_row);
    }
    if (call->x_encoding == EXPERT_X_F32) {
        __builtin_memcpy(job->row, x, d * 4);
    } else {
        for (size_t c = 0; c < d; c++) job->row[c] = f16_to_f32(load_u16(x + 2 * c));
    }
    for (int i = 0; i < NUM_ACTIVATION_KINDS; i++) {
        const ActivationKind kind = (ActivationKind)i;
        if (!wants(&job->plan, kind)) continue;
        uint8_t *out = job->x[i] + t * activation_bytes(kind, d);
        const int32_t error = arrange_f32(job->row, d, kind, out);
        if (error) return error;
    }
    return EXPERT_OK;
}

// Biases and scales of a packed expert; null where the formula has none.
typedef struct {
    const float *gate_bias, *up_bias, *down_bias;
    const float *gate_scale, *up_scale, *down_scale;
} Extras;

static Extras extras_of(const Plan *plan, const uint8_t *packed) {
    const float *biases = (const float *)(const void *)(packed + plan->extras_at);
    const float *scales = biases + plan->num_biases;
    Extras extras = {0};
    if (plan->num_biases) {
        extras.gate_bias = biases;
        extras.up_bias = biases + plan->gate_rows;
        extras.down_bias = extras.up_bias + plan->expert_dim;
    }
    if (plan->num_scales) {
        extras.gate_scale = scales;
        extras.up_scale = scales + plan->num_scales - 2;
        extras.down_scale = scales + plan->num_scales - 1;
    }
    return extras;
}

// h = act(gate . x, up . x) for n picks of one expert, arranged for down. Without a gate the product
// of up takes its place.
static int32_t hidden(const Job *job, const uint8_t *packed, const Extras *extras,
                      const uint32_t *picks, size_t n) {
    const ExpertCall *call = job->call;
    const Plan *plan = &job->plan;
    const size_t f = job->f;
    const int before = call->formula->weight_position == EXPERT_WEIGHT_BEFORE;
    float *const up = plan->gate ? job->up : job->gate;
    const uint8_t *x[CHUNK];
    if (plan->gate) {
        for (size_t i = 0; i < n; i++)
            x[i] = job->x[plan->gate->wants] + job->row_of[picks[i]] * job->gate_row;
        plan->gate->rows(packed + plan->gate_at, f, job->d, x, n, job->gate, job->f_stride);
    }
    for (size_t i = 0; i < n; i++)
        x[i] = job->x[plan->up->wants] + job->row_of[picks[i]] * job->up_row;
    plan->up->rows(packed + plan->up_at, f, job->d, x, n, up, job->f_stride);
    for (size_t i = 0; i < n; i++) {
        const float *weight = before ? call->pick_weight + picks[i] : NULL;
        float *g = job->gate + i * job->f_stride, *u = up + i * job->f_stride;
        int32_t error = finish_product(u, f, weight, extras->up_scale, extras->up_bias);
        if (!error && plan->gate)
            error = finish_product(g, f, weight, extras->gate_scale, extras->gate_bias);
        if (error) return error;
        activate(call->formula, g, plan->gate ? u : NULL, f);
        error = arrange_f32(g, f, plan->down->wants, job->h + i * job->h_row);
        if (error) return error;
    }
    return EXPERT_OK;
}

// p = weight * (down . h) for those picks, and on to the grid.
static int32_t weighted(const Job *job, const uint8_t *packed, const Extras *extras,
                        const uint32_t *picks, size_t n) {
    const ExpertCall *call = job->call;
    const Plan *plan = &job->plan;
    const size_t d = job->d;
    const int after = call->formula->weight_position == EXPERT_WEIGHT_AFTER;
    const uint8_t *h[CHUNK];
    for (size_t i = 0; i < n; i++) h[i] = job->h + i * job->h_row;
    plan->down->rows(packed + plan->down_at, d, job->f, h, n, job->out, job->d_stride);
    for (size_t i = 0; i < n; i++) {
        const size_t pick = picks[i], t = job->row_of[pick];
        const float *weight = after ? call->pick_weight + pick : NULL;
        float *p = job->out + i * job->d_stride;
        int32_t error = finish_product(p, d, NULL, extras->down_scale, extras->down_bias);
        if (!error) error = finish_product(p, d, weight, NULL, NULL);
        if (error) return error;
        if (call->outputs) __builtin_memcpy(call->outputs + pick * d, p, d * 4);
        if (call->sums) {
            error = add_to_grid(p, d, job->grid, call->row_exponents[t], call->sums + t * d);
            if (error) return error;
        }
    }
    return EXPERT_OK;
}

__attribute__((noinline)) static int32_t answer(const ExpertCall *call) {
    const ptrdiff_t scratch_bytes =
        expert_scratch_bytes(call->formula, call->num_tokens, call->num_picks, call->num_experts);
    if (scratch_bytes < 0) return (int32_t)scratch_bytes;
    if (call->scratch_bytes < (size_t)scratch_bytes) return EXPERT_SCRATCH_TOO_SMALL;
    Job job = {.call = call};
    int32_t error = make_plan(call->formula, &job.plan);
    if (!error) error = check_call(call, &job.plan);
    if (error) return error;
    lay_out(&job, call->num_tokens, call->num_picks, call->num_experts,
            round_up((uintptr_t)call->scratch, ALIGN));
    if (call->sums) {
        error = grid_scales(call->grid, call->layer_exponents, job.d, job.grid);
        if (error) return error;
        __builtin_memset(call->sums, 0, call->num_tokens * job.d * sizeof(int64_t));
    }
    for (size_t t = 0; t < call->num_tokens; t++) {
        error = arrange_row(&job, t);
        if (error) return error;
    }
    sort_picks(&job);
    for (size_t e = 0; e < call->num_experts; e++) {
        const uint8_t *packed = call->experts[e];
        const Extras extras = extras_of(&job.plan, packed);
        for (size_t i = job.first_pick[e]; i < job.first_pick[e + 1]; i += CHUNK) {
            const size_t left = job.first_pick[e + 1] - i, n = left < CHUNK ? left : CHUNK;
            error = hidden(&job, packed, &extras, job.order + i, n);
            if (!error) error = weighted(&job, packed, &extras, job.order + i, n);
            if (error) return error;
        }
    }
    return EXPERT_OK;
}

EXPERT_EXPORT(expert_answer) int32_t expert_answer(const ExpertCall *call) {
    const FloatMode mode = plain_floats();
    const int32_t error = answer(call);
    restore_floats(mode);
    return error;
}

EXPERT_EXPORT(expert_read_memory)
uint32_t expert_read_memory(const uint8_t *data, size_t size_bytes) {
    uint32_t sum[16] = {0}; // sixteen sums, so that the compiler reads as wide as it can
    for (size_t i = 0; i + 64 <= size_bytes; i += 64) {
        uint32_t words[16];
        __builtin_memcpy(words, data + i, 64);
        for (int k = 0; k < 16; k++) sum[k] += words[k];
    }
    uint32_t total = 0;
    for (int k = 0; k < 16; k++) total += sum[k];
    return total;
}

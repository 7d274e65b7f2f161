// The expert, in the order of the formula; CONTRACT.md says the same in words. Read this first.
//
//   y[t] = Σ over the picks of row t:  weight * down( act(gate(x[t]), up(x[t])) ),  summed on the
//   integer grid
//
// Picks are sorted by expert, so that the weights of an expert are read once for all its rows (up
// to CHUNK of them).
#include "plan.h"

enum { CHUNK = 64 };

// ---- one call

typedef struct { // what one call works with; the arrays stand in the caller's scratch
    const ExpertCall *call;
    Plan plan;
    ExpertRows rows;                       // what of gate and up, and of down, is computed
    size_t units, channels;                // how many rows that is
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
    const int32_t error = make_plan(formula, NULL, &job.plan);
    if (error) return error;
    if (num_tokens > EXPERT_MAX_TOKENS || num_experts > EXPERT_MAX_TOKENS) return EXPERT_BAD_SIZE;
    if (num_picks > (uint64_t)num_tokens * EXPERT_MAX_PICKS_PER_TOKEN) return EXPERT_BAD_SIZE;
    const uint64_t size_bytes = lay_out(&job, num_tokens, num_picks, num_experts, 0) + ALIGN;
    return size_bytes > PTRDIFF_MAX ? EXPERT_BAD_SIZE : (ptrdiff_t)size_bytes;
}

static int32_t check_x(const ExpertCall *call, const Plan *plan) {
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
    return EXPERT_OK;
}

static int32_t check_call(const ExpertCall *call) {
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
    return EXPERT_OK;
}

static int holds(const ExpertRows *held, const ExpertRows *rows) {
    const int no_units = rows->first_unit == rows->end_unit,
              no_channels = rows->first_channel == rows->end_channel;
    return (no_units ||
            (held->first_unit <= rows->first_unit && rows->end_unit <= held->end_unit)) &&
           (no_channels ||
            (held->first_channel <= rows->first_channel && rows->end_channel <= held->end_channel));
}

// Plan for the rows that the experts hold, all of them the same; `rows` must be among them.
static int32_t plan_for_experts(Job *job) {
    const ExpertCall *call = job->call;
    Header header;
    if (call->num_experts > 0) {
        __builtin_memcpy(&header, call->experts[0], HEADER_BYTES);
        const ExpertRows held = header.held;
        if (make_plan(call->formula, &held, &job->plan)) return EXPERT_NOT_PACKED;
        write_header(call->formula, &held, &header);
    }
    for (size_t e = 0; e < call->num_experts; e++)
        if (__builtin_memcmp(call->experts[e], &header, HEADER_BYTES) != 0)
            return EXPERT_NOT_PACKED;
    return holds(&job->plan.held, &job->rows) ? EXPERT_OK : EXPERT_NOT_PACKED;
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

// Rows [first, first + count) of a packed matrix whose first row is number `held`.
static void products(const ExpertFormat *format, const uint8_t *matrix, int32_t held, int32_t first,
                     size_t count, size_t cols, const uint8_t *const *x, size_t n, float *y,
                     size_t stride) {
    if (count == 0) return;
    const uint64_t skipped = format->packed_bytes((uint64_t)(first - held), cols);
    format->rows(matrix + skipped, count, cols, x, n, y, stride);
}

// job->gate = act(gate . x, up . x), the units asked for, for n picks of one expert. Without a gate
// the product of up takes its place.
static int32_t hidden(const Job *job, const uint8_t *packed, const Extras *extras,
                      const uint32_t *picks, size_t n) {
    const ExpertCall *call = job->call;
    const Plan *plan = &job->plan;
    const int32_t first = job->rows.first_unit, held = plan->held.first_unit;
    const int before = call->formula->weight_position == EXPERT_WEIGHT_BEFORE;
    const float *gate_bias = extras->gate_bias ? extras->gate_bias + first : NULL,
                *up_bias = extras->up_bias ? extras->up_bias + first : NULL;
    float *const up = plan->gate ? job->up : job->gate;
    const uint8_t *x[CHUNK];
    if (plan->gate) {
        for (size_t i = 0; i < n; i++)
            x[i] = job->x[plan->gate->wants] + job->row_of[picks[i]] * job->gate_row;
        products(plan->gate, packed + plan->gate_at, held, first, job->units, job->d, x, n,
                 job->gate, job->f_stride);
    }
    for (size_t i = 0; i < n; i++)
        x[i] = job->x[plan->up->wants] + job->row_of[picks[i]] * job->up_row;
    products(plan->up, packed + plan->up_at, held, first, job->units, job->d, x, n, up,
             job->f_stride);
    for (size_t i = 0; i < n; i++) {
        const float *weight = before ? call->pick_weight + picks[i] : NULL;
        float *g = job->gate + i * job->f_stride, *u = up + i * job->f_stride;
        int32_t error = finish_product(u, job->units, weight, extras->up_scale, up_bias);
        if (!error && plan->gate)
            error = finish_product(g, job->units, weight, extras->gate_scale, gate_bias);
        if (error) return error;
        activate(call->formula, g, plan->gate ? u : NULL, job->units);
    }
    return EXPERT_OK;
}

// p = weight * (down . h) for those picks, the channels asked for, and on to the grid. Their h are
// arranged in job->h; a row of results is out_stride numbers.
static int32_t weighted(const Job *job, const uint8_t *packed, const Extras *extras,
                        const uint32_t *picks, size_t n, size_t out_stride) {
    const ExpertCall *call = job->call;
    const Plan *plan = &job->plan;
    const int32_t first = job->rows.first_channel;
    const int after = call->formula->weight_position == EXPERT_WEIGHT_AFTER;
    const float *bias = extras->down_bias ? extras->down_bias + first : NULL;
    const size_t count = job->channels;
    const uint8_t *h[CHUNK];
    for (size_t i = 0; i < n; i++) h[i] = job->h + i * job->h_row;
    products(plan->down, packed + plan->down_at, plan->held.first_channel, first, count, job->f, h,
             n, job->out, job->d_stride);
    for (size_t i = 0; i < n; i++) {
        const size_t pick = picks[i], t = job->row_of[pick];
        const float *weight = after ? call->pick_weight + pick : NULL;
        float *p = job->out + i * job->d_stride;
        int32_t error = finish_product(p, count, NULL, extras->down_scale, bias);
        if (!error) error = finish_product(p, count, weight, NULL, NULL);
        if (error) return error;
        if (call->outputs) __builtin_memcpy(call->outputs + pick * out_stride, p, count * 4);
        if (call->sums) {
            error = add_to_grid(p, count, job->grid + first, call->row_exponents[t],
                                call->sums + t * out_stride);
            if (error) return error;
        }
    }
    return EXPERT_OK;
}

static int32_t arrange_rows(const Job *job) {
    const int32_t error = check_x(job->call, &job->plan);
    if (error) return error;
    for (size_t t = 0; t < job->call->num_tokens; t++) {
        const int32_t refused = arrange_row(job, t);
        if (refused) return refused;
    }
    return EXPERT_OK;
}

static int32_t clear_sums(const Job *job, size_t out_stride) {
    const ExpertCall *call = job->call;
    if (!call->sums) return EXPERT_OK;
    const int32_t error = grid_scales(call->grid, call->layer_exponents, job->d, job->grid);
    for (size_t t = 0; t < call->num_tokens && !error; t++)
        __builtin_memset(call->sums + t * out_stride, 0, job->channels * sizeof(int64_t));
    return error;
}

// Check everything but x, lay out the scratch, sort the picks.
static int32_t begin(const ExpertCall *call, const ExpertRows *rows, Job *job) {
    const ptrdiff_t scratch_bytes =
        expert_scratch_bytes(call->formula, call->num_tokens, call->num_picks, call->num_experts);
    if (scratch_bytes < 0) return (int32_t)scratch_bytes;
    if (call->scratch_bytes < (size_t)scratch_bytes) return EXPERT_SCRATCH_TOO_SMALL;
    *job = (Job){.call = call};
    int32_t error = make_plan(call->formula, rows, &job->plan); // says whether `rows` can be
    if (error) return error;
    job->rows = job->plan.held;
    job->units = (size_t)(job->rows.end_unit - job->rows.first_unit);
    job->channels = (size_t)(job->rows.end_channel - job->rows.first_channel);
    error = check_call(call);
    if (!error) error = plan_for_experts(job);
    if (error) return error;
    lay_out(job, call->num_tokens, call->num_picks, call->num_experts,
            round_up((uintptr_t)call->scratch, ALIGN));
    sort_picks(job);
    return EXPERT_OK;
}

// For each expert of the call, and each chunk of its picks: all steps in one go, or only the first
// half, into h, or only the second, out of it.
typedef enum { WHOLE, ONLY_HIDDEN, ONLY_OUTPUTS } Half;

static int32_t chunk(const Job *job, const uint8_t *packed, const uint32_t *picks, size_t n,
                     Half half, float *h, size_t h_stride, size_t out_stride) {
    const Extras extras = extras_of(&job->plan, packed);
    int32_t error = EXPERT_OK;
    if (half != ONLY_OUTPUTS) error = hidden(job, packed, &extras, picks, n);
    for (size_t i = 0; i < n && !error; i++) {
        float *const mine = job->gate + i * job->f_stride;
        float *const row = half == WHOLE ? mine : h + picks[i] * h_stride;
        if (half == ONLY_HIDDEN)
            __builtin_memcpy(row, mine, job->units * 4);
        else
            error = arrange_f32(row, job->f, job->plan.down->wants, job->h + i * job->h_row);
    }
    if (error || half == ONLY_HIDDEN) return error;
    return weighted(job, packed, &extras, picks, n, out_stride);
}

static int32_t each_chunk(const Job *job, Half half, float *h, size_t h_stride, size_t out_stride) {
    for (size_t e = 0; e < job->call->num_experts; e++) {
        for (size_t i = job->first_pick[e]; i < job->first_pick[e + 1]; i += CHUNK) {
            const size_t left = job->first_pick[e + 1] - i, n = left < CHUNK ? left : CHUNK;
            const int32_t error =
                chunk(job, job->call->experts[e], job->order + i, n, half, h, h_stride, out_stride);
            if (error) return error;
        }
    }
    return EXPERT_OK;
}

__attribute__((noinline)) static int32_t compute(const ExpertCall *call, const ExpertRows *rows,
                                                 Half half, float *h, size_t h_stride,
                                                 size_t out_stride) {
    Job job;
    int32_t error = begin(call, rows, &job);
    if (!error && half != ONLY_OUTPUTS) error = arrange_rows(&job);
    if (!error && half != ONLY_HIDDEN) error = clear_sums(&job, out_stride);
    return error ? error : each_chunk(&job, half, h, h_stride, out_stride);
}

EXPERT_EXPORT(expert_answer) int32_t expert_answer(const ExpertCall *call) {
    const FloatMode mode = plain_floats();
    const size_t stride = (size_t)call->formula->hidden_dim;
    const int32_t error = compute(call, NULL, WHOLE, NULL, 0, stride);
    restore_floats(mode);
    return error;
}

EXPERT_EXPORT(expert_hidden)
int32_t expert_hidden(const ExpertCall *call, const ExpertRows *rows, float *h, size_t h_stride) {
    const FloatMode mode = plain_floats();
    const int32_t error = compute(call, rows, ONLY_HIDDEN, h, h_stride, 0);
    restore_floats(mode);
    return error;
}

EXPERT_EXPORT(expert_finish)
int32_t expert_finish(const ExpertCall *call, const ExpertRows *rows, const float *h,
                      size_t h_stride, size_t out_stride) {
    const FloatMode mode = plain_floats();
    const int32_t error =
        compute(call, rows, ONLY_OUTPUTS, (float *)(uintptr_t)h, h_stride, out_stride);
    restore_floats(mode);
    return error;
}

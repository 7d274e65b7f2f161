// From a slice as it stands in the GGUF to the form in which this build computes it: the plan of a
// formula, and packing, whole or piece by piece.
//
//   packed    | header | gate | up | down | biases, scales |     each at a multiple of 64 bytes
//
// Matrices may be packed in part (ExpertRows); biases and scales are always whole.
#include "plan.h"

enum { MAGIC = 0x31505845 }; // "EXP1"

static uint64_t row_bytes(const ExpertFormat *format, uint64_t cols) {
    return cols / (uint64_t)format->block_cols * (uint64_t)format->block_bytes;
}

static int fits(const ExpertFormat *format, uint64_t cols) {
    return cols % (uint64_t)format->block_cols == 0;
}

static int is_range(int32_t first, int32_t end, int32_t dim) {
    return 0 <= first && first <= end && end <= dim &&
           (first % EXPERT_SPLIT == 0 || first == dim) && (end % EXPERT_SPLIT == 0 || end == dim);
}

int32_t make_plan(const ExpertFormula *formula, const ExpertRows *rows, Plan *plan) {
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
    plan->held = rows ? *rows : (ExpertRows){0, formula->expert_dim, 0, formula->hidden_dim};
    if (!is_range(plan->held.first_unit, plan->held.end_unit, formula->expert_dim) ||
        !is_range(plan->held.first_channel, plan->held.end_channel, formula->hidden_dim))
        return EXPERT_BAD_SIZE;
    const uint64_t units = (uint64_t)(plan->held.end_unit - plan->held.first_unit),
                   channels = (uint64_t)(plan->held.end_channel - plan->held.first_channel);
    plan->hidden_dim = (size_t)d;
    plan->expert_dim = (size_t)f;
    plan->gate_rows = has_gate ? plan->expert_dim : 0;
    plan->num_biases =
        formula->extras & EXPERT_BIASED ? plan->gate_rows + plan->expert_dim + plan->hidden_dim : 0;
    plan->num_scales = !(formula->extras & EXPERT_SCALED) ? 0 : has_gate ? 3 : 2;
    const uint64_t extras_bytes = (uint64_t)(plan->num_biases + plan->num_scales) * 4;
    plan->up_in_slice = has_gate ? f * row_bytes(plan->gate, d) : 0;
    plan->down_in_slice = plan->up_in_slice + f * row_bytes(plan->up, d);
    plan->extras_in_slice = plan->down_in_slice + d * row_bytes(plan->down, f);
    plan->slice_bytes = plan->extras_in_slice + extras_bytes;
    plan->gate_at = HEADER_BYTES;
    plan->up_at =
        plan->gate_at + round_up(has_gate ? plan->gate->packed_bytes(units, d) : 0, ALIGN);
    plan->down_at = plan->up_at + round_up(plan->up->packed_bytes(units, d), ALIGN);
    plan->extras_at = plan->down_at + round_up(plan->down->packed_bytes(channels, f), ALIGN);
    plan->packed_bytes = plan->extras_at + round_up(extras_bytes, ALIGN) + PACK_SLACK;
    return plan->packed_bytes > PTRDIFF_MAX || plan->slice_bytes > PTRDIFF_MAX ? EXPERT_BAD_SIZE
                                                                               : EXPERT_OK;
}

void write_header(const ExpertFormula *formula, const ExpertRows *held, Header *header) {
    const int32_t build = LANES << 8 | (int32_t)sizeof(Quad);
    *header = (Header){.magic = MAGIC, .build = build, .formula = *formula, .held = *held};
}

EXPERT_EXPORT(expert_slice_bytes) ptrdiff_t expert_slice_bytes(const ExpertFormula *formula) {
    Plan plan;
    const int32_t error = make_plan(formula, NULL, &plan);
    return error ? error : (ptrdiff_t)plan.slice_bytes;
}

EXPERT_EXPORT(expert_part_bytes)
ptrdiff_t expert_part_bytes(const ExpertFormula *formula, const ExpertRows *rows) {
    Plan plan;
    const int32_t error = make_plan(formula, rows, &plan);
    return error ? error : (ptrdiff_t)plan.packed_bytes;
}

EXPERT_EXPORT(expert_packed_bytes) ptrdiff_t expert_packed_bytes(const ExpertFormula *formula) {
    return expert_part_bytes(formula, NULL);
}

// ---- pieces

typedef struct { // the held rows of one matrix, or the biases and scales: one stretch of the slice
    const ExpertFormat *format; // null: biases and scales
    uint64_t begin, end;        // in the slice
    uint64_t step;              // a piece is a multiple of it, or the rest
    size_t cols;
    uint64_t at; // in the packed expert
} Stretch;

static Stretch matrix_stretch(const ExpertFormat *format, uint64_t in_slice, size_t cols,
                              int32_t first, int32_t end, uint64_t at) {
    const uint64_t row = row_bytes(format, cols);
    return (Stretch){format,
                     in_slice + (uint64_t)first * row,
                     in_slice + (uint64_t)end * row,
                     EXPERT_SPLIT * row,
                     cols,
                     at};
}

static Stretch stretch(const Plan *plan, int which) {
    const ExpertRows *held = &plan->held;
    const int32_t first = held->first_unit, end = held->end_unit;
    switch (which) {
    case 0:
        if (!plan->gate) return (Stretch){0};
        return matrix_stretch(plan->gate, 0, plan->hidden_dim, first, end, plan->gate_at);
    case 1:
        return matrix_stretch(plan->up, plan->up_in_slice, plan->hidden_dim, first, end,
                              plan->up_at);
    case 2:
        return matrix_stretch(plan->down, plan->down_in_slice, plan->expert_dim,
                              held->first_channel, held->end_channel, plan->down_at);
    default: {
        const uint64_t size = plan->slice_bytes - plan->extras_in_slice;
        return (Stretch){NULL, plan->extras_in_slice, plan->slice_bytes, size, 0, plan->extras_at};
    }
    }
}

// The first piece at or behind `from`; returns its stretch, or -1 when nothing is left.
static int piece_from(const Plan *plan, uint64_t from, uint64_t max_bytes, ExpertPiece *piece) {
    for (int which = 0; which < 4; which++) {
        const Stretch s = stretch(plan, which);
        if (s.begin == s.end || from >= s.end) continue;
        const uint64_t begin = from > s.begin ? from : s.begin, left = s.end - begin;
        uint64_t size = max_bytes / s.step * s.step;
        if (size < s.step) size = s.step;
        *piece = (ExpertPiece){(size_t)begin, (size_t)(size < left ? size : left)};
        return which;
    }
    *piece = (ExpertPiece){(size_t)plan->slice_bytes, 0};
    return -1;
}

EXPERT_EXPORT(expert_next_piece)
int32_t expert_next_piece(const ExpertFormula *formula, const ExpertRows *rows, size_t max_bytes,
                          ExpertPiece *piece) {
    Plan plan;
    const int32_t error = make_plan(formula, rows, &plan);
    if (error) return error;
    piece_from(&plan, (uint64_t)piece->offset + piece->size, max_bytes, piece);
    return EXPERT_OK;
}

static int32_t pack_extras(const uint8_t *extras, size_t size_bytes, uint8_t *packed) {
    for (size_t i = 0; i < size_bytes; i += 4) {
        float value;
        __builtin_memcpy(&value, extras + i, 4);
        if (!f32_is_finite(value)) return EXPERT_NON_FINITE;
    }
    __builtin_memcpy(packed, extras, size_bytes);
    return EXPERT_OK;
}

// While an expert is half packed its header has no magic; behind it stands how far the slice was
// taken in.
static int32_t pack_piece(const Plan *plan, const ExpertFormula *formula, const ExpertPiece *piece,
                          const uint8_t *data, uint8_t *packed) {
    Header header = {0};
    ExpertPiece rest; // of a stretch; the piece is some of it, from its beginning
    const int is_first = piece_from(plan, 0, SIZE_MAX, &rest) >= 0 && rest.offset == piece->offset;
    __builtin_memcpy(&header, packed, HEADER_BYTES);
    uint64_t taken;
    __builtin_memcpy(&taken, &header.formula, sizeof taken);
    if (!is_first && header.magic != 0) return EXPERT_NOT_PACKED;
    __builtin_memset(packed, 0, HEADER_BYTES); // refused until the last piece is in
    const int which = piece_from(plan, is_first ? 0 : taken, SIZE_MAX, &rest);
    if (which < 0 || rest.offset != piece->offset || piece->size > rest.size)
        return EXPERT_BAD_SIZE;
    const Stretch s = stretch(plan, which);
    if (piece->size == 0 || (piece->size < rest.size && piece->size % s.step))
        return EXPERT_BAD_SIZE;
    int32_t error;
    if (s.format) {
        const uint64_t row = s.step / EXPERT_SPLIT, done = (piece->offset - s.begin) / row;
        error = s.format->pack(data, (size_t)(piece->size / row), s.cols,
                               packed + s.at + s.format->packed_bytes(done, s.cols));
    } else {
        error = pack_extras(data, piece->size, packed + s.at);
    }
    if (error) return error;
    taken = piece->offset + piece->size;
    header = (Header){0};
    if (piece_from(plan, taken, 0, &rest) < 0)
        write_header(formula, &plan->held, &header);
    else
        __builtin_memcpy(&header.formula, &taken, sizeof taken);
    __builtin_memcpy(packed, &header, HEADER_BYTES);
    return EXPERT_OK;
}

EXPERT_EXPORT(expert_pack_piece)
int32_t expert_pack_piece(const ExpertFormula *formula, const ExpertRows *rows,
                          const ExpertPiece *piece, const uint8_t *data, uint8_t *packed,
                          size_t packed_bytes) {
    Plan plan;
    const int32_t error = make_plan(formula, rows, &plan);
    if (error) return error;
    if (packed_bytes != plan.packed_bytes) return EXPERT_BAD_SIZE;
    return pack_piece(&plan, formula, piece, data, packed);
}

EXPERT_EXPORT(expert_pack)
int32_t expert_pack(const ExpertFormula *formula, const uint8_t *slice, size_t slice_bytes,
                    uint8_t *packed, size_t packed_bytes) {
    Plan plan;
    int32_t error = make_plan(formula, NULL, &plan);
    if (error) return error;
    if (slice_bytes != plan.slice_bytes || packed_bytes != plan.packed_bytes)
        return EXPERT_BAD_SIZE;
    ExpertPiece piece = {0, 0};
    while (!error && piece_from(&plan, (uint64_t)piece.offset + piece.size, SIZE_MAX, &piece) >= 0)
        error = pack_piece(&plan, formula, &piece, slice + piece.offset, packed);
    return error;
}

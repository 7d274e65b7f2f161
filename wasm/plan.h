// The sizes and places of one formula: what packing and computing have in common. Not for callers.
#ifndef EXPERT_PLAN_H
#define EXPERT_PLAN_H

#include "kernel.h"

enum { ALIGN = 64, HEADER_BYTES = 64 };

typedef struct {
    const ExpertFormat *gate, *up,
        *down; // gate, up: [expert_dim, hidden_dim]; down: [hidden_dim, expert_dim]; gate may be null
    size_t hidden_dim, expert_dim;
    size_t gate_rows;  // expert_dim, or 0 without a gate
    size_t num_biases; // floats: gate, up, down; 0 when there are none
    size_t num_scales; // 0, 2 or 3
    ExpertRows held;   // the rows that the packed expert holds
    uint64_t slice_bytes, packed_bytes;
    uint64_t up_in_slice, down_in_slice, extras_in_slice; // offsets; gate is the first
    uint64_t gate_at, up_at, down_at, extras_at;          // offsets in the packed expert
} Plan;

// rows null: all of them. EXPERT_BAD_SIZE when a bound of `rows` is none, or the formula cannot be.
int32_t make_plan(const ExpertFormula *formula, const ExpertRows *rows, Plan *plan);

// A packed expert begins with what it was packed for, so that it cannot be used for anything else.
typedef struct {
    int32_t magic, build;
    ExpertFormula formula;
    ExpertRows held;
} Header;
_Static_assert(sizeof(Header) == HEADER_BYTES, "the header is its words and nothing else");
void write_header(const ExpertFormula *formula, const ExpertRows *held, Header *header);

#endif

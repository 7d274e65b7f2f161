// The table of formats: adding one is a file beside this one and a line here.
#include "format.h"

static const ExpertFormat *const formats[] = {
    &expert_f32,    &expert_f16,   &expert_bf16,    &expert_q8_0,  &expert_q4_0,   &expert_q4_1,
    &expert_q5_0,   &expert_q5_1,  &expert_iq4_nl,  &expert_mxfp4, &expert_nvfp4,  &expert_q2_k,
    &expert_q3_k,   &expert_q4_k,  &expert_q5_k,    &expert_q6_k,  &expert_iq4_xs, &expert_iq2_xxs,
    &expert_iq2_xs, &expert_iq2_s, &expert_iq3_xxs, &expert_iq3_s, &expert_iq1_s,  &expert_iq1_m,
    &expert_tq1_0,  &expert_tq2_0,
};
enum { NUM_FORMATS = sizeof formats / sizeof formats[0] };

const ExpertFormat *expert_find_format(int32_t type) {
    for (size_t i = 0; i < NUM_FORMATS; i++)
        if (formats[i]->type == type) return formats[i];
    return NULL;
}

EXPERT_EXPORT(expert_num_formats) int32_t expert_num_formats(void) { return NUM_FORMATS; }

EXPERT_EXPORT(expert_format_type) int32_t expert_format_type(int32_t index) {
    return index >= 0 && index < NUM_FORMATS ? formats[index]->type : EXPERT_BAD_INDEX;
}

// From the products of gate and up to h: router weight before, scales, biases, clamps, activation.
// CONTRACT.md "Activation functions" has every formula and every constant; the order of operations
// here is the one written there.
#include "kernel.h"

// exp(x) for |x| <= 87 is 2^n * (1 + q), n the nearest integer to x / ln 2. Returns q, gives 2^n.
INLINE float exp_parts(float x, float *power) {
    const float n = (x * 0x1.715476p+0f + 0x1.8p23f) - 0x1.8p23f;
    float r = x - n * 0x1.63p-1f;
    r = r - n * -0x1.bd0106p-13f;
    float p = 0x1.a0d2cep-13f;
    p = p * r + 0x1.6e879cp-10f;
    p = p * r + 0x1.11121p-7f;
    p = p * r + 0x1.555382p-5f;
    p = p * r + 0x1.555554p-3f;
    p = p * r + 0x1p-1f;
    *power = bits_to_f32((uint32_t)((int32_t)n + 127) << 23);
    return p * (r * r) + r;
}

INLINE float at_most(float x, float limit) { return x < limit ? x : limit; }
INLINE float at_least(float x, float limit) { return x > limit ? x : limit; }
INLINE float within(float x, float limit) { return at_most(at_least(x, -limit), limit); }

// 1 + exp(-z), z limited to [-87, 87].
INLINE float one_plus_exp(float z) {
    float power;
    const float q = exp_parts(-within(z, 87.0f), &power);
    return 1.0f + (q + 1.0f) * power;
}

// a * sigmoid(z); exactly 0 below z = -87, where sigmoid is under 2e-38.
INLINE float gated(float a, float z) {
    const float s = a / one_plus_exp(z);
    return z < -87.0f ? 0.0f : s;
}

INLINE float silu(float g) { return gated(g, g); }

// The tanh form: g/2 (1 + tanh(sqrt(2/pi) (g + 0.044715 g^3))), and (1 + tanh t) / 2 is
// sigmoid(2t).
INLINE float gelu(float g) { return gated(g, g * (0x1.988454p+0f + 0x1.2444f2p-4f * (g * g))); }

INLINE float relu(float g) { return g > 0.0f ? g : 0.0f; }

// (e - 1) / (e + 1), e = exp(2y); e - 1 without cancellation near 0.
INLINE float tanh_poly(float x) {
    const float y = within(x, 10.0f);
    float power;
    const float q = exp_parts(y + y, &power);
    const float e_less_1 = q * power + (power - 1.0f);
    return e_less_1 / (e_less_1 + 2.0f);
}

static int is_bound(float value) { return value >= 0x1p-20f && value <= 0x1p20f; }

int32_t check_formula(const ExpertFormula *formula) {
    const int has_gate = formula->gate_type >= 0, limited = formula->limit != 0;
    const int position = formula->weight_position;
    if (position != EXPERT_WEIGHT_AFTER && position != EXPERT_WEIGHT_BEFORE)
        return EXPERT_UNSUPPORTED_FORMULA;
    if (formula->extras & ~(EXPERT_BIASED | EXPERT_SCALED)) return EXPERT_UNSUPPORTED_FORMULA;
    if (formula->gate_type < -1) return EXPERT_UNSUPPORTED_FORMAT;
    if (limited && !is_bound(formula->limit)) return EXPERT_UNSUPPORTED_FORMULA;
    int known;
    switch (formula->activation) {
    case EXPERT_SILU: known = has_gate || !limited; break;
    case EXPERT_GELU:
    case EXPERT_RELU:
    case EXPERT_RELU2: known = !limited; break;
    case EXPERT_SWIGLU_OAI: known = has_gate && limited && is_bound(formula->alpha); break;
    case EXPERT_SWIGLU_CLAMP: known = has_gate && limited; break;
    case EXPERT_SITU: known = has_gate && is_bound(formula->alpha); break;
    default: known = 0;
    }
    return known ? EXPERT_OK : EXPERT_UNSUPPORTED_FORMULA;
}

int32_t finish_product(float *y, size_t count, const float *weight, const float *scale,
                       const float *bias) {
    if (weight)
        for (size_t i = 0; i < count; i++) y[i] = *weight * y[i];
    if (scale)
        for (size_t i = 0; i < count; i++) y[i] = *scale * y[i];
    if (bias)
        for (size_t i = 0; i < count; i++) y[i] = y[i] + bias[i];
    return max_magnitude(y, count) > 0x7f7fffffu ? EXPERT_NON_FINITE : EXPERT_OK;
}

#define EACH_UNIT for (size_t i = 0; i < count; i++)

static void activate_gated(const ExpertFormula *formula, float *g, const float *u, size_t count) {
    const float alpha = formula->alpha, limit = formula->limit;
    switch (formula->activation) {
    case EXPERT_SILU:
        if (limit == 0)
            EACH_UNIT g[i] = silu(g[i]) * u[i];
        else
            EACH_UNIT g[i] = at_most(silu(g[i]), limit) * within(u[i], limit);
        break;
    case EXPERT_GELU: EACH_UNIT g[i] = gelu(g[i]) * u[i]; break;
    case EXPERT_RELU: EACH_UNIT g[i] = relu(g[i]) * u[i]; break;
    case EXPERT_RELU2: EACH_UNIT g[i] = relu(g[i]) * relu(g[i]) * u[i]; break;
    case EXPERT_SWIGLU_OAI:
        EACH_UNIT {
            const float a = at_most(g[i], limit);
            g[i] = gated(a, alpha * a) * (within(u[i], limit) + 1.0f);
        }
        break;
    case EXPERT_SWIGLU_CLAMP:
        EACH_UNIT g[i] = silu(at_most(g[i], limit)) * within(u[i], limit);
        break;
    default: { // EXPERT_SITU
        const float per_alpha = 1.0f / alpha, per_limit = limit == 0 ? 0 : 1.0f / limit;
        EACH_UNIT {
            const float a = gated(alpha * tanh_poly(g[i] * per_alpha), g[i]);
            g[i] = a * (limit == 0 ? u[i] : limit * tanh_poly(u[i] * per_limit));
        }
    }
    }
}

void activate(const ExpertFormula *formula, float *g, const float *u, size_t count) {
    if (u) {
        activate_gated(formula, g, u, count);
        return;
    }
    switch (formula->activation) {
    case EXPERT_SILU: EACH_UNIT g[i] = silu(g[i]); break;
    case EXPERT_GELU: EACH_UNIT g[i] = gelu(g[i]); break;
    case EXPERT_RELU: EACH_UNIT g[i] = relu(g[i]); break;
    default: EACH_UNIT g[i] = relu(g[i]) * relu(g[i]); // EXPERT_RELU2
    }
}

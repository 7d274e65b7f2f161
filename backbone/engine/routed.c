// The matcher works from the output backwards and ticks off what it understood; what is left over
// is refused.

#include "routed.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_TOP_K = 1024, MAX_DEPTH = MAX_TOP_K + 32 };

static const struct ggml_tensor *origin(const struct ggml_tensor *tensor) {
    return tensor->view_src ? tensor->view_src : tensor;
}

static bool moves_no_data(int op) {
    return op == ops.none || op == ops.view || op == ops.reshape || op == ops.transpose ||
           op == ops.permute;
}

static const struct ggml_tensor *weight_of(const struct ggml_tensor *op,
                                           is_swarm_weight is_weight) {
    for (int i = 0; i < ABI_MAX_SRC; i++)
        if (op->src[i] && is_weight(origin(op->src[i]))) return origin(op->src[i]);
    return NULL;
}

// ---- claiming ----

// The sum over the chosen experts, where the device's work ends.
static bool is_finished(const struct ggml_tensor *t) {
    return t->op == ops.add || t->op == ops.cont;
}

// Is this tensor computed from the device's weights, inside one layer's experts?
static bool in_chain(const struct ggml_tensor *t, is_swarm_weight is_weight, int depth) {
    if (!t || depth > MAX_DEPTH) return false;
    if (weight_of(t, is_weight)) return true;
    const struct ggml_tensor *a = t->src[0], *b = t->src[1];
    if (!a) return false;
    if (t->op == ops.view || t->op == ops.reshape || t->op == ops.glu || t->op == ops.unary ||
        t->op == ops.sqr || t->op == ops.scale || t->op == ops.clamp)
        return in_chain(a, is_weight, depth + 1) && !is_finished(a);
    if (t->op == ops.get_rows) // scales of the chosen experts
        return a->op == ops.repeat && weight_of(a, is_weight) != NULL;
    if (t->op == ops.cont) return a->op == ops.view && in_chain(a, is_weight, depth + 1);
    // activation times up, or down times router weights; never the finished sum
    if (t->op == ops.mul)
        return !is_finished(a) && in_chain(a, is_weight, depth + 1) &&
               (b->ne[0] == 1 || in_chain(b, is_weight, depth + 1));
    if (t->op == ops.add)
        return b->op == ops.view && in_chain(b, is_weight, depth + 1) &&
               in_chain(a, is_weight, depth + 1);
    return false;
}

// x once for each chosen expert, and that times the router's weights: no weight of the device is
// near, but it must have x itself, which may be gone once these are computed elsewhere.
static bool is_repeated_row(const struct ggml_tensor *t) {
    const struct ggml_tensor *x = t->src[0];
    return t->op == ops.repeat && x->ne[1] == 1 && x->ne[0] == t->ne[0] && x->ne[2] == t->ne[2] &&
           x->ne[3] == 1 && t->ne[3] == 1 && x->ne[0] > 1;
}

static bool is_weighted_row(const struct ggml_tensor *t) {
    return t->op == ops.mul && is_repeated_row(t->src[0]) && t->src[1]->ne[0] == 1 &&
           t->src[1]->ne[1] == t->ne[1] && t->src[1]->ne[2] == t->ne[2];
}

bool routed_claims(const struct ggml_tensor *op, is_swarm_weight is_weight) {
    return in_chain(op, is_weight, 0) || is_repeated_row(op) || is_weighted_row(op);
}

// ---- matching ----

struct match {
    struct ggml_cgraph *graph;
    is_swarm_weight is_weight;
    struct routed *found;
    struct swarm_refusal *refusal;
    const struct ggml_tensor **understood;
    int num_understood;
};

static int layer_of(const struct ggml_tensor *weight) {
    int layer = -1;
    return weight && sscanf(weight->name, "blk.%d.", &layer) == 1 ? layer : -1;
}

static int refuse(struct match *m, const struct ggml_tensor *t, const char *why) {
    const struct ggml_tensor *weight = weight_of(t, m->is_weight);
    int layer = m->found->seen.layer;
    if (layer < 0) layer = layer_of(weight);
    for (int i = 0; layer < 0 && i < lib.ggml_graph_n_nodes(m->graph); i++)
        layer = layer_of(weight_of(lib.ggml_graph_node(m->graph, i), m->is_weight));
    m->refusal->layer = layer;
    snprintf(m->refusal->op, sizeof m->refusal->op, "%s", lib.ggml_op_name(t->op));
    snprintf(m->refusal->tensor, sizeof m->refusal->tensor, "%s",
             weight       ? weight->name
             : t->name[0] ? t->name
                          : "(unnamed)");
    snprintf(m->refusal->why, sizeof m->refusal->why, "%s", why);
    return -1;
}

static void tick(struct match *m, const struct ggml_tensor *t) {
    m->understood[m->num_understood++] = t;
}

static const struct ggml_tensor *through_views(const struct ggml_tensor *t) {
    while ((t->op == ops.view || t->op == ops.reshape) && t->src[0]) t = t->src[0];
    return t;
}

// Is this a product times the scales of the chosen experts? What stands in the buffers are scales,
// one per expert: MUL(product, GET_ROWS(REPEAT(scales), ids)).
static bool is_scaled(const struct match *m, const struct ggml_tensor *t) {
    if (t->op != ops.mul) return false;
    const struct ggml_tensor *rows = through_views(t->src[1]);
    return rows->op == ops.get_rows && rows->src[0]->op == ops.repeat &&
           weight_of(rows->src[0], m->is_weight);
}

static int match_scale(struct match *m, const struct ggml_tensor *t) {
    const struct ggml_tensor *rows = through_views(t->src[1]), *repeated = rows->src[0];
    const struct ggml_tensor *scales = weight_of(repeated, m->is_weight);
    if (!m->found->ids) m->found->ids = rows->src[1];
    if (rows->src[1] != m->found->ids || repeated->ne[0] != 1 || t->src[1]->ne[0] != 1 ||
        scales->ne[0] != repeated->ne[1] || scales->ne[1] != 1 || scales->type != ABI_TYPE_F32)
        return refuse(m, t, "scales of experts in a shape that is not known");
    m->found->seen.scaled = 1;
    tick(m, t);
    tick(m, rows);
    tick(m, repeated);
    return 0;
}

// W · input for the chosen experts, with or without scale and bias; returns the MUL_MAT_ID or NULL
// after refusing.
static const struct ggml_tensor *match_product(struct match *m, const struct ggml_tensor *t) {
    t = through_views(t);
    if (t->op == ops.add_id) {
        if (!weight_of(t, m->is_weight))
            return refuse(m, t, "a bias that the swarm does not hold"), NULL;
        if (t->src[1]->type != ABI_TYPE_F32)
            return refuse(m, t, "a bias that is not float32"), NULL;
        if (!m->found->ids) m->found->ids = t->src[2];
        if (t->src[2] != m->found->ids)
            return refuse(m, t, "two different choices of experts in one layer"), NULL;
        m->found->seen.biased = 1;
        tick(m, t);
        t = through_views(t->src[0]);
    }
    if (is_scaled(m, t)) {
        if (match_scale(m, t)) return NULL;
        t = through_views(t->src[0]);
    }
    if (t->op != ops.mul_mat_id || !m->is_weight(t->src[0]))
        return refuse(m, t, "expected the product with an expert matrix"), NULL;
    if (!m->found->ids) m->found->ids = t->src[2];
    if (t->src[2] != m->found->ids)
        return refuse(m, t, "two different choices of experts in one layer"), NULL;
    if (layer_of(t->src[0]) != m->found->seen.layer)
        return refuse(m, t, "experts of two layers in one step"), NULL;
    tick(m, t);
    return t;
}

static int match_input(struct match *m, const struct ggml_tensor *product, bool second) {
    const struct ggml_tensor *x = product->src[1];
    bool weighted = is_weighted_row(x); // the router's weights come first
    if (second && weighted != (m->found->seen.weight_before == 1))
        return refuse(m, product, "gate and up differ in input");
    if (weighted) {
        bool others = m->found->weights && m->found->weights != x->src[1];
        if (others || (m->found->weights && !m->found->seen.weight_before))
            return refuse(m, product, "router weights before and after the experts");
        m->found->seen.weight_before = 1;
        m->found->weights = x->src[1];
        tick(m, x);
        tick(m, x->src[0]);
        x = x->src[0]->src[0];
    }
    if (second && through_views(x) != through_views(m->found->x))
        return refuse(m, product, "gate and up differ in input");
    m->found->x = x;
    return 0;
}

static int match_glu(struct match *m, const struct ggml_tensor *t) {
    struct swarm_layer *seen = &m->found->seen;
    int kind = lib.ggml_get_glu_op(t);
    bool plain = true; // swapped halves and clamps stand in the parameters after the kind
    for (int i = 1; i < 8; i++) plain = plain && t->op_params[i] == 0;
    if (kind == ops.glu_swiglu_oai) {
        seen->alpha = abi_parameter(t, 2);
        seen->limit = abi_parameter(t, 3);
        seen->activation = SWARM_SWIGLU_OAI;
    } else if (kind == ops.glu_swiglu_clamp) {
        seen->limit = abi_parameter(t, ops.swiglu_clamp_at);
        seen->activation = SWARM_SWIGLU_CLAMP;
    } else if (!plain) {
        return refuse(m, t, "a gated activation with parameters");
    } else if (kind == ops.glu_swiglu) {
        seen->activation = SWARM_SILU;
    } else if (kind == ops.glu_geglu) {
        seen->activation = SWARM_GELU;
    } else if (kind == ops.glu_reglu) {
        seen->activation = SWARM_RELU;
    } else {
        return refuse(m, t, "a gated activation that is not known");
    }
    return 0;
}

static bool is_unary(const struct ggml_tensor *t, int kind) {
    return t->op == ops.unary && lib.ggml_get_unary_op(t) == kind;
}

static int match_unary(struct match *m, const struct ggml_tensor *t) {
    struct swarm_layer *seen = &m->found->seen;
    int kind = lib.ggml_get_unary_op(t);
    seen->activation = kind == ops.unary_silu   ? SWARM_SILU
                       : kind == ops.unary_gelu ? SWARM_GELU
                       : kind == ops.unary_relu ? SWARM_RELU
                                                : SWARM_UNKNOWN;
    if (seen->activation == SWARM_UNKNOWN) return refuse(m, t, "an activation that is not known");
    tick(m, t);
    return 0;
}

// bound * tanh(input / bound); returns input and gives bound, or NULL.
static const struct ggml_tensor *match_tanh(struct match *m, const struct ggml_tensor *t,
                                            float *bound) {
    t = through_views(t);
    if (t->op != ops.scale || !is_unary(t->src[0], ops.unary_tanh)) return NULL;
    const struct ggml_tensor *curve = t->src[0], *inner = curve->src[0];
    *bound = abi_parameter(t, 0);
    if (inner->op != ops.scale || abi_parameter(t, 1) != 0 || abi_parameter(inner, 1) != 0 ||
        abi_parameter(inner, 0) != 1.0f / *bound)
        return NULL;
    tick(m, t);
    tick(m, curve);
    tick(m, inner);
    return inner->src[0];
}

// up limited to [-limit, limit]; returns what is limited, or NULL.
static const struct ggml_tensor *match_clamp(struct match *m, const struct ggml_tensor *t,
                                             float low, float limit) {
    if (t->op != ops.clamp || abi_parameter(t, 0) != low || abi_parameter(t, 1) != limit)
        return NULL;
    tick(m, t);
    return through_views(t->src[0]);
}

// act(gate) * up, written with single operations. Gives gate and up.
static int match_mul(struct match *m, const struct ggml_tensor *t, const struct ggml_tensor **gate,
                     const struct ggml_tensor **up) {
    struct swarm_layer *seen = &m->found->seen;
    const struct ggml_tensor *act = through_views(t->src[0]);
    *up = t->src[1];
    if (act->op == ops.unary) {
        if (match_unary(m, act)) return -1;
        *gate = act->src[0];
        return 0;
    }
    if (act->op == ops.clamp && is_unary(act->src[0], ops.unary_silu)) { // CLAMP(SILU) * CLAMP(up)
        seen->limit = abi_parameter(act, 1);
        *up = match_clamp(m, through_views(t->src[1]), -seen->limit, seen->limit);
        const struct ggml_tensor *silu = match_clamp(m, act, -__builtin_inff(), seen->limit);
        if (!*up || !silu || seen->limit <= 0)
            return refuse(m, t, "clamps of gate and up that are not known");
        if (match_unary(m, silu)) return -1;
        *gate = silu->src[0];
        return 0;
    }
    if (act->op == ops.mul && is_unary(act->src[1], ops.unary_sigmoid)) { // situ
        *gate = match_tanh(m, act->src[0], &seen->alpha);
        if (!*gate || through_views(*gate) != through_views(act->src[1]->src[0]))
            return refuse(m, t, "an activation that is not known");
        tick(m, act);
        tick(m, act->src[1]);
        float bound = 0;
        const struct ggml_tensor *bounded = match_tanh(m, t->src[1], &bound);
        if (bounded) {
            *up = bounded;
            seen->limit = bound;
        }
        seen->activation = SWARM_SITU;
        return 0;
    }
    return refuse(m, t, "an operation between up and down that is not known");
}

// h = act(gate) * up, down to x
static int match_hidden(struct match *m, const struct ggml_tensor *t) {
    struct swarm_layer *seen = &m->found->seen;
    const struct ggml_tensor *gate = NULL, *up = NULL;
    t = through_views(t);
    if (t->op == ops.glu) {
        if (match_glu(m, t)) return -1;
        gate = t->src[0];
        up = t->src[1] ? t->src[1] : t->src[0];
    } else if (t->op == ops.mul) {
        if (match_mul(m, t, &gate, &up)) return -1;
    } else if (t->op == ops.sqr && through_views(t->src[0])->op == ops.unary) {
        const struct ggml_tensor *act = through_views(t->src[0]);
        if (match_unary(m, act)) return -1;
        if (seen->activation != SWARM_RELU)
            return refuse(m, t, "the square of an activation that is not relu");
        seen->activation = SWARM_RELU2;
        up = act->src[0];
    } else if (t->op == ops.unary) {
        if (match_unary(m, t)) return -1;
        up = t->src[0];
    } else {
        return refuse(m, t, "an operation between up and down that is not known");
    }
    tick(m, t);

    const struct ggml_tensor *up_product = match_product(m, up);
    if (!up_product || match_input(m, up_product, false)) return -1;
    seen->up_type = up_product->src[0]->type;
    if (!gate) {
        seen->gate_type = -1;
    } else if (through_views(gate) == through_views(up)) { // merged: gate rows first, then up
        seen->gate_type = seen->up_type;
        if (up_product->src[0]->ne[1] != 2 * (int64_t)seen->expert_dim ||
            (gate != up && gate->view_offs >= up->view_offs))
            return refuse(m, t, "gate and up merged in an order that is not known");
    } else {
        const struct ggml_tensor *gate_product = match_product(m, gate);
        if (!gate_product || match_input(m, gate_product, true)) return -1;
        seen->gate_type = gate_product->src[0]->type;
    }
    return 0;
}

// out = y[:,0] + … + y[:,top_k - 1]; returns y, [hidden_dim, top_k, num_tokens], or NULL after
// refusing
static const struct ggml_tensor *match_sum(struct match *m, const struct ggml_tensor *out) {
    const struct ggml_tensor *t = out, *y = NULL;
    bool taken[MAX_TOP_K] = {false};
    int64_t count = 0;
    if (t->op == ops.cont) {
        tick(m, t);
        t = t->src[0];
    }
    for (bool more = true; more; count++) {
        const struct ggml_tensor *row = t;
        more = t->op == ops.add;
        if (more) {
            tick(m, t);
            row = t->src[1];
            t = t->src[0];
        }
        if (row->op != ops.view)
            return refuse(m, row, "expected the sum over the chosen experts"), NULL;
        if (!y) y = row->view_src;
        int64_t pick =
            row->nb[1] == y->nb[2] && y->nb[1] ? (int64_t)(row->view_offs / y->nb[1]) : -1;
        if (row->view_src != y || pick < 0 || pick >= y->ne[1] || pick >= MAX_TOP_K ||
            taken[pick] || row->view_offs % y->nb[1])
            return refuse(m, row, "a sum over the chosen experts in a shape that is not known"),
                   NULL;
        taken[pick] = true;
    }
    if (count != y->ne[1])
        return refuse(m, out, "a sum over some of the chosen experts only"), NULL;
    return y;
}

static int match_experts(struct match *m, const struct ggml_tensor *out) {
    struct routed *found = m->found;
    struct swarm_layer *seen = &found->seen;
    found->out = out;
    const struct ggml_tensor *y = match_sum(m, out);
    if (!y) return -1;
    if (y->op == ops.mul && y->src[1]->ne[0] == 1 && !is_scaled(m, y)) {
        found->weights = y->src[1];
        tick(m, y);
        y = y->src[0];
    }
    const struct ggml_tensor *down = match_product(m, y);
    if (!down) return -1;
    const struct ggml_tensor *matrix = down->src[0];
    seen->num_experts = (int32_t)matrix->ne[2];
    seen->hidden_dim = (int32_t)matrix->ne[1];
    seen->expert_dim = (int32_t)matrix->ne[0];
    seen->down_type = matrix->type;
    seen->top_k = (int32_t)found->ids->ne[0];
    if (match_hidden(m, down->src[1])) return -1;

    const struct ggml_tensor *x = found->x, *ids = found->ids, *weights = found->weights;
    int64_t tokens = ids->ne[1];
    if (!weights) return refuse(m, out, "experts without router weights");
    if (x->ne[1] != 1) return refuse(m, out, "rows of their own for each chosen expert");
    bool shapes = x->ne[0] == seen->hidden_dim && x->ne[2] == tokens &&
                  out->ne[0] == seen->hidden_dim && out->ne[1] == tokens && ids->ne[2] == 1;
    shapes = shapes && weights->ne[0] == 1 && weights->ne[1] == seen->top_k &&
             weights->ne[2] == tokens;
    if (!shapes) return refuse(m, out, "shapes of input, choice and weights that do not fit");
    bool types = x->type == ABI_TYPE_F32 && ids->type == ABI_TYPE_I32 &&
                 out->type == ABI_TYPE_F32 && weights->type == ABI_TYPE_F32;
    if (!types) return refuse(m, out, "numbers other than float32 around the experts");
    bool rows = x->nb[0] == 4 && ids->nb[0] == 4 && out->nb[0] == 4;
    if (!rows) return refuse(m, out, "rows that are not contiguous");
    return 0;
}

static bool is_understood(const struct match *m, const struct ggml_tensor *t) {
    for (int i = 0; i < m->num_understood; i++)
        if (m->understood[i] == t) return true;
    return false;
}

int routed_match(struct ggml_cgraph *graph, is_swarm_weight is_weight, struct routed *found,
                 struct swarm_refusal *refusal) {
    memset(found, 0, sizeof *found);
    found->seen.layer = -1;
    int num_nodes = lib.ggml_graph_n_nodes(graph);
    const struct ggml_tensor *out = NULL;
    for (int i = num_nodes - 1; i >= 0 && !out; i--) {
        const struct ggml_tensor *node = lib.ggml_graph_node(graph, i);
        if (!moves_no_data(node->op)) out = node;
    }
    if (!out) return 1;

    struct match m = {.graph = graph, .is_weight = is_weight, .found = found, .refusal = refusal};
    m.understood = calloc((size_t)num_nodes + MAX_TOP_K + 16, sizeof *m.understood);
    if (!m.understood) return refuse(&m, out, "out of memory");
    for (int i = 0; i < num_nodes && found->seen.layer < 0; i++)
        found->seen.layer = layer_of(weight_of(lib.ggml_graph_node(graph, i), is_weight));
    int result = match_experts(&m, out);
    for (int i = 0; i < num_nodes && !result; i++) {
        const struct ggml_tensor *node = lib.ggml_graph_node(graph, i);
        if (!moves_no_data(node->op) && !is_understood(&m, node))
            result = refuse(&m, node, "an operation among the experts that is not known");
    }
    free(m.understood);
    return result;
}

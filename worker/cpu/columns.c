// What lies between the products of a step: activations are feature-major, [features, columns], a column being a
// token. columns is 1 or a multiple of 16; a job works on 16 columns at once, one per lane.

#include "attention.h"

typedef struct {
    const float *x;       // [features, columns]
    const float *weight;  // [features]
    void *out;            // [features, columns], bfloat16 when narrow
    int64_t features, columns, narrow;
    float eps, pad;
    int64_t next_job;  // zero before a run
} Norm;

// Run on every thread of a team: RMS norm of every column. Squares are added up as `single` does for one token.
void norm_columns(void *data) {
    Norm *s = data;
    int64_t job;
    while ((job = __atomic_fetch_add(&s->next_job, 16, __ATOMIC_RELAXED)) < s->columns) {
        f32x16 squares[16];
        for (int i = 0; i < 16; i++) squares[i] = splat(0);
        int64_t f = 0;
        for (; f + 16 <= s->features; f += 16)
            for (int i = 0; i < 16; i++) {
                f32x16 x = load(s->x + (f + i) * s->columns + job);
                squares[i] = fused(x, x, squares[i]);
            }
        for (; f < s->features; f++) {
            f32x16 x = load(s->x + f * s->columns + job);
            squares[f % 16] = fused(x, x, squares[f % 16]);
        }
        f32x16 scale = inverse_root(sum_of(squares) / (float)s->features + s->eps);
        for (f = 0; f < s->features; f++) {
            int64_t at = f * s->columns + job;
            store_any(s->out, at, load(s->x + at) * s->weight[f] * scale, s->narrow);
        }
    }
}

typedef struct {
    const float *gate_up;  // [2 * features, columns]: gate's rows, then up's
    const float *bias;     // [2 * features] or null
    void *out;             // [features, columns], bfloat16 when narrow
    int64_t features, columns, narrow, gelu;
    int64_t next_job;  // zero before a run
} Gate;

// One column of fewer than 16 features: nothing before or after them is touched.
static void gate_few(const Gate *s) {
    const int64_t count = s->features, size = s->narrow ? 2 : 4;
    float gate[16] = {0}, up[16] = {0}, made[16];
    for (int64_t f = 0; f < count; f++) {
        gate[f] = s->gate_up[f] + (s->bias ? s->bias[f] : 0);
        up[f] = s->gate_up[count + f] + (s->bias ? s->bias[count + f] : 0);
    }
    store_any(made, 0, (s->gelu ? gelu(load(gate)) : silu(load(gate))) * load(up), s->narrow);
    memcpy(s->out, made, count * size);
}

// Run on every thread of a team: silu(gate) * up (or gelu), of 16 columns or, when there is one column, of 16 features at once.
void gate_columns(void *data) {
    Gate *s = data;
    const int64_t all = s->features * s->columns, job = 1024;
    int64_t begin;
    while ((begin = __atomic_fetch_add(&s->next_job, job, __ATOMIC_RELAXED)) < all) {
        if (all < 16) {
            gate_few(s);
            continue;
        }
        for (int64_t at = begin; at < begin + job && at < all; at += 16) {
            const int64_t f = at / s->columns, last = s->features - 16;
            if (s->columns == 1 && at > last) at = last;  // the last run begins where it is whole
            f32x16 gate = load(s->gate_up + at), up = load(s->gate_up + all + at);
            if (s->bias && s->columns == 1) gate += load(s->bias + at), up += load(s->bias + s->features + at);
            else if (s->bias) gate += s->bias[f], up += s->bias[s->features + f];
            store_any(s->out, at, (s->gelu ? gelu(gate) : silu(gate)) * up, s->narrow);
        }
    }
}

// 16 columns of one feature; all lanes the same when there is one column.
static inline f32x16 lanes(const Step *s, const float *rows, int64_t feature, int64_t column) {
    return s->columns == 1 ? splat(rows[feature]) : load(rows + feature * s->columns + column);
}

// Turn the rotary pair of elements i and j of a head.
static inline void rotate(const Step *s, f32x16 *head, int i, int j, int pair, int64_t column) {
    f32x16 cos = lanes(s, s->cos, pair, column), sin = lanes(s, s->sin, pair, column), a = head[i], b = head[j];
    head[i] = fused(a, cos, -(b * sin));
    head[j] = fused(b, cos, a * sin);
}

// One head of 16 tokens: bias, norm and rotation where they belong, then to the query rows or into the cache.
static inline void place_head(const Step *s, int64_t index, int64_t column) {
    int dim = s->dim, is_query = index < s->heads, is_value = index >= s->heads + s->kv_heads;
    f32x16 head[dim];
    for (int d = 0; d < dim; d++) {
        head[d] = lanes(s, s->qkv, index * dim + d, column);
        if (s->bias) head[d] += s->bias[index * dim + d];
    }
    const float *norm = is_query ? s->q_norm : is_value ? 0 : s->k_norm;
    if (norm) {
        f32x16 squares = splat(0);
        for (int d = 0; d < dim; d++) squares = fused(head[d], head[d], squares);
        f32x16 scale = inverse_root(squares / (float)dim + s->eps);
        for (int d = 0; d < dim; d++) head[d] *= norm[d] * scale;
    }
    int half = s->rotated / 2;
    for (int pair = 0; pair < half && !is_value; pair++) {
        int i = s->interleaved ? 2 * pair : pair, j = s->interleaved ? i + 1 : i + half;
        rotate(s, head, i, j, pair, column);
    }

    int64_t kv_head = (index - s->heads) % s->kv_heads, count = s->tokens - column < 16 ? s->tokens - column : 16;
    const float *turned = (const float *)head;
    float row[dim];
    for (int64_t lane = 0; lane < count; lane++) {
        float *to = is_query ? s->queries + (column + lane) * s->heads * dim + index * dim : row;
        for (int d = 0; d < dim; d++) to[d] = turned[d * 16 + lane];
        if (is_query) continue;
        int64_t block = s->slots[column + lane] / s->block_size, offset = s->slots[column + lane] % s->block_size;
        int64_t cell = ((block * s->kv_heads + kv_head) * s->block_size + offset) * dim;
        for (int d = 0; d < dim; d += 16) store_any(is_value ? s->values : s->keys, cell + d, load(row + d), s->narrow);
    }
}

// Run on every thread of a team, before `attend`: queries made ready, keys and values of all tokens written.
void place(void *step) {
    Step *s = step;
    int64_t heads = s->heads + 2 * s->kv_heads, count = (s->tokens + 15) / 16 * heads, job;
    while ((job = __atomic_fetch_add(&s->next_job, 1, __ATOMIC_RELAXED)) < count)
        place_head(s, job % heads, job / heads * 16);
}

// For the caller to see that it means the same structures.
int64_t norm_bytes(void) { return sizeof(Norm); }
int64_t gate_bytes(void) { return sizeof(Gate); }
int64_t step_bytes(void) { return sizeof(Step); }

// Attention of many rows, as a prompt has: panels of the context are taken one after the other, and what they add to a
// row is scaled to the largest score so far (online softmax, as in FlashAttention), so that nothing is as long as the
// context and everything stays in the caches. Panels begin at multiples of PANEL: where a prompt is cut does not show.
#pragma once

#include "attention.h"

#define PANEL 128  // cells worked on together
#ifdef __AVX512F__
enum { ROWS = 8, SCORES = 2, WEIGHED = 8, VALUES = 2 };  // as many sums as stay in the registers: ROWS * SCORES vectors
#else                                                    // of scores, WEIGHED rows * VALUES vectors of the output
enum { ROWS = 4, SCORES = 1, WEIGHED = 2, VALUES = 2 };
#endif
enum { RUN_OF = SCORES * 16 };  // cells whose keys lie turned over side by side

// Keys of `n` cells from `start` on as [PANEL / RUN_OF, dim, RUN_OF], values as [PANEL, dim].
static inline void fill_panel(const Step *s, int64_t sequence, int64_t kv_head, int64_t start, int n, float *keys,
                              float *values, const int dim) {
    for (int t = 0; t < n;) {
        int64_t at = start + t, offset = at % s->block_size, left = s->block_size - offset;
        int64_t cell = cell_at(s, sequence, at, kv_head, dim);
        for (int end = left < n - t ? t + left : n; t < end; t++, cell += dim)
            for (int c = 0; c < dim; c += 16) {
                f32x16 k = load_any(s->keys, cell + c, s->narrow);
                float *to = keys + (t / RUN_OF * dim + c) * RUN_OF + t % RUN_OF;
                for (int lane = 0; lane < 16; lane++) to[lane * RUN_OF] = k[lane];
                *(f32x16 *)(values + t * dim + c) = load_any(s->values, cell + c, s->narrow);
            }
    }
}

// Scores of ROWS rows with RUN_OF cells.
static inline INLINE void score_run(const float *const q[], const float *keys, float *scores, float scale,
                                    const int dim) {
    f32x16 a[ROWS][SCORES];
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < SCORES; i++) a[r][i] = splat(0);
    for (int d = 0; d < dim; d++) {
        f32x16 k[SCORES];
        for (int i = 0; i < SCORES; i++) k[i] = load(keys + d * RUN_OF + i * 16);
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < SCORES; i++) a[r][i] = fused(splat(q[r][d]), k[i], a[r][i]);
    }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < SCORES; i++) *(f32x16 *)(scores + r * PANEL + i * 16) = a[r][i] * scale;
}

// Scores to weights, in place: of the `seen` cells of a panel a row sees; the others of n weigh nothing.
// most, total: the row's largest score and sum of weights so far; sums: what it has of values. A score that is no
// number, and infinity, makes the total no number: the largest may miss it, its exponential does not.
static inline INLINE void weigh_panel(float *row, int seen, int n, float *most, float *total, float *sums,
                                      const int dim) {
    if (seen <= 0) {
        for (int i = 0; i < n; i++) row[i] = 0;
        return;
    }
    f32x16 above = splat(row[0]);
    int whole = seen / 16 * 16;
    for (int i = 0; i < whole; i += 16) above = larger(load(row + i), above);
    float largest = *most;
    for (int i = whole; i < seen; i++) largest = row[i] > largest ? row[i] : largest;
    for (int lane = 0; lane < 16; lane++) largest = above[lane] > largest ? above[lane] : largest;
    if (largest > *most) {
        float kept = expf(*most - largest);
        for (int c = 0; c < dim; c += 16) *(f32x16 *)(sums + c) *= kept;
        *total *= kept;
        *most = largest;
    }
    f32x16 added = splat(0);
    for (int i = 0; i < n; i += 16) {
        f32x16 e = exp_negative(load(row + i) - largest);
        if (i + 16 > seen)
            for (int lane = 0; lane < 16; lane++) e[lane] = i + lane < seen ? e[lane] : 0;
        *(f32x16 *)(row + i) = e;
        added += e;
    }
    *total += sum(added);
}

// Where the first panel begins that a tile's tokens see into, `first` being the first of them.
static inline int64_t first_panel(const Step *s, int64_t first) {
    return first_seen(s, s->positions[first]) / PANEL * PANEL;
}

// A row's scores of n cells from `start` on capped, then hidden below what its token sees; how many are left to weigh.
static inline int hide(const Step *s, float *row, int64_t start, int n, int64_t position) {
    int64_t seen = position + 1 - start, unseen = first_seen(s, position) - start;
    if (unseen >= n) return 0;
    if (s->score_cap)
        for (int i = 0; i < n; i += 16)
            *(f32x16 *)(row + i) = s->score_cap * tanh_of(load(row + i) * (1 / s->score_cap));
    for (int i = 0; i < unseen; i++) row[i] = -1e30f;
    if (s->hide_first && start == 0 && position > 0) row[0] = -1e30f;
    return seen < n ? seen : n;
}

// What a row's weights and values have come to, as a mean.
static inline INLINE void store_attended(const Step *s, int64_t at, const float *sums, float total, const int dim,
                                         int narrow) {
    float share = 1 / total;
    for (int c = 0; c < dim; c += 16) store_any(s->out, at + c, load(sums + c) * share, narrow);
}

// sums += weights * values of n cells, for WEIGHED rows.
static inline INLINE void add_values(const float *weights, const float *values, int n, float *sums, const int dim) {
    for (int c = 0; c < dim; c += VALUES * 16) {
        const int vectors = dim - c < VALUES * 16 ? (dim - c) / 16 : VALUES;
        f32x16 a[WEIGHED][VALUES];
        for (int r = 0; r < WEIGHED; r++)
            for (int i = 0; i < vectors; i++) a[r][i] = load(sums + r * dim + c + i * 16);
        for (int t = 0; t < n; t++)
            for (int i = 0; i < vectors; i++) {
                f32x16 v = load(values + t * dim + c + i * 16);
                for (int r = 0; r < WEIGHED; r++) a[r][i] = fused(splat(weights[r * PANEL + t]), v, a[r][i]);
            }
        for (int r = 0; r < WEIGHED; r++)
            for (int i = 0; i < vectors; i++) *(f32x16 *)(sums + r * dim + c + i * 16) = a[r][i];
    }
}

// One job. scratch: 2 * PANEL * dim floats, and PANEL + dim + 2 for each row, their number rounded up to ROWS.
static inline INLINE void many_rows_of(Step *s, int64_t index, float *scratch, const int dim) {
    int64_t tile = index / s->kv_heads, kv_head = index % s->kv_heads;
    int64_t sequence = s->tile_sequence[tile], first = s->tile_first[tile];
    int group = s->heads / s->kv_heads, rows = s->tile_tokens[tile] * group;
    int padded = (rows + ROWS - 1) / ROWS * ROWS;  // those beyond the last repeat it
    int64_t cells = s->positions[first + s->tile_tokens[tile] - 1] + 1;
    float *keys = scratch, *values = keys + PANEL * dim, *scores = values + PANEL * dim, *sums = scores + padded * PANEL;
    float *most = sums + padded * dim, *total = most + padded;
    const float *q[padded];
    for (int r = 0; r < padded; r++) {
        int row = r < rows ? r : rows - 1;
        q[r] = s->queries + ((first + row / group) * s->heads + kv_head * group + row % group) * dim;
        most[r] = -INFINITY, total[r] = 0;
        for (int c = 0; c < dim; c += 16) *(f32x16 *)(sums + r * dim + c) = splat(0);
    }
    for (int64_t start = first_panel(s, first); start < cells; start += PANEL) {
        int n = cells - start < PANEL ? cells - start : PANEL;
        fill_panel(s, sequence, kv_head, start, n, keys, values, dim);
        for (int t = 0; t < n; t += RUN_OF)
            for (int r = 0; r < padded; r += ROWS) score_run(q + r, keys + t * dim, scores + r * PANEL + t, s->scale, dim);
        for (int r = 0; r < padded; r++) {
            float *row = scores + r * PANEL;
            int seen = hide(s, row, start, n, s->positions[first + (r < rows ? r : rows - 1) / group]);
            weigh_panel(row, seen, n, most + r, total + r, sums + r * dim, dim);
        }
        for (int r = 0; r < padded; r += WEIGHED) add_values(scores + r * PANEL, values, n, sums + r * dim, dim);
    }
    for (int r = 0; r < rows; r++) {
        int64_t at = ((first + r / group) * s->heads + kv_head * group + r % group) * dim;
        store_attended(s, at, sums + r * dim, total[r], dim, s->narrow);
    }
}

// Compiled once for each of the usual sizes, where it would be inlined twice.
static __attribute__((noinline)) void many_rows_64(Step *s, int64_t index, float *scratch) {
    many_rows_of(s, index, scratch, 64);
}

static __attribute__((noinline)) void many_rows_128(Step *s, int64_t index, float *scratch) {
    many_rows_of(s, index, scratch, 128);
}

static __attribute__((noinline)) void many_rows_any(Step *s, int64_t index, float *scratch) {
    many_rows_of(s, index, scratch, s->dim);
}

static inline void many_rows(Step *s, int64_t index, float *scratch, const int dim) {
    (dim == 64 ? many_rows_64 : dim == 128 ? many_rows_128 : many_rows_any)(s, index, scratch);
}

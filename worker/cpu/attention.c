// Paged attention for a CPU: KV blocks are read where they lie, once per group of query heads.
//
// A job is one KV head of one tile: a few consecutive tokens of one sequence (one when decoding). Its rows are
// the tile's tokens times the query heads of the group. A job of few rows is as fast as memory: while a block is worked
// on, the next one is prefetched, across blocks, from keys to values, and from one job to the next. One of many rows
// (prompts.h) is as fast as it computes.

#include "prompts.h"

#define FEW 4

// Inlined by force: gcc drops calls of a function that does nothing else.
static inline INLINE void prefetch_cell(const void *base, int64_t at, int dim, int narrow) {
    const char *p = (const char *)base + at * (narrow ? 2 : 4);
    for (int i = 0; i < dim * (narrow ? 2 : 4); i += 64) __builtin_prefetch(p + i);
}

// Scores of `cells` cells for a few rows: one dot product each.
static inline INLINE void score_few(const Step *s, const float *q[], const int rows, int64_t block, int64_t following,
                                    int cells, float *scores, int64_t stride, const int dim, const int narrow) {
    for (int t = 0; t < cells; t++) {
        prefetch_cell(s->keys, following + t * dim, dim, narrow);
        f32x16 a[FEW];
        for (int r = 0; r < rows; r++) a[r] = splat(0);
        for (int c = 0; c < dim; c += 16) {
            f32x16 k = load_any(s->keys, block + t * dim + c, narrow);
            for (int r = 0; r < rows; r++) a[r] += load(q[r] + c) * k;
        }
        for (int r = 0; r < rows; r++) scores[r * stride + t] = sum(a[r]) * s->scale;
    }
}

// out += share * values of `cells` cells for a few rows, 64 elements of a head at a time.
static inline INLINE void weigh_few(const Step *s, float *out[], const int rows, int64_t block, int64_t following,
                                    int cells, const float *share, int64_t stride, const int dim, const int narrow) {
    for (int c = 0; c < dim; c += 64) {
        const int vectors = (dim - c < 64 ? dim - c : 64) / 16;
        f32x16 a[FEW][4];
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < vectors; i++) a[r][i] = load(out[r] + c + i * 16);
        for (int t = 0; t < cells; t++) {
            if (c == 0) prefetch_cell(s->values, following + t * dim, dim, narrow);
            for (int i = 0; i < vectors; i++) {
                f32x16 v = load_any(s->values, block + t * dim + c + i * 16, narrow);
                for (int r = 0; r < rows; r++) a[r][i] += share[r * stride + t] * v;
            }
        }
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < vectors; i++) *(f32x16 *)(out[r] + c + i * 16) = a[r][i];
    }
}

// In place; cells from `limit` to `cells` get weight 0. The row's memory goes on for 15 floats. A score that is no
// number, and infinity, makes all weights no numbers: the largest may miss it, its exponential does not.
static inline void softmax(float *row, int limit, int cells) {
    f32x16 most = splat(row[0]);
    int whole = limit / 16 * 16;
    for (int i = 0; i < whole; i += 16) most = larger(load(row + i), most);
    float largest = row[limit - 1];
    for (int i = whole; i < limit; i++) largest = row[i] > largest ? row[i] : largest;
    for (int lane = 0; lane < 16; lane++) largest = most[lane] > largest ? most[lane] : largest;
    f32x16 total = splat(0);
    for (int i = 0; i < cells; i += 16) {
        f32x16 e = exp_negative(load(row + i) - largest);
        if (i + 16 > limit)
            for (int lane = 0; lane < 16; lane++) e[lane] = i + lane < limit ? e[lane] : 0;
        *(f32x16 *)(row + i) = e;
        total += e;
    }
    float share = 1 / sum(total);
    for (int i = 0; i < cells; i += 16) *(f32x16 *)(row + i) *= share;
}

// The number of rows as a constant, so that their sums stay in registers.
#define WITH_ROWS(count, call) \
    switch (count) { \
        case 1: { enum { R = 1 }; call; break; } \
        case 2: { enum { R = 2 }; call; break; } \
        case 3: { enum { R = 3 }; call; break; } \
        default: { enum { R = 4 }; call; } \
    }

static inline INLINE void few_rows(Step *s, int64_t index, float *scratch, const int dim, const int narrow) {
    int64_t tile = index / s->kv_heads, kv_head = index % s->kv_heads;
    int64_t sequence = s->tile_sequence[tile], first = s->tile_first[tile];
    int group = s->heads / s->kv_heads, tokens = s->tile_tokens[tile], rows = tokens * group;
    int size = s->block_size, cells = s->positions[first + tokens - 1] + 1, columns = (cells + size - 1) / size;
    int64_t stride = columns * size + 16, next = index + 1 < s->tiles * s->kv_heads ? index + 1 : index;
    int64_t ahead = block_at(s, s->tile_sequence[next / s->kv_heads], 0, next % s->kv_heads, dim);
    float *sums = scratch, *scores = sums + rows * dim;
    const float *q[rows];
    float *out[rows];
    for (int r = 0; r < rows; r++) {
        q[r] = s->queries + ((first + r / group) * s->heads + kv_head * group + r % group) * dim;
        out[r] = sums + r * dim;
        for (int c = 0; c < dim; c += 16) *(f32x16 *)(out[r] + c) = splat(0);
    }

    for (int j = 0; j < columns; j++) {
        int n = cells - j * size < size ? cells - j * size : size;
        int64_t block = block_at(s, sequence, j, kv_head, dim);
        int64_t following = j + 1 < columns ? block_at(s, sequence, j + 1, kv_head, dim) : block;
        float *row = scores + j * size;
        for (int r = 0; r < rows; r += FEW)
            WITH_ROWS(rows - r, score_few(s, q + r, R, block, following, n, row + r * stride, stride, dim, narrow))
    }
    for (int r = 0; r < rows; r++) {
        int limit = s->positions[first + r / group] + 1;
        if (s->hide_first && limit > 1) scores[r * stride] = -1e30f;
        softmax(scores + r * stride, limit, cells);
    }
    for (int j = 0; j < columns; j++) {
        int n = cells - j * size < size ? cells - j * size : size;
        int64_t block = block_at(s, sequence, j, kv_head, dim);
        int64_t following = j + 1 < columns ? block_at(s, sequence, j + 1, kv_head, dim) : ahead;
        for (int r = 0; r < rows; r += FEW)
            WITH_ROWS(rows - r, weigh_few(s, out + r, R, block, following, n, scores + r * stride + j * size, stride,
                                          dim, narrow))
    }
    for (int r = 0; r < rows; r++) {
        int64_t at = ((first + r / group) * s->heads + kv_head * group + r % group) * dim;
        for (int c = 0; c < dim; c += 16) store_any(s->out, at + c, load(out[r] + c), narrow);
    }
}

static inline INLINE void jobs(Step *s, const int dim, const int narrow) {
    float *scratch = s->scratch + __atomic_fetch_add(&s->next_thread, 1, __ATOMIC_RELAXED) * s->scratch_stride;
    int64_t count = s->tiles * s->kv_heads, index;
    while ((index = __atomic_fetch_add(&s->next_job, 1, __ATOMIC_RELAXED)) < count)
        if (s->tile_tokens[index / s->kv_heads] * (s->heads / s->kv_heads) > 2 * FEW) many_rows(s, index, scratch, dim);
        else few_rows(s, index, scratch, dim, narrow);
}

// Run on every thread of a team, after `place`: attention of one layer.
void attend(void *step) {
    Step *s = step;
    if (s->dim == 64) s->narrow ? jobs(s, 64, 1) : jobs(s, 64, 0);
    else if (s->dim == 128) s->narrow ? jobs(s, 128, 1) : jobs(s, 128, 0);
    else s->narrow ? jobs(s, s->dim, 1) : jobs(s, s->dim, 0);
}

int64_t panel_cells(void) { return PANEL; }

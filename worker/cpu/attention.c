// Paged attention for a CPU: KV blocks are read where they lie, once per group of query heads.
//
// A job is one KV head of one tile: a few consecutive tokens of one sequence (one when decoding). Its rows are
// the tile's tokens times the query heads of the group. A job of few rows is as fast as memory: while some cells are
// worked on, the next ones are prefetched, across blocks, from keys to values, and from one job to the next. One of many
// rows (prompts.h) is as fast as it computes. Both add up in one order, which the positions alone decide.

#include "prompts.h"

#define FEW 4
#define CELLS 16  // whose scores are computed together, one in each lane

// Keys of CELLS cells from `start` on, side by side; what lies in several blocks is brought together in `apart`.
static inline INLINE const char *run_of_keys(const Step *s, int64_t sequence, int64_t kv_head, int64_t start, int64_t end,
                                             char *apart, const int dim, const int narrow) {
    const int64_t size = dim * (narrow ? 2 : 4);
    if (s->block_size % CELLS == 0)
        return (const char *)s->keys + cell_at(s, sequence, start, kv_head, dim) * (narrow ? 2 : 4);
    for (int64_t at = start; at < start + CELLS; at++) {  // the last cell instead of those beyond it
        int64_t cell = cell_at(s, sequence, at < end ? at : end - 1, kv_head, dim);
        memcpy(apart + (at - start) * size, (const char *)s->keys + cell * (narrow ? 2 : 4), size);
    }
    return apart;
}

// Scores of CELLS cells for a few rows, each added up along the head. Meanwhile as much is prefetched of what is read
// next, and of the cells' values; a little at a time, since a core waits for those that it has no place for. Into the
// second cache: a panel's values are as large as the first. The next keys are a few KiB, and in bfloat16 wanted so soon
// that they go into the first.
static inline INLINE void score_few(const float *q[], const int rows, const char *keys, const char *next,
                                    const char *values, float *scores, float scale, const int dim, const int narrow) {
    const int64_t stride = dim * (narrow ? 2 : 4);
    f32x16 a[FEW];
    for (int r = 0; r < rows; r++) a[r] = splat(0);
    for (int d = 0; d < dim; d += narrow ? 8 : 4) {
        f32x16 words[4];
        const int at = d * (narrow ? 2 : 4);
        for (int line = 0; line < 16 * CELLS; line += 64) {
            if (narrow) __builtin_prefetch(next + at * CELLS + line);
            else __builtin_prefetch(next + at * CELLS + line, 0, 2);
            __builtin_prefetch(values + at * CELLS + line, 0, 2);
        }
        load_across(keys + at, stride, words);
        for (int i = 0; i < 4; i++)
            for (int r = 0; r < rows; r++)
                if (narrow) {
                    a[r] = fused(splat(q[r][d + 2 * i]), first_of(words[i]), a[r]);
                    a[r] = fused(splat(q[r][d + 2 * i + 1]), second_of(words[i]), a[r]);
                } else
                    a[r] = fused(splat(q[r][d + i]), words[i], a[r]);
    }
    for (int r = 0; r < rows; r++) *(f32x16 *)(scores + r * PANEL) = a[r] * scale;
}

// out += share * values of the cells [start, end), for a few rows, 64 elements of a head at a time.
static inline INLINE void weigh_few(const Step *s, float *out[], const int rows, int64_t sequence, int64_t kv_head,
                                    int64_t start, int64_t end, const float *share, const int dim, const int narrow) {
    for (int c = 0; c < dim; c += 64) {
        const int vectors = (dim - c < 64 ? dim - c : 64) / 16;
        f32x16 a[FEW][4];
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < vectors; i++) a[r][i] = load(out[r] + c + i * 16);
        for (int64_t at = start; at < end;) {
            int64_t left = s->block_size - at % s->block_size, until = at + left < end ? at + left : end;
            int64_t cell = cell_at(s, sequence, at, kv_head, dim) + c;
            for (; at < until; at++, cell += dim)
                for (int i = 0; i < vectors; i++) {
                    f32x16 v = load_any(s->values, cell + i * 16, narrow);
                    for (int r = 0; r < rows; r++) a[r][i] = fused(splat(share[r * PANEL + at - start]), v, a[r][i]);
                }
        }
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < vectors; i++) *(f32x16 *)(out[r] + c + i * 16) = a[r][i];
    }
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
    int64_t cells = s->positions[first + tokens - 1] + 1;
    int64_t next = index + 1 < s->tiles * s->kv_heads ? index + 1 : index;
    int64_t ahead = cell_at(s, s->tile_sequence[next / s->kv_heads], 0, next % s->kv_heads, dim);
    float *sums = scratch, *scores = sums + rows * dim, most[rows], total[rows];
    const int64_t size = narrow ? 2 : 4;
    char apart[CELLS * dim * 4];
    const float *q[rows];
    float *out[rows];
    for (int r = 0; r < rows; r++) {
        q[r] = s->queries + ((first + r / group) * s->heads + kv_head * group + r % group) * dim;
        out[r] = sums + r * dim;
        most[r] = -INFINITY, total[r] = 0;
        for (int c = 0; c < dim; c += 16) *(f32x16 *)(out[r] + c) = splat(0);
    }
    for (int64_t start = first_panel(s, first); start < cells; start += PANEL) {
        int64_t end = start + PANEL < cells ? start + PANEL : cells;
        for (int64_t at = start; at < end; at += CELLS) {
            const char *keys = run_of_keys(s, sequence, kv_head, at, end, apart, dim, narrow);
            const char *values = (const char *)s->values + cell_at(s, sequence, at, kv_head, dim) * size;
            const int64_t after = at + CELLS < cells ? cell_at(s, sequence, at + CELLS, kv_head, dim) : ahead;
            const char *next_keys = (const char *)s->keys + after * size;
            for (int r = 0; r < rows; r += FEW)
                WITH_ROWS(rows - r, score_few(q + r, R, keys, next_keys, values, scores + r * PANEL + at - start,
                                              s->scale, dim, narrow))
        }
        for (int r = 0; r < rows; r++) {
            float *row = scores + r * PANEL;
            int seen = hide(s, row, start, end - start, s->positions[first + r / group]);
            weigh_panel(row, seen, end - start, most + r, total + r, out[r], dim);
        }
        for (int r = 0; r < rows; r += FEW)
            WITH_ROWS(rows - r, weigh_few(s, out + r, R, sequence, kv_head, start, end, scores + r * PANEL, dim, narrow))
    }
    for (int r = 0; r < rows; r++) {
        int64_t at = ((first + r / group) * s->heads + kv_head * group + r % group) * dim;
        store_attended(s, at, out[r], total[r], dim, narrow);
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

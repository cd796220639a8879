// B (A x) of a chunk of outputs: what low_rank.c does last. Outputs are in the lanes, one rank after the other meets all of
// them; or, where many tokens among LANES columns have one adapter, tokens are.
#pragma once

#include "shrink.h"

#define TILES 3  // of 16 outputs of B, worked on together
#ifdef __AVX512F__
#define WIDE 9  // tokens among LANES columns from which on a lane for each is faster than one for each output
#else
#define WIDE 0  // never: there are not enough registers for their sums
#endif
#define MOST_RANK 256
#define APART 64  // columns whose outputs are first kept apart, together: few enough for the nearest cache

// Where outputs of a chunk are added: of the first, y of column 0; then as y_step and y_token of LowRank. Those that are
// kept apart are of columns [base, base + APART).
typedef struct {
    float *y;
    int64_t step, token, base;
} Into;

// 16 * `tiles` outputs for `tokens` tokens; into `apart`, or added to y, where the first belongs. b: the first, of the
// first rank. z: of each token, `most` apart.
static inline INLINE void outputs_of(Into to, const char *b, const char *ahead, int64_t rank, int64_t step,
                                     const int32_t *order, const float *z, int64_t most, int64_t rows,
                                     float (*apart)[CHUNK], int64_t in_chunk, const int tiles, const int tokens,
                                     const int fetch, const int narrow) {
    lanes sums[GROUP][TILES * SIDE];
#pragma GCC unroll 8
    for (int t = 0; t < tokens; t++)
#pragma GCC unroll 8
        for (int i = 0; i < tiles * SIDE; i++) sums[t][i] = zeros();
    for (int64_t r = 0; r < rank; r++, b += step, ahead += step) {
        lanes between[GROUP];
#pragma GCC unroll 8
        for (int t = 0; t < tokens; t++) between[t] = spread(z[t * most + r]);
#pragma GCC unroll 8
        for (int i = 0; i < tiles * SIDE; i++) {
            if (fetch && i % SIDE == 0) __builtin_prefetch(ahead + i / SIDE * (narrow ? 32 : 64), 0, 2);
            lanes there = lanes_of(b, i * LANES, narrow);
            if (tokens > 1) there = held(there);
#pragma GCC unroll 8
            for (int t = 0; t < tokens; t++) sums[t][i] = fused_lanes(there, between[t], sums[t][i]);
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < tokens; t++)
#pragma GCC unroll 8
        for (int i = 0; i < tiles * SIDE; i++) {
            if (apart) {
                *(lanes *)(apart[order[t] - to.base] + in_chunk + i * LANES) = sums[t][i];
                continue;
            }
            float *y = to.y + i * LANES * to.step + order[t] * to.token;
            if (to.step == 1 && (i + 1) * LANES <= rows) *(lanes *)y += sums[t][i];
            else
                for (int64_t o = 0; o < LANES && i * LANES + o < rows; o++) y[o * to.step] += sums[t][i][o];
        }
}

// Outputs [row, end) of one part, a chunk, for `count` tokens of a run. ahead: what is read next, to be fetched; or null.
static inline INLINE void expand_few(Into to, const Factors *f, int64_t part, int64_t row, int64_t end,
                                     const int32_t *order, const float *z, int64_t most, int64_t count,
                                     float (*apart)[CHUNK], const char *ahead, const int narrow) {
    const int64_t rank = f->rank[part], size = narrow ? 2 : 4, step = ceiling(end - row, 16) * 16 * size;
    const char *b = (const char *)f->b[part] + row * rank * size;
    const int fetch = ahead != 0;
    for (int64_t at = row; at < end;) {
        const int many = ceiling(end - at, 16) >= TILES;
        int64_t done = 0, left = count;
#define OUTPUTS(tiles, fetch) \
    outputs_of(to, b, ahead, rank, step, order + done, z + done * most, most, end - at, apart, at - row, tiles, N, \
               fetch, narrow)
        if (many) FOR_GROUPS(left, done, if (done || !fetch) OUTPUTS(TILES, 0); else OUTPUTS(TILES, 1))
        else FOR_GROUPS(left, done, OUTPUTS(1, 0))
        const int64_t outputs = many ? TILES * 16 : 16;
        at += outputs, b += outputs * size, to.y += outputs * to.step;
        if (fetch) ahead += outputs * size;
    }
}

// What lies apart, [columns, CHUNK], added to `count` rows of y; columns without changes stay as they are.
static void add_apart(Into into, int64_t columns, float (*apart)[CHUNK], const char *changed, int64_t count) {
    for (int64_t column = 0; column < columns; column += LANES) {
        int changes = 0;
        for (int t = 0; t < LANES; t++) changes += changed[column + t];
        for (int64_t o = 0; changes && o < count; o += LANES) {
            lanes v[LANES];
#pragma GCC unroll 16
            for (int t = 0; t < LANES; t++) v[t] = changed[column + t] ? lanes_of(apart[column + t], o, 0) : zeros();
            transpose(v);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) {
                if (o + i >= count) break;
                float *to = into.y + (o + i) * into.step + into.base + column;
                if (changes == LANES) *(lanes *)to += v[i];
                else
                    for (int t = 0; t < LANES; t++)
                        if (changed[column + t]) to[t] += v[i][t];
            }
        }
    }
}

// Outputs [row, end) of one part for `count` tokens of LANES columns, a token in each lane; added where they belong.
static inline INLINE void expand_wide(Into into, const Factors *f, int64_t part, int64_t row, int64_t end,
                                      const int32_t *order, const float *z, int64_t most, int64_t count,
                                      const char *ahead, const int narrow) {
    const int64_t rank = f->rank[part], size = narrow ? 2 : 4, step = ceiling(end - row, 16) * 16 * size;
    lanes of_rank[MOST_RANK];
    for (int64_t r = 0; r < rank; r += LANES) {
        lanes *v = of_rank + r;
        for (int lane = 0; lane < LANES; lane++) v[lane] = zeros();
        for (int64_t t = 0; t < count; t++) v[order[t] % LANES] = lanes_of(z, t * most + r, 0);
        transpose(v);
    }
    float widened[MOST_RANK][LANES];
    for (int64_t at = row; at < end; at += LANES) {
        const char *b = (const char *)f->b[part] + row * rank * size + (at - row) * size;
        const char *next = ahead ? ahead + (at - row) * size : b;
        // In memory, where a number is spread over a register as it is read: gcc would take it from a register in two steps.
        for (int64_t r = 0; narrow && r < rank; r++) *(lanes *)widened[r] = lanes_of(b + r * step, 0, 1);
        const char *numbers = narrow ? (const char *)widened : b;
        const int64_t stride = narrow ? sizeof widened[0] : step;
        __asm__("" : "+r"(numbers) : : "memory");
        for (int o = 0; o < LANES; o++)  // many lines of y, far apart
            __builtin_prefetch(into.y + (at - row + o) * into.step + order[0] / LANES * LANES, 1);
        lanes sums[LANES];
#pragma GCC unroll 16
        for (int o = 0; o < LANES; o++) sums[o] = zeros();
        for (int64_t r = 0; r < rank; r++, numbers += stride, next += step) {
            __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 16
            for (int o = 0; o < LANES; o++) sums[o] = fused_lanes(spread(((const float *)numbers)[o]), of_rank[r], sums[o]);
        }
        for (int o = 0; o < LANES && at + o < end; o++) {
            float *to = into.y + (at - row + o) * into.step + order[0] / LANES * LANES;
            if (count == LANES) *(lanes *)to += sums[o];
            else
                for (int64_t t = 0; t < count; t++) to[order[t] % LANES] += sums[o][order[t] % LANES];
        }
    }
}

// The same for all tokens of a run: a lane for each token where enough of them are in the same columns. Either way an
// output adds up along the rank. apart: null where columns do not lie side by side; then all tokens are meant, else those
// of the columns that are kept apart. changed: gets the columns that lie there.
static inline INLINE void expand_run(const LowRank *s, Into to, const Run *run, int64_t part, int64_t row, int64_t end,
                                     float (*apart)[CHUNK], char *changed, const char *ahead, const int narrow) {
    const Factors *f = factors_of(s, run);
    const int32_t *order = s->step->order + run->first;
    const int64_t most = most_of(s);
    const float *z = s->step->between + run->first * most;
    int64_t first = 0, last = run->count;
    while (apart && first < last && order[first] < to.base) first++;
    while (apart && first < last && order[last - 1] >= to.base + APART) last--;
    for (int64_t p = 0; p < part; p++) z += f->rank[p];
    for (int64_t t = first, few = first; t < last;) {  // tokens [few, t) are still to be done
        int64_t count = 1;
        while (t + count < last && order[t + count] / LANES == order[t] / LANES) count++;
        const int wide = WIDE && apart && count >= WIDE;
        if (wide) expand_wide(to, f, part, row, end, order + t, z + t * most, most, count, ahead, narrow);
        else
            for (int64_t i = t; apart && i < t + count; i++) changed[order[i] - to.base] = 1;
        const int64_t until = wide ? t : t + count;
        t += count;
        if (wide || t == last) {
            if (until > few)
                expand_few(to, f, part, row, end, order + few, z + few * most, most, until - few, apart, ahead, narrow);
            few = t;
        }
    }
}

// Outputs [row, row + CHUNK) of one part, for all runs. near: what is read has been fetched.
static void expand(const LowRank *s, Into to, int64_t part, int64_t row, int near) {
    int64_t end = row + CHUNK < s->outputs[part] ? row + CHUNK : s->outputs[part], runs = s->step->run_count;
    const int across = to.token == 1 && s->columns > 1;
    float space[APART][CHUNK], (*apart)[CHUNK] = across ? space : 0;
    for (to.base = 0; to.base < s->columns; to.base += across ? APART : s->columns) {
        char changed[APART] = {0};
        for (int64_t i = 0; i < runs; i++) {
            const Run *run = s->step->runs + i, *next = s->step->runs + (i + 2) % runs;
            const Factors *f = factors_of(s, run), *after = factors_of(s, next);
            const int32_t *tokens = s->step->order + run->first;
            if (!f->rank[part]) continue;
            if (across && (tokens[0] >= to.base + APART || tokens[run->count - 1] < to.base)) continue;
            int64_t ahead = (i + 2 < runs ? row : row + CHUNK) * after->rank[part] * (after->narrow ? 2 : 4);
            const char *b = near || to.base ? 0 : (const char *)after->b[part] + ahead;
            if (f->narrow) expand_run(s, to, run, part, row, end, apart, changed, b, 1);
            else expand_run(s, to, run, part, row, end, apart, changed, b, 0);
        }
        const int64_t left = s->columns - to.base;
        if (across) add_apart(to, left < APART ? left : APART, apart, changed, end - row);
    }
}

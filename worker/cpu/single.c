// Products of a weight with the activations of a token or a few: what a step of few sequences is made of.
//
// Such a product is as fast as the weight can be read, so 16 rows are worked on together, one in each lane, while the
// next ones are prefetched, and everything around it (RMS norm before; bias, gate or residual after) is done on the way.
// A lane adds up along the columns in the order of oneDNN's product of many tokens: one after the other from zero, in
// parts whose sums are added up. So a token has the same bits beside any number of others.
// columns is a multiple of 16. 16 rows are in the nearest caches when they meet tokens after the first group.

#include "vectors.h"

enum { SET, ADD, GATED, GATED_GELU };  // silu(gate) * up; gelu(gate) * up, gelu by its tanh

typedef struct {
    const void *weights;  // [rows, columns], row_step elements from one row to the next; GATED*: gate's, then up's
    const float *bias;    // [rows of weights] or null
    const float *norm;    // [columns] or null: x is RMS-normed first
    const void *x;        // [columns] for each token, bfloat16 when x_narrow
    float *y;             // [rows] for each token
    int64_t rows, columns, narrow, x_narrow, mode;  // x_narrow only when narrow
    int64_t row_step;
    int64_t part;                            // columns that are added up before their sum is added to the others'
    int64_t tokens;                          // 1 to MOST
    int64_t x_step, x_token, y_step, y_token;  // elements from one to the next; x_step is 1, or 16 and x_token 1
    float eps, pad;
    float *scratch;  // MOST * columns floats for each thread
    int64_t next_run, next_thread;  // counters, zero before a run
} Single;

#define RUN 16    // rows worked on together
#define CLAIM 32  // rows a thread takes at a time
#define MOST 8    // tokens
#ifdef __AVX512F__
#define GROUP 8  // tokens worked on together: their sums stay in the registers
#else
#define GROUP 2
#endif

// total += the products of four words of RUN rows, `at` bytes from their beginnings, with `count` tokens.
static inline INLINE void add_words(const char *w, int64_t stride, const char *x, int64_t x_stride, int64_t at,
                                    f32x16 total[], const int count, const int narrow) {
    f32x16 words[4];
    load_across(w + at, stride, words);
    for (int i = 0; i < 4; i++)
        for (int t = 0; t < count; t++) {
            f32x16 there = splat(*(const four_bytes *)(x + t * x_stride + at + 4 * i));
            total[t] = narrow ? fused_pairs(words[i], there, total[t]) : fused(words[i], there, total[t]);
        }
}

// Products of RUN rows with `count` tokens; the first of a run's groups prefetches the next run, into the second cache: the
// first one has no place for both runs and the activations.
static inline INLINE void products(const Single *s, const char *x, int64_t row, f32x16 y[], const int count,
                                   const int first, const int narrow) {
    const int64_t size = narrow ? 2 : 4, stride = s->row_step * size, bytes = s->columns * size, part = s->part * size;
    const char *w = (const char *)s->weights + row * stride, *ahead = w + RUN * stride;
    for (int64_t start = 0; start < bytes; start += part) {
        int64_t end = start + part < bytes ? start + part : bytes, at = start;
        f32x16 a[GROUP];
        for (int t = 0; t < count; t++) a[t] = splat(0);
        for (; at + 64 <= end; at += 64) {  // a cache line of each row
            if (first)
                for (int r = 0; r < RUN; r++) __builtin_prefetch(ahead + r * stride + at, 0, 2);
            for (int i = 0; i < 64; i += 16) add_words(w, stride, x, bytes, at + i, a, count, narrow);
        }
        for (; at < end; at += 16) add_words(w, stride, x, bytes, at, a, count, narrow);
        for (int t = 0; t < count; t++) y[t] = start ? a[t] + y[t] : a[t];
    }
}

// Of a matrix of fewer than RUN rows: the same for one row, in the first lane.
static float product(const Single *s, const char *x, int64_t row) {
    const int64_t size = s->narrow ? 2 : 4, bytes = s->columns * size, part = s->part * size;
    const char *w = (const char *)s->weights + row * s->row_step * size;
    f32x16 y = splat(0);
    for (int64_t start = 0; start < bytes; start += part) {
        f32x16 a = splat(0);
        for (int64_t at = start; at < start + part && at < bytes; at += 4) {
            f32x16 word = splat(*(const four_bytes *)(w + at)), there = splat(*(const four_bytes *)(x + at));
            a = s->narrow ? fused_pairs(word, there, a) : fused(word, there, a);
        }
        y = start ? a + y : a;
    }
    return y[0];
}

// Rows [row, row + RUN), those that there are, with all tokens.
static inline INLINE void rows(const Single *s, const char *x, int64_t row, int64_t all, f32x16 y[MOST],
                               const int narrow) {
    const int64_t stride = s->columns * (narrow ? 2 : 4);
    if (all < RUN)
        for (int t = 0; t < s->tokens; t++)
            for (int r = 0; r < all; r++) y[t][r] = product(s, x + t * stride, row + r);
    else
        for (int t = 0; t < s->tokens; t += GROUP) {
            const char *from = x + t * stride;
            switch (s->tokens - t) {
                case 1: products(s, from, row, y + t, 1, t == 0, narrow); break;
#if GROUP > 2
                case 2: products(s, from, row, y + t, 2, t == 0, narrow); break;
                case 3: products(s, from, row, y + t, 3, t == 0, narrow); break;
                case 4: products(s, from, row, y + t, 4, t == 0, narrow); break;
                case 5: products(s, from, row, y + t, 5, t == 0, narrow); break;
                case 6: products(s, from, row, y + t, 6, t == 0, narrow); break;
                case 7: products(s, from, row, y + t, 7, t == 0, narrow); break;
#endif
                default: products(s, from, row, y + t, GROUP, t == 0, narrow);
            }
        }
    if (s->bias)
        for (int t = 0; t < s->tokens; t++)
            for (int r = 0; r < RUN && r < all; r++) y[t][r] += s->bias[row + r];
}

static inline INLINE void work(Single *s, const char *x, const int narrow) {
    int64_t claim;
    while ((claim = __atomic_fetch_add(&s->next_run, CLAIM, __ATOMIC_RELAXED)) < s->rows)
        for (int64_t row = claim; row < claim + CLAIM && row < s->rows; row += RUN) {
            // The last run begins where it is whole: some of its rows are done already.
            int64_t begin = row + RUN <= s->rows || s->rows < RUN ? row : s->rows - RUN;
            int64_t end = row + RUN < s->rows ? row + RUN : s->rows;
            f32x16 y[MOST], up[MOST];
            rows(s, x, begin, s->rows, y, narrow);
            if (s->mode >= GATED) {
                rows(s, x, s->rows + begin, s->rows, up, narrow);
                for (int t = 0; t < s->tokens; t++) y[t] = (s->mode == GATED ? silu(y[t]) : gelu(y[t])) * up[t];
            }
            for (int t = 0; t < s->tokens; t++) {
                float *to = s->y + t * s->y_token;
                if (s->mode == ADD) for (int64_t r = row; r < end; r++) to[r * s->y_step] += y[t][r - begin];
                else for (int64_t r = row; r < end; r++) to[r * s->y_step] = y[t][r - begin];
            }
        }
}

// One token's activations, which lie side by side, as the product reads them: bfloat16 beside bfloat16 weights.
static void prepare_row(const Single *s, int64_t at, char *made) {
    float scale = 1;
    if (s->norm) {
        f32x16 squares = splat(0);
        for (int64_t c = 0; c < s->columns; c += 16) {
            f32x16 x = load_any(s->x, at + c, s->x_narrow);
            squares = fused(x, x, squares);
        }
        scale = 1 / sqrtf(sum(squares) / (float)s->columns + s->eps);
    }
    for (int64_t c = 0; c < s->columns; c += 16) {
        f32x16 x = load_any(s->x, at + c, s->x_narrow);
        if (s->norm) x = x * load(s->norm + c) * scale;
        store_any(made, c, x, s->narrow);
    }
}

// All tokens' activations, a token in each lane, turned over.
static void prepare_lanes(const Single *s, char *made) {
    const float *x = s->x;
    f32x16 scale = splat(1);
    if (s->norm) {
        f32x16 squares[16];
        for (int i = 0; i < 16; i++) squares[i] = splat(0);
        for (int64_t c = 0; c < s->columns; c++) squares[c % 16] = fused(load(x + c * 16), load(x + c * 16), squares[c % 16]);
        scale = inverse_root(sum_of(squares) / (float)s->columns + s->eps);
    }
    for (int64_t c = 0; c < s->columns; c++) {
        f32x16 v = load(x + c * 16);
        if (s->norm) v = v * s->norm[c] * scale;
        u32x16 bits = s->narrow ? rounded(v) : (u32x16)v;
        for (int t = 0; t < s->tokens; t++)
            if (s->narrow) ((uint16_t *)made)[t * s->columns + c] = bits[t];
            else ((uint32_t *)made)[t * s->columns + c] = bits[t];
    }
}

// x as the product reads it. Every thread makes its own: cheaper than waiting for another to do it.
static const char *prepared(Single *s) {
    if (s->tokens == 1 && s->x_step == 1 && !s->norm && s->x_narrow == s->narrow) return s->x;
    char *made = (char *)(s->scratch + __atomic_fetch_add(&s->next_thread, 1, __ATOMIC_RELAXED) * s->columns * MOST);
    if (s->x_step == 1)
        for (int t = 0; t < s->tokens; t++) prepare_row(s, t * s->x_token, made + t * s->columns * (s->narrow ? 2 : 4));
    else
        prepare_lanes(s, made);
    return made;
}

// Run on every thread of a team.
void single(void *data) {
    Single *s = data;
    const char *x = prepared(s);
    s->narrow ? work(s, x, 1) : work(s, x, 0);
}

// For the caller to see that it means the same structure.
int64_t single_bytes(void) { return sizeof(Single); }

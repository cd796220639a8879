// Products of a weight with the activations of a token or a few: what a step of few sequences is made of.
//
// Such a product is as fast as the weight can be read, so a run of rows is worked on together while the next
// run is prefetched, and everything around it (RMS norm before; bias, gate or residual after) is done on the way.
// columns is a multiple of 16. A run's rows are in the nearest cache when they meet tokens after the fourth.

#include "vectors.h"

enum { SET, ADD, GATED };

typedef struct {
    const void *weights;  // [rows, columns]; GATED: gate's rows, then as many of up
    const float *bias;    // [rows of weights] or null
    const float *norm;    // [columns] or null: x is RMS-normed first
    const void *x;        // [columns] for each token, bfloat16 when x_narrow
    float *y;             // [rows] for each token
    int64_t rows, columns, narrow, x_narrow, mode;  // x_narrow only when narrow
    int64_t tokens;                          // 1 to MOST
    int64_t x_step, x_token, y_step, y_token;  // elements from one to the next; x_step is 1, or 16 and x_token 1
    float eps, pad;
    float *scratch;  // MOST * columns floats for each thread
    int64_t next_run, next_thread;  // counters, zero before a run
} Single;

#define RUN 4     // rows worked on together
#define CLAIM 32  // rows a thread takes at a time
#define GROUP 4   // tokens worked on together
#define MOST 8    // tokens

// Products of RUN rows from `row` on with `count` tokens; the first of a run's groups prefetches the next run.
static inline INLINE void products(const Single *s, const float *x, int64_t row, float y[RUN][MOST], const int count,
                                   const int first, const int narrow) {
    int64_t columns = s->columns, at = row * columns, ahead = at + RUN * columns;
    f32x16 a[RUN][GROUP];
    for (int r = 0; r < RUN; r++)
        for (int t = 0; t < count; t++) a[r][t] = splat(0);
    int c = 0;
    for (; c + 32 <= columns; c += 32) {  // two vectors: a cache line of bfloat16
        f32x16 x0[GROUP], x1[GROUP];
        for (int t = 0; t < count; t++) {
            x0[t] = load(x + t * columns + c);
            x1[t] = load(x + t * columns + c + 16);
        }
        for (int r = 0; r < RUN; r++) {
            if (first) {
                const char *next = (const char *)s->weights + (ahead + r * columns + c) * (narrow ? 2 : 4);
                __builtin_prefetch(next);
                if (!narrow) __builtin_prefetch(next + 64);
            }
            f32x16 w0 = load_any(s->weights, at + r * columns + c, narrow);
            f32x16 w1 = load_any(s->weights, at + r * columns + c + 16, narrow);
            for (int t = 0; t < count; t++) {
                a[r][t] += w0 * x0[t];
                a[r][t] += w1 * x1[t];
            }
        }
    }
    for (; c < columns; c += 16)
        for (int r = 0; r < RUN; r++) {
            f32x16 w = load_any(s->weights, at + r * columns + c, narrow);
            for (int t = 0; t < count; t++) a[r][t] += w * load(x + t * columns + c);
        }
    for (int r = 0; r < RUN; r++)
        for (int t = 0; t < count; t++) y[r][t] = sum(a[r][t]) + (s->bias ? s->bias[row + r] : 0);
}

// The last rows, fewer than RUN.
static inline float product(const Single *s, const float *x, int64_t row, int narrow) {
    f32x16 a = splat(0);
    for (int c = 0; c < s->columns; c += 16) a += load_any(s->weights, row * s->columns + c, narrow) * load(x + c);
    return sum(a) + (s->bias ? s->bias[row] : 0);
}

static inline INLINE void rows(const Single *s, const float *x, int64_t row, int count, float y[RUN][MOST],
                               const int narrow) {
    if (count < RUN) {
        for (int r = 0; r < count; r++)
            for (int t = 0; t < s->tokens; t++) y[r][t] = product(s, x + t * s->columns, row + r, narrow);
        return;
    }
    for (int t = 0; t < s->tokens; t += GROUP) {
        float (*out)[MOST] = (float (*)[MOST])(&y[0][t]);
        const float *from = x + t * s->columns;
        switch (s->tokens - t) {
            case 1: products(s, from, row, out, 1, t == 0, narrow); break;
            case 2: products(s, from, row, out, 2, t == 0, narrow); break;
            case 3: products(s, from, row, out, 3, t == 0, narrow); break;
            default: products(s, from, row, out, GROUP, t == 0, narrow);
        }
    }
}

static inline INLINE void work(Single *s, const float *x, const int narrow) {
    int64_t claim;
    while ((claim = __atomic_fetch_add(&s->next_run, CLAIM, __ATOMIC_RELAXED)) < s->rows)
        for (int64_t row = claim; row < claim + CLAIM && row < s->rows; row += RUN) {
            int count = s->rows - row < RUN ? s->rows - row : RUN;
            float y[RUN][MOST], up[RUN][MOST];
            rows(s, x, row, count, y, narrow);
            if (s->mode == GATED) rows(s, x, s->rows + row, count, up, narrow);
            for (int r = 0; r < count; r++)
                for (int t = 0; t < s->tokens; t++) {
                    float *to = s->y + (row + r) * s->y_step + t * s->y_token, v = y[r][t];
                    if (s->mode == SET) *to = v;
                    else if (s->mode == ADD) *to += v;
                    else *to = v / (1 + expf(-v)) * up[r][t];
                }
        }
}

// One token's activations, which lie side by side.
static void prepare_row(const Single *s, int64_t at, float *made) {
    float scale = 1;
    if (s->norm) {
        f32x16 squares = splat(0);
        for (int c = 0; c < s->columns; c += 16) {
            f32x16 x = load_any(s->x, at + c, s->x_narrow);
            squares += x * x;
        }
        scale = 1 / sqrtf(sum(squares) / s->columns + s->eps);
    }
    for (int c = 0; c < s->columns; c += 16) {
        f32x16 x = load_any(s->x, at + c, s->x_narrow);
        if (s->norm) x = x * load(s->norm + c) * scale;
        *(f32x16 *)(made + c) = s->narrow ? widened(rounded(x)) : x;
    }
}

// All tokens' activations, a token in each lane, turned over.
static void prepare_lanes(const Single *s, float *made) {
    const float *x = s->x;
    f32x16 scale = splat(1);
    if (s->norm) {
        f32x16 squares = splat(0);
        for (int64_t c = 0; c < s->columns; c++) squares += load(x + c * 16) * load(x + c * 16);
        scale = inverse_root(squares / (float)s->columns + s->eps);
    }
    for (int64_t c = 0; c < s->columns; c++) {
        f32x16 v = load(x + c * 16);
        if (s->norm) v = v * s->norm[c] * scale;
        if (s->narrow) v = widened(rounded(v));
        for (int t = 0; t < s->tokens; t++) made[t * s->columns + c] = v[t];
    }
}

// x as the product reads it. Every thread makes its own: cheaper than waiting for another to do it. Beside
// bfloat16 weights x is rounded to bfloat16, as it is for steps of more tokens: a step's size must not show.
static const float *prepared(Single *s) {
    if (s->tokens == 1 && s->x_step == 1 && !s->norm && !s->narrow) return s->x;
    float *made = s->scratch + __atomic_fetch_add(&s->next_thread, 1, __ATOMIC_RELAXED) * s->columns * MOST;
    if (s->x_step == 1)
        for (int t = 0; t < s->tokens; t++) prepare_row(s, t * s->x_token, made + t * s->columns);
    else
        prepare_lanes(s, made);
    return made;
}

// Run on every thread of a team.
void single(void *data) {
    Single *s = data;
    const float *x = prepared(s);
    s->narrow ? work(s, x, 1) : work(s, x, 0);
}

// For the caller to see that it means the same structure.
int64_t single_bytes(void) { return sizeof(Single); }

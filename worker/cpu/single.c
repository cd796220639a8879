// Products of a weight with a single token's activations: what a step of one sequence is made of.
//
// Such a product is as fast as the weight can be read, so a run of rows is worked on together while the next
// run is prefetched, and everything around it (RMS norm before; bias, gate or residual after) is done on the way.
// columns is a multiple of 16.

#include "vectors.h"

enum { SET, ADD, GATED };

typedef struct {
    const void *weights;  // [rows, columns]; GATED: gate's rows, then as many of up
    const float *bias;    // [rows of weights] or null
    const float *norm;    // [columns] or null: x is RMS-normed first
    const void *x;        // [columns], bfloat16 when x_narrow
    float *y;             // [rows]
    int64_t rows, columns, narrow, x_narrow, mode;  // x_narrow only when narrow
    float eps, pad;
    float *scratch;  // columns floats for each thread
    int64_t next_run, next_thread;  // counters, zero before a run
} Single;

#define RUN 4     // rows worked on together
#define CLAIM 32  // rows a thread takes at a time

// Products of RUN rows from `row` on.
static inline INLINE void products(const Single *s, const float *x, int64_t row, float *y, const int narrow) {
    int64_t columns = s->columns, at = row * columns, ahead = at + RUN * columns;
    f32x16 a[RUN];
    for (int r = 0; r < RUN; r++) a[r] = splat(0);
    int c = 0;
    for (; c + 32 <= columns; c += 32) {  // two vectors: a cache line of bfloat16
        f32x16 x0 = load(x + c), x1 = load(x + c + 16);
        for (int r = 0; r < RUN; r++) {
            const char *next = (const char *)s->weights + (ahead + r * columns + c) * (narrow ? 2 : 4);
            __builtin_prefetch(next);
            if (!narrow) __builtin_prefetch(next + 64);
            a[r] += load_any(s->weights, at + r * columns + c, narrow) * x0;
            a[r] += load_any(s->weights, at + r * columns + c + 16, narrow) * x1;
        }
    }
    for (; c < columns; c += 16)
        for (int r = 0; r < RUN; r++) a[r] += load_any(s->weights, at + r * columns + c, narrow) * load(x + c);
    for (int r = 0; r < RUN; r++) y[r] = sum(a[r]) + (s->bias ? s->bias[row + r] : 0);
}

// The last rows, fewer than RUN.
static inline float product(const Single *s, const float *x, int64_t row, int narrow) {
    f32x16 a = splat(0);
    for (int c = 0; c < s->columns; c += 16) a += load_any(s->weights, row * s->columns + c, narrow) * load(x + c);
    return sum(a) + (s->bias ? s->bias[row] : 0);
}

static inline INLINE void rows(const Single *s, const float *x, int64_t row, int count, float *y, const int narrow) {
    if (count == RUN) products(s, x, row, y, narrow);
    else
        for (int r = 0; r < count; r++) y[r] = product(s, x, row + r, narrow);
}

static inline INLINE void work(Single *s, const float *x, const int narrow) {
    int64_t claim;
    while ((claim = __atomic_fetch_add(&s->next_run, CLAIM, __ATOMIC_RELAXED)) < s->rows)
        for (int64_t row = claim; row < claim + CLAIM && row < s->rows; row += RUN) {
            int count = s->rows - row < RUN ? s->rows - row : RUN;
            float y[RUN], up[RUN];
            rows(s, x, row, count, y, narrow);
            if (s->mode == GATED) rows(s, x, s->rows + row, count, up, narrow);
            for (int r = 0; r < count; r++) {
                if (s->mode == SET) s->y[row + r] = y[r];
                else if (s->mode == ADD) s->y[row + r] += y[r];
                else s->y[row + r] = y[r] / (1 + expf(-y[r])) * up[r];
            }
        }
}

// x as the product reads it. Every thread makes its own: cheaper than waiting for another to do it. Beside
// bfloat16 weights x is rounded to bfloat16, as it is for steps of more tokens: a step's size must not show.
static const float *prepared(Single *s) {
    if (!s->norm && !s->narrow) return s->x;
    float *made = s->scratch + __atomic_fetch_add(&s->next_thread, 1, __ATOMIC_RELAXED) * s->columns;
    float scale = 1;
    if (s->norm) {
        f32x16 squares = splat(0);
        for (int c = 0; c < s->columns; c += 16) squares += load_any(s->x, c, s->x_narrow) * load_any(s->x, c, s->x_narrow);
        scale = 1 / sqrtf(sum(squares) / s->columns + s->eps);
    }
    for (int c = 0; c < s->columns; c += 16) {
        f32x16 x = load_any(s->x, c, s->x_narrow);
        if (s->norm) x = x * load(s->norm + c) * scale;
        *(f32x16 *)(made + c) = s->narrow ? widened(rounded(x)) : x;
    }
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

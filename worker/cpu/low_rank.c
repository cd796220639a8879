// What adapters add to a product: y += scale * B (A x), each token with its own adapter's A and B, or with none.
//
// Tokens are sorted by adapter into runs, so A and B are read once for a run. Every sum is made in one order that
// depends on the shape of A and B alone: over the inputs in 16 lanes, over the rank one by one. So what is added to a
// token does not show who else is in the step.

#include <sched.h>

#include "vectors.h"

typedef struct {
    const void *a;  // [rank, inputs], a_row elements from one row to the next; bfloat16 when a_narrow
    const void *b;  // [outputs / 16, rank, 16], the last tile filled up with zeros; bfloat16 when b_narrow
    int64_t rank, a_row, a_narrow, b_narrow;  // rank 0: nothing is added
    float scale, pad;
} Factors;

typedef struct {
    int64_t adapter, first, count;  // tokens [first, first + count) of `order`, at most 64
} Run;

typedef struct {
    const void *x;  // feature f of token t at f * x_step + t * x_token; bfloat16 when x_narrow
    float *y;       // likewise
    int64_t x_narrow, x_round, x_step, x_token, y_step, y_token;  // x_round: x is float32, to be read as bfloat16
    int64_t inputs, width;  // width: inputs rounded up to 16
    int64_t parts;          // matrices that lie one below the other in the product
    const int64_t *outputs;     // [parts] rows of each
    const Factors *factors;     // [adapters, 3]
    const int32_t *order;       // [tokens] columns of x and y
    const Run *runs;
    int64_t tokens, run_count, most;  // most: the largest rank in use
    float *turned;  // [tokens, width]
    float *between; // [tokens, parts, most], scale * A x
    int64_t next[3], done[2];  // zero before a call
} LowRank;

#define ROWS 4
#define GROUP 4
#define FEATURES 128  // turned at a time
#define CHUNK 64      // outputs a thread takes at a time
#define PARTS 3

static inline int64_t ceiling(int64_t a, int64_t b) { return (a + b - 1) / b; }

static inline float element(const void *base, int64_t at, int narrow) {
    if (!narrow) return ((const float *)base)[at];
    union { uint32_t bits; float value; } wide = {(uint32_t)((const uint16_t *)base)[at] << 16};
    return wide.value;
}

static inline float to_bfloat16(float x) { return widened(rounded(splat(x)))[0]; }

// FEATURES features of 16 tokens of the order, one token after the other, float32 and filled up with zeros.
static void turn(const LowRank *s, int64_t first, int64_t from) {
    int64_t end = from + FEATURES < s->width ? from + FEATURES : s->width;
    int64_t last = first + 16 < s->tokens ? first + 16 : s->tokens;
    for (int64_t t = first; t < last; t++) {
        float *to = s->turned + t * s->width;
        int64_t column = s->order[t] * s->x_token, k = from;
        for (; k < end && k < s->inputs; k++) to[k] = element(s->x, k * s->x_step + column, s->x_narrow);
        for (int64_t i = from; s->x_round && i < k; i++) to[i] = to_bfloat16(to[i]);
        for (; k < end; k++) to[k] = 0;
    }
}

// Elements [k, k + 16) of a row of A; what lies behind its end is zero.
static inline f32x16 of_row(const Factors *f, const LowRank *s, int64_t row, int64_t k, const int narrow) {
    if (k + 16 <= s->inputs) return load_any(f->a, row * f->a_row + k, narrow);
    f32x16 v = splat(0);
    for (int64_t i = k; i < s->inputs; i++) v[i - k] = element(f->a, row * f->a_row + i, narrow);
    return v;
}

// ROWS rows of A with `count` tokens.
static inline INLINE void dots(const LowRank *s, const Factors *f, int64_t row, const int rows, const float *x,
                               float *z, int64_t z_token, const int count, const int narrow) {
    f32x16 sums[ROWS][GROUP];
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < count; t++) sums[r][t] = splat(0);
    for (int64_t k = 0; k < s->width; k += 16) {
        f32x16 of_token[GROUP];
        for (int t = 0; t < count; t++) of_token[t] = load(x + t * s->width + k);
        for (int r = 0; r < rows; r++) {
            f32x16 a = of_row(f, s, row + r, k, narrow);
            for (int t = 0; t < count; t++) sums[r][t] = fused(a, of_token[t], sums[r][t]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < count; t++) z[t * z_token + r] = sum(sums[r][t]) * f->scale;
}

static inline INLINE void shrink_rows(const LowRank *s, const Run *run, const Factors *f, int64_t part, int64_t row,
                                      const int rows, const int narrow) {
    int64_t z_token = s->parts * s->most;
    for (int64_t t = run->first; t < run->first + run->count; t += GROUP) {
        const float *x = s->turned + t * s->width;
        float *z = s->between + t * z_token + part * s->most + row;
        switch (run->first + run->count - t) {
            case 1: dots(s, f, row, rows, x, z, z_token, 1, narrow); break;
            case 2: dots(s, f, row, rows, x, z, z_token, 2, narrow); break;
            case 3: dots(s, f, row, rows, x, z, z_token, 3, narrow); break;
            default: dots(s, f, row, rows, x, z, z_token, GROUP, narrow);
        }
    }
}

static inline INLINE void shrink(const LowRank *s, const Run *run, int64_t part, int64_t row, const int narrow) {
    const Factors *f = s->factors + run->adapter * PARTS + part;
    if (row + ROWS <= f->rank) shrink_rows(s, run, f, part, row, ROWS, narrow);
    else
        for (; row < f->rank; row++) shrink_rows(s, run, f, part, row, 1, narrow);
}

// Two tiles of 16 outputs for `count` tokens, added where they belong.
static inline INLINE void outputs(const LowRank *s, const Factors *f, const int32_t *order, const float *z,
                                  int64_t tile, const int tiles, int64_t first, int64_t rows, const int count,
                                  const int narrow) {
    f32x16 sums[2][GROUP];
    for (int i = 0; i < tiles; i++)
        for (int t = 0; t < count; t++) sums[i][t] = splat(0);
    int64_t at = tile * f->rank * 16, step = f->rank * 16, z_token = s->parts * s->most;
    for (int64_t r = 0; r < f->rank; r++)
        for (int i = 0; i < tiles; i++) {
            f32x16 b = load_any(f->b, at + i * step + r * 16, narrow);
            for (int t = 0; t < count; t++) sums[i][t] = fused(b, splat(z[t * z_token + r]), sums[i][t]);
        }
    for (int t = 0; t < count; t++)
        for (int i = 0; i < tiles; i++) {
            int64_t row = (tile + i) * 16, left = rows - row < 16 ? rows - row : 16;
            float *to = s->y + (first + row) * s->y_step + order[t] * s->y_token;
            for (int64_t o = 0; o < left; o++) to[o * s->y_step] += sums[i][t][o];
        }
}

static inline INLINE void expand_run(const LowRank *s, const Run *run, const Factors *f, int64_t part, int64_t first,
                                     int64_t row, int64_t end, const int narrow) {
    int64_t rows = s->outputs[part];
    for (int64_t tile = row / 16; tile * 16 < end; tile += 2) {
        int tiles = tile * 16 + 16 < end ? 2 : 1;
        for (int64_t t = run->first; t < run->first + run->count; t += GROUP) {
            const float *z = s->between + t * s->parts * s->most + part * s->most;
            const int32_t *order = s->order + t;
            int64_t left = run->first + run->count - t;
            if (tiles == 1) {
                for (int i = 0; i < left && i < GROUP; i++)
                    outputs(s, f, order + i, z + i * s->parts * s->most, tile, 1, first, rows, 1, narrow);
                continue;
            }
            switch (left) {
                case 1: outputs(s, f, order, z, tile, 2, first, rows, 1, narrow); break;
                case 2: outputs(s, f, order, z, tile, 2, first, rows, 2, narrow); break;
                case 3: outputs(s, f, order, z, tile, 2, first, rows, 3, narrow); break;
                default: outputs(s, f, order, z, tile, 2, first, rows, GROUP, narrow);
            }
        }
    }
}

// Outputs [row, row + CHUNK) of one part, for all runs.
static void expand(const LowRank *s, int64_t part, int64_t first, int64_t row) {
    int64_t end = row + CHUNK < s->outputs[part] ? row + CHUNK : s->outputs[part];
    for (int64_t i = 0; i < s->run_count; i++) {
        const Run *run = s->runs + i;
        const Factors *f = s->factors + run->adapter * PARTS + part;
        if (!f->rank) continue;
        if (f->b_narrow) expand_run(s, run, f, part, first, row, end, 1);
        else expand_run(s, run, f, part, first, row, end, 0);
    }
}

// All jobs of a phase are done, by whichever threads there are.
static void wait_for(const int64_t *done, int64_t count) {
    for (int64_t turns = 1; __atomic_load_n(done, __ATOMIC_ACQUIRE) < count; turns++)
        if (turns % 1024 == 0) sched_yield();
}

// Run on every thread of a team.
void low_rank(void *data) {
    LowRank *s = data;
    int64_t job, pieces = ceiling(s->width, FEATURES), jobs = ceiling(s->tokens, 16) * pieces;
    while ((job = __atomic_fetch_add(&s->next[0], 1, __ATOMIC_RELAXED)) < jobs) {
        turn(s, job / pieces * 16, job % pieces * FEATURES);
        __atomic_fetch_add(&s->done[0], 1, __ATOMIC_RELEASE);
    }
    wait_for(&s->done[0], jobs);

    int64_t of_part = ceiling(s->most, ROWS), of_run = of_part * s->parts;
    jobs = of_run * s->run_count;
    while ((job = __atomic_fetch_add(&s->next[1], 1, __ATOMIC_RELAXED)) < jobs) {
        const Run *run = s->runs + job / of_run;
        int64_t part = job % of_run / of_part, row = job % of_part * ROWS;
        if (s->factors[run->adapter * PARTS + part].a_narrow) shrink(s, run, part, row, 1);
        else shrink(s, run, part, row, 0);
        __atomic_fetch_add(&s->done[1], 1, __ATOMIC_RELEASE);
    }
    wait_for(&s->done[1], jobs);

    int64_t first = 0, before = 0;
    int part = 0;
    while ((job = __atomic_fetch_add(&s->next[2], 1, __ATOMIC_RELAXED)) >= 0) {
        while (part < s->parts && job - before >= ceiling(s->outputs[part], CHUNK)) {
            before += ceiling(s->outputs[part], CHUNK);
            first += s->outputs[part++];
        }
        if (part == s->parts) return;
        expand(s, part, first, (job - before) * CHUNK);
    }
}

typedef struct {
    const void *b;  // [outputs, rank], b_row elements from one row to the next
    void *tiles;    // [outputs / 16, rank, 16], zeroed
    int64_t outputs, rank, b_row, narrow;
} Tiling;

// B as `Factors` has it; on one thread.
void tile(void *data) {
    Tiling *s = data;
    for (int64_t o = 0; o < s->outputs; o++) {
        int64_t to = o / 16 * s->rank * 16 + o % 16, from = o * s->b_row;
        for (int64_t r = 0; r < s->rank; r++) {
            if (s->narrow) ((uint16_t *)s->tiles)[to + r * 16] = ((const uint16_t *)s->b)[from + r];
            else ((float *)s->tiles)[to + r * 16] = ((const float *)s->b)[from + r];
        }
    }
}

// For the caller to see that it means the same structures.
int64_t low_rank_bytes(void) { return sizeof(LowRank); }
int64_t factors_bytes(void) { return sizeof(Factors); }

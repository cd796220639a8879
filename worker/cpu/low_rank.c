// What adapters add to a product: y += scale * B (A x), each token with its own adapter's A and B, or with none.
//
// Tokens are sorted by adapter into runs, so A and B are read once for a run. Every sum is made in one order that
// depends on the shape of A and B alone: over the inputs in 16 lanes, over the rank one by one. So what is added to a
// token does not show who else is in the step.

#include <sched.h>
#include <string.h>

#include "vectors.h"

typedef struct {
    const void *a;  // [rank, inputs], a_row elements from one row to the next; bfloat16 when a_narrow
    const void *b;  // [outputs / 16, rank, 16], the last tile filled up with anything; bfloat16 when b_narrow
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
    const int32_t *places;      // [columns] where each is in `order`, or -1
    int64_t columns;            // of x and y; 1 or a multiple of 16
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
#define MANY 8        // runs times parts
#define APART 64      // columns whose outputs are first kept apart: few enough for the nearest cache

static inline int64_t ceiling(int64_t a, int64_t b) { return (a + b - 1) / b; }

static inline float element(const void *base, int64_t at, int narrow) {
    if (!narrow) return ((const float *)base)[at];
    union { uint32_t bits; float value; } wide = {(uint32_t)((const uint16_t *)base)[at] << 16};
    return wide.value;
}

// v[i][j] becomes v[j][i].
static inline INLINE void transpose(f32x16 v[16]) {
#ifdef __AVX512F__
    __m512 a[16], b[16];
    for (int i = 0; i < 16; i += 2) {  // pairs of rows, element by element
        a[i] = _mm512_unpacklo_ps((__m512)v[i], (__m512)v[i + 1]);
        a[i + 1] = _mm512_unpackhi_ps((__m512)v[i], (__m512)v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {  // b[i + c]: columns c, c + 4, c + 8, c + 12 of four rows
            b[i + 2 * j] = (__m512)_mm512_unpacklo_pd((__m512d)a[i + j], (__m512d)a[i + 2 + j]);
            b[i + 2 * j + 1] = (__m512)_mm512_unpackhi_pd((__m512d)a[i + j], (__m512d)a[i + 2 + j]);
        }
    for (int c = 0; c < 4; c++) {
        __m512 low = _mm512_shuffle_f32x4(b[c], b[4 + c], 0x88), high = _mm512_shuffle_f32x4(b[c], b[4 + c], 0xdd);
        __m512 low2 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0x88);
        __m512 high2 = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0xdd);
        v[c] = (f32x16)_mm512_shuffle_f32x4(low, low2, 0x88);
        v[8 + c] = (f32x16)_mm512_shuffle_f32x4(low, low2, 0xdd);
        v[4 + c] = (f32x16)_mm512_shuffle_f32x4(high, high2, 0x88);
        v[12 + c] = (f32x16)_mm512_shuffle_f32x4(high, high2, 0xdd);
    }
#else
    float from[16][16], to[16][16];
    for (int i = 0; i < 16; i++) *(f32x16 *)from[i] = v[i];
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) to[j][i] = from[i][j];
    for (int i = 0; i < 16; i++) v[i] = load(to[i]);
#endif
}

// Features [k, k + 16) of a token; what lies behind the last is zero.
static inline f32x16 of_token(const LowRank *s, int64_t column, int64_t k) {
    int64_t at = column * s->x_token + k * s->x_step;
    if (s->x_step == 1 && k + 16 <= s->inputs) return load_any(s->x, at, s->x_narrow);
    f32x16 v = splat(0);
    for (int64_t i = 0; i < 16 && k + i < s->inputs; i++) v[i] = element(s->x, at + i * s->x_step, s->x_narrow);
    return v;
}

// FEATURES features of 16 columns, for each that is in the order one after the other, float32 and filled up with zeros.
static void turn(const LowRank *s, int64_t column, int64_t from) {
    int64_t end = from + FEATURES < s->width ? from + FEATURES : s->width;
    int64_t count = s->columns - column < 16 ? s->columns - column : 16;
    for (int64_t k = from; k < end; k += 16) {
        f32x16 v[16];
        if (s->x_token == 1 && count == 16 && k + 16 <= s->inputs) {
            for (int i = 0; i < 16; i++) v[i] = load_any(s->x, (k + i) * s->x_step + column, s->x_narrow);
            transpose(v);
        } else
            for (int i = 0; i < count; i++)
                if (s->places[column + i] >= 0) v[i] = of_token(s, column + i, k);
        for (int i = 0; i < count; i++) {
            int64_t place = s->places[column + i];
            if (place < 0) continue;
            *(f32x16 *)(s->turned + place * s->width + k) = s->x_round ? widened(rounded(v[i])) : v[i];
        }
    }
}

// Elements [k, k + 16) of a row of A; what lies behind its end is zero.
static inline f32x16 of_row(const Factors *f, const LowRank *s, int64_t row, int64_t k, const int narrow) {
    if (k + 16 <= s->inputs) return load_any(f->a, row * f->a_row + k, narrow);
    f32x16 v = splat(0);
    for (int64_t i = k; i < s->inputs; i++) v[i - k] = element(f->a, row * f->a_row + i, narrow);
    return v;
}

// ROWS rows of A with `count` tokens; the first tokens of a run bring the next rows nearer.
static inline INLINE void dots(const LowRank *s, const Factors *f, int64_t row, const int rows, const float *x,
                               float *z, int64_t z_token, const int count, const int first, const int narrow) {
    f32x16 sums[ROWS][GROUP];
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < count; t++) sums[r][t] = splat(0);
    for (int64_t k = 0; k < s->width; k += 16) {
        f32x16 of_token[GROUP];
        for (int t = 0; t < count; t++) of_token[t] = load(x + t * s->width + k);
        for (int r = 0; r < rows; r++) {
            if (first) __builtin_prefetch((const char *)f->a + ((row + rows + r) * f->a_row + k) * (narrow ? 2 : 4));
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
        int first = t == run->first;
        switch (run->first + run->count - t) {
            case 1: dots(s, f, row, rows, x, z, z_token, 1, first, narrow); break;
            case 2: dots(s, f, row, rows, x, z, z_token, 2, first, narrow); break;
            case 3: dots(s, f, row, rows, x, z, z_token, 3, first, narrow); break;
            default: dots(s, f, row, rows, x, z, z_token, GROUP, first, narrow);
        }
    }
}

static inline INLINE void shrink(const LowRank *s, const Run *run, int64_t part, int64_t row, int64_t count,
                                 const int narrow) {
    const Factors *f = s->factors + run->adapter * PARTS + part;
    int64_t end = row + count < f->rank ? row + count : f->rank;
    for (; row + ROWS <= end; row += ROWS) shrink_rows(s, run, f, part, row, ROWS, narrow);
    for (; row < end; row++) shrink_rows(s, run, f, part, row, 1, narrow);
}

// Tiles of 16 outputs from the row `row` of a part on, for `count` tokens; into `apart`, or added where they belong.
static inline INLINE void outputs(const LowRank *s, const Factors *f, const int32_t *order, const float *z,
                                  int64_t tile, const int tiles, int64_t first, int64_t row, int64_t rows,
                                  float (*apart)[CHUNK], const int count, const int narrow) {
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
            int64_t at = (tile + i) * 16, left = rows - at < 16 ? rows - at : 16;
            if (apart) {
                *(f32x16 *)(apart[order[t]] + at - row) = sums[i][t];
                continue;
            }
            float *to = s->y + (first + at) * s->y_step + order[t] * s->y_token;
            for (int64_t o = 0; o < left; o++) to[o * s->y_step] += sums[i][t][o];
        }
}

static inline INLINE void expand_run(const LowRank *s, const Run *run, const Factors *f, int64_t part, int64_t first,
                                     int64_t row, int64_t end, float (*apart)[CHUNK], const int narrow) {
    int64_t rows = s->outputs[part];
    for (int64_t tile = row / 16; tile * 16 < end; tile += 2) {
        int tiles = tile * 16 + 16 < end ? 2 : 1;
        for (int64_t t = run->first; t < run->first + run->count; t += GROUP) {
            const float *z = s->between + t * s->parts * s->most + part * s->most;
            const int32_t *order = s->order + t;
            int64_t left = run->first + run->count - t;
            if (tiles == 1) {
                for (int i = 0; i < left && i < GROUP; i++)
                    outputs(s, f, order + i, z + i * s->parts * s->most, tile, 1, first, row, rows, apart, 1, narrow);
                continue;
            }
            switch (left) {
                case 1: outputs(s, f, order, z, tile, 2, first, row, rows, apart, 1, narrow); break;
                case 2: outputs(s, f, order, z, tile, 2, first, row, rows, apart, 2, narrow); break;
                case 3: outputs(s, f, order, z, tile, 2, first, row, rows, apart, 3, narrow); break;
                default: outputs(s, f, order, z, tile, 2, first, row, rows, apart, GROUP, narrow);
            }
        }
    }
}

// What lies apart, [columns, CHUNK], added to rows [row, row + count) of y; columns without changes stay as they are.
static void add(const LowRank *s, float (*apart)[CHUNK], const char *changed, int64_t row, int64_t count) {
    for (int64_t column = 0; column < s->columns; column += 16) {
        int changes = 0;
        for (int t = 0; t < 16; t++) changes += changed[column + t];
        for (int64_t o = 0; changes && o < count; o += 16) {
            f32x16 v[16];
            for (int t = 0; t < 16; t++) v[t] = changed[column + t] ? load(apart[column + t] + o) : splat(0);
            transpose(v);
            for (int i = 0; i < 16 && o + i < count; i++) {
                float *to = s->y + (row + o + i) * s->y_step + column;
                if (changes == 16) *(f32x16 *)to += v[i];
                else
                    for (int t = 0; t < 16; t++)
                        if (changed[column + t]) to[t] += v[i][t];
            }
        }
    }
}

// Bring nearer what an adapter adds to CHUNK outputs from `row` on.
static void fetch(const Factors *f, int64_t row, int64_t end) {
    int64_t size = f->b_narrow ? 2 : 4;
    const char *from = (const char *)f->b + row * f->rank * size, *to = (const char *)f->b + end * f->rank * size;
    for (; from < to; from += 64) __builtin_prefetch(from);
}

// Outputs [row, row + CHUNK) of one part, for all runs.
static void expand(const LowRank *s, int64_t part, int64_t first, int64_t row) {
    int64_t end = row + CHUNK < s->outputs[part] ? row + CHUNK : s->outputs[part];
    int few = s->y_token == 1 && s->columns > 1 && s->columns <= APART;
    float space[APART][CHUNK], (*apart)[CHUNK] = few ? space : 0;
    char changed[APART] = {0};
    for (int64_t i = 0; i < s->run_count; i++) {
        const Run *run = s->runs + i;
        const Factors *f = s->factors + run->adapter * PARTS + part;
        if (!f->rank) continue;
        for (int64_t t = run->first; few && t < run->first + run->count; t++) changed[s->order[t]] = 1;
        if (i + 1 < s->run_count) fetch(s->factors + run[1].adapter * PARTS + part, row, end);
        if (f->b_narrow) expand_run(s, run, f, part, first, row, end, apart, 1);
        else expand_run(s, run, f, part, first, row, end, apart, 0);
    }
    if (few) add(s, apart, changed, first + row, end - row);
}

// All jobs of a phase are done, by whichever threads there are.
static void wait_for(const int64_t *done, int64_t count) {
    for (int64_t turns = 1; __atomic_load_n(done, __ATOMIC_ACQUIRE) < count; turns++)
        if (turns % 1024 == 0) sched_yield();
}

// Run on every thread of a team.
void low_rank(void *data) {
    LowRank *s = data;
    int64_t job, pieces = ceiling(s->width, FEATURES), jobs = ceiling(s->columns, 16) * pieces;
    while ((job = __atomic_fetch_add(&s->next[0], 1, __ATOMIC_RELAXED)) < jobs) {
        turn(s, job / pieces * 16, job % pieces * FEATURES);
        __atomic_fetch_add(&s->done[0], 1, __ATOMIC_RELEASE);
    }
    wait_for(&s->done[0], jobs);

    // Several rows at a time read better; one adapter alone has to be enough work for all threads.
    int64_t rows = s->run_count * s->parts >= MANY ? 4 * ROWS : ROWS;
    int64_t of_part = ceiling(s->most, rows), of_run = of_part * s->parts;
    jobs = of_run * s->run_count;
    while ((job = __atomic_fetch_add(&s->next[1], 1, __ATOMIC_RELAXED)) < jobs) {
        const Run *run = s->runs + job / of_run;
        int64_t part = job % of_run / of_part, row = job % of_part * rows;
        if (s->factors[run->adapter * PARTS + part].a_narrow) shrink(s, run, part, row, rows, 1);
        else shrink(s, run, part, row, rows, 0);
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

// One B: where it lies in what is read and where its tiles go, in elements from the start of each.
typedef struct {
    int64_t b, tiles;  // [outputs, rank] and [outputs / 16, rank, 16]; what fills up the last tile is left as it is
    int64_t outputs, rank;
} Tiling;

typedef struct {
    const void *from;
    void *to;
    const Tiling *all;
    int64_t count, narrow;
} Tilings;

// Rows [row, row + rows) of B, of the columns from `column` on.
static void tile(const Tilings *s, const Tiling *t, int64_t row, int64_t rows, int64_t column) {
    int64_t to = t->tiles + row * t->rank, from = t->b + row * t->rank;
    for (int64_t r = column; r < t->rank; r++)
        for (int64_t o = 0; o < rows; o++) {
            if (s->narrow) ((uint16_t *)s->to)[to + r * 16 + o] = ((const uint16_t *)s->from)[from + o * t->rank + r];
            else ((float *)s->to)[to + r * 16 + o] = ((const float *)s->from)[from + o * t->rank + r];
        }
}

// Every B as `Factors` has it; on one thread.
void tile_all(void *data) {
    const Tilings *s = data;
    for (const Tiling *t = s->all; t < s->all + s->count; t++)
        for (int64_t row = 0; row < t->outputs; row += 16) {
            int64_t rows = t->outputs - row < 16 ? t->outputs - row : 16, column = 0;
            for (; !s->narrow && rows == 16 && column + 16 <= t->rank; column += 16) {
                f32x16 v[16];
                const float *from = (const float *)s->from + t->b + row * t->rank + column;
                float *to = (float *)s->to + t->tiles + row * t->rank + column * 16;
                for (int i = 0; i < 16; i++) v[i] = load(from + i * t->rank);
                transpose(v);
                memcpy(to, v, sizeof v);
            }
            tile(s, t, row, rows, column);
        }
}

// For the caller to see that it means the same structures.
int64_t low_rank_bytes(void) { return sizeof(LowRank); }
int64_t factors_bytes(void) { return sizeof(Factors); }
int64_t tiling_bytes(void) { return sizeof(Tiling); }

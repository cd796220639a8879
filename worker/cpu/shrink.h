// A x of a run: what low_rank.c does first. A's ranks are in the lanes, one input after the other meets all of them.
#pragma once

#include "lanes.h"
#include "low_rank.h"

#ifdef __AVX512F__
#define GROUP 4  // tokens worked on together: their sums stay in the registers
#else
#define GROUP 2
#endif
#define VECTORS 3     // of 16 ranks, likewise
#define SLICE 256     // the most inputs in one
#define RUN_TOKENS 64
#define AHEAD 4096    // bytes of A that are fetched before they are read

static inline int64_t ceiling(int64_t a, int64_t b) { return (a + b - 1) / b; }

static inline const Factors *factors_of(const LowRank *s, const Run *run) {
    return s->step->factors + s->site * s->step->adapters + run->adapter;
}

static inline int64_t most_of(const LowRank *s) { return s->step->most[s->site]; }

// Slices that are worked on side by side: the few sums of 16 ranks would wait for each other.
static inline int64_t together(const LowRank *s) { return most_of(s) > 16 ? 1 : 2; }

// bfloat16 bits of feature f of a token, or of 16 tokens side by side.
static inline uint32_t bits_of(const LowRank *s, int64_t f, int64_t token) {
    const int64_t at = f * s->x_step + token * s->x_token;
    return s->x_narrow ? ((const uint16_t *)s->x)[at] : rounded(splat(((const float *)s->x)[at]))[0];
}

static inline INLINE u32x16 bits_of_16(const LowRank *s, int64_t f, int64_t token) {
    const int64_t at = f * s->x_step + token;
    if (!s->x_narrow) return rounded(load((const float *)s->x + at));
    return (u32x16)load_any(s->x, at, 1) >> 16;
}

// Inputs [first, first + count) of a run's tokens in pairs of bfloat16 numbers, [count / 2, width] words, and where each
// token is among the words of a pair; first is even, and the last input may be alone, beside a zero. Returns width.
static int64_t gather(const LowRank *s, const int32_t *order, int64_t tokens, int64_t first, int64_t count, float *words,
                      int64_t *at) {
    int64_t blocks[RUN_TOKENS / 16], found = 0;  // 16 tokens side by side cost what one does
    int fit = s->x_token == 1 && s->columns % 16 == 0;
    for (int64_t t = 0; t < tokens && fit; t++) {
        if (!found || order[t] / 16 != blocks[found - 1]) {
            fit = found < RUN_TOKENS / 16;
            if (fit) blocks[found++] = order[t] / 16;
        }
        at[t] = (found - 1) * 16 + order[t] % 16;
    }
    const int64_t width = fit ? found * 16 : tokens;
    uint32_t *to = (uint32_t *)words;
    for (int64_t t = 0; t < tokens && !fit; t++) at[t] = t;
    for (int64_t f = first; f < first + count; f += 2, to += width) {
        const int alone = f + 1 == first + count;
        for (int64_t i = 0; fit && i < found; i++) {
            u32x16 one = bits_of_16(s, f, blocks[i] * 16);
            if (!alone) one |= bits_of_16(s, f + 1, blocks[i] * 16) << 16;
            *(u32x16 *)(to + i * 16) = one;
        }
        for (int64_t t = 0; !fit && t < tokens; t++)
            to[t] = bits_of(s, f, order[t]) | (alone ? 0 : bits_of(s, f + 1, order[t]) << 16);
    }
    return width;
}

// What a slice is read from and written to, and how far from it the next slice's is; of the two, inputs or pairs of them.
typedef struct {
    const char *a;
    const float *x;
    float *z;
    int64_t a_row, x_row, z_row, a_next, x_next, z_next, count, count_of_next;
} Slice;

// sums += 16 * `vectors` ranks of one input, or of a pair, for `tokens` tokens. Meanwhile what is read later is fetched.
static inline INLINE void meet(const char *a, const float *x, const int64_t *at, lanes sums[GROUP][VECTORS * SIDE],
                               const int vectors, const int tokens, const int fetch, const int narrow, const int pairs) {
    lanes there[GROUP];
#pragma GCC unroll 8
    for (int t = 0; t < tokens; t++) there[t] = spread(x[at[t]]);
#pragma GCC unroll 8
    for (int v = 0; v < vectors * SIDE; v++) {
        if (fetch && v % SIDE == 0) __builtin_prefetch(a + AHEAD + v / SIDE * (narrow && !pairs ? 32 : 64), 0, 2);
        lanes ranks = lanes_of(a, v * LANES, narrow && !pairs);
        if (tokens > 1) ranks = held(ranks);
#pragma GCC unroll 8
        for (int t = 0; t < tokens; t++)
            sums[t][v] = pairs ? fused_pairs_of_lanes(ranks, there[t], sums[t][v]) : fused_lanes(ranks, there[t], sums[t][v]);
    }
}

// 16 * `vectors` ranks of `tokens` tokens, of one slice or of two: z = A x.
static inline INLINE void ranks_of(const Slice *s, const int64_t *at, const int vectors, const int tokens, const int fetch,
                                   const int both, const int narrow, const int pairs) {
    lanes sums[2][GROUP][VECTORS * SIDE];
    const char *a = s->a;
    const float *x = s->x;
    int64_t f = 0;
#pragma GCC unroll 2
    for (int i = 0; i <= both; i++)
#pragma GCC unroll 8
        for (int t = 0; t < tokens; t++)
#pragma GCC unroll 8
            for (int v = 0; v < vectors * SIDE; v++) sums[i][t][v] = zeros();
    for (; both && f < s->count_of_next; f++, a += s->a_row, x += s->x_row) {
        meet(a, x, at, sums[0], vectors, tokens, fetch, narrow, pairs);
        meet(a + s->a_next, x + s->x_next, at, sums[1], vectors, tokens, fetch, narrow, pairs);
    }
    for (; f < s->count; f++, a += s->a_row, x += s->x_row)
        meet(a, x, at, sums[0], vectors, tokens, fetch, narrow, pairs);
#pragma GCC unroll 2
    for (int i = 0; i <= both; i++)
#pragma GCC unroll 8
        for (int t = 0; t < tokens; t++)
#pragma GCC unroll 8
            for (int v = 0; v < vectors * SIDE; v++)
                *(lanes *)(s->z + i * s->z_next + t * s->z_row + v * LANES) = sums[i][t][v];
}

// A number of tokens, and what to do with so many, as a constant.
#if GROUP > 2
#define FOR_GROUPS(left, done, call) \
    while (left > 0) { \
        if (left >= 4) { enum { N = 4 }; call; done += N, left -= N; } \
        else if (left >= 2) { enum { N = 2 }; call; done += N, left -= N; } \
        else { enum { N = 1 }; call; done += N, left -= N; } \
    }
#else
#define FOR_GROUPS(left, done, call) \
    while (left > 0) { \
        if (left >= 2) { enum { N = 2 }; call; done += N, left -= N; } \
        else { enum { N = 1 }; call; done += N, left -= N; } \
    }
#endif

// One run, VECTORS * 16 ranks from `rank` on, of slices [slice, slice + `together`).
static inline INLINE void shrink(const LowRank *s, const float *words, const Run *run, int64_t slice, int64_t rank,
                                 const int narrow, const int pairs) {
    const Factors *f = factors_of(s, run);
    const int64_t width = ceiling(ceiling(s->inputs, s->slices), 16) * 16, from = slice * width, size = narrow ? 2 : 4;
    const int64_t vectors = ceiling(f->ranks - rank, 16), row = f->ranks * size, side = pairs ? 2 : 1, most = most_of(s);
    const int64_t left = s->inputs > from ? s->inputs - from : 0, first = left < width ? left : width;
    const int64_t second = left - first < width ? left - first : width;
    const int32_t *order = s->step->order + run->first;
    float space[SLICE * RUN_TOKENS];
    int64_t at[RUN_TOKENS];
    Slice of = {
        .a = (const char *)f->a + from * row + rank * side * size,
        .x = (const float *)s->x + from * s->x_step,
        .z = s->step->between + (slice * s->step->tokens + run->first) * most + rank,
        .a_row = row * side, .x_row = s->x_step, .z_row = most,
        .a_next = width * row, .z_next = s->step->tokens * most,
        .count = ceiling(first, side), .count_of_next = ceiling(second, side),
    };
    const int both = together(s) == 2;
    for (int64_t t = 0; t < run->count; t++) at[t] = order[t] * (words ? 1 : s->x_token);
    if (words) of.x_row = s->columns, of.x = words + from / side * of.x_row;
    else if (pairs && left > 0)
        of.x_row = gather(s, order, run->count, from, both ? first + second : first, space, at), of.x = space;
    of.x_next = width / side * of.x_row;
    int64_t done = 0, tokens = run->count;
#define RANKS(v, both) \
    FOR_GROUPS(tokens, done, \
               if (done) ranks_of(&of, at + done, v, N, 0, both, narrow, pairs); \
               else ranks_of(&of, at, v, N, 1, both, narrow, pairs); \
               of.z += N * most)
    if (both) RANKS(1, 1)
    else if (vectors == 1) RANKS(1, 0)
    else if (vectors == 2) RANKS(2, 0)
    else RANKS(3, 0)
}

// A x of a run: the sums of all slices, one after the other, scaled.
static void combine(const LowRank *s, const Run *run) {
    const Factors *f = factors_of(s, run);
    const int64_t most = most_of(s), next = s->step->tokens * most;
    for (int64_t t = run->first; t < run->first + run->count; t++)
        for (int64_t r = 0; r < f->ranks; r += LANES) {
            float *z = s->step->between + t * most + r;
            lanes total = lanes_of(z, 0, 0);
            for (int64_t slice = 1; slice < s->slices; slice++) total += lanes_of(z, slice * next, 0);
            *(lanes *)z = total * lanes_of(f->scales, r, 0);
        }
}

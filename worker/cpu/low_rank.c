// What adapters add to a product: y += scale * B (A x), each token with its own adapter's A and B, or with none.
//
// Tokens are sorted by adapter into runs, so A and B are read once for a run. Both lie as they are read: A with what
// belongs to an input side by side, the ranks of all the product's parts in the lanes, B in chunks of outputs. Every sum
// is made in one order that depends on the shape of A and B alone: over the inputs one by one, in slices whose sums are
// added up, and over the rank one by one. So what is added to a token does not show who else is in the step.

#include <sched.h>
#include <string.h>

#include "low_rank.h"

#ifdef __AVX512F__
#define GROUP 4  // tokens worked on together: their sums stay in the registers
#define TILES 3  // of B
#define WIDE 9   // tokens among 16 columns from which on a lane for each is faster than one for each output
#else
#define GROUP 2
#define TILES 2
#define WIDE 17  // never: the sums would not fit into the registers
#endif
#define VECTORS 3     // of A's ranks
#define SLICE 256     // the most inputs in one
#define RUN_TOKENS 64
#define MOST_RANK 256
#define APART 64      // columns whose outputs are first kept apart, together: few enough for the nearest cache
#define AHEAD 4096    // bytes of A that are fetched before they are read
#define NEXT (2 << 20)  // most bytes of A that are fetched a product ahead: what second caches have room for

static inline int64_t ceiling(int64_t a, int64_t b) { return (a + b - 1) / b; }

static inline const Factors *factors_of(const LowRank *s, const Run *run) {
    return s->step->factors + s->site * s->step->adapters + run->adapter;
}

static inline int64_t most_of(const LowRank *s) { return s->step->most[s->site]; }

// v, kept in a register: gcc would read it again for each token.
static inline INLINE f32x16 held(f32x16 v) {
#ifdef __AVX512F__
    __asm__("" : "+v"(v));
#endif
    return v;
}

static inline float element(const void *base, int64_t at, int narrow) {
    if (!narrow) return ((const float *)base)[at];
    union { uint32_t bits; float value; } wide = {(uint32_t)((const uint16_t *)base)[at] << 16};
    return wide.value;
}

#if defined(INTEL) && !defined(__AVX512F__)
// 8 rows of 8 numbers, which begin `step` apart: the columns. More of them would not fit into the registers.
static inline INLINE void eight(const float *rows, int64_t step, __m256 columns[8]) {
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(rows + i * step);
    for (int i = 0; i < 8; i += 2) {  // pairs of rows, element by element
        b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {  // a[i + c]: columns c and c + 4 of four rows
            a[i + 2 * j] = (__m256)_mm256_unpacklo_pd((__m256d)b[i + j], (__m256d)b[i + 2 + j]);
            a[i + 2 * j + 1] = (__m256)_mm256_unpackhi_pd((__m256d)b[i + j], (__m256d)b[i + 2 + j]);
        }
    for (int c = 0; c < 4; c++) {
        columns[c] = _mm256_permute2f128_ps(a[c], a[4 + c], 0x20);
        columns[4 + c] = _mm256_permute2f128_ps(a[c], a[4 + c], 0x31);
    }
}
#endif

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
#elif defined(INTEL)
    __m256 turned[2][16];  // halves of 16 rows
    for (int half = 0; half < 2; half++)
        for (int row = 0; row < 16; row += 8) eight((const float *)(v + row) + 8 * half, 16, turned[row / 8] + 8 * half);
    for (int i = 0; i < 16; i++)
        for (int half = 0; half < 2; half++) _mm256_storeu_ps((float *)(v + i) + 8 * half, turned[half][i]);
#else
    float from[16][16], to[16][16];
    for (int i = 0; i < 16; i++) *(f32x16 *)from[i] = v[i];
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) to[j][i] = from[i][j];
    for (int i = 0; i < 16; i++) v[i] = load(to[i]);
#endif
}

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

// 16 * `vectors` ranks of `tokens` tokens, over `count` inputs, or pairs of them: z = A x. Meanwhile what is read later
// is fetched.
static inline INLINE void ranks_of(const char *a, int64_t row, int64_t count, const float *x, int64_t x_step,
                                   const int64_t *at, float *z, int64_t z_token, const int vectors, const int tokens,
                                   const int fetch, const int narrow, const int pairs) {
    f32x16 sums[GROUP][VECTORS];
    for (int t = 0; t < tokens; t++)
        for (int v = 0; v < vectors; v++) sums[t][v] = splat(0);
    for (int64_t f = 0; f < count; f++, a += row, x += x_step) {
        f32x16 ranks[VECTORS];
        for (int v = 0; v < vectors; v++) {
            if (fetch) __builtin_prefetch(a + AHEAD + v * (narrow && !pairs ? 32 : 64), 0, 2);
            ranks[v] = load_any(a, v * 16, narrow && !pairs);
            if (tokens > 1) ranks[v] = held(ranks[v]);
        }
        for (int t = 0; t < tokens; t++) {
            f32x16 there = splat(x[at[t]]);
            for (int v = 0; v < vectors; v++)
                sums[t][v] = pairs ? fused_pairs(ranks[v], there, sums[t][v]) : fused(ranks[v], there, sums[t][v]);
        }
    }
    for (int t = 0; t < tokens; t++)
        for (int v = 0; v < vectors; v++) *(f32x16 *)(z + t * z_token + v * 16) = sums[t][v];
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

// One run, one slice of the inputs, VECTORS * 16 ranks from `rank` on.
static inline INLINE void shrink(const LowRank *s, const float *words, const Run *run, int64_t slice, int64_t rank,
                                 const int narrow, const int pairs) {
    const Factors *f = factors_of(s, run);
    const int64_t width = ceiling(ceiling(s->inputs, s->slices), 16) * 16, from = slice * width;
    const int64_t inputs = s->inputs - from < width ? s->inputs - from : width, size = narrow ? 2 : 4;
    const int64_t vectors = ceiling(f->ranks - rank, 16), row = f->ranks * size * (pairs ? 2 : 1);
    const int64_t count = pairs ? ceiling(inputs, 2) : inputs;
    const char *a = (const char *)f->a + (from * f->ranks + rank * (pairs ? 2 : 1)) * size;
    const int32_t *order = s->step->order + run->first;
    const int64_t most = most_of(s);
    float space[SLICE * RUN_TOKENS], *z = s->step->between + (slice * s->step->tokens + run->first) * most + rank;
    const float *x = (const float *)s->x + from * s->x_step;
    int64_t x_step = s->x_step, at[RUN_TOKENS];
    for (int64_t t = 0; t < run->count; t++) at[t] = order[t] * (words ? 1 : s->x_token);
    if (words) x_step = s->columns, x = words + from / (pairs ? 2 : 1) * x_step;
    else if (pairs && inputs > 0) x_step = gather(s, order, run->count, from, inputs, space, at), x = space;
    int64_t done = 0, left = run->count;
#define RANKS(v) \
    FOR_GROUPS(left, done, \
               if (done) ranks_of(a, row, count, x, x_step, at + done, z + done * most, most, v, N, 0, narrow, pairs); \
               else ranks_of(a, row, count, x, x_step, at + done, z + done * most, most, v, N, 1, narrow, pairs))
    switch (vectors) {
        case 1: RANKS(1) break;
        case 2: RANKS(2) break;
        default: RANKS(3)
    }
}

// A x of a run: the sums of all slices, one after the other, scaled.
static void combine(const LowRank *s, const Run *run) {
    const Factors *f = factors_of(s, run);
    const int64_t most = most_of(s), next = s->step->tokens * most;
    for (int64_t t = run->first; t < run->first + run->count; t++)
        for (int64_t r = 0; r < f->ranks; r += 16) {
            float *z = s->step->between + t * most + r;
            f32x16 total = load(z);
            for (int64_t slice = 1; slice < s->slices; slice++) total += load(z + slice * next);
            *(f32x16 *)z = total * load(f->scales + r);
        }
}

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
    f32x16 sums[GROUP][TILES];
    for (int t = 0; t < tokens; t++)
        for (int i = 0; i < tiles; i++) sums[t][i] = splat(0);
    for (int64_t r = 0; r < rank; r++, b += step, ahead += step) {
        f32x16 there[TILES];
        for (int i = 0; i < tiles; i++) {
            if (fetch) __builtin_prefetch(ahead + i * (narrow ? 32 : 64), 0, 2);
            there[i] = load_any(b, i * 16, narrow);
            if (tokens > 1) there[i] = held(there[i]);
        }
        for (int t = 0; t < tokens; t++) {
            f32x16 between = splat(z[t * most + r]);
            for (int i = 0; i < tiles; i++) sums[t][i] = fused(there[i], between, sums[t][i]);
        }
    }
    for (int t = 0; t < tokens; t++)
        for (int i = 0; i < tiles; i++) {
            if (apart) {
                *(f32x16 *)(apart[order[t] - to.base] + in_chunk + i * 16) = sums[t][i];
                continue;
            }
            float *y = to.y + i * 16 * to.step + order[t] * to.token;
            for (int64_t o = 0; o < 16 && i * 16 + o < rows; o++) y[o * to.step] += sums[t][i][o];
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
    for (int64_t column = 0; column < columns; column += 16) {
        int changes = 0;
        for (int t = 0; t < 16; t++) changes += changed[column + t];
        for (int64_t o = 0; changes && o < count; o += 16) {
            f32x16 v[16];
            for (int t = 0; t < 16; t++) v[t] = changed[column + t] ? load(apart[column + t] + o) : splat(0);
            transpose(v);
            for (int i = 0; i < 16 && o + i < count; i++) {
                float *to = into.y + (o + i) * into.step + into.base + column;
                if (changes == 16) *(f32x16 *)to += v[i];
                else
                    for (int t = 0; t < 16; t++)
                        if (changed[column + t]) to[t] += v[i][t];
            }
        }
    }
}

// Outputs [row, end) of one part for `count` tokens of 16 columns, a token in each lane; added where they belong.
static inline INLINE void expand_wide(Into into, const Factors *f, int64_t part, int64_t row, int64_t end,
                                      const int32_t *order, const float *z, int64_t most, int64_t count,
                                      const char *ahead, const int narrow) {
    const int64_t rank = f->rank[part], size = narrow ? 2 : 4, step = ceiling(end - row, 16) * 16 * size;
    f32x16 of_rank[MOST_RANK];
    for (int64_t r = 0; r < rank; r += 16) {
        f32x16 *v = of_rank + r;
        for (int lane = 0; lane < 16; lane++) v[lane] = splat(0);
        for (int64_t t = 0; t < count; t++) v[order[t] % 16] = load(z + t * most + r);
        transpose(v);
    }
    float widened[MOST_RANK][16];
    for (int64_t at = row; at < end; at += 16) {
        const char *b = (const char *)f->b[part] + row * rank * size + (at - row) * size;
        const char *next = ahead ? ahead + (at - row) * size : b;
        // In memory, where a number is spread over a register as it is read: gcc would take it from a register in two steps.
        for (int64_t r = 0; narrow && r < rank; r++) *(f32x16 *)widened[r] = load_any(b + r * step, 0, 1);
        const char *numbers = narrow ? (const char *)widened : b;
        const int64_t stride = narrow ? sizeof widened[0] : step;
        __asm__("" : "+r"(numbers) : : "memory");
        for (int o = 0; o < 16; o++)  // many lines of y, far apart
            __builtin_prefetch(into.y + (at - row + o) * into.step + order[0] / 16 * 16, 1);
        f32x16 sums[16];
        for (int o = 0; o < 16; o++) sums[o] = splat(0);
        for (int64_t r = 0; r < rank; r++, numbers += stride, next += step) {
            __builtin_prefetch(next, 0, 2);
            for (int o = 0; o < 16; o++) sums[o] = fused(splat(((const float *)numbers)[o]), of_rank[r], sums[o]);
        }
        for (int o = 0; o < 16 && at + o < end; o++) {
            float *to = into.y + (at - row + o) * into.step + order[0] / 16 * 16;
            if (count == 16) *(f32x16 *)to += sums[o];
            else
                for (int64_t t = 0; t < count; t++) to[order[t] % 16] += sums[o][order[t] % 16];
        }
    }
}

// The same for all tokens of a run: a lane for each token where enough of them are in the same 16 columns. Either way an
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
        while (t + count < last && order[t + count] / 16 == order[t] / 16) count++;
        const int wide = apart && count >= WIDE;
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

// All jobs of a phase are done, by whichever threads there are.
static void wait_for(const int64_t *done, int64_t count) {
    for (int64_t turns = 1; __atomic_load_n(done, __ATOMIC_ACQUIRE) < count; turns++)
        if (turns % 1024 == 0) sched_yield();
}

static void fetch(const void *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)from + i, 0, 2);
}

// What is read next but one: the beginning of the next run's A, or behind the last run those of the first B's.
static void fetch_after(const LowRank *s, int64_t run) {
    if (run + 1 < s->step->run_count) {
        fetch(factors_of(s, s->step->runs + run + 1)->a, AHEAD);
        return;
    }
    for (int64_t i = 0; i < 2 && i < s->step->run_count; i++) {
        const Factors *f = factors_of(s, s->step->runs + i);
        fetch(f->b[0], CHUNK * f->rank[0] * (f->narrow ? 2 : 4));
    }
}

void low_rank_between(LowRank *s, const float *words) {
    const int64_t runs = s->step->run_count, of_slice = ceiling(most_of(s), VECTORS * 16), of_run = of_slice * s->slices;
    int64_t job;
    while ((job = __atomic_fetch_add(&s->next[0], 1, __ATOMIC_RELAXED)) < runs * of_run) {
        const Run *run = s->step->runs + job / of_run;
        const Factors *f = factors_of(s, run);
        int64_t slice = job % of_run / of_slice, rank = job % of_slice * VECTORS * 16;
        if (job % of_run == 0) fetch_after(s, job / of_run);
        if (rank < f->ranks) {
            if (s->x_narrow || s->x_round) shrink(s, words, run, slice, rank, 1, 1);
            else if (f->narrow) shrink(s, words, run, slice, rank, 1, 0);
            else shrink(s, words, run, slice, rank, 0, 0);
        }
        int64_t *ready = s->step->ready + job / of_run;
        if (__atomic_add_fetch(ready, 1, __ATOMIC_ACQ_REL) == of_run) {
            *ready = 0;
            combine(s, run);
            __atomic_fetch_add(&s->done, 1, __ATOMIC_RELEASE);
        }
    }
}

void low_rank_add(const LowRank *s, int64_t part, int64_t chunk, float *to, int64_t step) {
    wait_for(&s->done, s->step->run_count);
    expand(s, (Into){to, step, 1, 0}, part, chunk * CHUNK, 1);
}

int64_t low_rank_ahead(const LowRank *s, int64_t part, int64_t parts, int64_t chunk, int64_t claim, int64_t claims,
                       Ahead *ahead, Piece pieces[PIECES]) {
    const Step *step = s->step;
    int64_t count = 0, bytes = 0, of_next = 0;
    for (int64_t i = 0; i < step->run_count; i++) {
        const Factors *f = factors_of(s, step->runs + i);
        for (int64_t p = part; p < part + parts; p++) {
            const int64_t of_row = f->rank[p] * (f->narrow ? 2 : 4), rows = s->outputs[p] - chunk * CHUNK;
            if (!of_row) continue;
            pieces[count] = (Piece){(const char *)f->b[p] + chunk * CHUNK * of_row, (rows < CHUNK ? rows : CHUNK) * of_row};
            bytes += pieces[count++].bytes;
        }
    }
    const Factors *next = s->step->factors + s->next_site * step->adapters;
    if (s->next_site >= 0)
        for (int64_t i = 0; i < step->adapters; i++) of_next += s->next_inputs * next[i].ranks * (next[i].narrow ? 2 : 4);
    if (of_next <= NEXT) {
        // A share of A's, all of them taken for one after the other, and each for whole lines.
        int64_t from = of_next / 64 * claim / claims * 64, until = of_next / 64 * (claim + 1) / claims * 64;
        if (claim + 1 == claims) until = of_next;
        for (int64_t i = 0, before = 0; i < step->adapters && before < until; i++) {
            const int64_t size = s->next_inputs * next[i].ranks * (next[i].narrow ? 2 : 4), end = before + size;
            const int64_t low = from > before ? from : before, high = until < end ? until : end;
            if (low < high) {
                pieces[count] = (Piece){(const char *)next[i].a + (low - before), high - low};
                bytes += pieces[count++].bytes;
            }
            before = end;
        }
    }
    *ahead = (Ahead){0, 0, pieces, pieces + count, 0};
    return bytes;
}

// Run on every thread of a team, beside a product that does none of it.
void low_rank(void *data) {
    LowRank *s = data;
    low_rank_between(s, 0);
    wait_for(&s->done, s->step->run_count);
    int64_t job, first = 0, before = 0;
    int part = 0;
    while ((job = __atomic_fetch_add(&s->next[1], 1, __ATOMIC_RELAXED)) >= 0) {
        while (part < s->parts && job - before >= ceiling(s->outputs[part], CHUNK)) {
            before += ceiling(s->outputs[part], CHUNK);
            first += s->outputs[part++];
        }
        if (part == s->parts) return;
        const int64_t row = (job - before) * CHUNK;
        expand(s, (Into){s->y + (first + row) * s->y_step, s->y_step, s->y_token, 0}, part, row, 0);
    }
}

// A matrix [rows, columns] to be turned over: where it lies in what is read, and where element (row, column) goes in what
// is made: to `to` + row / CHUNK * chunk + row % CHUNK + column * apart; of `pairs`, which are narrow, to `to` + 2 * row +
// column / 2 * apart + column % 2, and where the last column is alone, a zero beside it. In elements.
typedef struct {
    int64_t from, to, rows, columns, chunk, apart, pairs;
} Turn;

// A matrix of what is read, from its first byte on; and `Turn`s [first, first + count), whose `from` counts from there.
typedef struct {
    int64_t at, bytes, first, count;
} Matrix;

typedef struct {
    const void *from;  // bfloat16 when from_narrow
    void *to;          // bfloat16 when to_narrow
    const Turn *turns;
    const Matrix *matrices;
    const int64_t *numbers;  // [count] of the matrices that are packed
    uint64_t *digests;       // [count] what `hash` says of them
    void *apart;             // room for the largest of them
    uint64_t (*hash)(const void *, size_t);  // 0: nothing is
    int64_t count, from_narrow, to_narrow;
} Pack;

// 16 numbers; past the caches if they are a whole line, which need not be read first then, nor is it read soon.
static inline INLINE void put(char *there, f32x16 v) {
#ifdef __AVX512F__
    if ((uintptr_t)there % 64 == 0) {
        _mm512_stream_ps((float *)there, (__m512)v);
        return;
    }
#endif
    store_any(there, 0, v, 0);
}

// 16 whole rows of float32 at `from`: their columns, each to a line of its own, past the caches, as far as that can be done
// without laying numbers aside. Returns the first column that is left.
static inline INLINE int64_t lines(const float *from, float *to, int64_t columns, int64_t apart) {
    int64_t c = 0;
#if defined(INTEL) && !defined(__AVX512F__)
    if ((uintptr_t)to % 64 || apart % 16) return 0;
    for (; c + 8 <= columns; c += 8) {
        __m256 first[8], second[8];
        eight(from + c, columns, first), eight(from + 8 * columns + c, columns, second);
        for (int i = 0; i < 8; i++) {
            _mm256_stream_ps(to + (c + i) * apart, first[i]);
            _mm256_stream_ps(to + (c + i) * apart + 8, second[i]);
        }
    }
#endif
    return c;
}

static inline INLINE void turn(const Pack *s, const Turn *m, const int from_narrow, const int to_narrow) {
    const void *from = s->apart;
    const int64_t size = to_narrow ? 2 : 4;
    for (int64_t row = 0; row < m->rows; row += 16) {
        char *to = (char *)s->to + (m->to + row / CHUNK * m->chunk + row % CHUNK) * size;
        const int64_t rows = m->rows - row < 16 ? m->rows - row : 16;
        int64_t c = 0;
        if (!from_narrow && !to_narrow && rows == 16)
            c = lines((const float *)from + m->from + row * m->columns, (float *)to, m->columns, m->apart);
        for (; c < m->columns; c += 16) {
            const int64_t columns = m->columns - c < 16 ? m->columns - c : 16;
            f32x16 v[16];
            for (int r = 0; r < 16; r++) {
                const int64_t at = m->from + (row + r) * m->columns + c;
                v[r] = splat(0);
                if (r < rows && columns == 16) v[r] = load_any(from, at, from_narrow);
                else
                    for (int i = 0; r < rows && i < columns; i++) v[r][i] = element(from, at + i, from_narrow);
            }
            transpose(v);
            if (to_narrow && m->pairs) {
                for (int i = 0; i < columns; i += 2) {
                    uint32_t *there = (uint32_t *)((uint16_t *)s->to + m->to + 2 * row + (c + i) / 2 * m->apart);
                    u32x16 words = rounded(v[i]) | rounded(v[i + 1]) << 16;
                    if (rows == 16) put((char *)there, (f32x16)words);
                    else
                        for (int r = 0; r < rows; r++) there[r] = words[r];
                }
                continue;
            }
            for (int i = 0; i < columns; i++) {
                char *there = to + (c + i) * m->apart * size;
                u32x16 bits = to_narrow ? rounded(v[i]) : (u32x16)v[i];
                if (rows == 16 && to_narrow) store_any(there, 0, v[i], 1);
                else if (rows == 16) put(there, v[i]);
                else
                    for (int r = 0; r < rows; r++) {
                        if (to_narrow) ((uint16_t *)there)[r] = bits[r];
                        else ((uint32_t *)there)[r] = bits[r];
                    }
            }
        }
    }
}

// A and B as `Factors` has them; on one thread. What lies between them stays as it is. Others may be writing what is read:
// each matrix is first laid aside, so that what is hashed are the very bytes that are packed.
void pack(void *data) {
    const Pack *s = data;
    for (int64_t i = 0; i < s->count; i++) {
        const Matrix *p = s->matrices + s->numbers[i];
        memcpy(s->apart, (const char *)s->from + p->at, p->bytes);
        if (s->hash) s->digests[i] = s->hash(s->apart, p->bytes);
        for (const Turn *m = s->turns + p->first; m < s->turns + p->first + p->count; m++)
            if (s->from_narrow) turn(s, m, 1, 1);
            else if (s->to_narrow) turn(s, m, 0, 1);
            else turn(s, m, 0, 0);
    }
#ifdef INTEL
    _mm_sfence();  // for other threads to see it
#endif
}

// For the caller to see that it means the same structures.
int64_t low_rank_bytes(void) { return sizeof(LowRank); }
int64_t low_rank_step_bytes(void) { return sizeof(Step); }
int64_t factors_bytes(void) { return sizeof(Factors); }
int64_t pack_bytes(void) { return sizeof(Pack); }
int64_t turn_bytes(void) { return sizeof(Turn); }
int64_t matrix_bytes(void) { return sizeof(Matrix); }

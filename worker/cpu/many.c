// Products of a weight with the activations of 16, 32, 48 or 64 tokens: what a step of many sequences is made of.
//
// A block is a few rows of the weight and all tokens: its sums stay in the registers, a token in each lane, and each
// number of the weight that is read meets all of them. Meanwhile the rows of the next block are fetched, no nearer than
// the second cache: the nearest is full of activations. What follows a product (bias, gate, residual, turning logits
// over) is done to the sums of some rows while they are near; so is what adapters add. Their A meets the activations
// before the product, B after each block, and both are fetched while products have the memory to spare.
// A lane adds up in one order, oneDNN's where that is known, see single.c: a token has the same bits beside any number of
// others.

#include <string.h>

#include "lanes.h"
#include "low_rank.h"

enum { SET, ADD, GATED, GATED_GELU, TURNED };  // as in single.c; TURNED: set, y being [tokens, rows]

typedef struct {
    const void *weights;  // [rows, columns], row_step elements from one row to the next; GATED*: gate's, then up's
    const float *bias;    // [rows of weights] or null
    const void *x;        // [columns, tokens]; [tokens, columns] when token_major; bfloat16 when narrow
    void *y;              // [rows, tokens] or, when TURNED, [tokens, rows]; bfloat16 when narrow and GATED*
    int64_t rows, columns, narrow, token_major, mode, row_step;  // columns is a multiple of 16
    int64_t part;     // columns that are added up before their sum is added to the others'
    int64_t tokens;   // 16, 32, 48 or 64
    int64_t threads;  // of the team
    float *scratch;   // (columns + 2 * CLAIM) * tokens floats for each thread
    LowRank *adapted;  // or null: what is added to the product, of parts of CLAIM rows at the least; before a bias
    int64_t next_claim, next_thread;  // counters, zero before a run
} Many;

#define CLAIM CHUNK  // rows a thread takes at a time, or half of them where there are few: a multiple of all blocks' rows
#ifdef __AVX512F__
#define WHOLE 1  // a block has all tokens
#define STRETCH(narrow, V) (narrow || V > 3 ? 16 : 4)  // words of a row between fetches: more are on their way where a
                                                       // word takes less time, and too many at once wait for each other
#else
#define WHOLE 0  // 16 of them: 6 rows have their sums in 12 of 16 registers
#define STRETCH(narrow, V) 8
#endif

// p, of which the compiler then knows nothing: it would keep a pointer to each row, and there are not as many registers.
static inline INLINE const char *unknown(const char *p) {
    __asm__("" : "+r"(p));
    return p;
}

// Sums of R rows of `words` words, for V * 16 of T tokens; x: [words, T], a word being a float or two bfloat16. fetch:
// what is read later meanwhile.
static inline INLINE void block(const char *w, int64_t stride, const float *x, int64_t T, int64_t words, int64_t part,
                                float *sums, const char *ahead, Ahead *more, const int fetch, const int R, const int V,
                                const int narrow) {
    const int stretch = STRETCH(narrow, V), side = V * SIDE;
    for (int64_t start = 0; start < words; start += part) {
        const int64_t end = start + part < words ? start + part : words;
        lanes a[24];
#pragma GCC unroll 32
        for (int i = 0; i < R * side; i++) a[i] = zeros();
        for (int64_t line = start; line < end; line += stretch) {
            // A line of each of the rows that are read next, a few at a time: not many can be on their way at once.
            const char *lines = ahead + line / 16 * 64;
            const int64_t turn = line % 16 / stretch;
#pragma GCC unroll 32
            for (int r = 0; fetch && r < R; r += 16 / stretch)
                if (R % (16 / stretch) == 0 || r + turn < R) __builtin_prefetch(lines + (r + turn) * stride, 0, 2);
            if (fetch) fetch_some(more);
            const int64_t until = line + stretch < end ? line + stretch : end;
            const float *tokens = x + line * T;
            const char *words_of = w + line * 4;
#pragma GCC unroll 1
            for (int64_t at = line; at < until; at++, tokens += T, words_of += 4) {
                const char *from = words_of;
                lanes there[4];
#pragma GCC unroll 4
                for (int v = 0; v < side; v++) there[v] = held(lanes_of(tokens, v * LANES, 0));
#pragma GCC unroll 32
                for (int r = 0; r < R; r++) {
                    if (r % 4 == 0) from = unknown(r ? from + 4 * stride : from);
                    const lanes word = spread(*(const four_bytes *)(from + r % 4 * stride));
#pragma GCC unroll 4
                    for (int v = 0; v < side; v++) {
                        lanes *sum = a + r * side + v;
                        *sum = narrow ? fused_pairs_of_lanes(word, there[v], *sum) : fused_lanes(word, there[v], *sum);
                    }
                }
            }
        }
#pragma GCC unroll 32
        for (int i = 0; i < R * side; i++) {
            lanes *to = (lanes *)(sums + i / side * T + i % side * LANES);
            *to = start ? a[i] + *to : a[i];
        }
    }
}

// Sums [count, tokens] of the weight's rows from `row` on. after: the rows that are read next. more: what else is.
static inline INLINE void sums_of(const Many *s, const float *x, int64_t row, int64_t count, float *sums, int64_t after,
                                  Ahead *more, const int R, const int V, const int narrow) {
    const int64_t size = narrow ? 2 : 4, stride = s->row_step * size, T = WHOLE ? V * 16 : s->tokens;
    for (int64_t r = 0; r < count; r += R) {
        const int64_t next = r + R < count ? row + r + R : after;
        const char *rows = (const char *)s->weights + (row + r) * stride, *ahead = (const char *)s->weights + next * stride;
#define BLOCK(token, fetch) \
    block(rows, stride, x + (token), T, s->columns * size / 4, s->part * size / 4, sums + r * T + (token), ahead, more, \
          fetch, R, V, narrow)
        BLOCK(0, 1);
        for (int64_t token = V * 16; !WHOLE && token < T; token += V * 16) BLOCK(token, 0);
    }
}

static inline int is_gated(const Many *s) { return s->mode == GATED || s->mode == GATED_GELU; }

// Sums of `count` rows from `begin` on, [count, tokens], turned over to where they belong.
static inline void turn(const Many *s, const float *sums, int64_t begin, int64_t count) {
    for (int64_t r = 0; r < count; r += 16)
        for (int64_t t = 0; t < s->tokens; t += 4) {
            f32x16 turned[4];
            load_across((const char *)(sums + r * s->tokens + t), s->tokens * 4, turned);
            for (int i = 0; i < 4; i++) *(f32x16 *)((float *)s->y + (t + i) * s->rows + begin + r) = turned[i];
        }
}

// The same with what follows the product. ups: of up's rows when GATED*. first: rows before it were another claim's; so
// were some that are turned over, and get the same numbers again.
static inline INLINE void finish(const Many *s, float *sums, const float *ups, int64_t begin, int64_t first,
                                 int64_t count, const int narrow) {
    const int64_t T = s->tokens;
    const int gated = is_gated(s);
    if (s->bias && !gated)
        for (int64_t r = 0; r < count; r++)
            for (int64_t t = 0; t < T; t += 16) *(f32x16 *)(sums + r * T + t) += s->bias[begin + r];
    if (s->mode == TURNED) {
        turn(s, sums, begin, count);
        return;
    }
    for (int64_t r = first - begin; r < count; r++)
        for (int64_t t = 0; t < T; t += 16) {
            const int64_t at = (begin + r) * T + t;
            f32x16 made = load(sums + r * T + t);
            if (gated) {
                f32x16 up = load(ups + r * T + t);
                if (s->bias) made += s->bias[begin + r], up += s->bias[s->rows + begin + r];
                store_any(s->y, at, (s->mode == GATED ? silu(made) : gelu(made)) * up, narrow);
            } else if (s->mode == ADD)
                *(f32x16 *)((float *)s->y + at) += made;
            else
                *(f32x16 *)((float *)s->y + at) = made;
        }
}

// Activations as blocks read them. Every thread makes its own: cheaper than waiting for another to do it.
static inline INLINE const float *prepared(const Many *s, float *made, const int narrow) {
    const int64_t T = s->tokens, words = s->columns / (narrow ? 2 : 1);
    if (!s->token_major && !narrow) return s->x;
    for (int64_t t = 0; t < T; t += 16)
        if (s->token_major)
            for (int64_t at = 0; at < words; at += 4) {
                f32x16 turned[4];
                load_across((const char *)s->x + (t * words + at) * 4, words * 4, turned);
                for (int i = 0; i < 4; i++) *(f32x16 *)(made + (at + i) * T + t) = turned[i];
            }
        else
            for (int64_t at = 0; at < words; at++) {
                u32x16 first = (u32x16)load_any(s->x, 2 * at * T + t, 1), second = (u32x16)load_any(s->x, (2 * at + 1) * T + t, 1);
                *(u32x16 *)(made + at * T + t) = first >> 16 | second;
            }
    return made;
}

// What adapters read for claim `claim` of `claims`, to be fetched line by line of the weight's rows.
static inline INLINE void look_ahead(const Many *s, int64_t part, int64_t chunk, int64_t claim, int64_t claims, Ahead *more,
                                     Piece pieces[PIECES], const int R, const int narrow) {
    const int64_t parts = is_gated(s) ? 2 : 1, lines = (s->columns * (narrow ? 2 : 4) + 63) / 64 * (CLAIM / R) * parts;
    const int64_t bytes = low_rank_ahead(s->adapted, part, parts, chunk, claim, claims, more, pieces);
    const int64_t turns = lines * 16 / STRETCH(narrow, s->tokens / 16);
    more->rate = (bytes / 64 + turns - 1) / turns;
}

static inline INLINE void claims(Many *s, const int R, const int V, const int narrow) {
    const int64_t T = s->tokens;
    float *made = s->scratch + __atomic_fetch_add(&s->next_thread, 1, __ATOMIC_RELAXED) * (s->columns + 2 * CLAIM) * T;
    float *sums = made + s->columns * T, *ups = sums + CLAIM * T;
    const float *x = prepared(s, made, narrow);
    if (s->adapted) low_rank_between(s->adapted, x);
    // Of few rows less is taken at a time, since at the end one thread waits for another.
    const int few = s->rows < 32 * CLAIM && CLAIM / 2 % R == 0 && s->mode != TURNED && !s->adapted;
    const int64_t size = few ? CLAIM / 2 : CLAIM;
    const int gated = is_gated(s), parts = s->adapted && !gated ? s->adapted->parts : 1;
    const int64_t *rows_of = s->adapted && !gated ? s->adapted->outputs : &s->rows;
    int64_t all = 0, claim, part = 0, top = 0, before = 0;  // claims; of this part: its first row, and claims before it
    for (int p = 0; p < parts; p++) all += (rows_of[p] + size - 1) / size;
    Piece pieces[PIECES];
    Ahead more = {0};
    while ((claim = __atomic_fetch_add(&s->next_claim, 1, __ATOMIC_RELAXED)) < all) {
        for (int64_t of_part; claim - before >= (of_part = (rows_of[part] + size - 1) / size); part++)
            before += of_part, top += rows_of[part];
        // A part's last claim begins where it is whole. The next of this thread is likely to begin as far on as all take.
        const int64_t end = top + rows_of[part], first = top + (claim - before) * size, next = first + size * s->threads;
        const int64_t begin = first + size <= end ? first : end - size;
        if (s->adapted) look_ahead(s, part, claim - before, claim, all, &more, pieces, R, narrow);
        sums_of(s, x, begin, size, sums, gated ? s->rows + begin : next, &more, R, V, narrow);
        if (gated) sums_of(s, x, s->rows + begin, size, ups, next, &more, R, V, narrow);
        if (s->adapted && gated) {
            low_rank_add(s->adapted, 0, claim, sums + (first - begin) * T, T);
            low_rank_add(s->adapted, 1, claim, ups + (first - begin) * T, T);
        }
        finish(s, sums, ups, begin, first, size, narrow);
        if (s->adapted && !gated) low_rank_add(s->adapted, part, claim - before, (float *)s->y + first * T, T);
    }
}

static inline INLINE void of_tokens(Many *s, const int narrow) {
    if (!WHOLE) {
        claims(s, 6, 1, narrow);
        return;
    }
    switch (s->tokens) {
        case 16: narrow ? claims(s, 24, 1, 1) : claims(s, 16, 1, 0); break;  // rows and tokens fit the nearest cache
        case 32: claims(s, 12, 2, narrow); break;
        case 48: claims(s, 8, 3, narrow); break;
        default: claims(s, 6, 4, narrow);
    }
}

// Run on every thread of a team.
void many(void *data) {
    Many *s = data;
    s->narrow ? of_tokens(s, 1) : of_tokens(s, 0);
}

// For the caller to see that it means the same structure, and which weights this processor is fast with.
int64_t many_bytes(void) { return sizeof(Many); }
int64_t many_scratch(void) { return 2 * CLAIM; }
int64_t many_least(void) { return CLAIM; }
#ifdef INTEL
int64_t many_wide(void) { return 1; }
#else
int64_t many_wide(void) { return 0; }
#endif
#ifdef __AVX512BF16__
int64_t many_narrow(void) { return 1; }
#else
int64_t many_narrow(void) { return 0; }
#endif

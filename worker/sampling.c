// From a row of logits to a token: weights, their sums, the walk to where a random number falls, and that number.
//
// softmax.py and random_streams.py do the same in numpy, with the same bits: each operation is rounded
// by itself (compiled without contraction into fused multiply-adds), and additions have one order. A row is cut into
// blocks of BLOCK logits; a block's weights are added in 16 lanes, the lanes in halves; the blocks one after the other,
// in double.

#include "cpu/vectors.h"

#define BLOCK 256
#define RUN 64  // values looked at together
#define LEAST -87.0f      // of an exponent: weights below e^-87 of the likeliest id's are 0
#define MAGIC 12582912.0f  // 1.5 * 2^23: adding and taking it away rounds to the nearest integer, ties to even

typedef struct {
    const float *row;  // [vocab]
    float *scaled;     // [vocab] or null: (row - peak) * inverse; may be row
    float *weights;    // [blocks, BLOCK] or null: e^scaled; 0 past the vocabulary
    float *sums;       // [blocks]
    int64_t vocab;
    float inverse, peak;  // peak: the largest logit
    double total;         // of the weights
    double norm;          // its logarithm
    int64_t finite;       // all logits are
} Row;

// e^x for x <= 0, to 2 ulp (Cephes' polynomial); 0 of what is far below.
static inline f32x16 weight(f32x16 x) {
    i32x16 seen = x >= LEAST;
    f32x16 t = larger(splat(LEAST), x);
    f32x16 whole = (t * 1.44269504f + MAGIC) - MAGIC;
    f32x16 r = (t - whole * 0.693359375f) + whole * 2.12194440e-4f;
    f32x16 p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 0.5f;
    p = ((p * r) * r + r) + 1.0f;
    i32x16 n = __builtin_convertvector(whole, i32x16);
    return (f32x16)((i32x16)(p * (f32x16)((n + 127) << 23)) & seen);
}

// 16 logits from `at` on, -inf past the vocabulary.
static inline f32x16 logits(const float *row, int64_t at, int64_t vocab) {
    if (at + 16 <= vocab) return load(row + at);
    f32x16 some = splat(-INFINITY);
    for (int lane = 0; at + lane < vocab; lane++) some[lane] = row[at + lane];
    return some;
}

static void look(Row *s) {
    f32x16 top[4], low[4];
    i32x16 odd = {0};
    for (int i = 0; i < 4; i++) top[i] = splat(-INFINITY), low[i] = splat(INFINITY);
    int64_t at = 0;
    for (; at + 64 <= s->vocab; at += 64)
        for (int i = 0; i < 4; i++) {
            f32x16 v = load(s->row + at + 16 * i);
            odd |= v != v;
            top[i] = larger(top[i], v);
            low[i] = -larger(-low[i], -v);
        }
    float peak = -INFINITY, least = INFINITY;
    int64_t number = 1;
    for (int lane = 0; lane < 16; lane++) {
        for (int i = 0; i < 4; i++) {
            peak = top[i][lane] > peak ? top[i][lane] : peak;
            least = low[i][lane] < least ? low[i][lane] : least;
        }
        number &= !odd[lane];
    }
    for (; at < s->vocab; at++) {
        float v = s->row[at];
        number &= v == v;
        peak = v > peak ? v : peak;
        least = v < least ? v : least;
    }
    s->peak = number ? peak : NAN;
    s->finite = number && peak < INFINITY && least > -INFINITY;
}

// Weights of a block; 0 past the vocabulary.
static inline void weigh_block(const Row *s, int64_t block, f32x16 weights[BLOCK / 16]) {
    for (int64_t i = 0, at = block * BLOCK; i < BLOCK / 16; i++, at += 16) {
        f32x16 scaled = (logits(s->row, at, s->vocab) - s->peak) * s->inverse;
        weights[i] = weight(scaled);
        if (!s->scaled) continue;
        if (at + 16 <= s->vocab) *(f32x16 *)(s->scaled + at) = scaled;
        else
            for (int lane = 0; at + lane < s->vocab; lane++) s->scaled[at + lane] = scaled[lane];
    }
}

// Peak, weights and sums of a row whose peak is a finite number; else only peak and finite are told.
void weigh(Row *s) {
    look(s);
    if (!(s->peak < INFINITY && s->peak > -INFINITY)) return;
    double total = 0;
    for (int64_t block = 0; block * BLOCK < s->vocab; block++) {
        f32x16 weights[BLOCK / 16], lanes;
        weigh_block(s, block, weights);
        lanes = weights[0];
        for (int i = 1; i < BLOCK / 16; i++) lanes += weights[i];
        total += s->sums[block] = sum(lanes);
        if (s->weights)
            for (int i = 0; i < BLOCK / 16; i++) *(f32x16 *)(s->weights + block * BLOCK + 16 * i) = weights[i];
    }
    s->total = total;
    s->norm = log(total);
}

// The column that a number in [0, 1] of the total falls into, one with weight, and where in [0, 1] of it.
static int64_t walk(const float *weights, int64_t columns, double number, double total, double *share) {
    double goal = number * total, below = nextafter(total, 0), reached = 0;
    if (goal > below) goal = below;
    int64_t column = 0;
    for (;; column++) {
        reached += weights[column];
        if (reached > goal || column == columns - 1) break;
    }
    double own = weights[column], part = (goal - (reached - own)) / own;
    *share = part < 0 ? 0 : part > 1 ? 1 : part;
    return column;
}

// Whether one of a run of values is at least `bound`.
static inline int any_from(const float *values, float bound) {
    i32x16 any = {0};
    for (int i = 0; i < RUN / 16; i++) any |= load(values + 16 * i) >= bound;
    int32_t some = 0;
    for (int lane = 0; lane < 16; lane++) some |= any[lane];
    return some;
}

typedef struct {
    const float *logits;  // rows of [vocab], `stride` apart
    const int64_t *rows;
    const float *inverse;
    const uint8_t *greedy;
    const double *numbers;
    int64_t *tokens;
    double *logprobs;
    uint8_t *finite;
    float *sums;  // [blocks]
    int64_t count, stride, vocab;
} Draws;

// A token for each of rows, from all ids; the likeliest where greedy.
void draw(const Draws *d) {
    for (int64_t i = 0; i < d->count; i++) {
        Row row = {.row = d->logits + d->rows[i] * d->stride, .sums = d->sums, .vocab = d->vocab};
        row.inverse = d->inverse[i];
        weigh(&row);
        d->finite[i] = row.finite;
        d->tokens[i] = 0;
        d->logprobs[i] = 0;
        if (!row.finite) continue;
        int64_t token = 0;
        if (d->greedy[i]) {
            while (token + RUN <= d->vocab && !any_from(row.row + token, row.peak)) token += RUN;
            while (row.row[token] != row.peak) token++;
        } else {
            float weights[BLOCK];
            double share, total = 0;
            int64_t block = walk(d->sums, (d->vocab + BLOCK - 1) / BLOCK, d->numbers[i], row.total, &share);
            weigh_block(&row, block, (f32x16 *)weights);
            for (int at = 0; at < BLOCK; at++) total += weights[at];
            token = block * BLOCK + walk(weights, BLOCK, share, total, &share);
        }
        double logprob = (double)((row.row[token] - row.peak) * row.inverse) - row.norm;
        d->tokens[i] = token;
        d->logprobs[i] = logprob < 0 ? logprob : 0;
    }
}

// Whether value i is a worse one than value j: smaller, or as large and later.
static inline int worse(const float *values, int64_t i, int64_t j) {
    return values[i] < values[j] || (values[i] == values[j] && i > j);
}

// Puts `id` into the heap ids[size] of which the first is free; each entry is worse than the two below it.
static void sink(const float *values, int64_t *ids, int64_t size, int64_t id) {
    int64_t slot = 0;
    for (int64_t child; (child = 2 * slot + 1) < size; slot = child) {
        if (child + 1 < size && worse(values, ids[child + 1], ids[child])) child++;
        if (worse(values, id, ids[child])) break;
        ids[slot] = ids[child];
    }
    ids[slot] = id;
}

static void rise(const float *values, int64_t *ids, int64_t slot, int64_t id) {
    for (int64_t above; slot && worse(values, id, ids[above = (slot - 1) / 2]); slot = above) ids[slot] = ids[above];
    ids[slot] = id;
}

// Ids of the `most` largest values, best first, of equal ones the lower id first; -inf is none. Returns how many.
int64_t largest(const float *values, int64_t count, int64_t *ids, int64_t most) {
    int64_t have = 0;
    for (int64_t at = 0, end; most && at < count; at = end) {
        end = at + RUN < count ? at + RUN : count;
        if (have == most && end == at + RUN && !any_from(values + at, values[ids[0]])) continue;
        for (int64_t id = at; id < end; id++) {
            if (!(values[id] > -INFINITY)) continue;
            if (have < most) rise(values, ids, have++, id);
            else if (worse(values, ids[0], id)) sink(values, ids, have, id);
        }
    }
    for (int64_t end = have - 1; end > 0; end--) {  // the worst goes last
        int64_t worst = ids[0];
        sink(values, ids, end, ids[end]);
        ids[end] = worst;
    }
    return have;
}

// Philox4x32-10: numbers in [0, 1) with 53 random bits, as random_streams.py counts them.
void uniforms(const uint64_t *seeds, const uint64_t *samples, const uint64_t *positions, uint64_t purpose, double *out,
              int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t c0 = (uint32_t)positions[i], c1 = (uint32_t)samples[i], c2 = (uint32_t)purpose, c3 = 0;
        uint32_t k0 = (uint32_t)seeds[i], k1 = (uint32_t)(seeds[i] >> 32);
        for (int round = 0; round < 10; round++) {
            uint64_t first = (uint64_t)c0 * 0xD2511F53u, second = (uint64_t)c2 * 0xCD9E8D57u;
            c0 = (uint32_t)(second >> 32) ^ c1 ^ k0;
            c1 = (uint32_t)second;
            c2 = (uint32_t)(first >> 32) ^ c3 ^ k1;
            c3 = (uint32_t)first;
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        out[i] = (double)(((uint64_t)(c0 >> 5) << 26) + (c1 >> 6)) * 0x1p-53;
    }
}

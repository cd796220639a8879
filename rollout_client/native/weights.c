// Passes over a model's bytes. Each is one call for many megabytes, so that Python's lock is not asked for in between,
// and touches memory as few times as can be.
#include <fenv.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include "xxh3.h"

enum { LINE = 64, PAGE = 4096, AT_ONCE = 4, AHEAD = 8, BLOCK = 64 << 10 };

// Of a thread, but not on its stack: that may be a small one.
static _Thread_local uint8_t scratch[BLOCK] __attribute__((aligned(LINE)));

// xxh3-64 is the xxhash wheel's own: it is told once where that lies.
static struct {
    void *(*create)(void);
    int (*reset)(void *);
    int (*update)(void *, const void *, size_t);
    uint64_t (*digest)(const void *);
    int (*release)(void *);
    uint64_t (*once)(const void *, size_t);
} hash;

void hash_with(void *create, void *reset, void *update, void *digest, void *release, void *once,
               void (*keys)(void *, uint64_t)) {
    hash.create = create, hash.reset = reset, hash.update = update, hash.digest = digest, hash.release = release;
    hash.once = once;
    keys(secret, 0);
}

// A line past the caches: nobody here reads q again, and what is written whole need not be read first. q is aligned.
static inline void put(uint8_t *q, const uint8_t *p) {
#if defined(__AVX512F__)
    _mm512_stream_si512((void *)q, _mm512_loadu_si512(p));
#elif defined(__x86_64__)
    for (int i = 0; i < LINE; i += 16) _mm_stream_si128((__m128i *)(q + i), _mm_loadu_si128((const __m128i *)(p + i)));
#else
    memcpy(q, p, LINE);
#endif
}

// Some pages side by side: more of memory's banks are busy than with one line after the other. `fence` when all is done.
// s: the sum of these bytes, if it is to be taken on the way, from pages that have been streamed and are in the cache
// still: the core adds up while it waits for memory. What it has not taken at the end is left to `sum_end`.
static inline __attribute__((always_inline)) void stream(uint8_t *q, const uint8_t *p, int64_t n, sum *s) {
    int64_t head = -(intptr_t)q & (LINE - 1);
    if (head > n) head = n;
    memcpy(q, p, head), q += head, p += head, n -= head;
    for (; n >= AT_ONCE * PAGE; q += AT_ONCE * PAGE, p += AT_ONCE * PAGE, n -= AT_ONCE * PAGE) {
        int behind = s && p - s->next >= AT_ONCE * PAGE;
        for (int64_t i = 0; i < PAGE; i += 2 * LINE) {
            int64_t ahead = i + AHEAD * LINE;
            if (ahead >= PAGE) ahead += (AT_ONCE - 1) * PAGE;  // of the next pages
            for (int64_t k = ahead; k < ahead + AT_ONCE * PAGE; k += PAGE) {
                __builtin_prefetch(p + k);
                __builtin_prefetch(p + k + LINE);
            }
            for (int64_t k = i; k < AT_ONCE * PAGE; k += PAGE) put(q + k, p + k), put(q + k + LINE, p + k + LINE);
            if (behind) sum_half(s);
        }
    }
    for (; n >= LINE; q += LINE, p += LINE, n -= LINE) put(q, p);
    memcpy(q, p, n);
}

static void fence(void) {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

// The exponents of a half are 112 lower; a subnormal one becomes normal on the way. What is no number keeps its bits.
static inline uint32_t wide(uint16_t half) {
    uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13, sign = (uint32_t)(half & 0x8000) << 16;
    float value;
    memcpy(&value, &magnitude, sizeof value);
    value *= 0x1p112f;
    uint32_t finite;
    memcpy(&finite, &value, sizeof finite);
    return sign | (magnitude < 0x0f800000 ? finite : magnitude | 0x7f800000);
}

// To nearest, ties to even; what is no number stays none, and quiet.
static inline uint16_t narrow(uint32_t bits) {
    uint16_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, quiet = (bits >> 16) | 0x40;
    return (bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded;
}

void bfloat16_to_float32(uint32_t *restrict q, const uint16_t *restrict p, int64_t n) {
    for (int64_t i = 0; i < n; i++) q[i] = (uint32_t)p[i] << 16;
}

void float32_to_bfloat16(uint16_t *restrict q, const uint32_t *restrict p, int64_t n) {
    for (int64_t i = 0; i < n; i++) q[i] = narrow(p[i]);
}

// A trainer may have told its threads to take subnormal numbers for 0: not while halves are widened.
#define WIDENING(work)        \
    do {                      \
        fenv_t before;        \
        fegetenv(&before);    \
        fesetenv(FE_DFL_ENV); \
        work;                 \
        fesetenv(&before);    \
    } while (0)

void float16_to_float32(uint32_t *restrict q, const uint16_t *restrict p, int64_t n) {
    WIDENING(for (int64_t i = 0; i < n; i++) q[i] = wide(p[i]));
}

void float16_to_bfloat16(uint16_t *restrict q, const uint16_t *restrict p, int64_t n) {
    WIDENING(for (int64_t i = 0; i < n; i++) q[i] = narrow(wide(p[i])));
}

// n elements of `from` bytes at p to q, as elements of `to` bytes: as they are, or through a cast above. Returns
// xxh3-64 of what is at q then, taken from each block while it is in the cache; q is not read back. `fence` follows.
static uint64_t place(uint8_t *q, const uint8_t *p, int64_t n, int64_t to, int64_t from,
                      void (*cast)(void *, const void *, int64_t)) {
#if defined(__AVX512F__)
    if (!cast && n * to >= BLOCK) {
        sum s;
        sum_begin(&s, p);
        stream(q, p, n * to, &s);
        return sum_end(&s, p + n * to, n * to);
    }
#endif
    if (!cast && n * to <= 2 * BLOCK) {  // in the cache still when it is hashed
        stream(q, p, n * to, NULL);
        return hash.once(p, n * to);
    }
    void *state = hash.create();
    hash.reset(state);
    for (int64_t done = 0; done < n; done += BLOCK / to) {
        int64_t count = n - done < BLOCK / to ? n - done : BLOCK / to;
        const uint8_t *block = p + done * from;
        if (cast) cast(scratch, block, count), block = scratch;
        stream(q + done * to, block, count * to, NULL);
        hash.update(state, block, count * to);
    }
    uint64_t digest = hash.digest(state);
    hash.release(state);
    return digest;
}

// A row of Kernels.place.
typedef struct {
    uint8_t *q;
    const uint8_t *p;
    int64_t n, to, from;
    void (*cast)(void *, const void *, int64_t);
    uint64_t digest;
} run;

void place_all(run *runs, int64_t count) {
    for (run *r = runs; r < runs + count; r++) r->digest = place(r->q, r->p, r->n, r->to, r->from, r->cast);
    fence();
}

// n[i] bytes at base + at[i], of `count` stretches: xxh3-64 of each.
void digest_all(const uint8_t *base, const int64_t *at, const int64_t *n, uint64_t *digests, int64_t count) {
    for (int64_t i = 0; i < count; i++) digests[i] = hash.once(base + at[i], n[i]);
}

// Which of 64 elements differ, a bit each.
static inline uint64_t differing_2(const uint16_t *a, const uint16_t *b) {
#if defined(__AVX512BW__)
    uint64_t low = _mm512_cmpneq_epu16_mask(_mm512_loadu_si512(a), _mm512_loadu_si512(b));
    return low | (uint64_t)_mm512_cmpneq_epu16_mask(_mm512_loadu_si512(a + 32), _mm512_loadu_si512(b + 32)) << 32;
#else
    uint64_t bits = 0;
    for (int i = 0; i < 64; i++) bits |= (uint64_t)(a[i] != b[i]) << i;
    return bits;
#endif
}

static inline uint64_t differing_4(const uint32_t *a, const uint32_t *b) {
    uint64_t bits = 0;
#if defined(__AVX512F__)
    for (int i = 0; i < 64; i += 16)
        bits |= (uint64_t)_mm512_cmpneq_epu32_mask(_mm512_loadu_si512(a + i), _mm512_loadu_si512(b + i)) << i;
#else
    for (int i = 0; i < 64; i++) bits |= (uint64_t)(a[i] != b[i]) << i;
#endif
    return bits;
}

// A patch (patches.py) that makes `before` equal `after`, and `before` as `after` is where they differ.
// found: how many gaps and values were written; there is room for 4096 more than `most`. -1 with more than `most`
// values, and then `before` is not defined.
// `state` takes `after`. First which elements differ, without a branch, then those: what a processor cannot foretell costs it a dozen steps.
#define DIFFERENCE(size, type)                                                                                       \
    int64_t difference_##size(type *before, const type *after, int64_t n, uint8_t *gaps, type *values, int64_t most, \
                              int64_t found[2], void *state) {                                                       \
        int64_t last = -1, g = 0, v = 0;                                                                             \
        for (int64_t start = 0; start < n; start += 4096) {                                                          \
            uint64_t bits[64] = {0};                                                                                 \
            int64_t count = n - start < 4096 ? n - start : 4096;                                                     \
            for (int64_t i = 0; i + 64 <= count; i += 64) {                                                          \
                for (int k = 0; k < 64 * (int)sizeof(type); k += LINE) {                                             \
                    __builtin_prefetch((const char *)(before + start + i) + PAGE + k, 1);                            \
                    __builtin_prefetch((const char *)(after + start + i) + PAGE + k);                                \
                }                                                                                                    \
                bits[i / 64] = differing_##size(before + start + i, after + start + i);                              \
            }                                                                                                        \
            hash.update(state, after + start, count * sizeof(type));                                                 \
            for (int64_t i = count & ~63; i < count; i++)                                                            \
                bits[i / 64] |= (uint64_t)(before[start + i] != after[start + i]) << i % 64;                         \
            for (int w = 0; w < 64; w++)                                                                             \
                for (uint64_t word = bits[w]; word; word &= word - 1) {                                              \
                    int64_t at = start + w * 64 + __builtin_ctzll(word), gap = at - last - 1;                        \
                    for (; gap >= 255; gap -= 255) gaps[g++] = 255;                                                  \
                    gaps[g++] = gap;                                                                                 \
                    values[v++] = before[at] = after[at];                                                            \
                    last = at;                                                                                       \
                }                                                                                                    \
            if (v > most) {                                                                                          \
                hash.update(state, after + start + count, (n - start - count) * sizeof(type));                       \
                return -1;                                                                                           \
            }                                                                                                        \
        }                                                                                                            \
        found[0] = g, found[1] = v;                                                                                  \
        return 0;                                                                                                    \
    }

DIFFERENCE(2, uint16_t)
DIFFERENCE(4, uint32_t)

// base with a patch to q, and into `state`. -1 if not every value has its place in [0, n): q is not defined then.
#define PATCH(size, type)                                                                                            \
    int64_t patched_##size(type *q, const type *base, int64_t n, const uint8_t *gaps, int64_t g, const type *values, \
                           int64_t v, void *state) {                                                                 \
        enum { COUNT = BLOCK / sizeof(type) };                                                                       \
        int64_t at = -1, i = 0, k = 0;                                                                               \
        for (int64_t start = 0; start < n; start += COUNT) {                                                         \
            int64_t stop = n - start < COUNT ? n : start + COUNT;                                                    \
            memcpy(scratch, base + start, (stop - start) * sizeof(type));                                            \
            for (; i < g; i++) {                                                                                     \
                int64_t next = at + (gaps[i] == 255 ? 255 : gaps[i] + 1);                                            \
                if (gaps[i] != 255) {                                                                                \
                    if (next >= stop) break;                                                                         \
                    if (k == v) return -1;                                                                           \
                    memcpy(scratch + (next - start) * sizeof(type), values + k++, sizeof(type));                     \
                }                                                                                                    \
                at = next;                                                                                           \
            }                                                                                                        \
            hash.update(state, scratch, (stop - start) * sizeof(type));                                              \
            stream((uint8_t *)(q + start), scratch, (stop - start) * sizeof(type), NULL);                            \
        }                                                                                                            \
        fence();                                                                                                     \
        return i == g && k == v ? 0 : -1;                                                                            \
    }

PATCH(2, uint16_t)
PATCH(4, uint32_t)

// A view of an object's memory, as the interpreter lays it out (its stable ABI has it since 3.11).
typedef struct {
    void *memory, *object;
    intptr_t length, item;
    int is_read_only, dimensions;
    char *format;
    intptr_t *shape, *strides, *suboffsets;
    void *internal;
} buffer;

static struct {
    int (*get)(void *, buffer *, int);
    void (*release)(buffer *);
    void (*forget_error)(void);
} python;

void locate_with(void *get, void *release, void *forget_error) {
    python.get = get, python.release = release, python.forget_error = forget_error;
}

// Where each object's memory lies, if all of it does in one piece in C order; else 0. With Python's lock held.
void locate_all(void **objects, int64_t *places, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        buffer view;
        places[i] = 0;
        if (python.get(objects[i], &view, 0)) python.forget_error();
        else places[i] = (intptr_t)view.memory, python.release(&view);
    }
}

// Vectors of 16 floats, written with the compiler's own types: it cuts them to what the processor has.
#pragma once

#include <math.h>
#include <stdint.h>
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#define INTEL 1
#endif

#define INLINE __attribute__((always_inline))

typedef float f32x4 __attribute__((vector_size(16), aligned(4)));
typedef float f32x8 __attribute__((vector_size(32), aligned(4)));
typedef float f32x16 __attribute__((vector_size(64), aligned(4)));
typedef uint32_t u32x16 __attribute__((vector_size(64), aligned(4)));
typedef int32_t i32x16 __attribute__((vector_size(64), aligned(4)));
typedef uint16_t u16x16 __attribute__((vector_size(32), aligned(2)));
typedef float four_bytes __attribute__((may_alias));  // a float, or two bfloat16 that were written as such

static inline f32x16 splat(float x) { return (f32x16){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

static inline f32x16 load(const float *p) { return *(const f32x16 *)p; }

// a * b + c, rounded once where the processor can. Written out, and nothing else is contracted (-ffp-contract=off), so
// that what is computed here and there in the same order has the same bits.
static inline INLINE f32x16 fused(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(INTEL)
    union { f32x16 whole; __m256 half[2]; } x = {a}, y = {b}, z = {c};
    for (int i = 0; i < 2; i++) z.half[i] = _mm256_fmadd_ps(x.half[i], y.half[i], z.half[i]);
    return z.whole;
#else
    return a * b + c;
#endif
}

// b where either is no number.
static inline f32x16 larger(f32x16 a, f32x16 b) {
    i32x16 first = a > b;
    return (f32x16)(((i32x16)a & first) | ((i32x16)b & ~first));
}

// Halves by a union: __builtin_shufflevector is not there before gcc 12, __builtin_shuffle not in clang.
static inline float sum(f32x16 v) {
    union { f32x16 whole; f32x8 half[2]; } a = {v};
    union { f32x8 whole; f32x4 half[2]; } b = {a.half[0] + a.half[1]};
    f32x4 c = b.half[0] + b.half[1];
    return (c[0] + c[1]) + (c[2] + c[3]);
}

// 16 rows of memory, `stride` bytes apart, four words of each: lane r of to[w] is word w of row r.
static inline INLINE void load_across(const char *p, int64_t stride, f32x16 to[4]) {
#if defined(__AVX512F__)
    __m512 v[4], low[2], high[2];
    for (int i = 0; i < 4; i++) {  // row i of each four, a four to each quarter
        const char *row = p + i * stride;
        v[i] = _mm512_castps128_ps512(_mm_loadu_ps((const float *)row));
        v[i] = _mm512_mask_broadcast_f32x4(v[i], 0x00f0, _mm_loadu_ps((const float *)(row + 4 * stride)));
        v[i] = _mm512_mask_broadcast_f32x4(v[i], 0x0f00, _mm_loadu_ps((const float *)(row + 8 * stride)));
        v[i] = _mm512_mask_broadcast_f32x4(v[i], 0xf000, _mm_loadu_ps((const float *)(row + 12 * stride)));
    }
    for (int i = 0; i < 2; i++) {
        low[i] = _mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]);
        high[i] = _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]);
    }
    to[0] = (f32x16)_mm512_shuffle_ps(low[0], low[1], 0x44);
    to[1] = (f32x16)_mm512_shuffle_ps(low[0], low[1], 0xee);
    to[2] = (f32x16)_mm512_shuffle_ps(high[0], high[1], 0x44);
    to[3] = (f32x16)_mm512_shuffle_ps(high[0], high[1], 0xee);
#elif defined(INTEL)
    for (int half = 0; half < 2; half++, p += 8 * stride) {
        __m256 v[4], low[2], high[2];
        for (int i = 0; i < 4; i++) {
            v[i] = _mm256_castps128_ps256(_mm_loadu_ps((const float *)(p + i * stride)));
            v[i] = _mm256_insertf128_ps(v[i], _mm_loadu_ps((const float *)(p + (i + 4) * stride)), 1);
        }
        for (int i = 0; i < 2; i++) {
            low[i] = _mm256_unpacklo_ps(v[2 * i], v[2 * i + 1]);
            high[i] = _mm256_unpackhi_ps(v[2 * i], v[2 * i + 1]);
        }
        __m256 made[4] = {_mm256_shuffle_ps(low[0], low[1], 0x44), _mm256_shuffle_ps(low[0], low[1], 0xee),
                          _mm256_shuffle_ps(high[0], high[1], 0x44), _mm256_shuffle_ps(high[0], high[1], 0xee)};
        for (int i = 0; i < 4; i++) _mm256_storeu_ps((float *)&to[i] + 8 * half, made[i]);
    }
#else
    for (int i = 0; i < 4; i++)
        for (int lane = 0; lane < 16; lane++) to[i][lane] = ((const float *)(p + lane * stride))[i];
#endif
}

// The two bfloat16 numbers of each word, the first in the low half.
static inline f32x16 first_of(f32x16 words) { return (f32x16)((u32x16)words << 16); }
static inline f32x16 second_of(f32x16 words) { return (f32x16)((u32x16)words & 0xffff0000u); }

// total + a's first * b's first + a's second * b's second, of words of two bfloat16 numbers; as the processor does it
// where it can.
static inline INLINE f32x16 fused_pairs(f32x16 a, f32x16 b, f32x16 total) {
#ifdef __AVX512BF16__
    return (f32x16)_mm512_dpbf16_ps((__m512)total, (__m512bh)a, (__m512bh)b);
#else
    return fused(second_of(a), second_of(b), fused(first_of(a), first_of(b), total));
#endif
}

// The same of 16 vectors: lane by lane what `sum` makes of the lane's 16 numbers.
static inline INLINE f32x16 sum_of(const f32x16 v[16]) {
    f32x16 four[4];
    for (int i = 0; i < 4; i++) four[i] = (v[i] + v[i + 8]) + (v[i + 4] + v[i + 12]);
    return (four[0] + four[1]) + (four[2] + four[3]);
}

static inline f32x16 inverse_root(f32x16 v) {
    for (int lane = 0; lane < 16; lane++) v[lane] = 1 / sqrtf(v[lane]);
    return v;
}

// Elements [at, at + 16) of an array of float32, or of bfloat16 when narrow.
static inline f32x16 load_any(const void *base, int64_t at, int narrow) {
    if (!narrow) return load((const float *)base + at);
    const uint16_t *p = (const uint16_t *)base + at;
#ifdef __AVX512F__  // what follows the #else is the same, but gcc cuts it up
    return (f32x16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i_u *)p)), 16);
#else
    return (f32x16)(__builtin_convertvector(*(const u16x16 *)p, u32x16) << 16);
#endif
}

// bfloat16 bits, to nearest, ties to even. Rounding up would carry some that are no number over to zero.
static inline u32x16 rounded(f32x16 v) {
    u32x16 bits = (u32x16)v, none = (u32x16)(v != v);
    return (none & ((bits >> 16) | 0x40)) | (~none & ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16));
}

static inline f32x16 widened(u32x16 bits) { return (f32x16)(bits << 16); }

static inline void store_any(void *base, int64_t at, f32x16 v, int narrow) {
    if (narrow) *(u16x16 *)((uint16_t *)base + at) = __builtin_convertvector(rounded(v), u16x16);
    else *(f32x16 *)((float *)base + at) = v;
}

// e^x for x <= 0, to about 2 ulp (Cephes' polynomial); of what is no number, no number.
static inline f32x16 exp_negative(f32x16 x) {
    x = larger(splat(-87.0f), x);
    i32x16 n = __builtin_convertvector(x * 1.44269504f - 0.5f, i32x16);
    f32x16 whole = __builtin_convertvector(n, f32x16);
    f32x16 r = fused(whole, splat(2.12194440e-4f), fused(whole, splat(-0.693359375f), x));
    f32x16 p = splat(1.9875691500e-4f);
    p = fused(p, r, splat(1.3981999507e-3f));
    p = fused(p, r, splat(8.3334519073e-3f));
    p = fused(p, r, splat(4.1665795894e-2f));
    p = fused(p, r, splat(1.6666665459e-1f));
    p = fused(p, r, splat(5.0000001201e-1f));
    p = fused(p * r, r, r) + 1.0f;
    return p * (f32x16)((n + 127) << 23);
}

// x * sigmoid(through).
static inline f32x16 times_sigmoid(f32x16 x, f32x16 through) {
    f32x16 magnitude = (f32x16)((u32x16)through & 0x7fffffffu), e = exp_negative(-magnitude);
    i32x16 negative = through < 0;
    f32x16 over = (f32x16)(((i32x16)e & negative) | ((i32x16)splat(1) & ~negative));
    return x * over / (e + 1);
}

static inline f32x16 silu(f32x16 x) { return times_sigmoid(x, x); }

// By its tanh form: 0.5 * x * (1 + tanh(u)) is x * sigmoid(2 * u).
static inline f32x16 gelu(f32x16 x) { return times_sigmoid(x, 1.59576912f * (x + 0.044715f * x * x * x)); }

// Where 1 - e^-2x would have lost its last digits, its series.
static inline f32x16 tanh_of(f32x16 x) {
    f32x16 magnitude = (f32x16)((u32x16)x & 0x7fffffffu), e = exp_negative(-2.0f * magnitude), square = x * x;
    f32x16 large = (1.0f - e) / (1.0f + e);
    f32x16 small = magnitude + magnitude * square *
        (-0.333333333f + square * (0.133333333f + square * (-0.0539682540f + square * 0.0218694885f)));
    i32x16 first = magnitude < 0.25f;
    f32x16 made = (f32x16)(((i32x16)small & first) | ((i32x16)large & ~first));
    return (f32x16)((u32x16)made | ((u32x16)x & 0x80000000u));
}

// Vectors of 16 floats, written with the compiler's own types: it cuts them to what the processor has.
#pragma once

#include <math.h>
#include <stdint.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define INLINE __attribute__((always_inline))

typedef float f32x4 __attribute__((vector_size(16), aligned(4)));
typedef float f32x8 __attribute__((vector_size(32), aligned(4)));
typedef float f32x16 __attribute__((vector_size(64), aligned(4)));
typedef uint32_t u32x16 __attribute__((vector_size(64), aligned(4)));
typedef int32_t i32x16 __attribute__((vector_size(64), aligned(4)));
typedef uint16_t u16x16 __attribute__((vector_size(32), aligned(2)));

static inline f32x16 splat(float x) { return (f32x16){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

static inline f32x16 load(const float *p) { return *(const f32x16 *)p; }

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
    f32x16 r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    f32x16 p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (f32x16)((n + 127) << 23);
}

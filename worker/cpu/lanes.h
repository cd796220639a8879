// Vectors as wide as the processor's registers, for loops whose sums have to stay in them: gcc keeps wider ones in memory.
#pragma once

#include "vectors.h"

#if defined(__AVX512F__)
#define LANES 16
#elif defined(INTEL)
#define LANES 8
#else
#define LANES 4
#endif

#define SIDE (16 / LANES)  // registers of 16 numbers

typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t bits_of_lanes __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t halves_of_lanes __attribute__((vector_size(2 * LANES), aligned(2)));

static inline INLINE lanes zeros(void) { return (lanes){0}; }

static inline INLINE lanes spread(float x) {
#if defined(__AVX512F__)
    return (lanes)_mm512_set1_ps(x);
#elif defined(INTEL)
    return (lanes)_mm256_set1_ps(x);
#else
    return (lanes){x, x, x, x};
#endif
}

// v, kept in a register: gcc would read it again for each use.
static inline INLINE lanes held(lanes v) {
#ifdef INTEL
    __asm__("" : "+v"(v));
#endif
    return v;
}

// LANES numbers of float32, or of bfloat16 when narrow, from element `at` on.
static inline INLINE lanes lanes_of(const void *base, int64_t at, int narrow) {
    if (!narrow) return *(const lanes *)((const float *)base + at);
    const uint16_t *p = (const uint16_t *)base + at;
#if defined(__AVX512F__)  // gcc would cut up what follows the #else
    return (lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i_u *)p)), 16);
#elif defined(INTEL)
    return (lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i_u *)p)), 16);
#else
    return (lanes)(__builtin_convertvector(*(const halves_of_lanes *)p, bits_of_lanes) << 16);
#endif
}

// a * b + c, see `fused`.
static inline INLINE lanes fused_lanes(lanes a, lanes b, lanes c) {
#if defined(__AVX512F__)
    return (lanes)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(INTEL)
    return (lanes)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// See `fused_pairs`.
static inline INLINE lanes fused_pairs_of_lanes(lanes a, lanes b, lanes total) {
#ifdef __AVX512BF16__
    return (lanes)_mm512_dpbf16_ps((__m512)total, (__m512bh)a, (__m512bh)b);
#else
    const bits_of_lanes second = 0xffff0000u - (bits_of_lanes){0};
    total = fused_lanes((lanes)((bits_of_lanes)a << 16), (lanes)((bits_of_lanes)b << 16), total);
    return fused_lanes((lanes)((bits_of_lanes)a & second), (lanes)((bits_of_lanes)b & second), total);
#endif
}

// v[i][j] becomes v[j][i].
static inline INLINE void transpose(lanes v[LANES]) {
#if defined(__AVX512F__)
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
        v[c] = (lanes)_mm512_shuffle_f32x4(low, low2, 0x88);
        v[8 + c] = (lanes)_mm512_shuffle_f32x4(low, low2, 0xdd);
        v[4 + c] = (lanes)_mm512_shuffle_f32x4(high, high2, 0x88);
        v[12 + c] = (lanes)_mm512_shuffle_f32x4(high, high2, 0xdd);
    }
#elif defined(INTEL)
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps((__m256)v[i], (__m256)v[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps((__m256)v[i], (__m256)v[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {  // b[i + c]: columns c and c + 4 of four rows
            b[i + 2 * j] = _mm256_shuffle_ps(a[i + j], a[i + 2 + j], 0x44);
            b[i + 2 * j + 1] = _mm256_shuffle_ps(a[i + j], a[i + 2 + j], 0xee);
        }
    for (int c = 0; c < 4; c++) {
        v[c] = (lanes)_mm256_permute2f128_ps(b[c], b[4 + c], 0x20);
        v[4 + c] = (lanes)_mm256_permute2f128_ps(b[c], b[4 + c], 0x31);
    }
#else
    float from[LANES][LANES];
    for (int i = 0; i < LANES; i++) *(lanes *)from[i] = v[i];
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < LANES; j++) v[i][j] = from[j][i];
#endif
}

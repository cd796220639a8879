// Copies of adapters as low_rank.c reads them.

#include <string.h>

#include "lanes.h"
#include "low_rank.h"

static inline float element(const void *base, int64_t at, int narrow) {
    if (!narrow) return ((const float *)base)[at];
    union { uint32_t bits; float value; } wide = {(uint32_t)((const uint16_t *)base)[at] << 16};
    return wide.value;
}

// LANES rows of as many numbers, which begin `step` apart: the columns.
static inline INLINE void columns_of(const float *rows, int64_t step, lanes columns[LANES]) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) columns[i] = lanes_of(rows, i * step, 0);
    transpose(columns);
}

// v[i][j] becomes v[j][i].
static inline INLINE void turn_over(f32x16 v[16]) {
    enum { BLOCKS = 16 / LANES };
    if (BLOCKS == 1) {
        transpose((lanes *)v);
        return;
    }
    float *all = (float *)v;
    lanes made[BLOCKS][16];
    for (int row = 0; row < BLOCKS; row++)
        for (int block = 0; block < BLOCKS; block++)
            columns_of(all + row * LANES * 16 + block * LANES, 16, made[row] + block * LANES);
    for (int i = 0; i < 16; i++)
        for (int row = 0; row < BLOCKS; row++) *(lanes *)(all + i * 16 + row * LANES) = made[row][i];
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
        lanes first[8], second[8];
        columns_of(from + c, columns, first), columns_of(from + 8 * columns + c, columns, second);
        for (int i = 0; i < 8; i++) {
            _mm256_stream_ps(to + (c + i) * apart, (__m256)first[i]);
            _mm256_stream_ps(to + (c + i) * apart + 8, (__m256)second[i]);
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
            turn_over(v);
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
int64_t pack_bytes(void) { return sizeof(Pack); }
int64_t turn_bytes(void) { return sizeof(Turn); }
int64_t matrix_bytes(void) { return sizeof(Matrix); }

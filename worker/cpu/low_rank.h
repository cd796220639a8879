// What adapters add to a product, for kernels of products that do it on their way.
#pragma once

#include "vectors.h"

enum {
    PARTS = 3,
    CHUNK = 48,  // outputs of a part that a thread takes at a time: CHUNK of packed_adapter.py
};

typedef struct {
    const void *a;        // [inputs, ranks]: the parts' ranks one after the other, and 16 elements more at the end; where
                          // activations are read as bfloat16 [inputs / 2, ranks, 2], and 32 more
    const float *scales;  // [ranks rounded up to 16]
    const void *b[PARTS];  // see `Turn`: CHUNK outputs side by side for each rank, then the next CHUNK; of the last as many
                           // as there are, filled up to 16 with anything
    int64_t rank[PARTS];   // 0: nothing is added
    int64_t ranks, narrow;  // narrow: a and b are bfloat16
} Factors;

typedef struct {
    int64_t adapter, first, count;  // tokens [first, first + count) of `order`, at most 64
} Run;

typedef struct {  // of one step, for all its products
    const int32_t *order;    // [tokens] columns of x and y
    const Run *runs;
    int64_t *ready;          // [runs] pieces of A x that are done; zero between calls
    float *between;          // [slices, tokens, most], A x of each slice; in the first the sum, scaled
    const Factors *factors;  // [sites, adapters]
    const int64_t *most;     // [sites] the largest `ranks` in use, rounded up to 16; 0: nothing is added
    int64_t tokens, run_count, adapters;
} Step;

typedef struct {
    const Step *step;
    const void *x;  // feature f of token t at f * x_step + t * x_token; bfloat16 when x_narrow
    float *y;       // likewise
    int64_t x_narrow, x_round, x_step, x_token, y_step, y_token;  // x_round: x is float32, to be read as bfloat16
    int64_t columns;         // of x and y; 1 or a multiple of 16
    int64_t inputs, parts;   // parts: matrices that lie one below the other in the product
    int64_t outputs[PARTS];  // rows of each
    int64_t slices;          // of the inputs
    int64_t site;
    int64_t next_site, next_inputs;  // of what the step's next product adds, or -1
    int64_t next[2], done;           // zero before a call
} LowRank;

// Takes part in A x of all runs, with the other threads. words: x [inputs, columns], or in pairs of bfloat16 numbers
// [inputs / 2, columns], where it lies so; else null.
void low_rank_between(LowRank *s, const float *words);

// Adds chunk `chunk` of a part to `to`, its first output of column 0: outputs lie `step` apart, columns side by side. What
// `low_rank_between` makes is waited for.
void low_rank_add(const LowRank *s, int64_t part, int64_t chunk, float *to, int64_t step);

// What is read soon, in pieces, and how many cache lines of it are fetched at a time.
typedef struct {
    const char *from;
    int64_t bytes;
} Piece;

typedef struct {
    const char *at, *end;
    const Piece *next, *last;
    int64_t rate;
} Ahead;

enum { PIECES = 192 };  // B of at most 64 runs and two parts, and A of as many

// Pieces of claim `claim` of `claims` of a product: B's of chunk `chunk` of the parts from `part` on, and a share of the A's
// of the next product. Returns their bytes.
int64_t low_rank_ahead(const LowRank *s, int64_t part, int64_t parts, int64_t chunk, int64_t claim, int64_t claims,
                       Ahead *ahead, Piece pieces[PIECES]);

// Fetches some, into the second cache: the nearest is full of activations.
static inline INLINE void fetch_some(Ahead *f) {
    for (int64_t n = 0; n < f->rate; n++, f->at += 64) {
        if (f->at >= f->end) {
            if (f->next == f->last) {
                f->rate = 0;
                return;
            }
            f->at = f->next->from, f->end = f->at + f->next->bytes, f->next++;
        }
        __builtin_prefetch(f->at, 0, 2);
    }
}

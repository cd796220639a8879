// What `place` and `attend` share. Keys and values are [num_blocks, kv_heads, block_size, head_dim].
#pragma once

#include <string.h>

#include "vectors.h"

typedef struct {
    // Of the model and the cache. narrow: keys, values and `out` are bfloat16; all else is float32.
    int64_t heads, kv_heads, dim, block_size, narrow, interleaved;  // dim is a multiple of 16
    int64_t hide_first;  // later tokens do not see a sequence's first cell, which holds finite numbers
    float scale, eps, score_cap, pad;  // score_cap: c of c * tanh(score / c), 0 = none
    // Of the step.
    const float *qkv;  // [(heads + 2 * kv_heads) * dim, columns], feature-major
    int64_t columns;   // 1 or a multiple of 16
    float *queries;                       // [columns, heads * dim], token-major
    void *out;                            // likewise
    const int32_t *positions, *slots;     // [tokens]
    const int32_t *tables;                // [sequences, table_width]
    int64_t table_width, tiles, tokens;
    const int32_t *tile_sequence, *tile_first, *tile_tokens;  // [tiles]
    // Of the layer.
    int64_t rotated, window;  // elements of a head that are turned, its first; cells a token sees, its own the last, 0 = all
    const float *cos, *sin;   // [rotated / 2, columns]
    void *keys, *values;
    const float *bias, *q_norm, *k_norm;  // of q, k and v together; [dim] each; or null
    // Scratch of one thread: scratch_stride floats each.
    float *scratch;
    int64_t scratch_stride;
    int64_t next_job, next_thread;  // counters, zero before a run
} Step;

// The first cell that a token at this position sees.
static inline int64_t first_seen(const Step *s, int64_t position) {
    return s->window && position >= s->window ? position - s->window + 1 : 0;
}

// Element where a block of a KV head begins.
static inline int64_t block_at(const Step *s, int64_t sequence, int64_t column, int64_t kv_head, int dim) {
    int64_t block = s->tables[sequence * s->table_width + column];
    return (block * s->kv_heads + kv_head) * s->block_size * dim;
}

// Element where a cell of a KV head begins.
static inline int64_t cell_at(const Step *s, int64_t sequence, int64_t position, int64_t kv_head, int dim) {
    return block_at(s, sequence, position / s->block_size, kv_head, dim) + position % s->block_size * dim;
}

// Attention of many query rows a sequence on tensor cores (bfloat16, head sizes that are multiples of 32 up to 128).
// A thread block takes 128 rows: TILE_TOKENS tokens by the GROUP query heads that read one KV head. It walks over the
// positions 64 at a time: keys and values come by cp.async into one of two halves of shared memory while the other is used.
#if !FP32 && HEAD_DIM % 32 == 0 && HEAD_DIM <= 128
#define TILE_TOKENS (128 / GROUP)
#define WALK 64
#define CHUNKS (HEAD_DIM / 8)
#define LINE (HEAD_DIM <= 64 ? 8 : 16)  // chunks of 16 bytes from one token to the next; a power of two, for `at`
__device__ __forceinline__ u32 shared_at(u32 base, int token, int chunk) {  // no two of 8 tokens' chunks share a bank
  return base + (token * LINE + (chunk ^ (token & 7))) * 16;
}
__device__ __forceinline__ void ldmatrix4_transposed(u32 at, u32 *r) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}

// tiles: [grid.x][2] of (sequence, first of its new tokens); -1: none. starts: [S + 1] first token of a sequence in qkv. contexts: [S].
// grid (tiles, KV_HEADS), 256 threads, 4 * WALK * LINE * 16 bytes of shared memory.
KERNEL __launch_bounds__(256, 1) prefill(const elt *qkv, const int *tiles, const int *starts, const int *contexts,
    const int *tables, const int *stride, const elt *k_cache, const elt *v_cache, elt *out, float scale) {
  extern __shared__ __align__(128) char buffer[];
  follow();
  const u32 shared = shared_address(buffer), half = 2 * WALK * LINE * 16, values = WALK * LINE * 16;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, c2 = (lane & 3) * 2, kv_head = blockIdx.y;
  const int s = tiles[2 * blockIdx.x];
  if (s < 0) return;
  const int from = tiles[2 * blockIdx.x + 1], t0 = starts[s], fresh = starts[s + 1] - t0;
  const int before = contexts[s] - fresh;  // positions before the step
  const int until = before + min(fresh, from + TILE_TOKENS), walks = (until + WALK - 1) / WALK;
  const int *table = tables + (u64)s * *stride;

  int position[2], token[2], head[2];
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int r = warp * 16 + g + 8 * h, i = from + r / GROUP;
    const bool valid = r < TILE_TOKENS * GROUP && i < fresh;
    position[h] = valid ? before + i : -1;
    token[h] = t0 + (valid ? i : from);
    head[h] = kv_head * GROUP + r % GROUP;
  }
  u32 q[HEAD_DIM / 16][4];
#pragma unroll
  for (int k = 0; k < HEAD_DIM / 16; k++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      q[k][i] = *(const u32 *)(qkv + (u64)token[i & 1] * QKV + head[i & 1] * HEAD_DIM + k * 16 + c2 + (i >> 1) * 8);

  auto load = [&](int walk) {
    for (int job = threadIdx.x; job < WALK * CHUNKS; job += 256) {
      const int n = job / CHUNKS, chunk = job % CHUNKS, p = walk * WALK + n, here = p < until ? p : until - 1;
      const u64 at = (((u64)table[here / BLOCK] * KV_HEADS + kv_head) * BLOCK + here % BLOCK) * HEAD_DIM + chunk * 8;
      const u32 to = shared_at(shared + (walk & 1) * half, n, chunk);
      copy16(to, k_cache + at);
      copy16(to + values, v_cache + at);
    }
    group_copies();
  };

  float o[HEAD_DIM / 8][4], peak[2] = {-INF, -INF}, sum[2] = {0, 0};
#pragma unroll
  for (int d = 0; d < HEAD_DIM / 8; d++) o[d][0] = o[d][1] = o[d][2] = o[d][3] = 0;
  load(0);
  for (int walk = 0; walk < walks; walk++) {
    copies_left<0>();
    __syncthreads();  // all of this half is there, and nobody reads the other any more
    if (walk + 1 < walks) load(walk + 1);
    const u32 keys = shared + (walk & 1) * half;
    float p[WALK / 8][4];
#pragma unroll
    for (int n = 0; n < WALK / 8; n++) {
      p[n][0] = p[n][1] = p[n][2] = p[n][3] = 0;
#pragma unroll
      for (int k = 0; k < HEAD_DIM / 32; k++) {
        u32 b[4];
        ldmatrix4(shared_at(keys, n * 8 + (lane & 7), k * 4 + (lane >> 3)), b);
        multiply(p[n], q[2 * k], b[0], b[1]);
        multiply(p[n], q[2 * k + 1], b[2], b[3]);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float top = peak[h];
#pragma unroll
      for (int n = 0; n < WALK / 8; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float &x = p[n][2 * h + i];
          x = walk * WALK + n * 8 + c2 + i <= position[h] ? x * scale : -INF;
          top = fmaxf(top, x);
        }
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const float zero = top == -INF ? 0 : top, fade = exp2_fast(peak[h] - zero);
      peak[h] = top;
      float added = 0;
#pragma unroll
      for (int n = 0; n < WALK / 8; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          p[n][2 * h + i] = exp2_fast(p[n][2 * h + i] - zero);
          added += p[n][2 * h + i];
        }
      sum[h] = sum[h] * fade + added;
#pragma unroll
      for (int d = 0; d < HEAD_DIM / 8; d++) { o[d][2 * h] *= fade; o[d][2 * h + 1] *= fade; }
    }
#pragma unroll
    for (int k = 0; k < WALK / 16; k++) {
      const u32 a[4] = {pack(p[2 * k][0], p[2 * k][1]), pack(p[2 * k][2], p[2 * k][3]),
                        pack(p[2 * k + 1][0], p[2 * k + 1][1]), pack(p[2 * k + 1][2], p[2 * k + 1][3])};
#pragma unroll
      for (int d = 0; d < HEAD_DIM / 16; d++) {
        u32 b[4];
        ldmatrix4_transposed(shared_at(keys + values, k * 16 + (lane >> 3 & 1) * 8 + (lane & 7), d * 2 + (lane >> 4)), b);
        multiply(o[2 * d], a, b[0], b[1]);
        multiply(o[2 * d + 1], a, b[2], b[3]);
      }
    }
  }
#pragma unroll
  for (int h = 0; h < 2; h++) {
    sum[h] += __shfl_xor_sync(~0u, sum[h], 1);
    sum[h] += __shfl_xor_sync(~0u, sum[h], 2);
    if (position[h] < 0) continue;
    const float scaled = 1.f / sum[h];
    elt *row = out + ((u64)token[h] * HEADS + head[h]) * HEAD_DIM + c2;
#pragma unroll
    for (int d = 0; d < HEAD_DIM / 8; d++) *(u32 *)(row + d * 8) = pack(o[d][2 * h] * scaled, o[d][2 * h + 1] * scaled);
  }
}
#endif

// Attention over a paged cache. K and V of a layer: [blocks][KV_HEADS][BLOCK][HEAD_DIM]. Position p of a sequence lies in
// block table[p / BLOCK]. angles: [positions][HEAD_DIM / 2] of (cos, sin). qkv[t]: q's heads, then k's, then v's.
#define HALF (HEAD_DIM / 2)
#define PAIRS ((HALF + 31) / 32)  // rotary pairs of a lane
#define QKV ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
#if INTERLEAVED
#define FIRST(i) (2 * (i))
#define SECOND(i) (2 * (i) + 1)
#else
#define FIRST(i) (i)
#define SECOND(i) ((i) + HALF)
#endif

// One head by one warp: bias, RMS norm (when weight), rotation (when angles). Lane l gets pairs l, l + 32, ...
__device__ __forceinline__ void turned(const elt *head, const elt *bias, const elt *weight, const float2 *angles, float eps,
                                       float *a, float *b) {
  const int lane = threadIdx.x & 31;
  float sum = 0;
#pragma unroll
  for (int n = 0; n < PAIRS; n++) {
    const int i = lane + 32 * n;
    if (i >= HALF) { a[n] = b[n] = 0; continue; }
    a[n] = value(head[FIRST(i)]) + (bias ? value(bias[FIRST(i)]) : 0.f);
    b[n] = value(head[SECOND(i)]) + (bias ? value(bias[SECOND(i)]) : 0.f);
    sum += a[n] * a[n] + b[n] * b[n];
  }
  const float scale = weight ? rsqrtf(warp_sum(sum) / HEAD_DIM + eps) : 1.f;
#pragma unroll
  for (int n = 0; n < PAIRS; n++) {
    const int i = lane + 32 * n;
    if (i >= HALF) continue;
    if (weight) { a[n] *= scale * value(weight[FIRST(i)]); b[n] *= scale * value(weight[SECOND(i)]); }
    if (!angles) continue;
    const float2 at = angles[i];
    const float x = a[n], y = b[n];
    a[n] = x * at.x - y * at.y;
    b[n] = y * at.x + x * at.y;
  }
}
__device__ __forceinline__ void put_pairs(elt *to, const float *a, const float *b) {
#pragma unroll
  for (int n = 0; n < PAIRS; n++) {
    const int i = (threadIdx.x & 31) + 32 * n;
    if (i < HALF) { to[FIRST(i)] = narrow(a[n]); to[SECOND(i)] = narrow(b[n]); }
  }
}

// For every token: q turned in place, k turned and v as it is into the cache at slots[t] (block * BLOCK + offset; -1 = nowhere).
// grid (heads of q, k and v / 4, T), 128 threads.
KERNEL turn(elt *qkv, const elt *bias, const elt *q_norm, const elt *k_norm, const float2 *angles, const int *positions,
            const int *slots, elt *k_cache, elt *v_cache, float eps) {
  follow();
  const int t = blockIdx.y, head = blockIdx.x * 4 + (threadIdx.x >> 5);
  if (head >= HEADS + 2 * KV_HEADS) return;
  elt *row = qkv + (u64)t * QKV + head * HEAD_DIM;
  const elt *b = bias ? bias + head * HEAD_DIM : 0;
  const float2 *at = angles + (u64)max(positions[t], 0) * HALF;
  float x[PAIRS], y[PAIRS];
  if (head < HEADS) {
    turned(row, b, q_norm, at, eps, x, y);
    put_pairs(row, x, y);
    return;
  }
  const int slot = slots[t];
  if (slot < 0) return;
  const bool key = head < HEADS + KV_HEADS;
  const int h = head - HEADS - (key ? 0 : KV_HEADS);
  turned(row, b, key ? k_norm : 0, key ? at : 0, eps, x, y);
  put_pairs((key ? k_cache : v_cache) + (((u64)(slot / BLOCK) * KV_HEADS + h) * BLOCK + slot % BLOCK) * HEAD_DIM, x, y);
}

// One query row a sequence, or any rows as if each were one: online softmax over a share of the positions, then a row's
// blocks, a cluster, join their shares. A token's 8 dimensions lie in one lane, LANES lanes, a team, hold a token, and take
// AT_ONCE of them in a turn. Keys and values come through shared memory, RING turns ahead: every thread copies what it reads
// itself, so none waits for another. In decode steps the first of them are on their way before this step's q, k and v are.
// grid (KV_HEADS * PARTS, splits, rows) in clusters of (1, splits, 1), 128 threads, RING_BYTES of shared memory. rows[r]: token of row r (null: r), -1: none. sequence[t]: its line in `tables`
// (null: t). stride: entries of a line.
#if HEAD_DIM <= 8
#define LANES 1
#elif HEAD_DIM <= 16
#define LANES 2
#elif HEAD_DIM <= 32
#define LANES 4
#elif HEAD_DIM <= 64
#define LANES 8
#elif HEAD_DIM <= 128
#define LANES 16
#else
#define LANES 32
#endif
#define GROUPS (32 / LANES)  // tokens side by side in a warp
#define AT_ONCE 4
#define RING 3
#define RING_BYTES (RING * 2 * AT_ONCE * 128 * sizeof(raw8))
#define DIMS (LANES * 8)
template <bool FUSED>
__device__ __forceinline__ void attend_rows(const elt *qkv, const elt *bias, const elt *q_norm, const elt *k_norm,
    const float2 *angles, const int *rows, const int *positions, const int *sequence, const int *tables, const int *stride,
    elt *k_cache, elt *v_cache, elt *out, float scale, float eps) {
  constexpr int N = HEADS_AT_ONCE, PARTS = GROUP / N, TEAMS = 4 * GROUPS;
  extern __shared__ __align__(128) raw8 ring[];  // [RING][keys, values][AT_ONCE][threads]
  __shared__ float q_shared[N][DIMS], max_shared[TEAMS][N], sum_shared[TEAMS][N];
  __shared__ float share_acc[N][HEAD_DIM], share_max[N], share_sum[N];
  const int kv_head = blockIdx.x / PARTS, first = kv_head * GROUP + blockIdx.x % PARTS * N, split = blockIdx.y, splits = gridDim.y;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, team = warp * GROUPS + lane / LANES, part = lane % LANES;
  if (!FUSED) follow();
  const int t = rows ? rows[blockIdx.z] : blockIdx.z;
  if (!FUSED && t < 0) return;  // with all of its cluster
  const int position = positions[t], context = position + 1;
  const int share = ((context + splits - 1) / splits + 15) / 16 * 16, start = split * share, end = min(context, start + share);
  const int *table = tables + (u64)(sequence ? sequence[t] : t) * *stride;
  const int mine = start + team * AT_ONCE, turn = TEAMS * AT_ONCE;  // the team's first tokens, and how far the next are
  const int column = min(part * 8, HEAD_DIM - 8);  // lanes beyond the head read what they then multiply by q = 0
  auto place = [&](int p) { return (((u64)table[p / BLOCK] * KV_HEADS + kv_head) * BLOCK + p % BLOCK) * HEAD_DIM + column; };
  auto slot = [&](int n, int j) { return ring + (n * 2 * AT_ONCE + j) * 128 + threadIdx.x; };  // values: j + AT_ONCE
  auto ask = [&](int base, int n, int end) {  // for AT_ONCE tokens from base on, or the last one before end instead
    if (base < end) {
#if BLOCK % AT_ONCE == 0  // all of them lie in one block
      const u64 first_at = place(base);
#endif
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
#if BLOCK % AT_ONCE == 0
        const u64 at = first_at + min(j, end - 1 - base) * HEAD_DIM;
#else
        const u64 at = place(min(base + j, end - 1));
#endif
        copy8(slot(n, j), k_cache + at);
        copy8(slot(n, j + AT_ONCE), v_cache + at);
      }
    }
    group_copies();
  };
  if (FUSED) {
    if (!threadIdx.x && q_norm) ask_l2(q_norm, HEAD_DIM * sizeof(elt));
    if (!threadIdx.x && k_norm) ask_l2(k_norm, HEAD_DIM * sizeof(elt));
  }
#pragma unroll
  for (int n = 0; n < RING; n++) ask(mine + n * turn, n, FUSED ? min(end, position) : end);
  if (FUSED) follow();
  const elt *row = qkv + (u64)t * QKV;
  const float2 *at = angles + (u64)max(position, 0) * HALF;
  for (int job = warp; job < N + 2; job += 4) {
    float x[PAIRS], y[PAIRS];
    if (job < N) {
      const int head = first + job;
      if (FUSED) turned(row + head * HEAD_DIM, bias ? bias + head * HEAD_DIM : 0, q_norm, at, eps, x, y);
      else turned(row + head * HEAD_DIM, 0, 0, 0, eps, x, y);
      for (int d = HEAD_DIM + lane; d < DIMS; d += 32) q_shared[job][d] = 0;
#pragma unroll
      for (int n = 0; n < PAIRS; n++) {
        const int i = lane + 32 * n;
        if (i < HALF) { q_shared[job][FIRST(i)] = x[n] * scale; q_shared[job][SECOND(i)] = y[n] * scale; }
      }
    } else if (FUSED && start <= position && position < end) {
      const bool key = job == N;
      const int head = HEADS + (key ? 0 : KV_HEADS) + kv_head;
      turned(row + head * HEAD_DIM, bias ? bias + head * HEAD_DIM : 0, key ? k_norm : 0, key ? at : 0, eps, x, y);
      put_pairs((key ? k_cache : v_cache) +
                (((u64)table[position / BLOCK] * KV_HEADS + kv_head) * BLOCK + position % BLOCK) * HEAD_DIM, x, y);
    }
  }
  __syncthreads();
  static_assert(TEAMS * N * DIMS * 4 <= RING_BYTES, "sums lie where keys were");
  float q[N][8], acc[N][8], peak[N], sum[N];
#pragma unroll
  for (int g = 0; g < N; g++) {
    peak[g] = -INF; sum[g] = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) { q[g][i] = q_shared[g][part * 8 + i]; acc[g][i] = 0; }
  }
  if (FUSED && position < end && position < start + RING * turn) {  // the new token was not there to be asked for
    copies_left<0>();
    for (int n = 0; n < RING; n++)
      for (int j = 0; j < AT_ONCE; j++)
        if (mine + n * turn < end && mine + n * turn + j >= position) {
          *slot(n, j) = fetch8(k_cache + place(position));
          *slot(n, j + AT_ONCE) = fetch8(v_cache + place(position));
        }
  }
  int n = 0;
  for (int low = start + warp * GROUPS * AT_ONCE; low < end; low += turn) {  // the same for all of a warp
    const int base = low + lane / LANES * AT_ONCE;
    copies_left<RING - 1>();
    float s[N][AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      float f[8];
      widen8(*slot(n, j), f);
#pragma unroll
      for (int g = 0; g < N; g++) {
        float d = 0;
#pragma unroll
        for (int i = 0; i < 8; i++) d += q[g][i] * f[i];
        s[g][j] = d;
      }
    }
#pragma unroll
    for (int o = LANES / 2; o; o >>= 1)
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++)
#pragma unroll
        for (int g = 0; g < N; g++) s[g][j] += __shfl_xor_sync(~0u, s[g][j], o);
#pragma unroll
    for (int g = 0; g < N; g++) {
      float top = peak[g];
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
        if (base + j >= end) s[g][j] = -INF;
        top = fmaxf(top, s[g][j]);
      }
      if (top == -INF) {  // nothing of this team's yet
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) s[g][j] = 0;
        continue;
      }
      const float fade = exp2_fast(peak[g] - top);
      peak[g] = top;
      sum[g] *= fade;
#pragma unroll
      for (int i = 0; i < 8; i++) acc[g][i] *= fade;
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) { s[g][j] = exp2_fast(s[g][j] - top); sum[g] += s[g][j]; }
    }
    if (base < end)  // else nothing was asked for
#pragma unroll
      for (int j = 0; j < AT_ONCE; j++) {
        float f[8];
        widen8(*slot(n, j + AT_ONCE), f);
#pragma unroll
        for (int g = 0; g < N; g++)
#pragma unroll
          for (int i = 0; i < 8; i++) acc[g][i] += s[g][j] * f[i];
      }
    ask(base + RING * turn, n, end);
    n = n + 1 == RING ? 0 : n + 1;
  }
  copies_left<0>();
  __syncthreads();  // the ring is free
  float (*acc_shared)[N][DIMS] = (float (*)[N][DIMS])ring;
#pragma unroll
  for (int g = 0; g < N; g++) {
#pragma unroll
    for (int i = 0; i < 8; i++) acc_shared[team][g][part * 8 + i] = acc[g][i];
    if (!part) { max_shared[team][g] = peak[g]; sum_shared[team][g] = sum[g]; }
  }
  __syncthreads();
  for (int job = threadIdx.x; job < N * HEAD_DIM; job += 128) {
    const int g = job / HEAD_DIM, d = job % HEAD_DIM;
    float top = -INF, total = 0, a = 0;
    for (int i = 0; i < TEAMS; i++) top = fmaxf(top, max_shared[i][g]);
    if (top != -INF)
      for (int i = 0; i < TEAMS; i++) {
        const float e = exp2_fast(max_shared[i][g] - top);
        total += sum_shared[i][g] * e;
        a += acc_shared[i][g][d] * e;
      }
    if (splits == 1) out[((u64)t * HEADS + first + g) * HEAD_DIM + d] = narrow(total > 0 ? a / total : 0.f);
    share_acc[g][d] = a;
    if (!d) { share_max[g] = top; share_sum[g] = total; }
  }
  if (splits == 1) return;
  cluster_sync();
  for (int job = split * 128 + threadIdx.x; job < N * HEAD_DIM; job += 128 * splits) {
    const int g = job / HEAD_DIM, d = job % HEAD_DIM;
    float top = -INF, total = 0, a = 0;
    for (int s = 0; s < splits; s++) top = fmaxf(top, of_block(share_max + g, s));
    if (top != -INF)
      for (int s = 0; s < splits; s++) {
        const float e = exp2_fast(of_block(share_max + g, s) - top);
        total += of_block(share_sum + g, s) * e;
        a += of_block(share_acc[g] + d, s) * e;
      }
    out[((u64)t * HEADS + first + g) * HEAD_DIM + d] = narrow(total > 0 ? a / total : 0.f);
  }
  cluster_sync();
}
#define ATTEND_ARGUMENTS const elt *qkv, const elt *bias, const elt *q_norm, const elt *k_norm, const float2 *angles, \
    const int *rows, const int *positions, const int *sequence, const int *tables, const int *stride, elt *k_cache, \
    elt *v_cache, elt *out, float scale, float eps
#define ATTEND_PASSED qkv, bias, q_norm, k_norm, angles, rows, positions, sequence, tables, stride, k_cache, v_cache, out, \
    scale, eps
KERNEL __launch_bounds__(128) attend(ATTEND_ARGUMENTS) { attend_rows<false>(ATTEND_PASSED); }
// The same for decode steps, `turn` included: one launch a layer less.
KERNEL __launch_bounds__(128) turn_and_attend(ATTEND_ARGUMENTS) { attend_rows<true>(ATTEND_PASSED); }

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

// One query row a sequence, or any rows as if each were one: online softmax over a share of the positions, then the last of
// a row's blocks to finish joins the shares. A token's 8 dimensions lie in one lane, LANES lanes hold a token, every lane
// has AT_ONCE tokens' loads in flight.
// grid (KV_HEADS * PARTS, splits, rows), 128 threads. rows[r]: token of row r (null: r). sequence[t]: its line in `tables`
// (null: t). stride: entries of a line. shares: float [rows][KV_HEADS * PARTS][splits][HEADS_AT_ONCE][HEAD_DIM + 2].
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
#define DIMS (LANES * 8)
template <bool FUSED>
__device__ __forceinline__ void attend_rows(const elt *qkv, const elt *bias, const elt *q_norm, const elt *k_norm,
    const float2 *angles, const int *rows, const int *positions, const int *sequence, const int *tables, const int *stride,
    elt *k_cache, elt *v_cache, elt *out, float *shares, u32 *count, float scale, float eps) {
  constexpr int N = HEADS_AT_ONCE, PARTS = GROUP / N, TEAMS = 4 * GROUPS;
  __shared__ float q_shared[N][DIMS], acc_shared[TEAMS][N][DIMS], max_shared[TEAMS][N], sum_shared[TEAMS][N];
  __shared__ int last;
  const int kv_head = blockIdx.x / PARTS, first = kv_head * GROUP + blockIdx.x % PARTS * N, split = blockIdx.y, splits = gridDim.y;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, team = warp * GROUPS + lane / LANES, part = lane % LANES;
  follow();
  const int t = rows ? rows[blockIdx.z] : blockIdx.z, position = positions[t], context = position + 1;
  const int share = ((context + splits - 1) / splits + 15) / 16 * 16, start = split * share, end = min(context, start + share);
  const int *table = tables + (u64)(sequence ? sequence[t] : t) * *stride;
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
  float q[N][8], acc[N][8], peak[N], sum[N];
#pragma unroll
  for (int g = 0; g < N; g++) {
    peak[g] = -INF; sum[g] = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) { q[g][i] = q_shared[g][part * 8 + i]; acc[g][i] = 0; }
  }
  const int column = min(part * 8, HEAD_DIM - 8);  // lanes beyond the head read what they then multiply by q = 0
  for (int low = start + warp * GROUPS * AT_ONCE; low < end; low += TEAMS * AT_ONCE) {  // the same for all of a warp
    const int base = low + lane / LANES * AT_ONCE;
    raw8 k[AT_ONCE], v[AT_ONCE];
    u64 at[AT_ONCE];
#if BLOCK % AT_ONCE == 0  // all of them lie in one block
    const int first_at = min(base, end - 1) / AT_ONCE * AT_ONCE;
    const u64 block_at = (((u64)table[first_at / BLOCK] * KV_HEADS + kv_head) * BLOCK + first_at % BLOCK) * HEAD_DIM + column;
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) at[j] = block_at + min(j, end - 1 - first_at) * HEAD_DIM;
#else
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      const int p = min(base + j, end - 1);
      at[j] = (((u64)table[p / BLOCK] * KV_HEADS + kv_head) * BLOCK + p % BLOCK) * HEAD_DIM + column;
    }
#endif
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) k[j] = fetch8(k_cache + at[j]);
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) v[j] = fetch8(v_cache + at[j]);
    float s[N][AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      float f[8];
      widen8(k[j], f);
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
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      float f[8];
      widen8(v[j], f);
#pragma unroll
      for (int g = 0; g < N; g++)
#pragma unroll
        for (int i = 0; i < 8; i++) acc[g][i] += s[g][j] * f[i];
    }
  }
#pragma unroll
  for (int g = 0; g < N; g++) {
#pragma unroll
    for (int i = 0; i < 8; i++) acc_shared[team][g][part * 8 + i] = acc[g][i];
    if (!part) { max_shared[team][g] = peak[g]; sum_shared[team][g] = sum[g]; }
  }
  __syncthreads();
  float *mine = shares + ((u64)blockIdx.z * gridDim.x + blockIdx.x) * splits * N * (HEAD_DIM + 2);
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
    if (splits == 1) {
      out[((u64)t * HEADS + first + g) * HEAD_DIM + d] = narrow(total > 0 ? a / total : 0.f);
    } else {
      float *w = mine + ((u64)split * N + g) * (HEAD_DIM + 2);
      w[d] = a;
      if (!d) { w[HEAD_DIM] = top; w[HEAD_DIM + 1] = total; }
    }
  }
  if (splits == 1) return;
  __threadfence();
  __syncthreads();
  if (!threadIdx.x) {
    u32 *done = count + (u64)blockIdx.z * gridDim.x + blockIdx.x;
    last = atomicAdd(done, 1) == splits - 1;
    if (last) *done = 0;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (int job = threadIdx.x; job < N * HEAD_DIM; job += 128) {
    const int g = job / HEAD_DIM, d = job % HEAD_DIM;
    float top = -INF, total = 0, a = 0;
    for (int s = 0; s < splits; s++) top = fmaxf(top, __ldcg(mine + ((u64)s * N + g) * (HEAD_DIM + 2) + HEAD_DIM));
    if (top != -INF)
      for (int s = 0; s < splits; s++) {
        const float *w = mine + ((u64)s * N + g) * (HEAD_DIM + 2), e = exp2_fast(__ldcg(w + HEAD_DIM) - top);
        total += __ldcg(w + HEAD_DIM + 1) * e;
        a += __ldcg(w + d) * e;
      }
    out[((u64)t * HEADS + first + g) * HEAD_DIM + d] = narrow(total > 0 ? a / total : 0.f);
  }
}
#define ATTEND_ARGUMENTS const elt *qkv, const elt *bias, const elt *q_norm, const elt *k_norm, const float2 *angles, \
    const int *rows, const int *positions, const int *sequence, const int *tables, const int *stride, elt *k_cache, \
    elt *v_cache, elt *out, float *shares, u32 *count, float scale, float eps
#define ATTEND_PASSED qkv, bias, q_norm, k_norm, angles, rows, positions, sequence, tables, stride, k_cache, v_cache, out, \
    shares, count, scale, eps
KERNEL __launch_bounds__(128) attend(ATTEND_ARGUMENTS) { attend_rows<false>(ATTEND_PASSED); }
// The same for decode steps, `turn` included: one launch a layer less.
KERNEL __launch_bounds__(128) turn_and_attend(ATTEND_ARGUMENTS) { attend_rows<true>(ATTEND_PASSED); }

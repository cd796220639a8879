// Mixture of experts: choose, sort rows by expert, one product for all experts, and add up what they say.
// A row is a (token, place) pair, numbered token * top + place; `order` lists rows by expert.

// ids, weights: [T][top] from scores [T][count] (float). A warp a token; count <= 32 * SLOTS. Lowest id first among equals.
#define SLOTS 16
KERNEL __launch_bounds__(32) choose_experts(const float *scores, const elt *correction, int *ids, float *weights, int count,
                                            int top, int normalise, float least) {
  follow();
  const int lane = threadIdx.x;
  const float *row = scores + (u64)blockIdx.x * count;
  float share[SLOTS], choice[SLOTS], peak = -INF, sum = 0;
#pragma unroll
  for (int i = 0; i < SLOTS; i++) {
    const int e = lane + 32 * i;
    share[i] = e < count ? row[e] : -INF;
    peak = fmaxf(peak, share[i]);
  }
  for (int o = 16; o; o >>= 1) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, o));
#pragma unroll
  for (int i = 0; i < SLOTS; i++) {
    share[i] = lane + 32 * i < count ? expf(share[i] - peak) : 0;
    sum += share[i];
  }
  sum = warp_sum(sum);
  float broken = 0;  // what is no number may be of an expert that is not chosen
#pragma unroll
  for (int i = 0; i < SLOTS; i++) {
    const int e = lane + 32 * i;
    share[i] /= sum;
    choice[i] = e < count ? share[i] + (correction ? value(correction[e]) : 0.f) : -INF;
    if (e < count) broken += choice[i] * 0.f;
  }
  broken = warp_sum(broken);
  float total = 0;
  for (int place = 0; place < top; place++) {
    float best = -INF, mine = 0;
    int id = 0x7fffffff;
#pragma unroll
    for (int i = 0; i < SLOTS; i++)
      if (choice[i] > best) { best = choice[i]; id = lane + 32 * i; mine = share[i]; }
    for (int o = 16; o; o >>= 1) {
      const float b = __shfl_xor_sync(~0u, best, o), m = __shfl_xor_sync(~0u, mine, o);
      const int j = __shfl_xor_sync(~0u, id, o);
      if (b > best || (b == best && j < id)) { best = b; id = j; mine = m; }
    }
    if (id >= count) id = place, mine = broken;  // nothing is larger than anything: the logits are broken
#pragma unroll
    for (int i = 0; i < SLOTS; i++)
      if (lane + 32 * i == id) choice[i] = -INF;
    total += mine;
    if (!lane) { ids[(u64)blockIdx.x * top + place] = id; weights[(u64)blockIdx.x * top + place] = mine + broken; }
  }
  __syncwarp();
  if (normalise)
    for (int place = lane; place < top; place += 32) weights[(u64)blockIdx.x * top + place] /= fmaxf(total, least);
}

// order: [rows] by expert; tiles: [most][3] of (expert, first of order, how many), how many = 0 beyond the last. One block.
KERNEL __launch_bounds__(1024) sort_rows(const int *ids, int *order, int *tiles, int rows, int count, int tile, int most) {
  __shared__ int start[32 * SLOTS + 1], next[32 * SLOTS], first_tile[32 * SLOTS + 1];
  follow();
  for (int e = threadIdx.x; e < count; e += blockDim.x) next[e] = 0;
  __syncthreads();
  for (int r = threadIdx.x; r < rows; r += blockDim.x) atomicAdd(next + ids[r], 1);
  __syncthreads();
  if (!threadIdx.x) {
    int at = 0, t = 0;
    for (int e = 0; e < count; e++) {
      start[e] = at; first_tile[e] = t;
      at += next[e]; t += (next[e] + tile - 1) / tile;
      next[e] = start[e];
    }
    start[count] = at; first_tile[count] = t;
  }
  __syncthreads();
  for (int r = threadIdx.x; r < rows; r += blockDim.x) order[atomicAdd(next + ids[r], 1)] = r;
  for (int e = threadIdx.x; e < count; e += blockDim.x)
    for (int t = first_tile[e]; t < first_tile[e + 1]; t++) {
      const int from = start[e] + (t - first_tile[e]) * tile;
      tiles[3 * t] = e; tiles[3 * t + 1] = from; tiles[3 * t + 2] = min(tile, start[e + 1] - from);
    }
  for (int t = first_tile[count] + threadIdx.x; t < most; t += blockDim.x) tiles[3 * t + 2] = 0;
}

// One tile of rows times one expert's weights. gate: y[at] = silu(gate) * up of x[order[at] / top], where w has `n` gate
// rows, then `n` up rows an expert. Otherwise y[order[at]] = w x[at], n rows an expert.
#if FP32
// grid (n / 8, tiles), 256 threads: a warp a column.
KERNEL __launch_bounds__(256) grouped(const elt *w, const elt *bias, const elt *x, elt *y, const int *order, const int *tiles,
                                      int n, int k, int top, int gate) {
  follow();
  const int *tile = tiles + 3 * blockIdx.y, expert = tile[0], from = tile[1], many = tile[2];
  const int column = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
  if (column >= n) return;
  const elt *a = w + ((u64)expert * (gate ? 2 * n : n) + column) * k, *b = a + (u64)n * k;
  for (int at = from; at < from + many; at++) {
    const elt *row = x + (u64)(gate ? order[at] / top : at) * k;
    float s = 0, u = 0;
    for (int c = lane; c < k; c += 32) {
      s += value(a[c]) * value(row[c]);
      if (gate) u += value(b[c]) * value(row[c]);
    }
    s = warp_sum(s);
    u = warp_sum(u);
    if (lane) continue;
    if (bias) {
      s += value(bias[(u64)expert * (gate ? 2 * n : n) + column]);
      if (gate) u += value(bias[(u64)expert * 2 * n + n + column]);
    }
    y[(u64)(gate ? at : order[at]) * n + column] = narrow(gate ? silu(s) * u : s);
  }
}
#else
// Tensor cores: TILES * 16 rows by 64 columns (PAIRED: and their 64 up rows), K walked 64 at a time with cp.async in
// three stages. A warp has 8 columns. grid (n / 64, tiles), 256 threads.
#define DEEP 64
#define STAGES 3
__device__ __forceinline__ u32 staged_at(u32 base, int row, int chunk) { return base + (row * 8 + (chunk ^ (row & 7))) * 16; }
template <int TILES, bool PAIRED>
__device__ __forceinline__ void grouped_tile(const elt *w, const elt *bias, const elt *x, elt *y, const int *order,
                                             const int *tiles, int n, int k, int top) {
  constexpr int ROWS = TILES * 16, PARTS = PAIRED ? 2 : 1, STAGE = (ROWS + 64 * PARTS) * 128;
  extern __shared__ __align__(128) char stages[];
  follow();
  const int *tile = tiles + 3 * blockIdx.y, expert = tile[0], from = tile[1], many = tile[2];
  if (!many) return;
  const u32 shared = shared_address(stages);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, column0 = blockIdx.x * 64, walks = (k + DEEP - 1) / DEEP;
  const elt *mine = w + (u64)expert * PARTS * n * k;
  auto load = [&](int walk) {
    const u32 base = shared + walk % STAGES * STAGE;
    for (int job = threadIdx.x; job < (ROWS + 64 * PARTS) * 8; job += 256) {
      const int line = job / 8, chunk = job % 8, c = walk * DEEP + chunk * 8;
      const elt *source;
      bool there = c < k && walk < walks;
      if (line < ROWS) {
        there = there && line < many;
        const int at = from + (line < many ? line : 0);
        source = x + (u64)(PAIRED ? order[at] / top : at) * k;
      } else {
        const int column = column0 + (line - ROWS) % 64, part = (line - ROWS) / 64;
        there = there && column < n;
        source = mine + ((u64)part * n + (column < n ? column : 0)) * k;
      }
      copy16(staged_at(base, line, chunk), there ? source + c : mine, there ? 16 : 0);
    }
    group_copies();
  };
  float acc[PARTS][TILES][4];
#pragma unroll
  for (int p = 0; p < PARTS; p++)
    for (int m = 0; m < TILES; m++)
      for (int i = 0; i < 4; i++) acc[p][m][i] = 0;
  for (int s = 0; s < STAGES - 1; s++) load(s);
  for (int walk = 0; walk < walks; walk++) {
    copies_left<STAGES - 2>();
    __syncthreads();
    load(walk + STAGES - 1);
    const u32 base = shared + walk % STAGES * STAGE;
#pragma unroll
    for (int deep = 0; deep < DEEP / 16; deep++) {
      u32 b[PARTS][2];
#pragma unroll
      for (int p = 0; p < PARTS; p++)
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                     : "=r"(b[p][0]), "=r"(b[p][1])
                     : "r"(staged_at(base, ROWS + p * 64 + warp * 8 + (lane & 7), deep * 2 + (lane >> 3 & 1))));
#pragma unroll
      for (int m = 0; m < TILES; m++) {
        u32 a[4];
        ldmatrix4(staged_at(base, m * 16 + (lane & 15), deep * 2 + (lane >> 4)), a);
#pragma unroll
        for (int p = 0; p < PARTS; p++) multiply(acc[p][m], a, b[p][0], b[p][1]);
      }
    }
  }
  copies_left<0>();
#pragma unroll
  for (int m = 0; m < TILES; m++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int line = m * 16 + (lane >> 2) + (i >> 1) * 8, column = column0 + warp * 8 + (lane & 3) * 2 + (i & 1);
      if (line >= many || column >= n) continue;
      float s = acc[0][m][i], u = acc[PARTS - 1][m][i];
      if (bias) {
        s += value(bias[(u64)expert * PARTS * n + column]);
        if (PAIRED) u += value(bias[((u64)expert * 2 + 1) * n + column]);
      }
      y[(u64)(PAIRED ? from + line : order[from + line]) * n + column] = narrow(PAIRED ? silu(s) * u : s);
    }
}
#define GROUPED(name, TILES, PAIRED) KERNEL __launch_bounds__(256) name(const elt *w, const elt *bias, const elt *x, elt *y, \
    const int *order, const int *tiles, int n, int k, int top) { \
  grouped_tile<TILES, PAIRED>(w, bias, x, y, order, tiles, n, k, top); }
GROUPED(grouped_gate_1, 1, true)
GROUPED(grouped_gate_4, 4, true)
GROUPED(grouped_down_1, 1, false)
GROUPED(grouped_down_4, 4, false)
#endif

// x[t] += sum over places of weight * y[t * top + place], in the order of places. grid (T).
KERNEL add_experts(float *x, const elt *y, const float *weights, int width, int top) {
  follow();
  for (int c = threadIdx.x * 8; c < width; c += blockDim.x * 8) {
    float f[8], out[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    for (int place = 0; place < top; place++) {
      const u64 row = (u64)blockIdx.x * top + place;
      const float weight = weights[row];
      load8(y + row * width + c, f);
      for (int i = 0; i < 8; i++) out[i] += weight * f[i];
    }
    load8(x + (u64)blockIdx.x * width + c, f);
    for (int i = 0; i < 8; i++) f[i] += out[i];
    store8(x + (u64)blockIdx.x * width + c, f);
  }
}

// y[T] = x[T] W^T for up to 32 rows, on tensor cores, with all that a block reads in shared memory: its part of the weights
// is on its way before the kernel waits for the one that makes x, so weights stream while earlier kernels compute.
// About one block a multiprocessor. SPLIT blocks, a cluster, have the same ROWS rows of W and PART columns each, and join
// their sums in a fixed order: then each reads little of x, which every block needs and which comes from L2.
#if !FP32

// What is done to a product beside it: nothing. The other kind is in low_rank.cu.
struct Unchanged {
  struct Added {
    __device__ __forceinline__ void to(float &, int, int) const {}
  };
  __device__ __forceinline__ void begin(int, int) const {}
  __device__ __forceinline__ void shrink(const uint4 *) const {}
  __device__ __forceinline__ Added expand(int, int) const { return {}; }
};

// MOST: the most rows of x; those that a tile of 16 has more are some row again. GATE: half of ROWS are gate's, half up's.
// NORM: x is the residual stream (float); `weight` goes into it before the product, and 1 / rms, one number a row, into the
// result. grid (ceil(rows / own rows) * SPLIT), 256 threads. Rows lie in shared memory in chunks of 16 bytes, chunk c of
// row r at c ^ (r & 7): eight rows, all banks.
template <int ROWS, int PART, int SPLIT, int MOST, int WHAT, bool NORM, class CHANGE>
__device__ __forceinline__ void skinny(const u16 *w, const void *x, const u16 *weight, void *y, int rows, int T, float eps,
                                       CHANGE change) {
  constexpr int K = PART * SPLIT, WIDTH = PART / 8, OWN = WHAT == GATE ? ROWS / 2 : ROWS, ACROSS_ALL = ROWS / 8;
  constexpr int TILES = (MOST + 15) / 16, AT_MOST = TILES == 1 ? 6 : 16 / TILES;  // 8 weight rows each, of a warp
  // Warps side by side: few, so that x is read few times; the others share the columns.
  constexpr int ACROSS = ACROSS_ALL <= AT_MOST ? 1
                       : ACROSS_ALL % 2 == 0 && ACROSS_ALL / 2 <= AT_MOST ? 2
                       : ACROSS_ALL % 4 == 0 && ACROSS_ALL / 4 <= AT_MOST ? 4 : 8;
  constexpr int ALONG = 8 / ACROSS, NEXT = ACROSS_ALL / ACROSS, STRIDE = ROWS + (40 - ROWS % 32) % 32;
  static_assert(ACROSS_ALL % ACROSS == 0 && NEXT <= AT_MOST, "rows");
  static_assert(WIDTH % 8 == 0, "K");
  constexpr int OPERANDS = (ROWS + MOST) * PART * 2, SUMS = ALONG * TILES * 16 * STRIDE * 4;  // bytes, in the same place
  extern __shared__ __align__(128) uint4 operands[];
  uint4 *const ws = operands, *const xs = operands + ROWS * WIDTH;
  float *const sums = (float *)operands, *const squares = sums + (OPERANDS > SUMS ? OPERANDS : SUMS) / 4;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, rank = blockIdx.x % SPLIT, r0 = blockIdx.x / SPLIT * OWN;
#pragma unroll 8
  for (int i = threadIdx.x; i < ROWS * WIDTH; i += 256) {
    const int r = i / WIDTH, c = i % WIDTH;
    const u64 row = min(r0 + r % OWN, rows - 1) + (r >= OWN ? rows : 0);
    copy16(shared_address(ws + r * WIDTH + (c ^ (r & 7))), w + row * K + rank * PART + c * 8);
  }
  constexpr int PER = (WIDTH + 31) / 32, FIT = PER > 8 ? 1 : 8 / PER, OF_WARP = (MOST + 7) / 8;  // chunks of a lane; rows
  constexpr int TOGETHER = FIT < OF_WARP ? FIT : OF_WARP;
  uint4 norm[PER];
#pragma unroll
  for (int i = 0; i < PER; i++)
    if (NORM && lane + 32 * i < WIDTH) norm[i] = stream16(weight + rank * PART + (lane + 32 * i) * 8);
  const int mine = rank * 256 + threadIdx.x;  // the first of this thread's results
  change.begin(r0, mine);
  follow();
  float old = 0;
  if (WHAT == ADD && mine < T * OWN && r0 + mine % OWN < rows)
    old = ((const float *)y)[(u64)(mine / OWN) * rows + r0 + mine % OWN];
  for (int from = warp; from < T; from += 8 * TOGETHER) {  // a row a warp, TOGETHER rows under way at once
    float f[TOGETHER][PER][8];
#pragma unroll
    for (int j = 0; j < TOGETHER; j++)
#pragma unroll
      for (int i = 0; i < PER; i++) {
        const int t = from + 8 * j, c = lane + 32 * i;
        if (t >= T || c >= WIDTH) continue;
        const u64 at = (u64)t * K + rank * PART + c * 8;
        if (NORM) load8((const float *)x + at, f[j][i]);
        else copy16(shared_address(xs + t * WIDTH + (c ^ (t & 7))), (const u16 *)x + at);
      }
#pragma unroll
    for (int j = 0; NORM && j < TOGETHER; j++) {
      const int t = from + 8 * j;
      float sum = 0;
#pragma unroll
      for (int i = 0; i < PER; i++) {
        const int c = lane + 32 * i;
        if (t >= T || c >= WIDTH) continue;
        float n[8];
        unpack8(norm[i], n);
#pragma unroll
        for (int e = 0; e < 8; e++) { sum += f[j][i][e] * f[j][i][e]; f[j][i][e] *= n[e]; }
        store8((u16 *)(xs + t * WIDTH + (c ^ (t & 7))), f[j][i]);
      }
      sum = warp_sum(sum);
      if (!lane && t < T) squares[t] = sum;
    }
  }
  group_copies();
  copies_left<0>();
  __syncthreads();
  change.shrink(xs);
  // A multiplication waits for the sum that it adds to: with few sums, each is made in CHAINS parts side by side.
  constexpr int STEPS = (WIDTH / 4 + ALONG - 1) / ALONG;  // of the first warps; the last may have fewer
  constexpr int PACE = WIDTH / 4 % ALONG ? 1 : STEPS % 4 == 0 ? 4 : STEPS % 2 == 0 ? 2 : 1;
  constexpr int CHAINS = TILES * NEXT <= 3 && PACE > 1 ? 4 : TILES * NEXT <= 6 ? 2 : 1;
  float d[CHAINS][TILES][NEXT][4];
#pragma unroll
  for (int z = 0; z < CHAINS; z++)
    for (int m = 0; m < TILES; m++)
      for (int n = 0; n < NEXT; n++)
        for (int i = 0; i < 4; i++) d[z][m][n][i] = 0;
  const int first = warp % ACROSS * NEXT, part = warp / ACROSS;
  const u32 w_at = shared_address(ws), x_at = shared_address(xs);
  for (int start = part * STEPS; start < min((part + 1) * STEPS, WIDTH / 4); start += PACE) {
#pragma unroll
    for (int step = 0; step < PACE; step++) {
      const int c = (start + step) * 4;
      u32 b[NEXT][4];
#pragma unroll
      for (int n = 0; n < NEXT; n++)
        ldmatrix4(w_at + (((first + n) * 8 + (lane & 7)) * WIDTH + ((c + (lane >> 3)) ^ (lane & 7))) * 16, b[n]);
#pragma unroll
      for (int m = 0; m < TILES; m++) {
        u32 low[4], high[4];
        const int row = (m * 16 + (lane & 15)) % MOST;
        ldmatrix4(x_at + (row * WIDTH + ((c + (lane >> 4)) ^ (row & 7))) * 16, low);
        ldmatrix4(x_at + (row * WIDTH + ((c + 2 + (lane >> 4)) ^ (row & 7))) * 16, high);
#pragma unroll
        for (int n = 0; n < NEXT; n++) {
          multiply(d[2 * step % CHAINS][m][n], low, b[n][0], b[n][1]);
          multiply(d[(2 * step + 1) % CHAINS][m][n], high, b[n][2], b[n][3]);
        }
      }
    }
  }
  __syncthreads();
#pragma unroll
  for (int m = 0; m < TILES; m++)
#pragma unroll
    for (int n = 0; n < NEXT; n++) {
#pragma unroll
      for (int z = 1; z < CHAINS; z++)
        for (int i = 0; i < 4; i++) d[0][m][n][i] += d[z][m][n][i];
      float *at = sums + (part * TILES * 16 + m * 16 + (lane >> 2)) * STRIDE + (first + n) * 8 + (lane & 3) * 2;
      *(float2 *)at = make_float2(d[0][m][n][0], d[0][m][n][1]);
      *(float2 *)(at + 8 * STRIDE) = make_float2(d[0][m][n][2], d[0][m][n][3]);
    }
  constexpr int EACH = (MOST * OWN + 256 * SPLIT - 1) / (256 * SPLIT);
  const auto added = change.expand(r0, mine);
  if (SPLIT > 1) cluster_sync();
  else __syncthreads();
#pragma unroll
  for (int e = 0; e < EACH; e++) {
    const int i = mine + e * 256 * SPLIT, t = i / OWN, r = i % OWN;
    if (i >= T * OWN) break;
    float a = 0, u = 0, square = 0;
#pragma unroll
    for (int block = 0; block < SPLIT; block++) {
#pragma unroll
      for (int z = 0; z < ALONG; z++) {
        const float *at = sums + (z * TILES * 16 + t) * STRIDE + r;
        a += SPLIT > 1 ? of_block(at, block) : *at;
        if (WHAT == GATE) u += SPLIT > 1 ? of_block(at + OWN, block) : at[OWN];
      }
      if (NORM) square += SPLIT > 1 ? of_block(squares + t, block) : squares[t];
    }
    if (r0 + r >= rows) continue;
    added.to(a, e, 0);
    if (WHAT == GATE) added.to(u, e, 1);
    if (NORM) { const float scale = rsqrtf(square / K + eps); a *= scale; u *= scale; }
    const u64 at = (u64)t * rows + r0 + r;
    if (WHAT == STORE) ((u16 *)y)[at] = narrow(a);
    if (WHAT == ADD) ((float *)y)[at] = a + (i == mine ? old : ((const float *)y)[at]);
    if (WHAT == GATE) ((u16 *)y)[at] = narrow(silu(a) * u);
  }
  if (SPLIT > 1) cluster_sync();  // nobody leaves while its sums are being read
}
#define SKINNY(name, ROWS, PART, SPLIT, MOST, WHAT, NORM) KERNEL __launch_bounds__(256) name(const u16 *w, \
    const void *x, const u16 *weight, void *y, int rows, int T, float eps) { \
    skinny<ROWS, PART, SPLIT, MOST, WHAT, NORM>(w, x, weight, y, rows, T, eps, Unchanged()); }
#endif

// Products with few rows, where reading the weights is all that counts. They are on their way before the kernel waits for
// the one that makes its input. Instantiated for the model's widths (products.py). What = where the result goes.
#define STORE 0  // y = result, elt
#define ADD 1    // y += result, float (the residual stream)
#define GATE 2   // y = silu(rows of gate) * rows of up, elt
#define WIDE 3   // y = result, float (logits)
#if !FP32

// y = W x, one row. A warp reads LOADS * 256 elements of a weight's row, WARPS warps share one. NORM: x is the residual
// stream (float), and is RMS-normed with `weight` on the way; otherwise x is elt. 256 threads.
template <int LOADS, int WARPS, int WHAT, bool NORM>
__device__ __forceinline__ void one_row(const u16 *w, const void *x, const u16 *weight, void *y, int rows, float eps) {
  constexpr int K = LOADS * 256 * WARPS, AT_A_TIME = 8 / WARPS, PAIR = WHAT >= GATE ? 2 : 1;
  __shared__ float partial[2][8];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, share = warp % WARPS, at = share * LOADS * 256 + lane * 8;
  const int step = gridDim.x * AT_A_TIME, jobs = WHAT == WIDE ? rows / 2 : rows;
  int job = blockIdx.x * AT_A_TIME + warp / WARPS;
  uint4 a[PAIR][LOADS], norm[LOADS];
  auto load = [&](int j) {
#pragma unroll
    for (int p = 0; p < PAIR; p++) {
      const u64 row = WHAT == WIDE ? (u64)j * 2 + p : WHAT == GATE ? (u64)j + (u64)p * rows : j;
#pragma unroll
      for (int i = 0; i < LOADS; i++) a[p][i] = stream16(w + row * K + at + i * 256);
    }
  };
  if (job < jobs) load(job);
  if (NORM)
    for (int i = 0; i < LOADS; i++) norm[i] = stream16(weight + at + i * 256);
  follow();
  float f[LOADS][8];
#pragma unroll
  for (int i = 0; i < LOADS; i++)
    if (NORM) load8((const float *)x + at + i * 256, f[i]);
    else load8((const u16 *)x + at + i * 256, f[i]);
  if (NORM) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < LOADS; i++)
      for (int j = 0; j < 8; j++) sum += f[i][j] * f[i][j];
    sum = warp_sum(sum);
    if (WARPS > 1) {
      if (!lane) partial[0][warp] = sum;
      __syncthreads();
      sum = 0;
      for (int i = 0; i < WARPS; i++) sum += partial[0][warp / WARPS * WARPS + i];
    }
    const float scale = rsqrtf(sum / K + eps);
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      float n[8];
      unpack8(norm[i], n);
      for (int j = 0; j < 8; j++) f[i][j] *= scale * n[j];
    }
  }
  int side = 1;
  for (int first = blockIdx.x * AT_A_TIME; first < jobs; first += step, job += step, side ^= 1) {
    float s[PAIR];
#pragma unroll
    for (int p = 0; p < PAIR; p++) {
      s[p] = 0;
#pragma unroll
      for (int i = 0; i < LOADS; i++) {
        float v[8];
        unpack8(a[p][i], v);
        for (int j = 0; j < 8; j++) s[p] += v[j] * f[i][j];
      }
    }
    if (job + step < jobs) load(job + step);
#pragma unroll
    for (int p = 0; p < PAIR; p++) s[p] = warp_sum(s[p]);
    if (WARPS > 1) {
      for (int p = 0; p < PAIR; p++) {
        if (p) __syncthreads();
        if (!lane) partial[side][warp] = s[p];
        __syncthreads();
        s[p] = 0;
        for (int i = 0; i < WARPS; i++) s[p] += partial[side][warp / WARPS * WARPS + i];
      }
    }
    if (job < jobs && !lane && !share) {
      if (WHAT == STORE) ((u16 *)y)[job] = narrow(s[0]);
      if (WHAT == ADD) ((float *)y)[job] += s[0];
      if (WHAT == GATE) ((u16 *)y)[job] = narrow(silu(s[0]) * s[PAIR - 1]);
      if (WHAT == WIDE) { ((float *)y)[2 * job] = s[0]; ((float *)y)[2 * job + 1] = s[PAIR - 1]; }
    }
  }
}
#define ONE_ROW(name, LOADS, WARPS, WHAT, NORM) KERNEL __launch_bounds__(256) name(const u16 *w, const void *x, \
    const u16 *weight, void *y, int rows, float eps) { one_row<LOADS, WARPS, WHAT, NORM>(w, x, weight, y, rows, eps); }

// y[T] = x[T] W^T on tensor cores: tokens are M (TILES of 16), weight rows are N (NEXT of 8), K is split over the 8 warps
// (STEPS of 32 each). A lane's 16 bytes of a row feed two m16n8k16: k is permuted alike in both. rows % (8 NEXT) = 0. x has
// 16 TILES rows, of which T mean something.
template <int STEPS, int NEXT, int TILES, int WHAT>
__device__ __forceinline__ void few_rows(const u16 *w, const u16 *x, void *y, int rows, int T) {
  constexpr int K = STEPS * 256;
  __shared__ float partial[8][TILES * 16][NEXT * 8 + 1];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, k0 = warp * STEPS * 32 + (lane & 3) * 8;
  const int r0 = blockIdx.x * (WHAT == GATE ? 8 : NEXT * 8);
  uint4 b[NEXT][STEPS];
  float c[TILES][NEXT][4];
#pragma unroll
  for (int n = 0; n < NEXT; n++)
#pragma unroll
    for (int s = 0; s < STEPS; s++)
      b[n][s] = stream16(w + ((u64)(r0 + g) + (WHAT == GATE ? (u64)n * rows : (u64)n * 8)) * K + k0 + s * 32);
#pragma unroll
  for (int m = 0; m < TILES; m++)
    for (int n = 0; n < NEXT; n++)
      for (int i = 0; i < 4; i++) c[m][n][i] = 0;
  follow();
#pragma unroll
  for (int s = 0; s < STEPS; s++)
#pragma unroll
    for (int m = 0; m < TILES; m++) {
      const uint4 p = *(const uint4 *)(x + (u64)(m * 16 + g) * K + k0 + s * 32);
      const uint4 q = *(const uint4 *)(x + (u64)(m * 16 + g + 8) * K + k0 + s * 32);
#pragma unroll
      for (int n = 0; n < NEXT; n++) {
        float *d = c[m][n];
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(p.x), "r"(q.x), "r"(p.y), "r"(q.y), "r"(b[n][s].x), "r"(b[n][s].y));
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(p.z), "r"(q.z), "r"(p.w), "r"(q.w), "r"(b[n][s].z), "r"(b[n][s].w));
      }
    }
#pragma unroll
  for (int m = 0; m < TILES; m++)
    for (int n = 0; n < NEXT; n++) {
      const float *d = c[m][n];
      const int column = n * 8 + (lane & 3) * 2;
      partial[warp][m * 16 + g][column] = d[0];
      partial[warp][m * 16 + g][column + 1] = d[1];
      partial[warp][m * 16 + g + 8][column] = d[2];
      partial[warp][m * 16 + g + 8][column + 1] = d[3];
    }
  __syncthreads();
  constexpr int COLUMNS = WHAT == GATE ? 8 : NEXT * 8;
  for (int i = threadIdx.x; i < TILES * 16 * COLUMNS; i += 256) {
    const int t = i / COLUMNS, column = i % COLUMNS;
    float a = 0, u = 0;
    if (t >= T) break;
    for (int z = 0; z < 8; z++) {
      a += partial[z][t][column];
      if (WHAT == GATE) u += partial[z][t][column + 8];
    }
    const u64 at = (u64)t * rows + r0 + column;
    if (WHAT == STORE) ((u16 *)y)[at] = narrow(a);
    if (WHAT == ADD) ((float *)y)[at] += a;
    if (WHAT == GATE) ((u16 *)y)[at] = narrow(silu(a) * u);
    if (WHAT == WIDE) ((float *)y)[at] = a;
  }
}
#define FEW_ROWS(name, STEPS, NEXT, TILES, WHAT) KERNEL __launch_bounds__(256) name(const u16 *w, const u16 *x, void *y, \
    int rows, int T) { few_rows<STEPS, NEXT, TILES, WHAT>(w, x, y, rows, T); }
#endif

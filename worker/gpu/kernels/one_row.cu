// Products, instantiated for the model's shapes (products.py). What: where the result goes.
#define STORE 0  // y = result, elt
#define ADD 1    // y += result, float (the residual stream)
#define GATE 2   // y = silu(rows of gate) * rows of up, elt
#define WIDE 3   // y = result, float (logits)
#if !FP32

// y = W x, one row: reading the weights is all that counts, and the first of them are on their way before the kernel waits
// for the one that makes x. A warp reads LOADS * 256 elements of a weight's row, WARPS warps share one. NORM: x is the residual
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
#endif

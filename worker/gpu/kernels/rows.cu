// Row by row: the residual stream is float, what products read is `elt`. Widths are multiples of 8.

// x[t] = table[token[t]]. grid (T).
KERNEL embed(const int *token, const elt *table, float *x, int width) {
  follow();
  const elt *row = table + (u64)token[blockIdx.x] * width;
  for (int c = threadIdx.x * 8; c < width; c += blockDim.x * 8) {
    float f[8];
    load8(row + c, f);
    store8(x + (u64)blockIdx.x * width + c, f);
  }
}

// y[i] = rms_norm(x[rows ? rows[i] : i]) * weight. grid (rows).
KERNEL rms_norm(const float *x, const elt *weight, elt *y, const int *rows, int width, float eps) {
  __shared__ float part[32];
  follow();
  const float *row = x + (u64)(rows ? rows[blockIdx.x] : blockIdx.x) * width;
  float sum = 0;
  for (int c = threadIdx.x * 8; c < width; c += blockDim.x * 8) {
    float f[8];
    load8(row + c, f);
    for (int i = 0; i < 8; i++) sum += f[i] * f[i];
  }
  const float scale = rsqrtf(block_sum(sum, part) / width + eps);
  for (int c = threadIdx.x * 8; c < width; c += blockDim.x * 8) {
    float f[8], w[8];
    load8(row + c, f);
    load8(weight + c, w);
    for (int i = 0; i < 8; i++) f[i] *= scale * w[i];
    store8(y + (u64)blockIdx.x * width + c, f);
  }
}

// y[t] = silu(gate) * up of gate_up[t] = (gate, up), each with its part of the bias added first. grid (.., T).
KERNEL gated(const elt *gate_up, const elt *bias, elt *y, int width) {
  follow();
  const int c = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
  if (c >= width) return;
  const elt *row = gate_up + (u64)blockIdx.y * 2 * width + c;
  float g[8], u[8], b[8];
  load8(row, g);
  load8(row + width, u);
  if (bias) {
    load8(bias + c, b);
    for (int i = 0; i < 8; i++) g[i] += b[i];
    load8(bias + width + c, b);
    for (int i = 0; i < 8; i++) u[i] += b[i];
  }
  for (int i = 0; i < 8; i++) g[i] = silu(g[i]) * u[i];
  store8(y + (u64)blockIdx.y * width + c, g);
}

// x[t] += bias. grid (T).
KERNEL add_bias(float *x, const elt *bias, int width) {
  follow();
  for (int c = threadIdx.x * 8; c < width; c += blockDim.x * 8) {
    float f[8], b[8];
    load8(x + (u64)blockIdx.x * width + c, f);
    load8(bias + c, b);
    for (int i = 0; i < 8; i++) f[i] += b[i];
    store8(x + (u64)blockIdx.x * width + c, f);
  }
}

// KV blocks copied before a step writes: pairs [C][2] of (from, to). plane: bytes of one layer's K or V. grid (C, planes).
KERNEL copy_blocks(const int *pairs, char *kv, u64 plane, int block_bytes) {
  follow();
  char *base = kv + blockIdx.y * plane;
  const uint4 *from = (const uint4 *)(base + (u64)pairs[2 * blockIdx.x] * block_bytes);
  uint4 *to = (uint4 *)(base + (u64)pairs[2 * blockIdx.x + 1] * block_bytes);
  for (int i = threadIdx.x; i < block_bytes / 16; i += blockDim.x) to[i] = from[i];
}

// What ranks that share a model do beside its operations; compiled for such ranks only. Widths are multiples of 8.

// x[t] = table[token[t] - low], zeros for ids that other ranks hold: the sum over ranks is the row. grid (T).
KERNEL embed_part(const int *token, const elt *table, float *x, int width, int low, int rows) {
  follow();
  const int id = token[blockIdx.x] - low;
  const bool mine = id >= 0 && id < rows;
  const elt *row = table + (u64)(mine ? id : 0) * width;
  for (int c = threadIdx.x * 8; c < width; c += blockDim.x * 8) {
    float f[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    if (mine) load8(row + c, f);
    store8(x + (u64)blockIdx.x * width + c, f);
  }
}

// x[t] = 0: what a rank adds to where another one has the stream. grid (T).
KERNEL clear(float *x, int width) {
  follow();
  const float zeros[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  for (int c = threadIdx.x * 8; c < width; c += blockDim.x * 8) store8(x + (u64)blockIdx.x * width + c, zeros);
}

// logits[i] = pieces[0][i], pieces[1][i], ... side by side; pieces are [ranks][count][width]. grid (.., count, ranks).
KERNEL join(const float *pieces, float *logits, int width) {
  follow();
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c >= width) return;
  const u64 row = blockIdx.y, piece = blockIdx.z;
  logits[(row * gridDim.z + piece) * width + c] = pieces[(piece * gridDim.y + row) * width + c];
}

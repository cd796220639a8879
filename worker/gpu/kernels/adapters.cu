// Low-rank changes of products (LoRA), y += scale B (A x), for the rows of each adapter. Products of few rows add them
// themselves (low_rank.cu). Beside others are two launches: `shrink` makes A x before, `expand` adds the rest behind.
// Compiled behind base.cu, one_row.cu and skinny.cu, apart from a model's other kernels.
//
// lists: [4] (how many tiles; the most ranks of a version in one product; a count of steps; the most ranks of a part),
// [rows][3] of tiles (place in `table`, or -1 = the base alone; first of order; how many, TILE at most), [rows] row numbers
// sorted by adapter, [rows] each row's tile. between: [shares][rows][stride] of A x, one after the other for a product's
// parts; a share is the sum over a part of the columns. squares: [shares][rows], of what a norm divides by.
#define TILE 16
#define PARTS 3      // linears that one product holds (q, k and v)
#define RANKS 16     // that a block of `shrink` makes at once
#define WARPS 4      // few, so that a block leaves the next product room on its multiprocessor
#define OUTPUTS 128  // that a block of `expand` adds to

struct Factors {  // of one product and one version; rank 0 = this part is not changed
  const elt *a[PARTS], *b[PARTS];  // [rank][columns], [outputs][rank]
  int rank[PARTS];
  float scale[PARTS];
  int ranks, unused;
};
struct Tile { int place, first, count; };
__device__ __forceinline__ const int *order_of(const int *lists, int rows) { return lists + 4 + (3 * rows + 3) / 4 * 4; }
__device__ __forceinline__ Tile tile_of(const int *lists, int tile) {
  const int *t = lists + 4 + 3 * tile;
  return {t[0], t[1], t[2]};
}
__device__ __forceinline__ const elt *row_of_a(const Factors &f, int j, int columns) {  // of the parts' A one after the other
  if (j >= f.ranks) return 0;
  for (int p = 0;; j -= f.rank[p++])
    if (j < f.rank[p]) return f.a[p] + (u64)j * columns;
}

// What a step tells and holds is read before `follow`, as are the first columns of A: no kernel of the step writes it. Blocks
// that have nothing to do leave without waiting, but for the first: so a kernel ends after those before it nevertheless.

// NORM: x is the residual stream, float, and `weight` goes into it; what it is divided by follows in `expand`. Otherwise x
// is elt. grid (tiles, blocks of RANKS, shares): both are walked through where they are more.
// 32 * WARPS threads.
template <bool NORM>
__device__ __forceinline__ void shrink(const void *x, const elt *weight, const Factors *table, int site, int sites,
                                       const int *lists, float *between, float *squares, int rows, int stride, int columns) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, tiles = *lists, *order = order_of(lists, rows);
  const int share = ((columns + 31) / 32 + gridDim.z - 1) / gridDim.z * 32;
  const int from = blockIdx.z * share, until = min(columns, from + share);
  bool waits = true;
  for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
    const Tile tile = tile_of(lists, t);
    if (tile.place < 0) continue;
    const Factors &f = table[(u64)tile.place * sites + site];
    const int ranks = f.ranks;
    for (int j0 = blockIdx.y * RANKS; j0 < ranks; j0 += gridDim.y * RANKS) {
#if FP32
      if (waits) follow();
      waits = false;
      for (int i = warp; i < TILE * RANKS; i += WARPS) {  // a warp a number
        const int r = i / RANKS, j = i % RANKS;
        const elt *a = row_of_a(f, j0 + j, columns);
        if (r >= tile.count || !a) continue;
        const float *row = (const float *)x + (u64)order[tile.first + r] * columns;
        float s = 0, square = 0;
        for (int c = from + lane * 8; c < until; c += 256) {
          float v[8], w[8];
          load8(row + c, v);
          if (NORM) {
            load8(weight + c, w);
            for (int e = 0; e < 8; e++) { square += v[e] * v[e]; v[e] *= w[e]; }
          }
          load8(a + c, w);
          for (int e = 0; e < 8; e++) s += v[e] * w[e];
        }
        s = warp_sum(s);
        square = warp_sum(square);
        const u64 at = (u64)blockIdx.z * rows + tile.first + r;
        if (!lane) between[at * stride + j0 + j] = s;
        if (NORM && !lane && !(j0 + j)) squares[at] = square;
      }
#else
      // A lane has eight columns of two rows of x and of two rows of A: their order within 32 is one for both, so nothing
      // is moved before it is multiplied.
      __shared__ float sums[WARPS][TILE][RANKS + 1], parts[WARPS][TILE];
      constexpr int AHEAD = 3, PACE = 32 * WARPS;
      const int g = lane >> 2, first = from + warp * 32, mine = (lane & 3) * 8;
      const u64 row[2] = {(u64)order[tile.first + min(g, tile.count - 1)] * columns,
                          (u64)order[tile.first + min(g + 8, tile.count - 1)] * columns};
      const u16 *a[2] = {row_of_a(f, j0 + g, columns), row_of_a(f, j0 + 8 + g, columns)};
      float d[2][4] = {}, square[2] = {};
      auto of_a = [&](int c, uint4 *w) {
        for (int n = 0; n < 2; n++) w[n] = a[n] && c < until ? stream16(a[n] + c) : make_uint4(0, 0, 0, 0);
      };
      auto add = [&](int c, const uint4 *w) {
        uint4 v[2] = {};
        if (c < until)
          for (int h = 0; h < 2; h++) {
            if (NORM) {
              float n[8], q[8];
              load8((const float *)x + row[h] + c, q);
              unpack8(*(const uint4 *)(weight + c), n);
              for (int e = 0; e < 8; e++) { square[h] += q[e] * q[e]; q[e] *= n[e]; }
              v[h] = make_uint4(pack(q[0], q[1]), pack(q[2], q[3]), pack(q[4], q[5]), pack(q[6], q[7]));
            } else v[h] = *(const uint4 *)((const u16 *)x + row[h] + c);
          }
        const u32 low[4] = {v[0].x, v[1].x, v[0].y, v[1].y}, high[4] = {v[0].z, v[1].z, v[0].w, v[1].w};
        for (int n = 0; n < 2; n++) {
          multiply(d[n], low, w[n].x, w[n].y);
          multiply(d[n], high, w[n].z, w[n].w);
        }
      };
      uint4 ahead[AHEAD][2];
#pragma unroll
      for (int i = 0; i < AHEAD; i++) of_a(first + i * PACE + mine, ahead[i]);
      if (waits) follow();
      waits = false;
#pragma unroll
      for (int i = 0; i < AHEAD; i++)
        if (first + i * PACE < until) add(first + i * PACE + mine, ahead[i]);
#pragma unroll 2
      for (int c = first + AHEAD * PACE; c < until; c += PACE) {
        uint4 w[2];
        of_a(c + mine, w);
        add(c + mine, w);
      }
      for (int n = 0; n < 2; n++)
        for (int i = 0; i < 4; i++) sums[warp][g + 8 * (i >> 1)][n * 8 + (lane & 3) * 2 + (i & 1)] = d[n][i];
      for (int h = 0; NORM && h < 2; h++) {
        square[h] += __shfl_xor_sync(~0u, square[h], 1);
        square[h] += __shfl_xor_sync(~0u, square[h], 2);
        if (!(lane & 3)) parts[warp][g + 8 * h] = square[h];
      }
      __syncthreads();
      for (int i = threadIdx.x; i < TILE * RANKS; i += 32 * WARPS) {
        const int r = i / RANKS, j = i % RANKS;
        float s = 0, all = 0;
        for (int w = 0; w < WARPS; w++) { s += sums[w][r][j]; if (NORM) all += parts[w][r]; }
        const u64 at = (u64)blockIdx.z * rows + tile.first + r;
        if (r < tile.count && j0 + j < ranks) between[at * stride + j0 + j] = s;
        if (NORM && r < tile.count && !(j0 + j)) squares[at] = all;
      }
      __syncthreads();
#endif
    }
  }
  if (waits && !(blockIdx.x | blockIdx.y | blockIdx.z)) follow();
}

// d[n][..] += B between of one part, laid out as `multiply` does: rows g and g + 8 of the tile by 32 outputs from `first` on.
// Which output a column of the eights stands for is chosen so that a lane has eight that lie side by side: 8 (lane & 3) from
// `first` on. B is read as it lies; between is made of two bfloat16, so that little of it is lost.
#if !FP32
__device__ __forceinline__ void of_b(const u16 *b, int rank, int j, int first, int outputs, uint2 *w) {
  const int g = threadIdx.x % 32 >> 2;
#pragma unroll
  for (int n = 0; n < 4; n++) {
    const int o = first + (g >> 1) * 8 + n * 2 + (g & 1);
    const u16 *at = b + (u64)o * rank + j;
    w[n] = make_uint2(0, 0);
    if (o >= outputs || j >= rank) continue;
    if (rank % 4 == 0) w[n] = *(const uint2 *)at;
    else {
      u32 e[4];
      for (int i = 0; i < 4; i++) e[i] = j + i < rank ? at[i] : 0;
      w[n] = make_uint2(e[0] | e[1] << 16, e[2] | e[3] << 16);
    }
  }
}
// row: of between, two rows of the tile, from the part's first rank on. w: of_b's first.
__device__ __forceinline__ void expanded(float (*d)[4], const u16 *b, int rank, const float *const *row, int shares, u64 apart,
                                         int first, int outputs, uint2 *w) {
  const int mine = (threadIdx.x & 3) * 4;
  const bool whole = rank % 4 == 0 && (u64)row[0] % 16 == 0;
#pragma unroll 1
  for (int j = mine; j - mine < rank; j += 16) {
    if (j > mine) of_b(b, rank, j, first, outputs, w);
    float v[2][4] = {};
    if (whole && j < rank) {
#pragma unroll 2
      for (int z = 0; z < shares; z++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float4 q = *(const float4 *)(row[h] + z * apart + j);
          v[h][0] += q.x; v[h][1] += q.y; v[h][2] += q.z; v[h][3] += q.w;
        }
    } else
#pragma unroll 1
      for (int z = 0; z < shares; z++)
        for (int h = 0; h < 2; h++)
          for (int e = 0; e < 4; e++)
            if (j + e < rank) v[h][e] += row[h][z * apart + j + e];
    u32 high[4], low[4];
    for (int i = 0; i < 4; i++) {
      const float p = v[i & 1][i & 2], q = v[i & 1][(i & 2) + 1];
      high[i] = pack(p, q);
      low[i] = pack(p - low_half(high[i]), q - high_half(high[i]));
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
      multiply(d[n], high, w[n].x, w[n].y);
      multiply(d[n], low, w[n].x, w[n].y);
    }
  }
}
#endif

// y (of STORE: elt, of ADD: the residual stream) += what the parts' adapters make; n0, n1, n2: outputs of each. GATE: y is
// silu(gate + ..) * (up + ..) of gate_up and bias, of rows without an adapter too, n0 = n1. shares: as shrink had them; squares:
// 0 = it normed nothing. grid (tiles, blocks of OUTPUTS of each part; of GATE, of one), as many threads.
template <int WHAT>
__device__ __forceinline__ void expand(const Factors *table, int site, int sites, const int *lists, const float *between,
                                       const float *squares, int rows, int stride, int shares, int columns, float eps,
                                       const elt *gate_up, const elt *bias, void *y, int n0, int n1, int n2) {
  constexpr int HALVES = WHAT == GATE ? 2 : 1;
  const int width = WHAT == GATE ? n0 : n0 + n1 + n2, tiles = *lists, *order = order_of(lists, rows);
  int part = 0, size = n0, before = 0, block = blockIdx.y;  // size, before: outputs of the part, and of those before
  while (WHAT != GATE && block >= (size + OUTPUTS - 1) / OUTPUTS) {
    block -= (size + OUTPUTS - 1) / OUTPUTS;
    before += size;
    size = ++part == 1 ? n1 : n2;
  }
  const int base = block * OUTPUTS;
  const u64 apart = (u64)rows * stride;
  bool waits = true;
  for (int t = blockIdx.x; t < tiles; t += gridDim.x) {
    const Tile tile = tile_of(lists, t);
    const bool changed = tile.place >= 0;
    if (WHAT != GATE && !changed) continue;
    const Factors &f = table[(u64)max(tile.place, 0) * sites + site];  // not read of what is not changed
    int rank[HALVES] = {}, skipped = 0, ranks = 0;  // skipped: ranks of the parts before
    float by[HALVES] = {};
    if (changed) {
      for (int p = 0; p < part; p++) skipped += f.rank[p];
      for (int h = 0; h < HALVES; h++) { rank[h] = f.rank[part + h]; by[h] = f.scale[part + h]; ranks += rank[h]; }
      if (WHAT != GATE && !ranks) continue;
    }
    const bool normed = squares && ranks;
#if FP32
    if (waits) follow();
    waits = false;
    const int o = base + threadIdx.x;
    for (int r = 0; o < size && r < tile.count; r++) {
      const u64 row = order[tile.first + r];
      float scale = 1, d[HALVES] = {};
      if (normed) {
        float sum = 0;
        for (int z = 0; z < shares; z++) sum += squares[z * rows + tile.first + r];
        scale = rsqrtf(sum / columns + eps);
      }
      for (int h = 0; h < HALVES; h++) {
        const float *v = between + (u64)(tile.first + r) * stride + skipped + h * rank[0];
        for (int j = 0; j < rank[h]; j++) {
          float s = 0;
          for (int z = 0; z < shares; z++) s += v[z * apart + j];
          d[h] += s * f.b[part + h][(u64)o * rank[h] + j];
        }
        d[h] *= scale * by[h];
      }
      float *to = (float *)y + row * width + before + o;
      if (WHAT == GATE) {
        const float *from = gate_up + row * 2 * width + o;
        *to = silu(from[0] + (bias ? bias[o] : 0) + d[0]) * (from[width] + (bias ? bias[width + o] : 0) + d[HALVES - 1]);
      } else *to += d[0];
    }
#else
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, first = base + warp * 32;
    const int o = first + (lane & 3) * 8, at[2] = {tile.first + min(g, tile.count - 1), tile.first + min(g + 8, tile.count - 1)};
    const u64 row[2] = {(u64)order[at[0]], (u64)order[at[1]]};
    uint2 w[HALVES][4];
    for (int h = 0; h < HALVES; h++) of_b(f.b[part + h], rank[h], (lane & 3) * 4, first, size, w[h]);
    if (waits) follow();
    waits = false;
    if (first >= size) continue;
    raw8 old[2], other[2];  // of y, or gate's and up's
    float stream[2][8];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (g + 8 * h >= tile.count || o >= size) continue;
      const u64 to = row[h] * width + before + o;
      if (WHAT == STORE) old[h] = fetch8((const elt *)y + to);
      if (WHAT == ADD) load8((const float *)y + to, stream[h]);
      if (WHAT == GATE) {
        old[h] = fetch8(gate_up + row[h] * 2 * width + o);
        other[h] = fetch8(gate_up + row[h] * 2 * width + width + o);
      }
    }
    float d[HALVES][4][4] = {}, scale[2] = {1, 1};
    if (normed)
      for (int h = 0; h < 2; h++) {
        float sum = 0;
#pragma unroll 4
        for (int z = 0; z < shares; z++) sum += squares[z * rows + at[h]];
        scale[h] = rsqrtf(sum / columns + eps);
      }
#pragma unroll
    for (int h = 0; h < HALVES; h++) {
      const float *from = between + skipped + h * rank[0], *const of[2] = {from + (u64)at[0] * stride, from + (u64)at[1] * stride};
      expanded(d[h], f.b[part + h], rank[h], of, shares, apart, first, size, w[h]);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (g + 8 * h >= tile.count || o >= size) continue;
      const u64 to = row[h] * width + before + o;
      float v[8];
      if (WHAT == ADD) for (int e = 0; e < 8; e++) v[e] = stream[h][e];
      else widen8(old[h], v);
#pragma unroll
      for (int e = 0; e < 8; e++) v[e] += d[0][e >> 1][2 * h + (e & 1)] * scale[h] * by[0];
      if (WHAT == ADD) { store8((float *)y + to, v); continue; }
      if (WHAT == GATE) {
        float u[8], b[8] = {}, c[8] = {};
        widen8(other[h], u);
        if (bias) { load8(bias + o, b); load8(bias + width + o, c); }
#pragma unroll
        for (int e = 0; e < 8; e++)
          v[e] = silu(v[e] + b[e]) * (u[e] + c[e] + d[HALVES - 1][e >> 1][2 * h + (e & 1)] * scale[h] * by[HALVES - 1]);
      }
      store8((elt *)y + to, v);
    }
#endif
  }
  if (waits && !(blockIdx.x | blockIdx.y)) follow();
}

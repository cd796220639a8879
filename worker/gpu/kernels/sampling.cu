// Drawing tokens where the logits are: from softmax(logits * inverse_temperature), by numbers in [0, 1) that the host's
// random streams make, so a seed gives the same token on every device. Rows are cut into pieces of PIECE ids, whose weights
// are summed first; the number is then looked up among the pieces of its row, and inside one of them.
#define PIECE 256

// pieces: [picks][ceil(vocab / PIECE)] of (largest logit, sum of exp((logit - largest) * inverse_temperature)); a sum that
// is no number where a logit is not finite. grid (.., picks), 256 threads: a warp a piece.
KERNEL __launch_bounds__(256) weigh(const float *logits, const int *rows, const float *inverse_temperature, float2 *pieces,
                                    int vocab) {
  follow();
  const int pick = blockIdx.y, lane = threadIdx.x & 31, count = (vocab + PIECE - 1) / PIECE;
  const float *row = logits + (u64)rows[pick] * vocab, hot = inverse_temperature[pick];
  for (int piece = blockIdx.x * 8 + (threadIdx.x >> 5); piece < count; piece += gridDim.x * 8) {
    float x[PIECE / 32], top = -INF, sum = 0, broken = 0;
#pragma unroll
    for (int i = 0; i < PIECE / 32; i++) {
      const int id = piece * PIECE + lane + 32 * i;
      x[i] = id < vocab ? row[id] : -INF;
      if (id < vocab) broken += x[i] * 0.f;
      top = fmaxf(top, x[i]);
    }
    for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
#pragma unroll
    for (int i = 0; i < PIECE / 32; i++) sum += expf((x[i] - top) * hot);
    sum = warp_sum(sum + broken);
    if (!lane) pieces[(u64)pick * count + piece] = make_float2(top, sum);
  }
}

// Where in 256 weights, one a thread, the running sum passes `goal`; every thread gets the index, the sum before it and its
// weight. The last with weight when none does. shared: [8] and three words of shared memory.
struct Found { int index; double before, weight; };
__device__ __forceinline__ Found passed(double weight, double goal, double *sums, Found *found) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  double reached = weight;
#pragma unroll
  for (int o = 1; o < 32; o <<= 1) {
    const double other = __shfl_up_sync(~0u, reached, o);
    if (lane >= o) reached += other;
  }
  if (lane == 31) sums[warp] = reached;
  if (!threadIdx.x) found->index = -1;
  __syncthreads();
  double before = 0;
  for (int w = 0; w < warp; w++) before += sums[w];
  reached += before;
  if (weight > 0 && reached > goal && reached - weight <= goal) *found = {(int)threadIdx.x, reached - weight, weight};
  __syncthreads();
  if (found->index < 0) {  // rounding: the goal lies at or beyond the end
    __shared__ int last;
    if (!threadIdx.x) last = 0;
    __syncthreads();
    if (weight > 0) atomicMax(&last, (int)threadIdx.x);
    __syncthreads();
    if (threadIdx.x == last) *found = {last, reached - weight, weight};
    __syncthreads();
  }
  const Found result = *found;
  __syncthreads();
  return result;
}

struct Drawn { int token; float logprob; int finite; int unused; };
// How a pick is drawn: from all ids; the most likely id, the lowest of equals; or by `draw_cut`.
#define GREEDY 1
#define CUT 2
// grid (picks), 256 threads.
KERNEL __launch_bounds__(256) draw(const float *logits, const int *rows, const float *inverse_temperature, const int *how,
                                   const double *numbers, const float2 *pieces, Drawn *out, int vocab) {
  __shared__ double sums[8];
  __shared__ float tops[8];
  __shared__ Found found;
  __shared__ int least;
  follow();
  const int pick = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, count = (vocab + PIECE - 1) / PIECE;
  if (how[pick] == CUT) return;
  const float *row = logits + (u64)rows[pick] * vocab, hot = inverse_temperature[pick];
  const float2 *mine = pieces + (u64)pick * count;
  const int each = (count + 255) / 256, from = threadIdx.x * each, until = min(count, from + each);
  float top = -INF;
  for (int i = from; i < until; i++) top = fmaxf(top, mine[i].x);
  for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
  if (!lane) tops[warp] = top;
  if (!threadIdx.x) least = 0x7fffffff;
  __syncthreads();
  for (int w = 0; w < 8; w++) top = fmaxf(top, tops[w]);
  double weight = 0;
  for (int i = from; i < until; i++) weight += (double)(mine[i].y * expf((mine[i].x - top) * hot));
  double total = weight;
  for (int o = 16; o; o >>= 1) total += __shfl_xor_sync(~0u, total, o);
  if (!lane) sums[warp] = total;
  __syncthreads();
  total = 0;
  for (int w = 0; w < 8; w++) total += sums[w];
  __syncthreads();
  if (!(total < (double)INF) || !(fabsf(top) < INF)) {
    if (!threadIdx.x) out[pick] = {0, 0.f, 0, 0};
    return;
  }
  int token;
  if (how[pick] == GREEDY) {
    for (int i = from; i < until; i++)
      if (mine[i].x == top) { atomicMin(&least, i); break; }
    __syncthreads();
    const int piece = least, id = piece * PIECE + threadIdx.x;
    __syncthreads();
    if (!threadIdx.x) least = 0x7fffffff;
    __syncthreads();
    if (id < vocab && row[id] == top) atomicMin(&least, id);
    __syncthreads();
    token = least;
  } else {
    const double goal = numbers[pick] * total;
    const Found group = passed(weight, goal, sums, &found);
    __shared__ int piece;
    __shared__ double share;
    if (threadIdx.x == group.index) {
      double before = group.before;
      for (int i = from; i < until; i++) {  // the last with weight, when rounding leaves the goal beyond all
        const double w = (double)(mine[i].y * expf((mine[i].x - top) * hot));
        if (w > 0) { piece = i; share = fmin(fmax((goal - before) / w, 0.0), 1.0); }
        if (before + w > goal) break;
        before += w;
      }
    }
    __syncthreads();
    const int id = piece * PIECE + threadIdx.x;
    const double here = id < vocab ? (double)expf((row[id] - top) * hot) : 0.0;
    double sum = here;
    for (int o = 16; o; o >>= 1) sum += __shfl_xor_sync(~0u, sum, o);
    if (!lane) sums[warp] = sum;
    __syncthreads();
    sum = 0;
    for (int w = 0; w < 8; w++) sum += sums[w];
    __syncthreads();
    token = piece * PIECE + passed(here, share * sum, sums, &found).index;
  }
  if (!threadIdx.x) out[pick] = {token, fminf(0.f, (float)((double)((row[token] - top) * hot) - log(total))), 1, 0};
}

// Picks that top-k, top-p and min-p leave not all ids open, in that order: as worker/row_sampler.py does it. Bounds are found
// bit by bit, by counting or weighing what lies above; over the ids near the largest logit, when these are enough and few,
// else over the whole row. Of equal logits the lower ids stay. grid (picks), 1024 threads, 8 * NEAR bytes of shared memory.
#define NEAR 8192
#define FULL 0x7fffffff
__device__ __forceinline__ u32 rising(float x) {  // as a number that rises with x
  const u32 bits = __float_as_uint(x);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
__device__ __forceinline__ float falling(u32 key) { return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu)); }
__device__ __forceinline__ double total_of(double v, double *sums) {  // over 1024 threads; everybody gets it
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  __syncthreads();
  if (!(threadIdx.x & 31)) sums[threadIdx.x >> 5] = v;
  __syncthreads();
  double s = 0;
  for (int w = 0; w < 32; w++) s += sums[w];
  return s;
}
KERNEL __launch_bounds__(1024) draw_cut(const float *logits, const int *rows, const float *inverse_temperature, const int *how,
    const int *top_k, const double *top_p, const float *min_p, const double *numbers, const float2 *pieces, Drawn *out, int vocab) {
  extern __shared__ __align__(16) char near_by[];
  u32 *keys = (u32 *)near_by;
  int *ids = (int *)near_by + NEAR;
  __shared__ double sums[32];
  __shared__ float tops[32];
  __shared__ int listed;
  follow();
  const int pick = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, count = (vocab + PIECE - 1) / PIECE;
  if (how[pick] != CUT) return;
  const float *row = logits + (u64)rows[pick] * vocab, hot = inverse_temperature[pick];
  const float2 *mine = pieces + (u64)pick * count;
  float top = -INF;
  for (int i = threadIdx.x; i < count; i += 1024) top = fmaxf(top, mine[i].x);
  for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
  if (!lane) tops[warp] = top;
  if (!threadIdx.x) listed = 0;
  __syncthreads();
  for (int w = 0; w < 32; w++) top = fmaxf(top, tops[w]);
  double weight = 0;
  for (int i = threadIdx.x; i < count; i += 1024) weight += (double)(mine[i].y * expf((mine[i].x - top) * hot));
  const double total = total_of(weight, sums);
  if (!(total < (double)INF) || !(fabsf(top) < INF)) {
    if (!threadIdx.x) out[pick] = {0, 0.f, 0, 0};
    return;
  }
  const int k = top_k[pick] > 0 && top_k[pick] < vocab ? top_k[pick] : 0;
  const double share = top_p[pick];
  const float least = min_p[pick];

  int n = 0;  // listed; 0 = the whole row
  for (int depth = 4; depth <= 16 && !n; depth *= 2) {
    double many = 0, heavy = 0;
    for (int id = threadIdx.x; id < vocab; id += 1024) {
      const float scaled = (row[id] - top) * hot;
      if (scaled >= -depth) { many += 1; heavy += (double)expf(scaled); }
    }
    many = total_of(many, sums);
    heavy = total_of(heavy, sums);
    if (many > NEAR) break;
    const bool enough = k ? many >= k : share < 1 ? heavy >= share * total : least >= expf(-depth + 0.01f);
    if (!enough) continue;
    for (int id = threadIdx.x; id < vocab; id += 1024)
      if ((row[id] - top) * hot >= -depth) {
        const int at = atomicAdd(&listed, 1);
        keys[at] = rising(row[id]);
        ids[at] = id;
      }
    __syncthreads();
    n = listed;
  }
  // Sum of what `of` says of every (key, id), of those listed or of all.
  auto sum = [&](auto of) {
    double s = 0;
    if (n) for (int i = threadIdx.x; i < n; i += 1024) s += of(keys[i], ids[i]);
    else for (int id = threadIdx.x; id < vocab; id += 1024) s += of(rising(row[id]), id);
    return total_of(s, sums);
  };
  auto weigh_key = [&](u32 key) { return (double)expf((falling(key) - top) * hot); };
  u32 bound = 0;
  int last = FULL;  // open: keys above the bound, and of those at the bound the ids up to the last
  auto open = [&](u32 key, int id) { return key > bound || (key == bound && id <= last); };
  // The id of the m-th open key that equals t, by id.
  auto place = [&](u32 t, double m) {
    int v = 0;
    for (int bit = 1 << 30; bit; bit >>= 1) {
      const int c = v | bit;
      if (c <= vocab && sum([&](u32 key, int id) { return key == t && open(key, id) && id < c ? 1. : 0.; }) < m) v = c;
    }
    return v;
  };
  if (k) {
    u32 t = 0;
    for (u32 bit = 1u << 31; bit; bit >>= 1) {
      const u32 c = t | bit;
      if (sum([&](u32 key, int) { return key >= c ? 1. : 0.; }) >= k) t = c;
    }
    const double above = sum([&](u32 key, int) { return key > t ? 1. : 0.; });
    last = place(t, k - above);
    bound = t;
  }
  if (share < 1) {
    const double goal = share * (k ? sum([&](u32 key, int id) { return open(key, id) ? weigh_key(key) : 0.; }) : total);
    u32 t = 0;
    for (u32 bit = 1u << 31; bit; bit >>= 1) {
      const u32 c = t | bit;
      if (sum([&](u32 key, int id) { return key >= c && open(key, id) ? weigh_key(key) : 0.; }) >= goal) t = c;
    }
    if (t) {  // 0: rounding left all of them short of the goal
      const double above = sum([&](u32 key, int id) { return key > t && open(key, id) ? weigh_key(key) : 0.; });
      const int v = place(t, fmax(1., ceil((goal - above) / weigh_key(t))));
      bound = t;
      last = v;
    }
  }
  auto weight_of = [&](u32 key, int id) {
    const float w = (float)weigh_key(key);
    return open(key, id) && w >= least ? (double)w : 0.;
  };
  const double open_weight = sum(weight_of), goal = fmin(numbers[pick] * open_weight, open_weight * (1 - 0x1p-52));
  int token = 0;
  for (int bit = 1 << 30; bit; bit >>= 1) {
    const int c = token | bit;
    if (c < vocab && sum([&](u32 key, int id) { return id < c ? weight_of(key, id) : 0.; }) <= goal) token = c;
  }
  if (!threadIdx.x) out[pick] = {token, fminf(0.f, (float)((double)((row[token] - top) * hot) - log(total))), 1, 0};
}

// The `wanted[p]` likeliest ids of a pick's row with their logprobs, best first and of equals the lower id, and the rank of
// the id drawn. ids, logprobs: [picks][most]. Behind `draw`. grid (picks), 256 threads, 12 bytes of shared memory a piece.
KERNEL __launch_bounds__(256) tops(const float *logits, const int *rows, const float *inverse_temperature, const int *wanted,
    const float2 *pieces, const Drawn *drawn, int *ids, float *logprobs, int *ranks, int most, int vocab) {
  extern __shared__ __align__(16) char piece_memory[];
  __shared__ double sums[8];
  __shared__ float best[8];
  __shared__ int where[8], above;
  follow();
  const int pick = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, count = (vocab + PIECE - 1) / PIECE;
  if (!wanted[pick] || !drawn[pick].finite) return;
  float *left = (float *)piece_memory, *taken = left + count;  // the largest that is left of a piece; the last one taken
  int *taken_id = (int *)(taken + count);
  const float *row = logits + (u64)rows[pick] * vocab, hot = inverse_temperature[pick];
  const float2 *mine = pieces + (u64)pick * count;
  float top = -INF;
  for (int i = threadIdx.x; i < count; i += 256) {
    left[i] = mine[i].x;
    taken[i] = INF;
    taken_id[i] = -1;
    top = fmaxf(top, mine[i].x);
  }
  // Over the block: the larger of (value, -place), and whose it is.
  auto largest = [&](float &value, int &place) {
    for (int o = 16; o; o >>= 1) {
      const float v = __shfl_xor_sync(~0u, value, o);
      const int p = __shfl_xor_sync(~0u, place, o);
      if (v > value || (v == value && p < place)) { value = v; place = p; }
    }
    __syncthreads();
    if (!lane) { best[warp] = value; where[warp] = place; }
    __syncthreads();
    value = best[0]; place = where[0];
    for (int w = 1; w < 8; w++)
      if (best[w] > value || (best[w] == value && where[w] < place)) { value = best[w]; place = where[w]; }
  };
  int nobody = 0;
  largest(top, nobody);
  double total = 0;
  for (int i = threadIdx.x; i < count; i += 256) total += (double)(mine[i].y * expf((mine[i].x - top) * hot));
  for (int o = 16; o; o >>= 1) total += __shfl_xor_sync(~0u, total, o);
  if (!lane) sums[warp] = total;
  if (!threadIdx.x) above = 0;
  __syncthreads();
  total = 0;
  for (int w = 0; w < 8; w++) total += sums[w];
  const float norm = (float)log(total);
  for (int n = 0; n < min(wanted[pick], vocab); n++) {
    float value = -INF;
    int piece = FULL;
    for (int i = threadIdx.x; i < count; i += 256)
      if (left[i] > value || (left[i] == value && i < piece)) { value = left[i]; piece = i; }
    largest(value, piece);
    const int id = piece * PIECE + threadIdx.x;
    const float x = id < vocab ? row[id] : -INF, last = taken[piece];
    const bool free = id < vocab && (x < last || (x == last && id > taken_id[piece]));  // not taken before
    float first = free ? x : -INF;
    int chosen = free ? id : FULL;
    largest(first, chosen);
    float next = free && id != chosen ? x : -INF;
    int unused = 0;
    largest(next, unused);
    if (!threadIdx.x) {
      left[piece] = next;
      taken[piece] = first;
      taken_id[piece] = chosen;
      ids[(u64)pick * most + n] = chosen;
      logprobs[(u64)pick * most + n] = fminf(0.f, (first - top) * hot - norm);
    }
    __syncthreads();
  }
  const float own = row[drawn[pick].token];
  int larger = 0;
  for (int i = threadIdx.x >> 5; i < count; i += 8) {  // a warp a piece; most hold nothing above
    if (mine[i].x <= own) continue;
    for (int j = lane; j < PIECE; j += 32)
      if (i * PIECE + j < vocab && row[i * PIECE + j] > own) larger++;
  }
  if (larger) atomicAdd(&above, larger);
  __syncthreads();
  if (!threadIdx.x) ranks[pick] = above + 1;
}

// tokens[i] = the token drawn sources[i]-th: the next step goes on before the host has seen it. grid (count / 256).
KERNEL feed(const Drawn *drawn, const int *sources, int *tokens, int count) {
  follow();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) tokens[i] = drawn[sources[i]].token;
}

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
// grid (picks), 256 threads. greedy[p]: take the most likely id, the lowest of equals.
KERNEL __launch_bounds__(256) draw(const float *logits, const int *rows, const float *inverse_temperature, const int *greedy,
                                   const double *numbers, const float2 *pieces, Drawn *out, int vocab) {
  __shared__ double sums[8];
  __shared__ float tops[8];
  __shared__ Found found;
  __shared__ int least;
  follow();
  const int pick = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, count = (vocab + PIECE - 1) / PIECE;
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
  if (greedy[pick]) {
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

// tokens[i] = the token drawn sources[i]-th: the next step goes on before the host has seen it. grid (count / 256).
KERNEL feed(const Drawn *drawn, const int *sources, int *tokens, int count) {
  follow();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) tokens[i] = drawn[sources[i]].token;
}

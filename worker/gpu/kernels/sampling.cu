// Drawing tokens where the logits are: from softmax(logits * inverse_temperature), by numbers in [0, 1) that the host's
// random streams make, so a seed gives the same token on every device. In this order, over the rows of one buffer:
//   count, edit         a pick whose logits are edited gets a row of its own, behind the `whole` rows that the step filled
//   weigh               rows are cut into pieces of PIECE ids, whose weights are summed
//   draw, draw_cut      the number is looked up among the pieces of its row, and inside one of them
//   report              more logprobs than the token's own, or those of tokens that are given
//   feed                the tokens go to the next step
#define PIECE 256
#define FULL 0x7fffffff

// What is kept by id for a sequence whose logits are edited, [seats][vocab]: see worker/logit_edits.py.
#define IN_PROMPT 0x80000000u
#define CLOSED 0x40000000u
#define TIMES 0x3fffffffu
// words[places[i]] = values[i]. grid (count / 256).
KERNEL count(const int *places, const u32 *values, u32 *words, int entries) {
  follow();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < entries) words[places[i]] = values[i];
}

// Row `to` = row `from`, edited as LogitEdits.apply does it, to the same bits: what `mask` closes (-1: nothing; rows of bits,
// the lowest first) is -inf; addends of entries [first, end), which are sorted by id; penalties of ids that the seat (-1: none)
// has seen. Where the logit was no finite number it is NaN. grid (vocab / TILE, edits), 256 threads.
struct Edit { int from, to, mask, seat, first, end; float repetition, presence, frequency; int unused; };
#define TILE 2048
KERNEL __launch_bounds__(256) edit(float *logits, const Edit *edits, const u32 *masks, const int *ids, const float *addends,
                                   const u32 *words, int vocab) {
  __shared__ float x[TILE];
  __shared__ int ends[2];
  follow();
  const Edit e = edits[blockIdx.y];
  const int start = blockIdx.x * TILE, size = min(TILE, vocab - start), mask_words = (vocab + 31) / 32;
  const float *row = logits + (u64)e.from * vocab + start;
  const u32 *mask = masks + (u64)max(e.mask, 0) * mask_words, *seen = words + (u64)max(e.seat, 0) * vocab + start;
  if (threadIdx.x < 2) {  // the tile's entries
    int low = e.first, high = e.end;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (ids[middle] < start + (int)threadIdx.x * TILE) low = middle + 1;
      else high = middle;
    }
    ends[threadIdx.x] = low;
  }
#pragma unroll
  for (int i = threadIdx.x; i < TILE; i += 256) {
    if (i >= size) break;
    const float v = row[i];
    const int id = start + i;
    const bool open = e.mask < 0 || mask[id >> 5] >> (id & 31) & 1;
    x[i] = !(fabsf(v) < INF) ? __int_as_float(0x7fffffff) : open ? v : -INF;
  }
  __syncthreads();
  for (int i = ends[0] + threadIdx.x; i < ends[1]; i += 256) atomicAdd(x + (ids[i] - start), addends[i]);
  __syncthreads();
  float *out = logits + (u64)e.to * vocab + start;
#pragma unroll
  for (int i = threadIdx.x; i < TILE; i += 256) {
    if (i >= size) break;
    float v = x[i];
    const u32 word = e.seat < 0 ? 0u : seen[i];
    if (word && v == v) {
      if (word & CLOSED) v = -INF;
      if (word & (IN_PROMPT | TIMES) && e.repetition != 1.f) v = v > 0 ? __fdiv_rn(v, e.repetition) : __fmul_rn(v, e.repetition);
      if (word & TIMES) v = __fsub_rn(v, __fadd_rn(e.presence, __fmul_rn(e.frequency, (float)(word & TIMES))));
    }
    out[i] = v;
  }
}

// pieces: [views][ceil(vocab / PIECE)] of (largest logit, sum of exp((logit - largest) * inverse_temperature)); a sum that is
// no number where a logit is not finite, but for -inf in a row from `whole` on. grid (.., views), 256 threads: a warp a piece.
KERNEL __launch_bounds__(256) weigh(const float *logits, const int *rows, const float *inverse_temperature, float2 *pieces,
                                    int whole, int vocab) {
  follow();
  const int view = blockIdx.y, lane = threadIdx.x & 31, count = (vocab + PIECE - 1) / PIECE;
  const float *row = logits + (u64)rows[view] * vocab, hot = inverse_temperature[view];
  const bool edited = rows[view] >= whole;
  for (int piece = blockIdx.x * 8 + (threadIdx.x >> 5); piece < count; piece += gridDim.x * 8) {
    float x[PIECE / 32], top = -INF, sum = 0, broken = 0;
#pragma unroll
    for (int i = 0; i < PIECE / 32; i++) {
      const int id = piece * PIECE + lane + 32 * i;
      x[i] = id < vocab ? row[id] : -INF;
      if (id < vocab && !(edited && x[i] == -INF)) broken += x[i] * 0.f;
      top = fmaxf(top, x[i]);
    }
    for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
    const float base = top > -INF ? top : 0.f;  // all masked: no weight
#pragma unroll
    for (int i = 0; i < PIECE / 32; i++) sum += expf((x[i] - base) * hot);
    sum = warp_sum(sum + broken);
    if (!lane) pieces[(u64)view * count + piece] = make_float2(top, sum);
  }
}

// token: its logprob is of the view that it was drawn from. state: NOT_FINITE and ALL_MASKED have no token.
struct Drawn { int token; float logprob; int state; int unused; };
#define NOT_FINITE 0
#define SOUND 1
#define ALL_MASKED 2

__device__ __forceinline__ double total_of(double v, double *sums) {  // over the block; sums: [32]; everybody gets it
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  __syncthreads();
  if (!(threadIdx.x & 31)) sums[threadIdx.x >> 5] = v;
  __syncthreads();
  double s = 0;
  for (int w = 0; w < blockDim.x / 32; w++) s += sums[w];
  return s;
}

// A view by its pieces: the largest logit, the total of the weights relative to it, whether anything can be drawn.
struct Weighed {
  float top;
  double total;
  int state;
  __device__ __forceinline__ float scaled(float logit, float hot) const { return (logit - top) * hot; }
  __device__ __forceinline__ float logprob(float scaled) const { return fminf(0.f, (float)((double)scaled - log(total))); }
};
__device__ __forceinline__ Weighed weighed(const float2 *pieces, int count, float hot, bool edited, double *sums) {
  __shared__ float tops[32];
  float top = -INF;
  for (int i = threadIdx.x; i < count; i += blockDim.x) top = fmaxf(top, pieces[i].x);
  for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, o));
  if (!(threadIdx.x & 31)) tops[threadIdx.x >> 5] = top;
  __syncthreads();
  for (int w = 0; w < blockDim.x / 32; w++) top = fmaxf(top, tops[w]);
  const bool some = fabsf(top) < INF;
  double weight = 0;
  for (int i = threadIdx.x; i < count; i += blockDim.x)
    weight += (double)(some ? pieces[i].y * expf((pieces[i].x - top) * hot) : pieces[i].y);
  const double total = total_of(weight, sums);
  const int state = some && total < (double)INF ? SOUND : edited && total == total ? ALL_MASKED : NOT_FINITE;
  return {top, total, state};
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

// A bit for each id that `open` says is so, the lowest first: [ceil(vocab / 32)]. By all threads of a block.
template <class F> __device__ __forceinline__ void mark(u32 *mask, int vocab, F open) {
  for (int first = threadIdx.x & ~31; first < vocab; first += blockDim.x) {
    const int id = first + (threadIdx.x & 31);
    const u32 bits = __ballot_sync(~0u, id < vocab && open(id));
    if (!(threadIdx.x & 31)) mask[first / 32] = bits;
  }
}

// How a pick is drawn: from all ids; the most likely id, the lowest of equals; or by `draw_cut`. Pick i is of view i.
#define GREEDY 1
#define CUT 2
// marked: which of the masks tells what it was drawn from, -1 = none does. grid (picks), 256 threads.
KERNEL __launch_bounds__(256) draw(const float *logits, const int *rows, const float *inverse_temperature, const int *how,
                                   const double *numbers, const float2 *pieces, Drawn *out, const int *marked, u32 *masks,
                                   int whole, int vocab) {
  __shared__ double sums[32];
  __shared__ Found found;
  __shared__ int least;
  follow();
  const int pick = blockIdx.x, count = (vocab + PIECE - 1) / PIECE;
  if (how[pick] == CUT) return;
  const float *row = logits + (u64)rows[pick] * vocab, hot = inverse_temperature[pick];
  const float2 *mine = pieces + (u64)pick * count;
  const int each = (count + 255) / 256, from = threadIdx.x * each, until = min(count, from + each);
  if (!threadIdx.x) least = FULL;
  const Weighed all = weighed(mine, count, hot, rows[pick] >= whole, sums);
  if (all.state != SOUND) {
    if (!threadIdx.x) out[pick] = {0, 0.f, all.state, 0};
    return;
  }
  const float top = all.top;
  __syncthreads();
  int token;
  if (how[pick] == GREEDY) {
    for (int i = from; i < until; i++)
      if (mine[i].x == top) { atomicMin(&least, i); break; }
    __syncthreads();
    const int piece = least, id = piece * PIECE + threadIdx.x;
    __syncthreads();
    if (!threadIdx.x) least = FULL;
    __syncthreads();
    if (id < vocab && row[id] == top) atomicMin(&least, id);
    __syncthreads();
    token = least;
  } else {
    double weight = 0;
    for (int i = from; i < until; i++) weight += (double)(mine[i].y * expf((mine[i].x - top) * hot));
    const double goal = numbers[pick] * all.total;
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
    const double here = id < vocab ? (double)expf((row[id] - top) * hot) : 0.0, sum = total_of(here, sums);
    __syncthreads();
    token = piece * PIECE + passed(here, share * sum, sums, &found).index;
  }
  if (!threadIdx.x) out[pick] = {token, all.logprob(all.scaled(row[token], hot)), SOUND, 0};
  if (marked[pick] >= 0) {
    const bool greedy = how[pick] == GREEDY;
    mark(masks + (u64)marked[pick] * ((vocab + 31) / 32), vocab, [&](int id) { return greedy ? id == token : row[id] > -INF; });
  }
}

// Picks that top-k, top-p and min-p leave not all ids open, in that order: as worker/softmax.py does it. Bounds are found
// bit by bit, by counting or weighing what lies above; over the ids near the largest logit, when these are enough and few,
// else over the whole row. Of equal logits the lower ids stay; they are compared once scaled, as the host's are. grid (picks), 1024 threads, 8 * NEAR bytes of shared memory.
#define NEAR 8192
__device__ __forceinline__ u32 rising(float x) {  // as a number that rises with x
  const u32 bits = __float_as_uint(x);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}
__device__ __forceinline__ float falling(u32 key) { return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu)); }
KERNEL __launch_bounds__(1024) draw_cut(const float *logits, const int *rows, const float *inverse_temperature, const int *how,
    const int *top_k, const double *top_p, const float *min_p, const double *numbers, const float2 *pieces, Drawn *out,
    const int *marked, u32 *masks, int whole, int vocab) {
  extern __shared__ __align__(16) char near_by[];
  u32 *keys = (u32 *)near_by;
  int *ids = (int *)near_by + NEAR;
  __shared__ double sums[32];
  __shared__ int listed;
  follow();
  const int pick = blockIdx.x, count = (vocab + PIECE - 1) / PIECE;
  if (how[pick] != CUT) return;
  const float *row = logits + (u64)rows[pick] * vocab, hot = inverse_temperature[pick];
  if (!threadIdx.x) listed = 0;
  const Weighed all = weighed(pieces + (u64)pick * count, count, hot, rows[pick] >= whole, sums);
  if (all.state != SOUND) {
    if (!threadIdx.x) out[pick] = {0, 0.f, all.state, 0};
    return;
  }
  const int k = top_k[pick] > 0 && top_k[pick] < vocab ? top_k[pick] : 0;
  const double share = top_p[pick];
  const float least = min_p[pick];

  int n = 0;  // listed; 0 = the whole row
  for (int depth = 4; depth <= 16 && !n; depth *= 2) {
    double many = 0, heavy = 0;
    for (int id = threadIdx.x; id < vocab; id += 1024) {
      const float scaled = all.scaled(row[id], hot);
      if (scaled >= -depth) { many += 1; heavy += (double)expf(scaled); }
    }
    many = total_of(many, sums);
    heavy = total_of(heavy, sums);
    if (many > NEAR) break;
    const bool enough = k ? many >= k : share < 1 ? heavy >= share * all.total : least >= expf(-depth + 0.01f);
    if (!enough) continue;
    for (int id = threadIdx.x; id < vocab; id += 1024) {
      const float scaled = all.scaled(row[id], hot);
      if (scaled >= -depth) {
        const int at = atomicAdd(&listed, 1);
        keys[at] = rising(scaled);
        ids[at] = id;
      }
    }
    __syncthreads();
    n = listed;
  }
  // Sum of what `of` says of every (key, id), of those listed or of all.
  auto sum = [&](auto of) {
    double s = 0;
    if (n) for (int i = threadIdx.x; i < n; i += 1024) s += of(keys[i], ids[i]);
    else for (int id = threadIdx.x; id < vocab; id += 1024) s += of(rising(all.scaled(row[id], hot)), id);
    return total_of(s, sums);
  };
  auto weigh_key = [&](u32 key) { return (double)expf(falling(key)); };
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
    const double goal = share * (k ? sum([&](u32 key, int id) { return open(key, id) ? weigh_key(key) : 0.; }) : all.total);
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
  if (!threadIdx.x) out[pick] = {token, all.logprob(all.scaled(row[token], hot)), SOUND, 0};
  if (marked[pick] >= 0)
    mark(masks + (u64)marked[pick] * ((vocab + 31) / 32), vocab, [&](int id) {
      const u32 key = rising(all.scaled(row[id], hot));
      return row[id] > -INF && open(key, id) && (float)weigh_key(key) >= least;
    });
}

// Of a token that was drawn, or given with state SOUND: its logprob and rank in the view `shown`, and logprobs of others there:
// of the wanted[p] likeliest ids, best first and of equals the lower id (-1 where nothing is left), or of -wanted[p] ids that
// are given, from others[p] on. Logits are compared once scaled, as the host's are. ids, logprobs: [picks][most]. Picks with shown < 0 have no report. Behind `draw`. grid (picks),
// 256 threads, 12 bytes of shared memory a piece.
#define NO_CHANCE -9999.f  // as worker/sampler.py: logprob of an id that was asked for and cannot be sampled
KERNEL __launch_bounds__(256) report(const float *logits, const int *rows, const float *inverse_temperature, const int *shown,
    const int *wanted, const int *others, const int *given, const float2 *pieces, Drawn *drawn, int *ids, float *logprobs,
    int *ranks, int most, int whole, int vocab) {
  extern __shared__ __align__(16) char piece_memory[];
  __shared__ double sums[32];
  __shared__ float best[8];
  __shared__ int where[8], above;
  follow();
  const int pick = blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, count = (vocab + PIECE - 1) / PIECE;
  const int view = shown[pick], token = drawn[pick].token;
  if (view < 0 || drawn[pick].state != SOUND) return;
  float *left = (float *)piece_memory, *taken = left + count;  // the largest that is left of a piece; the last one taken
  int *taken_id = (int *)(taken + count);
  const float *row = logits + (u64)rows[view] * vocab, hot = inverse_temperature[view];
  const float2 *mine = pieces + (u64)view * count;
  for (int i = threadIdx.x; i < count; i += 256) {
    taken[i] = INF;
    taken_id[i] = -1;
  }
  if (!threadIdx.x) above = 0;
  const Weighed all = weighed(mine, count, hot, rows[view] >= whole, sums);
  if (all.state != SOUND) {
    if (!threadIdx.x) drawn[pick].state = all.state;
    return;
  }
  for (int i = threadIdx.x; i < count; i += 256) left[i] = all.scaled(mine[i].x, hot);
  const float own = all.scaled(row[token], hot);
  if (!threadIdx.x) drawn[pick].logprob = fmaxf(NO_CHANCE, all.logprob(own));
  for (int i = threadIdx.x; i < -wanted[pick]; i += 256) {
    const int id = given[others[pick] + i];
    ids[(u64)pick * most + i] = id;
    logprobs[(u64)pick * most + i] = fmaxf(NO_CHANCE, all.logprob(all.scaled(row[id], hot)));
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
  for (int n = 0; n < wanted[pick]; n++) {
    float value = -INF;
    int piece = FULL;
    for (int i = threadIdx.x; i < count; i += 256)
      if (left[i] > value || (left[i] == value && i < piece)) { value = left[i]; piece = i; }
    largest(value, piece);
    if (value == -INF) {  // masked, or all of the vocabulary is told
      for (int i = n + threadIdx.x; i < wanted[pick]; i += 256) ids[(u64)pick * most + i] = -1;
      break;
    }
    const int id = piece * PIECE + threadIdx.x;
    const float x = id < vocab ? all.scaled(row[id], hot) : -INF, last = taken[piece];
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
      logprobs[(u64)pick * most + n] = all.logprob(first);
    }
    __syncthreads();
  }
  int larger = 0;
  for (int i = warp; i < count; i += 8) {  // a warp a piece; most hold nothing above
    if (all.scaled(mine[i].x, hot) <= own) continue;
    for (int j = lane; j < PIECE; j += 32)
      if (i * PIECE + j < vocab && all.scaled(row[i * PIECE + j], hot) > own) larger++;
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

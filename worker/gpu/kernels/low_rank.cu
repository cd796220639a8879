// What adapters add to a product of few rows (skinny.cu), within it: no launch more. Compiled behind adapters.cu. Its blocks share the making of A x among them, of the x
// that each has anyway, hand it to each other by way of L2, and add B (A x) to their sums before these are rounded, normed
// and gated. A number of A x travels with a tag that no launch before had, in one piece of 64 bits: who finds the tag has
// the number, without another round trip. Blocks [0, makers), which all have places at once, make all of it before any of
// them waits, and the others get theirs later: blocks get places in the order of their numbers.
#if !FP32
#define SPUN (1 << 24)  // tries, some seconds of them: then something is broken that must not be waited for

// tiles: of [tiles][sites]. between: handed over, [rows][SHARES][STRIDE]. n0, n1: outputs of the first two parts; of GATE both
// have `rows`.
template <int OWN, int PART, int SPLIT, int MOST, int WHAT> struct LowRank {
  static constexpr int HALVES = WHAT == GATE ? 2 : 1, UNITS = PART / 32, QUARTERS = 4, WIDTH = PART / 8;  // unit: 32 columns
  static constexpr int WANTED = PART / 256, PER = WANTED < 1 ? 1 : WANTED * SPLIT > 8 ? 8 / SPLIT : WANTED;  // shares of a block
  static constexpr int SHARES = PER * SPLIT, LONGEST = (UNITS + PER - 1) / PER, AHEAD_ALL = (LONGEST + QUARTERS - 1) / QUARTERS;
  static constexpr int AHEAD = AHEAD_ALL < 3 ? AHEAD_ALL : 3, STRIDE = 256 * PARTS, NUMBERS = MOST * HALVES * RANKS;
  static constexpr int SUMS = QUARTERS * TILE * (RANKS + 1), ROOM = SUMS > NUMBERS ? SUMS : NUMBERS;
  static constexpr int EACH = (MOST * OWN + 256 * SPLIT - 1) / (256 * SPLIT), ITEMS = (NUMBERS + 255) / 256;
  static constexpr bool EARLY = EACH * HALVES <= 6;  // there are registers for B
  struct Shared {
    float room[ROOM];
    Factors held[MOST];  // of every tile
    int lists[4 + (3 * MOST + 3) / 4 * 4 + 2 * MOST];
  };
  const Factors *tiles;
  const int *lists;
  u64 *between;
  Shared &shared;
  int site, sites, rows, T, n0, n1, makers;
  // The task: RANKS of A, from the first on, by a share of the columns, for a tile. a: this lane's row and columns, 0 = none
  int task, tasks, groups, first, ranks, count, low_row, high_row, to_row;
  const u16 *a;
  uint4 ahead[AHEAD], b[EARLY ? EACH : 1][HALVES][2];

  __device__ __forceinline__ int part_of(int o) const { return WHAT != STORE ? 0 : o < n0 ? 0 : o < n0 + n1 ? 1 : 2; }
  __device__ __forceinline__ const Factors *of_row(int t) const {  // 0: of a row that is nobody's
    const int tile = t < T ? order_of(shared.lists, T)[T + t] : -1;
    return tile < 0 ? 0 : shared.held + tile;
  }
  // RANKS of B, from j0 on: of output o, of this part, for row t.
  __device__ __forceinline__ void take_b(int part, int t, int o, int j0, uint4 *w) const {
    w[0] = w[1] = make_uint4(0, 0, 0, 0);
    const Factors *f = o < rows ? of_row(t) : 0;
    if (!f || j0 >= f->rank[part]) return;
    const int before = WHAT != STORE || !part ? 0 : part == 1 ? n0 : n0 + n1, rank = f->rank[part];
    const u16 *from = f->b[part] + (u64)(o - before) * rank + j0;
    if (rank % 8) {
      u32 two[8];
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const u32 low = j0 + 2 * j < rank ? from[2 * j] : 0, high = j0 + 2 * j + 1 < rank ? from[2 * j + 1] : 0;
        two[j] = low | high << 16;
      }
      w[0] = make_uint4(two[0], two[1], two[2], two[3]);
      w[1] = make_uint4(two[4], two[5], two[6], two[7]);
      return;
    }
    w[0] = stream16(from);
    if (j0 + 8 < rank) w[1] = stream16(from + 8);
  }
  __device__ __forceinline__ void take_b(int part, int e, int r0, int mine, int j0, uint4 (*w)[2]) const {
    const int i = mine + e * 256 * SPLIT, o = r0 + i % OWN;
#pragma unroll
    for (int h = 0; h < HALVES; h++) take_b(part + h, part_of(o) == part ? i / OWN : T, o, j0, w[h]);
  }
  __device__ __forceinline__ int unit(int i) const {  // the i-th of this warp
    return task % PER * LONGEST + (threadIdx.x >> 6) + i * QUARTERS;
  }
  __device__ __forceinline__ int end() const { return min(UNITS, (task % PER + 1) * LONGEST); }
  __device__ __forceinline__ void take_a(int i, uint4 &w) const {
    w = a && unit(i) < end() ? stream16(a + unit(i) * 32) : make_uint4(0, 0, 0, 0);
  }
  __device__ __forceinline__ void find() {  // ranks: from the first on; none: nothing to do
    ranks = 0;
    if (task >= tasks) return;
    const int number = task / (PER * groups), g = threadIdx.x % 32 >> 2;
    const Tile tile = tile_of(shared.lists, number);
    const Factors &f = shared.held[number];
    const int *order = order_of(shared.lists, T) + tile.first;
    first = task / PER % groups * RANKS;
    ranks = f.ranks - first;
    count = tile.count;
    low_row = order[min(g, count - 1)];
    high_row = order[min(g + 8, count - 1)];
    to_row = order[min((int)threadIdx.x / RANKS, count - 1)];
    a = row_of_a(f, first + (threadIdx.x >> 5 & 1) * 8 + g, PART * SPLIT);
    if (a) a += blockIdx.x % SPLIT * PART + (threadIdx.x & 3) * 8;
#pragma unroll
    for (int i = 0; i < AHEAD; i++) take_a(i, ahead[i]);
  }

  // Before `follow`: what the step has of adapters, and then the first of A and B, come in two round trips.
  __device__ __forceinline__ void begin(int r0, int mine) {
    constexpr int WORDS = sizeof(Factors) / 4;
    for (int i = threadIdx.x; i < 4 + (3 * T + 3) / 4 * 4 + 2 * T; i += 256) shared.lists[i] = lists[i];
    for (int i = threadIdx.x; i < T * WORDS; i += 256)  // more than there are tiles; none waits to know how many
      ((u32 *)shared.held)[i] = ((const u32 *)(tiles + (u64)(i / WORDS) * sites + site))[i % WORDS];
    __syncthreads();
    groups = (shared.lists[1] + RANKS - 1) / RANKS;
    tasks = shared.lists[0] * groups * PER;
    task = blockIdx.x / SPLIT < makers ? blockIdx.x / SPLIT : tasks;
    find();
#pragma unroll
    for (int e = 0; EARLY && e < EACH; e++) take_b(part_of(r0), e, r0, mine, 0, b[e]);
  }

  // xs: the block's columns of x, as skinny.cu has them.
  __device__ __forceinline__ void shrink(const uint4 *xs) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2;
    while (task < tasks) {
      if (ranks > 0) {
        float d[4] = {};
        auto add = [&](int i, uint4 w) {
          if (unit(i) >= end()) return;
          const int c = unit(i) * 4 + (lane & 3);
          const uint4 p = xs[low_row * WIDTH + (c ^ (low_row & 7))], q = xs[high_row * WIDTH + (c ^ (high_row & 7))];
          const u32 low[4] = {p.x, q.x, p.y, q.y}, high[4] = {p.z, q.z, p.w, q.w};
          multiply(d, low, w.x, w.y);
          multiply(d, high, w.z, w.w);
        };
#pragma unroll
        for (int i = 0; i < AHEAD; i++) add(i, ahead[i]);
        for (int i = AHEAD; i < AHEAD_ALL; i++) {
          uint4 w;
          take_a(i, w);
          add(i, w);
        }
        float *room = shared.room;
        for (int i = 0; i < 4; i++)
          room[((warp >> 1) * TILE + g + 8 * (i >> 1)) * (RANKS + 1) + (warp & 1) * 8 + (lane & 3) * 2 + (i & 1)] = d[i];
        __syncthreads();
        const int r = threadIdx.x / RANKS, j = threadIdx.x % RANKS, share = blockIdx.x % SPLIT * PER + task % PER;
        float s = 0;
        for (int i = 0; i < QUARTERS; i++) s += room[(i * TILE + r) * (RANKS + 1) + j];
        if (r < count && j < ranks) hand_over(between + (u64)(to_row * SHARES + share) * STRIDE + first + j, s, tag());
        __syncthreads();
      }
      task += makers;
      find();
    }
  }
  __device__ __forceinline__ u32 tag() const { return (u32)shared.lists[2] * sites + site + 1; }

  // What is added to this thread's sums, mine + e * 256 * SPLIT.
  struct Added {
    float d[EACH][HALVES];
    __device__ __forceinline__ void to(float &sum, int e, int h) const { sum += d[e][h]; }
  };
  __device__ __forceinline__ Added expand(int r0, int mine) {
    Added added = {};
    const int last = part_of(min(r0 + OWN, rows) - 1), most = shared.lists[3];
    const u32 wanted = tag();
    bool again = false;
    for (int part = part_of(r0); part <= last; part++)
      for (int j0 = 0; j0 < most; j0 += RANKS, again = true) {
#pragma unroll
        for (int e = 0; EARLY && e < EACH; e++)
          if (again) take_b(part, e, r0, mine, j0, b[e]);
        const u64 *at[ITEMS];
        u64 found[ITEMS][SHARES];
#pragma unroll
        for (int n = 0; n < ITEMS; n++) {
          const int i = threadIdx.x + n * 256, t = i / (RANKS * HALVES), h = i / RANKS % HALVES, j = j0 + i % RANKS;
          const Factors *f = of_row(t);
          at[n] = 0;
          if (!f || j >= f->rank[part + h]) continue;
          int skipped = 0;
          for (int p = 0; p < part + h; p++) skipped += f->rank[p];
          at[n] = between + (u64)t * SHARES * STRIDE + skipped + j;
        }
        bool whole = false;
        for (int tries = 0; !whole; tries++) {
          if (tries > SPUN) __trap();
          whole = true;
#pragma unroll
          for (int n = 0; n < ITEMS; n++)
#pragma unroll
            for (int z = 0; z < SHARES; z++) found[n][z] = at[n] ? handed(at[n] + z * STRIDE) : (u64)wanted << 32;
#pragma unroll
          for (int n = 0; n < ITEMS; n++)
#pragma unroll
            for (int z = 0; z < SHARES; z++) whole &= found[n][z] >> 32 == wanted;
        }
        if (again) __syncthreads();  // the numbers before have been read
#pragma unroll
        for (int n = 0; n < ITEMS; n++) {
          float s = 0;
#pragma unroll
          for (int z = 0; z < SHARES; z++) s += __uint_as_float((u32)found[n][z]);
          if (threadIdx.x + n * 256 < NUMBERS) shared.room[threadIdx.x + n * 256] = s;
        }
        __syncthreads();
#pragma unroll
        for (int e = 0; e < EACH; e++) {
          uint4 late[HALVES][2];
          if (!EARLY) take_b(part, e, r0, mine, j0, late);
          const int t = min((mine + e * 256 * SPLIT) / OWN, T - 1);
          const Factors *f = of_row(t);
#pragma unroll
          for (int h = 0; h < HALVES; h++) {
            const float *v = shared.room + (t * HALVES + h) * RANKS;
            float w[RANKS], s = 0;
            unpack8(EARLY ? b[e][h][0] : late[h][0], w);
            unpack8(EARLY ? b[e][h][1] : late[h][1], w + 8);
#pragma unroll
            for (int j = 0; j < RANKS; j++) s += v[j] * w[j];
            if (f) added.d[e][h] += s * f->scale[part + h];
          }
        }
      }
    return added;
  }
};
#define SKINNY_CHANGED(name, ROWS, PART, SPLIT, MOST, WHAT, NORM) KERNEL __launch_bounds__(256) name(const u16 *w, \
    const void *x, const u16 *weight, void *y, int rows, int T, float eps, const Factors *tiles, int site, int sites, \
    const int *lists, u64 *between, int n0, int n1, int makers) { \
    typedef LowRank<WHAT == GATE ? ROWS / 2 : ROWS, PART, SPLIT, MOST, WHAT> Change; \
    __shared__ __align__(16) typename Change::Shared shared; \
    Change change = {tiles, lists, between, shared, site, sites, rows, T, n0, n1, makers}; \
    skinny<ROWS, PART, SPLIT, MOST, WHAT, NORM>(w, x, weight, y, rows, T, eps, change); }
#endif

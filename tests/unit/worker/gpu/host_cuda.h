// Stands for a CUDA device in tests of the kernels that add adapters, and of skinny.cu: one block after the other, its
// threads as fibers that change places where CUDA's threads would wait for each other; the blocks of a cluster at once, each
// by a thread of its own, to which shared memory belongs. In place of base.cu, of which only what those need is here.
#include <barrier>
#include <cmath>
#include <csetjmp>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <ucontext.h>
#include <vector>
typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;
struct uint2 { u32 x, y; }; struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; }; struct float4 { float x, y, z, w; };
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
struct Place { u32 x, y, z; };
static thread_local Place threadIdx, blockIdx;
static Place gridDim, blockDim;
#define __device__
#define __forceinline__ inline
#define __shared__ static thread_local
#define MOST_THREADS 512
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __cvta_generic_to_shared(p) (p)
#define KERNEL extern "C" void
#define STORE 0
#define ADD 1
#define GATE 2

// Fibers change places by _setjmp and _longjmp: swapcontext asks the kernel for signals at every change, of which there are
// millions.
static thread_local jmp_buf scheduler, fibers[MOST_THREADS];
static thread_local bool ended[MOST_THREADS];
static thread_local int current, waiting[MOST_THREADS / 32 + 1], round_[MOST_THREADS / 32 + 1];
static thread_local int group_of[MOST_THREADS], round_of[MOST_THREADS];  // what a fiber waits for the end of
static void wait_for(int group, int size) {  // group: of a warp, or the last = all
  const int me = current;
  if (++waiting[group] == size) { waiting[group] = 0; round_[group]++; return; }
  group_of[me] = group; round_of[me] = round_[group];
  if (!_setjmp(fibers[me])) _longjmp(scheduler, 1);
}
static void __syncthreads() { wait_for(MOST_THREADS / 32, blockDim.x); }
static thread_local float told[MOST_THREADS];
static float __shfl_xor_sync(u32, float v, int o) {
  const int warp = threadIdx.x / 32;
  told[threadIdx.x] = v;
  wait_for(warp, 32);
  const float found = told[threadIdx.x ^ o];
  wait_for(warp, 32);
  return found;
}
static float as_float(u32 v) { float f; memcpy(&f, &v, 4); return f; }
static u32 bits(float f) { u32 v; memcpy(&v, &f, 4); return v; }
static float low_half(u32 v) { return as_float(v << 16); }
static float high_half(u32 v) { return as_float(v & 0xffff0000u); }
static u32 rounded(float f) { const u32 v = bits(f); return (v + 0x7fff + (v >> 16 & 1)) >> 16; }
static u32 pack(float a, float b) { return rounded(a) | rounded(b) << 16; }
static float rsqrtf(float x) { return 1 / sqrtf(x); }
static float silu(float g) { return g / (1 + expf(-g)); }
static u32 __float_as_uint(float f) { return bits(f); }
static float __uint_as_float(u32 v) { return as_float(v); }
static int min(int a, int b) { return a < b ? a : b; }
static int max(int a, int b) { return a > b ? a : b; }
static void follow() {}
static void ask_l2(const void *p, u32 bytes) { if ((u64)p % 16 || bytes % 16) abort(); }
template <class T> static T aligned(const void *p) { if ((u64)p % sizeof(T)) abort(); return *(const T *)p; }
static uint4 stream16(const void *p) { return aligned<uint4>(p); }
static float warp_sum(float v) { for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o); return v; }
static float block_sum(float v, float *part) {
  v = warp_sum(v);
  if (!(threadIdx.x % 32)) part[threadIdx.x / 32] = v;
  __syncthreads();
  float s = 0;
  for (u32 w = 0; w < (blockDim.x + 31) / 32; w++) s += part[w];
  return s;
}
static void load8(const float *p, float *f) { if ((u64)p % 16) abort(); memcpy(f, p, 32); }
static void store8(float *p, const float *f) { memcpy(p, f, 32); }
static float value(float v) { return v; }
static float value(u16 v) { return as_float((u32)v << 16); }
static void unpack8(uint4 v, float *f) {
  const u32 w[4] = {v.x, v.y, v.z, v.w};
  for (int i = 0; i < 8; i++) f[i] = i & 1 ? high_half(w[i / 2]) : low_half(w[i / 2]);
}
static void load8(const u16 *p, float *f) { unpack8(aligned<uint4>(p), f); }
static void store8(u16 *p, const float *f) { for (int i = 0; i < 8; i++) p[i] = rounded(f[i]); }
alignas(128) thread_local uint4 operands[227 << 6];  // shared memory, whose addresses begin with 0
static std::barrier<> *cluster;
static char *shared_of[16];  // where each block's thread has its own
static void cluster_sync() {  // the block's first thread waits for the other blocks, and all for it
  __syncthreads();
  if (!threadIdx.x) cluster->arrive_and_wait();
  __syncthreads();
}
static float of_block(const float *p, int rank) { return *(const float *)(shared_of[rank] + ((char *)p - (char *)operands)); }
#if FP32
typedef float elt;
static elt narrow(float v) { return v; }
#else
typedef u16 elt;
typedef uint4 raw8;
static raw8 fetch8(const elt *p) { return aligned<uint4>(p); }
static void widen8(raw8 r, float *f) { unpack8(r, f); }
static elt narrow(float v) { return rounded(v); }
static thread_local u32 multiplied[MOST_THREADS][6];
static void multiply(float *d, const u32 *a, u32 b0, u32 b1) {  // as the PTX ISA lays m16n8k16 out
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  u32 *mine = multiplied[threadIdx.x];
  memcpy(mine, a, 16); mine[4] = b0; mine[5] = b1;
  wait_for(warp, 32);
  for (int i = 0; i < 4; i++) {
    const int row = lane / 4 + (i & 2) * 4, column = lane % 4 * 2 + (i & 1);
    for (int k = 0; k < 16; k++) {
      const u32 *of_a = multiplied[warp * 32 + row % 8 * 4 + k % 8 / 2], *of_b = multiplied[warp * 32 + column * 4 + k % 8 / 2];
      const u32 v = of_a[row / 8 + k / 8 * 2], w = of_b[4 + k / 8];
      d[i] += (k & 1 ? high_half(v) : low_half(v)) * (k & 1 ? high_half(w) : low_half(w));
    }
  }
  wait_for(warp, 32);
}
static u32 shared_address(const void *p) { return (const char *)p - (const char *)operands; }
static void copy16(u32 to, const void *from, int bytes = 16) {
  if ((u64)from % 16 || to % 16 || to + 16 > sizeof(operands)) abort();
  memcpy((char *)operands + to, from, 16);
}
static void group_copies() {}
template <int LEFT> static void copies_left() {}
static void ldmatrix4(u32 at, u32 *r) {  // as the PTX ISA has it: of the i-th matrix, row lane / 4 and two columns
  static thread_local u32 rows[MOST_THREADS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (at % 16 || at + 16 > sizeof(operands)) abort();
  rows[threadIdx.x] = at;
  wait_for(warp, 32);
  for (int i = 0; i < 4; i++) memcpy(r + i, (char *)operands + rows[warp * 32 + i * 8 + lane / 4] + lane % 4 * 4, 4);
  wait_for(warp, 32);
}
#endif
static void nearer(const void *p) { (void)*(volatile const char *)p; }  // it is there
// Blocks come one after the other, so none can wait: a launch is made twice, and what others make later is a zero in the
// first, whose results are nobody's.
static u32 expected_tag;
static bool rehearsal;
static void hand_over(u64 *to, float v, u32 tag) { if (tag != expected_tag) abort(); *to = (u64)tag << 32 | bits(v); }
static u64 handed(const u64 *from) {
  if (*from >> 32 == expected_tag) return *from;
  if (!rehearsal) abort();  // nobody has made it
  return (u64)expected_tag << 32;
}
static void __trap() { abort(); }
static thread_local void (*entered)();
static void fiber() { entered(); ended[current] = true; _longjmp(scheduler, 1); }
template <class F> static thread_local F *call_of_block;
template <class F> static void enter() { (*call_of_block<F>)(); }
static bool go_on(int i, char *stacks) {  // until it waits or has ended; whether it has
  if (ended[i]) return true;
  if (group_of[i] >= 0 && round_[group_of[i]] == round_of[i]) return false;
  current = i;
  threadIdx = {(u32)i, 0, 0};
  if (_setjmp(scheduler)) return ended[current];
  if (group_of[i] >= 0) _longjmp(fibers[i], 1);
  ucontext_t first;
  getcontext(&first);
  first.uc_stack.ss_sp = stacks + ((u64)i << 16); first.uc_stack.ss_size = 1 << 16; first.uc_link = 0;
  makecontext(&first, fiber, 0);
  setcontext(&first);
  abort();
}
template <class F> static void run_block(Place block, F call) {
  static thread_local std::unique_ptr<char[]> stacks(new char[(u64)MOST_THREADS << 16]);  // not touched: that took longer
  const int threads = blockDim.x;
  call_of_block<F> = &call;
  entered = enter<F>;
  blockIdx = block;
  for (int i = 0; i < threads; i++) { ended[i] = false; group_of[i] = -1; }
  for (int left = threads; left;) {
    left = 0;
    for (int i = 0; i < threads; i++) left += !go_on(i, stacks.get());
  }
}
template <class F> static void launch(const int *grid, int threads, F call, int together = 1) {
  gridDim = {(u32)grid[0], (u32)grid[1], (u32)grid[2]}; blockDim = {(u32)threads, 1, 1};
  for (u32 z = 0; z < gridDim.z; z++) for (u32 y = 0; y < gridDim.y; y++) for (u32 x = 0; x < gridDim.x; x += together) {
    if (together == 1) { run_block({x, y, z}, call); continue; }
    std::barrier<> all(together);
    cluster = &all;
    std::vector<std::thread> blocks;
    for (int i = 0; i < together; i++)
      blocks.emplace_back([=, &all] {
        shared_of[i] = (char *)operands;
        all.arrive_and_wait();
        run_block({x + i, y, z}, call);
        all.arrive_and_wait();  // a block's memory is there until nobody reads it
      });
    for (auto &block : blocks) block.join();
  }
}

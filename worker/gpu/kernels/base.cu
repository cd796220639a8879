// What every kernel here stands on. No includes: NVRTC needs no header path. Compiled for one model, whose sizes are
// macros (compiler.py): HEAD_DIM, GROUP (query heads a KV head), KV_HEADS, HEADS, BLOCK (tokens a KV block), FP32, INTERLEAVED.
// An `elt` is what weights, activations and KV are kept in: float, or bfloat16 as its bits. Sums are always float.
typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;
#define INF __int_as_float(0x7f800000)
#define LOG2E 1.4426950408889634f
#define KERNEL extern "C" __global__ void

__device__ __forceinline__ float low_half(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float high_half(u32 v) { return __uint_as_float(v & 0xffff0000u); }
__device__ __forceinline__ u32 pack(float a, float b) {  // a in the low half
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(b), "f"(a));
  return r;
}

__device__ __forceinline__ uint4 stream16(const void *p) {  // 16 bytes that are read once: kept out of L1
  uint4 r;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(p));
  return r;
}
__device__ __forceinline__ void ask_l2(const void *p, u32 bytes) {  // a multiple of 16 of them, for a later read
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes));
}
__device__ __forceinline__ void nearer(const void *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }  // a line

// A number and its tag from one block to others of the same kernel, in one piece: who sees the tag has the number.
__device__ __forceinline__ void hand_over(u64 *to, float v, u32 tag) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"((u64)tag << 32 | __float_as_uint(v)) : "memory");
}
__device__ __forceinline__ u64 handed(const u64 *from) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
}
__device__ __forceinline__ float exp2_fast(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  return v;
}
// Sum over the block; every thread gets it. part: [32] of shared memory that nobody reads meanwhile.
__device__ __forceinline__ float block_sum(float v, float *part) {
  v = warp_sum(v);
  if (!(threadIdx.x & 31)) part[threadIdx.x >> 5] = v;
  __syncthreads();
  float s = 0;
  for (int w = 0; w < (blockDim.x + 31) / 32; w++) s += part[w];
  return s;
}
__device__ __forceinline__ float silu(float g) { return g / (1.f + __expf(-g)); }

// Blocks of a cluster see each other's shared memory, between two of these: the first says that all is written, the second
// that all is read.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ float of_block(const float *p, int rank) {  // what lies at this block's p in that one
  u32 there;
  float v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(p)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(there) : "memory");
  return v;
}

// Copies to shared memory that go on by themselves. `group_copies` ends a group; `copies_left` waits until only so many of
// the thread's groups are under way, and what it copied itself in the others may be read.
__device__ __forceinline__ void copy16(u32 to, const void *from, int bytes = 16) {  // the rest of the 16 becomes zero
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void group_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void copies_left() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ void unpack8(uint4 v, float *f) {
  f[0] = low_half(v.x); f[1] = high_half(v.x); f[2] = low_half(v.y); f[3] = high_half(v.y);
  f[4] = low_half(v.z); f[5] = high_half(v.z); f[6] = low_half(v.w); f[7] = high_half(v.w);
}
__device__ __forceinline__ void load8(const float *p, float *f) {
  float4 a = *(const float4 *)p, b = *(const float4 *)(p + 4);
  f[0] = a.x; f[1] = a.y; f[2] = a.z; f[3] = a.w; f[4] = b.x; f[5] = b.y; f[6] = b.z; f[7] = b.w;
}
__device__ __forceinline__ void store8(float *p, const float *f) {
  *(float4 *)p = make_float4(f[0], f[1], f[2], f[3]);
  *(float4 *)(p + 4) = make_float4(f[4], f[5], f[6], f[7]);
}
__device__ __forceinline__ void load8(const u16 *p, float *f) { unpack8(*(const uint4 *)p, f); }
__device__ __forceinline__ void store8(u16 *p, const float *f) {
  *(uint4 *)p = make_uint4(pack(f[0], f[1]), pack(f[2], f[3]), pack(f[4], f[5]), pack(f[6], f[7]));
}
__device__ __forceinline__ float value(float v) { return v; }
__device__ __forceinline__ float value(u16 v) { return __uint_as_float((u32)v << 16); }
#if FP32
typedef float elt;
struct raw8 { uint4 a, b; };  // eight elements, not yet widened
__device__ __forceinline__ elt narrow(float v) { return v; }
__device__ __forceinline__ raw8 fetch8(const elt *p) { return {*(const uint4 *)p, *(const uint4 *)(p + 4)}; }
__device__ __forceinline__ void copy8(raw8 *to, const elt *p) {
  copy16(shared_address(&to->a), p);
  copy16(shared_address(&to->b), p + 4);
}
__device__ __forceinline__ void widen8(raw8 r, float *f) {
  f[0] = __uint_as_float(r.a.x); f[1] = __uint_as_float(r.a.y); f[2] = __uint_as_float(r.a.z); f[3] = __uint_as_float(r.a.w);
  f[4] = __uint_as_float(r.b.x); f[5] = __uint_as_float(r.b.y); f[6] = __uint_as_float(r.b.z); f[7] = __uint_as_float(r.b.w);
}
#else
typedef u16 elt;
typedef uint4 raw8;
__device__ __forceinline__ elt narrow(float v) { return (u16)(pack(v, 0.f) & 0xffff); }
__device__ __forceinline__ raw8 fetch8(const elt *p) { return *(const uint4 *)p; }
__device__ __forceinline__ void copy8(raw8 *to, const elt *p) { copy16(shared_address(to), p); }
__device__ __forceinline__ void widen8(raw8 r, float *f) { unpack8(r, f); }

// Tensor cores and what feeds them. Addresses are of shared memory.
__device__ __forceinline__ void ldmatrix4(u32 at, u32 *r) {  // four 8 x 8 matrices; a lane says where one of their rows is
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void multiply(float *d, const u32 *a, u32 b0, u32 b1) {  // d[16][8] += a[16][16] b[16][8]
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

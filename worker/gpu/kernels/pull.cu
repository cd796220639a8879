// Copies from a trainer's memory, on this GPU or on another one, into a slot of this rank's: one launch for a version.
// table: [gridDim.x][3] source, where it goes from `slot` on, bytes: pinned host memory. 256 threads.
// It waits for the kernel before it and lets none begin before its own end.
#define THREADS 256
#define AT_ONCE 8
template <typename Word> __device__ void words(const void *from, void *to, unsigned long long count) {
  const Word *source = (const Word *)from;
  Word *target = (Word *)to;
  for (unsigned long long first = threadIdx.x; first < count; first += THREADS * AT_ONCE) {
    Word held[AT_ONCE];
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++)
      if (first + n * THREADS < count) held[n] = __ldcs(source + first + n * THREADS);
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++)
      if (first + n * THREADS < count) __stcs(target + first + n * THREADS, held[n]);
  }
}
extern "C" __global__ void pull(const unsigned long long *table, unsigned long long slot) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  __shared__ unsigned long long row[3];  // one read over the bus, not one for each warp
  if (threadIdx.x < 3) row[threadIdx.x] = table[3 * blockIdx.x + threadIdx.x];
  __syncthreads();
  const unsigned long long source = row[0], target = slot + row[1], bytes = row[2], low = source | target | bytes;
  if (!(low & 15)) words<uint4>((const void *)source, (void *)target, bytes / 16);
  else if (!(low & 3)) words<unsigned>((const void *)source, (void *)target, bytes / 4);
  else words<unsigned short>((const void *)source, (void *)target, bytes / 2);
}

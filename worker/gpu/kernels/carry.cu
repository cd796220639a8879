// What a step needs of the host: words of pinned host memory, which a copy engine is not asked for, since it may have a
// version's weights to copy first. grid (at most), 256 threads.
// It waits for the kernel before it and lets none begin before its own end: what follows may read the words at once.
extern "C" __global__ void carry(unsigned *to, const volatile unsigned *from, int words) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < words; i += gridDim.x * blockDim.x) to[i] = from[i];
  __threadfence();
}

// Programmatic dependent launch: a kernel's blocks get their place as soon as all blocks of the kernel before are at
// `follow` and leave room, and wait there until that kernel is through. So several kernels may be on the device, the first
// of them at work and the others with their weights under way. Every kernel calls this, in every block: that makes
// "the one before is through" mean "all before are". Everything that they wrote may be read after it; before it only what
// no kernel of the step writes (weights, and in decode steps what the host sent and the cache up to the new token).
__device__ __forceinline__ void follow() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// What adapters add beside products, as launches of their own, and what makes a version ready. Compiled behind adapters.cu.

#define SHRINK(name, NORM) KERNEL __launch_bounds__(32 * WARPS) name(const void *x, const elt *weight, const Factors *table, int site, \
    int sites, const int *lists, float *between, float *squares, int rows, int stride, int columns) { \
    shrink<NORM>(x, weight, table, site, sites, lists, between, squares, rows, stride, columns); }
#define EXPAND(name, WHAT) KERNEL __launch_bounds__(OUTPUTS) name(const Factors *table, int site, int sites, const int *lists, \
    const float *between, const float *squares, int rows, int stride, int shares, int columns, float eps, const elt *gate_up, \
    const elt *bias, void *y, int n0, int n1, int n2) { \
    expand<WHAT>(table, site, sites, lists, between, squares, rows, stride, shares, columns, eps, gate_up, bias, y, n0, n1, n2); }
SHRINK(shrink_rows, false)
SHRINK(shrink_normed, true)
EXPAND(expand_STORE, STORE)
EXPAND(expand_ADD, ADD)
EXPAND(expand_GATE, GATE)

// A version as it came, in the dtype that is computed with: bfloat16 widened, or float rounded to nearest. grid (..), 256
// threads; count is a multiple of 8 but for the last of them.
#if FP32
typedef u16 other;
#else
typedef float other;
#endif
KERNEL __launch_bounds__(256) converted(const other *from, elt *to, u64 count) {
  follow();
  for (u64 i = (u64)(blockIdx.x * 256 + threadIdx.x) * 8; i < count; i += (u64)gridDim.x * 2048) {
    if (i + 8 <= count) {
      float f[8];
      load8(from + i, f);
      store8(to + i, f);
    } else
      for (u64 j = i; j < count; j++) to[j] = narrow(value(from[j]));
  }
}

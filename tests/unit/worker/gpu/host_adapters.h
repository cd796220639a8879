// Launches of the kernels that add adapters on the host, by C calls.
extern "C" void run_shrink(const int *grid, int threads, int normed, const void *x, const elt *weight, const Factors *table, int site, int sites,
    const int *lists, float *between, float *squares, int rows, int stride, int columns) {
  auto kernel = normed ? shrink_normed : shrink_rows;
  launch(grid, threads, [=] { kernel(x, weight, table, site, sites, lists, between, squares, rows, stride, columns); });
}
extern "C" void run_expand(const int *grid, int threads, int what, const Factors *table, int site, int sites, const int *lists,
    const float *between, const float *squares, int rows, int stride, int shares, int columns, float eps, const elt *gate_up,
    const elt *bias, void *y, int n0, int n1, int n2) {
  auto kernel = what == STORE ? expand_STORE : what == ADD ? expand_ADD : expand_GATE;
  launch(grid, threads, [=] { kernel(table, site, sites, lists, between, squares, rows, stride, shares, columns, eps, gate_up, bias, y,
                            n0, n1, n2); });
}
extern "C" void run_converted(const int *grid, int threads, const other *from, elt *to, u64 count) {
  launch(grid, threads, [=] { converted(from, to, count); });
}
#if !FP32
// A product that adds adapters itself; size: bytes of y.
extern "C" void run_product(const int *grid, int threads, int together, u64 size, decltype(&a_product) kernel, const u16 *w, const void *x,
    const u16 *weight, void *y, int rows, int T, float eps, const Factors *table, int site, int sites, const int *lists, u64 *between,
    int n0, int n1, int makers) {
  expected_tag = (u32)lists[2] * sites + site + 1;
  void *nobodys = malloc(size);
  memcpy(nobodys, y, size);
  for (rehearsal = true;; rehearsal = false) {
    void *to = rehearsal ? nobodys : y;
    launch(grid, threads, [=] { kernel(w, x, weight, to, rows, T, eps, table, site, sites, lists, between, n0, n1, makers); }, together);
    if (!rehearsal) break;
  }
  free(nobodys);
}
#endif

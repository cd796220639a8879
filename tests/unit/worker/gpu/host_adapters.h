// Launches of kernels/adapters.cu on the host, by C calls.
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

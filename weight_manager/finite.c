// Whether all elements are numbers: as fast as memory is read, where several passes of numpy's are not.
#include <stdint.h>

enum { BLOCK = 1 << 14 };  // elements between two looks at what was found

#define LOOK(name, element, exponent) \
    static int64_t name(const element *p, int64_t count) { \
        while (count > 0) { \
            int64_t n = count < BLOCK ? count : BLOCK; \
            element none = 0; \
            for (int64_t i = 0; i < n; i++) none |= (element)((p[i] & exponent) == exponent); \
            if (none) return 0; \
            p += n, count -= n; \
        } \
        return 1; \
    }

LOOK(wide, uint32_t, 0x7f800000)   // float32
LOOK(narrow, uint16_t, 0x7f80)     // bfloat16

// size: bytes of an element, 4 or 2; p lies at a multiple of it.
int64_t all_finite(const void *p, int64_t count, int64_t size) { return size == 4 ? wide(p, count) : narrow(p, count); }

// Of rows [start, start + size) in bytes, all inside of p and at multiples of the element's size: whether all are.
int64_t all_rows_finite(const void *p, const int64_t *starts, const int64_t *sizes, int64_t rows, int64_t size) {
    for (int64_t i = 0; i < rows; i++)
        if (!all_finite((const char *)p + starts[i], sizes[i] / size, size)) return 0;
    return 1;
}

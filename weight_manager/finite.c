// Whether all elements are numbers: as fast as memory is read, where several passes of numpy's are not.
#include <stddef.h>
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

// Rows [start, start + size) in bytes, all inside of p and at multiples of the element's size. digests: of each what `hash`
// says of it. Returns whether all elements are numbers, which is looked at while a row is in the cache.
int64_t prove_rows(const void *p, const int64_t *starts, const int64_t *sizes, uint64_t *digests, int64_t rows, int64_t size,
                   uint64_t (*hash)(const void *, size_t)) {
    int64_t finite = 1;
    for (int64_t i = 0; i < rows; i++) {
        const char *row = (const char *)p + starts[i];
        digests[i] = hash(row, sizes[i]);
        finite = finite && all_finite(row, sizes[i] / size, size);
    }
    return finite;
}

// xxh3-64 (seed 0) of many kilobytes, a few lines at a time: in between a core can wait for memory. The xxhash wheel has
// the same, but as one call that has the core to itself. After the specification of XXH3 by Yann Collet, "long inputs".
#include <stdint.h>
#include <string.h>

enum { STRIPE = 64, CHUNK = 1024, SECRET = 192 };  // 16 stripes to a chunk, after which the lanes are scrambled

static uint8_t secret[SECRET];  // the wheel's own

#if defined(__AVX512F__)
#include <immintrin.h>

static const uint64_t PRIME64[] = {0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
                                   0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5};
static const uint32_t PRIME32[] = {0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D};

typedef struct {
    __m512i lanes;
    const uint8_t *next;  // what has not been taken yet; a multiple of half a chunk from the first byte
    int odd;              // it is the second half of a chunk
} sum;

static inline void sum_begin(sum *s, const uint8_t *first) {
    s->lanes = _mm512_set_epi64(PRIME32[0], PRIME64[4], PRIME32[1], PRIME64[3], PRIME64[2], PRIME64[1], PRIME64[0],
                                PRIME32[2]);
    s->next = first, s->odd = 0;
}

static inline __m512i stripe(__m512i lanes, const uint8_t *p, const uint8_t *key) {
    __m512i data = _mm512_loadu_si512(p), keyed = _mm512_xor_si512(data, _mm512_loadu_si512(key));
    __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
    return _mm512_add_epi64(_mm512_add_epi64(lanes, product), _mm512_shuffle_epi32(data, 0x4e));  // neighbours swapped
}

static inline __m512i scrambled(__m512i lanes) {
    __m512i prime = _mm512_set1_epi64(PRIME32[0]);
    lanes = _mm512_xor_si512(lanes, _mm512_srli_epi64(lanes, 47));
    lanes = _mm512_xor_si512(lanes, _mm512_loadu_si512(secret + SECRET - STRIPE));
    __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(lanes, 32), prime);
    return _mm512_add_epi64(_mm512_mul_epu32(lanes, prime), _mm512_slli_epi64(high, 32));
}

// Half a chunk; more than that must follow.
static inline void sum_half(sum *s) {
    for (int i = 0; i < 8; i++) s->lanes = stripe(s->lanes, s->next + i * STRIPE, secret + (s->odd ? 64 : 0) + 8 * i);
    if (s->odd) s->lanes = scrambled(s->lanes);
    s->next += CHUNK / 2, s->odd ^= 1;
}

static inline uint64_t folded(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

// Of n bytes, at least a chunk, that end at `end`.
static uint64_t sum_end(sum *s, const uint8_t *end, uint64_t n) {
    while (end - s->next > CHUNK / 2) sum_half(s);
    const uint8_t *key = secret + (s->odd ? 64 : 0);
    for (; end - s->next > STRIPE; s->next += STRIPE, key += 8) s->lanes = stripe(s->lanes, s->next, key);
    s->lanes = stripe(s->lanes, end - STRIPE, secret + SECRET - STRIPE - 7);
    uint64_t lanes[8], keys[8], h = n * PRIME64[0];
    memcpy(lanes, &s->lanes, sizeof lanes);
    memcpy(keys, secret + 11, sizeof keys);
    for (int i = 0; i < 8; i += 2) h += folded(lanes[i] ^ keys[i], lanes[i + 1] ^ keys[i + 1]);
    h = (h ^ h >> 37) * 0x165667919E3779F9;
    return h ^ h >> 32;
}
#else  // nothing is summed on the way: the wheel's own keeps up
typedef struct {
    const uint8_t *next;
} sum;
static inline void sum_half(sum *s) { (void)s; }
#endif

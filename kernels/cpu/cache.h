/* How keys and values lie in the blocks of a cache, in bf16 or in 8 bits.

   A block of one key head holds its keys, then its values, each by 16 positions:
   keys    [block_size / 16][head_dim / 2][16 keys][2]
   values  [block_size / 16][head_dim / 16][16 keys / 2][16][2]
   Behind either, where they are of int8, stands a float for each position [block_size], which multiplies its
   numbers. */
#pragma once
#include "panels.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

enum kept { KEPT_BF16, KEPT_FP8, KEPT_INT8 };

/* key_scale, value_scale: they multiply numbers of fp8, and are 1 elsewhere. */
struct cache {
  char *blocks;
  int kv_heads, block_size, head_dim, kept;
  float key_scale, value_scale;
};

/* So many numbers of keys or values. */
INLINE size_t kept_bytes(const struct cache *cache, size_t numbers) {
  return numbers << (cache->kept == KEPT_BF16);
}

INLINE size_t tile_bytes(const struct cache *cache) {
  return kept_bytes(cache, (size_t)cache->block_size * cache->head_dim);
}

/* From a block's keys of one head to its values. */
INLINE size_t side_bytes(const struct cache *cache) {
  return tile_bytes(cache) + (cache->kept == KEPT_INT8) * (size_t)cache->block_size * 4;
}

/* A panel of keys, of those that `offset` in a block is among. */
INLINE char *keys_at(const struct cache *cache, int block, int offset, int head) {
  return cache->blocks + ((size_t)block * cache->kv_heads + head) * 2 * side_bytes(cache) +
         kept_bytes(cache, offset / PANEL * (size_t)PANEL * cache->head_dim);
}

/* The scale of a key of int8; its value's is a side behind. */
INLINE float *key_scale_at(const struct cache *cache, int block, int offset, int head) {
  return (float *)(keys_at(cache, block, 0, head) + tile_bytes(cache)) + offset;
}

typedef uint8_t vt __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int16_t vs __attribute__((vector_size(LANES * 2), aligned(1), may_alias));

/* fp8 (e4m3) has four bits of the exponent, whose bias is 7, and three of the mantissa. Its magnitudes below
   8 are multiples of 2^-9, and the last is no number. */
#define MOST_FP8 448.0f
#define NO_FP8 0x7f
static const bf16 small_fp8[8] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};

INLINE bf16 widen_fp8(uint8_t x) {
  int size = x & 0x7f, wide = size < 8 ? small_fp8[size] : (120 << 7) + (size << 4);
  return (size == NO_FP8 ? 0x7fc0 : wide) | (x & 0x80) << 8;
}

#if defined(__AVX2__)
/* 16 of them. `small`: the low bytes of small_fp8, then the high ones. */
INLINE __m256i widen_fp8_all(__m128i x, __m256i small) {
  __m256i wide = _mm256_cvtepi8_epi16(x), size = _mm256_and_si256(wide, _mm256_set1_epi16(0x7f));
  __m256i normal = _mm256_add_epi16(_mm256_slli_epi16(size, 4), _mm256_set1_epi16(120 << 7));
  __m256i bytes = _mm256_mullo_epi16(size, _mm256_set1_epi16(0x101)); /* for both bytes of a number */
  __m256i low = _mm256_shuffle_epi8(small, _mm256_or_si256(bytes, _mm256_set1_epi16(0x800)));
  __m256i is_small = _mm256_cmpgt_epi16(_mm256_set1_epi16(8), size);
  __m256i none = _mm256_cmpeq_epi16(size, _mm256_set1_epi16(NO_FP8));
  __m256i sign = _mm256_and_si256(wide, _mm256_set1_epi16((short)0x8000));
  return _mm256_or_si256(_mm256_blendv_epi8(normal, low, is_small), _mm256_or_si256(none, sign));
}
#endif

/* n numbers of fp8 become bf16, in the same order. n: a multiple of 16 */
INLINE void widen_fp8_panel(const uint8_t *from, bf16 *to, int n) {
#if defined(__AVX2__)
  __m128i apart = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
  __m128i bytes = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)small_fp8), apart);
  __m256i small = _mm256_broadcastsi128_si256(bytes);
  for (int i = 0; i < n; i += 16) {
    __m256i wide = widen_fp8_all(_mm_loadu_si128((const __m128i *)(from + i)), small);
    _mm256_storeu_si256((__m256i *)(to + i), wide);
  }
#else
  for (int i = 0; i < n; i++) to[i] = widen_fp8(from[i]);
#endif
}

/* The same of int8, which bf16 holds as they are. */
INLINE void widen_int8_panel(const uint8_t *from, bf16 *to, int n) {
  for (int i = 0; i < n; i += 2 * LANES) {
    vi pairs = __builtin_convertvector(*(const vs *)(from + i), vi);
    vu even = (vu)__builtin_convertvector(pairs << 24 >> 24, vf) >> 16;
    vu odd = (vu)__builtin_convertvector(pairs >> 8, vf);
    *(vu *)(to + i) = even | odd;
  }
}

/* To the nearest, ties to even; what is larger than the largest becomes that. NaN stays NaN. */
INLINE vt narrow_fp8(vf x) {
  const float magic = 16384.0f; /* 2^14: adding it rounds to a multiple of 2^-9, in the low bits */
  vu sign = (vu)x >> 24 & 0x80, none = (vu)(x != x) & NO_FP8;
  vf size = (vf)((vu)x & 0x7fffffff), most = (vf){} + MOST_FP8;
  size = if_less(most, size, most, size);
  vu rounded = (((vu)size + 0x7ffff + ((vu)size >> 20 & 1)) >> 20) - (120 << 3);
  vu small = (vu)(size + magic) - (vu)((vf){} + magic);
  vu code = (vu)if_less(size, (vf){} + 0x1p-6f, (vf)small, (vf)rounded);
  return __builtin_convertvector(((code & 0x7f) | none | sign), vt);
}

/* A row of a key or a value in 8 bits; returns what multiplies them. Of int8 the largest becomes 127, and a row
   with a number that is none gets such a scale. scale: of fp8 */
INLINE float narrow_row(const struct cache *cache, const bf16 *row, float scale, uint8_t *to) {
  const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, in the low bits */
  int n = cache->head_dim, is_int8 = cache->kept == KEPT_INT8;
  if (is_int8) {
    vf most = {}, spoilt = {};
    for (int i = 0; i < n; i += LANES) {
      vf x = widen_all(*(const vb *)(row + i)), size = (vf)((vu)x & 0x7fffffff);
      most = if_less(most, size, size, most);
      spoilt += x * 0;
    }
    scale = largest(most) / 127;
    scale = (scale == 0 ? 1 : scale) + sum_of(spoilt);
  }
  for (int i = 0; i < n; i += LANES) {
    vf x = widen_all(*(const vb *)(row + i)) / scale;
    *(vt *)(to + i) = is_int8 ? __builtin_convertvector((vu)(x + magic), vt) : narrow_fp8(x);
  }
  return scale;
}

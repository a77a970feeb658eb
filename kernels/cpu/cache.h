/* How keys and values lie in the blocks of a cache, in bf16 or in 8 bits.

   A block of one key head holds its keys, then its values, each by 16 positions:
   keys    [block_size / 16][head_dim / 2][16 keys][2]
   values  [block_size / 16][head_dim / 16][16 keys / 2][16][2]
   or in 8 bits
   keys    [block_size / 16][head_dim][16 keys]
   values  [block_size / 16][head_dim / 16][16 keys][16]
   Behind either, where they are of int8, stands a float for each position [block_size], which multiplies its
   numbers. */
#pragma once
#include "panels.h"

#define MOST_FP8 448.0f

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

/* A panel of 8 bits becomes one of bf16. */
INLINE void widen_panel(const uint8_t *from, const int kept, bf16 *to, int depth) {
  for (int i = 0; i < depth; i += 2, to += 2 * PANEL) {
    vu pairs[PARTS];
    widen_pairs(from + i * PANEL, kept, pairs);
    UNROLL for (int p = 0; p < PARTS; p++) *(vu *)(to + p * 2 * LANES) = pairs[p];
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

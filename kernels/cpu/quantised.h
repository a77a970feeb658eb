/* Products of int8 rows with weights of 8 or 4 bits: exact in int32, then scaled.

   A panel holds 16 columns: [depth / 4][16][4] int8. With 4 bits two such quadruples share bytes:
   [depth / 8][16][4], the first in the low nibbles, 8 added to each number. Each group of the inner
   dimension has a scale for every column, each row of the left side one for all. */
#pragma once
#include "tiles.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define MAX_GROUP 128 /* with 4 bits */

#if defined(__AVX512VNNI__)
/* The processor takes no sign on the left: 128 more, which the sums' start takes off again. */
#define OFFSET 128
INLINE vi multiply_add(vi sums, int32_t four, vi quads) {
  return (vi)_mm512_dpbusd_epi32((__m512i)sums, _mm512_set1_epi32(four ^ (int32_t)0x80808080),
                                 (__m512i)quads);
}
#elif defined(__AVX2__) && LANES == 8
#define OFFSET 0
/* |x| has no sign, the weight takes that of x: twice 127 * 127 fits into a pair's 16 bits. */
INLINE vi multiply_add(vi sums, int32_t four, vi quads) {
  __m256i left = _mm256_set1_epi32(four);
  __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(left), _mm256_sign_epi8((__m256i)quads, left));
  return sums + (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
#else
#define OFFSET 0
INLINE vi multiply_add(vi sums, int32_t four, vi quads) {
  UNROLL for (int e = 24; e >= 0; e -= 8)
    sums += ((quads << e) >> 24) * ((vi){} + (int8_t)(four >> (24 - e)));
  return sums;
}
#endif

/* sums[R][16] += x[R][depth] by a panel. */
INLINE void multiply_quads(const int R, const int8_t *x, size_t stride, const int8_t *panel, int depth,
                           int32_t *sums) {
  vi acc[ROWS][PARTS];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int p = 0; p < PARTS; p++) acc[r][p] = *(vi *)(sums + r * PANEL + p * LANES);
  for (int i = 0; i < depth; i += 4, panel += 4 * PANEL) {
    vi quads[PARTS];
    UNROLL for (int p = 0; p < PARTS; p++) quads[p] = *(const vi *)(panel + p * LANES * 4);
    UNROLL for (int r = 0; r < R; r++) {
      int32_t four;
      memcpy(&four, x + r * stride + i, 4);
      UNROLL for (int p = 0; p < PARTS; p++) acc[r][p] = multiply_add(acc[r][p], four, quads[p]);
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int p = 0; p < PARTS; p++) *(vi *)(sums + r * PANEL + p * LANES) = acc[r][p];
}

/* A group of 4 bits in 8. */
INLINE void unpack(const uint8_t *nibbles, int8_t *quads, int depth) {
  for (int i = 0; i < depth; i += 8, nibbles += 4 * PANEL, quads += 8 * PANEL)
    for (int j = 0; j < 4 * PANEL; j++) {
      quads[j] = (int8_t)((nibbles[j] & 15) - 8);
      quads[4 * PANEL + j] = (int8_t)((nibbles[j] >> 4) - 8);
    }
}

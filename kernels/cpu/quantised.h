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
#define SPAN 32       /* of the inner dimension: products with 4 bits add up within 16 */

/* Rows as products want them: numbers [rows][stride], of each row a scale, of each group a total. */
struct eighths {
  const int8_t *numbers;
  size_t stride;
  const float *scales;
  const int32_t *totals;
  int groups;
};

/* Four numbers of a row by those of each column. `run` sums up those of one SPAN; `fold` adds runs.
   OFFSET: what is added to the numbers of 8 bits where the processor takes none with a sign; the
   row's total, so many times, is taken off again. */
#if defined(__AVX512VNNI__)
#define OFFSET 128
INLINE vi multiply_nibbles(vi run, int32_t four, vi nibbles) {
  return (vi)_mm512_dpbusd_epi32((__m512i)run, (__m512i)nibbles, (__m512i)_mm512_set1_epi32(four));
}
INLINE vi fold(vi sums, vi run) { return sums + run; }
INLINE vi multiply_quads(vi sums, int32_t four, vi quads) {
  return multiply_nibbles(sums, four, quads ^ (int32_t)0x80808080);
}
#elif defined(__AVX2__) && LANES == 8
#define OFFSET 0
INLINE vi multiply_nibbles(vi run, int32_t four, vi nibbles) {
  __m256i pairs = _mm256_maddubs_epi16((__m256i)nibbles, _mm256_set1_epi32(four));
  return (vi)_mm256_add_epi16((__m256i)run, pairs);
}
INLINE vi fold(vi sums, vi run) {
  return sums + (vi)_mm256_madd_epi16((__m256i)run, _mm256_set1_epi16(1));
}
/* |weight| has no sign, x takes it: twice 127 * 127 fits into a pair's 16 bits. */
INLINE vi multiply_quads(vi sums, int32_t four, vi quads) {
  __m256i left = _mm256_sign_epi8(_mm256_set1_epi32(four), (__m256i)quads);
  return fold(sums, (vi)_mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)quads), left));
}
#else
#define OFFSET 0
INLINE vi multiply_quads(vi sums, int32_t four, vi quads) {
  UNROLL for (int e = 24; e >= 0; e -= 8)
    sums += ((quads << e) >> 24) * ((vi){} + (int8_t)(four >> (24 - e)));
  return sums;
}
INLINE vi multiply_nibbles(vi run, int32_t four, vi nibbles) { return multiply_quads(run, four, nibbles); }
INLINE vi fold(vi sums, vi run) { return sums + run; }
#endif

/* sums[R][16] += rows first.. of x by a group of a panel, `depth` deep from `from` on. */
INLINE void multiply_group(const int R, const int bits, const struct eighths *x, int first, int group,
                           int from, int depth, const char *panel, const bf16 *scales, float *sums) {
  vi acc[ROWS][PARTS] = {};
  for (int i = from; i < from + depth; i += SPAN) {
    vi run[ROWS][PARTS] = {};
    /* Unrolled, the runs would be put off until they fit no registers. */
    _Pragma("GCC unroll 1") for (int j = i; j < i + SPAN; j += 32 / bits, panel += 4 * PANEL) {
      vi quads[PARTS];
      UNROLL for (int p = 0; p < PARTS; p++) quads[p] = *(const vi *)(panel + p * LANES * 4);
      UNROLL for (int r = 0; r < R; r++) {
        const int8_t *row = x->numbers + (first + r) * x->stride + j;
        int32_t four, next;
        memcpy(&four, row, 4);
        if (bits == 8) {
          UNROLL for (int p = 0; p < PARTS; p++) acc[r][p] = multiply_quads(acc[r][p], four, quads[p]);
          continue;
        }
        memcpy(&next, row + 4, 4);
        UNROLL for (int p = 0; p < PARTS; p++) {
          run[r][p] = multiply_nibbles(run[r][p], four, quads[p] & 0x0f0f0f0f);
          run[r][p] = multiply_nibbles(run[r][p], next, quads[p] >> 4 & 0x0f0f0f0f);
        }
      }
    }
    if (bits == 4)
      UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int p = 0; p < PARTS; p++) acc[r][p] = fold(acc[r][p], run[r][p]);
  }
  UNROLL for (int r = 0; r < R; r++) {
    int32_t total = x->totals[(size_t)(first + r) * x->groups + group] * (bits == 8 ? OFFSET : 8);
    UNROLL for (int p = 0; p < PARTS; p++) {
      vf scale, *to = (vf *)(sums + (first + r) * PANEL + p * LANES);
      for (int j = 0; j < LANES; j++) scale[j] = widen(scales[p * LANES + j]);
      *to += __builtin_convertvector(acc[r][p] - total, vf) * (scale * x->scales[first + r]);
    }
  }
}

/* A group of 4 bits in 8. */
INLINE void unpack(const uint8_t *nibbles, int8_t *quads, int depth) {
  for (int i = 0; i < depth; i += 8, nibbles += 4 * PANEL, quads += 8 * PANEL)
    for (int j = 0; j < 4 * PANEL; j++) {
      quads[j] = (int8_t)((nibbles[j] & 15) - 8);
      quads[4 * PANEL + j] = (int8_t)((nibbles[j] >> 4) - 8);
    }
}

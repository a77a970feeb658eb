/* Products of int8 rows with weights of 8 or 4 bits (W8A8, W4A8): exact in int32, then scaled.

   A panel holds 16 columns: [depth / 4][16][4] int8. With 4 bits two such quadruples share bytes:
   [depth / 8][16][4], the first in the low nibbles, 8 added to each number unless the weight has mins.
   Each group of the inner dimension has a scale for every column, and where it has mins one of those, which
   is taken off each of its numbers; each row of the left side has one scale for all. */
#pragma once
#include "tiles.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define MAX_GROUP 128 /* with 4 bits */
/* Numbers of the inner dimension, which divide a group: products with 4 bits add up so many within 16. */
#define SPAN(bits) ((bits) == 4 ? 32 : 16)

/* Rows as products want them: numbers [rows][stride], of each row a scale, of each group a total. */
struct eighths {
  const int8_t *numbers;
  size_t stride;
  const float *scales;
  const int32_t *totals;
  int groups;
};

/* Four numbers of a row by those of each column. `run` sums up those of one span; `fold` adds runs.
   OFFSET: what is added to the numbers of 8 bits where the processor takes none with a sign; the
   row's total, so many times, is taken off again. */
#if defined(__AVX512VNNI__)
#define OFFSET 128
#define HAS_RUNS 0
INLINE vi multiply_nibbles(vi run, int32_t four, vi nibbles) {
  return (vi)_mm512_dpbusd_epi32((__m512i)run, (__m512i)nibbles, (__m512i)_mm512_set1_epi32(four));
}
INLINE vi multiply_quads(vi sums, int32_t four, vi quads) {
  return multiply_nibbles(sums, four, quads ^ (int32_t)0x80808080);
}
#elif defined(__AVX2__) && LANES == 8
#define OFFSET 0
#define HAS_RUNS 1
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
#define HAS_RUNS 0
INLINE vi multiply_quads(vi sums, int32_t four, vi quads) {
  UNROLL for (int e = 24; e >= 0; e -= 8)
    sums += ((quads << e) >> 24) * ((vi){} + (int8_t)(four >> (24 - e)));
  return sums;
}
INLINE vi multiply_nibbles(vi run, int32_t four, vi nibbles) { return multiply_quads(run, four, nibbles); }
#endif
#if !HAS_RUNS
INLINE vi fold(vi sums, vi run) { return sums + run; }
#endif

/* A group of columns that lie so far apart: `number` of its kind, `depth` deep from `from` on. */
struct group {
  const char *panel;
  const float *scales, *mins;
  size_t panel_apart, scales_apart;
  size_t ahead; /* bytes from it to what is multiplied next, and fetched meanwhile */
  int number, from, depth;
};

/* sums[R][WIDTH] += rows first.. of x by a group of columns. */
INLINE void multiply_group(const int R, const int bits, const struct eighths *x, int first,
                           struct part part, const struct group *group, float *sums) {
  vi acc[ROWS][COLUMNS][PARTS];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int c = 0; c < COLUMNS; c++)
      UNROLL for (int p = 0; p < PARTS; p++) acc[r][c][p] = (vi){};
  const char *panel = group->panel;
  for (int i = group->from; i < group->from + group->depth; i += SPAN(bits)) {
    vi run[ROWS][COLUMNS][PARTS];
    UNROLL for (int r = 0; r < R; r++)
      UNROLL for (int c = 0; c < COLUMNS; c++)
        UNROLL for (int p = 0; p < PARTS; p++) run[r][c][p] = (vi){};
    /* Unrolled, the runs would be put off until they fit no registers. */
    _Pragma("GCC unroll 1") for (int j = i; j < i + SPAN(bits); j += 32 / bits, panel += 4 * PANEL) {
      vi quads[COLUMNS][PARTS];
      UNROLL for (int c = 0; c < COLUMNS; c++) {
        const char *at = panel + c * group->panel_apart;
        fetch(group->panel + c * group->panel_apart + group->ahead, part, j - group->from);
        UNROLL for (int p = 0; p < PARTS; p++) quads[c][p] = *(const vi *)(at + p * LANES * 4);
      }
      UNROLL for (int r = 0; r < R; r++) {
        const int8_t *row = x->numbers + (first + r) * x->stride + j;
        int32_t four, next;
        memcpy(&four, row, 4);
        if (bits == 4) memcpy(&next, row + 4, 4);
        UNROLL for (int c = 0; c < COLUMNS; c++)
          UNROLL for (int p = 0; p < PARTS; p++) {
            if (bits == 8) {
              acc[r][c][p] = multiply_quads(acc[r][c][p], four, quads[c][p]);
              continue;
            }
            vi sum = HAS_RUNS ? run[r][c][p] : acc[r][c][p];
            sum = multiply_nibbles(sum, four, quads[c][p] & 0x0f0f0f0f);
            sum = multiply_nibbles(sum, next, quads[c][p] >> 4 & 0x0f0f0f0f);
            if (HAS_RUNS) run[r][c][p] = sum;
            else acc[r][c][p] = sum;
          }
      }
    }
    if (bits == 4 && HAS_RUNS)
      UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int c = 0; c < COLUMNS; c++)
          UNROLL for (int p = 0; p < PARTS; p++) acc[r][c][p] = fold(acc[r][c][p], run[r][c][p]);
  }
  UNROLL for (int r = 0; r < R; r++) {
    int32_t total = x->totals[(size_t)(first + r) * x->groups + group->number];
    int32_t offset = bits == 8 ? total * OFFSET : group->mins ? 0 : total * 8;
    UNROLL for (int c = 0; c < COLUMNS; c++)
      UNROLL for (int p = 0; p < PARTS; p++) {
        size_t column = c * group->scales_apart + p * LANES;
        vf scale = *(const vf *)(group->scales + column);
        vf *to = (vf *)(sums + (first + r) * WIDTH + c * PANEL + p * LANES);
        *to += __builtin_convertvector(acc[r][c][p] - offset, vf) * (scale * x->scales[first + r]);
        if (group->mins) *to -= *(const vf *)(group->mins + column) * (total * x->scales[first + r]);
      }
  }
}

/* The same for any number of rows and columns. */
static void multiply_group_rows(int rows, int columns, int bits, const struct eighths *x,
                                const struct group *group, float *sums) {
  struct group rest = *group;
  size_t bytes = (size_t)rest.depth * PANEL * bits / 8;
#define STEP8(R, row) multiply_group(R, 8, x, row, part_of(row, R, rows, bytes, rest.depth), &rest, sums)
#define STEP4(R, row) multiply_group(R, 4, x, row, part_of(row, R, rows, bytes, rest.depth), &rest, sums)
  for (int column = 0; column < columns; column += COLUMNS) {
    if (bits == 8) {
      BY_ROWS(rows, STEP8)
    } else {
      BY_ROWS(rows, STEP4)
    }
    rest.panel += COLUMNS * rest.panel_apart, rest.scales += COLUMNS * rest.scales_apart;
    if (rest.mins) rest.mins += COLUMNS * rest.scales_apart;
    sums += COLUMNS * PANEL;
  }
#undef STEP8
#undef STEP4
}

/* A group of 4 bits in 8; `offset` was added to its numbers. */
__attribute__((unused))
static inline void unpack(const uint8_t *nibbles, int8_t *quads, int depth, int offset) {
  for (int i = 0; i < depth; i += 8, nibbles += 4 * PANEL, quads += 8 * PANEL)
    for (int j = 0; j < 4 * PANEL; j++) {
      quads[j] = (int8_t)((nibbles[j] & 15) - offset);
      quads[4 * PANEL + j] = (int8_t)((nibbles[j] >> 4) - offset);
    }
}

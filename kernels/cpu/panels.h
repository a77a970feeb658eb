/* Vectors of the machine that this is compiled for, and products with panels.

   A panel holds 16 columns of a matrix in bf16, two neighbours of the inner dimension side by side:
   [depth / 2][16][2]; or in 8 bits, [depth][16], as keys and values may be kept. Weights, keys and values all
   lie in panels, and every product reads them. */
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint16_t bf16;

#define PANEL 16
#define WIDTH (2 * PANEL) /* columns that are multiplied together, at most */
#define MAX_HEAD 256 /* numbers of an attention head */
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

/* ROWS: how many rows of sums the registers hold beside what is multiplied; of COLUMNS panels each. */
#if defined(__AVX512F__)
#define LANES 16
#define ROWS 12
#define COLUMNS 2
#elif defined(__AVX2__)
#define LANES 8
#define ROWS 5
#elif defined(__ARM_NEON)
#define LANES 4
#define ROWS 4
#else
#define LANES 4
#define ROWS 4
#endif
#ifndef COLUMNS
#define COLUMNS 1
#endif
#define PARTS (PANEL / LANES)

typedef float vf __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

INLINE float widen(bf16 x) {
  uint32_t bits = (uint32_t)x << 16;
  float wide;
  memcpy(&wide, &bits, 4);
  return wide;
}

/* To the nearest, ties to even. NaN stays NaN. */
INLINE bf16 narrow(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return x == x ? rounded : (bits >> 16) | 0x40;
}

#if defined(__AVX2__)
#include <immintrin.h>
#endif

/* The same of a vector. The processor's own way makes zero of what is below 1.2e-38. */
typedef bf16 vb __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
INLINE vf widen_all(vb x) { return (vf)(__builtin_convertvector(x, vu) << 16); }
INLINE vb narrow_all(vf x) {
#if defined(__AVX512BF16__)
  return (vb)_mm512_cvtneps_pbh((__m512)x);
#else
  vu bits = (vu)x, number = (vu)(x == x), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return __builtin_convertvector((number & rounded) | (~number & ((bits >> 16) | 0x40)), vb);
#endif
}

/* The left side of a product: bf16 where the processor multiplies pairs of them, else float. */
#if defined(__AVX512BF16__)
#define MULTIPLIES_PAIRS 1
typedef bf16 left;
INLINE left left_of(bf16 x) { return x; }
INLINE void store_left(left *to, vf x) { *(vb *)to = narrow_all(x); }
#else
#define MULTIPLIES_PAIRS 0
typedef float left;
INLINE left left_of(bf16 x) { return widen(x); }
INLINE void store_left(left *to, vf x) { *(vf *)to = x; }
#endif

enum kept { KEPT_BF16, KEPT_FP8, KEPT_INT8 };
typedef int8_t vc __attribute__((vector_size(LANES), aligned(1), may_alias));

/* fp8 (e4m3) has four bits of the exponent, whose bias is 7, and three of the mantissa; the last magnitude is no
   number. It is widened to its number times FP8_UNIT: so it is a half's, whose bias is 15. */
#define NO_FP8 0x7f
#if defined(__F16C__)
#define FP8_UNIT 0x1p-8f
#else
#define FP8_UNIT 1.0f
#endif

/* A row of a panel of 8 bits, by LANES; int8 becomes what it is. */
INLINE void widen_row(const uint8_t *x, const int kept, vf *wide) {
#if defined(__F16C__)
  if (kept == KEPT_FP8) {
    __m256i signs = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)x)), size = _mm256_slli_epi16(signs, 9);
    __m256i half = _mm256_and_si256(_mm256_slli_epi16(signs, 7), _mm256_set1_epi16((short)0xbf80));
    half = _mm256_or_si256(half, _mm256_cmpeq_epi16(size, _mm256_set1_epi16((short)(NO_FP8 << 9))));
#if LANES == 16
    wide[0] = (vf)_mm512_cvtph_ps(half);
#else
    wide[0] = (vf)_mm256_cvtph_ps(_mm256_castsi256_si128(half));
    wide[1] = (vf)_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
#endif
    return;
  }
#endif
  UNROLL for (int p = 0; p < PARTS; p++) {
#if LANES == 8
    vi code = (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(x + p * LANES)));
#else
    vi code = __builtin_convertvector(*(const vc *)(x + p * LANES), vi);
#endif
    if (kept == KEPT_INT8) {
      wide[p] = __builtin_convertvector(code, vf);
      continue;
    }
    vi size = (code & 0x7f) << 20; /* below 8 << 20 the mantissa has no leading one */
    vf normal = (vf)(size + (120 << 23));
    vi small = size < 8 << 20, bits = (small & (vi)(normal + (normal - 0x1p-6f))) | (~small & (vi)normal);
    wide[p] = (vf)(bits | (size == NO_FP8 << 20) | (code & (int32_t)0x80000000));
  }
}

/* Two rows of such a panel as one of bf16 has them. */
INLINE void widen_pairs(const uint8_t *x, const int kept, vu *pairs) {
  vf even[PARTS], odd[PARTS];
  widen_row(x, kept, even);
  widen_row(x + PANEL, kept, odd);
  UNROLL for (int p = 0; p < PARTS; p++) pairs[p] = (vu)odd[p] | (vu)even[p] >> 16;
}

/* What stands on the right of a product: COLUMNS columns of `num` panels each, one below the other, of
   `depth`; a column begins `apart` numbers behind the last. next: as many that are multiplied later, to be
   fetched from memory meanwhile; with is_next_narrow their numbers have a byte each. kept: what the panels have,
   whose bytes are counted by two where they have 8 bits. */
struct right {
  const bf16 *const *panels, *const *next;
  int num, depth;
  size_t apart, next_apart;
  int is_next_narrow, kept;
};

/* One of several passes over what is on the right; each fetches as large a part of what is next. */
struct part {
  size_t first;
  int pace; /* bytes for each number along the inner dimension */
};

INLINE struct part part_of(int row, int count, int rows, size_t bytes, int depth) {
  return (struct part){bytes * row / rows, (int)(bytes / depth) * count / rows};
}
INLINE void fetch(const void *next, struct part part, int i) {
  __builtin_prefetch((const char *)next + part.first + (size_t)i * part.pace, 0, 2);
}

/* sums[COLUMNS][R][16] += x[R][num * depth] by columns of panels of a kind. A row's sums run over the inner
   dimension in order, so they do not depend on R. */
INLINE void multiply(const int R, const int kept, const left *x, size_t stride, const struct right *right,
                     struct part part, float *sums, size_t sums_stride, size_t sums_apart) {
  vf acc[ROWS][COLUMNS][PARTS];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int c = 0; c < COLUMNS; c++)
      UNROLL for (int p = 0; p < PARTS; p++)
        acc[r][c][p] = *(vf *)(sums + c * sums_apart + r * sums_stride + p * LANES);
  for (int s = 0; s < right->num; s++, x += right->depth) {
    const bf16 *panel = right->panels[s];
    for (int i = 0; i < right->depth; i += 2, panel += kept == KEPT_BF16 ? 2 * PANEL : PANEL) {
      UNROLL for (int c = 0; c < COLUMNS; c++)
        fetch(right->next[s] + c * right->next_apart, part, i);
#if MULTIPLIES_PAIRS
      __m512bh pairs[COLUMNS];
      UNROLL for (int c = 0; c < COLUMNS; c++) {
        const bf16 *from = panel + c * right->apart;
        vu wide[PARTS];
        if (kept != KEPT_BF16) widen_pairs((const uint8_t *)from, kept, wide);
        pairs[c] = kept == KEPT_BF16 ? (__m512bh)_mm512_loadu_si512(from) : (__m512bh)wide[0];
      }
      UNROLL for (int r = 0; r < R; r++) {
        int32_t pair;
        memcpy(&pair, x + r * stride + i, 4);
        __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
        UNROLL for (int c = 0; c < COLUMNS; c++)
          acc[r][c][0] = (vf)_mm512_dpbf16_ps((__m512)acc[r][c][0], both, pairs[c]);
      }
#else
      vf even[COLUMNS][PARTS], odd[COLUMNS][PARTS];
      UNROLL for (int c = 0; kept != KEPT_BF16 && c < COLUMNS; c++) {
        const uint8_t *from = (const uint8_t *)(panel + c * right->apart);
        widen_row(from, kept, even[c]);
        widen_row(from + PANEL, kept, odd[c]);
      }
      UNROLL for (int c = 0; kept == KEPT_BF16 && c < COLUMNS; c++)
        UNROLL for (int p = 0; p < PARTS; p++) {
          vi pairs = *(const vi *)(panel + c * right->apart + p * LANES * 2);
          even[c][p] = (vf)(pairs << 16);
          odd[c][p] = (vf)(pairs & (int32_t)0xffff0000);
        }
      UNROLL for (int r = 0; r < R; r++) {
        float first = x[r * stride + i], second = x[r * stride + i + 1];
        UNROLL for (int c = 0; c < COLUMNS; c++) {
          UNROLL for (int p = 0; p < PARTS; p++) acc[r][c][p] += first * even[c][p];
          UNROLL for (int p = 0; p < PARTS; p++) acc[r][c][p] += second * odd[c][p];
        }
      }
#endif
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int c = 0; c < COLUMNS; c++)
      UNROLL for (int p = 0; p < PARTS; p++)
        *(vf *)(sums + c * sums_apart + r * sums_stride + p * LANES) = acc[r][c][p];
}

/* STEP(R, row) for all rows from 0 on, R of them at a time, each R a constant. Two halves beat a
   whole and a bit. */
#if ROWS >= 12
#define MORE_STEPS(STEP) \
  ONE_STEP(STEP, 5) ONE_STEP(STEP, 6) ONE_STEP(STEP, 7) ONE_STEP(STEP, 8) ONE_STEP(STEP, 9) \
  ONE_STEP(STEP, 10) ONE_STEP(STEP, 11) ONE_STEP(STEP, 12)
#elif ROWS >= 5
#define MORE_STEPS(STEP) ONE_STEP(STEP, 5)
#else
#define MORE_STEPS(STEP)
#endif
#define ONE_STEP(STEP, R) case R: STEP(R, row); break;
#define BY_ROWS(rows, STEP)                                                                         \
  for (int row = 0, count; row < (rows); row += count) {                                            \
    int left_over = (rows) - row;                                                                   \
    count = left_over <= ROWS ? left_over : left_over < 2 * ROWS ? (left_over + 1) / 2 : ROWS;      \
    switch (count) {                                                                                \
      ONE_STEP(STEP, 1) ONE_STEP(STEP, 2) ONE_STEP(STEP, 3) ONE_STEP(STEP, 4) MORE_STEPS(STEP)      \
    }                                                                                               \
  }

/* `multiply` for any number of rows: where there are no tiles. */
__attribute__((unused))
static void multiply_rows(int rows, const left *x, size_t stride, const struct right *right, float *sums,
                          size_t sums_stride, size_t sums_apart) {
  size_t bytes = (size_t)right->depth * PANEL * 2 >> right->is_next_narrow;
#define STEP(KEPT, R, row)                                                                         \
  multiply(R, KEPT, x + (row) * stride, stride, right, part_of(row, R, rows, bytes, right->depth), \
           sums + (row) * sums_stride, sums_stride, sums_apart)
#define STEP_BF16(R, row) STEP(KEPT_BF16, R, row)
#define STEP_FP8(R, row) STEP(KEPT_FP8, R, row)
#define STEP_INT8(R, row) STEP(KEPT_INT8, R, row)
  if (right->kept == KEPT_FP8) { BY_ROWS(rows, STEP_FP8) }
  else if (right->kept == KEPT_INT8) { BY_ROWS(rows, STEP_INT8) }
  else { BY_ROWS(rows, STEP_BF16) }
#undef STEP
#undef STEP_BF16
#undef STEP_FP8
#undef STEP_INT8
}

/* x where a < b */
INLINE vf if_less(vf a, vf b, vf x, vf otherwise) {
#if LANES == 16
  __mmask16 less = _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ);
  return (vf)_mm512_mask_blend_ps(less, (__m512)otherwise, (__m512)x);
#else
  vi less = a < b;
  return (vf)((less & (vi)x) | (~less & (vi)otherwise));
#endif
}

/* e to the x, within two units of the last place; nothing below -87, minus infinity included. x is at
   most 88. Cephes' polynomial on the fraction of x / ln 2, the integer put into the exponent. */
INLINE vf exponential(vf x) {
  const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, in the low bits */
  vf shifted = x * 1.44269504f + magic, whole = shifted - magic;
  vf rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
  vf sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
  return if_less(x, (vf){} - 87.0f, (vf){}, sum * (vf)(((vu)shifted << 23) + (127 << 23)));
}

#if LANES == 16
INLINE float largest(vf x) { return _mm512_reduce_max_ps((__m512)x); }
INLINE float sum_of(vf x) { return _mm512_reduce_add_ps((__m512)x); }
#else
INLINE float largest(vf x) {
  float most = x[0];
  for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
  return most;
}

INLINE float sum_of(vf x) {
  float sum = 0;
  for (int i = 0; i < LANES; i++) sum += x[i];
  return sum;
}
#endif

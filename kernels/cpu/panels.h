/* Vectors of the machine that this is compiled for, and products with panels.

   A panel holds 16 columns of a matrix in bf16, two neighbours of the inner dimension side by side:
   [depth / 2][16][2]. Weights, keys and values all lie in panels, and every product reads them. */
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef uint16_t bf16;

#define PANEL 16
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

/* ROWS: how many rows of sums the registers hold beside what is multiplied. */
#if defined(__AVX512F__)
#define LANES 16
#define ROWS 12
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
#define PARTS (PANEL / LANES)

typedef float vf __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

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

/* The left side of a product: bf16 where the processor multiplies pairs of them, else float. */
#if defined(__AVX512BF16__)
#include <immintrin.h>
#define MULTIPLIES_PAIRS 1
typedef bf16 left;
INLINE left to_left(float x) { return narrow(x); }
INLINE left left_of(bf16 x) { return x; }
#else
#define MULTIPLIES_PAIRS 0
typedef float left;
INLINE left to_left(float x) { return x; }
INLINE left left_of(bf16 x) { return widen(x); }
#endif

/* sums[R][16] += x[R][num * depth] by `num` panels of `depth` each, one below the other.
   A row's sums run over the inner dimension in order, so they do not depend on R. */
INLINE void multiply(const int R, const left *x, size_t stride, const bf16 *const *panels, int num,
                     int depth, float *sums, size_t sums_stride) {
  vf acc[ROWS][PARTS];
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int p = 0; p < PARTS; p++) acc[r][p] = *(vf *)(sums + r * sums_stride + p * LANES);
  for (int s = 0; s < num; s++, x += depth) {
    const bf16 *panel = panels[s];
    for (int i = 0; i < depth; i += 2, panel += 2 * PANEL) {
#if MULTIPLIES_PAIRS
      __m512bh pairs = (__m512bh)_mm512_loadu_si512(panel);
      UNROLL for (int r = 0; r < R; r++) {
        int32_t pair;
        memcpy(&pair, x + r * stride + i, 4);
        acc[r][0] = (vf)_mm512_dpbf16_ps((__m512)acc[r][0], (__m512bh)_mm512_set1_epi32(pair), pairs);
      }
#else
      vf even[PARTS], odd[PARTS];
      UNROLL for (int p = 0; p < PARTS; p++) {
        vi pairs = *(const vi *)(panel + p * LANES * 2);
        even[p] = (vf)(pairs << 16);
        odd[p] = (vf)(pairs & (int32_t)0xffff0000);
      }
      UNROLL for (int r = 0; r < R; r++) {
        float first = x[r * stride + i], second = x[r * stride + i + 1];
        UNROLL for (int p = 0; p < PARTS; p++) acc[r][p] += first * even[p];
        UNROLL for (int p = 0; p < PARTS; p++) acc[r][p] += second * odd[p];
      }
#endif
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int p = 0; p < PARTS; p++) *(vf *)(sums + r * sums_stride + p * LANES) = acc[r][p];
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

/* `multiply` for any number of rows. */
static void multiply_rows(int rows, const left *x, size_t stride, const bf16 *const *panels, int num,
                          int depth, float *sums, size_t sums_stride) {
#define STEP(R, row) \
  multiply(R, x + (row) * stride, stride, panels, num, depth, sums + (row) * sums_stride, sums_stride)
  BY_ROWS(rows, STEP)
#undef STEP
}

INLINE vf choose(vi chosen, vf x, vf otherwise) {
  return (vf)((chosen & (vi)x) | (~chosen & (vi)otherwise));
}

/* e to the x, within two units of the last place; nothing below -87, minus infinity included.
   Cephes' polynomial on the fraction of x / ln 2, the integer put into the exponent. */
INLINE vf exponential(vf x) {
  vi vanishes = x < -87.0f;
  vf bounded = choose(x < 88.0f, choose(vanishes, (vf){}, x), (vf){} + 88.0f);
  const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
  vf shifted = bounded * 1.44269504f + magic, whole = shifted - magic;
  vf rest = bounded - whole * 0.693359375f + whole * 2.12194440e-4f;
  vf sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
  vi scale = ((vi)shifted - (vi)((vf){} + magic) + 127) << 23;
  return choose(vanishes, (vf){}, sum * (vf)scale);
}

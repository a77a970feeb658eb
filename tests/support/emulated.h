/* AVX-512 bf16 and, with -DEMULATED_TILES, AMX in plain C: the same source runs on any x86.

   Numbers follow Intel's manual in all but the order of sums within a pair. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#undef __AVX512F__
#undef __AVX512BF16__
#undef __AVX512VNNI__
#define __AVX512F__ 1
#define __AVX512BF16__ 1
#define __AVX512VNNI__ 1

typedef float emulated_sums __attribute__((vector_size(64)));
typedef uint32_t emulated_pairs __attribute__((vector_size(64), aligned(2), may_alias));

#define __m512 emulated_sums
#define __m512bh emulated_pairs
#define _mm512_loadu_si512(at) (*(const emulated_pairs *)(at))
#define _mm512_set1_epi32(pair) ((emulated_pairs){} + (uint32_t)(pair))
#define _mm512_dpbf16_ps(sums, x, y)                                     \
  ((sums) + (emulated_sums)((x) << 16) * (emulated_sums)((y) << 16) +    \
   (emulated_sums)((x) & 0xffff0000) * (emulated_sums)((y) & 0xffff0000))

typedef int32_t emulated_integers __attribute__((vector_size(64)));
#define __m512i emulated_integers
#define _mm512_dpbusd_epi32(sums, x, y) emulated_multiply_quads(sums, (emulated_integers)(x), y)
static inline emulated_integers emulated_multiply_quads(emulated_integers sums, emulated_integers x,
                                                        emulated_integers y) {
  for (int e = 24; e >= 0; e -= 8) sums += ((x >> (24 - e)) & 255) * ((y << e) >> 24);
  return sums;
}

static inline float emulated_reduce_max(emulated_sums x) {
  float most = x[0];
  for (int i = 1; i < 16; i++) most = x[i] > most ? x[i] : most;
  return most;
}
static inline float emulated_reduce_add(emulated_sums x) {
  float sum = 0;
  for (int i = 0; i < 16; i++) sum += x[i];
  return sum;
}
typedef uint16_t emulated_halves __attribute__((vector_size(32)));
static inline emulated_halves emulated_narrow(emulated_sums x) {
  emulated_halves narrow;
  for (int i = 0; i < 16; i++) {
    uint32_t bits;
    float number = x[i];
    memcpy(&bits, &number, 4);
    narrow[i] = number == number ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : bits >> 16 | 0x40;
  }
  return narrow;
}
#define _mm512_cvtneps_pbh(x) emulated_narrow(x)
static inline uint32_t emulated_less(emulated_sums x, emulated_sums y) {
  uint32_t mask = 0;
  for (int i = 0; i < 16; i++) mask |= (uint32_t)(x[i] < y[i]) << i;
  return mask;
}
static inline emulated_sums emulated_blend(uint32_t mask, emulated_sums x, emulated_sums y) {
  for (int i = 0; i < 16; i++)
    if (mask >> i & 1) x[i] = y[i];
  return x;
}
static inline emulated_sums emulated_halves_widened(__m256i x) {
  __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(x)), high = _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1));
  emulated_sums wide;
  memcpy(&wide, &low, 32), memcpy((char *)&wide + 32, &high, 32);
  return wide;
}
#define _mm512_cvtph_ps(x) emulated_halves_widened(x)
#define _mm512_cmp_ps_mask(x, y, less) emulated_less(x, y)
#define _mm512_mask_blend_ps(mask, x, y) emulated_blend(mask, x, y)
#define _mm512_reduce_max_ps(x) emulated_reduce_max(x)
#define _mm512_reduce_add_ps(x) emulated_reduce_add(x)

#ifdef EMULATED_TILES
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
#define syscall(...) 0

static _Thread_local struct {
  uint8_t config[64], tiles[8][16][64];
} emulated;

#define emulated_rows(t) (emulated.config[48 + (t)])
#define emulated_bytes(t) (((uint16_t *)(emulated.config + 16))[t])

static inline void emulated_load(int t, const void *from, size_t stride) {
  for (int r = 0; r < emulated_rows(t); r++)
    memcpy(emulated.tiles[t][r], (const char *)from + r * stride, emulated_bytes(t));
}

static inline void emulated_store(int t, void *to, size_t stride) {
  for (int r = 0; r < emulated_rows(t); r++)
    memcpy((char *)to + r * stride, emulated.tiles[t][r], emulated_bytes(t));
}

static inline float emulated_widen(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float wide;
  memcpy(&wide, &bits, 4);
  return wide;
}

static inline void emulated_multiply(int sums, int x, int y) {
  for (int r = 0; r < emulated_rows(sums); r++)
    for (int k = 0; k < emulated_bytes(x) / 4; k++)
      for (int c = 0; c < emulated_bytes(sums) / 4; c++)
        for (int e = 0; e < 2; e++)
          ((float *)emulated.tiles[sums][r])[c] +=
              emulated_widen(((uint16_t *)emulated.tiles[x][r])[2 * k + e]) *
              emulated_widen(((uint16_t *)emulated.tiles[y][k])[2 * c + e]);
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
static inline void emulated_multiply8(int sums, int x, int y) {
  for (int r = 0; r < emulated_rows(sums); r++)
    for (int k = 0; k < emulated_bytes(x) / 4; k++)
      for (int c = 0; c < emulated_bytes(sums) / 4; c++)
        for (int e = 0; e < 4; e++)
          ((int32_t *)emulated.tiles[sums][r])[c] +=
              (int8_t)emulated.tiles[x][r][4 * k + e] * (int8_t)emulated.tiles[y][k][4 * c + e];
}

#undef _tile_dpbssd
#undef _tile_zero
#undef _tile_stream_loadd
#define _tile_dpbssd(sums, x, y) emulated_multiply8(sums, x, y)
#define _tile_loadconfig(from) memcpy(emulated.config, from, 64)
#define _tile_release() memset(&emulated, 0, sizeof emulated)
#define _tile_zero(t) memset(emulated.tiles[t], 0, sizeof emulated.tiles[t])
#define _tile_loadd(t, from, stride) emulated_load(t, from, stride)
#define _tile_stream_loadd(t, from, stride) emulated_load(t, from, stride)
#define _tile_stored(t, to, stride) emulated_store(t, to, stride)
#define _tile_dpbf16ps(sums, x, y) emulated_multiply(sums, x, y)
#endif

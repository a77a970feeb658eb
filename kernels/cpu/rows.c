/* What a decoder does to rows between its products. A row's bits depend on that row alone. */
#include "panels.h"

#define FEW 32768 /* so many numbers are worth no second thread */

/* x [n] * weight / rms, in float32 -> out */
INLINE void normalise(const bf16 *x, const bf16 *weight, int n, float eps, float *out) {
  vf squares = {};
  int i = 0;
  for (; i + LANES <= n; i += LANES) {
    for (int j = 0; j < LANES; j++) out[i + j] = widen(x[i + j]);
    squares += *(vf *)(out + i) * *(vf *)(out + i);
  }
  float sum = 0;
  for (int j = 0; j < LANES; j++) sum += squares[j];
  for (; i < n; i++) {
    out[i] = widen(x[i]);
    sum += out[i] * out[i];
  }
  float scale = 1.0f / sqrtf(sum / n + eps);
  for (i = 0; i < n; i++) out[i] *= scale * widen(weight[i]);
}

#define WIDEST 16384

/* x, out [m, n]; n at most 16384 */
void rms_norm(const bf16 *x, const bf16 *weight, bf16 *out, int m, int n, float eps) {
#pragma omp parallel for schedule(static) if ((size_t)m * n > FEW)
  for (int r = 0; r < m; r++) {
    float row[WIDEST];
    normalise(x + (size_t)r * n, weight, n, eps, row);
    for (int i = 0; i < n; i++) out[(size_t)r * n + i] = narrow(row[i]);
  }
}

/* Queries and keys are normalised (if a weight is given) and rotated, keys and values stored.

   qkv       [tokens, heads + 2 * kv_heads, head_dim]
   cos, sin  [tokens, head_dim]; sin's first half negated
   slots     [tokens]; block * block_size + offset
   blocks    as paged_attention has them
   query     [tokens, heads, head_dim] */
void rotate_and_store(const bf16 *qkv, const bf16 *query_norm, const bf16 *key_norm, float eps,
                      const bf16 *cos, const bf16 *sin, const int64_t *slots, bf16 *blocks, bf16 *query,
                      int tokens, int heads, int kv_heads, int head_dim, int block_size) {
  size_t tile = (size_t)block_size * head_dim;
#pragma omp parallel for schedule(static) if ((size_t)tokens * (heads + kv_heads) * head_dim > FEW)
  for (int t = 0; t < tokens; t++) {
    const bf16 *head = qkv + (size_t)t * (heads + 2 * kv_heads) * head_dim;
    const bf16 *cosines = cos + (size_t)t * head_dim, *sines = sin + (size_t)t * head_dim;
    int block = slots[t] / block_size, offset = slots[t] % block_size;
    for (int h = 0; h < heads + kv_heads; h++, head += head_dim) {
      float plain[256], turned[256];
      const bf16 *norm = h < heads ? query_norm : key_norm;
      if (norm)
        normalise(head, norm, head_dim, eps, plain);
      else
        for (int i = 0; i < head_dim; i++) plain[i] = widen(head[i]);
      for (int i = 0, half = head_dim / 2; i < half; i++) {
        turned[i] = plain[i] * widen(cosines[i]) + plain[i + half] * widen(sines[i]);
        turned[i + half] = plain[i + half] * widen(cosines[i + half]) + plain[i] * widen(sines[i + half]);
      }
      if (h < heads) {
        for (int i = 0; i < head_dim; i++) query[((size_t)t * heads + h) * head_dim + i] = narrow(turned[i]);
        continue;
      }
      bf16 *keys = blocks + ((size_t)block * kv_heads + h - heads) * 2 * tile +
                   offset / PANEL * (size_t)PANEL * head_dim + offset % PANEL * 2;
      for (int i = 0; i < head_dim; i++) keys[(i & ~1) * PANEL + (i & 1)] = narrow(turned[i]);
    }
    for (int h = 0; h < kv_heads; h++, head += head_dim) {
      bf16 *values = blocks + ((size_t)block * kv_heads + h) * 2 * tile + tile +
                     offset / PANEL * (size_t)PANEL * head_dim + offset % PANEL / 2 * 2 * PANEL + offset % 2;
      for (int i = 0; i < head_dim; i++) values[i / PANEL * (PANEL * PANEL) + i % PANEL * 2] = head[i];
    }
  }
}

/* What a decoder does to rows between its products. A row's bits depend on that row alone. */
#include "cache.h"
#include "team.h"

#define NUMBERS 4096 /* numbers of an item, about: a microsecond of work */

/* Rows of n numbers that one thread takes at a time. */
INLINE int rows_of_item(int n) { return n < NUMBERS ? NUMBERS / n : 1; }

/* 1 / rms of x [n] */
INLINE float normaliser(const bf16 *x, int n, float eps) {
  vf squares[2] = {};
  int i = 0;
  for (; i + 2 * LANES <= n; i += 2 * LANES)
    UNROLL for (int j = 0; j < 2; j++) {
      vf wide = widen_all(*(vb *)(x + i + j * LANES));
      squares[j] += wide * wide;
    }
  float sum = sum_of(squares[0] + squares[1]);
  for (; i < n; i++) sum += widen(x[i]) * widen(x[i]);
  return 1.0f / sqrtf(sum / n + eps);
}

/* A norm of rows, which are then multiplied by weight; bias, if there is one, is added. centers: their mean
   is taken away first (LayerNorm). Without a weight there is none. */
struct norm {
  const float *weight, *bias;
  float eps;
  int centers;
};

struct norming {
  const bf16 *x;
  const struct norm *norm;
  bf16 *out;
  int m, n, stride, lays_out, adds;
};

/* x [n] without its mean -> out, float32; returns 1 / its deviation. */
static float centre(const bf16 *x, float *out, int n, float eps) {
  vf sums = {}, squares = {};
  int i = 0;
  for (; i + LANES <= n; i += LANES) sums += widen_all(*(vb *)(x + i));
  float sum = sum_of(sums);
  for (; i < n; i++) sum += widen(x[i]);
  float mean = sum / n;
  for (i = 0; i + LANES <= n; i += LANES) {
    vf rest = *(vf *)(out + i) = widen_all(*(vb *)(x + i)) - mean;
    squares += rest * rest;
  }
  for (sum = sum_of(squares); i < n; i++) out[i] = widen(x[i]) - mean, sum += out[i] * out[i];
  return 1.0f / sqrtf(sum / n + eps);
}

/* n numbers of a row that has the right size by `scale` -> out, or added to it. */
INLINE void norm_piece(const vf x, const float scale, const struct norm *norm, int at, bf16 *out, int adds) {
  vf y = x * (scale * *(vf *)(norm->weight + at));
  if (norm->bias) y += *(vf *)(norm->bias + at);
  if (adds) y += widen_all(*(vb *)out);
  *(vb *)out = narrow_all(y);
}

static void norm_some(const void *what, int item, int next) {
  const struct norming *all = what;
  const struct norm *norm = all->norm;
  int n = all->n, rows = rows_of_item(n);
  float centred[norm->centers ? n : 1] __attribute__((aligned(64)));
  for (int r = item * rows; r < all->m && r < (item + 1) * rows; r++) {
    const bf16 *x = all->x + (size_t)r * all->stride;
    bf16 *out = all->out + (all->lays_out ? number_at(r, 0, n) : (size_t)r * all->stride);
    float scale = norm->centers ? centre(x, centred, n, norm->eps) : normaliser(x, n, norm->eps);
    int i = 0;
    for (; i + LANES <= n; i += LANES)
      norm_piece(norm->centers ? *(vf *)(centred + i) : widen_all(*(vb *)(x + i)), scale, norm, i,
                 out + (all->lays_out ? number_at(0, i, n) : i), all->adds);
    for (; i < n; i++) {
      float y = (norm->centers ? centred[i] : widen(x[i])) * (scale * norm->weight[i]);
      if (norm->bias) y += norm->bias[i];
      out[i] = narrow(all->adds ? y + widen(out[i]) : y);
    }
  }
}

/* Rows of x begin `stride` numbers apart, and so do those of out; with lays_out those lie as a product takes
   them, and n is a multiple of 32. adds: to what is in out. */
static void norm_rows(const bf16 *x, const struct norm *norm, bf16 *out, int lays_out, int adds, int m, int n,
                      int stride) {
  struct norming all = {x, norm, out, m, n, stride, lays_out, adds};
  share_out(norm_some, &all, (m + rows_of_item(n) - 1) / rows_of_item(n));
}

/* x [m, n] -> out [m, n], or added to it; the rows of both begin `stride` numbers apart. */
void norm(const bf16 *x, const struct norm *norm, bf16 *out, int adds, int m, int n, int stride) {
  norm_rows(x, norm, out, 0, adds, m, n, stride);
}

struct rotation {
  const bf16 *qkv;
  const float *query_norm, *key_norm;
  const bf16 *cos, *sin;
  const int64_t *slots;
  const struct cache *cache;
  bf16 *query;
  int tokens, heads;
  float eps;
};

/* PANEL numbers, each to every other place: who stores what lies between may do it at the same time. */
INLINE void store_apart(bf16 *to, const bf16 *numbers) {
#if defined(__AVX512BW__)
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)numbers));
  _mm512_mask_storeu_epi16(to, 0x55555555, wide);
#else
  for (int i = 0; i < PANEL; i++) to[2 * i] = numbers[i];
#endif
}

/* Where a token's key of one head goes: its panel; its value is a side behind. */
INLINE char *key_at(const struct rotation *all, int t, int head) {
  int size = all->cache->block_size;
  return keys_at(all->cache, all->slots[t] / size, all->slots[t] % size, head);
}

/* The first token after t, below stop, that goes into another panel. */
INLINE int next_panel(const struct rotation *all, int t, int stop) {
  int after = t + 1;
  while (after < stop && all->slots[after] / PANEL == all->slots[t] / PANEL) after++;
  return after;
}

/* The lines that tokens t..stop of one panel write: two numbers of a key each, and a pair's values. They are
   in no cache when a sequence goes on. */
static void fetch_panel(const struct rotation *all, int t, int stop) {
  const struct cache *cache = all->cache;
  size_t side = side_bytes(cache), row = kept_bytes(cache, PANEL);
  int pair = all->slots[t] % PANEL / 2, pairs = t + 1 < stop ? PANEL / 2 : pair + 1;
  for (int h = 0; h < cache->kv_heads; h++) {
    const char *keys = key_at(all, t, h), *values = keys + side;
    for (int i = 0; i < cache->head_dim; i += 2) __builtin_prefetch(keys + i * row, 1, 3);
    for (int i = 0; i < cache->head_dim; i += PANEL)
      for (int p = pair; p < pairs; p++) __builtin_prefetch(values + (i + 2 * p) * row, 1, 3);
  }
}

/* A token's key of one head, or with `is_value` its value, goes into its places. */
static void keep_row(const struct rotation *all, int t, int head, int is_value, const bf16 *row) {
  const struct cache *cache = all->cache;
  const int head_dim = cache->head_dim, place = all->slots[t] % PANEL;
  char *panel = key_at(all, t, head) + is_value * side_bytes(cache);
  uint8_t kept[MAX_HEAD];
  if (cache->kept != KEPT_BF16) {
    float scale = narrow_row(cache, row, is_value ? cache->value_scale : cache->key_scale, kept);
    int size = cache->block_size;
    float *to = key_scale_at(cache, all->slots[t] / size, all->slots[t] % size, head);
    if (cache->kept == KEPT_INT8) *(float *)((char *)to + is_value * side_bytes(cache)) = scale;
  }
  if (!is_value && cache->kept == KEPT_BF16) {
    for (int i = 0; i < head_dim; i += 2) memcpy(panel + (i * PANEL + place * 2) * 2, row + i, 4);
  } else if (!is_value) {
    for (int i = 0; i < head_dim; i++) panel[i * PANEL + place] = kept[i];
  } else if (cache->kept == KEPT_BF16) {
    bf16 *values = (bf16 *)panel + place / 2 * 2 * PANEL + place % 2;
    for (int i = 0; i < head_dim; i += PANEL) store_apart(values + i * PANEL, row + i);
  } else {
    for (int i = 0; i < head_dim; i += PANEL) memcpy(panel + (i + place) * PANEL, kept + i, PANEL);
  }
}

static void rotate_token(const struct rotation *all, int t) {
  const int heads = all->heads, kv_heads = all->cache->kv_heads, head_dim = all->cache->head_dim;
  const bf16 *head = all->qkv + (size_t)t * (heads + 2 * kv_heads) * head_dim;
  const bf16 *cosines = all->cos ? all->cos + (size_t)t * head_dim : 0;
  const bf16 *sines = all->cos ? all->sin + (size_t)t * head_dim : 0;
  for (int h = 0; h < heads + kv_heads; h++, head += head_dim) {
    const float *norm = h < heads ? all->query_norm : all->key_norm;
    const float scale = norm ? normaliser(head, head_dim, all->eps) : 1;
    bf16 key[MAX_HEAD], *to = h < heads ? all->query + ((size_t)t * heads + h) * head_dim : key;
    for (int i = 0, j = head_dim / 2; j < head_dim; i += LANES, j += LANES) {
      vf first = widen_all(*(vb *)(head + i)), second = widen_all(*(vb *)(head + j));
      if (norm) {
        first *= scale * *(vf *)(norm + i);
        second *= scale * *(vf *)(norm + j);
      }
#define TURN(AT, X, Y)                                                                               \
  {                                                                                                  \
    vf turned = X;                                                                                   \
    if (cosines) turned = X * widen_all(*(vb *)(cosines + AT)) + Y * widen_all(*(vb *)(sines + AT)); \
    *(vb *)(to + AT) = narrow_all(turned);                                                           \
  }
      TURN(i, first, second);
      TURN(j, second, first);
#undef TURN
    }
    if (h >= heads) keep_row(all, t, h - heads, 0, key);
  }
  for (int h = 0; h < kv_heads; h++, head += head_dim) keep_row(all, t, h, 1, head);
}

/* Tokens of an item, about. */
INLINE int tokens_of_item(int tokens) { return tokens < 4 * PANEL ? PANEL / 4 : PANEL; }

/* Where an item begins: no panel's lines are written by two threads at a time. */
INLINE int first_of_item(const struct rotation *all, int item) {
  int first = item * tokens_of_item(all->tokens);
  return first == 0 ? 0 : first < all->tokens ? next_panel(all, first - 1, all->tokens) : all->tokens;
}

static void rotate_some(const void *what, int item, int then) {
  const struct rotation *all = what;
  int first = first_of_item(all, item), stop = first_of_item(all, item + 1);
  if (first == stop) return;
  int next = next_panel(all, first, stop), after;
  fetch_panel(all, first, next);
  for (int t = first; t < stop; t = next, next = after) {
    after = next < stop ? next_panel(all, next, stop) : stop;
    if (next < stop) fetch_panel(all, next, after);
    for (int i = t; i < next; i++) rotate_token(all, i);
  }
}

/* Queries and keys are normalised (if a weight is given) and rotated, keys and values stored.

   qkv       [tokens, heads + 2 * kv_heads, head_dim]
   cos, sin  [tokens, head_dim], sin's first half negated; or none, and nothing is turned
   slots     [tokens]; block * block_size + offset
   query     [tokens, heads, head_dim] */
void rotate_and_store(const bf16 *qkv, const float *query_norm, const float *key_norm, float eps,
                      const bf16 *cos, const bf16 *sin, const int64_t *slots, const struct cache *cache,
                      bf16 *query, int tokens, int heads) {
  struct rotation all = {qkv, query_norm, key_norm, cos, sin, slots, cache, query, tokens, heads, eps};
  int size = tokens_of_item(tokens);
  share_out(rotate_some, &all, (tokens + size - 1) / size);
}

/* Paged attention over a cache whose keys and values lie in panels (`cache.h`). Those of 8 bits are widened
   to bf16 a piece at a time, beside the thread that reads it.

   A running softmax over pieces of keys (flash attention, Dao and others, 2022); long contexts are
   cut into shares for several threads, merged in order. Pieces and shares count from position 0, and
   a key that a query does not see adds an exact zero, so a query's bits do not depend on what is
   computed beside it. So sequences that begin with the same blocks read them together: as rows of one
   product, where each alone had a few. */
#include "cache.h"
#include "team.h"

#define KEYS 64      /* keys of a piece */
#define SHARE 1024   /* keys */
#define STACK 48     /* rows of a product: a query has one for each head of its group */
#define SLACK 8      /* in powers of two */
#define LOG2_E 1.44269504f
#define LOWEST -1e30f /* below every score, and finite: what is hidden stays zero before the first key */

/* How keys are weighed: by 2 to the `scale` times a product, relative to the sum.
   window   a query sees this many keys, its own included; 0: all before it
   softcap  a score s becomes softcap * tanh(s / softcap); 0: it stays
   sinks    of each head a score more in the sum, without a value; or none */
struct scoring {
  float scale;
  int window;
  float softcap;
  const float *sinks;
};

/* Keys from..to of a sequence. */
struct span {
  const int32_t *table;
  int from, to;
};

/* Queries first..stop of a sequence, the first at `position`, and a span of its keys. Or, where there are
   several `members`, the last query of each of so many sequences: the first `common` keys of the span are
   the same blocks for all, and each goes on with its own. */
struct item {
  struct span span;
  int first, stop, position, share, shares, members, common;
  const int32_t *context_lens;
  size_t partial; /* where its sums go if others have a share: [kv_heads][rows][head_dim + 2] */
};

/* What one thread works with. sums [STACK][head_dim], of weights that are relative to `top`. wide: a piece's
   keys, then its values, of 8 bits. */
struct bench {
  left query[STACK * MAX_HEAD], weights[STACK * KEYS];
  float scores[STACK * KEYS], sums[STACK * MAX_HEAD], top[STACK]; /* in powers of two, as scores are scaled */
  vf totals[STACK]; /* sums of the weights, lane by lane */
  bf16 wide[KEYS * MAX_HEAD];
} __attribute__((aligned(64)));

/* 2 to the x, within three parts in a million; nothing at -127 and below. A polynomial on the fraction (least
   squares, reweighted until the largest error is least), the integer put into the exponent. */
INLINE vf power_of_two(vf x) {
  const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, in the low bits */
  x = if_less(x, (vf){} - 127.0f, (vf){} - 127.0f, x);
  vf shifted = x + magic, rest = x - (shifted - magic);
  vf sum = rest * 9.582852944731712e-3f + 5.5906426161527634e-2f;
  sum = sum * rest + 2.4024099111557007e-1f;
  sum = sum * rest + 6.931241750717163e-1f;
  sum = sum * rest + 1.0f;
  return sum * (vf)(((vu)shifted << 23) + (127 << 23));
}

#if LANES == 16
static const vf count = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif LANES == 8
static const vf count = {0, 1, 2, 3, 4, 5, 6, 7};
#else
static const vf count = {0, 1, 2, 3};
#endif

/* A row's scores of one piece become softcap * tanh(score * scale / softcap). */
static void cap(float *scores, float scale, float softcap) {
  float twice = scale / softcap * (2 * LOG2_E);
  for (int j = 0; j < KEYS; j += LANES) {
    vf power = *(vf *)(scores + j) * twice, most = (vf){} + 64; /* the sum is as good as 2^64 there */
    *(vf *)(scores + j) = softcap - 2 * softcap / (power_of_two(if_less(power, most, power, most)) + 1);
  }
}

/* The keys and values of a piece, and of how many panels it is; those of int8 have scales. */
struct piece {
  const bf16 *keys[KEYS / PANEL], *values[KEYS / PANEL];
  const float *key_scales[KEYS / PANEL], *value_scales[KEYS / PANEL];
  int num;
};

/* Row by row, a score or a weight by its key's scale. */
INLINE vf scaled(vf numbers, const float *const *scales, int key) {
  return numbers * *(const vf *)(scales[key / PANEL] + key % PANEL);
}

/* A row's weights for one piece from its scores; before `hidden` and from `seen` on, keys are hidden. What
   the weights are relative to follows the highest score from afar: it may be exceeded 2^SLACK times, which
   costs no accuracy, and saves most of the times that sums must follow. scales: of its values, or none */
static void weigh(struct bench *bench, int row, int hidden, int seen, float scale, int head_dim,
                  const float *const *scales) {
  float *scores = bench->scores + row * KEYS, *sums = bench->sums + (size_t)row * head_dim;
  if (hidden > 0 || seen < KEYS) {
    vf place = count, none = (vf){} - INFINITY;
    for (int j = 0; j < KEYS; j += LANES, place += LANES) {
      vf score = if_less(place, (vf){} + (float)hidden, none, *(vf *)(scores + j));
      *(vf *)(scores + j) = if_less(place, (vf){} + (float)seen, score, none);
    }
  }
  vf most = *(vf *)scores;
  for (int j = LANES; j < KEYS; j += LANES) {
    vf score = *(vf *)(scores + j);
    most = if_less(most, score, score, most);
  }
  float before = bench->top[row], top = largest(most) * scale;
  if (top > before + SLACK) {
    float fade = power_of_two((vf){} + (before - top))[0];
    bench->top[row] = top;
    bench->totals[row] *= fade;
    for (int j = 0; j < head_dim; j += LANES) *(vf *)(sums + j) *= fade;
  }
  for (int j = 0; j < KEYS; j += LANES) {
    vf weight = power_of_two(*(vf *)(scores + j) * scale - bench->top[row]);
    bench->totals[row] += weight;
    if (scales) weight = scaled(weight, scales, j);
    store_left(bench->weights + row * KEYS + j, weight);
  }
}

/* What the threads of a call share. */
struct attention {
  const bf16 *query;
  bf16 *out;
  struct cache cache;
  const struct item *items;
  float *partial;
  size_t row_room;
  int heads, group, width, lays_out;
  struct scoring scoring;
};

/* Of one key head, from `key` on. */
static struct piece find_piece(const struct span *span, const struct cache *cache, int head, int key) {
  size_t side = side_bytes(cache);
  struct piece piece;
  piece.num = ((span->to - key < KEYS ? span->to - key : KEYS) + PANEL - 1) / PANEL;
  for (int s = 0; s < KEYS / PANEL; s++) {
    int at = key + (s < piece.num ? s : 0) * PANEL, block = span->table[at / cache->block_size];
    int offset = at % cache->block_size;
    char *keys = keys_at(cache, block, offset, head);
    float *scale = key_scale_at(cache, block, offset, head);
    piece.keys[s] = (bf16 *)keys, piece.values[s] = (bf16 *)(keys + side);
    piece.key_scales[s] = scale, piece.value_scales[s] = (float *)((char *)scale + side);
  }
  return piece;
}

static struct piece first_piece(const struct span *span, const struct cache *cache, int head) {
  return find_piece(span, cache, head, span->from / KEYS * KEYS);
}

#if HAS_TILES
/* scores[rows][KEYS] = queries by a piece's keys. Whole groups of 16 rows are touched, if rows are more. */
static void score(struct bench *bench, int first, int rows, int head_dim, const struct piece *piece,
                  const struct piece *next, int is_next_narrow, int kept) {
  for (int r = 0; r < rows; r += 16) {
    const bf16 *query = bench->query + (first + r) * head_dim;
    float *scores = bench->scores + (first + r) * KEYS;
#define CLEAR(t) _tile_zero(t);
#define KEEP(t) _tile_stored(t, scores + t * PANEL, KEYS * 4);
#define BY_KEYS(t)                                          \
  if (t < piece->num) {                                     \
    _tile_loadd(5, piece->keys[t] + i * PANEL, 64);         \
    if (!r) fetch_ahead(next->keys[t] + (i * PANEL >> is_next_narrow), 1024 >> is_next_narrow); \
    _tile_dpbf16ps(t, 4, 5);                                \
  }
    FOUR_TILES(CLEAR)
    for (int i = 0; i < head_dim; i += 32) {
      _tile_loadd(4, query + i, 2 * head_dim);
      FOUR_TILES(BY_KEYS)
    }
    FOUR_TILES(KEEP)
#undef CLEAR
#undef KEEP
  }
}

/* sums[rows][head_dim] += weights by a piece's values; 64 columns at a time, or the last 32. */
static void mix(struct bench *bench, int first, int rows, int head_dim, const struct piece *piece,
                const struct piece *next, int is_next_narrow, int kept) {
  for (int r = 0; r < rows; r += 16)
    for (int j = 0; j < head_dim; j += 64) {
      float *sums = bench->sums + (first + r) * head_dim + j;
      int tiles = head_dim - j < 64 ? 2 : 4;
#define LOAD(t) if (t < tiles) _tile_loadd(t, sums + t * PANEL, head_dim * 4);
#define KEEP(t) if (t < tiles) _tile_stored(t, sums + t * PANEL, head_dim * 4);
#define BY_VALUES(t)                                      \
  if (t < tiles) {                                        \
    _tile_loadd(7, values + t * PANEL * PANEL, 64);       \
    if (!r) fetch_ahead(later + (t * PANEL * PANEL >> is_next_narrow), 512 >> is_next_narrow); \
    _tile_dpbf16ps(t, 6, 7);                              \
  }
      FOUR_TILES(LOAD)
      for (int s = 0; s < piece->num; s++) {
        const bf16 *values = piece->values[s] + j * PANEL;
        const bf16 *later = next->values[s] + (j * PANEL >> is_next_narrow);
        _tile_loadd(6, bench->weights + (first + r) * KEYS + s * PANEL, KEYS * 2);
        FOUR_TILES(BY_VALUES)
      }
      FOUR_TILES(KEEP)
#undef LOAD
#undef KEEP
    }
}
#else
/* scores[rows][KEYS] = queries by a piece's keys. */
static void score(struct bench *bench, int first, int rows, int head_dim, const struct piece *piece,
                  const struct piece *next, int is_next_narrow, int kept) {
  memset(bench->scores + first * KEYS, 0, (size_t)rows * KEYS * 4);
  for (int s = 0; s < piece->num; s += COLUMNS) {
    int last = s + COLUMNS > piece->num ? s : s + COLUMNS - 1; /* an odd one twice: no query sees the second */
    struct right right = {piece->keys + s, next->keys + s, 1, head_dim,
                          (size_t)(piece->keys[last] - piece->keys[s]),
                          (size_t)(next->keys[last] - next->keys[s]), is_next_narrow, kept};
    multiply_rows(rows, bench->query + first * head_dim, head_dim, &right,
                  bench->scores + first * KEYS + s * PANEL, KEYS, PANEL);
  }
}

/* sums[rows][head_dim] += weights by a piece's values. */
static void mix(struct bench *bench, int first, int rows, int head_dim, const struct piece *piece,
                const struct piece *next, int is_next_narrow, int kept) {
  const bf16 *values[KEYS / PANEL], *later[KEYS / PANEL];
  size_t tile = PANEL * PANEL, then = tile >> is_next_narrow, now = kept == KEPT_BF16 ? tile : tile / 2;
  for (int j = 0; j < head_dim; j += COLUMNS * PANEL) {
    for (int s = 0; s < KEYS / PANEL; s++)
      values[s] = piece->values[s] + j / PANEL * now, later[s] = next->values[s] + j / PANEL * then;
    struct right right = {values, later, piece->num, PANEL, now, then, is_next_narrow, kept};
    multiply_rows(rows, bench->weights + first * KEYS, KEYS, &right, bench->sums + first * head_dim + j,
                  head_dim, PANEL);
  }
}
#endif

/* Keys or values of 8 bits become bf16 in `wide`, where `panels` then lead. For few rows a product widens them
   itself; for more it would do so several times. */
static void widen_panels(const struct cache *cache, bf16 *wide, const bf16 **panels, int num) {
  int size = PANEL * cache->head_dim;
  for (int s = 0; s < num; s++) {
    const uint8_t *from = (const uint8_t *)panels[s];
    if (cache->kept == KEPT_FP8) widen_panel(from, KEPT_FP8, wide + s * size, cache->head_dim);
    else widen_panel(from, KEPT_INT8, wide + s * size, cache->head_dim);
  }
  for (int s = 0; s < KEYS / PANEL; s++) panels[s] = wide + s * size;
}

/* Some rows of one key head against a span of keys; the first row's query is at `position`. later: a
   piece that is wanted after it; blocks lie anywhere, and no processor guesses where. */
static void attend_span(struct bench *bench, const struct attention *all, int head, int first, int rows,
                        const struct span *span, int position, const struct piece *later) {
  int head_dim = all->cache.head_dim, window = all->scoring.window;
  int is_narrow = all->cache.kept != KEPT_BF16, has_scales = all->cache.kept == KEPT_INT8;
  int widens = is_narrow && (HAS_TILES || rows > 2 * ROWS), kept = widens ? KEPT_BF16 : all->cache.kept;
  float softcap = all->scoring.softcap, scale = softcap ? LOG2_E : all->scoring.scale * LOG2_E;
  struct piece piece = first_piece(span, &all->cache, head), next;
  use_tiles(least(rows, 16), 1);
  for (int key = span->from / KEYS * KEYS; key < span->to; key += KEYS, piece = next) {
    next = key + KEYS < span->to ? find_piece(span, &all->cache, head, key + KEYS) : *later;
    if (widens) widen_panels(&all->cache, bench->wide, piece.keys, piece.num);
    score(bench, first, rows, head_dim, &piece, &next, is_narrow, kept);
    for (int r = 0; r < rows; r++) {
      int seen = position + r / all->group + 1 - key, hidden = window ? seen - window : 0;
      float *scores = bench->scores + (first + r) * KEYS;
      for (int j = 0; has_scales && j < KEYS; j += LANES)
        *(vf *)(scores + j) = scaled(*(vf *)(scores + j), piece.key_scales, j);
      if (softcap) cap(scores, all->scoring.scale, softcap);
      weigh(bench, first + r, hidden < KEYS ? hidden : KEYS, seen, scale, head_dim,
            has_scales ? piece.value_scales : 0);
    }
    if (widens) widen_panels(&all->cache, bench->wide, piece.values, piece.num);
    mix(bench, first, rows, head_dim, &piece, &next, is_narrow, kept);
  }
}

/* A member's own keys in an item of several. */
static struct span own_span(const struct item *item, int width, int member) {
  return (struct span){item->span.table + (size_t)member * width, item->span.from + item->common,
                       least(item->context_lens[member], (item->share + 1) * SHARE)};
}

/* Rows of one key head against a share of their keys. What several sequences have in common passes once. */
static void attend_share(struct bench *bench, const struct attention *all, const struct item *item, int head,
                         const struct piece *later) {
  int rows = (item->stop - item->first) * all->group;
  memset(bench->sums, 0, (size_t)rows * all->cache.head_dim * 4);
  for (int r = 0; r < rows; r++) bench->top[r] = LOWEST, bench->totals[r] = (vf){};
  if (item->members == 1) {
    attend_span(bench, all, head, 0, rows, &item->span, item->position, later);
    return;
  }
  struct span common = {item->span.table, item->span.from, item->span.from + item->common};
  struct span own = own_span(item, all->width, 0);
  struct piece next = own.from < own.to ? first_piece(&own, &all->cache, head) : *later;
  if (item->common) attend_span(bench, all, head, 0, rows, &common, 1 << 30, &next);
  for (int m = 0; m < item->members; m++) {
    struct span after = own_span(item, all->width, least(m + 1, item->members - 1));
    next = after.from < after.to ? first_piece(&after, &all->cache, head) : *later;
    if (own.from < own.to)
      attend_span(bench, all, head, m * all->group, all->group, &own, item->context_lens[m] - 1, &next);
    own = after;
  }
}

/* Keys that two sequences have in the same blocks, in whole pieces. */
static int common_keys(const int32_t *table, const int32_t *other, int keys, int block_size) {
  int blocks = 0;
  while ((blocks + 1) * block_size <= keys && table[blocks] == other[blocks]) blocks++;
  return blocks * block_size / KEYS * KEYS;
}

/* What list_items reads. */
struct batch {
  const int32_t *query_start, *context_lens, *tables;
  int width, seqs, block_size, most; /* members of an item */
};

/* How many sequences from s on can be one item's members: each has one query, as many shares as the first,
   and as many keys in common with it as the second has. */
static int count_members(const struct batch *batch, int s, int *common) {
  const int32_t *lens = batch->context_lens, *table = batch->tables + (size_t)s * batch->width;
  int members = 1;
  for (int t = s + 1; t < batch->seqs && members < batch->most; t++, members++) {
    if (batch->query_start[t + 1] - batch->query_start[s] != members + 1) break;
    if ((lens[t] - 1) / SHARE != (lens[s] - 1) / SHARE) break;
    int keys = lens[s] < lens[t] ? lens[s] : lens[t];
    int found = common_keys(table, batch->tables + (size_t)t * batch->width, keys, batch->block_size);
    if (!found || (members > 1 && found < *common)) break;
    if (members == 1) *common = found;
  }
  return members;
}

/* Cuts the queries into items, and returns how many; `room` is what their partial sums take. Writes
   them if `items` is given. */
static int list_items(struct item *items, size_t *room, const struct batch *batch, int group,
                      size_t row_room, int window) {
  const int32_t *query_start = batch->query_start;
  int count = 0, step = STACK / group, members, common = 0;
  *room = 0;
  for (int s = 0; s < batch->seqs; s += members) {
    members = count_members(batch, s, &common);
    for (int first = query_start[s]; first < query_start[s + members]; first += step) {
      int stop = first + step < query_start[s + members] ? first + step : query_start[s + members];
      int len = batch->context_lens[s], position = members > 1 ? len - 1 : len - (query_start[s + 1] - first);
      int end = members > 1 ? len : position + stop - first;
      int oldest = window && position >= window ? position - window + 1 : 0;
      int shares = (end - 1) / SHARE - oldest / SHARE + 1;
      for (int share = 0; share < shares; share++, count++) {
        int begin = (oldest / SHARE + share) * SHARE, from = begin > oldest ? begin : oldest;
        int to = begin + SHARE < end ? begin + SHARE : end, left = common - from;
        struct span span = {batch->tables + (size_t)s * batch->width, from, to};
        if (items)
          items[count] = (struct item){span, first, stop, position, share, shares, members,
                                       left < 0 ? 0 : left < to - from ? left : (to - from) / KEYS * KEYS,
                                       batch->context_lens + s, *room};
        if (shares > 1) *room += row_room * (stop - first) * group;
      }
    }
  }
  return count;
}

/* Where a row of the result has its numbers from `column` on; head_dim is a multiple of 32. */
INLINE bf16 *result_at(const struct attention *all, size_t row, int column) {
  int heads = all->heads, head_dim = all->cache.head_dim;
  if (!all->lays_out) return all->out + row * head_dim + column;
  return all->out + number_at(row / heads, row % heads * head_dim + column, heads * head_dim);
}

/* What a row's sink adds to the sum of its weights. It comes last, so that no share has it twice. */
INLINE float sink_of(const struct attention *all, size_t row, float top) {
  if (!all->scoring.sinks) return 0;
  float power = all->scoring.sinks[row % all->heads] * LOG2_E - top;
  return power_of_two((vf){} + (power < 126 ? power : 126))[0];
}

/* A row of the result from its sums in each share, `apart` floats from one to the next. */
static void merge(const struct attention *all, size_t row, const float *partial, int shares, size_t apart) {
  int head_dim = all->cache.head_dim;
  float top = LOWEST, total = 0, sums[MAX_HEAD] = {};
  for (int s = 0; s < shares; s++)
    if (partial[s * apart + head_dim] > top) top = partial[s * apart + head_dim];
  for (int s = 0; s < shares; s++, partial += apart) {
    float fade = power_of_two((vf){} + (partial[head_dim] - top))[0];
    total += partial[head_dim + 1] * fade;
    for (int j = 0; j < head_dim; j++) sums[j] += partial[j] * fade;
  }
  total = (total + sink_of(all, row, top)) / all->cache.value_scale;
  for (int j = 0; j < head_dim; j += LANES)
    *(vb *)result_at(all, row, j) = narrow_all(*(vf *)(sums + j) / total);
}

/* Row r of an item's stack for one key head, in the queries [tokens, heads]. */
INLINE size_t row_of_stack(const struct item *item, int r, int heads, int head, int group) {
  return (size_t)(item->first + r / group) * heads + head * group + r % group;
}

/* One key head of an item. */
static void attend_some(const void *what, int number, int next) {
  const struct attention *all = what;
  int kv_heads = all->cache.kv_heads, head_dim = all->cache.head_dim, head = number % kv_heads;
  const struct item *item = all->items + number / kv_heads;
  int rows = (item->stop - item->first) * all->group;
  struct bench bench;
  for (int r = 0; r < rows; r++) {
    const bf16 *from = all->query + row_of_stack(item, r, all->heads, head, all->group) * head_dim;
    for (int j = 0; j < head_dim; j++) bench.query[(size_t)r * head_dim + j] = left_of(from[j]);
  }
  int later = next == NONE ? number : next;
  struct piece piece = first_piece(&all->items[later / kv_heads].span, &all->cache, later % kv_heads);
  attend_share(&bench, all, item, head, &piece);
  for (int r = 0; r < rows; r++) {
    float *sums = bench.sums + (size_t)r * head_dim, total = sum_of(bench.totals[r]);
    if (item->shares > 1) {
      float *to = all->partial + item->partial + ((size_t)head * rows + r) * (head_dim + 2);
      memcpy(to, sums, head_dim * 4);
      to[head_dim] = bench.top[r], to[head_dim + 1] = total;
    } else {
      size_t row = row_of_stack(item, r, all->heads, head, all->group);
      total = (total + sink_of(all, row, bench.top[r])) / all->cache.value_scale;
      for (int j = 0; j < head_dim; j += LANES)
        *(vb *)result_at(all, row, j) = narrow_all(*(vf *)(sums + j) / total);
    }
  }
}

static void merge_some(const void *what, int number, int next) {
  const struct attention *all = what;
  const struct item *item = all->items + number;
  int rows = (item->stop - item->first) * all->group, head_dim = all->cache.head_dim;
  if (item->shares == 1 || item->share) return;
  for (int head = 0; head < all->cache.kv_heads; head++)
    for (int r = 0; r < rows; r++)
      merge(all, row_of_stack(item, r, all->heads, head, all->group),
            all->partial + item->partial + ((size_t)head * rows + r) * (head_dim + 2), item->shares,
            all->row_room * rows);
}

/* `paged_attention`; lays_out: rows as a product takes them. */
static int attend_all(const bf16 *query, const struct cache *cache, const int32_t *query_start,
                      const int32_t *context_lens, const int32_t *tables, int width, int seqs, int heads,
                      const struct scoring *scoring, bf16 *out, int lays_out) {
  int window = scoring->window, kv_heads = cache->kv_heads, group = heads / kv_heads;
  size_t row_room = (size_t)kv_heads * (cache->head_dim + 2), room;
  /* As many items as keep all threads busy, and a product's rows. Tiles of more rows than 16 touch others'. */
  int most = seqs * kv_heads / (4 * (team.num_helpers + 1));
  if (most > STACK / group) most = STACK / group;
  if (window || most < 1 || (HAS_TILES && group > 16)) most = 1;
  struct batch batch = {query_start, context_lens, tables, width, seqs, cache->block_size, most};
  int count = list_items(0, &room, &batch, group, row_room, window);
  struct item *items = malloc(count * sizeof *items);
  float *partial = malloc(room * 4 + 1);
  int failed = !items || !partial;
  if (!failed) {
    struct attention all = {query, out, *cache, items, partial, row_room, heads, group, width, lays_out, *scoring};
    float unit = cache->kept == KEPT_FP8 ? FP8_UNIT : 1;
    all.scoring.scale *= cache->key_scale / unit, all.cache.value_scale /= unit;
    list_items(items, &room, &batch, group, row_room, window);
    share_out(attend_some, &all, count * kv_heads);
    if (room) share_out(merge_some, &all, count);
  }
  free(items);
  free(partial);
  return failed;
}

/* query, out     [tokens, heads, head_dim]; sequence i's rows are query_start[i]..query_start[i + 1]
   context_lens   [seqs]; keys of each sequence, those of its own rows included
   tables         [seqs, width]; the blocks of each

   head_dim is a multiple of 32 up to 256, block_size of 16; heads / kv_heads at most 48.
   Returns 0; 1 without memory. */
int paged_attention(const bf16 *query, const struct cache *cache, const int32_t *query_start,
                    const int32_t *context_lens, const int32_t *tables, int width, int seqs, int heads,
                    const struct scoring *scoring, bf16 *out) {
  return attend_all(query, cache, query_start, context_lens, tables, width, seqs, heads, scoring, out, 0);
}

/* Products with a weight that lies in panels, and what follows them in a decoder. */
#include "quantised.h"
#include "team.h"

/* Rows of bf16 panels at a time: they stay in the nearest cache while rows of x pass over them. */
#define DEPTH (HAS_TILES ? 576 : 320)
#define CHUNK (HAS_TILES ? 32 : 64) /* rows of a product's sums */
#define ITEM_ROWS (HAS_TILES ? 512 : 128) /* rows that pass over an item's panels while those are near, at most */
#define ITEM_BYTES 800000 /* bytes of rows, with tiles: they stay in the second cache while panels pass */
#define RUN 262144 /* bytes of panels, about, that a thread takes at a time */
#define FREE_ROWS (HAS_TILES ? 80 : MULTIPLIES_PAIRS ? 24 : 8) /* rows done while a panel comes from memory */

enum after { NARROW, ADD, WIDE, SILU_MUL, GELU_MUL, GELU, RELU2, CLAMPED_MUL };

#define LIMIT 7 /* of CLAMPED_MUL */

/* Whether a weight has two parts, whose sums become one. */
INLINE int has_two(enum after after) { return after == SILU_MUL || after == GELU_MUL || after == CLAMPED_MUL; }

/* A weight [n, k], or two of them one below the other. scales, and mins if any, are [groups][ceil(n / 16) *
   16]; the last group may be shorter. bits: 16 for bf16, which has no scales. bias [ceil(n / 16) * 16], or
   none. order [k]: the feature of x that each number of a row is of; none: its own. Sums are multiplied by
   `factor`. */
struct weight {
  const char *panels;
  const float *scales, *mins, *bias;
  const int32_t *order;
  int n, k, bits, group;
  float factor;
};

/* The rows of x as products want them. int8 rows have a scale each, and totals [groups]: what the
   numbers of each group add up to. */
struct laid {
  void *rows;
  float *scales;
  int32_t *totals;
};

INLINE int least(int a, int b) { return a < b ? a : b; }
INLINE int panels_of(int n) { return (n + PANEL - 1) / PANEL; }
INLINE int groups_of(const struct weight *w) { return (w->k + w->group - 1) / w->group; }
INLINE size_t panel_bytes(const struct weight *w) { return (size_t)w->k * w->bits * PANEL / 8; }

/* Whether tiles multiply it: a step of theirs takes 64 numbers of 8 bits, which share their scales. */
INLINE int by_tiles(const struct weight *w) {
  return HAS_TILES && (w->bits == 16 || (w->group % 64 == 0 && w->k % 64 == 0));
}

/* Where a row is that products with the weight want. */
INLINE char *row_of(const struct laid *laid, int row, const struct weight *w) {
  size_t row_bytes = (size_t)w->k * (w->bits < 16 ? 1 : sizeof(left));
  return (char *)laid->rows + (by_tiles(w) ? row_at(row, row_bytes) : row * row_bytes);
}

/* x [k] in int8; returns the scale. Where a number is none, or infinite, the scale is too, and the
   numbers are zero: their products are no numbers. */
static float quantise(const bf16 *x, int8_t *numbers, int k) {
  const float magic = 12582912.0f; /* 1.5 * 2^23: adding it leaves an integer in the low bits */
  uint16_t tops[32] = {}, most = 0; /* sizes are in the order of their bits, infinity and what is none above all */
  for (int i = 0; i < k; i += 32)
    for (int j = 0; j < 32; j++) {
      uint16_t size = x[i + j] & 0x7fff;
      tops[j] = size > tops[j] ? size : tops[j];
    }
  for (int j = 0; j < 32; j++) most = tops[j] > most ? tops[j] : most;
  float scale = widen(most) / 127.0f, per_unit = most > 0 && most < 0x7f80 ? 127.0f / widen(most) : 0;
  if (!per_unit) {
    memset(numbers, 0, k);
    return scale;
  }
  for (int i = 0; i < k; i++) {
    float shifted = widen(x[i]) * per_unit + magic;
    int32_t bits;
    memcpy(&bits, &shifted, 4);
    numbers[i] = (int8_t)bits;
  }
  return scale;
}

static void lay(const bf16 *x, const struct laid *laid, int row, const struct weight *w) {
  int k = w->k;
  x += (size_t)row * k;
  char *to = row_of(laid, row, w);
  if (w->bits < 16) {
    int8_t numbers[k];
    bf16 ordered[w->order ? k : 1];
    for (int i = 0; w->order && i < k; i++) ordered[i] = x[w->order[i]];
    laid->scales[row] = quantise(w->order ? ordered : x, numbers, k);
    for (int g = 0, groups = groups_of(w); g < groups; g++) {
      int32_t total = 0;
      for (int i = g * w->group; i < least(k, (g + 1) * w->group); i++) total += numbers[i];
      laid->totals[(size_t)row * groups + g] = total;
    }
    if (!by_tiles(w)) memcpy(to, numbers, k);
    else for (int i = 0; i < k; i += 64, to += 1024) memcpy(to, numbers + i, 64);
    return;
  }
#if HAS_TILES
  for (int i = 0; i < k; i += 32) memcpy(to + i * 32, x + i, 64);
#else
  for (int i = 0; i < k; i++) ((left *)to)[i] = left_of(x[i]);
#endif
}

/* Whether rows of bf16 may be brought as `number_at` lays them out. */
INLINE int takes_laid(const struct weight *w) { return HAS_TILES && w->bits == 16; }

/* x times the logistic function of y */
INLINE vf gated(vf x, vf y) {
  vf most = (vf){} + 88.0f;
  return x / (1.0f + exponential(if_less(y, -most, most, -y)));
}

/* No number stays none. */
INLINE vf at_most(vf x, float limit) {
  vf most = (vf){} + limit;
  return if_less(most, x, most, x);
}

/* gelu as most models have it, by tanh: (1 + tanh(y)) / 2 is the logistic function of 2 * y. */
INLINE vf activated(const enum after after, vf x) {
  if (after == SILU_MUL) return gated(x, x);
  if (after == GELU_MUL || after == GELU) return gated(x, 1.59576912f * (x + 0.044715f * x * x * x));
  if (after == CLAMPED_MUL) {
    vf gate = at_most(x, LIMIT);
    return gated(gate, 1.702f * gate);
  }
  if (after != RELU2) return x;
  vf more = if_less(x, (vf){}, (vf){}, x);
  return more * more;
}

/* What multiplies an activated gate. */
INLINE vf multiplier(const enum after after, vf up) {
  if (after == CLAMPED_MUL) return 1.0f - at_most(-at_most(up, LIMIT), LIMIT);
  return up;
}

/* A row's sums past the caches, where they fill lines: logits are more than those hold. */
INLINE void stream(float *to, const float *row, const int columns) {
#if defined(__AVX512BW__)
  if (columns == WIDTH && ((uintptr_t)to & 63) == 0) {
    for (int p = 0; p < WIDTH; p += 16) _mm512_stream_ps(to + p, _mm512_loadu_ps(row + p));
    return;
  }
#endif
  memcpy(to, row, columns * 4);
}

/* After `stream`, before another thread is told. */
INLINE void end_streams(void) {
#if defined(__AVX512BW__)
  _mm_sfence();
#endif
}

/* `columns` of a row's sums, which are the first panel where there are two parts, and the second's beside. */
INLINE void finish_row(const enum after after, float *row, float factor, void *to, const int columns) {
  if (after == WIDE) {
    for (int p = 0; factor != 1 && p < columns; p += LANES) *(vf *)(row + p) *= factor;
    stream(to, row, columns);
    return;
  }
  bf16 some[WIDTH], *now = columns % PANEL ? some : to;
  if (columns % PANEL) memcpy(some, to, columns * 2);
  for (int p = 0; p < columns; p += LANES) {
    vf sum = activated(after, *(vf *)(row + p) * factor);
    if (after == ADD) sum += widen_all(*(vb *)(now + p));
    if (has_two(after)) sum *= multiplier(after, *(vf *)(row + PANEL + p) * factor);
    *(vb *)(now + p) = narrow_all(sum);
  }
  if (columns % PANEL) memcpy(to, some, columns * 2);
}

/* What is multiplied after a product, and is fetched meanwhile; or no weight. m: by how many rows, 0 means by
   as many. item: the number of that which the thread takes, plus one; 0 means the first of its range. */
struct later {
  const struct weight *weight;
  enum after after;
  int m, item;
};

/* A product, as its threads see it. Items are runs of panels for each few chunks of rows. */
struct product {
  struct weight weight;
  struct laid laid;
  const bf16 *x;
  void *out;
  int m;
  enum after after;
  int lays_out; /* rows as the next product wants them */
  struct later later;
};

/* Chunks of rows that stay in the second cache. */
INLINE int chunks_near(const struct weight *w) { return ITEM_BYTES / (CHUNK * 2 * w->k); }

/* Chunks of rows of an item, at most; where not even two stay near, weights at least are read seldom. */
INLINE int chunks_of(const struct weight *w) {
  int most = ITEM_ROWS / CHUNK, near = chunks_near(w);
  return !HAS_TILES || near > most || near < 2 ? most : near > 4 ? near : 4;
}

/* How many panels an item has: RUN's worth, fewer if many rows pass over them, and as many for each member. */
INLINE int run_of(const struct weight *w, int m) {
  int members = team.num_helpers + 1, panels = panels_of(w->n), rows = least(m, chunks_of(w) * CHUNK);
  int rounds = 1 + panels * panel_bytes(w) * (1 + rows / FREE_ROWS) / ((size_t)RUN * members);
  int run = (panels + rounds * members - 1) / (rounds * members);
  return (run + 1) & ~1; /* no two threads write the same line */
}

INLINE int runs_of(const struct weight *w, int m) {
  int run = run_of(w, m);
  return (panels_of(w->n) + run - 1) / run;
}

INLINE int items_of(const struct weight *w, int m) {
  int rows = chunks_of(w) * CHUNK;
  return (m + rows - 1) / rows * runs_of(w, m);
}

static void lay_some(const void *what, int item, int next) {
  const struct product *p = what;
  for (int r = item * PANEL; r < least(p->m, (item + 1) * PANEL); r++) lay(p->x, &p->laid, r, &p->weight);
}

/* Where a row of the result has its numbers from `column` on. */
INLINE char *result_of(const struct product *product, int row, int column) {
  int n = product->weight.n, size = product->after == WIDE ? 4 : 2;
  size_t at = product->lays_out ? number_at(row, column, n) : (size_t)row * n + column;
  return (char *)product->out + at * size;
}

/* At most DEPTH, and about the same for each piece. */
INLINE int depth_of(int k) {
  int pieces = (k + DEPTH - 1) / DEPTH;
  return (k / pieces + 31) & ~31;
}

/* Sums that are not in the result yet: `columns` of it from `column` on, of rows first... */
struct pending {
  const struct product *product;
  float *sums;
  int first, rows, column, columns, pace; /* rows of a step */
};

static void finish(const struct pending *pending, int from, int to) {
  const struct product *product = pending->product;
#define FINISH(AFTER, NUM)                                                    \
  for (int r = from; r < to; r++)                                             \
    finish_row(AFTER, pending->sums + r * WIDTH, product->weight.factor,      \
               result_of(product, pending->first + r, pending->column), NUM);
#define CASE(AFTER)                                          \
  case AFTER:                                                \
    if (pending->columns == WIDTH) FINISH(AFTER, WIDTH)      \
    else if (pending->columns == PANEL) FINISH(AFTER, PANEL) \
    else FINISH(AFTER, pending->columns)                     \
    break;
  switch (product->after) {
    CASE(NARROW) CASE(ADD) CASE(WIDE) CASE(SILU_MUL) CASE(GELU_MUL) CASE(GELU) CASE(RELU2)
    CASE(CLAMPED_MUL)
  }
#undef CASE
#undef FINISH
}

/* Between two steps of the next product, whose tiles are multiplied meanwhile. */
INLINE void finish_some(const void *what, int step) {
  const struct pending *pending = what;
  int from = step * pending->pace;
  if (from < pending->rows) finish(pending, from, least(from + pending->pace, pending->rows));
}

/* Panels of a weight that are multiplied together: `count` of them, p first, each `apart` panels behind
   the last; and of those a piece, `depth` numbers from `from` on. next: what to fetch meanwhile, or none: so
   many bytes for each 64 of a row. */
struct columns {
  int p, count, apart, from, depth, pace;
  const char *next[2];
};

/* sums[rows][WIDTH] += rows first.. by some columns. Where there is one, and COLUMNS are two, it is taken
   twice. before: what tiles leave time for. */
static void multiply_chunk(const struct laid *laid, int first, int rows, const struct weight *w,
                           const struct columns *columns, float *sums, struct pending *before) {
  int k = w->k;
  const bf16 *panel = (const bf16 *)(w->panels + columns->p * panel_bytes(w));
  size_t apart = columns->count > 1 ? (size_t)columns->apart * k * PANEL : 0;
#if HAS_TILES
  struct sides sides = {row_of(laid, first, w) + columns->from * 32,
                        (const char *)(panel + columns->from * PANEL), {columns->next[0], columns->next[1]},
                        32 * (size_t)k, 2 * apart, columns->depth / 32, columns->pace};
  before->pace = (before->rows + sides.steps - 1) / sides.steps;
  multiply_sides(rows, columns->count, BF16, &sides, !w->bias && !columns->from, sums, finish_some,
                 before);
#else
  (void)before;
  const left *x = (const left *)row_of(laid, first, w);
  const bf16 *next = (const bf16 *)columns->next[0];
  size_t next_apart = columns->next[1] ? (const bf16 *)columns->next[1] - next : 0;
  for (int i = 0, depth = depth_of(k); i < k; i += depth) {
    int is_last = i + depth >= k;
    for (int c = 0; c < columns->count; c += COLUMNS) {
      const bf16 *piece = panel + c * apart + (size_t)i * PANEL;
      const bf16 *then = !is_last ? piece + (size_t)depth * PANEL : next ? next + c * next_apart : piece;
      struct right right = {&piece, &then, 1, least(depth, k - i), apart, is_last ? next_apart : apart};
      multiply_rows(rows, x + i, k, &right, sums + c * PANEL, WIDTH, PANEL);
    }
  }
#endif
}

#if HAS_TILES
/* sums[rows][WIDTH] += rows of x, whose tiles lie `apart`, by a group of some columns. */
static void multiply_group_by_tiles(int rows, const struct columns *columns, int bits, size_t apart,
                                    const struct eighths *x, const struct group *group, float *sums) {
  int32_t whole[CHUNK * WIDTH] __attribute__((aligned(64)));
  int8_t unpacked[2][MAX_GROUP * PANEL] __attribute__((aligned(64)));
  int from = group->from;
  struct sides sides = {(const char *)x->numbers + (size_t)from * 16, group->panel, {},
                        apart, group->panel_apart, group->depth / 64, columns->pace};
  for (int c = 0; c < 2; c++)
    if (columns->next[c]) sides.next[c] = columns->next[c] + from / 64 * columns->pace;
  if (bits == 4) {
    for (int c = 0; c < columns->count; c++)
      unpack((const uint8_t *)group->panel + c * group->panel_apart, unpacked[c], group->depth,
             group->mins ? 0 : 8);
    sides.panel = (char *)unpacked[0], sides.panel_apart = sizeof unpacked[0];
  }
  multiply_sides(rows, columns->count, INT8, &sides, 1, whole, 0, 0);
  for (int r = 0; r < rows; r++)
    for (int c = 0; c < columns->count; c++) {
      vf *to = (vf *)(sums + r * WIDTH + c * PANEL);
      vi *sum = (vi *)(whole + r * WIDTH + c * PANEL);
      size_t column = c * group->scales_apart;
      *to += __builtin_convertvector(*sum, vf) * (x->scales[r] * *(const vf *)(group->scales + column));
      if (group->mins)
        *to -= *(const vf *)(group->mins + column) *
               (x->totals[(size_t)r * x->groups + group->number] * x->scales[r]);
    }
}
#endif

static void multiply_quantised_chunk(const struct laid *laid, int first, int rows, const struct weight *w,
                                     const struct columns *columns, float *sums) {
  int k = w->k, num_groups = groups_of(w), num_scales = panels_of(w->n) * PANEL;
  int is_second_part = columns->apart * PANEL == num_scales; /* its scales follow all of the first's */
  for (int g = 0; g < num_groups; g++) {
    int from = g * w->group, depth = least(w->group, k - from);
    size_t scale = (size_t)g * num_scales + columns->p * PANEL;
    struct group group = {
        .panel = w->panels + columns->p * panel_bytes(w) + (size_t)from * PANEL * w->bits / 8,
        .scales = w->scales + scale, .mins = w->mins ? w->mins + scale : 0,
        .panel_apart = columns->count > 1 ? columns->apart * panel_bytes(w) : 0,
        .scales_apart = columns->count < 2 ? 0 : is_second_part ? (size_t)num_groups * num_scales : PANEL,
        .ahead = columns->next[0] ? columns->next[0] - (w->panels + columns->p * panel_bytes(w)) : 0,
        .number = g, .from = from, .depth = depth};
    struct eighths x = {(const int8_t *)row_of(laid, first, w), k, laid->scales + first,
                        laid->totals + (size_t)first * num_groups, num_groups};
#if HAS_TILES
    if (by_tiles(w)) {
      multiply_group_by_tiles(rows, columns, w->bits, 16 * (size_t)k, &x, &group, sums);
      continue;
    }
#endif
    multiply_group_rows(rows, columns->count, w->bits, &x, &group, sums);
  }
}

/* Tiles of bf16 begin by themselves where there is no bias. */
static void begin_sums(const struct weight *w, const struct columns *columns, int rows, float *sums) {
  if (!w->bias && !takes_laid(w)) memset(sums, 0, rows * WIDTH * 4);
  for (int r = 0; r < rows && w->bias; r++)
    for (int c = 0; c < columns->count; c++)
      memcpy(sums + r * WIDTH + c * PANEL, w->bias + (columns->p + c * columns->apart) * PANEL, PANEL * 4);
}

/* Some columns for one chunk of rows. What is pending of another is done meanwhile, and these are pending. */
static void multiply_columns(const struct product *product, int chunk, const struct columns *columns,
                             float *sums, struct pending *pending) {
  const struct weight *w = &product->weight;
  int first = chunk * CHUNK, rows = least(CHUNK, product->m - first);
  if (!columns->from) begin_sums(w, columns, rows, sums);
  if (!takes_laid(w)) finish(pending, 0, pending->rows);
  if (w->bits < 16) multiply_quantised_chunk(&product->laid, first, rows, w, columns, sums);
  else multiply_chunk(&product->laid, first, rows, w, columns, sums, pending);
  pending->rows = columns->from + columns->depth < w->k ? 0 : rows;
  int most = has_two(product->after) ? PANEL : columns->count * PANEL;
  pending->sums = sums, pending->first = first, pending->column = columns->p * PANEL;
  pending->columns = least(most, w->n - pending->column);
}

/* Panels of a weight from p on that are multiplied together; of two weights, one of each. */
INLINE struct columns columns_at(const struct weight *w, int p, int to, enum after after) {
  if (has_two(after)) return (struct columns){.p = p, .count = 2, .apart = panels_of(w->n)};
  return (struct columns){.p = p, .count = least(COLUMNS, to - p), .apart = 1};
}

/* Has columns bring what this thread multiplies after them: of its item, from p to `to`; of the item that is
   its next; or of the product that is later. */
INLINE void bring_next(struct columns *columns, const struct product *product, int p, int to, int next) {
  const struct weight *w = &product->weight;
  enum after after = product->after;
  int m = product->m;
  if (p >= to && next == NONE) {
    const struct later *later = &product->later;
    w = later->weight, after = later->after, m = later->m ? later->m : m;
    if (!w) return;
    next = later->item ? later->item - 1 : begin_of(items_of(w, m), this_member->number);
  }
  if (p >= to) p = next % runs_of(w, m) * run_of(w, m), to = panels_of(w->n);
  struct columns then = columns_at(w, p, to, after);
  columns->next[0] = w->panels + p * panel_bytes(w);
  if (then.count > 1) columns->next[1] = columns->next[0] + then.apart * panel_bytes(w);
}

static void multiply_some(const void *what, int item, int next) {
  const struct product *product = what;
  const struct weight *w = &product->weight;
  int runs = runs_of(w, product->m), run = run_of(w, product->m);
  int from = item % runs * run, to = least(from + run, panels_of(w->n));
  int chunk = item / runs * chunks_of(w);
  int stop = least(chunk + chunks_of(w), (product->m + CHUNK - 1) / CHUNK);
  int chunks = stop - chunk, turn = 0, depth = w->k, kept = 2, parts = 1;
  if (takes_laid(w) && chunks > 2 && chunks_near(w) > 1) depth = depth_of(w->k), kept = chunks;
  while (HAS_TILES && 2 * parts <= chunks) parts *= 2; /* 16 at most: a line of a panel for each step */
  float sums[ITEM_ROWS / CHUNK][CHUNK * WIDTH] __attribute__((aligned(64)));
  struct pending pending = {.product = product};
  use_tiles(least(product->m, 16), 0);
  for (int p = from, taken = has_two(product->after) ? 1 : COLUMNS; p < to; p += taken) {
    struct columns columns = columns_at(w, p, to, product->after);
    bring_next(&columns, product, p + taken, to, next);
    columns.pace = (w->bits < 8 ? 512 : 1024) / parts;
    size_t brought = 0;
    for (columns.from = 0; columns.from < w->k; columns.from += depth) {
      columns.depth = least(depth, w->k - columns.from);
      for (int c = chunk; c < stop; c++, turn++) {
        multiply_columns(product, c, &columns, sums[turn % kept], &pending);
        size_t more = panel_bytes(w) / w->k * columns.depth / parts;
        brought += more;
        for (int i = 0; i < 2; i++)
          if (columns.next[i]) columns.next[i] = brought < panel_bytes(w) ? columns.next[i] + more : 0;
      }
    }
  }
  finish(&pending, 0, pending.rows);
  if (product->after == WIDE) end_streams();
}

/* `linear`, and what is multiplied after it, which is fetched from memory meanwhile. x is laid out where
   the weight takes it so and `is_laid` says so; out where `lays_out` does. */
static int multiply_by(const bf16 *x, int is_laid, const struct weight *w, void *out, int lays_out, int m,
                       enum after after, struct later later) {
  struct product product = {*w, {0}, x, out, m, after, lays_out, later};
  size_t row_bytes = (size_t)w->k * (w->bits < 16 ? 1 : sizeof(left)), rows = (size_t)(m + 15) / 16 * 16;
  struct laid *laid = &product.laid;
  int as_they_are = is_laid || (w->bits == 16 && MULTIPLIES_PAIRS && !HAS_TILES);
  laid->rows = as_they_are ? (void *)x : aligned_alloc(64, (rows * row_bytes + 63) & ~(size_t)63);
  laid->scales = malloc(rows * (1 + groups_of(w)) * 4);
  laid->totals = (int32_t *)(laid->scales + rows);
  int failed = !laid->rows || !laid->scales;
  if (!failed) {
    if (!as_they_are) share_out(lay_some, &product, (m + PANEL - 1) / PANEL);
    share_out(multiply_some, &product, items_of(w, m));
  }
  if (!as_they_are) free(laid->rows);
  free(laid->scales);
  return failed;
}

/* x [m, k] by a weight [n, k], plus its bias -> out [m, n].

   NARROW    bf16
   ADD       bf16, added to what is in out
   WIDE      float32
   SILU_MUL, GELU_MUL, CLAMPED_MUL  bf16; of two weights the gate's, and what it multiplies
   GELU, RELU2         bf16; gelu is the one by tanh, relu2 the square of what is above 0

   A row's bits depend on that row alone. k is a multiple of 32, and so is `group`; below 16 bits both of 64.
   Returns 0; 1 without memory. */
int linear(const bf16 *x, const struct weight *w, void *out, int m, enum after after) {
  return multiply_by(x, 0, w, out, 0, m, after, (struct later){0});
}

struct packing {
  const void *weight;
  void *panels;
  float *scales;
  int n, k, bits, group;
};

/* A line of each row at a time, so that what is read and written stays in the nearest cache. */
static void pack_panel(const void *what, int p, int next) {
  const struct packing *packing = what;
  int pairs = packing->k / 2;
  uint32_t *panel = (uint32_t *)packing->panels + (size_t)p * pairs * PANEL;
  for (int i = 0; i < pairs; i += 16)
    for (int j = 0; j < PANEL; j++) {
      int row = p * PANEL + j;
      uint32_t line[16] = {};
      if (row < packing->n) memcpy(line, (const bf16 *)packing->weight + (size_t)row * packing->k + 2 * i, 64);
      for (int c = 0; c < 16; c++) panel[(size_t)(i + c) * PANEL + j] = line[c];
    }
}

/* weight [n, k] -> panels [ceil(n / 16)][k / 2][16][2]; columns past n are zero. */
void pack(const bf16 *weight, bf16 *panels, int n, int k) {
  struct packing packing = {weight, panels, 0, n, k, 16, k};
  share_out(pack_panel, &packing, panels_of(n));
}

/* Where number i of a column is, in bytes from where its panel begins; of 4 bits in the high ones if i & 4. */
INLINE size_t byte_at(int bits, int i, int column) {
  int quads = bits == 8 ? i & ~3 : (i & ~7) / 2;
  return (size_t)quads * PANEL + column * 4 + (i & 3);
}

/* Row `row` of a packed weight. */
static void unpack_row(const struct weight *w, int row, bf16 *out) {
  const char *panel = w->panels + row / PANEL * panel_bytes(w);
  int column = row % PANEL, columns = panels_of(w->n) * PANEL;
  for (int i = 0; i < w->k; i++) {
    if (w->bits == 16) {
      out[i] = ((const bf16 *)panel)[(i & ~1) * PANEL + column * 2 + (i & 1)];
      continue;
    }
    size_t scale = (size_t)(i / w->group) * columns + row;
    int number = panel[byte_at(w->bits, i, column)];
    if (w->bits == 4) number = (number >> (i & 4) & 15) - (w->mins ? 0 : 8);
    float value = number * w->scales[scale] - (w->mins ? w->mins[scale] : 0);
    out[w->order ? w->order[i] : i] = narrow(value);
  }
}

static void quantise_panel(const void *what, int p, int next) {
  const struct packing *packing = what;
  int n = packing->n, k = packing->k, bits = packing->bits, group = packing->group;
  int columns = panels_of(n) * PANEL;
  uint8_t *panel = (uint8_t *)packing->panels + (size_t)p * PANEL * k * bits / 8;
  memset(panel, 0, (size_t)PANEL * k * bits / 8);
  for (int row = p * PANEL; row < (p + 1) * PANEL; row++)
    for (int from = 0; from < k; from += group) {
      const bf16 *numbers = (const bf16 *)packing->weight + (size_t)row * k;
      int to = least(k, from + group);
      float most = 0;
      for (int i = from; i < to && row < n; i++)
        if (fabsf(widen(numbers[i])) > fabsf(most)) most = widen(numbers[i]);
      float scale = widen(narrow(bits == 8 ? fabsf(most) / 127 : most / -8));
      packing->scales[(size_t)(from / group) * columns + row] = scale;
      for (int i = from; i < to; i++) {
        float exact = row < n && scale != 0 ? rintf(widen(numbers[i]) / scale) : 0;
        if (bits == 8)
          panel[byte_at(8, i, row % PANEL)] =
              (uint8_t)(int)(exact > 127 ? 127 : exact < -127 ? -127 : exact);
        else
          panel[byte_at(4, i, row % PANEL)] |=
              (int)((exact > 7 ? 7 : exact < -8 ? -8 : exact) + 8) << (i & 4);
      }
    }
}

/* weight [n, k] -> panels of 8 or 4 bits, and scales. Each group's largest number takes the largest of
   its bits: 127 either way, or -8 (as llama.cpp's Q4_0 does it). */
void quantise_weight(const bf16 *weight, uint8_t *panels, float *scales, int n, int k, int bits, int group) {
  struct packing packing = {weight, panels, scales, n, k, bits, group};
  share_out(quantise_panel, &packing, panels_of(n));
}

static void pack_numbers_panel(const void *what, int p, int next) {
  const struct packing *packing = what;
  int n = packing->n, k = packing->k, bits = packing->bits, half = packing->group / 2;
  size_t row_bytes = (size_t)(k + packing->group - 1) / packing->group * half;
  uint8_t *panel = (uint8_t *)packing->panels + (size_t)p * PANEL * k * bits / 8;
  memset(panel, 0, (size_t)PANEL * k * bits / 8);
  for (int column = 0; column < least(PANEL, n - p * PANEL); column++) {
    size_t row = p * PANEL + column;
    const uint8_t *numbers = (const uint8_t *)packing->weight + row * (bits == 8 ? k : row_bytes);
    for (int i = 0; i < k; i++) {
      if (bits == 8) {
        panel[byte_at(8, i, column)] = numbers[i];
        continue;
      }
      int at = i % packing->group;
      int number = numbers[(size_t)i / packing->group * half + at % half] >> (at < half ? 0 : 4) & 15;
      panel[byte_at(4, i, column)] |= number << (i & 4);
    }
  }
}

/* A weight's numbers of 8 or 4 bits, as `penstock.kernels.linear.weight` has them -> panels of the same. */
void pack_numbers(const void *numbers, uint8_t *panels, int n, int k, int bits, int group) {
  struct packing packing = {numbers, panels, 0, n, k, bits, group};
  share_out(pack_numbers_panel, &packing, panels_of(n));
}

#define READ 64 /* rows of an item */

struct reading {
  const struct weight *weight;
  const int64_t *rows;
  bf16 *out;
  int m;
};

static void read_some(const void *what, int item, int next) {
  const struct reading *reading = what;
  for (int r = item * READ; r < least(reading->m, (item + 1) * READ); r++)
    unpack_row(reading->weight, reading->rows[r], reading->out + (size_t)r * reading->weight->k);
}

/* Rows of a weight: out [m, k]. */
void rows_of(const struct weight *w, const int64_t *rows, bf16 *out, int m) {
  struct reading reading = {w, rows, out, m};
  share_out(read_some, &reading, (m + READ - 1) / READ);
}

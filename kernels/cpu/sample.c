/* A token for each row of float32 logits, drawn as the row asks. kernels/sampling/draw.py says what is drawn,
   and gets the same: sums are of integers, and every float operation is one that torch has too.

   The vocabulary is never sorted. The first pass keeps the largest logit of every chunk; only chunks
   that may hold a candidate are looked into for them, and candidates are told apart digit by digit,
   so the cost is linear whatever the logits are. */
#include "team.h"

/* A product and a sum round twice, as they do in torch. */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#else
#pragma GCC push_options
#pragma GCC optimize("fp-contract=off")
#endif

#define PIECE 64   /* logits of a chunk */
#define WORD 32    /* tokens of a mask's word */
#define UNIT 40    /* the likeliest token weighs 2^UNIT */
#define NO_TOKEN -1
#define LOG2_E 1.44269504f
#define LOWEST_POWER (-UNIT - 0.01f) /* what is below weighs nothing, whatever rounding does */
#define START 32   /* so many chunks are looked into first for what top_p keeps */

typedef uint64_t vl __attribute__((vector_size(LANES * 8), aligned(8), may_alias));

/* How a row draws. temperature 0: the likeliest; top_k 0, top_p 1 and min_p 0 keep all. */
struct way {
  double top_p, min_p;
  uint64_t seed;
  int32_t choice, top_k, is_masked;
  float temperature;
};

/* A row's chunks, and its candidates in the order of their ids. */
struct search {
  const float *logits;
  int vocab, chunks, count;
  float top, scale;
  float *tops, *found;
  uint64_t *sums, *weights;
  int32_t *ids;
};

/* The chunk's logits; those past the vocabulary are minus infinity. */
INLINE const float *chunk_of(const struct search *row, int chunk, float *padded) {
  const float *at = row->logits + (size_t)chunk * PIECE;
  int rest = row->vocab - chunk * PIECE;
  if (rest >= PIECE) return at;
  for (int i = 0; i < PIECE; i++) padded[i] = i < rest ? at[i] : -INFINITY;
  return padded;
}

/* What the mask forbids becomes minus infinity; NaN stays. */
static void forbid(float *logits, int count, const uint32_t *mask) {
  for (int i = 0; i < count; i += WORD, mask++) {
    if (*mask == UINT32_MAX) continue;
    if (i + WORD <= count)
      for (int j = 0; j < WORD; j++) logits[i + j] += *mask >> j & 1 ? 0.0f : -INFINITY;
    else
      for (int j = 0; i + j < count; j++) logits[i + j] += *mask >> j & 1 ? 0.0f : -INFINITY;
  }
}

/* The largest of each chunk and of all; NaN if any is. */
static void find_tops(struct search *row) {
  float padded[PIECE];
  vi none = {};
  row->top = -INFINITY;
  for (int c = 0; c < row->chunks; c++) {
    const float *at = chunk_of(row, c, padded);
    vf most = *(vf *)at;
    none |= most != most;
    for (int i = LANES; i < PIECE; i += LANES) {
      vf x = *(vf *)(at + i);
      none |= x != x;
      most = if_less(most, x, x, most);
    }
    row->tops[c] = most[0];
    for (int i = 1; i < LANES; i++) row->tops[c] = most[i] > row->tops[c] ? most[i] : row->tops[c];
    row->top = row->tops[c] > row->top ? row->tops[c] : row->top;
  }
  for (int i = 0; i < LANES; i++)
    if (none[i]) row->top = NAN;
}

/* The first of the largest. */
static int likeliest(const struct search *row) {
  float padded[PIECE];
  int chunk = 0, place = 0;
  while (row->tops[chunk] != row->top) chunk++;
  const float *at = chunk_of(row, chunk, padded);
  while (at[place] != row->top) place++;
  return chunk * PIECE + place;
}

/* Of 2, relative to the likeliest. Never falls as logits rise. */
INLINE float power_of(const struct search *row, float logit) { return (logit - row->top) * row->scale; }

/* The weights of LANES logits. 2 to the x: a polynomial on the fraction, the integer shifts. */
INLINE vl weights_of(const struct search *row, const float *logits) {
  vf x = (*(vf *)logits - row->top) * row->scale;
  x = if_less((vf){} - 60.0f, x, x, (vf){} - 60.0f);
  const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
  vf shifted = x + magic, rest = x - (shifted - magic);
  vf sum = rest * 1.32647273e-3f + 9.67151299e-3f;
  sum = sum * rest + 5.55073358e-2f;
  sum = sum * rest + 2.40222424e-1f;
  sum = sum * rest + 6.93147004e-1f;
  sum = sum * rest + 1.0f;
  vi below = (vi)((vf){} + magic) - (vi)shifted;
  vl units = __builtin_convertvector(__builtin_convertvector(sum * 0x1p30f, vi), vl);
  return (units << (UNIT - 30)) >> __builtin_convertvector(below, vl);
}

/* A logit that all tokens of at least this power reach, however this is rounded. */
static float logit_at(const struct search *row, float power) {
  float distance = power / row->scale;
  return row->top + distance - 1e-6f * (fabsf(row->top) + fabsf(distance));
}

/* The weights of each chunk together, and of all. */
static uint64_t weigh_chunks(struct search *row) {
  float padded[PIECE], least = logit_at(row, LOWEST_POWER);
  uint64_t total = 0;
  for (int c = 0; c < row->chunks; c++) {
    row->sums[c] = 0;
    if (row->tops[c] < least) continue;
    const float *at = chunk_of(row, c, padded);
    vl sums = {};
    for (int i = 0; i < PIECE; i += LANES) sums += weights_of(row, at + i);
    for (int i = 0; i < LANES; i++) row->sums[c] += sums[i];
    total += row->sums[c];
  }
  return total;
}

/* Rises with the logit. */
INLINE uint32_t key_of(float logit) {
  float x = logit + 0.0f; /* no negative zero */
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits >> 31 ? ~bits : bits | 1u << 31;
}

INLINE float logit_of(uint32_t key) {
  uint32_t bits = key >> 31 ? key & ~(1u << 31) : ~key;
  float logit;
  memcpy(&logit, &bits, 4);
  return logit;
}

/* The least key whose larger ones weigh less than `limit` together; weights 0: each weighs 1.
   Digit by digit, within the keys that there are. */
static uint32_t least_kept(const float *logits, const uint64_t *weights, int count, double limit) {
  uint32_t least = UINT32_MAX, most = 0;
  for (int i = 0; i < count; i++) {
    uint32_t key = key_of(logits[i]);
    least = key < least ? key : least;
    most = key > most ? key : most;
  }
  uint64_t above = 0;
  int bits = 0; /* bits of the key that are not known yet */
  while (bits < 32 && (most - least) >> bits) bits++;
  while (bits > 0) {
    uint64_t sums[256] = {};
    int shift = bits > 8 ? bits - 8 : 0;
    uint32_t digit = (1u << (bits - shift)) - 1;
    for (int i = 0; i < count; i++) {
      uint32_t at = (key_of(logits[i]) - least) >> shift;
      if (at < 256) sums[at] += weights ? weights[i] : 1;
    }
    while (digit && (double)(above + sums[digit]) < limit) above += sums[digit--];
    least += digit << shift;
    bits = shift;
  }
  return least;
}

/* Candidates are all logits from `least` on. Returns what they weigh together. */
static uint64_t gather(struct search *row, float least) {
  float padded[PIECE];
  int count = 0;
  for (int c = 0; c < row->chunks; c++) {
    if (row->tops[c] < least) continue;
    const float *at = chunk_of(row, c, padded);
    for (int i = 0; i < PIECE; i++) { /* no branch that a processor could not foresee */
      row->found[count] = at[i];
      row->ids[count] = c * PIECE + i;
      count += at[i] >= least;
    }
  }
  row->count = count;
  for (int i = 0; i < LANES; i++) row->found[count + i] = -INFINITY;
  for (int i = 0; i < count; i += LANES) *(vl *)(row->weights + i) = weights_of(row, row->found + i);
  uint64_t total = 0;
  for (int i = 0; i < count; i++) total += row->weights[i];
  return total;
}

/* Of the candidates, those with such a key and power stay. Returns what they weigh together. */
static uint64_t keep(struct search *row, uint32_t least_key, float least_power) {
  uint64_t total = 0;
  int count = 0;
  for (int i = 0; i < row->count; i++) {
    int stays = key_of(row->found[i]) >= least_key && power_of(row, row->found[i]) >= least_power;
    total += stays ? row->weights[i] : 0;
    row->found[count] = row->found[i];
    row->ids[count] = row->ids[i];
    row->weights[count] = row->weights[i];
    count += stays;
  }
  row->count = count;
  return total;
}

/* A logit that so many are at least equal to, one in each of as many chunks. */
static float least_of_chunks(const struct search *row, int count) {
  if (count >= row->chunks) return -INFINITY;
  return logit_of(least_kept(row->tops, 0, row->chunks, count));
}

/* Candidates become what top_p keeps of all, rarely more than a few. Returns what those weigh together. */
static uint64_t cut_nucleus(struct search *row, double top_p) {
  uint64_t total = weigh_chunks(row);
  double limit = top_p * (double)total;
  /* All that weigh less than this are together less than what may be missing. */
  double spared = fmax((total - limit) / row->vocab, 1);
  float bounds[] = {least_of_chunks(row, START), logit_at(row, log2(spared) + LOWEST_POWER),
                    logit_at(row, LOWEST_POWER)};
  for (int i = 0; i < 3; i++)
    if ((double)gather(row, bounds[i]) >= limit) break;
  return keep(row, least_kept(row->found, row->weights, row->count, limit), -INFINITY);
}

/* Candidates become what min_p, top_k and top_p keep. Returns what they weigh together.

   Whatever is as likely as a candidate is one too, so ranks among them are those in the row. */
static uint64_t cut(struct search *row, const struct way *way) {
  int has_k = way->top_k > 0 && way->top_k < row->vocab;
  if (!has_k && !(way->min_p > 0)) return cut_nucleus(row, way->top_p);
  float least_power = log2(way->min_p);
  float bound = logit_at(row, fmaxf(least_power, LOWEST_POWER));
  gather(row, has_k ? fmaxf(bound, least_of_chunks(row, way->top_k)) : bound);
  uint32_t kth = has_k ? least_kept(row->found, 0, row->count, way->top_k) : 0;
  uint64_t total = keep(row, kth, least_power);
  if (way->top_p >= 1) return total;
  double limit = way->top_p * (double)total;
  return keep(row, least_kept(row->found, row->weights, row->count, limit), -INFINITY);
}

/* In [0, 1), of the 53 highest bits that philox.py draws for (seed, choice, position). */
static double uniform(uint64_t seed, uint32_t choice, uint32_t position) {
  uint32_t words[4] = {choice, position}, keys[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
  for (int round = 0; round < 10; round++) {
    uint64_t even = (uint64_t)words[0] * 0xD2511F53, odd = (uint64_t)words[2] * 0xCD9E8D57;
    words[0] = (uint32_t)(odd >> 32) ^ words[1] ^ keys[0];
    words[2] = (uint32_t)(even >> 32) ^ words[3] ^ keys[1];
    words[1] = (uint32_t)odd;
    words[3] = (uint32_t)even;
    keys[0] += 0x9E3779B9;
    keys[1] += 0xBB67AE85;
  }
  return ((words[0] >> 5) * 0x1p26 + (words[1] >> 6)) * 0x1p-53;
}

/* Where a rising sum first exceeds `*target`, which becomes what it exceeds the sum before by. */
INLINE int first_above(const uint64_t *weights, uint64_t *target) {
  int place = 0;
  for (; weights[place] <= *target; place++) *target -= weights[place];
  return place;
}

static int draw(struct search *row, const struct way *way, int64_t position) {
  int is_cut = way->top_k > 0 || way->min_p > 0 || way->top_p < 1;
  float scale = LOG2_E / way->temperature;
  row->scale = scale < 3e38f ? scale : 3e38f;
  uint64_t total = is_cut ? cut(row, way) : weigh_chunks(row);
  double place = uniform(way->seed, way->choice, (uint32_t)position) * (double)total;
  uint64_t target = (uint64_t)place < total ? (uint64_t)place : total - 1;
  if (is_cut) return row->ids[first_above(row->weights, &target)];
  float padded[PIECE];
  uint64_t weights[PIECE];
  int chunk = first_above(row->sums, &target);
  const float *at = chunk_of(row, chunk, padded);
  for (int i = 0; i < PIECE; i += LANES) *(vl *)(weights + i) = weights_of(row, at + i);
  return chunk * PIECE + first_above(weights, &target);
}

/* Memory for one row's search, freed by its address; 0 if there is none. */
static void *prepare_search(struct search *row, const float *logits, int vocab) {
  size_t chunks = (vocab + PIECE - 1) / PIECE, room = chunks * PIECE + LANES;
  char *memory = malloc((chunks + room) * (8 + 4) + room * 4);
  *row = (struct search){.logits = logits, .vocab = vocab, .chunks = chunks};
  row->sums = (uint64_t *)memory;
  row->weights = row->sums + chunks;
  row->tops = (float *)(row->weights + room);
  row->found = row->tops + chunks;
  row->ids = (int32_t *)(row->found + room);
  return memory;
}

/* What the threads of a call share. ways 0: rows are only weighed. */
struct samples {
  float *logits;
  const struct way *ways;
  const int64_t *positions;
  const uint32_t *masks;
  int64_t *answers;
  int vocab;
  _Atomic int *failed;
};

static int64_t token_of(struct search *row, const struct way *way, int64_t position) {
  if (!isfinite(row->top)) return NO_TOKEN;
  return way->temperature > 0 ? draw(row, way, position) : likeliest(row);
}

static int64_t weigh_alone(struct search *row) {
  row->scale = LOG2_E;
  return isfinite(row->top) ? (int64_t)weigh_chunks(row) : 0;
}

static void sample_row(const void *what, int r, int next) {
  const struct samples *all = what;
  float *logits = all->logits + (size_t)r * all->vocab;
  struct search row;
  void *memory = prepare_search(&row, logits, all->vocab);
  if (!memory) {
    *all->failed = 1;
    return;
  }
  const struct way *way = all->ways ? all->ways + r : 0;
  if (way && way->is_masked && all->masks)
    forbid(logits, all->vocab, all->masks + (size_t)r * ((all->vocab + WORD - 1) / WORD));
  find_tops(&row);
  all->answers[r] = way ? token_of(&row, way, all->positions[r]) : weigh_alone(&row);
  free(memory);
}

/* logits     [rows, vocab]; those of a masked row change
   ways       [rows]
   positions  [rows]
   masks      [rows, words], read where a row is masked; token t is bit t % 32 of word t / 32
   tokens     [rows]; NO_TOKEN where the largest logit is not finite

   Returns whether there was too little memory. */
int sample(float *logits, const struct way *ways, const int64_t *positions, const uint32_t *masks,
           int64_t *tokens, int rows, int vocab) {
  _Atomic int failed = 0;
  struct samples all = {logits, ways, positions, masks, tokens, vocab, &failed};
  share_out(sample_row, &all, rows);
  return failed;
}

/* What the weights of each row [rows, vocab] add up to at temperature 1; 0 where the largest logit is not
   finite. Returns whether there was too little memory. */
int mass(float *logits, int64_t *sums, int rows, int vocab) {
  _Atomic int failed = 0;
  struct samples all = {.logits = logits, .answers = sums, .vocab = vocab, .failed = &failed};
  share_out(sample_row, &all, rows);
  return failed;
}

#if !defined(__clang__)
#pragma GCC pop_options
#endif

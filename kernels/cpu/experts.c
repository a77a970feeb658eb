/* A mixture of experts (MoE): each row goes through a few of many feed-forward layers. */

/* num experts: their first products, with `activation` after them, and their second ones. */
struct experts {
  const struct weight *up, *down;
  int num, activation;
};

/* Products by several weights. Product i has the items from begins[i] to begins[i + 1]. */
struct products {
  struct product *products;
  int *begins, num;
};

/* The product of an item: the last that begins no later. */
static int product_of(const struct products *all, int item) {
  int low = 0, high = all->num - 1;
  while (low < high) {
    int middle = (low + high + 1) / 2;
    if (all->begins[middle] <= item) low = middle;
    else high = middle - 1;
  }
  return low;
}

static void multiply_one(const void *what, int item, int next) {
  const struct products *all = what;
  int i = product_of(all, item);
  struct product product = all->products[i];
  if (next != NONE && next < all->begins[i + 1]) next -= all->begins[i];
  else if (next != NONE) {
    int j = product_of(all, next);
    const struct product *then = all->products + j;
    product.later = (struct later){&then->weight, then->after, then->m, 1 + next - all->begins[j]};
    next = NONE;
  }
  multiply_some(&product, item - all->begins[i], next);
}

/* The rows of each expert lie together, from a multiple of 16 on. */
struct places {
  int *firsts, *counts; /* each expert's first row, and how many it has */
  int *tokens; /* each row's token, or NONE */
  int *rows; /* the row of each of a token's experts */
  int num_rows;
};

/* x by the weight of the expert that each row belongs to. out begins for each expert where its rows do. */
static int multiply_each(const bf16 *x, int is_laid, const struct weight *weights, int num,
                         const struct places *places, bf16 *out, int lays_out, enum after after) {
  int rows = places->num_rows, groups = groups_of(weights), failed;
  size_t row_bytes = (size_t)weights->k * (weights->bits < 16 ? 1 : sizeof(left));
  int as_they_are = is_laid || (weights->bits == 16 && MULTIPLIES_PAIRS && !HAS_TILES);
  struct product whole = {.weight = *weights, .x = x, .m = rows};
  struct products all = {malloc(num * sizeof(struct product)), malloc((num + 1) * sizeof(int)), 0};
  struct laid *laid = &whole.laid;
  laid->rows = as_they_are ? (void *)x : aligned_alloc(64, (rows * row_bytes + 63) & ~(size_t)63);
  laid->scales = malloc((size_t)rows * (1 + groups) * 4);
  laid->totals = (int32_t *)(laid->scales + rows);
  failed = !all.products || !all.begins || !laid->rows || !laid->scales;
  if (!failed) {
    if (!as_they_are) share_out(lay_some, &whole, (rows + PANEL - 1) / PANEL);
    all.begins[0] = 0;
    for (int e = 0; e < num; e++) {
      int m = places->counts[e], first = places->firsts[e];
      if (!m) continue;
      struct product *product = all.products + all.num;
      *product = (struct product){
          .weight = weights[e],
          .laid = {(char *)laid->rows + first * row_bytes, laid->scales + first,
                   laid->totals + (size_t)first * groups},
          .out = out + (size_t)first * weights->n, .m = m, .after = after, .lays_out = lays_out};
      all.begins[all.num + 1] = all.begins[all.num] + items_of(&product->weight, m);
      all.num++;
    }
    share_out(multiply_one, &all, all.begins[all.num]);
  }
  free(all.products), free(all.begins), free(laid->scales);
  if (!as_they_are) free(laid->rows);
  return failed;
}

struct gathering {
  const bf16 *x;
  const struct places *places;
  bf16 *out;
  int n, lays_out;
};

static void gather_some(const void *what, int item, int next) {
  const struct gathering *all = what;
  for (int r = item * PANEL; r < (item + 1) * PANEL; r++) {
    int token = all->places->tokens[r], n = all->n;
    for (int i = 0, piece; i < n; i += piece) {
      piece = all->lays_out ? 32 : n;
      bf16 *to = all->out + (all->lays_out ? number_at(r, i, n) : (size_t)r * n);
      if (token == NONE) memset(to, 0, piece * 2);
      else memcpy(to, all->x + (size_t)token * n + i, piece * 2);
    }
  }
}

struct sum {
  const bf16 *made;
  const int *rows;
  const float *shares;
  bf16 *out;
  int m, n, chosen, adds;
};

static void sum_some(const void *what, int item, int next) {
  const struct sum *all = what;
  int n = all->n, rows = rows_of_item(n);
  for (int t = item * rows; t < all->m && t < (item + 1) * rows; t++) {
    const int *row = all->rows + t * all->chosen;
    const float *share = all->shares + t * all->chosen;
    bf16 *out = all->out + (size_t)t * n;
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
      vf sum = all->adds ? widen_all(*(vb *)(out + i)) : (vf){};
      for (int c = 0; c < all->chosen; c++)
        sum += share[c] * widen_all(*(vb *)(all->made + (size_t)row[c] * n + i));
      *(vb *)(out + i) = narrow_all(sum);
    }
    for (; i < n; i++) {
      float sum = all->adds ? widen(out[i]) : 0;
      for (int c = 0; c < all->chosen; c++) sum += share[c] * widen(all->made[(size_t)row[c] * n + i]);
      out[i] = narrow(sum);
    }
  }
}

/* Gives each expert its rows, in the order of the tokens. */
static void place_rows(struct places *places, const int32_t *experts, int pairs, int chosen, int num) {
  int rows = 0;
  memset(places->counts, 0, num * sizeof(int));
  for (int p = 0; p < pairs; p++) places->counts[experts[p]]++;
  for (int e = 0; e < num; e++) places->firsts[e] = rows, rows += (places->counts[e] + 15) & ~15;
  for (int r = 0; r < rows; r++) places->tokens[r] = NONE;
  memset(places->counts, 0, num * sizeof(int));
  for (int p = 0; p < pairs; p++) {
    int row = places->rows[p] = places->firsts[experts[p]] + places->counts[experts[p]]++;
    places->tokens[row] = p / chosen;
  }
  places->num_rows = rows;
}

/* x [m, hidden] -> out [m, hidden], or added to it: the sum of what the chosen experts make of a row, by
   their shares.

   chosen  [m, num_chosen], numbers of experts, none twice in a row
   shares  [m, num_chosen]

   A row's bits depend on that row alone. Returns 0; 1 without memory. */
int experts(const bf16 *x, const struct experts *experts, const int32_t *chosen, const float *shares,
            int num_chosen, bf16 *out, int adds, int m) {
  const struct weight *up = experts->up, *down = experts->down;
  int size = up->k, num = experts->num, pairs = m * num_chosen;
  size_t most = pairs + 15 * (size_t)(pairs < num ? pairs : num);
  int *numbers = malloc((2 * num + most + pairs) * sizeof(int));
  bf16 *rows = aligned_alloc(64, (most * (2 * size + up->n) * 2 + 63) & ~(size_t)63);
  int failed = !numbers || !rows;
  if (!failed) {
    struct places places = {numbers, numbers + num, numbers + 2 * num, numbers + 2 * num + most};
    bf16 *made = rows + most * size, *inner = made + most * size;
    int lays_rows = takes_laid(up), lays_inner = takes_laid(down);
    place_rows(&places, chosen, pairs, num_chosen, num);
    struct gathering gathering = {x, &places, rows, size, lays_rows};
    share_out(gather_some, &gathering, places.num_rows / PANEL);
    failed = multiply_each(rows, lays_rows, up, num, &places, inner, lays_inner, experts->activation) ||
             multiply_each(inner, lays_inner, down, num, &places, made, 0, NARROW);
    struct sum sum = {made, places.rows, shares, out, m, size, num_chosen, adds};
    if (!failed) share_out(sum_some, &sum, (m + rows_of_item(size) - 1) / rows_of_item(size));
  }
  free(numbers), free(rows);
  return failed;
}

/* How experts are chosen by scores, one for each; `penstock.kernels.linear.choose` has the rules. */
struct choice {
  const float *bias; /* [num], or none */
  int num, chosen, is_softmax, groups, chosen_groups, of_best, normalises;
  float factor;
};

/* The place of the highest of num ranks that is not taken, and which is then. */
static int take_best(const float *ranks, char *taken, int num) {
  int best = NONE;
  for (int i = 0; i < num; i++)
    if (!taken[i] && (best == NONE || ranks[i] > ranks[best])) best = i;
  taken[best] = 1;
  return best;
}

/* Takes all experts but those of the best groups. */
static void leave_groups(const struct choice *choice, const float *ranks, char *taken) {
  int size = choice->num / choice->groups;
  float sums[choice->groups];
  char is_chosen[choice->groups];
  for (int g = 0; g < choice->groups; g++) {
    sums[g] = 0, is_chosen[g] = 0;
    const float *of_group = ranks + g * size;
    for (int i = 0; i < choice->of_best; i++) sums[g] += of_group[take_best(of_group, taken + g * size, size)];
  }
  for (int i = 0; i < choice->chosen_groups; i++) take_best(sums, is_chosen, choice->groups);
  for (int i = 0; i < choice->num; i++) taken[i] = !is_chosen[i / size];
}

static void choose_row(const struct choice *choice, const float *logits, int32_t *chosen, float *shares) {
  int num = choice->num;
  float scores[num], ranks[num], most = logits[0], sum = 0;
  char taken[num];
  for (int i = 1; i < num; i++) most = logits[i] > most ? logits[i] : most;
  for (int i = 0; i < num; i++) {
    scores[i] = choice->is_softmax ? expf(logits[i] - most) : 1 / (1 + expf(-logits[i]));
    sum += scores[i], taken[i] = 0;
  }
  for (int i = 0; i < num; i++) {
    if (choice->is_softmax) scores[i] /= sum;
    ranks[i] = scores[i] + (choice->bias ? choice->bias[i] : 0);
  }
  if (choice->chosen_groups < choice->groups) leave_groups(choice, ranks, taken);
  sum = 1e-20f;
  for (int c = 0; c < choice->chosen; c++) chosen[c] = take_best(ranks, taken, num), sum += scores[chosen[c]];
  float factor = choice->normalises ? choice->factor / sum : choice->factor;
  for (int c = 0; c < choice->chosen; c++) shares[c] = scores[chosen[c]] * factor;
}

struct choosing {
  const struct choice *choice;
  const float *logits;
  int32_t *chosen;
  float *shares;
  int m;
};

static void choose_some(const void *what, int item, int next) {
  const struct choosing *all = what;
  int num_chosen = all->choice->chosen;
  for (int r = item * PANEL; r < least(all->m, (item + 1) * PANEL); r++)
    choose_row(all->choice, all->logits + (size_t)r * all->choice->num, all->chosen + r * num_chosen,
               all->shares + r * num_chosen);
}

/* logits [m, num] -> the numbers of the experts that are chosen, and their shares, [m, chosen] */
void choose(const float *logits, const struct choice *choice, int32_t *chosen, float *shares, int m) {
  struct choosing all = {choice, logits, chosen, shares, m};
  share_out(choose_some, &all, (m + PANEL - 1) / PANEL);
}

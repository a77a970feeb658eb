/* All layers of a decoder in one call: the operations of `kernels/`, one after the other. */

/* Norms stand before and after attention and the feed-forward layer, whose result is then added to the
   residual. head_norms: queries and keys are normalised, each head or all of a row. is_parallel: both read
   the same rows. table: which of the pass's rotations; below 0 none. gate_up has n of one of its parts. key_scale and value_scale are the cache's. */
struct layer {
  struct weight qkv, output, gate_up, down;
  struct norm attention_in, attention_out, mlp_in, mlp_out, query_norm, key_norm;
  int norms_whole_rows, is_parallel, activation, table;
  struct scoring scoring;
  float key_scale, value_scale;
};

/* What a pass brings, as `rotate_and_store` and `paged_attention` have it; a cosine and a sine for each
   table. */
struct pass {
  const bf16 *const *cos, *const *sin;
  const int64_t *slots;
  const int32_t *query_start, *context_lens, *tables;
  int tokens, width, seqs, heads, kv_heads, head_dim, block_size, kept;
};

/* Memory for the rows of a pass: normed is as wide as hidden, wide as the larger n of qkv and gate_up. */
struct room {
  bf16 *normed, *query, *attended, *wide;
};

/* hidden += rows by a weight, normalised if there is a norm. */
static int add_product(const bf16 *rows, int is_laid, const struct weight *w, const struct norm *norm,
                       bf16 *hidden, bf16 *product, int tokens, struct later later) {
  if (!norm->weight) return multiply_by(rows, is_laid, w, hidden, 0, tokens, ADD, later);
  int failed = multiply_by(rows, is_laid, w, product, 0, tokens, NARROW, later);
  norm_rows(product, norm, hidden, 0, 1, tokens, w->n, w->n);
  return failed;
}

/* The rows that a product reads: hidden itself, or normed, which is written. */
static const bf16 *rows_for(const struct weight *w, const struct norm *norm, const bf16 *hidden, bf16 *normed,
                            int tokens, int *is_laid) {
  *is_laid = norm->weight && takes_laid(w);
  if (!norm->weight) return hidden;
  norm_rows(hidden, norm, normed, *is_laid, 0, tokens, w->k, w->k);
  return normed;
}

static int attend_layer(const struct layer *layer, const struct pass *pass, char *blocks, struct room room,
                        int lays_out) {
  int tokens = pass->tokens, heads = pass->heads, kv_heads = pass->kv_heads, head_dim = pass->head_dim;
  int row = layer->qkv.n, whole = layer->norms_whole_rows;
  struct cache cache = {blocks,     kv_heads,         pass->block_size,  head_dim,
                        pass->kept, layer->key_scale, layer->value_scale};
  const struct norm *of_query = &layer->query_norm, *of_key = &layer->key_norm;
  if (whole) {
    bf16 *keys = room.wide + heads * head_dim;
    norm_rows(room.wide, of_query, room.wide, 0, 0, tokens, heads * head_dim, row);
    norm_rows(keys, of_key, keys, 0, 0, tokens, kv_heads * head_dim, row);
  }
  rotate_and_store(room.wide, whole ? 0 : of_query->weight, whole ? 0 : of_key->weight, of_query->eps,
                   layer->table < 0 ? 0 : pass->cos[layer->table],
                   layer->table < 0 ? 0 : pass->sin[layer->table], pass->slots, &cache, room.query, tokens,
                   heads);
  return attend_all(room.query, &cache, pass->query_start, pass->context_lens, pass->tables, pass->width,
                    pass->seqs, heads, &layer->scoring, room.attended, lays_out);
}

/* blocks  of each layer
   hidden  [tokens, hidden_size], which becomes what the last layer makes of it
   memory  [tokens up to a multiple of 16, hidden_size + 2 * heads * head_dim + widest], widest: the larger
           n of qkv and gate_up
   Returns 0; 1 without memory. */
int run_layers(const struct layer *layers, int num, const struct pass *pass, char *const *blocks,
               bf16 *hidden, bf16 *memory) {
  int tokens = pass->tokens, size = layers->qkv.k, failed = 0;
  size_t rows = (tokens + 15) & ~15, of_heads = rows * pass->heads * pass->head_dim;
  struct room room = {memory, memory + rows * size};
  room.attended = room.query + of_heads, room.wide = room.attended + of_heads;
  for (int i = 0; i < num && !failed; i++) {
    const struct layer *layer = layers + i, *then = i + 1 < num ? layer + 1 : 0;
    int is_laid, lays_attended = takes_laid(&layer->output), lays_wide = takes_laid(&layer->down);
    const bf16 *x = rows_for(&layer->qkv, &layer->attention_in, hidden, room.normed, tokens, &is_laid);
    failed |= multiply_by(x, is_laid, &layer->qkv, room.wide, 0, tokens, NARROW,
                          (struct later){&layer->output, ADD});
    failed |= attend_layer(layer, pass, blocks[i], room, lays_attended);
    failed |= add_product(room.attended, lays_attended, &layer->output, &layer->attention_out, hidden,
                          room.normed, tokens, (struct later){&layer->gate_up, layer->activation});
    if (!layer->is_parallel)
      x = rows_for(&layer->gate_up, &layer->mlp_in, hidden, room.normed, tokens, &is_laid);
    failed |= multiply_by(x, is_laid, &layer->gate_up, room.wide, lays_wide, tokens, layer->activation,
                          (struct later){&layer->down, ADD});
    failed |= add_product(room.wide, lays_wide, &layer->down, &layer->mlp_out, hidden, room.normed, tokens,
                          (struct later){then ? &then->qkv : 0, NARROW});
  }
  return failed;
}

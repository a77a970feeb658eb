/* All layers of a decoder in one call: the operations of `kernels/`, one after the other. */

/* query_norm and key_norm: none, or weights [head_dim]. gate_up has n of one of its two parts. */
struct layer {
  struct weight qkv, output, gate_up, down;
  const bf16 *attention_norm, *query_norm, *key_norm, *mlp_norm;
  float norm_eps, head_norm_eps;
  struct scoring scoring;
};

/* What a pass brings, as `rotate_and_store` and `paged_attention` have it. */
struct pass {
  const bf16 *cos, *sin;
  const int64_t *slots;
  const int32_t *query_start, *context_lens, *tables;
  int tokens, width, seqs, heads, kv_heads, head_dim, block_size;
};

/* blocks  of each layer
   hidden  [tokens, hidden_size], which becomes what the last layer makes of it
   room    [tokens up to a multiple of 16, hidden_size + 2 * heads * head_dim + widest], widest: the larger
           n of qkv and gate_up
   Returns 0; 1 without memory. */
int run_layers(const struct layer *layers, int num, const struct pass *pass, bf16 *const *blocks,
               bf16 *hidden, bf16 *room) {
  int tokens = pass->tokens, heads = pass->heads, kv_heads = pass->kv_heads, head_dim = pass->head_dim;
  int size = layers->qkv.k, rows = (tokens + 15) & ~15, failed = 0;
  bf16 *normed = room, *query = normed + (size_t)rows * size;
  bf16 *attended = query + (size_t)rows * heads * head_dim;
  bf16 *wide = attended + (size_t)rows * heads * head_dim;
  for (int i = 0; i < num && !failed; i++) {
    const struct layer *layer = layers + i, *then = i + 1 < num ? layer + 1 : 0;
    int lays_normed = takes_laid(&layer->qkv), lays_attended = takes_laid(&layer->output);
    int lays_wide = takes_laid(&layer->down);
    norm_rows(hidden, layer->attention_norm, normed, lays_normed, tokens, size, layer->norm_eps);
    failed |= multiply_by(normed, lays_normed, &layer->qkv, wide, 0, tokens, NARROW,
                          (struct later){&layer->output, ADD});
    rotate_and_store(wide, layer->query_norm, layer->key_norm, layer->head_norm_eps, pass->cos, pass->sin,
                     pass->slots, blocks[i], query, tokens, heads, kv_heads, head_dim, pass->block_size);
    failed |= attend_all(query, blocks[i], pass->query_start, pass->context_lens, pass->tables, pass->width,
                         pass->seqs, heads, kv_heads, head_dim, pass->block_size, &layer->scoring,
                         attended, lays_attended);
    failed |= multiply_by(attended, lays_attended, &layer->output, hidden, 0, tokens, ADD,
                          (struct later){&layer->gate_up, SILU_MUL});
    lays_normed = takes_laid(&layer->gate_up);
    norm_rows(hidden, layer->mlp_norm, normed, lays_normed, tokens, size, layer->norm_eps);
    failed |= multiply_by(normed, lays_normed, &layer->gate_up, wide, lays_wide, tokens, SILU_MUL,
                          (struct later){&layer->down, ADD});
    failed |= multiply_by(wide, lays_wide, &layer->down, hidden, 0, tokens, ADD,
                          (struct later){then ? &then->qkv : 0, NARROW});
  }
  return failed;
}

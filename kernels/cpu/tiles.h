/* Products on AMX tiles: 16 rows by panels, 64 bytes of each row at a time. */
#pragma once
#include "panels.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define HAS_TILES 1

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Tiles 0-3 hold sums, 4 a left side and 5 a panel; 6 and 7 the same at half the depth. */
struct tile_config {
  uint8_t palette, start_row, reserved[14];
  uint16_t column_bytes[16];
  uint8_t rows[16];
};

/* Linux gives tiles to a process that asks. */
static int ask_for_tiles(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

static _Thread_local int rows_of_tiles; /* 0: this thread has none */

/* rows: of a left side and its sums, at most 16. Who multiplies calls it first. */
static void use_tiles(int rows) {
  if (rows == rows_of_tiles) return;
  struct tile_config config = {.palette = 1,
                               .column_bytes = {64, 64, 64, 64, 64, 64, 32, 64},
                               .rows = {rows, rows, rows, rows, rows, 16, rows, 8}};
  __asm__ volatile("" ::"r"(&config) : "memory"); /* gcc 12 thinks that less of it is read */
  _tile_loadconfig(&config);
  rows_of_tiles = rows;
}

/* What a thread keeps in tiles is saved at each switch to another. */
static void leave_tiles(void) {
  if (rows_of_tiles) _tile_release();
  rows_of_tiles = 0;
}

#define MULTIPLY(g) \
  if (numbers == INT8) { _tile_dpbssd(g, 4, 5); } else { _tile_dpbf16ps(g, 4, 5); }

/* A step multiplies what lies in tile `a` for each group of rows by the panel in tile `b`. */
#define TILE_GROUPS(EACH)                              \
  EACH(0)                                              \
  if (groups > 1) { EACH(1) }                          \
  if (groups > 2) { EACH(2) }                          \
  if (groups > 3) { EACH(3) }

/* Where the left sides of a product lie: rows, groups of 16 of them, and steps along a row. */
struct apart {
  size_t row_bytes, group_bytes, step_bytes;
};

enum numbers { BF16, INT8 };

/* `num` panels one below the other, of `depth`, and as many that are multiplied later. */
struct stack {
  const void *const *panels, *const *next;
  int num, depth;
};

INLINE void fetch_tile(const char *next, int bytes) {
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(next + i, 0, 2);
}

/* sums[groups * 16][16] += x[groups * 16][num * depth] by a stack; float sums of bf16, int32 of int8.
   A step takes 64 bytes of a row: 32 bf16, or 64 int8; 32 where a panel of bf16 is no deeper than 16.
   Each fetches as much of what is next. */
INLINE void multiply_tiles(const int groups, const enum numbers numbers, const void *x, struct apart apart,
                           struct stack stack, void *sums, size_t sums_stride) {
  const char *at = x;
  const size_t group_bytes = apart.group_bytes, row_bytes = apart.row_bytes;
  size_t sums_bytes = sums_stride * 4, sums_apart = 16 * sums_bytes;
#define LOAD(g) _tile_loadd(g, (char *)sums + g * sums_apart, sums_bytes);
  TILE_GROUPS(LOAD)
  for (int s = 0; s < stack.num; s++) {
    const char *panel = stack.panels[s], *next = stack.next[s];
    if (numbers == BF16 && stack.depth < 32) {
      _tile_loadd(7, panel, 64);
      fetch_tile(next, 512);
#define HALF(g) _tile_loadd(6, at + g * group_bytes, row_bytes); _tile_dpbf16ps(g, 6, 7);
      TILE_GROUPS(HALF)
      at += apart.step_bytes;
    }
    const int step = numbers == INT8 ? 64 : 32;
    for (int i = step; i <= stack.depth; i += step, at += apart.step_bytes, panel += 1024, next += 1024) {
      _tile_loadd(5, panel, 64);
      fetch_tile(next, 1024);
#define WHOLE(g) _tile_loadd(4, at + g * group_bytes, row_bytes); MULTIPLY(g)
      TILE_GROUPS(WHOLE)
    }
  }
#define KEEP(g) _tile_stored(g, (char *)sums + g * sums_apart, sums_bytes);
  TILE_GROUPS(KEEP)
}

/* The same for any number of rows, in whole groups. */
INLINE void multiply_groups(int rows, const enum numbers numbers, const void *x, struct apart apart,
                            struct stack stack, void *sums, size_t sums_stride) {
  for (int groups = (rows + 15) / 16; groups > 0; groups -= 4) {
#define CASE(G)                                                     \
  case G:                                                           \
    multiply_tiles(G, numbers, x, apart, stack, sums, sums_stride); \
    break;
    switch (groups < 4 ? groups : 4) { CASE(1) CASE(2) CASE(3) CASE(4) }
#undef CASE
    stack.next = stack.panels; /* what is next was fetched */
    x = (const char *)x + 4 * apart.group_bytes, sums = (char *)sums + 256 * sums_stride;
  }
}
#else
#define HAS_TILES 0
static void use_tiles(int rows) { (void)rows; }
static void leave_tiles(void) {}
#endif

/* Products on AMX tiles: 16 rows by panels, 64 bytes of each row at a time. */
#pragma once
#include "panels.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define HAS_TILES 1

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Tiles 0-3 hold sums, and what is multiplied the others: 4 and 5 left sides, 6 and 7 panels. Or, for
   attention, 4 a left side and 5 a panel; 6 and 7 the same at half the depth. */
struct tile_config {
  uint8_t palette, start_row, reserved[14];
  uint16_t column_bytes[16];
  uint8_t rows[16];
};

/* Linux gives tiles to a process that asks. */
static int ask_for_tiles(void) { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

static _Thread_local int tiles_hold; /* 0: this thread has none */

/* rows: of a left side and its sums, at most 16. Who multiplies calls it first. */
static void use_tiles(int rows, int for_attention) {
  int hold = rows + 32 * for_attention;
  if (hold == tiles_hold) return;
  struct tile_config config = {.palette = 1,
                               .column_bytes = {64, 64, 64, 64, 64, 64, 64, 64},
                               .rows = {rows, rows, rows, rows, rows, rows, 16, 16}};
  if (for_attention) {
    config.column_bytes[6] = 32;
    config.rows[5] = 16, config.rows[6] = rows, config.rows[7] = 8;
  }
  __asm__ volatile("" ::"r"(&config) : "memory"); /* gcc 12 thinks that less of it is read */
  _tile_loadconfig(&config);
  tiles_hold = hold;
}

/* What a thread keeps in tiles is saved at each switch to another. */
static void leave_tiles(void) {
  if (tiles_hold) _tile_release();
  tiles_hold = 0;
}

enum numbers { BF16, INT8 };

/* Some left sides, 16 rows each, and some panels. A step takes 64 bytes of a row, and fetches `pace` bytes of
   each `next`, where there is one. */
struct sides {
  const char *x, *panel, *next[2];
  size_t x_apart, panel_apart;
  int steps, pace;
};

/* So many bytes; of half a tile and more the first half, and the processor, which sees where this leads, brings
   the rest: when all is asked for at once, what brings lines into the nearest cache is full, and tiles wait. */
INLINE void fetch_ahead(const void *next, const int bytes) {
  int asked = bytes < 512 ? bytes : bytes / 2;
  for (int i = 0; i < asked; i += 64) __builtin_prefetch((const char *)next + i, 0, 2);
}

#define FOUR_TILES(DO) DO(0) DO(1) DO(2) DO(3)

#define EACH_SUM(DO)                              \
  DO(0, 0, 0)                                     \
  if (panels > 1) { DO(1, 0, PANEL) }             \
  if (groups > 1) { DO(2, 16, 0) }                \
  if (groups > 1 && panels > 1) { DO(3, 16, PANEL) }
#define BY(sum, x, panel) \
  if (numbers == INT8) { _tile_dpbssd(sum, x, panel); } else { _tile_dpbf16ps(sum, x, panel); }

typedef void between(const void *what, int step);

/* sums[groups * 16][WIDTH] += left sides by panels; is_first: sums = them. float sums of bf16, int32 of
   int8. Two by two each tile that is loaded is multiplied twice. between: what vectors do meanwhile. */
INLINE void multiply_block(const int groups, const int panels, const enum numbers numbers,
                           const struct sides *sides, int is_first, void *sums, between *const between,
                           const void *what) {
  const char *x = sides->x, *panel = sides->panel, *const *next = sides->next;
#define CLEAR(t, row, column) _tile_zero(t);
#define LOAD(t, row, column) _tile_loadd(t, (float *)sums + row * WIDTH + column, WIDTH * 4);
#define KEEP(t, row, column) _tile_stored(t, (float *)sums + row * WIDTH + column, WIDTH * 4);
  if (is_first) { EACH_SUM(CLEAR) } else { EACH_SUM(LOAD) }
  for (int i = 0; i < sides->steps; i++, x += 1024, panel += 1024) {
    _tile_stream_loadd(4, x, 64);
    _tile_loadd(6, panel, 64);
    if (next[0]) fetch_ahead(next[0] + i * sides->pace, sides->pace);
    if (panels > 1) _tile_loadd(7, panel + sides->panel_apart, 64);
    if (next[1]) fetch_ahead(next[1] + i * sides->pace, sides->pace);
    if (groups > 1) _tile_stream_loadd(5, x + sides->x_apart, 64);
    BY(0, 4, 6)
    if (panels > 1) { BY(1, 4, 7) }
    if (groups > 1) { BY(2, 5, 6) }
    if (groups > 1 && panels > 1) { BY(3, 5, 7) }
    if (between) between(what, i);
  }
  EACH_SUM(KEEP)
#undef CLEAR
#undef LOAD
#undef KEEP
}

/* The same of up to 32 rows and two panels. */
INLINE void multiply_sides(int rows, int panels, const enum numbers numbers, const struct sides *sides,
                           int is_first, void *sums, between *const between, const void *what) {
  if (rows > 16 && panels > 1) multiply_block(2, 2, numbers, sides, is_first, sums, between, what);
  else if (rows > 16) multiply_block(2, 1, numbers, sides, is_first, sums, between, what);
  else if (panels > 1) multiply_block(1, 2, numbers, sides, is_first, sums, between, what);
  else multiply_block(1, 1, numbers, sides, is_first, sums, between, what);
}

#else
#define HAS_TILES 0
static void use_tiles(int rows, int for_attention) { (void)rows, (void)for_attention; }
static void leave_tiles(void) {}
#endif

/* Where a row of a left side begins, in bytes. With tiles rows lie as [ceil(m / 16)][steps][16][64 bytes]: a
   tile reads neighbours. */
INLINE size_t row_at(int row, size_t row_bytes) {
  return HAS_TILES ? row / 16 * 16 * row_bytes + row % 16 * 64 : row * row_bytes;
}

/* Where a number of a row of `n` in bf16 is; neighbours follow up to the next multiple of 32. */
INLINE size_t number_at(int row, int column, int n) {
  return row_at(row, 2 * (size_t)n) / 2 + (HAS_TILES ? column / 32 * 512 + column % 32 : column);
}

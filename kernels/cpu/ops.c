/* The compiled operations, one translation unit: `library.py` compiles it for the machine it runs on. */
#include "linear.c"
#include "attention.c"
#include "rows.c"
#include "layers.c"
#include "experts.c"
#include "sample.c"

/* Which of the processor's ways to multiply was compiled in; what it needs from the system is asked for. */
const char *prepare(void) {
#if HAS_TILES
  return ask_for_tiles() ? "AMX" : 0;
#elif MULTIPLIES_PAIRS
  return "AVX-512 bf16";
#elif LANES == 16
  return "AVX-512";
#elif LANES == 8
  return "AVX2";
#elif defined(__ARM_NEON)
  return "NEON";
#else
  return "no vectors of 8 or more";
#endif
}

/* What all cores do at most together: plain loops that have nothing else to do.

   Each is passed several times, the threads begin each pass together, and the fastest counts: what a
   neighbour takes away is no limit of the machine. */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define VECTOR 64
#elif defined(__AVX__)
#define VECTOR 32
#else
#define VECTOR 16
#endif
#define LINE 64
#define SUMS 12 /* as many products are under way at once */
#define PRODUCTS 400000 /* a millisecond or two */
#define INLINE static inline __attribute__((always_inline))

typedef uint64_t words __attribute__((vector_size(VECTOR), aligned(VECTOR), may_alias));
typedef float floats __attribute__((vector_size(VECTOR)));

struct job {
  void (*work)(const struct job *, int thread);
  const char *memory;
  size_t bytes; /* each thread's share */
  int way, passes;
  _Atomic int threads, waiting, rounds;
  double least_s;
};

struct member {
  struct job *job;
  int number;
};

static double now_s(void) {
  struct timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return at.tv_sec + at.tv_nsec * 1e-9;
}

static void meet(struct job *job) {
  int rounds = atomic_load(&job->rounds);
  if (atomic_fetch_add(&job->waiting, 1) + 1 == job->threads) {
    atomic_store(&job->waiting, 0);
    atomic_fetch_add(&job->rounds, 1);
  } else {
    while (atomic_load(&job->rounds) == rounds) sched_yield();
  }
}

static void *take_part(void *which) {
  struct member *self = which;
  struct job *job = self->job;
  for (int pass = 0; pass < job->passes; pass++) {
    meet(job);
    double began_s = now_s();
    job->work(job, self->number);
    meet(job);
    double took_s = now_s() - began_s;
    if (!self->number && (!pass || took_s < job->least_s)) job->least_s = took_s;
  }
  return 0;
}

/* What one thread does in a second, times the threads: fewer than asked for where no more can be had. */
static double fastest_per_s(struct job *job, double each) {
  int threads = job->threads;
  pthread_t others[threads];
  struct member members[threads];
  for (int i = 1; i < threads; i++) {
    members[i] = (struct member){job, i};
    if (pthread_create(others + i, 0, take_part, members + i)) job->threads = threads = i;
  }
  members[0] = (struct member){job, 0};
  take_part(members);
  for (int i = 1; i < threads; i++) pthread_join(others[i], 0);
  return each * threads / job->least_s;
}

static _Thread_local volatile uint64_t kept; /* so that no compiler leaves the work out */

/* So many places of the thread's part are read in turn; what lies `ahead` bytes further is asked for. */
INLINE void read_part(const struct job *job, int thread, const int streams, const size_t ahead) {
  const char *part = job->memory + job->bytes * thread;
  size_t apart = job->bytes / streams / 256 * 256;
  words sums[4] = {};
  for (size_t at = 0; at < apart; at += 256)
    for (int s = 0; s < streams; s++) {
      const char *from = part + s * apart + at;
      if (ahead)
        for (int line = 0; line < 256; line += LINE) __builtin_prefetch(from + ahead + line, 0, 2);
      for (int i = 0; i < 256; i += 4 * VECTOR)
        for (int j = 0; j < 4; j++)
          if (i + j * VECTOR < 256) sums[j] ^= *(const words *)(from + i + j * VECTOR);
    }
  words sum = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
  kept = sum[0];
}

#define AHEAD 2048
static void read_all(const struct job *job, int thread) {
  switch (job->way) {
    case 0: return read_part(job, thread, 1, 0);
    case 1: return read_part(job, thread, 2, 0);
    case 2: return read_part(job, thread, 4, 0);
    case 3: return read_part(job, thread, 8, 0);
    case 4: return read_part(job, thread, 1, AHEAD);
    case 5: return read_part(job, thread, 2, AHEAD);
    case 6: return read_part(job, thread, 4, AHEAD);
    default: return read_part(job, thread, 8, AHEAD);
  }
}

/* Bytes a second that all threads read of memory, [bytes] at a multiple of 64; way: 0 to 7. */
double reads_per_s(const char *memory, size_t bytes, int threads, int passes, int way) {
  size_t each = bytes / threads / 4096 * 4096;
  struct job job = {read_all, memory, each, .way = way, .passes = passes, .threads = threads};
  return fastest_per_s(&job, each);
}

static void multiply_floats(const struct job *job, int thread) {
  floats sums[SUMS], x = (floats){} + 0.5f, y = (floats){} + 1.0f;
  for (int s = 0; s < SUMS; s++) sums[s] = x * (float)s;
  for (int i = 0; i < PRODUCTS; i++)
    for (int s = 0; s < SUMS; s++) sums[s] = sums[s] * x + y;
  for (int s = 0; s < SUMS; s++) kept = (uint64_t)sums[s][0];
}

#if defined(__AVX512BF16__)
static void multiply_pairs(const struct job *job, int thread) {
  __m512 sums[SUMS];
  __m512bh x = (__m512bh)_mm512_set1_epi16(0x3f00), y = (__m512bh)_mm512_set1_epi16(thread + 1);
  for (int s = 0; s < SUMS; s++) sums[s] = _mm512_set1_ps((float)s);
  for (int i = 0; i < PRODUCTS; i++)
    for (int s = 0; s < SUMS; s++) sums[s] = _mm512_dpbf16_ps(sums[s], x, y);
  for (int s = 0; s < SUMS; s++) kept = (uint64_t)_mm512_cvtss_f32(sums[s]);
}
#endif

#if defined(__AVX512VNNI__)
static void multiply_bytes(const struct job *job, int thread) {
  __m512i sums[SUMS], x = _mm512_set1_epi8(3), y = _mm512_set1_epi8((char)(thread + 1));
  for (int s = 0; s < SUMS; s++) sums[s] = _mm512_set1_epi32(s);
  for (int i = 0; i < PRODUCTS; i++)
    for (int s = 0; s < SUMS; s++) sums[s] = _mm512_dpbusd_epi32(sums[s], x, y);
  for (int s = 0; s < SUMS; s++) kept = (uint64_t)_mm512_cvtsi512_si32(sums[s]);
}
#endif

/* Operations a second on numbers of so many bits: a multiplication and an addition are two. 0 where there is
   no instruction for them, or it takes more than a loop, as AMX does. */
double multiplies_per_s(int threads, int passes, int bits) {
  struct job job = {.passes = passes, .threads = threads};
  if (bits == 32) job.work = multiply_floats;
#if defined(__AVX512BF16__)
  if (bits == 16) job.work = multiply_pairs;
#endif
#if defined(__AVX512VNNI__)
  if (bits == 8) job.work = multiply_bytes;
#endif
  return job.work ? fastest_per_s(&job, 2.0 * (VECTOR * 8 / bits) * SUMS * PRODUCTS) : 0;
}

/* Where a team's threads run when others want the cores too.

   Left to itself the scheduler may keep two threads of a team on one core for long while another idles:
   a thread that ran lately is not moved. So two things are said to it. A helper that finds itself on its
   caller's core leaves it. And a helper that holds an item and is kept from running (its CPU time stands
   still) is brought to the caller's core, which has nothing else to do than to wait for it. On two cores
   beside a neighbour that wants 30 % of them this is worth a fifth. Linux alone; elsewhere nothing is said. */
#pragma once
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "panels.h"

/* A member of a team: who calls it, or a helper. */
struct member {
  _Alignas(64) _Atomic uint64_t range; /* range of items: where it ends << 32 | where it begins */
  _Alignas(64) _Atomic int holds_items;
  _Atomic int is_bound; /* to the core that it was brought to */
  int number; /* 0: the caller */
  pthread_t thread;
  int64_t ran_ns; /* CPU time that it had run when its caller looked last */
  struct member *next;
};

#if defined(__linux__)
#include <sched.h>

static cpu_set_t allowed; /* to the process, when the team was gathered */

INLINE int this_core(void) { return sched_getcpu(); }

static void note_allowed_cores(void) {
  if (sched_getaffinity(0, sizeof allowed, &allowed)) CPU_ZERO(&allowed);
}

static void run_anywhere(struct member *self) {
  atomic_store(&self->is_bound, 0);
  if (CPU_COUNT(&allowed)) pthread_setaffinity_np(self->thread, sizeof allowed, &allowed);
}

/* Called by the helper itself. */
static void leave_core(struct member *self, int core) {
  cpu_set_t others = allowed;
  CPU_CLR(core, &others);
  if (CPU_COUNT(&others)) pthread_setaffinity_np(self->thread, sizeof others, &others);
}

/* Called by who has nothing to do but wait for it. */
static void bring_here(struct member *helper) {
  if (!CPU_COUNT(&allowed)) return; /* more cores than a set has room for */
  cpu_set_t here;
  CPU_ZERO(&here);
  CPU_SET(sched_getcpu(), &here);
  atomic_store(&helper->is_bound, 1);
  pthread_setaffinity_np(helper->thread, sizeof here, &here);
}

static int64_t cpu_time_ns(pthread_t thread) {
  clockid_t clock;
  struct timespec ran = {0, 0};
  if (!pthread_getcpuclockid(thread, &clock)) clock_gettime(clock, &ran);
  return ran.tv_sec * 1000000000ll + ran.tv_nsec;
}
#else
INLINE int this_core(void) { return -1; }
static void note_allowed_cores(void) {}
static void run_anywhere(struct member *self) { atomic_store(&self->is_bound, 0); }
static void leave_core(struct member *self, int core) {}
static void bring_here(struct member *helper) {}
static int64_t cpu_time_ns(pthread_t thread) { return 0; }
#endif

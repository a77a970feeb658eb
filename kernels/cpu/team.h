/* The threads that share an operation's work.

   Each has a range of the items, and takes them from where that begins; so it knows what it will read
   next, and fetches it. Then it takes from where the others' ranges end (work stealing, Blumofe and
   Leiserson, 1999). Nobody waits for a helper that has taken none, so a neighbour who keeps one from its
   core costs that core and no more. (OpenMP's threads all meet at the end of each region: with eight regions
   a layer, a busy neighbour makes an engine wait for the scheduler hundreds of times a step.) */
#pragma once
#include <signal.h>

#include "cores.h"
#include "tiles.h"

#define SPINS 1000 /* some 30 us: longer than it takes Python to come back with the next operation */
#define NAP_NS 600000 /* until a sleeping caller looks at its helpers again */
#define STILL_NS 1000 /* CPU time: who ran less since the last look is kept from running */

/* next: what the thread takes after it if nobody else does, or NONE. */
typedef void work(const void *what, int item, int next);
#define NONE (-1)

static struct {
  _Alignas(64) _Atomic uint32_t calls; /* so many were made */
  _Alignas(64) _Atomic int done;
  _Atomic int helpers_asleep, caller_sleeps, callers_core;
  work *work;
  const void *what;
  int items;
  struct member *members; /* num_helpers, and last the caller */
  int num_helpers;
  struct member caller;
  pthread_mutex_t calling, sleep;
  pthread_cond_t begins, ends;
} team = {.members = &team.caller,
          .calling = PTHREAD_MUTEX_INITIALIZER,
          .sleep = PTHREAD_MUTEX_INITIALIZER,
          .begins = PTHREAD_COND_INITIALIZER,
          .ends = PTHREAD_COND_INITIALIZER};

INLINE void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

static _Thread_local const struct member *this_member = &team.caller;

/* Where a member's range begins. */
INLINE int begin_of(int items, int number) {
  int members = team.num_helpers + 1;
  return (int)(((int64_t)items * number + members - 1) / members);
}

INLINE int begins_at(uint64_t range) { return (int)(uint32_t)range; }
INLINE int ends_at(uint64_t range) { return (int)(range >> 32); }
INLINE int is_empty(uint64_t range) { return begins_at(range) >= ends_at(range); }

/* Whoever holds an item may read what the call is about: it changes only when all items are done. Returns
   how many were. */
static int take_own(struct member *self) {
  for (int done = 0;; done++) {
    uint64_t range = atomic_fetch_add(&self->range, 1);
    int item = begins_at(range), end = ends_at(range);
    if (item >= end) return done;
    team.work(team.what, item, item + 1 < end ? item + 1 : NONE);
  }
}

static int take_from(struct member *other) {
  int done = 0;
  uint64_t range = atomic_load(&other->range);
  while (!is_empty(range)) {
    uint64_t rest = range - (1ull << 32);
    if (!atomic_compare_exchange_weak(&other->range, &range, rest)) continue;
    team.work(team.what, ends_at(rest), is_empty(rest) ? NONE : ends_at(rest) - 1);
    range = atomic_load(&other->range);
    done++;
  }
  return done;
}

/* Works while there are items. What a thread has done it tells once, when it finds no more: each time, a
   line of memory goes from core to core. */
static void take_items(struct member *self) {
  int done = take_own(self);
  for (struct member *other = self->next; other; other = other->next) done += take_from(other);
  for (struct member *other = team.members; other != self; other = other->next) done += take_from(other);
  leave_tiles();
  if (!done) return;
  int items = team.items;
  if (atomic_fetch_add(&team.done, done) + done < items) return;
  if (atomic_load(&team.caller_sleeps)) {
    pthread_mutex_lock(&team.sleep);
    pthread_cond_signal(&team.ends);
    pthread_mutex_unlock(&team.sleep);
  }
}

INLINE int is_in_the_way(void) {
  int core = this_core();
  return core >= 0 && core == atomic_load(&team.callers_core);
}

static void *help(void *which) {
  struct member *self = which;
  uint32_t calls = 0;
  self->thread = pthread_self();
  this_member = self;
  for (int spins = 0;; spins++) {
    if (atomic_load(&team.calls) != calls) {
      calls = atomic_load(&team.calls);
      if (is_in_the_way()) leave_core(self, atomic_load(&team.callers_core));
      atomic_store(&self->holds_items, 1);
      take_items(self);
      atomic_store(&self->holds_items, 0);
      if (atomic_load(&self->is_bound)) run_anywhere(self);
      spins = 0;
    } else if (spins < SPINS && (spins || !is_in_the_way())) {
      pause_briefly();
    } else {
      pthread_mutex_lock(&team.sleep);
      atomic_fetch_add(&team.helpers_asleep, 1);
      while (atomic_load(&team.calls) == calls) pthread_cond_wait(&team.begins, &team.sleep);
      atomic_fetch_sub(&team.helpers_asleep, 1);
      pthread_mutex_unlock(&team.sleep);
    }
  }
  return which;
}

static void wake_helpers(int wanted) {
  if (!atomic_load(&team.helpers_asleep)) return;
  pthread_mutex_lock(&team.sleep);
  for (int asleep = atomic_load(&team.helpers_asleep); wanted > 0 && asleep > 0; wanted--, asleep--)
    pthread_cond_signal(&team.begins);
  pthread_mutex_unlock(&team.sleep);
}

static int is_done_within(int items, int spins) {
  for (; spins; spins--) {
    if (atomic_load(&team.done) == items) return 1;
    pause_briefly();
  }
  return 0;
}

/* A helper with items that has not run since the last look gets the core of the caller. */
static void look_at_helpers(void) {
  for (struct member *helper = team.members; helper != &team.caller; helper = helper->next) {
    if (!atomic_load(&helper->holds_items)) continue;
    int64_t ran_ns = cpu_time_ns(helper->thread);
    if (ran_ns - helper->ran_ns < STILL_NS) bring_here(helper);
    helper->ran_ns = ran_ns;
  }
}

static void nap(pthread_cond_t *news) {
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_nsec += NAP_NS;
  if (until.tv_nsec >= 1000000000) until.tv_nsec -= 1000000000, until.tv_sec++;
  pthread_cond_timedwait(news, &team.sleep, &until);
}

static void wait_for_the_last(int items) {
  if (is_done_within(items, SPINS / 4)) return;
  look_at_helpers();
  if (is_done_within(items, SPINS)) return;
  look_at_helpers();
  pthread_mutex_lock(&team.sleep);
  atomic_store(&team.caller_sleeps, 1);
  while (atomic_load(&team.done) < items) {
    nap(&team.ends);
    look_at_helpers();
  }
  atomic_store(&team.caller_sleeps, 0);
  pthread_mutex_unlock(&team.sleep);
}

/* Calls work(what, i) for each i below `items`, in any order and from any thread, and returns when
   all have returned. A call from within one, or while another thread's is under way, works alone. */
static void share_out(work *work, const void *what, int items) {
  if (items < 2 || !team.num_helpers || pthread_mutex_trylock(&team.calling)) {
    for (int i = 0; i < items; i++) work(what, i, i + 1 < items ? i + 1 : NONE);
    leave_tiles();
    return;
  }
  team.work = work, team.what = what, team.items = items;
  atomic_store(&team.callers_core, this_core());
  atomic_store(&team.done, 0);
  for (struct member *member = team.members; member; member = member->next)
    atomic_store(&member->range, (uint64_t)begin_of(items, member->number + 1) << 32 |
                                     begin_of(items, member->number));
  atomic_fetch_add(&team.calls, 1);
  wake_helpers(items - 1);
  take_items(&team.caller);
  wait_for_the_last(items);
  pthread_mutex_unlock(&team.calling);
}

/* A forked process has no helpers, and the locks as they happened to be. */
static void be_alone(void) {
  team.members = &team.caller, team.num_helpers = 0;
  pthread_mutex_init(&team.calling, 0);
}

/* So many threads share the work from now on, the caller's included; those that there are stay. */
void gather_team(int threads) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the process's own affair */
  note_allowed_cores();
  while (team.num_helpers < threads - 1) {
    struct member *helper = aligned_alloc(_Alignof(struct member), sizeof *helper);
    if (!helper) break;
    *helper = (struct member){.number = team.num_helpers + 1, .next = team.members};
    pthread_t thread;
    if (pthread_create(&thread, 0, help, helper)) {
      free(helper);
      break;
    }
    pthread_detach(thread);
    team.members = helper, team.num_helpers++;
  }
  pthread_sigmask(SIG_SETMASK, &before, 0);
  pthread_atfork(0, 0, be_alone);
}

/* The threads that share an operation's work.

   Its items are taken from one counter by the caller and by whoever of the helpers is awake. Nobody
   waits for a helper that has taken none, so a neighbour who keeps one from its core costs that core
   and no more. (OpenMP's threads all meet at the end of each region: with eight regions a layer, a
   busy neighbour makes an engine wait for the scheduler hundreds of times a step.) */
#pragma once
#include <signal.h>

#include "cores.h"
#include "tiles.h"

#define SPINS 1000 /* some 30 us: longer than it takes Python to come back with the next operation */
#define NAP_NS 600000 /* until a sleeping caller looks at its helpers again */
#define STILL_NS 1000 /* of CPU time: who ran less since the last look is kept from running */

typedef void work(const void *what, int item);

static struct {
  _Alignas(64) _Atomic uint64_t ticket; /* how many items << 32 | how many were taken, or asked for in vain */
  _Alignas(64) _Atomic int done;
  _Atomic int helpers_asleep, caller_sleeps, callers_core;
  work *work;
  const void *what;
  struct helper *helpers; /* the first of num_helpers */
  int num_helpers;
  pthread_mutex_t caller, sleep;
  pthread_cond_t begins, ends;
} team = {.caller = PTHREAD_MUTEX_INITIALIZER,
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

INLINE int taken_of(uint64_t ticket) { return (int)(uint32_t)ticket; }
INLINE int items_of(uint64_t ticket) { return (int)(ticket >> 32); }
INLINE int has_items(void) {
  uint64_t ticket = atomic_load(&team.ticket);
  return taken_of(ticket) < items_of(ticket);
}

/* Works while there are items. Whoever holds one may read `work` and `what`: they change only when
   all items are done. What a thread has done it tells once, when it finds no more: each time, a line of
   memory goes from core to core. */
static void take_items(void) {
  if (!has_items()) return;
  int done = 0, items;
  for (;; done++) {
    uint64_t ticket = atomic_fetch_add(&team.ticket, 1);
    items = items_of(ticket);
    if (taken_of(ticket) >= items) break;
    team.work(team.what, taken_of(ticket));
  }
  leave_tiles();
  if (!done || atomic_fetch_add(&team.done, done) + done < items) return;
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
  struct helper *self = which;
  self->thread = pthread_self();
  for (int spins = 0;; spins++) {
    if (has_items()) {
      if (is_in_the_way()) leave_core(self, atomic_load(&team.callers_core));
      atomic_store(&self->holds_items, 1);
      take_items();
      atomic_store(&self->holds_items, 0);
      if (atomic_load(&self->is_bound)) run_anywhere(self);
      spins = 0;
    } else if (spins < SPINS && (spins || !is_in_the_way())) {
      pause_briefly();
    } else {
      pthread_mutex_lock(&team.sleep);
      atomic_fetch_add(&team.helpers_asleep, 1);
      while (!has_items()) pthread_cond_wait(&team.begins, &team.sleep);
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
  for (struct helper *helper = team.helpers; helper; helper = helper->next) {
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
  if (items < 2 || !team.num_helpers || pthread_mutex_trylock(&team.caller)) {
    for (int i = 0; i < items; i++) work(what, i);
    leave_tiles();
    return;
  }
  team.work = work, team.what = what;
  atomic_store(&team.callers_core, this_core());
  atomic_store(&team.done, 0);
  atomic_store(&team.ticket, (uint64_t)items << 32);
  wake_helpers(items - 1);
  take_items();
  wait_for_the_last(items);
  pthread_mutex_unlock(&team.caller);
}

/* A forked process has no helpers, and the locks as they happened to be. */
static void be_alone(void) {
  team.helpers = 0, team.num_helpers = 0;
  pthread_mutex_init(&team.caller, 0);
}

/* So many threads share the work from now on, the caller's included; those that there are stay. */
void gather_team(int threads) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the process's own affair */
  note_allowed_cores();
  while (team.num_helpers < threads - 1) {
    struct helper *helper = aligned_alloc(_Alignof(struct helper), sizeof *helper);
    if (!helper) break;
    *helper = (struct helper){.next = team.helpers};
    pthread_t thread;
    if (pthread_create(&thread, 0, help, helper)) {
      free(helper);
      break;
    }
    pthread_detach(thread);
    team.helpers = helper, team.num_helpers++;
  }
  pthread_sigmask(SIG_SETMASK, &before, 0);
  pthread_atfork(0, 0, be_alone);
}

/* A team's calls by the ten thousand: every item is done once and before the call returns, and what is said
   to come next is an item of the same call. Arguments: threads, calls. Exits with 1 and a line if not. */
#include <stdio.h>

#include "team.h"

#define MOST 70

struct call {
  int items, turn;
  _Atomic int done[MOST], wrong;
};

static void spin(int times) {
  for (volatile int i = 0; i < times; i++) {}
}

static void work_some(const void *what, int item, int next) {
  struct call *call = (struct call *)what;
  spin(call->turn % 50 ? item * 37 % 500 : (this_member->number > 0) * 300000); /* longer than its caller spins */
  if (item < 0 || item >= call->items || next < NONE || next >= call->items || next == item) call->wrong = 1;
  else atomic_fetch_add(call->done + item, 1);
}

int main(int count, char **args) {
  int threads = count > 1 ? atoi(args[1]) : 4, calls = count > 2 ? atoi(args[2]) : 10000;
  gather_team(threads);
  for (int turn = 0; turn < calls; turn++) {
    struct call call = {.items = turn % MOST, .turn = turn};
    share_out(work_some, &call, call.items);
    for (int i = 0; i < call.items; i++)
      if (call.wrong || call.done[i] != 1) {
        printf("call %d of %d items: item %d was done %d times\n", turn, call.items, i, call.done[i]);
        return 1;
      }
    if (turn % 1000 == 0) spin(1000000); /* helpers go to sleep */
  }
  return 0;
}

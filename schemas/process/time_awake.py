"""A clock of the time for which this process was awake, for judging whether others move.

A machine that stands still (a paused VM, memory that is swapped, SIGSTOP) stops all its processes,
and the monotonic clock goes on. Whoever wakes first would find that nobody moved for as long. By
this clock the gap has at most two ticks, and what arrived meanwhile is read in the next.

A bound that protects others counts the gap: a lease, an epoch, keys in memory, the time to drain.
"""

import time


class TimeAwake:
    """A clock that its holder reads at least once in each `tick_s` seconds while it is awake.

    Of the time between two readings it counts at most two ticks.
    """

    def __init__(self, tick_s: float) -> None:
        self._most_s = 2 * tick_s
        self._read_s = time.monotonic()
        self._awake_s = 0.0

    def now(self) -> float:
        """Return the seconds awake since the start."""
        read_s = time.monotonic()
        self._awake_s += min(read_s - self._read_s, self._most_s)
        self._read_s = read_s
        return self._awake_s

"""The host's clock is wrong by CLOCK_SHIFT_S, for a process that has this folder in its path."""

import datetime
import os
import time

SHIFT_S = float(os.environ["CLOCK_SHIFT_S"])
real, real_ns = time.time, time.time_ns


class Shifted(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> "Shifted":
        return cls.fromtimestamp(time.time(), tz)


time.time = lambda: real() + SHIFT_S
time.time_ns = lambda: real_ns() + int(SHIFT_S * 1e9)
datetime.datetime = Shifted  # type: ignore[misc]

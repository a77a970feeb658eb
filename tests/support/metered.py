"""What a server did between two moments, by its own counts: commands, and its time in scripts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import redis

AROUND = ("eval", "evalsha", "info", "config", "slowlog", "ping", "script", "client", "select")
SLOW_US = 300  # calls above this are kept, to name the longest


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a stretch of work, or of one of its `count` equal parts."""

    commands: float  # run by scripts, each of which the server looks up and logs
    script_us: float
    longest_us: int = 0  # of one call: that long nobody else was answered

    def over(self, count: int) -> "Cost":
        return Cost(self.commands / count, self.script_us / count, self.longest_us)


class Meter:
    """Reads the counters of a server that nobody else uses meanwhile."""

    def __init__(self, url: str) -> None:
        self.client = redis.Redis.from_url(url, decode_responses=True)
        self.plain = redis.Redis.from_url(url)
        self.client.config_set("slowlog-log-slower-than", SLOW_US)

    def __enter__(self) -> Self:
        return self.begin()

    def __exit__(self, *ending: object) -> None:
        self.client.close()
        self.plain.close()

    def begin(self) -> Self:
        self.client.config_resetstat()
        self.client.slowlog_reset()
        return self

    def cost(self) -> Cost:
        """Since `begin`."""
        stats = self.client.info("commandstats")
        names = {name: name.removeprefix("cmdstat_").split("|")[0] for name in stats}
        commands = sum(stats[name]["calls"] for name, word in names.items() if word not in AROUND)
        script_us = sum(stats[name]["usec"] for name, word in names.items() if word in AROUND[:2])
        slow = [entry["duration"] for entry in self.client.slowlog_get(128)]
        return Cost(commands, script_us, max(slow, default=0))

    def memory_bytes(self) -> int:
        """Held by the keys: what clients' buffers and scripts take is not counted."""
        with self.client.pipeline(transaction=False) as calls:
            for key in self.keys():
                calls.memory_usage(key, samples=0)
            return sum(size or 0 for size in calls.execute())

    def keys(self, is_so: Callable[[str], bool] = lambda key: True) -> list[str]:
        return [key for key in self.client.scan_iter("*", count=1000) if is_so(key)]

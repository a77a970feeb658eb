"""What holds after every run, whatever went wrong in it. Each failure is an AssertionError."""

import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Self

import redis

from penstock.gateway.auth.api_key import API_KEYS, SECRET_MARK
from penstock.schemas.event import EVENT, Delta
from penstock.schemas.keys import CHORES, MODELS, NAMESPACE, Lane
from penstock.schemas.redis.server_check import CHECK_LANES
from penstock.schemas.result import KeptResult

END_STATES = {"succeeded", "failed", "cancelled", "expired", "dead"}
PATIENCE_S = 60.0
# Keys of a lane that may have no TTL: leases, counters, streams that end empty, one line of news.
LASTING = ("workers", "counts", "ready:", "news", "dead", "outbox")
EMPTY_WHEN_IDLE = (
    "ready:", "backlog:", "waiting:", "fair:", "deadlines", "orphans", "delayed", "parked", "outbox"
)  # fmt: skip

# The sizes of a lane's keys whose names begin so, without those that hold nothing.
_SIZES = """
local sizes = {}
local calls = {zset = 'ZCARD', list = 'LLEN', set = 'SCARD', hash = 'HLEN', stream = 'XLEN'}
for begin = 2, #ARGV do
  for _, key in ipairs(redis.call('KEYS', ARGV[1] .. ARGV[begin] .. '*')) do
    local call = calls[redis.call('TYPE', key).ok]
    local size = call and redis.call(call, key) or 0
    if call == 'XLEN' then
      for _, group in ipairs(redis.call('XINFO', 'GROUPS', key)) do
        size = size + group[6]
      end
    end
    if size > 0 then
      sizes[#sizes + 1] = string.sub(key, #ARGV[1] + 1)
      sizes[#sizes + 1] = size
    end
  end
end
return sizes
"""

Store = redis.Redis


class Listener:
    """Everything that is published in a lane, as seen by a subscriber of its own."""

    def __init__(self, url: str, lane: Lane) -> None:
        self._url = url
        self._pattern = f"{lane.prefix}*"
        self._mark = f"{lane.prefix}mark"
        self._lines: Counter[tuple[bytes, bytes]] = Counter()  # channel, line
        self.has_gap = False  # it lost its connection before what it took last
        self._is_cut = False
        self._is_up = threading.Event()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._is_up.wait(PATIENCE_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ends.set()
        self._thread.join(PATIENCE_S)

    def take(self, may_lose: bool = False) -> dict[str, list[bytes]]:
        """The events of each job since the last call, as published: once on each channel."""
        self._catch_up()
        lines, self._lines = self._lines, Counter()
        self.has_gap, self._is_cut = self._is_cut, False
        found: dict[str, list[bytes]] = {}
        for (channel, line), count in lines.items():
            head, separator, event = line.partition(b'","event":')
            if separator and head.startswith(b'{"job_id":"'):
                assert may_lose or count == 1, f"{line!r} came {count} times on {channel!r}"
                found.setdefault(head[11:].decode(), []).append(event[:-1])
        return found

    def _catch_up(self) -> None:
        """Wait until all is heard that was published before."""
        mark = uuid.uuid4().hex
        heard, give_up = (self._mark.encode(), mark.encode()), time.monotonic() + PATIENCE_S
        with redis.Redis.from_url(self._url) as client:
            while heard not in self._lines:
                assert time.monotonic() < give_up, "the listener hears nothing"
                client.publish(self._mark, mark)
                time.sleep(0.05)

    def _listen(self) -> None:
        while not self._ends.is_set():
            try:
                with redis.Redis.from_url(self._url, socket_timeout=5) as client:
                    pubsub = client.pubsub()
                    pubsub.psubscribe(self._pattern)
                    while not self._ends.is_set():
                        message = pubsub.get_message(timeout=0.2)
                        if message and message["type"] == "psubscribe":
                            self._is_up.set()
                        elif message:
                            lines = message["data"].split(b"\n")
                            self._lines.update((message["channel"], line) for line in lines)
            except (redis.RedisError, OSError):
                self._is_cut = True
                time.sleep(0.05)


def wait_until_idle(store: Store, lane: Lane, patience_s: float = PATIENCE_S) -> None:
    """No job waits or runs."""
    give_up = time.monotonic() + patience_s
    while busy := _unfinished(store, lane):
        assert time.monotonic() < give_up, f"jobs that did not end: {busy}"
        time.sleep(0.05)


def known_jobs(store: Store, lane: Lane, job_ids: Iterable[str]) -> set[str]:
    return {job_id for job_id in job_ids if store.exists(lane.job(job_id))}


def num_ends(events: Iterable[bytes]) -> int:
    """How often a job ended, as published: again where it expired and was submitted again."""
    return sum(not isinstance(EVENT.validate_json(event), Delta) for event in events)


def num_ended(store: Store, lane: Lane) -> int:
    """How many jobs ended so far, by the lane's own count, which nothing makes forget."""
    return int(store.hget(f"{lane.prefix}counts", "ended") or 0)


def has_lost_its_end(store: Store, lane: Lane, job_id: str) -> bool:
    """It ended, and both its log and its result are gone: its readers are told so."""
    key = lane.job(job_id)
    state = (store.hget(key, "state") or b"").decode()
    return state in END_STATES and not store.exists(f"{key}:log", f"{key}:result")


def check_logs(
    store: Store, lane: Lane, job_ids: Iterable[str], heard: Mapping[str, list[bytes]] | None = None
) -> None:
    """Each job has one end, at the end of a log without gap or repeat, of owners one after another;
    nothing was shown that the log does not hold."""
    for job_id in job_ids:
        lines = store.xrange(f"{lane.job(job_id)}:log")
        state = (store.hget(lane.job(job_id), "state") or b"").decode()
        assert state in END_STATES, f"{job_id} is {state or 'unknown'}"
        if not lines:  # kept for a minute; then the result speaks for it
            assert store.exists(f"{lane.job(job_id)}:result"), f"{job_id} has no end"
            continue
        check_log(job_id, [(key.decode(), fields[b"e"]) for key, fields in lines])
        held = {fields[b"e"] for _, fields in lines}
        stray = set((heard or {}).get(job_id, [])) - held
        assert not stray, f"{job_id}: shown and not logged: {stray}"


def check_log(job_id: str, lines: list[tuple[str, bytes]]) -> None:
    position, last_epoch, ends = 0, 0, 0
    for key, text in lines:
        epoch, at = map(int, key.split("-"))
        event = EVENT.validate_json(text)
        assert epoch >= last_epoch, f"{job_id}: epoch {epoch} after {last_epoch}"
        assert at == event.position == position, f"{job_id}: {key} for {position}: {text!r}"
        assert ends == 0, f"{job_id}: {text!r} after the end"
        position += len(event.token_ids) if isinstance(event, Delta) else 0
        last_epoch, ends = epoch, ends + (not isinstance(event, Delta))
    assert ends == 1, f"{job_id}: no end"


def told_usage(store: Store, lane: Lane, job_id: str) -> Counter[str]:
    """Tokens of an ended job, as whoever reads it is told."""
    line = store.xrevrange(f"{lane.job(job_id)}:log", count=1)
    if line:
        end = EVENT.validate_json(line[0][1][b"e"])
        assert not isinstance(end, Delta), f"{job_id}: no end"
        usage = end.usage
    else:
        usage = KeptResult.model_validate_json(store.get(f"{lane.job(job_id)}:result")).usage
    return Counter(prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens)


def ledger(store: Store, lane: Lane, account: str = "*") -> Counter[str]:
    """What accounts were charged so far, over all months."""
    total: Counter[str] = Counter()
    for key in store.scan_iter(f"{lane.prefix}usage:????-??:{account}", count=1000):
        total.update({name.decode(): int(count) for name, count in store.hgetall(key).items()})
    return total


def check_ledger(
    store: Store, lane: Lane, job_ids: Iterable[str], before: Counter[str], account: str = "*"
) -> None:
    """What was charged since `before` is what the jobs say: each token once, each prompt once."""
    told: Counter[str] = Counter()
    for job_id in set(job_ids):
        told += told_usage(store, lane, job_id) + Counter(jobs=1)
    charged = ledger(store, lane, account)
    charged.subtract(before)
    assert charged["cached_tokens"] <= charged["prompt_tokens"]
    del charged["cached_tokens"]
    assert +charged == told, f"{account} was charged {dict(+charged)}, its jobs tell {dict(told)}"


def check_leftovers(store: Store, lane: Lane) -> None:
    """An idle lane holds nothing back: streams, backlogs and counters are empty, and what is not
    configuration goes away by itself. No key of the server is of another make."""
    assert not (busy := _unfinished(store, lane)), busy
    assert not (foreign := foreign_keys(store, lane)), f"nobody's: {foreign}"
    for key in store.scan_iter(f"{lane.prefix}*", count=1000):
        name = key.decode().removeprefix(lane.prefix)
        if name.startswith("account:"):
            used = [int(count or 0) for count in store.hmget(key, "running", "queued")]
            assert used == [0, 0], f"{name} counts {used} jobs running and queued"
        if name == "counts":
            assert int(store.hget(key, "queued_tokens") or 0) == 0, "tokens wait without a job"
        if name.startswith("worker:") and name.count(":") == 1:
            leased = store.zscore(f"{lane.prefix}workers", name.removeprefix("worker:"))
            assert leased is not None, f"{name} has no lease"
            continue
        is_lasting = name.startswith(LASTING)
        assert is_lasting or store.ttl(key) != -1, f"{name} would stay for ever"


def foreign_keys(store: Store, lane: Lane) -> list[str]:
    """Keys that no lane of a known model, no chore, no configuration and no check accounts for."""
    known = [MODELS, API_KEYS, SECRET_MARK, CHORES, lane.prefix]
    known += [f"{NAMESPACE}:{{{name.decode()}:" for name in store.hkeys(MODELS)]
    known += [f"{lane.prefix}synced" for lane in CHECK_LANES]
    names = [key.decode() for key in store.scan_iter("*", count=1000)]
    return [name for name in names if not name.startswith(tuple(known))]


def _unfinished(store: Store, lane: Lane) -> dict[str, int]:
    """What an idle lane has none of: in one look, or a job that moves between keys is missed."""
    sizes = store.eval(_SIZES, 0, lane.prefix, *EMPTY_WHEN_IDLE)
    return {name.decode(): size for name, size in zip(sizes[::2], sizes[1::2], strict=True)}

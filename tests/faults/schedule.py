"""What goes wrong, and what is asked meanwhile: both follow from a seed."""

import contextlib
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeVar

import redis

from faults.processes import CHILDREN, Process, System
from faults.told import Ask
from penstock.schemas.redis.group_sync import Durability

Kind = TypeVar("Kind", bound=Process)
LONG_S = 30.0
MOST_BYTES = 300_000
LOSSES = ("lose tail", "promote")
EXPIRIES = ("clock jumps", "key vanishes")
FOREVER_S = 100 * 86_400  # longer than anything is kept
VANISHED = 10  # keys in one fault
STILL_TIMES = 4  # as long as other faults last: longer than a step may take
TOO_MUCH: dict[Durability, tuple[str, ...]] = {
    "server": (),
    "fsync": LOSSES,
    "replicas": ("lose tail",),  # be it on the disk
}
PLACES = 5  # of a lane's processes
_STOPS = (("🚀🚀",), ("dams an", "日本, "), ("never there",), ())
_PROMPTS = ("job 🌊", "an\u00a0odd one", "日本語", "plain")


@dataclass(frozen=True, slots=True)
class Fault:
    """`kind` names a function below; it comes `at_s` after the first submission."""

    at_s: float
    kind: str
    place: int  # which of the processes of its kind
    lasts_s: float
    num_bytes: int = 1  # that are lost

    def __str__(self) -> str:
        return f"{self.at_s:.1f}s {self.kind}[{self.place}] {self.lasts_s:.1f}s"


@dataclass(frozen=True, slots=True)
class Schedule:
    seed: int
    asks: list[Ask]
    faults: list[Fault]
    pace_s: float
    durability: Durability = "server"

    @property
    def forgets(self) -> bool:
        """Whether Redis loses what it had written."""
        return any(fault.kind in LOSSES for fault in self.faults)

    @property
    def may_lose(self) -> bool:
        """Whether what was accepted and shown may be lost."""
        return self.forgets and self.durability == "server"

    @property
    def may_expire(self) -> bool:
        """Whether what is kept for a time may be gone before.

        A job that ended is then unknown or gone, to its readers and to whoever submits it again;
        and a count of what was used begins anew. Nothing else may be missing, or told.
        """
        return any(fault.kind in EXPIRIES for fault in self.faults)

    def under(self, durability: Durability) -> Self:
        """Leave out what takes more from Redis than this durability can spare."""
        kept = [fault for fault in self.faults if fault.kind not in TOO_MUCH[durability]]
        return replace(self, faults=kept, durability=durability)


def schedule(seed: int, num_tenants: int, fault: str = "", num_jobs: int = 30) -> Schedule:
    """`fault`: of this kind is one more, in the middle."""
    chance = random.Random(seed)
    asks = [_ask(chance, f"{seed}/{number}", num_tenants) for number in range(num_jobs)]
    faults = sorted(
        (_fault(chance) for _ in range(chance.randint(1, 4))), key=lambda fault: fault.at_s
    )
    if fault:
        faults.append(replace(_fault(chance), at_s=1.0, kind=fault, lasts_s=1.0))
    return Schedule(seed, asks, faults, pace_s=chance.choice((0.0, 0.01, 0.03)))


def _ask(chance: random.Random, name: str, num_tenants: int) -> Ask:
    is_foreground = chance.random() < 0.15
    return Ask(
        prompt=f"{chance.choice(_PROMPTS)} {name}",
        seed=chance.randrange(1000),
        max_tokens=chance.choice((1, 5, 30, 60, 120)),
        n=chance.choice((1, 1, 1, 2, 3)),
        stop=chance.choice(_STOPS),
        ignore_eos=chance.random() < 0.7,
        background=not is_foreground,
        by_sdk=chance.random() < 0.4,
        repeats=chance.choice((0, 0, 0, 0, 1, 3)),
        is_late=not is_foreground and chance.random() < 0.15,
        cancel_at=chance.randrange(60) if chance.random() < 0.1 else None,
        timeout_ms=chance.choice((200, 2000)) if chance.random() < 0.05 else None,
        hop_every=chance.choice((None, None, None, 1, 10)),
        tenant=chance.randrange(num_tenants),
    )


def _fault(chance: random.Random) -> Fault:
    kind = chance.choices(list(KINDS), weights=[weight for weight, _ in KINDS.values()])[0]
    lasts_s = chance.choice((0.05, 0.3, 1.0, 2.5))
    at_s, place = chance.uniform(0.0, 2.5), chance.randrange(PLACES)
    return Fault(at_s, kind, place, lasts_s, num_bytes=int(MOST_BYTES ** chance.random()))


def inject(system: System, fault: Fault) -> None:
    """Make it go wrong, and right again; returns when it is over. Others go wrong meanwhile."""
    KINDS[fault.kind][1](system, fault)


def _kill_worker(system: System, fault: Fault) -> None:
    worker = _of(system.workers, fault)
    worker.kill()


def _kill_supervisor(system: System, fault: Fault) -> None:
    _of(system.workers, fault).kill_first()


def _kill_child(system: System, fault: Fault) -> None:
    _of(system.workers, fault).kill_child(CHILDREN[fault.place // 2 % 2])


def _freeze_worker(system: System, fault: Fault) -> None:
    """Longer than its lease, or not."""
    _freeze(_of(system.workers, fault), fault.lasts_s)


def _stop_worker(system: System, fault: Fault) -> None:
    worker = _of(system.workers, fault)
    worker.terminate()
    worker.process.wait(60)


def _kill_gateway(system: System, fault: Fault) -> None:
    _of(system.gateways, fault).kill()


def _freeze_gateway(system: System, fault: Fault) -> None:
    _freeze(_of(system.gateways, fault), fault.lasts_s)


def _stop_gateway(system: System, fault: Fault) -> None:
    gateway = _of(system.gateways, fault)
    gateway.terminate()
    gateway.process.wait(60)


def _kill_housekeeping(system: System, fault: Fault) -> None:
    if system.houses:  # else it died a moment ago, and is started again
        _of(system.houses, fault).kill()


def _freeze_housekeeping(system: System, fault: Fault) -> None:
    if system.houses:
        _freeze(_of(system.houses, fault), fault.lasts_s)


def _stop_machines(system: System, fault: Fault) -> None:
    """Everything but Redis stands still and goes on, as on hosts without memory for a while."""
    stopped = list(system.processes)
    for process in stopped:
        process.send(signal.SIGSTOP)
    time.sleep(fault.lasts_s * STILL_TIMES)
    for process in stopped:
        process.send(signal.SIGCONT)


def _jump_clock(system: System, fault: Fault) -> None:
    system.clock.step(FOREVER_S)


# What has got a job meanwhile has no time to live any more, and stays.
_VANISH = "if redis.call('PTTL', KEYS[1]) >= 0 then redis.call('UNLINK', KEYS[1]) end"


def _take_keys(system: System, fault: Fault) -> None:
    """Some keys, one after another, of those that have a time to live."""
    chance = random.Random(fault.num_bytes)
    for _ in range(VANISHED):
        with contextlib.suppress(redis.RedisError), redis.Redis.from_url(system.url) as client:
            keys = sorted(key for key in client.scan_iter(count=1000) if client.ttl(key) >= 0)
            if keys:
                client.eval(_VANISH, 1, chance.choice(keys))
        time.sleep(fault.lasts_s / VANISHED)


def _kill_redis(system: System, fault: Fault) -> None:
    system.restart_server(min(fault.lasts_s, 1.0))


def _lose_tail(system: System, fault: Fault) -> None:
    """As after a power loss: of what Redis wrote last, be it half a command."""
    system.lose_tail(fault.num_bytes)


def _promote(system: System, fault: Fault) -> None:
    """As after a failover to a replica that lagged."""
    system.promote(fault.lasts_s)


def _freeze_redis(system: System, fault: Fault) -> None:
    system.freeze_server(fault.lasts_s)


def _freeze_redis_long(system: System, fault: Fault) -> None:
    """Longer than any caller waits for one reply, and than all leases and leaves of absence."""
    system.freeze_server(LONG_S)


def _flush_scripts(system: System, fault: Fault) -> None:
    for _ in range(10):
        with contextlib.suppress(redis.RedisError), redis.Redis.from_url(system.url) as client:
            client.script_flush()
        time.sleep(fault.lasts_s / 10)


def _cut(system: System, fault: Fault) -> None:
    for _ in range(5):
        _any(system, fault).proxy.cut()
        time.sleep(fault.lasts_s / 5)


def _cut_replies(system: System, fault: Fault) -> None:
    _any(system, fault).proxy.down.num_cuts = 3
    time.sleep(fault.lasts_s)


def _cut_requests(system: System, fault: Fault) -> None:
    _any(system, fault).proxy.up.num_cuts = 3
    time.sleep(fault.lasts_s)


def _half_close(system: System, fault: Fault) -> None:
    _any(system, fault).proxy.half_close()


def _part(system: System, fault: Fault) -> None:
    _during(system, fault, lambda process: process.proxy.part())


def _hold_up(system: System, fault: Fault) -> None:
    _during(system, fault, lambda process: setattr(process.proxy.up, "is_held", True))


def _hold_down(system: System, fault: Fault) -> None:
    _during(system, fault, lambda process: setattr(process.proxy.down, "is_held", True))


def _delay(system: System, fault: Fault) -> None:
    _during(system, fault, lambda process: setattr(process.proxy.down, "delay_s", 0.02))


KINDS: dict[str, tuple[int, Callable[[System, Fault], None]]] = {
    "kill worker": (3, _kill_worker),
    "kill supervisor": (2, _kill_supervisor),
    "kill child": (4, _kill_child),
    "freeze worker": (3, _freeze_worker),
    "stop worker": (2, _stop_worker),
    "kill gateway": (2, _kill_gateway),
    "freeze gateway": (2, _freeze_gateway),
    "stop gateway": (1, _stop_gateway),
    "kill housekeeping": (2, _kill_housekeeping),
    "freeze housekeeping": (2, _freeze_housekeeping),
    "machine stops": (3, _stop_machines),
    "clock jumps": (2, _jump_clock),
    "key vanishes": (2, _take_keys),
    "kill redis": (3, _kill_redis),
    "lose tail": (2, _lose_tail),
    "promote": (1, _promote),
    "freeze redis": (2, _freeze_redis),
    "freeze redis long": (1, _freeze_redis_long),
    "flush scripts": (2, _flush_scripts),
    "cut": (3, _cut),
    "cut replies": (3, _cut_replies),
    "cut requests": (2, _cut_requests),
    "half close": (2, _half_close),
    "part": (2, _part),
    "hold up": (2, _hold_up),
    "hold down": (2, _hold_down),
    "delay": (2, _delay),
}


def _of(processes: Sequence[Kind], fault: Fault) -> Kind:
    return processes[fault.place % len(processes)]


def _any(system: System, fault: Fault) -> Process:
    return _of(system.processes, fault)


def _freeze(process: Process, lasts_s: float) -> None:
    process.send(signal.SIGSTOP)
    time.sleep(lasts_s)
    process.send(signal.SIGCONT)


def _during(system: System, fault: Fault, begin: Callable[[Process], None]) -> None:
    process = _any(system, fault)
    begin(process)
    time.sleep(fault.lasts_s)
    process.proxy.heal()

"""Sleep mode: an engine gives its memory back while it has nothing to do, and loads again after."""

import gc
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from ctypes import CDLL
from dataclasses import fields, replace
from itertools import zip_longest
from threading import Event, Lock

from penstock.schemas.errors import WorkerFailed
from penstock.worker.engine.any_engine import AnyEngine
from penstock.worker.engine.cache.block_changes import BlockChanges
from penstock.worker.engine.io.mailbox import Mailbox
from penstock.worker.engine.io.messages import (
    AddSequence,
    BlockChange,
    Command,
    Load,
    Output,
    ResetPrefixCache,
    Sleep,
    Stats,
    Wake,
)
from penstock.worker.engine_loader import load_engine
from penstock.worker.process.log import log
from penstock.worker.process.settings import WorkerSettings

# The gauges of Stats; its other fields count from the start.
_GAUGES = {
    "num_blocks", "block_size", "max_num_batched_tokens", "num_held_blocks", "num_cached_blocks",
    "num_shared_blocks", "num_live_slots", "num_running", "num_waiting",
}  # fmt: skip


def sleeping_engine(settings: WorkerSettings) -> AnyEngine:
    """Load the worker's engine; of our own, one that may sleep."""
    if settings.engine != "native":
        return load_engine(settings)
    engine = load_engine(settings)
    if not (settings.pools or settings.load_format == "fake"):  # others may use what is left then
        number = {"num_gpu_blocks_override": engine.limits.num_blocks}
        settings = settings.model_copy(update=number)
    return SleepingEngine(engine, lambda: load_engine(settings), settings.sleep_idle_s)


class SleepingEngine(AnyEngine):
    """An engine that sleeps when it is told to, or after `idle_s` seconds without work.

    Then it holds neither the model nor a cache. What is added wakes it. A new engine takes as many
    blocks as the first had, or the process ends, and begins anew with what is left to it. All
    engines have the same mailbox, where commands wait while none is there.
    """

    def __init__(
        self, engine: AnyEngine, load: Callable[[], AnyEngine], idle_s: float | None
    ) -> None:
        super().__init__(engine.limits)
        self.mailbox = engine.mailbox
        self._engine: AnyEngine | None = engine
        self._load_engine = load
        self._idle_s = idle_s
        self._lock = Lock()  # guards the engine
        self._stirs = Event()
        self._is_told = False  # to sleep
        self._busy_s = time.monotonic()  # when it was last seen to have something to do
        self._changes: _Changes | None = None
        self._past = Stats()  # what earlier engines counted
        self._load = Load()

    def put(self, command: Command) -> None:
        match command:
            case Sleep():
                self._is_told = True
            case Wake():
                self._is_told = False
                self._stirs.set()
            case AddSequence():
                self.mailbox.put(command)
                if not self._stirs.is_set():  # looked at last: to fall asleep clears it first
                    self._stirs.set()
            case _:
                self.mailbox.put(command)

    @property
    def busy(self) -> bool:
        with self._lock:
            return self._stirs.is_set() if self._engine is None else self._engine.busy

    @property
    def num_steps(self) -> int:
        with self._lock:
            now = 0 if self._engine is None else self._engine.num_steps
            return self._past.num_steps + now

    def step(self) -> list[Output]:
        if self._engine is None:
            return []
        self._engine.note_plan = self.note_plan
        return self._engine.step()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return whether there is something to do now; sleep and wake in between."""
        if self._engine is not None:
            if self._engine.wait(timeout_s):
                self._busy_s = time.monotonic()
                return True
            idle_s = time.monotonic() - self._busy_s
            if self._is_told or (self._idle_s is not None and idle_s >= self._idle_s):
                self._fall_asleep(self._engine)
            return False
        if self._stirs.wait(timeout_s):
            self._awake()
        return self.busy

    def follow_blocks(self, with_token_ids: bool) -> BlockChanges:
        assert self._engine is not None
        self._changes = _Changes(self._engine, with_token_ids)
        return self._changes

    def load(self) -> Load:
        with self._lock:
            return self._load if self._engine is None else self._engine.load()

    def stats(self) -> Stats:
        with self._lock:
            if self._engine is None:
                return self._past
            return _added(self._past, self._engine.stats())

    def _fall_asleep(self, engine: AnyEngine) -> None:
        self._stirs.clear()
        with self._lock:
            if engine.busy:
                return
            engine.mailbox = Mailbox()  # what comes from now on is for the next engine
            engine.put(ResetPrefixCache())
            engine.step()  # forgets it: there is nothing else to do
            self._load = engine.load()
            now = replace(_added(self._past, engine.stats()), is_asleep=True)
            if self._changes is not None:
                self._changes.leave()
            self._past, self._engine = now, None
        del engine
        _give_back()
        log.info("engine sleeps: it gave its memory back")

    def _awake(self) -> None:
        began_s = time.monotonic()
        engine = self._load_engine()
        if engine.limits != self.limits:
            raise WorkerFailed("the engine woke with other limits than it had")
        engine.mailbox = self.mailbox
        if self._changes is not None:
            self._changes.follow(engine)
        with self._lock:
            self._past = replace(self._past, is_asleep=False)
            self._engine = engine
        self._busy_s = time.monotonic()
        log.info("engine woke in %.2f s", self._busy_s - began_s)


class _Changes(BlockChanges):
    """The changes of the prefix caches of one engine after another."""

    def __init__(self, engine: AnyEngine, with_token_ids: bool) -> None:
        super().__init__(engine.limits.block_size, with_token_ids)
        self._is_with_token_ids = with_token_ids
        self.follow(engine)

    def follow(self, engine: AnyEngine) -> None:
        self._of_engine: BlockChanges | None = engine.follow_blocks(self._is_with_token_ids)

    def leave(self) -> None:
        """Keep what the engine changed, and let go of it."""
        self._changes = self.take()
        self._of_engine = None

    def take(self) -> list[BlockChange]:
        now = [] if self._of_engine is None else self._of_engine.take()
        return super().take() + now


def _added(past: Stats, now: Stats) -> Stats:
    """Return the gauges as of now, and the counters of all engines together."""
    whole = {
        field.name: getattr(past, field.name) + getattr(now, field.name)
        for field in fields(Stats)
        if field.name not in _GAUGES | {"histograms", "is_asleep"}
    }
    dumps = {
        name: [sum(pair) for pair in zip_longest(past.histograms.get(name, ()), dump, fillvalue=0)]
        for name, dump in now.histograms.items()
    }
    return replace(now, histograms=dumps, **whole)


def _give_back() -> None:
    """Give freed memory back to the device and to the system."""
    gc.unfreeze()
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with suppress(OSError, AttributeError):  # glibc alone has it
        CDLL(None).malloc_trim(0)
    gc.freeze()

"""A gateway process of one's own, and a worker that says what the test wrote for it."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkstemp
from types import TracebackType
from typing import Self

from penstock.schemas.delivery import Commit, Ending, JobSignal, Started
from penstock.schemas.errors import Cancelled, DeadlineExceeded, WorkerFailed
from penstock.schemas.event import (
    Delta,
    Done,
    Failed,
    FinishReason,
    Timing,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from penstock.schemas.job import Job
from penstock.schemas.keys import Lane
from penstock.schemas.model import ModelCard, WorkerCard
from penstock.schemas.queue.registry import Registry
from penstock.schemas.queue.worker_queue import WorkerQueue
from penstock.schemas.redis.connection import connect

MODEL = "acme/tiny"
LISTENS = re.compile(r"(?<=gateway listens on )(?:https?://\S+:(\d+)|unix:\S+)")
PATIENCE_S = float(os.environ.get("PENSTOCK_TEST_PATIENCE_S", "120"))  # of a busy machine
Wait = threading.Event
Line = Delta | Failed | Wait | float  # an event, or what to wait for: the test, or seconds
Script = Callable[[Job], Sequence[Line]]


class LoggedProcess:
    """A module of ours in a process; what it wrote is in `log`, and shown where a test fails."""

    def __init__(
        self,
        *words: str,
        python: str = sys.executable,
        start_new_session: bool = False,
        **env: str,
    ) -> None:
        number, path = mkstemp(prefix=f"{words[0]}-", suffix=".log")
        self.log = Path(path)
        with os.fdopen(number, "w") as stream:
            self.process = subprocess.Popen(
                [python, "-m", *words],
                env=os.environ | {"PYTHONPATH": "."} | env,
                stdout=stream,
                stderr=stream,
                start_new_session=start_new_session,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        if error is not None:
            print(f"--- {self.log}\n{self.logged()}")
        self.log.unlink()

    def logged(self) -> str:
        return self.log.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class GatewayProcess(LoggedProcess):
    """`penstock gateway` on a port that it chose itself.

    A port that was looked up before is another process's by now, once in some hundred times.
    """

    url: str
    port: int

    def __init__(
        self,
        redis_url: str,
        *flags: str,
        command: Sequence[str] = ("penstock.gateway.server.cli",),
        python_path: str = ".:tests:tests/support",
    ) -> None:
        at = ("--port", "0", "--redis-url", redis_url)
        super().__init__(*command, *at, *flags, PYTHONPATH=python_path)

    def __enter__(self) -> Self:
        while not (listens := LISTENS.search(self.logged())):
            assert self.process.poll() is None, self.logged()
            time.sleep(0.02)
        self.url, self.port = listens[0], int(listens[1] or 0)
        return self

    def terminate(self) -> tuple[int, str]:
        """SIGTERM; how it ended and what it wrote."""
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(timeout=120)
        return status, self.logged()


class HousekeepingProcess(LoggedProcess):
    """`penstock housekeeping`."""

    def __init__(self, redis_url: str, *flags: str, **env: str) -> None:
        module = "penstock.gateway.housekeeping.main"
        super().__init__(module, "--redis-url", redis_url, *flags, **env)


def spoken(*texts: str, index: int = 0, at: int = 0, reason: FinishReason = "stop") -> list[Delta]:
    """One token a text, for one choice; the last ends it."""
    return [
        Delta(
            position=at + number,
            index=index,
            token_ids=[number],
            text=text,
            finish_reason=reason if number == len(texts) - 1 else None,
        )
        for number, text in enumerate(texts)
    ]


def chosen(*texts: str) -> list[Delta]:
    """A choice a text, one token each."""
    return [
        Delta(position=number, index=number, token_ids=[7], text=text, finish_reason="stop")
        for number, text in enumerate(texts)
    ]


def logprob(text: str, value: float, *others: tuple[str, float]) -> TokenLogprob:
    """Of a drawn token, with the likeliest at its place."""
    top = tuple(
        TopLogprob(token_id=1, token=token, bytes=tuple(token.encode()), logprob=likely)
        for token, likely in others
    )
    return TokenLogprob(token_id=0, token=text, bytes=tuple(text.encode()), logprob=value, top=top)


@dataclass(slots=True)
class Actor:
    """A worker in a thread. `script` says how each job goes; it ends with Done by itself."""

    redis_url: str
    script: Script = lambda job: spoken("Hello", " world")
    model: str = MODEL
    timing: Timing | None = None
    jobs: list[Job] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)
    _job_signals: dict[str, JobSignal] = field(default_factory=dict)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _ready: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopping.set()
        assert self._thread is not None
        self._thread.join()

    async def _run(self) -> None:
        redis = connect(self.redis_url)
        try:
            await Registry(redis).register(ModelCard(name=self.model, max_model_len=2048))
            queue = WorkerQueue(redis, Lane(self.model))
            await queue.register("actor", WorkerCard(max_num_seqs=64))
            self._ready.set()
            async with asyncio.TaskGroup() as parts:
                while not self._stopping.is_set():
                    await queue.news(50)
                    for entry in await queue.read("actor", 16) or []:
                        if taken := await queue.start("actor", entry):
                            self.jobs.append(taken.job)
                            parts.create_task(self._play(queue, taken))
                    stats = {"num_running": 1, "num_blocks": 10, "num_held_blocks": 5}
                    self._job_signals |= await queue.beat("actor", dict(stats)) or {}
            await queue.unregister("actor")
        finally:
            await redis.aclose()

    async def _play(self, queue: WorkerQueue, taken: Started) -> None:
        job, made, began_s = taken.job, list[Delta](), time.monotonic()
        end: Done | Failed | None = None
        for line in self.script(job):
            if isinstance(line, Delta):
                made.append(line)
                job_signals = await queue.commit("actor", [Commit(job.job_id, taken.epoch, [line])])
                self._job_signals |= job_signals
            elif isinstance(line, Failed):
                end = line
            else:
                await self._pause(taken, line, time.monotonic() - began_s)
            end = end or self._told_to_end(job.job_id, made)
            if end is not None:
                break
        if end is None:
            usage = Usage(prompt_tokens=5, completion_tokens=_end(made), cached_tokens=3)
            end = Done(position=_end(made), usage=usage, timing=self.timing)
        await queue.finish("actor", Ending(job, taken.epoch, made, len(made), end))

    async def _pause(self, taken: Started, line: Wait | float, ran_s: float) -> None:
        job_id, until = (
            taken.job.job_id,
            time.monotonic() + (line if isinstance(line, float) else 60),
        )
        deadline = time.monotonic() - ran_s + (taken.left_ms or 1e9) / 1000
        while time.monotonic() < until and not (isinstance(line, Wait) and line.is_set()):
            if time.monotonic() > deadline:
                self._job_signals[job_id] = JobSignal.DEADLINE
            if self._stopping.is_set() or self._told_to_end(job_id, []):
                return
            await asyncio.sleep(0.005)

    def _told_to_end(self, job_id: str, made: list[Delta]) -> Failed | None:
        job_signal = self._job_signals.get(job_id)
        if job_signal is JobSignal.CANCEL:
            self.cancelled.add(job_id)
            body = Cancelled("the job was cancelled").body()
            return Failed(position=_end(made), state="cancelled", error=body)
        if job_signal is JobSignal.DEADLINE:
            body = DeadlineExceeded("the job ran out of time").body()
            return Failed(position=_end(made), state="expired", error=body)
        return None


def failed(at: int = 0) -> Failed:
    body = WorkerFailed("the worker's disk is gone").body()
    return Failed(position=at, state="failed", error=body)


def _end(made: list[Delta]) -> int:
    return made[-1].end if made else 0


def eventually(claim: Callable[[], bool], within_s: float = PATIENCE_S) -> None:
    """Wait for what another process does next."""
    until = time.monotonic() + within_s
    while not claim():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.01)

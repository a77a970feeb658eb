"""A real worker, started as a user starts it: a supervisor and its two processes."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

import redis

from penstock.gateway.queue_client import QueueClient
from penstock.loadtest.machine.usage import family, module_of
from penstock.schemas.errors import Unavailable
from penstock.schemas.event import Result
from penstock.schemas.keys import Lane
from penstock.worker.llm import RequestOutput
from stage import PATIENCE_S, LoggedProcess


def until(is_so: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Return once it is so; fail the test if it takes unreasonably long."""
    give_up = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < give_up, f"waited in vain for: {what}"
        time.sleep(0.02)


class WorkerProcess(LoggedProcess):
    """`penstock worker` with short leases, in a process group of its own."""

    def __init__(
        self,
        url: str,
        model: str | Path = "fake",
        *flags: str,
        python: str = sys.executable,
        python_path: str = ".",
    ) -> None:
        self.url = url
        self.model = Path(model).name
        words = ["--model", str(model), "--redis-url", url, "--lease-ttl-ms", "700", *flags]
        if model == "fake":
            words += ["--load-format", "fake"]
        module = "penstock.worker.supervisor.cli"
        super().__init__(
            module, *words, python=python, start_new_session=True, PYTHONPATH=python_path
        )

    def ready(self) -> Self:
        """Return once it takes jobs."""

        def is_ready() -> bool:
            assert self.process.poll() is None, self.logged()
            return " started serving " in self.logged()

        until(is_ready, f"a worker to get ready: {self.logged()}")
        return self

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    def kill(self) -> None:
        """All of its processes at once, as a lost machine would."""
        self.signal_all(signal.SIGKILL)
        self.process.wait()

    def signal_all(self, number: int) -> None:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            return

    def child(self, module: str) -> int:
        """The process id of `penstock.worker.jobs.service` or `penstock.worker.engine_process`."""
        pid = child_of(self.process.pid, module)
        assert pid is not None, f"no process runs {module}"
        return pid


def child_of(parent: int, module: str) -> int | None:
    """The process below another that runs a module; none while there is none."""
    with suppress(OSError):  # one that ends while it is looked at
        for pid in family(parent)[1:]:
            if module_of(pid) == module:
                return pid
    return None


def incarnations(url: str, model: str = "fake") -> set[str]:
    """The workers with a lease, or with one that nobody reaped yet."""
    with redis.Redis.from_url(url, decode_responses=True) as client:
        return set(client.zrange(f"{Lane(model).prefix}workers", 0, -1))


def ask(
    url: str, asks: Callable[[QueueClient], Awaitable[None]], within_s: float = 1.25 * PATIENCE_S
) -> None:
    async def main() -> None:
        async with QueueClient.from_url(url) as client:
            await asyncio.wait_for(asks(client), within_s)

    asyncio.run(main())


async def text_of(client: QueueClient, job_id: str) -> str:
    """As a reader gets it who begins anew whenever Redis was away for too long."""
    while True:
        with suppress(Unavailable):
            result = await client.result(job_id)
            assert result is not None and result.state == "succeeded", result
            return result.choices[0].text
        await asyncio.sleep(0.1)


def same(result: Result | None, output: RequestOutput) -> None:
    """The whole answer, choice by choice, equals the undisturbed one."""
    assert result is not None and result.state == "succeeded"
    assert [choice.text for choice in result.choices] == [each.text for each in output.outputs]
    for choice, expected in zip(result.choices, output.outputs, strict=True):
        assert choice.token_ids == expected.token_ids
        assert choice.logprobs == expected.logprobs
        assert (choice.finish_reason, choice.stop_reason) == (
            expected.finish_reason,
            expected.stop_reason,
        )

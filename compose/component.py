"""One process of the stack: it is started, watched, started again when it dies, and ended."""

import asyncio
import os
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from penstock.schemas.process.exit_status import BAD_USAGE, NEVER_STARTS
from penstock.schemas.process.parent import end_with_parent

RESTART_DELAYS_S = (0.2, 1.0, 5.0)


@dataclass(slots=True, eq=False)
class Component:
    """A command of `penstock` as a child process, in a session of its own.

    So Ctrl-C at a terminal reaches the parent process alone.

    argv       what follows `penstock` on the command line
    is_ready   called until it returns True
    say        takes the component's name and a line about it
    relay      takes the component's name and a line that the process wrote
    fds        open files that the process inherits, under the same numbers
    """

    name: str
    argv: Sequence[str]
    is_ready: Callable[[], Awaitable[bool]]
    say: Callable[[str, str], None]
    relay: Callable[[str, str], None]
    env: dict[str, str] = field(default_factory=dict)
    fds: Sequence[int] = ()
    stop_s: float = 40.0
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    num_starts: int = 0
    _process: Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def keep_alive(self) -> None:
        """Run the process until cancelled; whenever it ends by itself, say so and start it again.

        It is not started again where its exit status says that it can never start.
        """
        try:
            while await self._run_once() not in (BAD_USAGE, NEVER_STARTS):
                delay_s = RESTART_DELAYS_S[min(self.num_starts, len(RESTART_DELAYS_S)) - 1]
                self.say(
                    self.name, f"ended ({self._how_it_ended()}); starts again in {delay_s:g} s"
                )
                await asyncio.sleep(delay_s)
            self.say(self.name, f"ended ({self._how_it_ended()}) and is not started again")
        finally:
            await self.stop()

    async def stop(self) -> None:
        """Send SIGTERM, and SIGKILL to the whole session if it still runs after `stop_s`."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), self.stop_s)
        except TimeoutError:
            self.say(self.name, f"did not end in {self.stop_s:g} s and was killed")
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """End the process and its children by SIGKILL, as a machine's death would."""
        if self._process and self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _run_once(self) -> int:
        began = time.monotonic()
        self.num_starts += 1
        self.ready.clear()
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "penstock.compose.cli",
            *self.argv,
            env=os.environ | self.env,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,
            pass_fds=self.fds,
        )
        async with asyncio.TaskGroup() as parts:
            parts.create_task(self._relay(process))
            watch = parts.create_task(self._watch(began))
            code = await process.wait()
            watch.cancel()
        return code

    async def _relay(self, process: Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            self.relay(self.name, line.decode(errors="replace").rstrip())

    async def _watch(self, began: float) -> None:
        """Wait until the process is ready, and say so.

        After that it is not watched: a stalled worker is its supervisor's matter.
        """
        while not await self.is_ready():
            await asyncio.sleep(0.05)  # readiness is asked over HTTP and Redis: nothing calls back
        self.say(self.name, f"ready after {time.monotonic() - began:.1f} s")
        self.ready.set()

    def _how_it_ended(self) -> str:
        code = self._process.returncode if self._process else None
        return signal.Signals(-code).name if code is not None and code < 0 else f"exit {code}"

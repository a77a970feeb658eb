"""The engine in a process or thread of its own.

Commands come in and steps go out; a thread beside the loop sends a pulse to the supervisor.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from penstock.schemas.errors import PenstockError
from penstock.schemas.process.crash_points import reach
from penstock.schemas.process.exit_status import NEVER_STARTS
from penstock.schemas.process.parent import end_with_parent
from penstock.schemas.process.start import keep_what_is_loaded, write_log_to_stderr
from penstock.schemas.process.time_awake import TimeAwake
from penstock.worker.engine.any_engine import AnyEngine
from penstock.worker.engine.io.config import KvEventsConfig
from penstock.worker.engine.io.messages import Load, Output
from penstock.worker.process.black_box import Recorder, leave_stacks
from penstock.worker.process.ipc import (
    BlockingWire,
    Closed,
    EngineCommand,
    EngineEvent,
    Pause,
    Pulse,
    Ready,
    Resume,
    Step,
    receive_text,
)
from penstock.worker.process.log import log
from penstock.worker.process.settings import WorkerSettings, pulse_every_s
from penstock.worker.sleeper import sleeping_engine

_STATS_EVERY_S = 0.05  # counting blocks at each step would cost the loop
_IDLE_WAIT_S = 0.25
_STEP_WEIGHT = 0.1  # weight of the newest step in the average of seconds


class EngineLoop:
    """The loop that steps an engine for as long as the I/O side listens."""

    def __init__(
        self,
        engine: AnyEngine,
        io: BlockingWire[list[EngineCommand], EngineEvent],
        supervisor: BlockingWire[None, Pulse],
        pulse_every_s: float,
        recorder: Recorder | None = None,
        kv_events: KvEventsConfig | None = None,
    ) -> None:
        self._engine = engine
        self._recorder = recorder
        if recorder is not None:
            engine.note_plan = recorder.note_plan
        self._changes = None if kv_events is None else engine.follow_blocks(kv_events.token_ids)
        self._io = io
        self._supervisor = supervisor
        self._pulse_every_s = pulse_every_s
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._is_closed = threading.Event()
        self._unmoved_since_s: float | None = None
        self._stats = replace(engine.stats())
        self._stats_taken_s = 0.0
        self._num_commands = 0  # commands given to the engine so far
        self._last_report = Load(), 0  # the load and the number of commands last sent
        self._step_s = 0.0  # what a step takes of late

    def run(self, when_closed: Callable[[], None] = lambda: None) -> None:
        """Step until the I/O side closes; then call `when_closed`, even if a step hangs."""
        threading.Thread(target=self._listen, args=(when_closed,), daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()
        try:
            self._io.send(Ready(self._engine.limits))
            while not self._is_closed.is_set():
                if self._goes_on.wait(_IDLE_WAIT_S):
                    self._step()
                else:
                    self._unmoved_since_s = None  # paused
        except Closed:
            return
        finally:
            self._is_closed.set()  # an engine that raised has no pulse

    def _step(self) -> None:
        num_commands = self._num_commands  # these at least are carried out when the step is over
        if not self._engine.wait(_IDLE_WAIT_S):
            self._unmoved_since_s = None
            self._take_stats()
            self._report([], num_commands)
            return
        num_commands, num_steps = self._num_commands, self._engine.num_steps
        began_s = time.monotonic()
        if self._unmoved_since_s is None:
            self._unmoved_since_s = began_s
        reach("engine.step")
        outputs = self._engine.step()
        has_computed = self._engine.num_steps > num_steps
        if outputs or has_computed or not self._engine.busy:
            self._unmoved_since_s = None  # it stays where a step with work computed nothing
        if has_computed:
            self._note_step_s(time.monotonic() - began_s)
        self._take_stats()
        self._note_ends(outputs)
        self._report(outputs, num_commands)

    def _report(self, outputs: list[Output], num_commands: int) -> None:
        """Send a Step if there is output, or the cache, load or number of commands changed.

        The I/O side goes by these numbers, so they must be true also after a step without outputs.
        """
        report = self._engine.load(), num_commands
        changes = [] if self._changes is None else self._changes.take()
        if outputs or changes or report != self._last_report:
            self._last_report = report
            self._io.send(Step(outputs, *report, self._step_s, changes))

    def _note_step_s(self, seconds: float) -> None:
        self._step_s += (seconds - self._step_s) * (_STEP_WEIGHT if self._step_s else 1)

    def _note_ends(self, outputs: list[Output]) -> None:
        if self._recorder is None:
            return
        for output in outputs:
            if end := output.error.code if output.error else output.finish_reason:
                self._recorder.note("ended", output.seq_id, end)

    def _take_stats(self) -> None:
        now = time.monotonic()
        if now - self._stats_taken_s > _STATS_EVERY_S:
            self._stats = replace(self._engine.stats())
            self._stats_taken_s = now

    def _listen(self, when_closed: Callable[[], None]) -> None:
        for commands in self._io.received():
            for command in commands:
                self._obey(command)
            self._num_commands += len(commands)
        self._is_closed.set()
        when_closed()

    def _obey(self, command: EngineCommand) -> None:
        match command:
            case Pause():
                self._goes_on.clear()
            case Resume():
                self._goes_on.set()
            case _:
                if self._recorder is not None:
                    self._recorder.note_command(command)
                self._engine.put(command)

    def _beat(self) -> None:
        """Send the pulse from a thread beside the loop.

        A step that holds the interpreter stops the pulse too. A long step that counts what it
        computes, as for a long text, is seen to move.
        """
        awake, moved_s, last = TimeAwake(self._pulse_every_s), 0.0, (0.0, 0)
        try:
            while not self._is_closed.wait(self._pulse_every_s):
                now_s, since_s = awake.now(), self._unmoved_since_s
                if since_s is None or (since_s, self._engine.num_steps) != last:
                    moved_s, last = now_s, (since_s or 0.0, self._engine.num_steps)
                self._supervisor.send(Pulse(now_s - moved_s, self._stats))
        except Closed:
            return


def main() -> None:
    """Run the engine process, as the supervisor starts it.

    The arguments are the numbers of two sockets, to the I/O process and to the supervisor, and
    perhaps of two files: for this process's stacks and for the records of the black box.
    """
    end_with_parent(signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # meant for the supervisor, which ends this in order
    io, supervisor = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    settings = WorkerSettings.model_validate_json(receive_text(supervisor))
    write_log_to_stderr("engine", settings, log)
    recorder = None
    if files := [int(number) for number in sys.argv[3:]]:
        leave_stacks(files[0])
        recorder = Recorder(files[1])
    try:
        engine = sleeping_engine(settings)
    except PenstockError as error:
        log.error("engine was refused: %s", error.message)
        # At once: the I/O side ends when the sockets close, and the first exit status is the
        # one that counts.
        os._exit(NEVER_STARTS)
    keep_what_is_loaded()
    loop = EngineLoop(
        engine,
        BlockingWire(io),
        BlockingWire(supervisor),
        pulse_every_s(settings),
        recorder,
        settings.kv_events,
    )
    try:
        loop.run(when_closed=lambda: os._exit(0))
    except PenstockError as error:
        log.error("engine ended: %s", error.message)
        os._exit(1)


if __name__ == "__main__":
    main()

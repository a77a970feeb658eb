"""The mailbox of an engine: commands from all threads wait there for the thread of its steps."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from penstock.worker.engine.io.messages import Command, Output


@dataclass(frozen=True, slots=True)
class Callback:
    """A call that the next step makes, since another thread has a result for it."""

    run: Callable[[], Output | None]


class Mailbox:
    """The commands to an engine that no step has carried out yet, in the order of their coming."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Command | Callback] = SimpleQueue()
        self._next: deque[Command | Callback] = deque()  # taken out of the queue, before the others

    def __bool__(self) -> bool:
        return bool(self._next) or not self._queue.empty()

    def put(self, command: Command | Callback) -> None:
        """Leave a command. Any thread may call this; one thread calls `wait` and `drain`."""
        self._queue.put(command)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Sleep until there is a command; return False when none came in time."""
        if not self._next:
            try:
                self._next.append(self._queue.get(timeout=timeout_s))
            except Empty:
                return False
        return True

    def drain(self, carry_out: Callable[[Command], Output | None]) -> list[Output]:
        """Carry out what is there, and return the outputs that it has at once.

        What comes meanwhile, also by what is carried out, is left for the next call.
        """
        queue, pending = self._queue, self._next
        while not queue.empty():
            pending.append(queue.get())
        outputs = []
        while pending:
            command = pending.popleft()
            output = command.run() if isinstance(command, Callback) else carry_out(command)
            if output is not None:
                outputs.append(output)
        return outputs

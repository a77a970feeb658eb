"""The interface of every engine: commands from any thread, steps from one."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.worker.engine.cache.block_changes import BlockChanges
from penstock.worker.engine.io.limits import EngineLimits
from penstock.worker.engine.io.mailbox import Mailbox
from penstock.worker.engine.io.messages import (
    AddSequence,
    CancelSequence,
    Command,
    Load,
    Output,
    PlanRow,
    Stats,
)


@dataclass(slots=True, eq=False)
class AnyEngine(ABC):
    """The interface of every engine.

    One thread calls `step` and `wait`; `put`, `add` and `cancel` may be called from any thread.
    A step begins with the commands that came before it, in their order.

    note_plan  is told of each step's plan before it is computed
    """

    limits: EngineLimits
    mailbox: Mailbox = field(default_factory=Mailbox, init=False)
    note_plan: Callable[[list[PlanRow]], None] | None = field(default=None, init=False)
    _seqs: Mapping[str, object] = field(default_factory=dict, init=False)
    _stats: Stats = field(default_factory=Stats, init=False)

    def put(self, command: Command) -> None:
        self.mailbox.put(command)

    def add(self, addition: AddSequence) -> None:
        self.put(addition)

    def cancel(self, seq_id: str) -> None:
        self.put(CancelSequence(seq_id))

    @property
    def busy(self) -> bool:
        """Return whether a step would have anything to do now."""
        return bool(self._seqs or self.mailbox)

    @property
    def num_steps(self) -> int:
        """Return the number of steps so far that computed something."""
        return self._stats.num_steps

    def wait(self, timeout_s: float | None = None) -> bool:
        """Sleep until there is something to do; return False when nothing came in time."""
        return self.busy or self.mailbox.wait(timeout_s)

    @abstractmethod
    def step(self) -> list[Output]:
        """Compute one step; return the new tokens, and the errors of refused sequences."""

    def follow_blocks(self, with_token_ids: bool) -> BlockChanges:
        """Return where the changes of the prefix cache are from now on, to be taken at each step.

        Call it before the first step. It stays empty where there is no prefix cache of our own.
        """
        return BlockChanges(self.limits.block_size, with_token_ids)

    @abstractmethod
    def load(self) -> Load: ...

    @abstractmethod
    def stats(self) -> Stats: ...

    def _carry_out(self, command: Command) -> Output | None:
        """Carry out a command that all engines obey, and pass over others."""
        match command:
            case AddSequence():
                if error := self.limits.check(command):
                    return Output(command.seq_id, [], error=error.body())
                return self._add(command)
            case CancelSequence(seq_id):
                self._cancel(seq_id)
        return None

    def _add(self, addition: AddSequence) -> Output | None:
        """Begin a sequence within the limits."""
        raise NotImplementedError

    def _cancel(self, seq_id: str) -> None:
        raise NotImplementedError

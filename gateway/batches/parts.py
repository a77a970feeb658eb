"""The two files that a batch writes, while they are being written.

What Redis says of their length is true: bytes behind it are of a turn that died, and are cut off. A
turn holds a lock on them, so one that was frozen past its lease writes nothing among its heir's.
"""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from penstock.schemas.errors import PenstockError
from penstock.schemas.event import Usage

NOTHING = Usage()


class PartsLost(PenstockError):
    """Less is on disk than was written."""

    code = "output_lost"


@dataclass(frozen=True, slots=True)
class Written:
    """A line's answer: for which of the two files, and what it cost."""

    item: str
    text: bytes
    is_good: bool = False
    is_abandoned: bool = False  # the batch ended before it
    usage: Usage = NOTHING


@dataclass(frozen=True, slots=True)
class Parts:
    output: BinaryIO
    errors: BinaryIO

    def append(self, written: Sequence[Written]) -> dict[str, int]:
        """Their lengths after it, on disk for good."""
        for each in written:
            (self.output if each.is_good else self.errors).write(each.text)
        for part in (self.output, self.errors):
            part.flush()
            os.fsync(part.fileno())
        return {"output_bytes": self.output.tell(), "errors_bytes": self.errors.tell()}


def part_path(folder: Path, batch_id: str, kind: str) -> Path:
    """`kind` is output or errors."""
    return folder / f".{batch_id}.{kind}"


@contextmanager
def writing(folder: Path, batch_id: str, lengths: tuple[int, int]) -> Iterator[Parts | None]:
    """Both, cut to their lengths; none while another has them. Raises PartsLost."""
    with ExitStack() as stack:
        opened = []
        for kind, length in zip(("output", "errors"), lengths, strict=True):
            path = part_path(folder, batch_id, kind)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            part = stack.enter_context(os.fdopen(descriptor, "r+b"))
            try:
                fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
                return
            if os.fstat(descriptor).st_size < length:
                raise PartsLost(f"the batch's {kind} was lost on disk")
            part.truncate(length)
            part.seek(length)
            opened.append(part)
        yield Parts(*opened)


@contextmanager
def closing(folder: Path, batch_id: str) -> Iterator[bool]:
    """Nobody writes any more; false while somebody does."""
    with ExitStack() as stack:
        for kind in ("output", "errors"):
            try:
                part = stack.enter_context(part_path(folder, batch_id, kind).open("r+b"))
                fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except FileNotFoundError:
                continue  # it is a file already, or was never needed
            except BlockingIOError:
                yield False
                return
        yield True

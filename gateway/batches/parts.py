"""The two files that a batch writes its answers and errors to, while they are being written.

The lengths that Redis holds are the true ones: bytes after them are of a turn that died, and are
cut off. A turn holds a lock on both files, so the next turn cannot write while one that was frozen
past its lease may still do so.
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

NO_USAGE = Usage()


class PartsLost(PenstockError):
    """Raised when a file on disk is shorter than what was written to it."""

    code = "output_lost"


@dataclass(frozen=True, slots=True)
class Written:
    """A line's answer or error, as it is written, and what it cost."""

    item: str
    text: bytes
    is_good: bool = False  # it goes to the output, else to the errors
    is_abandoned: bool = False  # the batch ended before it
    usage: Usage = NO_USAGE


@dataclass(frozen=True, slots=True)
class Parts:
    output: BinaryIO
    errors: BinaryIO

    def append(self, answers: Sequence[Written]) -> dict[str, int]:
        """Append answers, sync both files to disk, and return their new lengths in bytes."""
        for answer in answers:
            (self.output if answer.is_good else self.errors).write(answer.text)
        for part in (self.output, self.errors):
            part.flush()
            os.fsync(part.fileno())
        return {"output_bytes": self.output.tell(), "errors_bytes": self.errors.tell()}


def part_path(folder: Path, batch_id: str, kind: str) -> Path:
    """Return the path of one of a batch's files; `kind` is output, errors or order."""
    return folder / f".{batch_id}.{kind}"


@contextmanager
def writing(folder: Path, batch_id: str, lengths: tuple[int, int]) -> Iterator[Parts | None]:
    """Lock and open both files, cut to their lengths, in bytes.

    Yields None if another process has them. Raises PartsLost if one is shorter than its length.
    """
    with ExitStack() as stack:
        files = []
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
            files.append(part)
        yield Parts(*files)


@contextmanager
def closing(folder: Path, batch_id: str) -> Iterator[bool]:
    """Lock both files, so that nobody writes them. Yields False if another process has one."""
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

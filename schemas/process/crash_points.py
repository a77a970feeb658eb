"""Places at which a process can be told to die, so that a test sees it die exactly there.

`PENSTOCK_CRASH_AT` names one: `workers/commit.answered`, or `workers/commit.answered:3` for the
third time that a process comes to it. Every script of the queue has two, `<script>.asked` before it
is sent and `<script>.answered` before its reply is looked at; others are named where they are
reached. With `PENSTOCK_CRASH_MARK`, the path of a file, only the first process to get there dies,
and leaves the file; without it every process started again dies again. With
`PENSTOCK_CRASH_GROUP=1` it kills its whole process group, as the loss of a machine would.
"""

import os
import signal
from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True)
class _Fuse:
    point: str
    countdown: int
    mark: Path | None
    takes_group: bool

    def burn(self) -> None:
        self.countdown -= 1
        if self.countdown > 0 or not self._is_first():
            return
        if self.takes_group:
            os.killpg(0, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    def _is_first(self) -> bool:
        if self.mark is None:
            return True
        try:
            self.mark.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def _fuse() -> _Fuse | None:
    point, _, count = os.environ.get("PENSTOCK_CRASH_AT", "").partition(":")
    if not point:
        return None
    mark = os.environ.get("PENSTOCK_CRASH_MARK")
    takes_group = os.environ.get("PENSTOCK_CRASH_GROUP") == "1"
    return _Fuse(point, int(count or 1), Path(mark) if mark else None, takes_group)


_FUSE = _fuse()


def reach(point: str) -> None:
    """Die here by SIGKILL if the environment says so; otherwise do nothing."""
    if _FUSE is not None and _FUSE.point == point:
        _FUSE.burn()

"""A Redis whose clock can be set forward while it runs, as on a host that was set right."""

import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path

from penstock.compose.server import Server

SOURCE = Path(__file__).parent / "skewed" / "server_clock.c"


class ServerClock:
    """A clock that several servers share, in a folder: a file that their processes have mapped."""

    def __init__(self, folder: Path) -> None:
        self._shift_s = 0
        self._file, self._library = folder / "shift", folder / "server_clock.so"
        self._write()
        words = ["cc", "-shared", "-fPIC", "-O1", "-o", str(self._library), str(SOURCE)]
        subprocess.run(words, check=True)

    def step(self, seconds: int) -> None:
        self._shift_s += seconds
        self._write()

    def words(self) -> list[str]:
        """The beginning of the command line of a process that has this clock."""
        return ["env", f"LD_PRELOAD={self._library}", f"CLOCK_FILE={self._file}"]

    def _write(self) -> None:
        """Eight bytes in place: whoever has the file mapped reads the old ones or the new."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("q", self._shift_s))


class ClockedServer(Server):
    """An embedded server by such a clock."""

    def __init__(self, clock: ServerClock, folder: Path, options: Mapping[str, str]) -> None:
        super().__init__(folder, options=options)
        self.clock = clock

    def _command(self) -> list[str]:
        return [*self.clock.words(), *super()._command()]

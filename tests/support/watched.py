"""A gateway that knows how long its event loop stood still.

The stall between two beats of the loop is the time that passed, or the CPU time that the process
used in it where that is less: then it was the machine that had no time.
"""

import asyncio
import mmap
import struct
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile

from fastapi import FastAPI

from penstock.gateway.process.settings import GatewaySettings
from penstock.gateway.server import cli
from stage import GatewayProcess

BEAT_S = 0.001
SECONDS = struct.Struct("d")


class WatchedGateway(GatewayProcess):
    """`penstock gateway`, with `stall_s`."""

    def __init__(self, redis_url: str, *flags: str) -> None:
        with NamedTemporaryFile(delete=False) as file:
            file.write(SECONDS.pack(0))
        self._path = Path(file.name)
        super().__init__(redis_url, *flags, command=("watched", file.name))

    def __exit__(self, *ending: object) -> None:
        super().__exit__(None, None, None)
        self._path.unlink()

    def take_stall_s(self) -> float:
        """The longest stall since this was asked last."""
        time.sleep(4 * BEAT_S)  # the beat after the last answer
        with self._path.open("r+b") as file, mmap.mmap(file.fileno(), SECONDS.size) as shared:
            [stall_s] = SECONDS.unpack(shared)
            shared[:] = SECONDS.pack(0)
        return float(stall_s)


async def _beat(path: Path) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), SECONDS.size) as shared:
        while True:
            began_s, used_s = time.monotonic(), time.process_time()
            await asyncio.sleep(BEAT_S)
            passed_s, cpu_s = time.monotonic() - began_s, time.process_time() - used_s
            [longest_s] = SECONDS.unpack(shared)
            shared[:] = SECONDS.pack(max(longest_s, min(passed_s - BEAT_S, cpu_s)))


def main(path: Path, argv: list[str]) -> int:
    build = cli.build

    def watched(settings: GatewaySettings) -> FastAPI:
        app = build(settings)
        opened = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            beating = asyncio.create_task(_beat(path))
            async with opened(app):
                yield
            beating.cancel()

        app.router.lifespan_context = lifespan
        return app

    cli.build = watched
    return cli.main(argv)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))

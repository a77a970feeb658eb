"""penstock workers list | drain: commands for the workers of all models."""

import json
import sys
from collections.abc import Sequence

from pydantic import Field
from pydantic_settings import CliPositionalArg
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.gateway.client import Client
from penstock.gateway.commands.terminal import run
from penstock.gateway.http.overview import look, workers
from penstock.gateway.tasks.fleet import Fleet
from penstock.schemas.process.exit_status import BAD_USAGE
from penstock.schemas.process.nearby import ANYWHERE
from penstock.schemas.process.start import Settings, load_settings
from penstock.schemas.redis.url import RedisUrlSetting

USAGE = "usage: penstock workers list | drain WORKER [--flag VALUE ...]"


class WorkersCommand(Settings):
    redis_url: RedisUrlSetting = Field(
        ANYWHERE, description="where the queue is; unset: of the `penstock up` that runs here"
    )
    as_json: bool = Field(False, alias="json", description="JSON instead of a table")

    async def run(self, client: Client) -> None:
        raise NotImplementedError


class ListWorkers(WorkersCommand):
    """List all workers, with their state; `penstock top` shows them as they change."""

    async def run(self, client: Client) -> None:
        found = workers(await look(client))
        if self.as_json:
            print(json.dumps(found))
            return
        table = Table("worker", "model", "state", "running")
        for each in found:
            table.add_row(
                *(Text(f"{each[name]}") for name in ("worker", "model", "state")),
                f"{each['num_running']} of {each['max_num_seqs']}",
            )
        Console(width=None if sys.stdout.isatty() else 140).print(table)


class DrainWorker(WorkersCommand):
    """Let a worker end in order, as SIGTERM does: it takes nothing new, finishes what it has within
    its --drain-s, and hands the rest on. Who runs it starts it again or not.
    """

    worker: CliPositionalArg[str] = Field(description="as `penstock workers list` shows it")

    async def run(self, client: Client) -> None:
        await Fleet(client).drain(self.worker)
        told = {"worker": self.worker, "told": "drain"}
        print(json.dumps(told) if self.as_json else f"{self.worker} was told to drain")


COMMANDS: dict[str, type[WorkersCommand]] = {"list": ListWorkers, "drain": DrainWorker}


def main(argv: Sequence[str]) -> int:
    name, words = (argv[0], argv[1:]) if argv else ("", [])
    if name not in COMMANDS:
        print(USAGE, file=sys.stderr)
        return 0 if name in ("-h", "--help") else BAD_USAGE
    asked = load_settings(COMMANDS[name], f"penstock workers {name}", words)
    return run(f"penstock workers {name}", _run(asked))


async def _run(asked: WorkersCommand) -> None:
    async with Client.from_url(asked.redis_url) as client:
        await asked.run(client)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

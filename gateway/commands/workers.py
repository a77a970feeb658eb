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
from penstock.gateway.commands.terminal import OperatorCommand, dispatch
from penstock.gateway.http.overview import look, workers
from penstock.gateway.tasks.fleet import Fleet

USAGE = "usage: penstock workers list | drain WORKER [--flag VALUE ...]"


class WorkersCommand(OperatorCommand):
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
    return dispatch("penstock workers", USAGE, COMMANDS, argv, _run)


async def _run(asked: WorkersCommand) -> None:
    async with Client.from_url(asked.redis_url) as client:
        await asked.run(client)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

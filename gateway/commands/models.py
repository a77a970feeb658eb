"""penstock models list | remove: the models that are served or were, on the list of all."""

import json
import sys
from collections.abc import Sequence

from pydantic import Field
from pydantic_settings import CliPositionalArg
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from penstock.gateway.commands.terminal import OperatorCommand, dispatch
from penstock.gateway.metrics.overview import look, models
from penstock.gateway.queue_client import QueueClient
from penstock.gateway.tasks.known_models import KnownModels

USAGE = "usage: penstock models list | remove MODEL [--flag VALUE ...]"
FIGURES = ("context", "num_workers", "num_queued", "num_running")


class ModelsCommand(OperatorCommand):
    async def run(self, client: QueueClient) -> None:
        raise NotImplementedError


class ListModels(ModelsCommand):
    """List the models, also those that no worker serves now."""

    async def run(self, client: QueueClient) -> None:
        entries = models(await look(client))
        if self.as_json:
            print(
                json.dumps(
                    [{key: entry[key] for key in ("name", "task", *FIGURES)} for entry in entries]
                )
            )
            return
        columns = (
            Column(name, justify="right") for name in ("context", "workers", "queued", "running")
        )
        table = Table("model", "task", *columns)
        for entry in entries:
            figures = ("-" if entry[key] is None else f"{entry[key]}" for key in FIGURES)
            table.add_row(Text(f"{entry['name']}"), f"{entry['task']}", *figures)
        Console(width=None if sys.stdout.isatty() else 120).print(table)


class RemoveModel(ModelsCommand):
    """Take a model from the list that no worker serves, with its dead letters and all that is kept
    of its jobs. It is there again when a worker serves it.
    """

    model: CliPositionalArg[str] = Field(description="as `penstock models list` shows it")

    async def run(self, client: QueueClient) -> None:
        await KnownModels(client).remove(self.model)
        fields = {"model": self.model, "removed": True}
        print(json.dumps(fields) if self.as_json else f"{self.model} was removed")


COMMANDS: dict[str, type[ModelsCommand]] = {"list": ListModels, "remove": RemoveModel}


async def _run(command: ModelsCommand) -> None:
    async with QueueClient.from_url(command.redis_url) as client:
        await command.run(client)


def main(argv: Sequence[str]) -> int:
    return dispatch("penstock models", USAGE, COMMANDS, argv, _run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

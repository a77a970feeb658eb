"""penstock queues list | pause | resume: commands for the queues of models."""

import json
import sys
from collections.abc import Sequence

from pydantic import Field
from pydantic_settings import CliPositionalArg
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from penstock.gateway.commands.terminal import OperatorCommand, dispatch
from penstock.gateway.queue_client import QueueClient
from penstock.gateway.tasks.fleet import Fleet
from penstock.schemas.api.openai import JsonObject

USAGE = "usage: penstock queues list | pause MODEL | resume MODEL [--flag VALUE ...]"


class QueuesCommand(OperatorCommand):
    async def run(self, fleet: Fleet) -> None:
        raise NotImplementedError

    def say(self, queues: Sequence[JsonObject], output: object) -> None:
        if self.as_json:
            print(json.dumps(output))
            return
        columns = (Column(name, justify="right") for name in ("queued", "running"))
        table = Table("model", "state", *columns)
        for queue in queues:
            state = Text("paused", "yellow") if queue["is_paused"] else Text("open", "green")
            table.add_row(
                Text(f"{queue['model']}"),
                state,
                f"{queue['num_queued']}",
                f"{queue['num_running']}",
            )
        Console(width=None if sys.stdout.isatty() else 120).print(table)


class ListQueues(QueuesCommand):
    """List the queue of each model."""

    async def run(self, fleet: Fleet) -> None:
        queues = await fleet.queues()
        self.say(queues, queues)


class PauseQueue(QueuesCommand):
    """Let no job of a model begin. Jobs are accepted, and wait; what runs, runs to its end."""

    model: CliPositionalArg[str] = Field(description="as `penstock queues list` shows it")

    async def run(self, fleet: Fleet) -> None:
        queue = await fleet.set_paused(self.model, True)
        self.say([queue], queue)


class ResumeQueue(QueuesCommand):
    """Let the jobs of a model begin again."""

    model: CliPositionalArg[str] = Field(description="as `penstock queues list` shows it")

    async def run(self, fleet: Fleet) -> None:
        queue = await fleet.set_paused(self.model, False)
        self.say([queue], queue)


COMMANDS: dict[str, type[QueuesCommand]] = {
    "list": ListQueues,
    "pause": PauseQueue,
    "resume": ResumeQueue,
}


async def _run(command: QueuesCommand) -> None:
    async with QueueClient.from_url(command.redis_url) as client:
        await command.run(Fleet(client))


def main(argv: Sequence[str]) -> int:
    return dispatch("penstock queues", USAGE, COMMANDS, argv, _run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

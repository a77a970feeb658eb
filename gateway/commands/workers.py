"""penstock workers list | drain | sleep | wake | reset-prefix-cache: for workers of all models."""

import json
import sys
from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field
from pydantic_settings import CliPositionalArg
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.gateway.commands.terminal import OperatorCommand, dispatch
from penstock.gateway.metrics.overview import look, workers
from penstock.gateway.queue_client import QueueClient
from penstock.gateway.tasks.fleet import Fleet
from penstock.schemas.counted import counted
from penstock.schemas.model import WorkerOrder

USAGE = (
    "usage: penstock workers list | drain WORKER | sleep WORKER | wake WORKER | reset-prefix-cache"
    " [--flag VALUE ...]"
)


class WorkersCommand(OperatorCommand):
    async def run(self, client: QueueClient) -> None:
        raise NotImplementedError


class ListWorkers(WorkersCommand):
    """List all workers, with their state; `penstock top` shows them as they change."""

    async def run(self, client: QueueClient) -> None:
        entries = workers(await look(client))
        if self.as_json:
            print(json.dumps(entries))
            return
        table = Table("worker", "model", "state", "running")
        for entry in entries:
            table.add_row(
                *(Text(f"{entry[name]}") for name in ("worker", "model", "state")),
                f"{entry['num_running']} of {entry['max_num_seqs']}",
            )
        Console(width=None if sys.stdout.isatty() else 140).print(table)


class TellWorker(WorkersCommand):
    order: ClassVar[WorkerOrder]
    worker: CliPositionalArg[str] = Field(description="as `penstock workers list` shows it")

    async def run(self, client: QueueClient) -> None:
        await Fleet(client).tell(self.worker, self.order)
        fields = {"worker": self.worker, "told": self.order}
        print(json.dumps(fields) if self.as_json else f"{self.worker} was told to {self.order}")


class DrainWorker(TellWorker):
    """Let a worker end in order, as SIGTERM does: it takes nothing new, finishes what it has within
    its --drain-s, and hands the rest on. Who runs it starts it again or not.
    """

    order = "drain"


class SleepWorker(TellWorker):
    """Let a worker give the model's memory back: it finishes or hands on what it has, as when it
    drains, and takes nothing new until it is told to wake.
    """

    order = "sleep"


class WakeWorker(TellWorker):
    """Let a worker that sleeps load its model again, and take jobs."""

    order = "wake"


class ResetPrefixCaches(WorkersCommand):
    """Let all workers forget what they have computed: no later job finds it in a cache."""

    async def run(self, client: QueueClient) -> None:
        names = await Fleet(client).reset_prefix_caches()
        sentence = f"told {counted(len(names), 'worker')}"
        print(json.dumps({"workers": names}) if self.as_json else sentence)


COMMANDS: dict[str, type[WorkersCommand]] = {
    "list": ListWorkers,
    "drain": DrainWorker,
    "sleep": SleepWorker,
    "wake": WakeWorker,
    "reset-prefix-cache": ResetPrefixCaches,
}


def main(argv: Sequence[str]) -> int:
    return dispatch("penstock workers", USAGE, COMMANDS, argv, _run)


async def _run(command: WorkersCommand) -> None:
    async with QueueClient.from_url(command.redis_url) as client:
        await command.run(client)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

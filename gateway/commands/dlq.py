"""penstock dlq list | show | requeue | drop: commands for the dead letters of all models.

A dead letter is the record of a job that was given up.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, JsonValue
from pydantic_settings import CliPositionalArg
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from penstock.gateway.commands.terminal import OperatorCommand, dispatch
from penstock.gateway.queue_client import QueueClient
from penstock.gateway.tasks.dead_letters import DeadLetters
from penstock.schemas.counted import counted
from penstock.schemas.delivery import DeadLetter

DUMPS = Path("~/.penstock/crashes")  # where `penstock up` has its workers leave them
DUMP_SUFFIX = ".crash.json"
USAGE = "usage: penstock dlq list | show ID | requeue ID | drop ID [--flag VALUE ...]"


class DlqCommand(OperatorCommand):
    async def run(self, client: QueueClient) -> None:
        raise NotImplementedError


class OfOne(DlqCommand):
    job_id: CliPositionalArg[str] = Field(description="as `penstock dlq list` shows it")

    def say(self, fields: dict[str, JsonValue], sentence: str) -> None:
        print(json.dumps({"job": self.job_id} | fields) if self.as_json else sentence)


class ListDead(DlqCommand):
    """List all dead letters, newest first. They are kept for a week, a thousand of each lane."""

    most: int = Field(100, ge=1, le=1000, description="of each lane")

    async def run(self, client: QueueClient) -> None:
        letters, num_dropped = await DeadLetters(client).newest(self.most)
        if self.as_json:
            records = [letter.model_dump(mode="json", by_alias=True) for letter in letters]
            print(json.dumps({"letters": records, "dropped": num_dropped}))
            return
        _console().print(_table(letters))
        if num_dropped:
            print(f"{counted(num_dropped, 'older letter')} dropped to make room.")


class Show(OfOne):
    """Show one dead letter: everything that is known of the job except its prompt and answer."""

    crash_dump_folder: Path = Field(
        DUMPS, description="where workers of this machine leave files of crashes"
    )

    async def run(self, client: QueueClient) -> None:
        letter, job = await DeadLetters(client).get(self.job_id)
        fields: dict[str, JsonValue] = letter.model_dump(mode="json", by_alias=True) | {
            "crash_dumps": [str(path) for path in self.dumps(letter)],
            "can_be_requeued": job is not None,
        }
        if self.as_json:
            print(json.dumps(fields))
            return
        if not fields["crash_dumps"]:
            where = "a worker leaves them on its own machine, where its --crash-dump-folder says"
            fields["crash_dumps"] = f"none in {self.crash_dump_folder}; {where}"
        table = Table("field", "value")
        for name, value in fields.items():
            cell = _time(value) if name.endswith("_ms") and isinstance(value, int) else value
            table.add_row(name, escape(str(cell)))
        _console().print(table)

    def dumps(self, letter: DeadLetter) -> list[Path]:
        """Return the crash dumps of a letter's workers. A lost worker may have left none."""
        folder = self.crash_dump_folder.expanduser()
        paths = [folder / f"{name}{DUMP_SUFFIX}" for name in letter.workers.split()]
        return [path for path in paths if path.exists()]


class Requeue(OfOne):
    """Submit a job again, under an id that is made from its own, and remove its dead letter."""

    async def run(self, client: QueueClient) -> None:
        again = await DeadLetters(client).requeue(self.job_id)
        self.say({"requeued_as": again}, f"{self.job_id} was submitted again as {again}")


class Drop(OfOne):
    """Delete a dead letter, and the request that is kept with it."""

    async def run(self, client: QueueClient) -> None:
        await DeadLetters(client).drop(self.job_id)
        self.say({"dropped": True}, f"{self.job_id} was dropped")


COMMANDS: dict[str, type[DlqCommand]] = {
    "list": ListDead,
    "show": Show,
    "requeue": Requeue,
    "drop": Drop,
}


def main(argv: Sequence[str]) -> int:
    return dispatch("penstock dlq", USAGE, COMMANDS, argv, _run)


async def _run(command: DlqCommand) -> None:
    async with QueueClient.from_url(command.redis_url) as client:
        await command.run(client)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 140)


def _table(letters: Sequence[DeadLetter]) -> Table:
    table = Table(
        Column("job", no_wrap=True),
        "tenant",
        "reason",
        "deliveries",
        "tokens",
        "bytes",
        "died",
        "workers",
    )
    for letter in letters:
        table.add_row(
            letter.job,
            escape(letter.tenant),
            letter.reason,
            str(letter.deliveries),
            str(letter.num_tokens),
            str(letter.request_bytes),
            _time(letter.died_ms),
            escape(letter.workers),
        )
    return table


def _time(time_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(time_ms / 1000))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

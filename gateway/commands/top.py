"""`penstock top`: what runs now, as a table that is drawn anew each second."""

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Self

from pydantic import Field, JsonValue, model_validator
from rich.console import Console, Group
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from penstock.gateway.commands.terminal import run
from penstock.gateway.files.storage_accounts import StorageAccounts, StorageUse
from penstock.gateway.metrics.overview import look, models, workers
from penstock.gateway.queue_client import QueueClient
from penstock.schemas.api.openai import JsonObject
from penstock.schemas.counted import counted
from penstock.schemas.errors import QueueUnreachable
from penstock.schemas.process.nearby import ANYWHERE
from penstock.schemas.process.start import Settings, load_settings
from penstock.schemas.redis.connection import is_forbidden
from penstock.schemas.redis.url import RedisUrlSetting

PROGRAM = "penstock top"
MOST_TENANTS = 10  # the tenants that have most stored
STATES = {
    "serving": "green",
    "draining": "yellow",
    "asleep": "blue",
    "stalled": "bold red",
    "lost": "bold red",
}


class TopSettings(Settings):
    """Show what runs now: models with their queues, workers with their load, what tenants store.

    Ctrl-C ends it. Where the output is no terminal, or with --json, it is shown once.
    """

    redis_url: RedisUrlSetting = Field(
        ANYWHERE, description="where the queue is; unset: of the `penstock up` that runs here"
    )
    every_s: float = Field(1.0, gt=0, description="between two looks")
    as_json: bool = Field(False, alias="json", description="JSON, once, instead of tables")

    @model_validator(mode="after")
    def repeats_only_tables(self) -> Self:
        if self.as_json and "every_s" in self.model_fields_set:
            raise ValueError("every_s: --json is shown once; leave one of them out")
        return self


class Top:
    """Makes tables of what runs, with rates since the look before."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}  # worker -> its tokens
        self._seen_s = time.monotonic()

    def tables(
        self,
        models: Sequence[JsonObject],
        workers: Sequence[JsonObject],
        storage: Sequence[StorageUse],
    ) -> Group:
        now_s = time.monotonic()
        rates = {
            str(worker["worker"]): self._rate(worker, now_s - self._seen_s) for worker in workers
        }
        self._tokens = {
            str(worker["worker"]): _int(worker["generation_tokens"]) for worker in workers
        }
        self._seen_s = now_s
        tables: list[Table | Text] = [_model_table(models), Text(), _worker_table(workers, rates)]
        if storage:
            tables += [Text(), _storage_table(storage)]
        return Group(*tables)

    def _rate(self, worker: JsonObject, seconds: float) -> str:
        before = self._tokens.get(str(worker["worker"]))
        if before is None or seconds <= 0:
            return "-"
        return f"{max(0, _int(worker['generation_tokens']) - before) / seconds:,.0f}"


def main(argv: Sequence[str]) -> int:
    settings = load_settings(TopSettings, PROGRAM, argv)
    return run(PROGRAM, _show(settings, Console()))


async def _show(settings: TopSettings, console: Console) -> None:
    async with QueueClient.from_url(settings.redis_url) as client:
        lanes, accounts = await look(client), StorageAccounts(client.redis)
        storage = await _stored(accounts)
        if settings.as_json:
            snapshot: JsonObject = {"models": [*models(lanes)], "workers": [*workers(lanes)]}
            snapshot["storage"] = [use.shape() for use in storage]
            print(json.dumps(snapshot))
            return
        top = Top()
        tables = top.tables(models(lanes), workers(lanes), storage)
        if not console.is_terminal:
            console.print(tables)
            return
        with Live(tables, console=console, auto_refresh=False, screen=True) as live:
            while True:
                await asyncio.sleep(settings.every_s)
                try:
                    lanes, storage = await look(client), await _stored(accounts)
                    live.update(top.tables(models(lanes), workers(lanes), storage), refresh=True)
                except QueueUnreachable as error:
                    live.update(Text(f"{error.message}; trying again", "bold red"), refresh=True)


async def _stored(accounts: StorageAccounts) -> list[StorageUse]:
    """Return what tenants have stored, or nothing where the user of Redis is a worker's."""
    try:
        return await accounts.all()
    except QueueUnreachable as error:
        if is_forbidden(error):
            return []
        raise


def _model_table(models: Sequence[JsonObject]) -> Table:
    names = ("workers", "queued", "running", "ended", "delayed", "crashes", "dead letters")
    table = _table("model", *names, caption=None if models else "no model was ever served here")
    for model in models:
        fields = ("num_workers", "num_queued", "num_running", "num_ended", "num_delayed")
        counts = [f"{_int(model[field]):,}" for field in fields]
        wrong = [_flagged(model.get("crashed", 0)), _flagged(model["num_dead_letters"])]
        name = Text(str(model["name"]))
        if model["is_paused"]:
            name.append(" paused", "yellow")
        table.add_row(name, *counts, *wrong)
    return table


def _worker_table(workers: Sequence[JsonObject], rates: dict[str, str]) -> Table:
    names = ("state", "running", "waiting", "KV", "tokens/s", "preempted")
    table = _table("worker", "model", *names, caption=None if workers else "no worker is there")
    for worker in workers:
        num_held, blocks = _int(worker["num_held_blocks"]), _int(worker["num_blocks"]) or 1
        state = str(worker["state"])
        table.add_row(
            Text(str(worker["worker"])),
            Text(_served(worker)),
            Text(state, STATES[state]),
            f"{_int(worker['num_running'])} of {_int(worker['max_num_seqs'])}",
            f"{_int(worker['num_waiting']):,}",
            f"{num_held / blocks:.0%}",
            rates[str(worker["worker"])],
            f"{_int(worker['num_preemptions']):,}",
        )
    return table


def _served(worker: JsonObject) -> str:
    models = worker["models"]
    num_more = len(models) - 1 if isinstance(models, list) else 0
    return f"{worker['model']} and {num_more} more" if num_more > 0 else str(worker["model"])


def _storage_table(storage: Sequence[StorageUse]) -> Table:
    hidden = len(storage) - MOST_TENANTS
    caption = f"and {counted(hidden, 'more tenant', ',')}" if hidden > 0 else None
    table = _table("tenant", "MB stored", "things", caption=caption)
    for use in storage[:MOST_TENANTS]:
        table.add_row(Text(use.tenant), f"{use.used_bytes / 1e6:,.1f}", f"{use.num_things:,}")
    return table


def _table(first: str, *names: str, caption: str | None) -> Table:
    texts = {"model", "state"}
    columns = [Column(name, justify="left" if name in texts else "right") for name in names]
    return Table(Column(first), *columns, box=None, pad_edge=False, caption=caption)


def _flagged(count: JsonValue) -> Text:
    return Text(f"{_int(count):,}", "bold red" if count else "")


def _int(value: JsonValue) -> int:
    return int(value) if isinstance(value, int | float) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""`penstock doctor`: tells whether this machine, its Redis and a model are fit."""

import asyncio
import importlib.util
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.gateway.auth.keyring import KeyStore
from penstock.gateway.metrics.overview import look
from penstock.gateway.queue_client import QueueClient
from penstock.gateway.tasks.due import server_time_ms
from penstock.gateway.tasks.signature import HousekeepingSignature
from penstock.schemas.errors import InvalidJob, PenstockError, QueueUnreachable
from penstock.schemas.process.nearby import ANYWHERE
from penstock.schemas.process.secret import BadSecret
from penstock.schemas.process.start import SecretSettings, load_settings
from penstock.schemas.redis.connection import Connection
from penstock.schemas.redis.group_sync import Durability
from penstock.schemas.redis.server_check import UnfitServer, check_disks, check_servers
from penstock.schemas.redis.url import RedisUrlSetting, shown

PROGRAM = "penstock doctor"
CLOCKS_S = 1.0  # apart, from which logs and traces of several machines are hard to read
Verdict = Literal["good", "look", "bad"]
COLOURS: dict[Verdict, str] = {"good": "green", "look": "yellow", "bad": "bold red"}


class DoctorSettings(SecretSettings):
    """Look whether Redis, keys, processor, GPU and a model are fit, and change nothing.

    With a --durability other than server it writes one key for a minute, to see that it is kept.
    The exit status is 1 where one of them is bad.
    """

    redis_url: RedisUrlSetting = Field(
        ANYWHERE, description="where the queue is; unset: of the `penstock up` that runs here"
    )
    durability: Durability = Field(
        "server", description="as the gateway's; others than server are tried out by a write"
    )
    model: str | None = Field(None, description="a model to look at, named as a worker's --model")
    as_json: bool = Field(False, alias="json", description="JSON instead of a table")


@dataclass(frozen=True, slots=True)
class Finding:
    of: str
    verdict: Verdict
    text: str


def main(argv: Sequence[str]) -> int:
    settings = load_settings(DoctorSettings, PROGRAM, argv)
    findings = asyncio.run(_all(settings))
    if settings.as_json:
        print(json.dumps([asdict(finding) for finding in findings]))
    else:
        table = Table(box=None, show_header=False, pad_edge=False)
        for finding in findings:
            table.add_row(
                finding.of, Text(finding.verdict, COLOURS[finding.verdict]), Text(finding.text)
            )
        Console().print(table)
    return int(any(finding.verdict == "bad" for finding in findings))


async def _all(settings: DoctorSettings) -> list[Finding]:
    findings = [finding async for finding in of_redis(settings)]
    if importlib.util.find_spec("torch") is None:
        text = "torch is not installed: gateway, housekeeping and SDK run here, no worker"
        return [*findings, Finding("worker", "look", text)]
    return [*findings, *of_processor(), *of_gpu(), *of_attention(), *of_model(settings.model)]


async def of_redis(settings: DoctorSettings) -> AsyncIterator[Finding]:
    """Look at the servers, their clock, what they hold, and the secret that checks its keys."""
    url = shown(settings.redis_url)
    async with QueueClient.from_url(settings.redis_url) as client:
        try:
            warnings = await check_servers(client.redis, settings.durability)
            for warning in warnings:
                yield Finding("redis", "look", warning)
            faults = await check_disks(client.redis, settings.durability)
            for fault in faults:
                yield Finding("redis", "bad", fault)
            if not warnings and not faults:
                yield Finding("redis", "good", f"{url} can keep the queue's promises")
            asked_ms = time.time() * 1000
            apart_s = (await server_time_ms(Connection(client.redis)) - asked_ms) / 1000
            yield of_clocks(apart_s)
            keys = await KeyStore(client.redis).texts()
            yield of_secret(settings, bool(keys))
            lanes = await look(client)
            yield of_housekeeping(await HousekeepingSignature(client.redis).is_there())
        except (UnfitServer, QueueUnreachable) as error:
            text = error.message if isinstance(error, QueueUnreachable) else str(error)
            yield Finding("redis", "bad", f"{text} (--redis-url says where it is)")
            return
    serving = {(lane.model, member.worker) for lane in lanes for member in lane.staff}
    for model in sorted({lane.model for lane in lanes}):
        count = sum(name == model for name, _ in serving)
        waiting = sum(lane.status.num_queued for lane in lanes if lane.model == model)
        text = f"{model}: workers that serve: {count}; jobs that wait: {waiting}"
        yield Finding("queue", "bad" if waiting and not count else "good", text)
    if not lanes:
        yield Finding("queue", "look", "no worker was ever here: start `penstock worker`")


def of_housekeeping(is_there: bool) -> Finding:
    if is_there:
        return Finding("housekeeping", "good", "it does its chores")
    text = "none runs: webhooks and batches wait; start `penstock housekeeping`"
    return Finding("housekeeping", "look", text)


def of_clocks(apart_s: float) -> Finding:
    if abs(apart_s) < CLOCKS_S:
        return Finding("clocks", "good", "this machine's and Redis's agree")
    advice = "nothing is decided by this machine's, but its logs and traces have it: set it right"
    return Finding("clocks", "look", f"Redis's is {apart_s:+.1f} s from this machine's; {advice}")


def of_secret(settings: DoctorSettings, has_keys: bool) -> Finding:
    try:
        secret = settings.read_secret()
    except BadSecret as error:
        return Finding("keys", "bad", str(error))
    if has_keys and secret is None:
        file = settings.server_secret_file
        text = f"there are API keys, but no server secret in {file}: a gateway lets nobody in"
        return Finding("keys", "bad", f"{text}; copy it from where `keys create` ran")
    if not has_keys:
        text = "no API key was made: whatever reaches a gateway is let in; `penstock keys create`"
        return Finding("keys", "look", text)
    return Finding("keys", "good", "there are API keys and a server secret")


def of_processor() -> Iterator[Finding]:
    from penstock.kernels.cpu.library import compiled_ops
    from penstock.kernels.cpu.prebuilt import levels, this_processors

    features = this_processors()
    name = next((level.name for level in levels() if level.features <= features), "unknown")
    if compiled_ops() is None:
        text = f"{name}, but no C compiler and no operations made ahead by `penstock prebuild`"
        yield Finding("processor", "look", f"{text}: torch takes several times as long")
    else:
        yield Finding("processor", "good", f"{name}, with compiled operations")


def of_attention() -> Iterator[Finding]:
    import torch

    from penstock.kernels.attention.backends import backends, told

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    yield Finding("attention", "good", told(backends(device, torch.bfloat16)))


def of_gpu() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        yield Finding("gpu", "good", "none that torch can use: models run on the processor")
        return
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        name = torch.cuda.get_device_name(number)
        text = f"{name}: {free / 2**30:.1f} of {total / 2**30:.1f} GiB are free"
        yield Finding("gpu", "good" if free > total / 2 else "look", text)


def of_model(model: str | None) -> Iterator[Finding]:
    if model is None:
        return
    from penstock.worker.models.contract.spec import ModelSpec
    from penstock.worker.models.folder.errors import ModelError
    from penstock.worker.models.folder.files import weight_files
    from penstock.worker.models.impl import plan_model
    from penstock.worker.process.model_folder import model_folder
    from penstock.worker.text.model_tokenizer import ModelTokenizer

    try:
        folder = model_folder(model)
        facts = plan_model(ModelSpec(folder)).facts
        has_template = ModelTokenizer(folder).has_chat_template
        size = sum(path.stat().st_size for path in weight_files(folder))
    except (InvalidJob, PenstockError, ModelError, OSError, ValueError) as error:
        yield Finding("model", "bad", str(getattr(error, "message", error)))
        return
    text = f"{Path(model).name}: {size / 1e9:.2f} GB, {facts.max_model_len} tokens at most"
    if not size:
        yield Finding("model", "bad", f"{folder} holds no weights")
    elif not has_template:
        yield Finding("model", "look", f"{text}, without a chat template: completions only")
    else:
        yield Finding("model", "good", text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

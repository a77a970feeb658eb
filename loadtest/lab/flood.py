"""`penstock bench flood`: what callers of one tenant see of another one that floods."""

import asyncio
import json
import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import httpx
import uvloop
from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode
from rich.console import Console
from rich.table import Table

from penstock.compose.server import Server
from penstock.loadtest.engines.own import OwnSettings, flags
from penstock.loadtest.engines.system import stack
from penstock.loadtest.errors import BadOption, CannotMeasure
from penstock.loadtest.lab.report.chance import ttft_ratio_range
from penstock.loadtest.lab.requests.floods import BEGAN, KEY, KINDS
from penstock.loadtest.machine.usage import Neighbours, description
from penstock.loadtest.report.serving import told_errors
from penstock.loadtest.requests.drive import drive, warm_up
from penstock.loadtest.requests.http_stream import Target
from penstock.loadtest.requests.measurement import Measurement
from penstock.loadtest.requests.way import Way
from penstock.loadtest.requests.workload import Request, random_requests, varied
from penstock.schemas.process.start import load_settings, words_of

PROGRAM = "penstock bench flood"
_LIMITS = ("--requests-per-minute", "600", "--max-stored-bytes", "20000000")  # the flood's quota
_KEYS_S = 60.0
_SETTLE_S = 2.0  # after a flood, for what it left


class FloodSettings(OwnSettings):
    """Latencies of one tenant's requests alone, and the same arrivals while another tenant floods.

    The status is 1 where a request failed.
    """

    kinds: Annotated[list[str], NoDecode, BeforeValidator(words_of)] = Field(
        list(KINDS), description=f"of floods: {', '.join(KINDS)}"
    )
    num_prompts: int = Field(120, ge=1, description="requests of a kind, each time")
    request_rate: float = Field(2.0, gt=0, description="of them a second, as a Poisson process")
    rounds: int = Field(2, ge=1, description="parts of the requests: alone and beside take turns")
    input_len: int = Field(64, ge=1, description="tokens of a prompt")
    output_len: int = Field(20, ge=1, description="tokens of an answer")
    output_json: Path | None = Field(None, description="write the figures there too")


@dataclass(slots=True)
class FloodEffect:
    """The effect of one kind of flood on a tenant's callers, and the end of its own calls."""

    alone: Measurement = field(default_factory=lambda: Measurement([], 0.0))
    beside: Measurement = field(default_factory=lambda: Measurement([], 0.0))
    num_answered: int = 0
    num_refused: int = 0

    def figures(self) -> dict[str, object]:
        summaries = [part.summary(("ttft",), (50, 99)) for part in (self.alone, self.beside)]
        return {
            "alone": summaries[0],
            "beside": summaries[1],
            "p99_ttft_ratio": summaries[1]["p99_ttft_ms"] / summaries[0]["p99_ttft_ms"],
            "p99_ttft_ratio_95": ttft_ratio_range(self.alone, self.beside, 99),
            "answered": self.num_answered,
            "refused": self.num_refused,
        }


def main(argv: Sequence[str]) -> int:
    settings = load_settings(FloodSettings, PROGRAM, argv)
    if bad_kinds := [kind for kind in settings.kinds if kind not in KINDS]:
        raise BadOption(f"kinds: {bad_kinds[0]!r} is none of {', '.join(KINDS)}")
    console = Console()
    if not console.is_terminal:
        console.width = 110
    with Neighbours() as neighbours:
        effects = uvloop.run(_measure(settings, console))
    _show(console, settings, effects)
    console.print(f"CPU used by others: {neighbours.share:.0%}", highlight=False)
    measurements = [part for effect in effects.values() for part in (effect.alone, effect.beside)]
    for line in (line for part in measurements for line in told_errors(part)):
        print(line, file=sys.stderr)
    if settings.output_json is not None:
        figures = {kind: effect.figures() for kind, effect in effects.items()}
        result = {"machine": description(), "model": settings.model, "floods": figures}
        settings.output_json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if any(part.errors for part in measurements) else 0


@dataclass(frozen=True, slots=True)
class Tenants:
    """The service, as two tenants reach it: one is measured, one floods."""

    server: Target
    model: str
    flooding_key: str
    receiver: str

    async def measure(
        self,
        kind: str,
        requests: Sequence[Request],
        more: Sequence[Request],
        way: Way,
        effect: FloodEffect,
    ) -> None:
        """Drive the requests alone, and others like them at the same times beside a flood."""
        effect.alone += await drive(self.server, self.model, requests, way)
        async with self._flood(kind, effect):
            effect.beside += await drive(self.server, self.model, more, way)
        await asyncio.sleep(_SETTLE_S)

    @asynccontextmanager
    async def _flood(self, kind: str, effect: FloodEffect) -> AsyncIterator[None]:
        """Have a tenant flood the service from another process; add what became of its calls."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "penstock.loadtest.lab.requests.floods"),
            *(kind, self.server.base_url, self.receiver),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {KEY: self.flooding_key},
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            if (await process.stdout.readline()).decode().strip() != BEGAN:
                raise CannotMeasure(f"{kind}: the flood did not begin; its words are above")
            yield
            process.stdin.close()
            counts = json.loads(await process.stdout.readline())
            effect.num_answered += counts["answered"]
            effect.num_refused += counts["refused"]
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _measure(settings: FloodSettings, console: Console) -> dict[str, FloodEffect]:
    """Drive the requests in parts, each alone and then beside a flood, kind after kind."""
    vocab_size, lengths = settings.own_vocab_size, (settings.input_len, settings.output_len)
    requests = random_requests(settings.num_prompts, *lengths, vocab_size)
    parts = [requests[number :: settings.rounds] for number in range(settings.rounds)]
    effects = {kind: FloodEffect() for kind in settings.kinds}
    secret = {"PENSTOCK_SERVER_SECRET": secrets.token_hex(32)}
    receiver = f"http://127.0.0.1:{_free_port()}"
    with Server() as redis:
        words = [*flags(settings.given()), "--webhook-private", receiver, "--redis-url", redis.url]
        async with stack(settings.model, *words, env=secret) as url:
            caller_key = await _key(redis.url, secret, "measured")
            flooding_key = await _key(redis.url, secret, "flood", *_LIMITS)
            await _until_keys_count(url)
            server = Target(url, caller_key)
            tenants = Tenants(server, await server.first_model(), flooding_key, receiver)
            await warm_up(server, tenants.model, requests, Way())
            for at, (kind, effect) in enumerate(effects.items()):
                for number, part in enumerate(parts):
                    console.print(f"{kind}: {len(part)} requests, alone and beside it")
                    turn = 2 * (at * len(parts) + number) + 1
                    first, more = (varied(part, turn + offset, vocab_size) for offset in (0, 1))
                    way = Way(request_rate=settings.request_rate, seed=number)
                    await tenants.measure(kind, first, more, way, effect)
    return effects


async def _key(redis_url: str, env: dict[str, str], tenant: str, *limits: str) -> str:
    """Make a key of a tenant, and return it."""
    scopes = "inference,jobs,metrics"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.compose.cli", "keys", "create", "--json"),
        *("--redis-url", redis_url, "--tenant", tenant, "--scopes", scopes, *limits),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | env,
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise CannotMeasure("no key could be made; the reason is above")
    return str(json.loads(output)["key"])


async def _until_keys_count(url: str) -> None:
    """Wait until the gateway has heard that there are keys."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as http, asyncio.timeout(_KEYS_S):
        while (await http.get("/v1/models")).status_code != 401:
            await asyncio.sleep(0.2)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _show(console: Console, settings: FloodSettings, effects: dict[str, FloodEffect]) -> None:
    table = Table(
        title=f"{settings.names[0]}: p99 TTFT of one tenant, milliseconds", title_justify="left"
    )
    table.add_column("another floods by")
    for column in ("alone", "beside", "ratio", "of chance, 95 %", "its calls", "refused"):
        table.add_column(column, justify="right")
    for kind, effect in effects.items():
        first, second = (
            part.summary(("ttft",), (99,))["p99_ttft_ms"] for part in (effect.alone, effect.beside)
        )
        low, high = ttft_ratio_range(effect.alone, effect.beside, 99)
        table.add_row(
            kind,
            f"{first:.1f}",
            f"{second:.1f}",
            f"{second / first:.2f}",
            f"{low:.2f} to {high:.2f}",
            f"{effect.num_answered:,}",
            f"{effect.num_refused:,}",
        )
    console.print(table)

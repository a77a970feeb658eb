"""`penstock bench beside`: what interactive callers see of a batch that runs beside them."""

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvloop
from pydantic import Field, ValidationInfo, field_validator
from rich.console import Console
from rich.table import Table

from penstock.loadtest.engines.own import OwnSettings, flags
from penstock.loadtest.engines.system import stack
from penstock.loadtest.errors import CannotMeasure
from penstock.loadtest.lab.report.chance import ttft_ratio_range
from penstock.loadtest.machine.usage import Neighbours, description
from penstock.loadtest.report.serving import told_errors
from penstock.loadtest.requests.drive import drive, warm_up
from penstock.loadtest.requests.http_stream import Target
from penstock.loadtest.requests.measurement import Measurement
from penstock.loadtest.requests.way import Way
from penstock.loadtest.requests.workload import Request, random_requests, varied
from penstock.schemas.process.start import load_settings

PROGRAM = "penstock bench beside"
_LOOK_S = 0.2
_BEGIN_S = 120.0


class BesideSettings(OwnSettings):
    """Latencies of interactive requests alone, and the same arrivals beside a batch. The status is
    1 where a request failed.
    """

    num_prompts: int = Field(200, ge=1, description="interactive requests, each time")
    request_rate: float = Field(1.0, gt=0, description="of them a second, as a Poisson process")
    rounds: int = Field(2, ge=1, description="parts of the requests: alone and beside take turns")
    input_len: int = Field(64, ge=1, description="tokens of a prompt")
    output_len: int = Field(40, ge=1, description="tokens of an answer")
    num_lines: int = Field(5000, ge=1, description="of the batch, with prompts and answers as long")
    output_json: Path | None = Field(None, description="write the figures there too")

    @field_validator("rounds")
    @classmethod
    def has_requests_for_each(cls, rounds: int, fields: ValidationInfo) -> int:
        if rounds > fields.data.get("num_prompts", rounds):
            raise ValueError("each needs a request; give --num-prompts at least as many")
        return rounds


@dataclass(slots=True)
class BothWays:
    """The measurements of callers, and the number of lines that were answered beside them."""

    alone: Measurement
    beside: Measurement
    num_done: int = 0


def main(argv: Sequence[str]) -> int:
    settings = load_settings(BesideSettings, PROGRAM, argv)
    console = Console()
    if not console.is_terminal:
        console.width = 110
    with Neighbours() as neighbours:
        both_ways = uvloop.run(_measure(settings, console))
    figures = _show(console, settings, both_ways)
    console.print(f"CPU used by others: {neighbours.share:.0%}", highlight=False)
    for line in (*told_errors(both_ways.alone), *told_errors(both_ways.beside)):
        print(line, file=sys.stderr)
    if settings.output_json is not None:
        result = {"machine": description(), "model": settings.model, **figures}
        settings.output_json.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if both_ways.alone.errors or both_ways.beside.errors else 0


async def _measure(settings: BesideSettings, console: Console) -> BothWays:
    """Drive the requests in parts, each alone and beside; every other part beside it first."""
    vocab_size, lengths = settings.own_vocab_size, (settings.input_len, settings.output_len)
    requests = random_requests(settings.num_prompts, *lengths, vocab_size)
    lines = random_requests(settings.num_lines, *lengths, vocab_size, seed=1)
    parts = [requests[number :: settings.rounds] for number in range(settings.rounds)]
    ways = [Way(request_rate=settings.request_rate, seed=number) for number in range(len(parts))]
    both_ways = BothWays(Measurement([], 0.0), Measurement([], 0.0))
    async with (
        stack(settings.model, *flags(settings.given())) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        server = Target(url)
        model = await server.first_model()
        await warm_up(server, model, requests, Way())

        async def alone(number: int) -> None:
            both_ways.alone += await drive(server, model, parts[number], ways[number])

        async def beside(number: int) -> None:
            batch = await _begin(http, model, varied(lines, number, vocab_size))
            before = await _num_done(http, batch)
            both_ways.beside += await drive(
                server, model, varied(parts[number], 1, vocab_size), ways[number]
            )
            after = await _num_done(http, batch)
            both_ways.num_done += after - before
            if after == settings.num_lines:
                why = "the batch ended before the requests did; give more lines"
                print(f"{PROGRAM}: {why}", file=sys.stderr)
            await _end(http, batch)

        for number, part in enumerate(parts):
            for turn in (alone, beside) if number % 2 == 0 else (beside, alone):
                console.print(f"{len(part)} requests {turn.__name__}", highlight=False)
                await turn(number)
    return both_ways


async def _begin(http: httpx.AsyncClient, model: str, lines: Sequence[Request]) -> str:
    """Start a batch, and return its id when its first line was answered."""
    calls = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "model": model,
                "prompt": line.prompt,
                "max_tokens": line.max_tokens,
                "ignore_eos": True,
            },
        }
        for number, line in enumerate(lines)
    ]
    content = "".join(json.dumps(line) + "\n" for line in calls).encode()
    files, purpose = {"file": ("lines.jsonl", content)}, {"purpose": "batch"}
    file_id = _ok(await http.post("/v1/files", files=files, data=purpose))["id"]
    body = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = str(_ok(await http.post("/v1/batches", json=body))["id"])
    try:
        async with asyncio.timeout(_BEGIN_S):
            while not await _num_done(http, batch):
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        raise CannotMeasure(f"no line of the batch was answered in {_BEGIN_S:g} s") from None
    return batch


async def _end(http: httpx.AsyncClient, batch: str) -> None:
    """Cancel a batch, and wait until none of its lines is with the engine."""
    await http.post(f"/v1/batches/{batch}/cancel")  # refused where it has ended
    async with asyncio.timeout(_BEGIN_S):
        while _ok(await http.get(f"/v1/batches/{batch}"))["status"] in (
            "in_progress",
            "cancelling",
        ):
            await asyncio.sleep(_LOOK_S)


async def _num_done(http: httpx.AsyncClient, batch: str) -> int:
    return int(_ok(await http.get(f"/v1/batches/{batch}"))["request_counts"]["completed"])


def _ok(answer: httpx.Response) -> dict[str, Any]:
    if answer.is_error:
        raise CannotMeasure(f"{answer.request.url}: {answer.text}")
    body: dict[str, Any] = answer.json()
    return body


def _show(console: Console, settings: BesideSettings, both_ways: BothWays) -> dict[str, object]:
    name = settings.names[0]
    table = Table(title=f"{name}, milliseconds", title_justify="left")
    table.add_column("figure")
    for column in ("alone", "beside the batch", "ratio", "of chance, 95 %"):
        table.add_column(column, justify="right")
    sides = (both_ways.alone, both_ways.beside)
    columns = [side.summary(("ttft", "itl", "e2el"), (50, 99)) for side in sides]
    ranges = {f"p{percent}_ttft_ms": ttft_ratio_range(*sides, percent) for percent in (50, 99)}
    for key in columns[0]:
        first, second = (column[key] for column in columns)
        low, high = ranges.get(key, (0, 0))
        chance = f"{low:.2f} to {high:.2f}" if high else ""
        table.add_row(key, f"{first:.1f}", f"{second:.1f}", f"{second / first:.2f}", chance)
    console.print(table)
    rate = both_ways.num_done * settings.output_len / both_ways.beside.wall_s
    console.print(
        f"The batch: {both_ways.num_done} lines, {rate:.0f} tokens a second", highlight=False
    )
    for side in sides:
        if wrong := side.token_errors:
            console.print(f"wrong tokens: {wrong}", highlight=False)
    return {
        "alone": columns[0],
        "beside": columns[1],
        "ratios_95": ranges,
        "lines": both_ways.num_done,
        "batch_output_throughput": rate,
    }

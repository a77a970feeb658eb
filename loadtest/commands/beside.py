"""`penstock bench beside`: what interactive callers see of a batch that runs beside them."""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
import uvloop
from pydantic import Field
from rich.console import Console
from rich.table import Table

from penstock.loadtest.engines.own import OwnSettings, flags
from penstock.loadtest.engines.system import stack
from penstock.loadtest.errors import CannotMeasure
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
    input_len: int = Field(64, ge=1, description="tokens of a prompt")
    output_len: int = Field(40, ge=1, description="tokens of an answer")
    num_lines: int = Field(5000, ge=1, description="of the batch, with prompts and answers as long")
    output_json: Path | None = Field(None, description="write the figures there too")


def main(argv: Sequence[str]) -> int:
    settings = load_settings(BesideSettings, PROGRAM, argv)
    console = Console()
    if not console.is_terminal:
        console.width = 110
    with Neighbours() as neighbours:
        alone, beside, num_done = uvloop.run(_measure(settings, console))
    figures = _show(console, settings, alone, beside, num_done)
    console.print(f"CPU used by others: {neighbours.share:.0%}", highlight=False)
    for line in (*told_errors(alone), *told_errors(beside)):
        print(line, file=sys.stderr)
    if settings.output_json is not None:
        found = {"machine": description(), "model": settings.model, **figures}
        settings.output_json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if alone.errors or beside.errors else 0


async def _measure(
    settings: BesideSettings, console: Console
) -> tuple[Measurement, Measurement, int]:
    """Return what callers saw alone and beside the batch, and how many lines were done then."""
    way = Way(request_rate=settings.request_rate)
    vocab_size, lengths = settings.own_vocab_size, (settings.input_len, settings.output_len)
    requests = random_requests(settings.num_prompts, *lengths, vocab_size)
    lines = random_requests(settings.num_lines, *lengths, vocab_size, seed=1)
    async with stack(settings.model, *flags(settings.given())) as url:
        server = Target(url)
        model = await server.first_model()
        await warm_up(server, model, requests, way)
        console.print(f"{settings.num_prompts} requests alone", highlight=False)
        alone = await drive(server, model, requests, way)
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            batch = await _begin(http, model, lines)
            before = await _num_done(http, batch)
            console.print(f"the same beside {settings.num_lines:,} lines", highlight=False)
            beside = await drive(server, model, varied(requests, 1, vocab_size), way)
            after = await _num_done(http, batch)
            if after == settings.num_lines:
                why = "the batch ended before the requests did; give more lines"
                print(f"{PROGRAM}: {why}", file=sys.stderr)
            return alone, beside, after - before


async def _begin(http: httpx.AsyncClient, model: str, lines: Sequence[Request]) -> str:
    """Start a batch, and return its id when its first line was answered."""
    asked = [
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
    content = "".join(json.dumps(line) + "\n" for line in asked).encode()
    files, purpose = {"file": ("lines.jsonl", content)}, {"purpose": "batch"}
    file_id = _ok(await http.post("/v1/files", files=files, data=purpose))["id"]
    wanted = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = str(_ok(await http.post("/v1/batches", json=wanted))["id"])
    try:
        async with asyncio.timeout(_BEGIN_S):
            while not await _num_done(http, batch):
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        raise CannotMeasure(f"no line of the batch was answered in {_BEGIN_S:g} s") from None
    return batch


async def _num_done(http: httpx.AsyncClient, batch: str) -> int:
    return int(_ok(await http.get(f"/v1/batches/{batch}"))["request_counts"]["completed"])


def _ok(answer: httpx.Response) -> dict[str, dict[str, int]]:
    if answer.is_error:
        raise CannotMeasure(f"{answer.request.url}: {answer.text}")
    found: dict[str, dict[str, int]] = answer.json()
    return found


def _show(
    console: Console,
    settings: BesideSettings,
    alone: Measurement,
    beside: Measurement,
    num_done: int,
) -> dict[str, object]:
    name = settings.names[0]
    table = Table(title=f"{name}, milliseconds", title_justify="left")
    table.add_column("figure")
    for column in ("alone", "beside the batch", "ratio"):
        table.add_column(column, justify="right")
    columns = [each.summary(("ttft", "itl", "e2el"), (50, 99)) for each in (alone, beside)]
    for key in columns[0]:
        first, second = (column[key] for column in columns)
        table.add_row(key, f"{first:.1f}", f"{second:.1f}", f"{second / first:.2f}")
    console.print(table)
    rate = num_done * settings.output_len / beside.wall_s
    console.print(f"The batch: {num_done} lines, {rate:.0f} tokens a second", highlight=False)
    for found in (alone, beside):
        if wrong := found.token_errors:
            console.print(f"wrong tokens: {wrong}", highlight=False)
    return {
        "alone": columns[0],
        "beside": columns[1],
        "lines": num_done,
        "batch_output_throughput": rate,
    }

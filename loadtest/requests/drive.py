"""Sends requests to a server: when each one starts, and how many run at once."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import numpy as np

from penstock.loadtest.errors import CannotMeasure
from penstock.loadtest.requests.http_stream import Target, stream
from penstock.loadtest.requests.measurement import Measurement, Timeline
from penstock.loadtest.requests.workload import Request

Endpoint = Literal["/v1/completions", "/v1/chat/completions"]


@dataclass(frozen=True, slots=True)
class Way:
    """The way in which requests are sent.

    `burstiness` is the shape of the gamma distribution that the time between arrivals follows: 1
    makes it a Poisson process, less makes bursts.
    """

    endpoint: Endpoint = "/v1/completions"
    request_rate: float = float("inf")  # a second
    burstiness: float = 1.0
    max_concurrency: int | None = None
    ignore_eos: bool = True
    temperature: float = 0.0
    seed: int = 0


async def drive(server: Target, model: str, requests: Sequence[Request], way: Way) -> Measurement:
    """Send all requests, and wait for all. One that fails is counted, and stops no other."""
    gate = asyncio.Semaphore(way.max_concurrency) if way.max_concurrency else nullcontext()
    asked = [_asked(model, request, way) for request in requests]
    cpu_s, begin_s = time.process_time(), time.perf_counter()

    async def ask(one: dict[str, object], due_s: float) -> Timeline:
        if due_s:
            await asyncio.sleep(begin_s + due_s - time.perf_counter())
        async with gate:
            return await stream(server, way.endpoint, one)

    due = arrivals_s(len(requests), way)
    timelines = await asyncio.gather(
        *(ask(one, due_s) for one, due_s in zip(asked, due, strict=True))
    )
    wall_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - cpu_s
    return Measurement(timelines, wall_s, cpu_s)


async def warm_up(server: Target, model: str, requests: Sequence[Request], way: Way) -> Timeline:
    """Send one short request that shares nothing with the others.

    Raises CannotMeasure if it fails.
    """
    prompt = requests[0].prompt
    short = Request("Hello" if isinstance(prompt, str) else prompt[::-1][:16], 4)
    timeline = await stream(server, way.endpoint, _asked(model, short, way))
    if timeline.error:
        raise CannotMeasure(f"{server.base_url}: the first request failed: {timeline.error}")
    return timeline


def arrivals_s(count: int, way: Way) -> list[float]:
    """Return the arrival times, in seconds after the first one at zero.

    Over all of them the rate is the one that was asked for.
    """
    if way.request_rate == float("inf"):
        return [0.0] * count
    scale = 1 / (way.request_rate * way.burstiness)
    gaps = np.random.default_rng(way.seed).gamma(way.burstiness, scale, count - 1)
    due = np.concatenate([[0.0], np.cumsum(gaps)])
    if count > 1:
        due *= (count - 1) / way.request_rate / due[-1]
    return [float(each) for each in due]


def _asked(model: str, request: Request, way: Way) -> dict[str, object]:
    asked: dict[str, object] = {
        "model": model,
        "max_tokens": request.max_tokens,
        "temperature": way.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if way.endpoint == "/v1/completions":
        asked["prompt"] = request.prompt
    else:
        asked["messages"] = [{"role": "user", "content": _text(request.prompt)}]
    if request.schema is not None:
        form = {"name": "answer", "schema": request.schema, "strict": True}
        asked["response_format"] = {"type": "json_schema", "json_schema": form}
    elif way.ignore_eos:
        asked["ignore_eos"] = True
    return asked


def _text(prompt: list[int] | str) -> str:
    """Return the prompt as text; a chat takes no ids, so each id becomes a word."""
    return prompt if isinstance(prompt, str) else " ".join(f"w{each}" for each in prompt)

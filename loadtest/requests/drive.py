"""Sends requests to a server, each when it is due, and proves that no token was lost on the way."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import Protocol

from penstock.loadtest.errors import CannotMeasure
from penstock.loadtest.requests.measurement import Depth, Measurement, Timeline
from penstock.loadtest.requests.tokens import TokenErrors, against_counts, against_log
from penstock.loadtest.requests.way import Way, arrivals_s
from penstock.loadtest.requests.workload import Request
from penstock.schemas.event import Delta

_LOOK_S = 0.5  # between two looks at the queue
_LOGS_AT_ONCE = 16


class LoadedServer(Protocol):
    """A server under load, over HTTP or over Redis."""

    @property
    def base_url(self) -> str: ...

    async def first_model(self) -> str:
        """Return the name of a served model. Raises CannotMeasure where there is none."""

    async def ask(
        self, model: str, request: Request, way: Way, begin_s: float | None = None
    ) -> Timeline:
        """Send a request that was due at `begin_s`, or now, and read its answer to the end.

        A failure is not raised, but noted in the timeline's `error`.
        """

    async def log(self, job_id: str) -> list[Delta] | None:
        """Return what the server kept of an answer, or None where it keeps nothing.

        Raises CannotMeasure where it should have kept something and does not give it.
        """

    async def depth(self) -> Depth | None:
        """Return what waits and runs now, or None where the server does not tell."""


async def drive(
    server: LoadedServer, model: str, requests: Sequence[Request], way: Way
) -> Measurement:
    """Send all requests, and wait for all. One that fails is counted, and stops no other."""
    gate = asyncio.Semaphore(way.max_concurrency) if way.max_concurrency else nullcontext()
    due = _due_s(requests, way)
    async with _depths(server) as depths:
        cpu_s, begin_s = time.process_time(), time.perf_counter()

        async def ask(request: Request, due_s: float) -> Timeline:
            if due_s:
                await asyncio.sleep(begin_s + due_s - time.perf_counter())
            is_closed = way.is_closed and request.due_s is None
            async with gate:
                return await server.ask(model, request, way, None if is_closed else begin_s + due_s)

        timelines = await asyncio.gather(
            *(ask(request, due_s) for request, due_s in zip(requests, due, strict=True))
        )
        wall_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - cpu_s
    await _check_tokens(server, requests, timelines, way)
    return Measurement(timelines, wall_s, cpu_s, begin_s=begin_s, depths=depths)


def proved(measurement: Measurement) -> Measurement:
    """Return the measurement. Raises CannotMeasure where a token is wrong."""
    if wrong := measurement.token_errors:
        raise CannotMeasure(f"wrong tokens: {wrong}")
    return measurement


async def warm_up(
    server: LoadedServer, model: str, requests: Sequence[Request], way: Way
) -> Timeline:
    """Send one short request that shares nothing with the others.

    Raises CannotMeasure if it fails.
    """
    prompt = requests[0].prompt
    short = Request("Hello" if isinstance(prompt, str) else prompt[::-1][:16], 4)
    timeline = await server.ask(model, short, way)
    if timeline.error:
        raise CannotMeasure(f"{server.base_url}: the first request failed: {timeline.error}")
    return timeline


def _due_s(requests: Sequence[Request], way: Way) -> list[float]:
    """Return when each request is due: by its trace, or by the way."""
    due = arrivals_s(len(requests), way)
    return [
        at_s if request.due_s is None else request.due_s
        for request, at_s in zip(requests, due, strict=True)
    ]


@asynccontextmanager
async def _depths(server: LoadedServer) -> AsyncIterator[list[Depth]]:
    """Look at the server's queue again and again while the block runs."""
    depths: list[Depth] = []

    async def look() -> None:
        while (depth := await server.depth()) is not None:
            depths.append(depth)
            await asyncio.sleep(_LOOK_S)

    watch = asyncio.create_task(look())
    try:
        yield depths
    finally:
        watch.cancel()
        await asyncio.wait([watch])


async def _check_tokens(
    server: LoadedServer, requests: Sequence[Request], timelines: Sequence[Timeline], way: Way
) -> None:
    """Note in each timeline which of its tokens are wrong."""
    gate = asyncio.Semaphore(_LOGS_AT_ONCE)

    async def check(request: Request, timeline: Timeline) -> None:
        async with gate:
            timeline.token_errors = await _token_errors(server, request, timeline, way)

    await asyncio.gather(*map(check, requests, timelines))


async def _token_errors(
    server: LoadedServer, request: Request, timeline: Timeline, way: Way
) -> TokenErrors:
    is_exact = way.ignore_eos and request.schema is None and timeline.finish_reason != "stop"
    num_expected = request.max_tokens if is_exact and not timeline.error else None
    if timeline.error and not (timeline.job_id or timeline.tokens_s):
        return TokenErrors()  # refused, before there was a token to lose
    try:
        log = await server.log(timeline.job_id)
    except CannotMeasure:
        return TokenErrors(num_unproved=1)
    if log is not None:
        return against_log(timeline.pieces, log, num_expected or 0)
    if timeline.error:
        return TokenErrors(num_lost=max(1, request.max_tokens - len(timeline.tokens_s)))
    return against_counts(len(timeline.tokens_s), timeline.num_counted, num_expected)

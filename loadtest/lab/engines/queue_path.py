"""Measures the time and the CPU of the way through the queue, with an engine that costs nothing."""

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np

from penstock.compose.server import Server
from penstock.gateway.queue_client import QueueClient
from penstock.loadtest.engines.system import System, system
from penstock.loadtest.requests.drive import drive, proved
from penstock.loadtest.requests.measurement import Measurement, Timeline
from penstock.loadtest.requests.queue_stream import QueueTarget
from penstock.loadtest.requests.way import Way
from penstock.loadtest.requests.workload import Request
from penstock.schemas.event import Delta
from penstock.schemas.keys import Lane
from penstock.schemas.model import ModelCard, WorkerCard
from penstock.schemas.params.sampling import SamplingParams
from penstock.schemas.queue.registry import Registry
from penstock.schemas.queue.worker_queue import WorkerQueue
from penstock.schemas.redis.connection import connect
from penstock.schemas.redis.group_sync import Durability
from penstock.worker.engine.fake import Stamps, fake_engine
from penstock.worker.engine.io.messages import AddSequence

MODEL, BENCH = "fake", "bench"
FAKE = ("--model", "fake", "--load-format", "fake", "--max-num-seqs", "256")
STEP_MS = 20.0  # a step of 64 sequences of a small model on two cores
REPLICATES = {"repl-diskless-sync-delay": "0"}  # at once to the first replica
Figures = dict[str, float]


async def delivery(num_streams: int, num_tokens: int) -> Figures:
    """Measure from a step's end until a reader has the event, and the CPU of worker and reader."""
    with tempfile.NamedTemporaryFile() as file:
        stamps = Stamps(Path(file.name))
        flags = (*FAKE, "--fake-step-ms", str(STEP_MS), "--fake-stamps", file.name)
        async with system(*flags) as whole:
            worker, before_s = whole.workers[0], time.process_time()
            worker_before_s = worker.cpu_s("penstock.worker.jobs.service")
            client = whole.client
            arrivals = await asyncio.gather(
                *(_arrivals(client, number, num_tokens) for number in range(num_streams))
            )
            worker_s = worker.cpu_s("penstock.worker.jobs.service") - worker_before_s
            reader_s = time.process_time() - before_s
        delays_s = [
            at_s - stamp_s
            for number, stream in enumerate(arrivals)
            for at_s, stamp_s in zip(stream, stamps.row(number), strict=False)
        ]
    count = num_streams * num_tokens
    costs = {"worker_us": worker_s / count * 1e6, "reader_us": reader_s / count * 1e6}
    return _percentiles([late_s * 1e3 for late_s in delays_s]) | costs


async def _arrivals(client: QueueClient, number: int, num_tokens: int) -> list[float]:
    """Return the times at which the tokens of one stream came."""
    times_s: list[float] = []
    prompt = f"stream {number:03d}"
    job_id = await client.enqueue(prompt, max_tokens=num_tokens, ignore_eos=True)
    async with aclosing(client.event_batches(job_id)) as batches:
        async for batch in batches:
            now_s = time.monotonic()
            for event in batch:
                if isinstance(event, Delta):
                    times_s += [now_s] * len(event.token_ids)
    return times_s


async def sse(num_streams: int, num_tokens: int) -> Figures:
    """Measure the gateway's CPU for each token of streams over HTTP, which this process reads."""
    async with system(*FAKE, "--fake-step-ms", str(STEP_MS)) as whole:
        with whole.gateway() as (gateway, port):
            await _read_http(port, 2)  # the first request includes one-time set-up
            before_s = gateway.cpu_s()
            streams = [_read_http(port, num_tokens) for _ in range(num_streams)]
            await asyncio.gather(*streams)
            return {"us": (gateway.cpu_s() - before_s) / (num_streams * num_tokens) * 1e6}


async def _read_http(port: int, num_tokens: int) -> None:
    fields = {"model": "fake", "prompt": "x", "max_tokens": num_tokens, "stream": True}
    body = json.dumps(fields | {"ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
    tail = b""
    while b"[DONE]" not in tail:
        piece = await reader.read(1 << 16)
        if not piece:
            raise ConnectionError(f"a stream ended early: {tail.decode(errors='replace')}")
        tail = (tail + piece)[-64:]
    writer.close()


@asynccontextmanager
async def _lane(
    durability: Durability = "server",
) -> AsyncIterator[tuple[QueueClient, WorkerQueue]]:
    """Yield a client and the queue of a lane, whose one worker is this process.

    The worker's side has a connection of its own. Where answers wait for the disk, it is written
    through at once, also that of the one replica that is there for durability `replicas`.
    """
    options = {} if durability == "server" else {"appendfsync": "always"}
    with ExitStack() as servers:
        server = servers.enter_context(Server(options=options | REPLICATES))
        if durability == "replicas":
            replica = servers.enter_context(Server(options=options))
            async with connect(replica.url) as redis:
                await redis.call("REPLICAOF", "127.0.0.1", server.port)
                while b"master_link_status:up" not in str(await redis.call("INFO")).encode():
                    await asyncio.sleep(0.1)
        async with (
            QueueClient.from_url(server.url, durability=durability) as client,
            connect(server.url) as redis,
        ):
            await Registry(redis).register(ModelCard(name=MODEL))
            queue = WorkerQueue(redis, Lane(MODEL))
            await queue.register(BENCH, WorkerCard())
            yield client, queue


async def enqueue(num_at_once: int, num_rounds: int) -> Figures:
    """Measure from a submission until a worker has read it, with many at once."""
    took_ms: list[float] = []
    async with _lane() as (client, queue):
        for _ in range(num_rounds):
            begun_s, read_s = dict[str, float](), dict[str, float]()

            async def submit(begun_s: dict[str, float] = begun_s) -> None:
                at_s = time.monotonic()
                begun_s[await client.enqueue("x", max_tokens=1, background=True)] = at_s

            async def read(read_s: dict[str, float] = read_s) -> None:
                while len(read_s) < num_at_once:
                    await queue.news(1000)
                    for entry in await queue.read(BENCH, 64) or []:
                        read_s[entry.job_id] = time.monotonic()

            reader = asyncio.create_task(read())
            await asyncio.sleep(0.01)  # by now the reader waits
            await asyncio.gather(reader, *(submit() for _ in range(num_at_once)))
            took_ms += [(read_s[job_id] - at_s) * 1e3 for job_id, at_s in begun_s.items()]
    return _percentiles(took_ms)


async def submissions(
    num_jobs: int, num_at_once: int, durability: Durability = "server"
) -> Figures:
    """Measure how many jobs a second one process submits without HTTP, and what each takes."""
    took_ms: list[float] = []
    async with _lane(durability) as (client, _):
        client.max_queued = num_jobs + 1
        numbers = iter(range(num_jobs))
        await client.enqueue("the first", max_tokens=1, background=True)

        async def submit() -> None:
            for number in numbers:
                at_s = time.monotonic()
                await client.enqueue(f"job {number}", max_tokens=1, background=True)
                took_ms.append((time.monotonic() - at_s) * 1e3)

        begin_s = time.monotonic()
        await asyncio.gather(*(submit() for _ in range(num_at_once)))
        per_s = num_jobs / (time.monotonic() - begin_s)
    return {"jobs_per_s": per_s} | _percentiles(took_ms)


async def crash(num_tokens: int) -> Figures:
    """Measure the longest pause of a stream whose worker is killed in its middle."""
    flags = (*FAKE, "--fake-step-ms", str(STEP_MS))
    async with system(*flags, num_workers=2) as whole:
        client = whole.client
        job_id = await client.enqueue("x", max_tokens=num_tokens, ignore_eos=True)
        times_s: list[float] = []
        async with aclosing(client.stream(job_id)) as events:
            async for _ in events:
                times_s.append(time.monotonic())
                if len(times_s) == num_tokens // 2:
                    owner = (await client.status(job_id)).worker
                    await _kill(whole, owner)
    return {"pause_s": max(after - before for before, after in pairwise(times_s))}


async def _kill(whole: System, owner: str | None) -> None:
    for queue in await whole.client.queues():
        for worker in await queue.workers():
            if worker.worker == owner:
                next(part for part in whole.workers if part.pid == worker.card.pid).kill()


async def through(requests: Sequence[Request], *flags: str) -> Measurement:
    """Run all requests at once through a queue of their own, read by this process."""
    async with system(*flags) as whole:
        server = QueueTarget(whole.client, whole.server.url)
        model = await server.first_model()
        warm = [Request(request.prompt, 4) for request in requests]
        await drive(server, model, warm, Way())
        return proved(await drive(server, model, requests, Way()))


def in_process(requests: Sequence[Request]) -> Measurement:
    """Run the requests on the fake engine in this process."""
    engine = fake_engine(None, len(requests), 16, STEP_MS / 1e3)
    begin_s = time.perf_counter()
    timelines = {str(number): Timeline(begin_s, 1) for number in range(len(requests))}
    for number, request in enumerate(requests):
        params = SamplingParams(max_tokens=request.max_tokens, ignore_eos=True)
        engine.add(AddSequence(str(number), request.ids, params))
    while engine.busy:
        for output in engine.step():
            timelines[output.seq_id].tokens_s.append(time.perf_counter())
    return Measurement([*timelines.values()], time.perf_counter() - begin_s)


def _percentiles(took_ms: Sequence[float]) -> Figures:
    low, high = np.percentile(took_ms, [50, 99])
    return {"p50_ms": float(low), "p99_ms": float(high)}

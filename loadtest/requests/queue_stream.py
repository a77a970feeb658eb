"""Reads answers straight from Redis with the SDK, as a backend service does, without HTTP."""

import secrets
import time
from contextlib import aclosing
from dataclasses import dataclass

from penstock.gateway.queue_client import QueueClient
from penstock.loadtest.errors import CannotMeasure
from penstock.loadtest.requests.measurement import Depth, Timeline
from penstock.loadtest.requests.tokens import SeenPiece
from penstock.loadtest.requests.way import Way
from penstock.loadtest.requests.workload import Request, as_text
from penstock.schemas.cursor import Had
from penstock.schemas.errors import PenstockError
from penstock.schemas.event import Delta, Done
from penstock.schemas.job import Message
from penstock.schemas.params.sampling import SamplingParams, StructuredOutputs
from penstock.schemas.wire.checksum import EMPTY, roll


@dataclass(frozen=True, slots=True)
class QueueTarget:
    """The queue of a Redis server. It serves every model that has a worker there."""

    client: QueueClient
    base_url: str

    async def first_model(self) -> str:
        try:
            models = await self.client.models()
        except PenstockError as error:
            raise CannotMeasure(f"{self.base_url}: {error}") from error
        if not models:
            raise CannotMeasure(f"{self.base_url}: no model is served")
        return next(iter(models))

    async def ask(
        self, model: str, request: Request, way: Way, begin_s: float | None = None
    ) -> Timeline:
        now_s = time.perf_counter()
        timeline = Timeline(now_s if begin_s is None else begin_s, 0, sent_s=now_s, num_counted=0)
        timeline.trace_id = secrets.token_hex(16)
        try:
            await self._follow(model, request, way, timeline)
        except PenstockError as error:
            timeline.error = str(error)
        timeline.end_s = time.perf_counter()
        return timeline

    async def _follow(self, model: str, request: Request, way: Way, timeline: Timeline) -> None:
        is_chat = way.endpoint == "/v1/chat/completions"
        chat = [Message(role="user", content=as_text(request.prompt))] if is_chat else None
        timeline.job_id = await self.client.enqueue(
            None if is_chat else request.prompt,
            messages=chat,
            model=model,
            params=_params(request, way),
            traceparent=f"00-{timeline.trace_id}-{secrets.token_hex(8)}-01",
        )
        position, checksum = 0, EMPTY  # counted here, whatever the events say of themselves
        async with aclosing(self.client.event_batches(timeline.job_id)) as batches:
            async for batch in batches:
                now_s = time.perf_counter()
                for event in batch:
                    if isinstance(event, Delta):
                        position += len(event.token_ids)
                        checksum = roll(checksum, event.index, event.token_ids)
                        timeline.pieces.append(SeenPiece(Had(position, checksum).id, event.text))
                        timeline.tokens_s += [now_s] * len(event.token_ids)
                        timeline.finish_reason = event.finish_reason or timeline.finish_reason
                    elif isinstance(event, Done):
                        timeline.num_prompt = event.usage.prompt_tokens
                        timeline.num_counted = event.usage.completion_tokens
                    else:
                        timeline.error = event.error.message

    async def log(self, job_id: str) -> list[Delta] | None:
        try:
            async with aclosing(self.client.stream(job_id)) as events:
                return [event async for event in events if isinstance(event, Delta)]
        except PenstockError as error:
            raise CannotMeasure(f"the log of {job_id} cannot be read: {error}") from error

    async def depth(self) -> Depth | None:
        try:
            counts = [await queue.counts() for queue in await self.client.queues()]
        except PenstockError:
            return None
        waiting = sum(queue_counts.num_queued for queue_counts in counts)
        return Depth(
            time.perf_counter(), waiting, sum(queue_counts.num_running for queue_counts in counts)
        )


def _params(request: Request, way: Way) -> SamplingParams:
    schema = request.schema
    return SamplingParams(
        max_tokens=request.max_tokens,
        temperature=way.temperature,
        ignore_eos=way.ignore_eos and schema is None,
        structured_outputs=None if schema is None else StructuredOutputs(json_schema=schema),
    )

"""The client that the gateway, commands and chores share: jobs of all lanes, and what they need.

Applications see its calls for callers alone, as `Client` and `SyncClient`.
"""

import asyncio
import contextlib
import copy
import hashlib
import heapq
import inspect
import itertools
import re
import secrets
from collections.abc import AsyncGenerator, Mapping
from types import TracebackType
from typing import Literal, Self, get_args

from pydantic import JsonValue, ValidationError

from penstock.gateway.follow.lanes import Lanes
from penstock.gateway.follow.large_texts import LARGE_BYTES, Texts, text_of
from penstock.gateway.follow.pages import LogPages, Read
from penstock.gateway.follow.patience import Patience
from penstock.gateway.follow.reader import Reader
from penstock.gateway.follow.subscription import MAX_UNREAD, SILENCE_S, Subscription
from penstock.gateway.off_loop import OffLoop
from penstock.schemas.account import Account
from penstock.schemas.cursor import Cursor, Had, Missed, Straddled
from penstock.schemas.delivery import JobStatus, Rates, Submission
from penstock.schemas.errors import InvalidJob, JobNotFound, QueueUnreachable, StreamDiverged
from penstock.schemas.event import Delta, EndState, Event, Result
from penstock.schemas.job import DEFAULT_TENANT, Chat, Job, Message, PriorityClass, Prompt
from penstock.schemas.model import ModelCard
from penstock.schemas.params.pooling import PoolingParams
from penstock.schemas.params.sampling import SamplingParams
from penstock.schemas.params.text import TextParams
from penstock.schemas.process.loop_turns import LoopTurns
from penstock.schemas.process.setting_names import did_you_mean, nearest
from penstock.schemas.process.trace_context import current_traceparent
from penstock.schemas.queue.queue import ON_DISK, Queue
from penstock.schemas.queue.refusal import refusal
from penstock.schemas.redis.connection import connect
from penstock.schemas.redis.group_sync import Durability, Mark, sync_for
from penstock.schemas.redis.servers import Redis

PATIENCE_S = 30.0  # how long a stream waits for Redis to come back
RETRY_S = 0.25
IDEMPOTENCY_KEY = re.compile(r"[\x20-\x7e]{1,255}")
REMEMBER_S = 86_400  # how long an idempotency key is remembered, even past its job's result
END_STATES = frozenset(get_args(EndState))
EventBatches = AsyncGenerator[list[Event], None]
PIECE = 64  # events of a page that a reader gets in one turn of the loop


class QueueClient:
    """Submits jobs, reads their answers and cancels them.

    A process needs one client; any number of tasks may share it.
    """

    def __init__(
        self,
        redis: Redis,
        tenant: str = DEFAULT_TENANT,
        max_queued: int = 10_000,
        result_ttl_s: int = 3600,
        silence_s: float = SILENCE_S,
        max_unread: int = MAX_UNREAD,
        durability: Durability = "server",
        max_queued_tokens: int | None = None,
        texts: Texts | None = None,
    ) -> None:
        """Make a client.

        With durability `fsync` all that it returns is on the server's disk, with `replicas` on that
        of a replica too. `texts` are the gateways', where it is to read large ones.
        """
        self.redis = redis
        self.tenant = tenant
        self.max_queued = max_queued
        self.max_queued_tokens = max_queued_tokens
        self.result_ttl_s = result_ttl_s
        self.name = secrets.token_hex(8)
        self._lanes = Lanes(redis)
        self._subscription = Subscription(redis, silence_s, max_unread)
        self._disk = sync_for(redis, durability)
        self._patience = Patience(PATIENCE_S)
        self._turns = LoopTurns()
        self._pages = LogPages(self._disk, self._patience, self._turns)
        self.off_loop = OffLoop()
        self.texts = texts
        self.num_replayed = 0  # events that readers got from a log, not live

    @classmethod
    def from_url(
        cls,
        url: str,
        tenant: str = DEFAULT_TENANT,
        max_queued: int = 10_000,
        durability: Durability = "server",
        max_queued_tokens: int | None = None,
        texts: Texts | None = None,
    ) -> Self:
        return cls(
            connect(url),
            tenant,
            max_queued,
            durability=durability,
            max_queued_tokens=max_queued_tokens,
            texts=texts,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._subscription.aclose()
        self._disk.close()
        await self.redis.aclose()

    async def enqueue(
        self,
        /,
        prompt: str | list[int] | list[str] | list[list[int]] | None = None,
        *,
        messages: list[Message] | None = None,
        model: str | None = None,
        params: SamplingParams | None = None,
        idempotency_key: str | None = None,
        background: bool = False,
        timeout_ms: int | None = None,
        priority_class: PriorityClass = "normal",
        priority: int = 0,
        tools: list[dict[str, JsonValue]] | None = None,
        cache_salt: str | None = None,
        prompt_cache_key: str | None = None,
        metadata: dict[str, str] | None = None,
        traceparent: str | None = None,
        tenant: str | None = None,
        queue_timeout_ms: int | None = None,
        not_before_ms: int | None = None,
        delay_ms: int | None = None,
        over_limit: Literal["refuse", "wait"] = "refuse",
        account: Account | None = None,
        pooling: PoolingParams | None = None,
        text: TextParams | None = None,
        return_token_ids: bool = False,
        stream_interval: int = 1,
        keep_request: bool = False,
        **sampling: JsonValue,
    ) -> str:
        """Submit a job with a `prompt` or `messages`, and return its id.

        With `pooling` each prompt gets a vector: `numbers` of the result's choices. With `text` the
        model's tokenizer answers: `prompt_ids` of the choices, or their `text`. Jobs with the same
        `prompt_cache_key`, and the turns of a conversation, go to one worker where it has room.
        Of an account's jobs of a class those of the lowest `priority` go first. With `keep_request`
        what was asked is kept as long as the result, so that the job can be replayed.

        `model` may be left out where only one model is served. Sampling parameters are given as
        `params`, or as keyword arguments named like its fields. A second call with the same
        idempotency key returns the same job and never makes a second one. Without a `traceparent`
        the job goes on in the span that the program has open by OpenTelemetry, if any.
        Raises InvalidJob, ModelNotFound, IdempotencyMismatch, and the errors that
        `schemas.queue.refusal` makes.
        """
        tenant = tenant or self.tenant
        model = model or await self.only_model()
        try:
            sampling_params = (
                SamplingParams.model_validate(sampling) if sampling else SamplingParams()
            )
            chat = Chat(messages=messages, tools=tools or []) if messages is not None else None
            job = Job(
                job_id="",
                model=model,
                priority=priority,
                prompts=_prompts(prompt),
                chat=chat,
                params=params or sampling_params,
                tenant=tenant,
                priority_class="text" if text is not None else priority_class,
                background=background,
                timeout_ms=timeout_ms,
                queue_timeout_ms=queue_timeout_ms,
                not_before_ms=not_before_ms,
                delay_ms=delay_ms,
                over_limit=over_limit,
                cache_salt=cache_salt,
                prompt_cache_key=prompt_cache_key,
                metadata=metadata or {},
                pooling=pooling,
                text=text,
                return_token_ids=return_token_ids,
                stream_interval=stream_interval,
                traceparent=current_traceparent() if traceparent is None else traceparent,
            )
        except ValidationError as error:
            raise _invalid(error) from None
        if params is not None and sampling:
            raise InvalidJob(f"params: given twice, also as {', '.join(sampling)}", "params")
        remember_s = 0 if idempotency_key is None else REMEMBER_S
        job_id = await self.name_job(model, idempotency_key, tenant, account, job.affinity)
        job = job.model_copy(update={"job_id": job_id})
        kept_s = self.result_ttl_s if keep_request else None
        await self.submit(job, account, remember_s=remember_s, kept_s=kept_s)
        return job_id

    async def name_job(
        self,
        model: str,
        idempotency_key: str | None = None,
        tenant: str | None = None,
        account: Account | None = None,
        affinity: str | None = None,
    ) -> str:
        """Return an id for a new job, which also names one of the model's lanes.

        The same idempotency key gives the same id. Without a key the lane is one of those that the
        account uses: the same for the same `Job.affinity`, or else drawn.
        Raises ModelNotFound, InvalidJob.
        """
        if idempotency_key is not None:
            check_idempotency_key(idempotency_key)
        card = await self._lanes.model(model)
        if idempotency_key is None:
            lanes = account.limits.num_lanes(card.lanes) if account else card.lanes
            number = secrets.randbelow(lanes) if affinity is None else _one_of(lanes, affinity)
            return card.lane(number).new_job_id()
        lane = card.lane(_one_of(card.lanes, idempotency_key))
        return lane.idempotent_job_id(tenant or self.tenant, idempotency_key)

    async def submit(
        self,
        job: Job,
        account: Account | None = None,
        note: str | None = None,
        remember_s: int = 0,
        kept_s: int | None = None,
        is_shared: bool = False,
    ) -> Submission:
        """Submit a job whose id `name_job` made. Submitting it again makes no second job.

        With `is_shared` an equal job of the tenant that has not ended is joined: the answer has its
        id, and that one is to be followed.

        The job counts for the account, under its quota. Without an account it counts for its
        tenant, without limits. `note` is handed to housekeeping when the job ends
        (`gateway.tasks.outbox`). The id is remembered for at least `remember_s` seconds, even
        after its result is gone. With `kept_s` the job itself is kept with its result, so long.
        """
        queue = await self._lanes.queue(job.job_id)
        max_model_len = self._lanes.max_model_len(job.model)
        job.refuse_large_answer(max_model_len)
        if job.params.truncate_prompt_tokens is None:  # else it is the worker that knows
            job.refuse_large_scores(prompt for prompt in job.prompts if not isinstance(prompt, str))
            job.refuse_long_ids(max_model_len)
        reply_to = None
        if not job.background:
            reply_to = queue.lane.inbox(self.name)
            await self._subscription.subscribe(reply_to)
        dump = await self.off_loop.run(job.tenant, job.guess_bytes(), job.dump_and_digest)
        mark = await self._disk.begin(queue.lane.prefix)
        await self._disk.prove(mark)  # else refused jobs would run, and each be submitted again
        answer = await queue.enqueue(
            job,
            reply_to,
            dump=dump,
            max_queued=self.max_queued,
            max_queued_tokens=self.max_queued_tokens,
            result_ttl_s=self.result_ttl_s if kept_s is None else kept_s,
            keeps_request=kept_s is not None,
            account=self._lanes.share(queue.lane, account),
            note=note,
            remember_s=remember_s,
            is_shared=is_shared,
        )
        if error := refusal(answer, job, account.limits if account else None):
            raise error
        await self._disk.wait(mark)
        return answer

    async def stream(
        self, job_id: str, starting_after: int | str = 0, tenant: str | None = None
    ) -> AsyncGenerator[Event, None]:
        """Yield every event after a cursor, once and in order, up to the one end event.

        `starting_after` is the `id` of the last event that the reader has, or the number of tokens
        that it has. An id is checked against the log: StreamDiverged is raised if the log is not
        the one that the reader knows. A number is believed. If it lies inside an event, the
        event's remaining tokens come with its whole text, because text belongs to an event's last
        token. A job may have any number of readers, at any time and in any process. A lost
        connection shows as a pause. A foreground job that nobody reads any more is cancelled after
        a grace period.
        Raises InvalidJob, JobNotFound, JobGone, QueueUnreachable, StreamDiverged.
        """
        async with contextlib.aclosing(
            self.event_batches(job_id, starting_after, tenant)
        ) as batches:
            async for batch in batches:
                for event in batch:
                    yield event

    async def event_batches(
        self, job_id: str, starting_after: int | str = 0, tenant: str | None = None
    ) -> EventBatches:
        """Yield the events of `stream` in lists: all that wait come together."""
        progress = Had.parse(f"{starting_after}", "starting_after")
        tenant, queue = tenant or self.tenant, await self._lanes.queue(job_id)
        channel, is_ended, is_behind = queue.lane.inbox(self.name), False, False
        cursor = Cursor(job_id, *progress)
        try:
            with self._subscription.reader(job_id) as reader:
                while not is_ended:
                    page, mark = await self._attach(
                        queue, tenant, channel, cursor, reader, is_behind
                    )
                    is_behind = page.more
                    snapshot = _snapshot(cursor, mark)
                    # One of many that are read, or large: not of a stream that begins.
                    is_much = page.state in END_STATES or len(page.events) > PIECE
                    if is_much or self._subscription.is_crowded(job_id):
                        await self._turns.turn(tenant)
                    batch, is_whole = _logged(cursor, page.events)
                    self.num_replayed += len(batch)
                    while True:
                        if batch and not await self._is_kept(mark):
                            cursor = snapshot
                            break
                        is_ended = bool(batch) and not isinstance(batch[-1], Delta)
                        for at in range(0, len(batch), PIECE):
                            if at:
                                await self._turns.turn(tenant)
                            yield batch[at : at + PIECE]
                        if page.more or not is_whole or is_ended:
                            break
                        if self._subscription.is_crowded(job_id):
                            await reader.wait()
                            await self._turns.turn(tenant)
                        if not (live := await reader.take()):
                            break
                        snapshot = _snapshot(cursor, mark)
                        batch, is_whole = _published(cursor, live)
        finally:
            if not is_ended and not self._subscription.is_read(job_id):
                with contextlib.suppress(QueueUnreachable):
                    await queue.detach(job_id, channel)

    async def result(
        self, job_id: str, wait: bool = True, tenant: str | None = None
    ) -> Result | None:
        """Return the whole answer. None means that it is not there yet and `wait` is false."""
        tenant, queue = tenant or self.tenant, await self._lanes.queue(job_id)
        mark = await self._disk.begin(queue.lane.prefix)
        result = await queue.result(tenant, job_id)
        while result is None and wait:
            try:
                async with contextlib.aclosing(self.stream(job_id, 0, tenant)) as events:
                    async for _ in events:
                        pass
            except StreamDiverged:  # nobody was shown what the log lost
                await asyncio.sleep(RETRY_S)
            mark = await self._disk.begin(queue.lane.prefix)
            result = await queue.result(tenant, job_id)
        await self._disk.wait(mark)
        return result

    async def cancel(self, job_id: str, tenant: str | None = None) -> JobStatus:
        """Ask for a job to be cancelled. Its readers then get Failed(state="cancelled")."""
        queue = await self._lanes.queue(job_id)
        mark = await self._disk.begin(queue.lane.prefix)
        status = await queue.cancel(tenant or self.tenant, job_id)
        await self._disk.wait(mark)
        return status

    async def status(self, job_id: str, tenant: str | None = None) -> JobStatus:
        """Return the present status of a job."""
        queue = await self._lanes.queue(job_id)
        mark = await self._disk.begin(queue.lane.prefix)
        status = await queue.status(tenant or self.tenant, job_id)
        if status.ended_ms is not None:  # an end is shown once it cannot be taken back
            await self._disk.wait(mark)
        return status

    async def request(self, job_id: str, tenant: str | None = None) -> Job:
        """Return a job as it was submitted, where it is kept.

        Raises JobNotFound, JobGone, and TextElsewhere where this client has not the texts.
        """
        tenant, queue = tenant or self.tenant, await self._lanes.queue(job_id)
        text = await queue.request(tenant, job_id)
        if text == ON_DISK:
            text = await text_of(self.texts, job_id)
        return await self.off_loop.run(tenant, len(text), Job.model_validate_json, text)

    async def move_request(self, job_id: str, tenant: str) -> None:
        """Move what an ended job asked to disk, if it is large. It may be repeated.

        Raises JobNotFound, JobGone.
        """
        assert self.texts is not None
        queue = await self._lanes.queue(job_id)
        text = await queue.request(tenant, job_id)
        if text == ON_DISK or len(text) <= LARGE_BYTES:
            return
        await self.texts.put(job_id, text)
        if not await queue.note_on_disk(tenant, job_id):  # it was deleted meanwhile
            await self.texts.delete(job_id)

    async def annotate(
        self, job_id: str, metadata: Mapping[str, str], tenant: str | None = None
    ) -> None:
        """Give a job that is kept other metadata. Raises JobNotFound, JobGone."""
        queue = await self._lanes.queue(job_id)
        mark = await self._disk.begin(queue.lane.prefix)
        await queue.annotate(tenant or self.tenant, job_id, metadata)
        await self._disk.wait(mark)

    async def recent(self, most: int = 20, tenant: str | None = None) -> list[JobStatus]:
        """Return the jobs that something befell last, the latest first.

        Of each lane no more than the last hundred of a day are known.
        """
        tenant = tenant or self.tenant
        lanes = await asyncio.gather(*[queue.recent(tenant, most) for queue in await self.queues()])
        latest = heapq.nlargest(most, itertools.chain(*lanes))
        statuses = await asyncio.gather(
            *[self.status(job_id, tenant) for _, job_id in latest], return_exceptions=True
        )
        for status in statuses:
            if isinstance(status, BaseException) and not isinstance(status, JobNotFound):
                raise status
        return [status for status in statuses if isinstance(status, JobStatus)]

    async def rates(self, job_id: str, account: Account) -> Rates:
        """Return what the account has left of its limits for this minute.

        It is an estimate: the rest in the job's lane, times the number of lanes the account uses.
        """
        queue = await self._lanes.queue(job_id)
        rates = await queue.rates(account.name)
        lanes = account.limits.num_lanes(self._lanes.number(queue.lane.model))
        return Rates(
            rates.requests_left and rates.requests_left * lanes,
            rates.tokens_left and rates.tokens_left * lanes,
            rates.reset_ms,
        )

    async def owner(self, job_id: str) -> str | None:
        """Return the tenant of a job, or None if the job is not known.

        It checks no permission: the caller of this method must know that it may ask.
        """
        try:
            return await (await self._lanes.queue(job_id)).owner(job_id)
        except JobNotFound:
            return None

    async def delete(self, job_id: str, tenant: str | None = None) -> None:
        """Erase a job's prompt, log and result. A running job is cancelled first."""
        queue = await self._lanes.queue(job_id)
        mark = await self._disk.begin(queue.lane.prefix)
        is_on_disk = await queue.delete(tenant or self.tenant, job_id)
        await self._disk.wait(mark)
        if is_on_disk and self.texts is not None:  # else it is swept where it is
            await self.texts.delete(job_id)

    async def only_model(self) -> str:
        """Return the one model that is served. Raises InvalidJob unless there is one."""
        return await self._lanes.only_model()

    async def model_of(self, job_id: str) -> str:
        """Return the model that a job's id names. Raises JobNotFound."""
        return (await self._lanes.queue(job_id)).lane.model

    async def models(self) -> dict[str, ModelCard]:
        """Return the served models' cards by name."""
        return await self._lanes.models()

    async def queues(self) -> list[Queue]:
        """Return the queue of every lane of every model, to read their counts and workers."""
        return await self._lanes.queues()

    async def _attach(
        self,
        queue: Queue,
        tenant: str,
        channel: str,
        cursor: Cursor,
        reader: Reader,
        is_behind: bool,
    ) -> Read:
        """Return the log after the cursor. What is published from now on goes to the reader.

        The mark that comes with it is what `_is_kept` waits for. Redis may be away for
        `PATIENCE_S`; then this raises QueueUnreachable.
        """
        async with self._patience.bounded():
            while True:
                try:
                    with self._patience.noted():
                        await self._subscription.subscribe(channel)
                    return await self._pages.read(
                        queue, tenant, cursor.job_id, cursor.looks_from, channel, reader, is_behind
                    )
                except QueueUnreachable:
                    await asyncio.sleep(RETRY_S)

    async def _is_kept(self, mark: Mark | None) -> bool:
        """Wait for the mark and return whether all that was read since then is on disk.

        False means that a restarted server may have lost it, so the log must be read again.
        """
        try:
            await self._disk.wait(mark)
        except QueueUnreachable:
            return False
        return True


def check_idempotency_key(key: str) -> None:
    """Raise InvalidJob for what is no idempotency key."""
    if not IDEMPOTENCY_KEY.fullmatch(key):
        sentence = "must be 1 to 255 printable characters of ASCII"
        raise InvalidJob(f"Idempotency-Key: {sentence}", "Idempotency-Key")


def _snapshot(cursor: Cursor, mark: Mark | None) -> Cursor:
    """Return a copy of the cursor to go back to if the mark is not reached.

    Without a mark nothing is ever taken back, so the cursor itself is returned.
    """
    return cursor if mark is None else copy.copy(cursor)


def _prompts(prompt: str | list[int] | list[str] | list[list[int]] | None) -> list[Prompt]:
    """Return a list of prompts, made of one text, one list of ids, or a list of either."""
    if prompt is None:
        return []
    if isinstance(prompt, str):
        return [prompt]
    ids = [item for item in prompt if isinstance(item, int)]
    return [ids] if ids or not prompt else [item for item in prompt if not isinstance(item, int)]


def _logged(cursor: Cursor, events: list[Event]) -> tuple[list[Event], bool]:
    """Return what in these events of the log continues the cursor.

    The bool is False if the log must be read again.
    """
    batch: list[Event] = []
    return batch, _take(cursor, events, batch)


def _published(cursor: Cursor, events: list[Event]) -> tuple[list[Event], bool]:
    """Return what in these published events continues the cursor.

    The bool is False if messages were missed, or the log must be read again. The log has them.
    """
    batch: list[Event] = []
    try:
        return batch, _take(cursor, events, batch)
    except Missed:
        return batch, False


def _take(cursor: Cursor, events: list[Event], batch: list[Event]) -> bool:
    try:
        for event in events:
            if (rest := cursor.take(event)) is not None:
                batch.append(rest)
    except Straddled:
        cursor.begin_again()
        return False
    return True


def _one_of(count: int, text: str) -> int:
    """Return a number below `count` that follows from the text."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest) % count


def _invalid(error: ValidationError) -> InvalidJob:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        names = {*inspect.signature(QueueClient.enqueue).parameters, *SamplingParams.model_fields}
        guess = did_you_mean(nearest(field, names - {"self", "sampling"}))
        return InvalidJob(f"{field}: no job has it{guess or '; leave it out'}", field)
    return InvalidJob(f"{field}: {first['msg']}" if field else first["msg"], field or None)

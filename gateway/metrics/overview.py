"""Tell what runs at present, as the status page shows it: models, workers, latencies."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Generic, TypeVar

from penstock.gateway.auth.access import Caller
from penstock.gateway.files.storage_accounts import StorageAccounts
from penstock.gateway.metrics.lane_metrics import (
    LaneReport,
    engines,
    is_moving,
    model_stats,
    tallied,
    workers_of_models,
)
from penstock.gateway.queue_client import QueueClient
from penstock.gateway.tasks.signature import HousekeepingSignature
from penstock.schemas.api.openai import JsonObject
from penstock.schemas.delivery import WorkerStatus
from penstock.schemas.metrics import names
from penstock.schemas.model import ModelCard

T = TypeVar("T")

FRESH_S = 0.9  # all who look share one look at Redis
NUM_JOBS = 20
NUM_ACCOUNTS = 50  # accounts of each lane
MOST_TENANTS = 64  # tenants whose jobs are remembered
SUM_FIELDS = (
    "num_queued",
    "num_running",
    "num_ended",
    "num_delayed",
    "num_queued_tokens",
    "num_dead_letters",
)
STATS = (
    "num_running",
    "num_waiting",
    "num_preemptions",
    "prompt_tokens",
    "cached_tokens",
    "generation_tokens",
    "num_blocks",
    "num_held_blocks",
    "num_cached_blocks",
    "unmoved_s",
)


class _Shared(Generic[T]):
    """Something that is looked up at most once in `FRESH_S`, however many ask."""

    def __init__(self, look: Callable[[], Awaitable[T]]) -> None:
        self._look = look
        self._lock = asyncio.Lock()
        self._latest: tuple[float, T] | None = None

    async def now(self) -> T:
        async with self._lock:
            if self._latest is None or time.monotonic() - self._latest[0] > FRESH_S:
                value = await self._look()
                self._latest = time.monotonic(), value
        return self._latest[1]


class Overview:
    """Tells a caller what runs, and how its own jobs stand."""

    def __init__(self, client: QueueClient, version: str) -> None:
        self._client = client
        self._version = version
        self._state = _Shared(self._look)
        self._accounts = _Shared(self._look_at_accounts)
        self._storage = _Shared(self._look_at_storage)
        self._num_workers = _Shared(partial(num_workers, client))
        self._jobs: dict[str, _Shared[list[JsonObject]]] = {}

    async def now(self, caller: Caller) -> JsonObject:
        """Return what runs, with the caller's own accounts, storage and jobs.

        Counters grow since the start of whoever counts, so that who looks twice knows the rates.
        Latencies are those that the living workers counted. An operator sees accounts and storage
        of all tenants. Raises QueueUnreachable.
        """
        accounts = await self._accounts.now()
        if not caller.is_operator:
            accounts = await self.accounts(caller.tenant)
        storage = await self._storage.now()
        if not caller.is_operator:
            storage = [use for use in storage if use["tenant"] == caller.tenant]
        jobs = await self._recent(caller.tenant) if caller.may("jobs") else []
        own: JsonObject = {"accounts": [*accounts], "storage": [*storage], "jobs": [*jobs]}
        return {**await self._state.now(), **own}

    async def accounts(self, tenant: str) -> list[JsonObject]:
        """Return what the tenant's accounts have and used of each model."""
        return [account for account in await self._accounts.now() if account["tenant"] == tenant]

    async def num_workers(self) -> Mapping[str, int]:
        """Return how many workers of each model live. Raises QueueUnreachable."""
        return await self._num_workers.now()

    async def _look(self) -> JsonObject:
        lanes = await look(self._client)
        return {
            "version": self._version,
            "now_ms": int(time.time() * 1000),
            "has_housekeeping": await HousekeepingSignature(self._client.redis).is_there(),
            "models": [*models(lanes)],
            "workers": [*workers(lanes)],
            "latencies": latencies(lanes),
        }

    async def _look_at_accounts(self) -> list[JsonObject]:
        """Return what each account has and used of each model, over the model's lanes."""
        queues = await self._client.queues()
        lanes = await asyncio.gather(*[queue.accounts(NUM_ACCOUNTS) for queue in queues])
        whole: dict[tuple[str, str], JsonObject] = {}
        for queue, accounts in zip(queues, lanes, strict=True):
            for account in accounts:
                key = queue.lane.model, account.name
                fields = {"model": queue.lane.model, **account.model_dump(exclude={"limits"})}
                fields |= account.limits.model_dump(exclude_none=True)
                whole[key] = _added(whole[key], fields) if key in whole else fields
        return [*whole.values()]

    async def _look_at_storage(self) -> list[JsonObject]:
        """Return what each tenant has stored, the most first."""
        return [use.shape() for use in await StorageAccounts(self._client.redis).all()]

    async def _recent(self, tenant: str) -> list[JsonObject]:
        if tenant not in self._jobs and len(self._jobs) >= MOST_TENANTS:
            self._jobs.clear()
        jobs = self._jobs.setdefault(tenant, _Shared(partial(self._look_at_jobs, tenant)))
        return await jobs.now()

    async def _look_at_jobs(self, tenant: str) -> list[JsonObject]:
        jobs = await self._client.recent(NUM_JOBS, tenant)
        return [job.model_dump(mode="json", exclude_none=True) for job in jobs]


async def look(client: QueueClient) -> list[LaneReport]:
    """Return the state of every lane of every model."""
    cards = await client.models()
    return [
        LaneReport(
            queue.lane.model,
            str(queue.lane.number),
            await queue.counts(),
            await queue.workers(),
            cards.get(queue.lane.model),
        )
        for queue in await client.queues()
    ]


async def num_workers(client: QueueClient) -> Mapping[str, int]:
    """Return how many workers of each model live. A lane that cannot be asked now has none."""
    queues = await client.queues()
    answers = await asyncio.gather(*[queue.workers() for queue in queues], return_exceptions=True)
    pairs = {
        (queue.lane.model, worker.worker)
        for queue, answer in zip(queues, answers, strict=True)
        if not isinstance(answer, BaseException)
        for worker in answer
        if worker.lease_left_ms > 0
    }
    return Counter(model for model, _ in pairs)


def models(lanes: Sequence[LaneReport]) -> list[JsonObject]:
    """Return what each model's lanes hold together, its living workers and what they made."""
    model_names = sorted({lane.model for lane in lanes})
    return [
        _model(name, [report for report in lanes if report.model == name]) for name in model_names
    ]


def workers(lanes: Sequence[LaneReport]) -> list[JsonObject]:
    """Return each worker once, under the first of its names, with all that it serves."""
    served_by = [*workers_of_models(lanes)]
    return [
        _worker(
            model, sorted(name for name, worker in served_by if worker == status.worker), status
        )
        for (model, _), status in sorted(engines(lanes).items())
    ]


def latencies(lanes: Sequence[LaneReport]) -> JsonObject:
    """Return the latencies that the page shows, over the living workers of each model."""
    histograms = {histogram.name: histogram for histogram in names.JOB_HISTOGRAMS}
    kinds = {"ttft": histograms[names.TTFT_SECONDS], "itl": histograms[names.INTER_TOKEN_SECONDS]}
    return {kind: _counts(histogram, lanes) for kind, histogram in kinds.items()}


def _model(name: str, lanes: Sequence[LaneReport]) -> JsonObject:
    reasons, totals = Counter[str](), Counter[str]()
    statuses = [report.status for report in lanes]
    for status in statuses:
        reasons.update(status.by_reason)
        totals.update(status.totals)
    counts: JsonObject = {
        field: sum(getattr(status, field) for status in statuses) for field in SUM_FIELDS
    }
    staff = [worker for worker in workers_of_models(lanes).values() if worker.lease_left_ms > 0]
    token_counts = [model_stats(worker).get("generation_tokens") for worker in staff]
    card = lanes[0].card or ModelCard(name=name)
    fields: JsonObject = {
        "task": card.task,
        "chats": card.chats,
        "context": card.max_model_len,
        "num_lanes": len(lanes),
        "num_workers": len(staff),
        "generation_tokens": sum(count for count in token_counts if isinstance(count, int)),
        "is_paused": any(status.is_paused for status in statuses),
    }
    return {"name": name, **fields, **counts, "by_reason": {**reasons}, **totals}


def _worker(model: str, model_names: Sequence[str], worker: WorkerStatus) -> JsonObject:
    stats: JsonObject = {name: worker.stats.get(name, 0) for name in STATS}
    card, state = worker.card, "serving" if is_moving(worker) else "stalled"
    if card.draining:
        state = "draining"
    elif card.asleep or worker.stats.get("is_asleep"):
        state = "asleep"
    return {
        "model": model,
        "models": [*model_names],
        "worker": worker.worker,
        "host": worker.card.host,
        "max_num_seqs": worker.card.max_num_seqs,
        "state": state if worker.lease_left_ms > 0 else "lost",
        **stats,
    }


def _added(first: JsonObject, second: JsonObject) -> JsonObject:
    """Return the sum of two lanes' parts of an account. Its weight is the same in each."""
    whole = dict(first)
    for name, value in second.items():
        total = whole.get(name)
        if isinstance(value, int) and isinstance(total, int):
            whole[name] = total + value
        elif total is None:
            whole[name] = value
    return whole


def _counts(histogram: names.EngineHistogram, lanes: Sequence[LaneReport]) -> JsonObject:
    """Return the bounds of the buckets, and each model's observations up to each bound."""
    counts: dict[str, list[float]] = {}
    for (model, _), worker in workers_of_models(lanes).items():
        tally = tallied(model_stats(worker), histogram)
        if tally is None or worker.lease_left_ms <= 0:
            continue
        totals = counts.get(model, [0.0] * len(histogram.bounds))
        counts[model] = [count + more for count, more in zip(totals, tally[1], strict=False)]
    return {
        "bounds_s": [*histogram.bounds],
        "counts": {model: [*sums] for model, sums in counts.items()},
    }

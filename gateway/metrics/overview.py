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
SUMMED = (
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
        self._looking = asyncio.Lock()
        self._seen: tuple[float, T] | None = None

    async def now(self) -> T:
        async with self._looking:
            if self._seen is None or time.monotonic() - self._seen[0] > FRESH_S:
                seen = await self._look()
                self._seen = time.monotonic(), seen
        return self._seen[1]


class Overview:
    """Tells a caller what runs, and how its own jobs stand."""

    def __init__(self, client: QueueClient, version: str) -> None:
        self._client = client
        self._version = version
        self._shared = _Shared(self._look)
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
            storage = [each for each in storage if each["tenant"] == caller.tenant]
        jobs = await self._recent(caller.tenant) if caller.may("jobs") else []
        own: JsonObject = {"accounts": [*accounts], "storage": [*storage], "jobs": [*jobs]}
        return {**await self._shared.now(), **own}

    async def accounts(self, tenant: str) -> list[JsonObject]:
        """Return what the tenant's accounts have and used of each model."""
        return [each for each in await self._accounts.now() if each["tenant"] == tenant]

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
                shown = {"model": queue.lane.model, **account.model_dump(exclude={"limits"})}
                shown |= account.limits.model_dump(exclude_none=True)
                whole[key] = _added(whole[key], shown) if key in whole else shown
        return [*whole.values()]

    async def _look_at_storage(self) -> list[JsonObject]:
        """Return what each tenant has stored, the most first."""
        return [each.shape() for each in await StorageAccounts(self._client.redis).all()]

    async def _recent(self, tenant: str) -> list[JsonObject]:
        if tenant not in self._jobs and len(self._jobs) >= MOST_TENANTS:
            self._jobs.clear()
        shared = self._jobs.setdefault(tenant, _Shared(partial(self._look_at_jobs, tenant)))
        return await shared.now()

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
    listed = await asyncio.gather(*[each.workers() for each in queues], return_exceptions=True)
    living = {
        (queue.lane.model, worker.worker)
        for queue, found in zip(queues, listed, strict=True)
        if not isinstance(found, BaseException)
        for worker in found
        if worker.lease_left_ms > 0
    }
    return Counter(model for model, _ in living)


def models(lanes: Sequence[LaneReport]) -> list[JsonObject]:
    """Return what each model's lanes hold together, its living workers and what they made."""
    served = sorted({lane.model for lane in lanes})
    return [_model(name, [each for each in lanes if each.model == name]) for name in served]


def workers(lanes: Sequence[LaneReport]) -> list[JsonObject]:
    """Return each worker once, under the first of its names, with all that it serves."""
    served_by = [*workers_of_models(lanes)]
    return [
        _worker(model, sorted(served for served, name in served_by if name == each.worker), each)
        for (model, _), each in sorted(engines(lanes).items())
    ]


def latencies(lanes: Sequence[LaneReport]) -> JsonObject:
    """Return the latencies that the page shows, over the living workers of each model."""
    shown = {each.name: each for each in names.JOB_HISTOGRAMS}
    kinds = {"ttft": shown[names.TTFT_SECONDS], "itl": shown[names.INTER_TOKEN_SECONDS]}
    return {kind: _counts(histogram, lanes) for kind, histogram in kinds.items()}


def _model(name: str, lanes: Sequence[LaneReport]) -> JsonObject:
    reasons, totals = Counter[str](), Counter[str]()
    statuses = [each.status for each in lanes]
    for lane in statuses:
        reasons.update(lane.by_reason)
        totals.update(lane.totals)
    counts: JsonObject = {each: sum(getattr(one, each) for one in statuses) for each in SUMMED}
    living = [each for each in workers_of_models(lanes).values() if each.lease_left_ms > 0]
    made = [model_stats(each).get("generation_tokens") for each in living]
    card = lanes[0].card or ModelCard(name=name)
    told: JsonObject = {
        "task": card.task,
        "chats": card.chats,
        "context": card.max_model_len,
        "num_lanes": len(lanes),
        "num_workers": len(living),
        "generation_tokens": sum(count for count in made if isinstance(count, int)),
        "is_paused": any(lane.is_paused for lane in statuses),
    }
    return {"name": name, **told, **counts, "by_reason": {**reasons}, **totals}


def _worker(model: str, served: Sequence[str], worker: WorkerStatus) -> JsonObject:
    stats: JsonObject = {name: worker.stats.get(name, 0) for name in STATS}
    card, state = worker.card, "serving" if is_moving(worker) else "stalled"
    if card.draining:
        state = "draining"
    elif card.asleep or worker.stats.get("is_asleep"):
        state = "asleep"
    return {
        "model": model,
        "models": [*served],
        "worker": worker.worker,
        "host": worker.card.host,
        "max_num_seqs": worker.card.max_num_seqs,
        "state": state if worker.lease_left_ms > 0 else "lost",
        **stats,
    }


def _added(one: JsonObject, other: JsonObject) -> JsonObject:
    """Return the sum of two lanes' parts of an account. Its weight is the same in each."""
    whole = dict(one)
    for name, value in other.items():
        mine = whole.get(name)
        if isinstance(value, int) and isinstance(mine, int):
            whole[name] = mine + value
        elif mine is None:
            whole[name] = value
    return whole


def _counts(histogram: names.EngineHistogram, lanes: Sequence[LaneReport]) -> JsonObject:
    """Return the bounds of the buckets, and each model's observations up to each bound."""
    counts: dict[str, list[float]] = {}
    for (model, _), worker in workers_of_models(lanes).items():
        tally = tallied(model_stats(worker), histogram)
        if tally is None or worker.lease_left_ms <= 0:
            continue
        known = counts.get(model, [0.0] * len(histogram.bounds))
        counts[model] = [one + more for one, more in zip(known, tally[1], strict=False)]
    return {
        "bounds_s": [*histogram.bounds],
        "counts": {model: [*each] for model, each in counts.items()},
    }

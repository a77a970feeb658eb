"""Tell what runs at present, as the status page shows it: models, workers, latencies."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence

from prometheus_client import Histogram

from penstock.gateway.client import Client
from penstock.gateway.http.metrics import LaneReport, Metrics, is_moving
from penstock.schemas import names
from penstock.schemas.delivery import LaneStatus, WorkerStatus
from penstock.schemas.openai import JsonObject

FRESH_S = 0.9  # all who look share one look at Redis
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


class Overview:
    """Looks at all lanes at most once in `FRESH_S`, however many ask."""

    def __init__(self, client: Client, metrics: Metrics, version: str) -> None:
        self._client = client
        self._metrics = metrics
        self._version = version
        self._looking = asyncio.Lock()
        self._seen: JsonObject = {}
        self._seen_s = float("-inf")

    async def now(self) -> JsonObject:
        """Return what runs. Raises QueueUnreachable.

        Counters grow since the start of whoever counts, so that who looks twice knows the rates.
        Latencies are those that this gateway saw.
        """
        async with self._looking:
            if time.monotonic() - self._seen_s > FRESH_S:
                self._seen = self._shape(await look(self._client))
                self._seen_s = time.monotonic()
        return self._seen

    def _shape(self, lanes: Sequence[LaneReport]) -> JsonObject:
        return {
            "version": self._version,
            "now_ms": int(time.time() * 1000),
            "models": [*models(lanes)],
            "workers": [*workers(lanes)],
            "latencies": {
                "ttft": _counts(self._metrics.ttft, names.TTFT_BUCKETS),
                "itl": _counts(self._metrics.inter_token, names.INTER_TOKEN_BUCKETS),
            },
        }


async def look(client: Client) -> list[LaneReport]:
    """Return the state of every lane of every model."""
    return [
        LaneReport(
            queue.lane.model, str(queue.lane.number), await queue.counts(), await queue.workers()
        )
        for queue in await client.queues()
    ]


def models(lanes: Sequence[LaneReport]) -> list[JsonObject]:
    """Return what each model's lanes hold together."""
    served = sorted({lane.model for lane in lanes})
    return [_model(name, [each.status for each in lanes if each.model == name]) for name in served]


def workers(lanes: Sequence[LaneReport]) -> list[JsonObject]:
    """Return the workers of each model. One that serves several lanes is there once."""
    found = {(lane.model, each.worker): each for lane in lanes for each in lane.workers}
    return [_worker(model, each) for (model, _), each in sorted(found.items())]


def _model(name: str, lanes: Sequence[LaneStatus]) -> JsonObject:
    reasons, totals = Counter[str](), Counter[str]()
    for lane in lanes:
        reasons.update(lane.by_reason)
        totals.update(lane.totals)
    counts: JsonObject = {each: sum(getattr(lane, each) for lane in lanes) for each in SUMMED}
    return {"name": name, "num_lanes": len(lanes), **counts, "by_reason": {**reasons}, **totals}


def _worker(model: str, worker: WorkerStatus) -> JsonObject:
    stats: JsonObject = {name: worker.stats.get(name, 0) for name in STATS}
    state = "draining" if worker.card.draining else "serving" if is_moving(worker) else "stalled"
    return {
        "model": model,
        "worker": worker.worker,
        "host": worker.card.host,
        "max_num_seqs": worker.card.max_num_seqs,
        "state": state if worker.lease_left_ms > 0 else "lost",
        **stats,
    }


def _counts(histogram: Histogram, bounds: Sequence[float]) -> JsonObject:
    """Return the bounds of the buckets, and each model's observations up to each bound."""
    counts: dict[str, list[float]] = {}
    for metric in histogram.collect():
        for sample in metric.samples:
            if sample.name.endswith("_bucket") and sample.labels["le"] != "+Inf":
                counts.setdefault(sample.labels["model_name"], []).append(sample.value)
    return {"bounds_s": [*bounds], "counts": {model: [*each] for model, each in counts.items()}}

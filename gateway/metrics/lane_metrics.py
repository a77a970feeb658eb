"""Metrics of the lanes and their workers, made of what Redis holds of them.

An engine's figures stand once a worker, under its first name, and a model's are of its own jobs.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from prometheus_client.core import (
    CounterMetricFamily,
    Exemplar,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from pydantic import JsonValue

from penstock.schemas.delivery import LaneStatus, WorkerStatus
from penstock.schemas.event import FinishReason
from penstock.schemas.metrics import names
from penstock.schemas.metrics.tally import read_dump, read_example
from penstock.schemas.model import ModelCard

ENGINE_LABELS = ["model_name", "engine"]
CACHE_LABELS = [
    "block_size",
    "num_gpu_blocks",
    "num_gpu_blocks_override",
    "cache_dtype",
    "enable_prefix_caching",
    "gpu_memory_utilization",
]
Engine = tuple[str, str]  # the labels `model_name` and `engine`
Bucket = tuple[str, float] | tuple[str, float, Exemplar]
QUEUE = "queue"  # the `engine` label of requests that no engine has yet


@dataclass(frozen=True, slots=True)
class LaneReport:
    """The status and the workers of one lane at one moment."""

    model: str
    number: str
    status: LaneStatus
    workers: Sequence[WorkerStatus]
    card: ModelCard | None = None

    @property
    def living(self) -> list[WorkerStatus]:
        return [worker for worker in self.workers if worker.lease_left_ms > 0]

    @property
    def staff(self) -> list[WorkerStatus]:
        """Return the living workers that take new jobs: those that neither drain nor sleep."""
        return [worker for worker in self.living if worker.card.takes_jobs]


class LaneMetrics(Collector):
    """Metrics of the lanes: queue depths, and the engines' statistics.

    The statistics are those of each worker's last beat, which renews its lease.
    """

    def __init__(self, lanes: Sequence[LaneReport]) -> None:
        self._lanes = lanes

    def collect(self) -> Iterable[Metric]:
        lane_labels = ["model_name", "lane"]
        queue_size = GaugeMetricFamily(names.JOBS_QUEUED, "Jobs no worker has", labels=lane_labels)
        running = GaugeMetricFamily(names.JOBS_RUNNING, "Jobs with a worker", labels=lane_labels)
        tokens = GaugeMetricFamily(
            names.NUM_QUEUED_TOKENS, "Tokens of the prompts no worker ever had", labels=lane_labels
        )
        readers = GaugeMetricFamily(
            names.LANE_WORKERS, "Workers alive that serve a lane", labels=lane_labels
        )
        shortage = GaugeMetricFamily(
            names.WORKERS_WANTED,
            "1: no worker was there of late, and a foreground job was refused for it",
            labels=lane_labels,
        )
        oldest = GaugeMetricFamily(
            names.OLDEST_WAITING_SECONDS,
            "Since the submission of the job that waits longest, about",
            labels=lane_labels,
        )
        for lane in self._lanes:
            labels = [lane.model, lane.number]
            queue_size.add_metric(labels, lane.status.num_queued)
            running.add_metric(labels, lane.status.num_running)
            tokens.add_metric(labels, lane.status.num_queued_tokens)
            readers.add_metric(labels, len(lane.living))
            shortage.add_metric(labels, lane.status.is_wanted)
            oldest.add_metric(labels, lane.status.oldest_waiting_ms / 1000)
        yield from (queue_size, running, tokens, readers, shortage, oldest)
        yield from (*self._totals(), self._alive(), self._reasons(), *self._engines())
        yield from (*self._engine_histograms(), self._cache_config(), *self._of_models())

    def _totals(self) -> Iterable[Metric]:
        labels = ["model_name", "lane"]
        dead = GaugeMetricFamily(names.DEAD_LETTERS, "Dead letters that are kept", labels=labels)
        for lane in self._lanes:
            dead.add_metric([lane.model, lane.number], lane.status.num_dead_letters)
        yield dead
        for total, (name, text) in names.LANE_TOTALS.items():
            family = CounterMetricFamily(name, text, labels=labels)
            for lane in self._lanes:
                family.add_metric([lane.model, lane.number], lane.status.totals.get(total, 0))
            yield family

    def _reasons(self) -> Metric:
        """Count waiting requests by reason. Those that wait in an engine wait for capacity."""
        family = GaugeMetricFamily(
            names.REQUESTS_WAITING_BY_REASON,
            "Requests that wait, by what for",
            labels=[*ENGINE_LABELS, "reason"],
        )
        for lane in self._lanes:
            for reason, count in _waiting(lane).items():
                family.add_metric([lane.model, f"{QUEUE}:{lane.number}", reason], count)
        for engine, worker in self._alive_engines().items():
            family.add_metric([*engine, "capacity"], _number(worker.stats, "num_waiting"))
        return family

    def _alive_engines(self) -> dict[Engine, WorkerStatus]:
        return {
            key: worker for key, worker in engines(self._lanes).items() if worker.lease_left_ms > 0
        }

    def _alive(self) -> Metric:
        """Count each worker once, so that the sum is their number; a model without any is at 0."""
        models = {lane.model for lane in self._lanes if lane.living}
        counts = Counter({lane.model: 0 for lane in self._lanes if lane.model not in models})
        counts.update(model for model, _ in self._alive_engines())
        family = GaugeMetricFamily(
            names.WORKERS_ALIVE,
            "Workers alive, each once, under the first of its names",
            labels=["model_name"],
        )
        for model, count in counts.items():
            family.add_metric([model], count)
        return family

    def _health(self) -> Metric:
        """Tell which engines are healthy. One that froze is at 0.

        A worker that crashed is not listed here; the counters tell of it.
        """
        family = GaugeMetricFamily(
            names.ENGINE_HEALTHY,
            "1: its lease runs, and it computes or is idle",
            labels=ENGINE_LABELS,
        )
        for engine, worker in engines(self._lanes).items():
            family.add_metric(engine, float(worker.lease_left_ms > 0 and is_moving(worker)))
        return family

    def _engines(self) -> Iterable[Metric]:
        families = {metric.name: _family(metric) for metric in names.ENGINE_METRICS}
        usage = GaugeMetricFamily(names.KV_USAGE, "Share of KV blocks held", labels=ENGINE_LABELS)
        waste = GaugeMetricFamily(
            names.KV_WASTE, "Share of held KV slots without a token", labels=ENGINE_LABELS
        )
        for engine, worker in self._alive_engines().items():
            stats = worker.stats
            for metric in names.ENGINE_METRICS:
                families[metric.name].add_metric(engine, _number(stats, metric.stat))
            num_held = _number(stats, "num_held_blocks")
            usage.add_metric(engine, num_held / (_number(stats, "num_blocks") or 1.0))
            slots = num_held * _number(stats, "block_size")
            waste.add_metric(engine, 1 - _number(stats, "num_live_slots") / slots if slots else 0)
        for lane in self._lanes:
            labels = (lane.model, f"{QUEUE}:{lane.number}")
            families[names.REQUESTS_WAITING].add_metric(labels, lane.status.num_queued)
        return [*families.values(), usage, waste, self._health()]

    def _engine_histograms(self) -> Iterable[Metric]:
        engine_stats = {engine: worker.stats for engine, worker in self._alive_engines().items()}
        return [_histogram(histogram, engine_stats) for histogram in names.ENGINE_HISTOGRAMS]

    def _of_models(self) -> Iterable[Metric]:
        """Publish what each worker counted of each model's jobs."""
        engine_stats = {
            (model, worker.worker): model_stats(worker)
            for (model, _), worker in workers_of_models(self._lanes).items()
            if worker.lease_left_ms > 0
        }
        for metric in names.MODEL_METRICS:
            family = _family(metric)
            for engine, stats in engine_stats.items():
                family.add_metric(engine, _number(stats, metric.stat))
            yield family
        yield from (_sources(engine_stats), _successes(engine_stats))
        yield from (_histogram(histogram, engine_stats) for histogram in names.JOB_HISTOGRAMS)

    def _cache_config(self) -> Metric:
        family = GaugeMetricFamily(
            names.CACHE_CONFIG,
            "1; its labels tell how the KV cache is set up",
            labels=[*ENGINE_LABELS, *CACHE_LABELS],
        )
        for engine, worker in self._alive_engines().items():
            counts = {
                "block_size": f"{_number(worker.stats, 'block_size'):.0f}",
                "num_gpu_blocks": f"{_number(worker.stats, 'num_blocks'):.0f}",
            }
            config = counts | worker.card.cache_config
            family.add_metric([*engine, *(config.get(name, "") for name in CACHE_LABELS)], 1)
        return family


def engines(lanes: Sequence[LaneReport]) -> dict[Engine, WorkerStatus]:
    """Return each worker once, under its first name.

    One of an older version does not say which that is: it stands under the first lane of it.
    """
    latest, first_names = dict[str, WorkerStatus](), dict[str, str]()
    for lane in lanes:
        for status in lane.workers:
            first_names.setdefault(status.worker, status.card.model or lane.model)
            latest[status.worker] = _later(latest.get(status.worker), status)
    return {(first_names[worker], worker): status for worker, status in latest.items()}


def workers_of_models(lanes: Sequence[LaneReport]) -> dict[tuple[str, str], WorkerStatus]:
    """Return the workers by the models they serve and their names, each as it told there.

    A worker that serves several lanes of a model is in each of them, but counts once.
    """
    latest: dict[tuple[str, str], WorkerStatus] = {}
    for lane in lanes:
        for status in lane.workers:
            latest[lane.model, status.worker] = _later(
                latest.get((lane.model, status.worker)), status
            )
    return latest


def _later(first: WorkerStatus | None, second: WorkerStatus) -> WorkerStatus:
    """Return which of two lanes' reports of a worker is of its later beat."""
    return first if first and first.lease_left_ms >= second.lease_left_ms else second


def model_stats(worker: WorkerStatus) -> Mapping[str, JsonValue]:
    """Return what a worker counted of the jobs of the model in whose lane it is listed."""
    stats = worker.stats.get("model")
    return stats if isinstance(stats, dict) else {}


def tallied(
    stats: Mapping[str, JsonValue], histogram: names.EngineHistogram
) -> tuple[float, list[float]] | None:
    """Return a histogram's sum and counts; None where a worker of another version has none."""
    return read_dump(histogram.bounds, _entry(stats, "histograms", histogram.stat))


def is_moving(worker: WorkerStatus) -> bool:
    """Return whether its engine computes or is idle, as of its last beat."""
    return _number(worker.stats, "unmoved_s") <= names.UNHEALTHY_S


def _waiting(lane: LaneReport) -> dict[str, int]:
    """Return the number of queued jobs by what they wait for.

    A job that nothing holds back waits for a worker, or for its capacity where there is one, or
    for the queue to be resumed.
    """
    status = lane.status
    counts = status.by_reason | {"delayed": status.num_delayed}
    rest = status.num_queued - sum(counts.values())
    reason = "paused" if status.is_paused else "capacity" if lane.staff else "no_worker"
    return counts | {reason: max(0, rest)}


def _family(metric: names.EngineMetric) -> CounterMetricFamily | GaugeMetricFamily:
    if metric.kind == "counter":
        return CounterMetricFamily(metric.name, metric.text, labels=ENGINE_LABELS)
    return GaugeMetricFamily(metric.name, metric.text, labels=ENGINE_LABELS)


def _histogram(
    histogram: names.EngineHistogram, engine_stats: Mapping[Engine, Mapping[str, JsonValue]]
) -> Metric:
    family = HistogramMetricFamily(histogram.name, histogram.text, labels=ENGINE_LABELS)
    bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
    for engine, stats in engine_stats.items():
        if tally := tallied(stats, histogram):
            total, counts = tally
            buckets: list[Bucket] = [*zip(bounds, counts, strict=True)]
            if example := read_example(_entry(stats, "examples", histogram.stat)):
                at = bisect_left(histogram.bounds, example.value)
                trace = Exemplar({"trace_id": example.trace_id}, example.value, example.at_s)
                buckets[at] = bounds[at], counts[at], trace
            family.add_metric(engine, buckets, total)
    return family


def _sources(engine_stats: Mapping[Engine, Mapping[str, JsonValue]]) -> Metric:
    family = CounterMetricFamily(
        names.PROMPT_TOKENS_BY_SOURCE,
        "Tokens of prompts, by where their KV came from",
        labels=[*ENGINE_LABELS, "source"],
    )
    for engine, stats in engine_stats.items():
        num_cached = _number(stats, "cached_tokens")
        num_computed = _number(stats, "prompt_tokens") - num_cached
        family.add_metric([*engine, "local_compute"], num_computed)
        family.add_metric([*engine, "local_cache_hit"], num_cached)
    return family


def _successes(engine_stats: Mapping[Engine, Mapping[str, JsonValue]]) -> Metric:
    family = CounterMetricFamily(
        names.REQUEST_SUCCESS,
        "Choices that ended well",
        labels=[*ENGINE_LABELS, "finished_reason"],
    )
    for engine, stats in engine_stats.items():
        for reason in get_args(FinishReason):
            count = _entry(stats, "finish_reasons", reason)
            family.add_metric([*engine, reason], count if isinstance(count, int) else 0)
    return family


def _entry(stats: Mapping[str, JsonValue], table: str, name: str) -> JsonValue:
    """Return an entry of a table in what a worker told; any client of Redis may have written it."""
    entries = stats.get(table)
    return entries.get(name) if isinstance(entries, dict) else None


def _number(stats: Mapping[str, JsonValue], stat: str) -> float:
    value = stats.get(stat, 0)
    return float(value) if isinstance(value, int | float) else 0.0

"""Metrics of the lanes and their workers, made of what Redis holds of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from penstock.schemas import names
from penstock.schemas.delivery import LaneStatus, WorkerStatus
from penstock.schemas.tally import read_dump

ENGINE_LABELS = ["model_name", "engine"]
CACHE_LABELS = [
    "block_size",
    "num_gpu_blocks",
    "num_gpu_blocks_override",
    "cache_dtype",
    "enable_prefix_caching",
    "gpu_memory_utilization",
]
QUEUE = "queue"  # the `engine` label of requests that no engine has yet


@dataclass(frozen=True, slots=True)
class LaneReport:
    """The status and the workers of one lane at one moment."""

    model: str
    number: str
    status: LaneStatus
    workers: Sequence[WorkerStatus]

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
        queued = GaugeMetricFamily(names.JOBS_QUEUED, "Jobs no worker has", labels=lane_labels)
        running = GaugeMetricFamily(names.JOBS_RUNNING, "Jobs with a worker", labels=lane_labels)
        tokens = GaugeMetricFamily(
            names.NUM_QUEUED_TOKENS, "Tokens of the prompts no worker ever had", labels=lane_labels
        )
        alive = GaugeMetricFamily(names.WORKERS_ALIVE, "Workers alive", labels=lane_labels)
        wanted = GaugeMetricFamily(
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
            queued.add_metric(labels, lane.status.num_queued)
            running.add_metric(labels, lane.status.num_running)
            tokens.add_metric(labels, lane.status.num_queued_tokens)
            alive.add_metric(labels, len(lane.living))
            wanted.add_metric(labels, lane.status.is_wanted)
            oldest.add_metric(labels, lane.status.oldest_waiting_ms / 1000)
        yield from (queued, running, tokens, alive, wanted, oldest)
        yield from (*self._totals(), self._reasons(), *self._engines(), *self._histograms())
        yield from (self._sources(), self._cache_config())

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
        for (model, engine), worker in self._workers().items():
            family.add_metric([model, engine, "capacity"], _number(worker, "num_waiting"))
        return family

    def _workers(self) -> dict[tuple[str, str], WorkerStatus]:
        """Return the living workers by model and name.

        A worker that serves several lanes of a model is in each of them, but counts once.
        """
        return {(lane.model, each.worker): each for lane in self._lanes for each in lane.living}

    def _health(self) -> Metric:
        """Tell which engines are healthy. One that froze is at 0.

        A worker that crashed is not listed here; the counters tell of it.
        """
        family = GaugeMetricFamily(
            names.ENGINE_HEALTHY,
            "1: its lease runs, and it computes or is idle",
            labels=ENGINE_LABELS,
        )
        workers = {(lane.model, each.worker): each for lane in self._lanes for each in lane.workers}
        for labels, worker in workers.items():
            family.add_metric(labels, float(worker.lease_left_ms > 0 and is_moving(worker)))
        return family

    def _engines(self) -> Iterable[Metric]:
        families = {metric.name: _family(metric) for metric in names.ENGINE_METRICS}
        usage = GaugeMetricFamily(names.KV_USAGE, "Share of KV blocks held", labels=ENGINE_LABELS)
        waste = GaugeMetricFamily(
            names.KV_WASTE, "Share of held KV slots without a token", labels=ENGINE_LABELS
        )
        for labels, worker in self._workers().items():
            for metric in names.ENGINE_METRICS:
                families[metric.name].add_metric(labels, _number(worker, metric.stat))
            held = _number(worker, "num_held_blocks")
            usage.add_metric(labels, held / (_number(worker, "num_blocks") or 1.0))
            slots = held * _number(worker, "block_size")
            waste.add_metric(labels, 1 - _number(worker, "num_live_slots") / slots if slots else 0)
        for lane in self._lanes:
            labels = (lane.model, f"{QUEUE}:{lane.number}")
            families[names.REQUESTS_WAITING].add_metric(labels, lane.status.num_queued)
        return [*families.values(), usage, waste, self._health()]

    def _histograms(self) -> Iterable[Metric]:
        """Publish what the workers tallied; one of an older version may have tallied less."""
        for histogram in names.ENGINE_HISTOGRAMS:
            family = HistogramMetricFamily(histogram.name, histogram.text, labels=ENGINE_LABELS)
            bounds = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
            for labels, worker in self._workers().items():
                dumps = worker.stats.get("histograms")
                dump = dumps.get(histogram.stat) if isinstance(dumps, dict) else None
                if told := read_dump(histogram.bounds, dump):
                    total, counts = told
                    family.add_metric(labels, [*zip(bounds, counts, strict=True)], total)
            yield family

    def _sources(self) -> Metric:
        family = CounterMetricFamily(
            names.PROMPT_TOKENS_BY_SOURCE,
            "Prompt tokens of admitted sequences, by where their KV came from",
            labels=[*ENGINE_LABELS, "source"],
        )
        for labels, worker in self._workers().items():
            cached = _number(worker, "cached_tokens")
            computed = _number(worker, "prompt_tokens") - cached
            family.add_metric([*labels, "local_compute"], computed)
            family.add_metric([*labels, "local_cache_hit"], cached)
        return family

    def _cache_config(self) -> Metric:
        family = GaugeMetricFamily(
            names.CACHE_CONFIG,
            "1; its labels tell how the KV cache is set up",
            labels=[*ENGINE_LABELS, *CACHE_LABELS],
        )
        for labels, worker in self._workers().items():
            counts = {
                "block_size": f"{_number(worker, 'block_size'):.0f}",
                "num_gpu_blocks": f"{_number(worker, 'num_blocks'):.0f}",
            }
            config = counts | worker.card.cache_config
            family.add_metric([*labels, *(config.get(name, "") for name in CACHE_LABELS)], 1)
        return family


def is_moving(worker: WorkerStatus) -> bool:
    """Return whether its engine computes or is idle, as of its last beat."""
    return _number(worker, "unmoved_s") <= names.UNHEALTHY_S


def _waiting(lane: LaneReport) -> dict[str, int]:
    """Return the number of queued jobs by what they wait for.

    A job that nothing holds back waits for a worker, or for its capacity where there is one, or
    for the queue to be resumed.
    """
    status = lane.status
    held = status.by_reason | {"delayed": status.num_delayed}
    rest = status.num_queued - sum(held.values())
    reason = "paused" if status.is_paused else "capacity" if lane.staff else "no_worker"
    return held | {reason: max(0, rest)}


def _family(metric: names.EngineMetric) -> CounterMetricFamily | GaugeMetricFamily:
    if metric.kind == "counter":
        return CounterMetricFamily(metric.name, metric.text, labels=ENGINE_LABELS)
    return GaugeMetricFamily(metric.name, metric.text, labels=ENGINE_LABELS)


def _number(worker: WorkerStatus, stat: str) -> float:
    value = worker.stats.get(stat, 0)
    return float(value) if isinstance(value, int | float) else 0.0

"""Metrics of the gateway, and the text that publishes them with the workers' statistics."""

import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.schemas import names
from penstock.schemas.delivery import LaneStatus, WorkerStatus
from penstock.schemas.event import Delta, Done, Event, Failed

if TYPE_CHECKING:
    from penstock.schemas.process.spans import Span

Batches = AsyncGenerator[list[Event], None]

ENGINE_LABELS = ["model_name", "engine"]
QUEUE = "queue"  # the `engine` label of requests that no engine has yet


class Metrics:
    """The gateway's own metrics.

    Their labels are served models, outcomes and status codes, so there are few of them.
    """

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        model = ["model_name"]
        self.ttft = Histogram(
            names.TTFT_SECONDS,
            "From a request to its first token",
            model,
            buckets=names.TTFT_BUCKETS,
            registry=registry,
        )
        self.inter_token = Histogram(
            names.INTER_TOKEN_SECONDS,
            "Between two events of a choice",
            model,
            buckets=names.INTER_TOKEN_BUCKETS,
            registry=registry,
        )
        self.e2e = Histogram(
            names.E2E_SECONDS,
            "From a request to its end",
            model,
            buckets=names.E2E_BUCKETS,
            registry=registry,
        )
        self.success = Counter(
            names.REQUEST_SUCCESS,
            "Choices that ended well",
            [*model, "finished_reason"],
            registry=registry,
        )
        self.ended = Counter(
            names.JOBS_ENDED,
            "Ends of jobs that were shown to a caller",
            [*model, "outcome"],
            registry=registry,
        )
        self.responses = Counter(
            names.HTTP_RESPONSES, "HTTP responses", ["status"], registry=registry
        )
        self.followed = Gauge(
            names.JOBS_FOLLOWED, "Jobs whose end a caller waits for", registry=registry
        )
        self.queue_reachable = Gauge(
            names.QUEUE_REACHABLE, "1: this gateway reaches the queue", registry=registry
        )
        self.housekeeping_alive = Gauge(
            names.HOUSEKEEPING_ALIVE,
            "1: housekeeping did its chores in the last seconds",
            registry=registry,
        )

    def text(self, lanes: Sequence["LaneReport"]) -> bytes:
        """Return the metrics in Prometheus' form: the gateway's, the queue's and the workers'."""
        others = CollectorRegistry()
        others.register(_Lanes(lanes))
        return generate_latest(self._registry) + generate_latest(others)

    def families(self) -> list[Metric]:
        """Return every metric that `text` publishes."""
        return [*self._registry.collect(), *_Lanes([]).collect()]


@dataclass(slots=True)
class RequestTimer:
    """Measures one request, from its arrival to its job's end."""

    metrics: Metrics
    span: "Span | None" = None  # of the request; the first token is noted on it
    _began_s: float = field(default_factory=time.monotonic)
    _last_s: dict[int, float] = field(default_factory=dict)

    async def follow(self, model: str, batches: Batches) -> Batches:
        """Time the batches and yield them unchanged.

        `model` must be a served one, so that there are few labels.
        """
        inter_token = self.metrics.inter_token.labels(model)  # looked up once, not every token
        with self.metrics.followed.track_inprogress():
            async with aclosing(batches):
                async for batch in batches:
                    for event in batch:
                        if isinstance(event, Delta):
                            self._saw(model, event, inter_token)
                        else:
                            self._saw_end(model, event)
                    yield batch

    def _saw(self, model: str, delta: Delta, inter_token: Histogram) -> None:
        now_s = time.monotonic()
        if not self._last_s:
            self.metrics.ttft.labels(model).observe(now_s - self._began_s)
            if self.span:
                self.span.add_event("first token")
                self.span.set_attribute(
                    "gen_ai.response.time_to_first_chunk", now_s - self._began_s
                )
        if (last_s := self._last_s.get(delta.index)) is not None:
            inter_token.observe(now_s - last_s)
        self._last_s[delta.index] = now_s
        if delta.finish_reason:
            self.metrics.success.labels(model, delta.finish_reason).inc()

    def _saw_end(self, model: str, end: Done | Failed) -> None:
        self.metrics.e2e.labels(model).observe(time.monotonic() - self._began_s)
        self.metrics.ended.labels(model, end.state).inc()


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
        """Return the living workers that take new jobs, which are those that do not drain."""
        return [worker for worker in self.living if not worker.card.draining]


class _Lanes(Collector):
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
        for lane in self._lanes:
            labels = [lane.model, lane.number]
            queued.add_metric(labels, lane.status.num_queued)
            running.add_metric(labels, lane.status.num_running)
            tokens.add_metric(labels, lane.status.num_queued_tokens)
            alive.add_metric(labels, len(lane.living))
        return [queued, running, tokens, alive, *self._totals(), self._reasons(), *self._engines()]

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


def is_moving(worker: WorkerStatus) -> bool:
    """Return whether its engine computes or is idle, as of its last beat."""
    return _number(worker, "unmoved_s") <= names.UNHEALTHY_S


def _waiting(lane: LaneReport) -> dict[str, int]:
    """Return the number of queued jobs by what they wait for.

    A job that nothing holds back waits for a worker, or for its capacity where there is one.
    """
    status = lane.status
    held = status.by_reason | {"delayed": status.num_delayed}
    rest = status.num_queued - sum(held.values())
    return held | {"capacity" if lane.staff else "no_worker": max(0, rest)}


def _family(metric: names.EngineMetric) -> CounterMetricFamily | GaugeMetricFamily:
    if metric.kind == "counter":
        return CounterMetricFamily(metric.name, metric.text, labels=ENGINE_LABELS)
    return GaugeMetricFamily(metric.name, metric.text, labels=ENGINE_LABELS)


def _number(worker: WorkerStatus, stat: str) -> float:
    value = worker.stats.get(stat, 0)
    return float(value) if isinstance(value, int | float) else 0.0

"""Prometheus metrics of the gateway, and the text that publishes them with the workers'."""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from penstock.gateway.metrics.lane_metrics import LaneMetrics, LaneReport
from penstock.gateway.metrics.tenant_tokens import TenantTokens
from penstock.gateway.queue_client import EventBatches
from penstock.schemas.errors import PenstockError
from penstock.schemas.event import Delta
from penstock.schemas.metrics import names

if TYPE_CHECKING:
    from penstock.schemas.process.spans import Span

# With the client's usual escaping, the colons of our names would become underscores.
OPENMETRICS = "application/openmetrics-text; version=1.0.0; escaping=allow-utf-8"


class Metrics:
    """The gateway's own metrics.

    Their labels are served models, outcomes, reasons, status codes and at most `max_tenants`
    tenants, so there are few of them.
    """

    def __init__(self, max_tenants: int = 0) -> None:
        self._tenants = TenantTokens(max_tenants)
        self._registry = registry = CollectorRegistry()
        model = ["model_name"]
        self.ends = Counter(
            names.JOBS_ENDED,
            "Ends of jobs that were shown to a caller",
            [*model, "outcome"],
            registry=registry,
        )
        self.responses = Counter(
            names.HTTP_RESPONSES, "HTTP responses", ["status"], registry=registry
        )
        self.followers = Gauge(
            names.JOBS_FOLLOWED, "Jobs whose end a caller waits for", registry=registry
        )

        self.rejections = Counter(
            names.ADMISSION_REJECTIONS,
            "Submissions that this gateway refused; without a model: of one that is not served",
            [*model, "reason"],
            registry=registry,
        )
        self.reconnects = Counter(
            names.RECONNECTS,
            "Streams that a reader took up again from where it had come to",
            registry=registry,
        )
        self.ignored_fields = Counter(
            names.IGNORED_PARAMETERS,
            "Fields of requests that mean nothing here, and tools that are left out; "
            "x-penstock-ignored names them",
            registry=registry,
        )

    def reject(self, model: str, error: PenstockError) -> None:
        """Count a refused submission. `model` must be a served one, or empty."""
        self.rejections.labels(model, error.reason).inc()

    def text(self, snapshot: "Seen", accept: str, tenant: str | None = None) -> tuple[bytes, str]:
        """Return the metrics and their content type: the gateway's, the queue's, the workers'.

        With a tenant they name no other. They are in Prometheus' form, or in that of OpenMetrics,
        which has exemplars, where the header `Accept` asks for it.
        """
        if snapshot.lanes is not None:
            self._tenants.take(snapshot.lanes)
        families = _All(self._families(snapshot, tenant))
        if "application/openmetrics-text" not in accept:
            return generate_latest(families), CONTENT_TYPE_LATEST
        encode, content_type = choose_encoder(OPENMETRICS)
        return encode(families), content_type

    def families(self) -> list[Metric]:
        """Return every metric that `text` publishes."""
        return self._families(Seen(None))

    def _families(self, snapshot: "Seen", tenant: str | None = None) -> list[Metric]:
        replays = CounterMetricFamily(
            names.REPLAYED_EVENTS, "Events that readers here got from a log, not live"
        )
        replays.add_metric([], snapshot.num_replayed)
        attempts = CounterMetricFamily(
            names.WEBHOOK_ATTEMPTS,
            "Attempts to send webhooks; pending: another one follows",
            labels=["outcome"],
        )
        for outcome, count in snapshot.webhook_attempts.items():
            attempts.add_metric([outcome], count)
        alive = {
            names.QUEUE_REACHABLE: (
                "1: this gateway reaches the queue",
                snapshot.lanes is not None,
            ),
            names.HOUSEKEEPING_ALIVE: (
                "1: housekeeping did its chores in the last seconds",
                snapshot.has_housekeeping,
            ),
        }
        parts = [GaugeMetricFamily(name, text, is_so) for name, (text, is_so) in alive.items()]
        own = [*self._registry.collect(), *parts, replays, attempts, self._tenants.family(tenant)]
        return [*own, *LaneMetrics(snapshot.lanes or []).collect()]


@dataclass(frozen=True, slots=True)
class Seen:
    """The numbers that are published beside the gateway's own counters, as of now.

    lanes             None while the queue cannot be reached
    num_replayed      events that readers of this gateway got from a log
    webhook_attempts  by the state that each led to, of all of housekeeping
    """

    lanes: Sequence[LaneReport] | None
    num_replayed: int = 0
    webhook_attempts: Mapping[str, int] = field(default_factory=dict)
    has_housekeeping: bool = False


class _All(Collector):
    """The metrics of one answer; OpenMetrics ends with a mark, so they are written as one."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


@dataclass(slots=True)
class RequestTimer:
    """Follows one request's job: its span gets the first token, and its end is counted."""

    metrics: Metrics
    span: "Span | None"
    began_s: float

    async def follow(self, model: str, batches: EventBatches) -> EventBatches:
        """Look at the batches and yield them unchanged.

        `model` must be a served one, so that there are few labels.
        """
        is_first = True
        with self.metrics.followers.track_inprogress():
            async with aclosing(batches):
                async for batch in batches:
                    for event in batch:
                        if isinstance(event, Delta) and is_first:
                            is_first = False
                            self._saw_first()
                        elif not isinstance(event, Delta):
                            self.metrics.ends.labels(model, event.state).inc()
                    yield batch

    def _saw_first(self) -> None:
        if self.span:
            seconds = time.monotonic() - self.began_s
            self.span.add_event("first token")
            self.span.set_attribute("gen_ai.response.time_to_first_chunk", seconds)

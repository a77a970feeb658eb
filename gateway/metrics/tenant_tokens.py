"""Tokens by tenant, under few labels."""

from collections.abc import Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, Metric

from penstock.gateway.metrics.lane_metrics import LaneReport
from penstock.schemas.metrics import names

MAX_GONE = 256  # workers that are gone, of which one may only be between two leases


class TenantTokens:
    """Counts tokens of ended jobs by tenant, from what the workers tell with their beats.

    The first `most` tenants have labels of their own for as long as this process runs, and all
    others share one: so no label's count ever goes back. What workers had told at the first look
    is not counted, since an earlier process has published it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._tokens: dict[str, float] = {}
        self._latest: dict[str, Mapping[str, float]] | None = None  # the latest look's last

    def take(self, lanes: Sequence[LaneReport]) -> None:
        """Count what each worker added since the last look at it."""
        latest = {  # a worker may be in several lanes, and have another name after a lost lease
            str(worker.stats.get("counts_of")): _totals(worker.stats.get("tenant_tokens"))
            for lane in lanes
            for worker in lane.workers
        }
        before = latest if self._latest is None else self._latest
        for worker, totals in latest.items():
            self._count(before.get(worker, {}), totals)
        gone = {worker: totals for worker, totals in before.items() if worker not in latest}
        self._latest = dict([*gone.items()][-MAX_GONE:]) | latest

    def _count(self, before: Mapping[str, float], totals: Mapping[str, float]) -> None:
        for tenant, total in totals.items():
            num_apart = len(self._tokens.keys() - {names.OTHER_TENANTS})
            is_apart = tenant in self._tokens or num_apart < self._most
            label = tenant if is_apart else names.OTHER_TENANTS
            growth = max(0.0, total - before.get(tenant, 0.0))
            self._tokens[label] = self._tokens.get(label, 0.0) + growth

    def family(self, tenant: str | None = None) -> Metric:
        """Return the counts of all tenants, or of one alone."""
        family = CounterMetricFamily(
            names.TENANT_TOKENS,
            "Tokens of prompts and completions of ended jobs, since this was first asked for",
            labels=["tenant"],
        )
        for label, tokens in self._tokens.items():
            if tenant in (None, label):
                family.add_metric([label], tokens)
        return family


def _totals(counts: object) -> dict[str, float]:
    """Read what a worker told: any client of Redis may have written it."""
    if not isinstance(counts, dict):
        return {}
    return {
        str(tenant): float(total)
        for tenant, total in counts.items()
        if isinstance(total, int | float)
    }

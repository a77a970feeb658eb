"""Tokens by tenant keep to few labels, and no label's count ever goes back."""

import random

from penstock.gateway.metrics.lane_metrics import LaneReport
from penstock.gateway.metrics.tenant_tokens import TenantTokens
from penstock.schemas.delivery import LaneStatus, WorkerStatus
from penstock.schemas.model import WorkerCard

LANE = LaneStatus(num_queued=0, num_running=1, num_ended=0, interval_ms=0)


def seen(**workers: dict[str, int]) -> list[LaneReport]:
    """Two lanes of workers that serve both, each named after its process."""
    statuses = [
        WorkerStatus(
            worker=f"{name}-{random.random()}",
            card=WorkerCard(),
            stats={"counts_of": name, "tenant_tokens": {**totals}},
            lease_left_ms=9,
        )
        for name, totals in workers.items()
    ]
    return [LaneReport("m", number, LANE, statuses) for number in ("0", "1")]


def labels(tokens: TenantTokens) -> dict[str, float]:
    return {each.labels["tenant"]: each.value for each in tokens.family().samples}


def test_ten_thousand_tenants_have_few_labels_that_only_grow() -> None:
    rng = random.Random(1)
    tokens, last = TenantTokens(20), dict[str, float]()
    totals: dict[str, dict[str, int]] = {"a": {}, "b": {}}
    tokens.take(seen())
    for _ in range(10):
        for told in totals.values():
            for _ in range(1000):
                tenant = f"t{rng.randrange(10_000)}"
                told[tenant] = told.get(tenant, 0) + rng.randrange(100)
        tokens.take(seen(**totals))
        now = labels(tokens)
        assert len(now) <= 21
        assert all(now[tenant] >= count for tenant, count in last.items())
        last = now
    assert sum(last.values()) == sum(sum(told.values()) for told in totals.values())
    assert "other" in last


def test_a_worker_counts_once_through_lost_leases_and_what_was_before_does_not() -> None:
    tokens = TenantTokens(2)
    tokens.take(seen(a={"x": 100}))
    tokens.take(seen(a={"x": 103}))
    tokens.take(seen())  # between two leases
    tokens.take(seen(a={"x": 105}, b={"x": 7}))
    assert labels(tokens) == {"x": 5 + 7}


def test_without_names_all_share_one_label() -> None:
    tokens = TenantTokens(0)
    tokens.take(seen())
    tokens.take(seen(a={"x": 1, "y": 2, "other": 3}))
    assert labels(tokens) == {"other": 6}

"""Figures of workers that serve several lanes, leave, are of another version, or tell nonsense."""

import pytest
from prometheus_client import Metric
from pydantic import JsonValue

from penstock.gateway.metrics.lane_metrics import LaneMetrics, LaneReport
from penstock.gateway.metrics.overview import latencies, models, workers
from penstock.schemas.delivery import LaneStatus, WorkerStatus
from penstock.schemas.metrics import names
from penstock.schemas.model import WorkerCard

EMPTY = LaneStatus(num_queued=0, num_running=0, num_ended=0, interval_ms=0)


def worker(name: str, tokens: int, left_ms: int = 9, first: str = "a") -> WorkerStatus:
    """It made so many tokens, each after 0.02 s."""
    counts = {"histograms": {"inter_token_seconds": [tokens / 50, 0, tokens]}}
    stats: dict[str, JsonValue] = {"model": {"generation_tokens": tokens, **counts}}
    return WorkerStatus(
        worker=name, card=WorkerCard(model=first), stats=stats, lease_left_ms=left_ms
    )


def value(lanes: list[LaneReport], name: str, **labels: str) -> float:
    families: list[Metric] = [*LaneMetrics(lanes).collect()]
    samples = [each for family in families for each in family.samples if each.name == name]
    return sum(each.value for each in samples if labels.items() <= each.labels.items())


def test_a_model_made_what_its_living_workers_made_of_it() -> None:
    some = [worker("w", 5), worker("v", 7), worker("gone", 100, left_ms=-1)]
    lanes = [LaneReport("a", number, EMPTY, some) for number in ("0", "1")]
    lanes.append(LaneReport("b", "0", EMPTY, [worker("w", 2)]))
    shown = {
        each["name"]: (each["num_workers"], each["generation_tokens"]) for each in models(lanes)
    }
    assert shown == {"a": (2, 12), "b": (1, 2)}
    itl = latencies(lanes)["itl"]
    assert isinstance(itl, dict) and isinstance(counts := itl["counts"], dict)
    assert {model: each[-1] for model, each in counts.items() if isinstance(each, list)} == {
        "a": 12,
        "b": 2,
    }
    served = {each["worker"]: each["models"] for each in workers(lanes)}
    assert served == {"w": ["a", "b"], "v": ["a"], "gone": ["a"]}
    assert value(lanes, names.WORKERS_ALIVE) == value(lanes, names.WORKERS_ALIVE, model_name="a")
    assert value(lanes, names.WORKERS_ALIVE) == 2
    assert value(lanes, names.LANE_WORKERS) == 5


def test_a_worker_that_lost_one_lane_is_judged_by_its_later_beat() -> None:
    late, lost = worker("w", 5), worker("w", 4, left_ms=-1)
    for pair in ((late, lost), (lost, late)):
        lanes = [LaneReport("a", str(at), EMPTY, [each]) for at, each in enumerate(pair)]
        assert value(lanes, names.WORKERS_ALIVE) == 1
        assert value(lanes, "vllm:generation_tokens_total") == 5


def test_a_model_that_nobody_serves_is_at_none_and_an_alias_is_not() -> None:
    lanes = [LaneReport("a", "0", EMPTY, []), LaneReport("b", "0", EMPTY, [worker("w", 1, 9, "c")])]
    families = {each.name: each for each in LaneMetrics(lanes).collect()}
    shown = {
        each.labels["model_name"]: each.value for each in families[names.WORKERS_ALIVE].samples
    }
    assert shown == {"a": 0, "c": 1}


@pytest.mark.parametrize("told", [None, 1, "x", [], {}, {"histograms": 3, "finish_reasons": [1]}])
def test_what_another_version_or_anybody_wrote_costs_no_figure_of_others(told: JsonValue) -> None:
    odd = WorkerStatus(worker="v", card=WorkerCard(), stats={"model": told}, lease_left_ms=9)
    lanes = [LaneReport("a", "0", EMPTY, [odd, worker("w", 5)])]
    assert value(lanes, "vllm:generation_tokens_total") == 5
    assert value(lanes, f"{names.INTER_TOKEN_SECONDS}_count") == 5
    assert value(lanes, names.WORKERS_ALIVE, model_name="a") == 2
    assert models(lanes)[0]["generation_tokens"] == 5

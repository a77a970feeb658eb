"""The yardsticks themselves."""

import pytest

from penstock.loadtest.lab.memory import measure
from penstock.loadtest.requests.measurement import Measurement, Timeline
from penstock.loadtest.requests.workload import workloads


def test_blocks_waste_under_4_percent_where_contiguous_regions_waste_most() -> None:
    waste = measure()
    assert waste.mean_tokens == pytest.approx(600, rel=0.05)
    assert waste.paged_share < 0.04
    assert waste.contiguous_share > 0.6
    assert waste.paged_running > 2 * waste.contiguous_running


def test_the_workloads_are_the_same_every_time() -> None:
    mixed, shared = workloads()["W"], workloads()["P"]
    assert sum(len(request.prompt) for request in mixed) == 10_183
    assert sum(request.max_tokens for request in mixed) == 6_870
    assert len({tuple(request.prompt[:512]) for request in shared}) == 1
    assert len({tuple(request.prompt[512:]) for request in shared}) == 64


def test_a_small_vocabulary_folds_the_ids_and_keeps_the_lengths() -> None:
    small, large = workloads(4096)["W"], workloads()["W"]
    assert [len(one.prompt) for one in small] == [len(one.prompt) for one in large]
    assert all(10 <= token < 4096 for one in small for token in one.prompt)


def test_figures_follow_from_the_times() -> None:
    one = Timeline(begin_s=1.0, num_prompt=3, tokens_s=[1.5, 1.6, 1.9])
    two = Timeline(begin_s=1.0, num_prompt=3, tokens_s=[2.0])
    found = Measurement([one, two], wall_s=2.0)
    assert found.tokens_per_s == 2.0
    assert found.ttft_ms(50) == pytest.approx(750)
    assert found.itl_ms(100) == pytest.approx(300)

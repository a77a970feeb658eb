"""How load comes: arrivals, ramps, traces; latencies from when a request was due; goodput."""

import asyncio
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from penstock.loadtest.errors import BadOption
from penstock.loadtest.requests.drive import drive
from penstock.loadtest.requests.measurement import Depth, Measurement, Timeline
from penstock.loadtest.requests.trace import read_trace
from penstock.loadtest.requests.way import Ramp, Way, arrivals_s
from penstock.loadtest.requests.workload import Request
from penstock.schemas.event import Delta


def gaps(way: Way, count: int = 4000) -> np.ndarray:
    return np.diff(arrivals_s(count, way))


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 5.0])
def test_arrivals_are_gamma_distributed(burstiness: float) -> None:
    """The mean is the rate's, the variation 1 / sqrt(shape): for Poisson arrivals 1."""
    found = gaps(Way(request_rate=20, burstiness=burstiness, seed=3))
    assert found.mean() == pytest.approx(1 / 20)
    assert found.std() / found.mean() == pytest.approx(burstiness**-0.5, rel=0.1)
    if burstiness == 1.0:  # so many gaps are longer than the mean where they are exponential
        assert np.mean(found > found.mean()) == pytest.approx(np.exp(-1), abs=0.03)


def test_a_seed_gives_the_same_arrivals_and_another_seed_others() -> None:
    ways = [Way(request_rate=5, seed=seed) for seed in (1, 1, 2)]
    first, again, other = (arrivals_s(50, way) for way in ways)
    assert first == again != other


@pytest.mark.parametrize("strategy, middle", [("linear", 52.0), ("exponential", 20.0)])
def test_a_ramp_goes_from_its_first_rate_to_its_last(strategy: str, middle: float) -> None:
    ramp = Ramp("linear" if strategy == "linear" else "exponential", 4.0, 100.0)
    found = gaps(Way(ramp=ramp, burstiness=1e6))
    rates = [1 / found[at : at + 4].mean() for at in (0, 1998, 3995)]
    assert rates == pytest.approx([4.0, middle, 100.0], rel=0.02)


class Slow:
    """A server that answers one request after another, each after `took_s`."""

    base_url = "nowhere"

    def __init__(self, took_s: float) -> None:
        self._took_s = took_s
        self._lock = asyncio.Lock()

    async def first_model(self) -> str:
        return "x"

    async def ask(
        self, model: str, request: Request, way: Way, begin_s: float | None = None
    ) -> Timeline:
        now_s = asyncio.get_running_loop().time()
        timeline = Timeline(now_s if begin_s is None else begin_s, 1, sent_s=now_s)
        async with self._lock:
            await asyncio.sleep(self._took_s)
        timeline.end_s = asyncio.get_running_loop().time()
        timeline.tokens_s = [timeline.end_s]
        return timeline

    async def log(self, job_id: str) -> list[Delta] | None:
        return None

    async def depth(self) -> Depth | None:
        return None


def test_in_an_open_loop_a_request_counts_from_when_it_was_due() -> None:
    """Ten are due at once, and one at a time is let through: the last has waited for nine."""
    requests = [Request([1], 1, due_s=0.0) for _ in range(10)]
    found = asyncio.run(drive(Slow(0.02), "x", requests, Way(max_concurrency=1)))
    took = sorted(found.latencies_ms("e2el"))
    assert took[-1] > 9 * 20 and took[0] < took[-1] / 4
    assert found.late_ms(100) > 8 * 20
    rated = Way(request_rate=1000, max_concurrency=1)
    found = asyncio.run(drive(Slow(0.02), "x", [Request([1], 1)] * 10, rated))
    assert max(found.latencies_ms("e2el")) > 8 * 20


def test_in_a_closed_loop_it_counts_from_when_it_was_sent() -> None:
    found = asyncio.run(drive(Slow(0.02), "x", [Request([1], 1)] * 10, Way(max_concurrency=1)))
    assert np.median(found.latencies_ms("e2el")) < 3 * 20
    assert found.late_ms(100) == 0


def test_goodput_counts_the_requests_that_kept_every_goal() -> None:
    def one(ttft_s: float, gap_s: float, error: str = "") -> Timeline:
        return Timeline(
            1.0, 1, [1 + ttft_s, 1 + ttft_s + gap_s, 1 + ttft_s + 2 * gap_s], error=error
        )

    good, late, slow = one(0.1, 0.04), one(0.3, 0.04), one(0.1, 0.06)
    found = Measurement([good, late, slow, one(0.1, 0.04, "it broke"), good], wall_s=4.0)
    assert found.goodput({"ttft": 200, "tpot": 50, "e2el": 2000}) == 2 / 4
    assert found.goodput({"ttft": 400}) == 4 / 4
    assert found.goodput({"e2el": 200}) == 2 / 4
    assert found.goodput({"itl": 50}) == 3 / 4


MOONCAKE = """\
{"timestamp": 27482, "input_length": 700, "output_length": 52, "hash_ids": [46, 47]}

{"timestamp": 27000, "input_length": 1000, "output_length": 3, "hash_ids": [46, 99]}
{"timestamp": 30000, "input_length": 5, "output_length": 1}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,374,44
2023-11-16 18:17:04.4799600,4,9
"""


def test_a_trace_has_its_times_lengths_and_what_prompts_share(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE)
    first, second, third = read_trace(path, 5000, speed=2.0)
    assert [first.due_s, second.due_s, third.due_s] == pytest.approx([0.0, 0.241, 1.5])
    assert [len(each.ids) for each in (first, second, third)] == [1000, 700, 5]
    assert [each.max_tokens for each in (first, second, third)] == [3, 52, 1]
    assert first.ids[:512] == second.ids[:512] and first.ids[512:600] != second.ids[512:600]
    assert max(first.ids) < 5000
    assert len(read_trace(path, 5000, most=1)) == 1


def test_azures_traces_are_read_too(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    first, second = read_trace(path, 5000)
    assert (len(first.ids), first.max_tokens, len(second.ids)) == (374, 44, 4)
    assert second.due_s == pytest.approx(0.5)


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("t.jsonl", '{"timestamp": 1, "input_length": 0, "output_length": 1}', "$.input_length"),
        ("t.jsonl", '{"timestamp": 1, "input_length": 4}', "output_length"),
        ("t.jsonl", "\n", "empty"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nnever,1,2\n", "line 2"),
        ("t.csv", "a,b\n1,2\n", "GeneratedTokens"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(BadOption, match="dataset-path") as refused:
        read_trace(tmp_path / name, 5000)
    assert said in str(refused.value)


def test_requests_of_a_trace_are_sent_at_their_times() -> None:
    requests = [Request([1], 1, due_s=at_s) for at_s in (0.0, 0.1, 0.2)]
    found = asyncio.run(drive(Slow(0.0), "x", requests, Way()))
    begun = [each.begin_s for each in found.timelines]
    assert [after - before for before, after in pairwise(begun)] == pytest.approx([0.1, 0.1])

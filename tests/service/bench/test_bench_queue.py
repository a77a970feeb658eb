"""The queue's own bench: that it measures what it says, not how fast."""

import asyncio
import json
from pathlib import Path

import numpy as np

from penstock.loadtest.lab import queue
from penstock.loadtest.lab.engines.queue_path import delivery, in_process, sse
from penstock.loadtest.requests.workload import Request
from penstock.schemas.params.sampling import SamplingParams
from penstock.worker.engine.fake import Stamps, fake_engine
from penstock.worker.engine.io.messages import AddSequence


def test_every_token_of_the_fake_engine_is_stamped_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "stamps"
    path.touch()
    engine = fake_engine(None, 4, 16, 0.0, stamps=path)
    for number in (3, 250):
        prompt = list(f"x {number:03d}".encode())
        params = SamplingParams(max_tokens=9, ignore_eos=True)
        engine.add(AddSequence(str(number), prompt, params))
    while engine.busy:
        engine.step()
    stamps = Stamps(path)
    for number in (3, 250):
        row = np.array(stamps.row(number))
        assert np.all(np.diff(row[:9]) >= 0) and np.all(row[:9] > 0)
        assert not row[9:].any()
    assert not any(stamps.row(4))


def test_what_is_delivered_came_after_it_was_made() -> None:
    figures = asyncio.run(delivery(3, 20))
    assert 0 < figures["p50_ms"] <= figures["p99_ms"]
    assert figures["worker_us"] >= 0


def test_the_gateway_answers_the_streams_whose_cost_is_measured() -> None:
    assert asyncio.run(sse(8, 200))["us"] > 0


def test_the_engine_in_process_makes_what_was_asked() -> None:
    measured = in_process([Request([50], 5), Request([51], 3)])
    assert [len(timeline.tokens_s) for timeline in measured.timelines] == [5, 3]


def test_the_table_has_goal_and_verdict_and_the_file_the_figures(
    tmp_path: Path,
) -> None:
    path = tmp_path / "figures.json"
    assert queue.main(["--only", "jobs put", "--num-tokens", "10", "--json-file", str(path)]) == 0
    written = json.loads(path.read_text())
    assert len(written) == 3  # one for each durability
    for line in written:
        assert line["jobs_per_s"] > 0 and 0 <= line["others"] <= 1.1

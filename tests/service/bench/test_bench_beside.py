"""`penstock bench beside`: the same arrivals alone and beside a batch."""

import json
from pathlib import Path

import pytest

from penstock.loadtest import bench


@pytest.mark.slow
def test_callers_are_measured_alone_and_beside_a_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "found.json"
    words = [
        "--model",
        "fake",
        "--load-format",
        "fake",
        "--num-prompts",
        "32",
        "--num-lines",
        "9000",
    ]
    words += [
        "--rounds",
        "2",
        "--request-rate",
        "8",
        "--output-len",
        "9",
        "--output-json",
        str(found),
    ]
    assert bench.main(["beside", *words]) == 0
    written = json.loads(found.read_text())
    for each in ("alone", "beside"):
        assert 0 < written[each]["median_ttft_ms"] <= written[each]["p99_ttft_ms"]
    low, high = written["ratios_95"]["p99_ttft_ms"]
    assert 0 < low <= high
    assert written["lines"] > 0 and written["batch_output_throughput"] > 0
    said = capsys.readouterr().out
    assert "beside the batch" in said and "p99_ttft_ms" in said

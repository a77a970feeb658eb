"""`penstock bench scale`: many streams, each proved, and a table of costs by depth."""

import json
from pathlib import Path

import pytest

from penstock.loadtest import bench


@pytest.mark.slow
def test_streams_and_depths_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "found.json"
    words = ["--model", "fake", "--load-format", "fake", "--num-streams", "40", "--num-tokens", "9"]
    words += ["--depths", "60,200", "--num-tenants", "7", "--output-json", str(found)]
    assert bench.main(["scale", *words]) == 0
    written = json.loads(found.read_text())
    streams = written["streams"]
    assert (streams["streams"], streams["failed"], streams["lost_tokens"]) == (40, 0, 0)
    assert streams["total_output_tokens"] == 40 * 9
    few, many = written["queue"]
    assert (few["num_waiting"], many["num_waiting"]) == (60, 200)
    for call in ("status", "counts", "sweep", "reap", "enqueue", "claim"):
        assert few[call]["commands"] >= 1 and few[call]["script_us"] > 0
        assert many[call]["commands"] <= 2 * few[call]["commands"] + 10, call
    assert 300 < many["memory_bytes_a_job"] < 20_000
    assert "last / first" in capsys.readouterr().out

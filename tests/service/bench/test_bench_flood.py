"""`penstock bench flood`: one tenant's arrivals alone, and beside another who floods."""

import json
from pathlib import Path

import pytest

from penstock.loadtest import bench
from penstock.loadtest.lab.requests.floods import KINDS
from penstock.schemas.process.exit_status import BAD_USAGE

FAKE = ["--model", "fake", "--load-format", "fake"]


@pytest.mark.slow
def test_one_tenant_is_measured_alone_and_beside_each_flood(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "found.json"
    words = [*FAKE, "--num-prompts", "12", "--request-rate", "8", "--rounds", "1"]
    assert bench.main(["flood", *words, "--output-json", str(found)]) == 0
    floods = json.loads(found.read_text())["floods"]
    assert [*floods] == [*KINDS]
    for kind, each in floods.items():
        for side in ("alone", "beside"):
            assert 0 < each[side]["median_ttft_ms"] <= each[side]["p99_ttft_ms"]
        low, high = each["p99_ttft_ratio_95"]
        assert 0 < low <= high and each["p99_ttft_ratio"] > 0
        assert kind == "long jobs" or each["answered"] > 0
    assert floods["storage"]["refused"] > 0  # past its quota
    assert "p99 TTFT of one tenant" in capsys.readouterr().out


def test_an_unknown_kind_of_flood_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["flood", *FAKE, "--kinds", "water"]) == BAD_USAGE
    assert "kinds: 'water' is none of readers, storage" in capsys.readouterr().err

"""`penstock bench sweep`: a point for each load and server, as table, JSON and plot."""

import json
import sys
from pathlib import Path

import pytest

from penstock.loadtest import bench

FAKE = ["sweep", "--model", "fake", "--load-format", "fake", "--fake-step-ms", "1"]
FAKE += ["--dataset-name", "random", "--input-len", "9", "--output-len", "12"]


def test_each_load_is_a_point(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot, found = tmp_path / "plot.svg", tmp_path / "found.json"
    words = ["--concurrencies", "1,3", "--plot", str(plot), "--output-json", str(found)]
    assert bench.main([*FAKE, *words]) == 0
    points = json.loads(found.read_text())["points"]
    assert [(point["load"], point["completed"]) for point in points] == [("1", 8), ("3", 24)]
    assert all(point["failed"] == 0 and point["output_throughput"] > 0 for point in points)
    assert all(point["p99_ttft_ms"] >= point["median_ttft_ms"] > 0 for point in points)
    assert "tokens/s" in capsys.readouterr().out
    drawn = plot.read_text()
    assert drawn.lstrip().startswith("<?xml") and drawn.rstrip().endswith("</svg>")


def test_loads_may_be_rates(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    words = ["--request-rates", "50,100", "--num-prompts", "5", "--output-json", str(found)]
    assert bench.main([*FAKE, *words]) == 0
    points = json.loads(found.read_text())["points"]
    assert [(point["load"], point["completed"]) for point in points] == [("50/s", 5), ("100/s", 5)]


def test_without_matplotlib_a_plot_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert bench.main([*FAKE, "--plot", "x.png"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'penstock[bench]'" in line


@pytest.mark.parametrize(
    "words, said",
    [
        (["--plot", "x.jpeg"], ".png, .svg or .pdf"),
        (["--concurrencies", "0"], "--concurrencies"),
        (["--request-rates", "x"], "--request-rates"),
        (["--url", "http://127.0.0.1:9"], "name=http"),
    ],
    ids=str,
)
def test_a_bad_option_is_one_line(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    try:
        status = bench.main([*FAKE, *words])
    except SystemExit as ended:
        assert isinstance(ended.code, int)
        status = ended.code
    assert status == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("penstock bench sweep: ") and said in line

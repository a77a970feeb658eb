"""`penstock bench sweep`: a point for each load and server, as table, JSON and plot."""

import json
import sys
from pathlib import Path

import pytest

from penstock.loadtest import bench
from penstock.loadtest.report.points import Point, is_past_the_knee, knee, told_of_loads
from penstock.loadtest.requests.measurement import Measurement, Timeline

FAKE = ["sweep", "--model", "fake", "--load-format", "fake", "--fake-step-ms", "1"]
FAKE += ["--dataset-name", "random", "--input-len", "9", "--output-len", "12"]


@pytest.mark.slow
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


def one_load(load: float, tokens_per_s: float, latency_s: float) -> Point:
    """Ten requests that took so long, of which the first was due at 0."""
    ended = [Timeline(0.0, 1, [latency_s], 10, end_s=latency_s) for _ in range(10)]
    return Point("x", f"{load:g}/s", load, Measurement(ended, 100 / tokens_per_s), {"e2el": 1500.0})


def test_the_knee_is_where_latency_begins_to_grow_faster_than_throughput() -> None:
    points = [one_load(1, 100, 1.0), one_load(2, 190, 1.1), one_load(4, 240, 2.0)]
    assert knee(points).load == 2
    assert not is_past_the_knee(points[:2]) and not is_past_the_knee(points[:1])
    assert is_past_the_knee([*points, one_load(8, 245, 4.0)])
    at_knee, good = told_of_loads(points, {"e2el": 1500.0})
    assert "the knee is at 2/s" in at_knee and good.endswith("keep e2el:1500: 2/s")
    assert "it stands more load" in next(told_of_loads(points[:2], {}))


@pytest.mark.slow
def test_rates_double_until_the_knee_is_passed(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    words = ["--request-rates", "200", "--to-knee", "--num-prompts", "20", "--max-num-seqs", "4"]
    assert bench.main([*FAKE, *words, "--output-json", str(found)]) == 0
    written = json.loads(found.read_text())
    loads = [float(point["load"].removesuffix("/s")) for point in written["points"]]
    assert len(loads) >= 4 and loads == sorted(loads) and {200, 400} <= set(loads)
    assert written["told"]


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

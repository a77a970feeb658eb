"""A page of results has their figures, and two results stand beside each other."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from penstock.loadtest import bench
from penstock.loadtest.report.svg import Axis, Curve, plot

RUN: dict[str, object] = {
    "date": "20261125-120000",
    "machine": {"cpu": "One <CPU>", "cores": 2},
    "backend": "openai",
    "model_id": "m/penstock-5m",
    "dataset_name": "random",
    "num_prompts": 3,
    "request_rate": 4.0,
    "max_concurrency": None,
    "completed": 3,
    "failed": 0,
    "output_throughput": 1234.5,
    "request_throughput": 4.25,
    "median_ttft_ms": 31.25,
    "p99_ttft_ms": 77.0,
    "median_itl_ms": 5.5,
    "p99_itl_ms": 9.0,
    "lost_tokens": 0,
    "repeated_tokens": 0,
    "foreign_tokens": 0,
    "unproved_streams": 0,
    "queue_depth": [[0.0, 0, 1], [0.5, 7, 3]],
    "input_lens": [9, 9, 9],
    "output_lens": [3, 3, 3],
    "ttfts": [0.03, 0.02, 0.07],
    "itls": [[0.005, 0.006], [0.0, 0.009], [0.004, 0.005]],
    "latencies": [0.5, 4.25, 0.75],
    "start_times": [10.0, 10.1, 10.2],
    "sent_times": [10.0, 10.3, 10.2],
    "job_ids": ["job_fast", "job_slowest", "job_middle"],
    "trace_ids": ["aa", "bb" * 16, "cc"],
    "errors": ["", "", "<b>it broke</b>"],
}


def written(folder: Path, name: str, **changed: object) -> str:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(RUN | changed))
    return str(path)


class Shown(HTMLParser):
    """The text of a page, and whether each element that it opens is closed."""

    VOID = ("meta", "br")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.opened: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.opened.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def reported(folder: Path, *names: str) -> str:
    page = folder / "page.html"
    assert bench.main(["report", *names, "--output", str(page)]) == 0
    return page.read_text()


def test_a_page_has_the_figures_and_names_the_slowest_request_first(tmp_path: Path) -> None:
    page = reported(tmp_path, written(tmp_path, "run"))
    shown = Shown(page)
    assert not shown.opened
    text = "\n".join(shown.texts)
    for figure in ("1,234", "4.25", "31.2", "77", "One <CPU>, 2 cores", "4,250", "200"):
        assert figure in text, figure
    assert "tokens lost 0, repeated 0, foreign 0" in text
    assert "<b>" not in page and "<b>it broke</b>" in text
    jobs = [each for each in shown.texts if each.startswith("job_")]
    assert jobs == ["job_slowest", "job_middle", "job_fast"]
    assert "bb" * 16 in shown.texts
    titles = ("TTFT: percent", "ITL: percent", "E2EL: percent", "Requests in the server")
    assert all(title in text for title in titles) and "Throughput" not in text
    assert not re.search(r"(src|href|url\()", page), "it loads nothing"


def test_several_results_are_a_line_of_throughput_against_latency(tmp_path: Path) -> None:
    other = written(tmp_path, "b", request_rate=8.0, output_throughput=2000.0, lost_tokens=2)
    page = reported(tmp_path, written(tmp_path, "a"), other)
    assert "Throughput against TTFT" in page and ">8/s</text>" in page and ">4/s</text>" in page
    assert re.search(r'<p class="bad">b: tokens lost 2', page)
    assert re.search(r'<p class="good">a: tokens lost 0', page)


def test_a_sweep_is_reported_with_what_it_says_of_the_knee(tmp_path: Path) -> None:
    point = {"server": "Penstock", "load": "8/s", "output_throughput": 50.0, "median_ttft_ms": 3.0}
    swept = tmp_path / "sweep.json"
    more = {**point, "load": "16/s", "output_throughput": 80.0, "median_ttft_ms": 9.0}
    swept.write_text(json.dumps({"points": [point, more], "told": ["the knee is at 8/s"]}))
    page = reported(tmp_path, str(swept))
    assert "the knee is at 8/s" in page and ">16/s</text>" in page


def test_places_on_an_axis_follow_from_the_values() -> None:
    linear, logarithmic = Axis("", 0, 10, 100, 200), Axis("", 1, 100, 0, 200, is_log=True)
    assert [linear.at(value) for value in (0, 5, 10, 20)] == [100, 150, 200, 200]
    assert [logarithmic.at(value) for value in (0.0, 1, 10, 100)] == pytest.approx([0, 0, 100, 200])
    assert logarithmic.ticks() == [1, 2, 5, 10, 20, 50, 100]
    assert linear.ticks() == pytest.approx([0, 2, 4, 6, 8, 10])
    assert plot([Curve("none", [], 0)], "x", "y") == ""


def test_two_results_stand_beside_each_other_with_ratios_and_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = {"output_throughput": 2469.0, "median_ttft_ms": 62.5, "num_prompts": 6}
    other = written(tmp_path, "after", machine={"cpu": "Two", "cores": 2}, **changed)
    assert bench.main(["diff", written(tmp_path, "before"), other]) == 0
    said = capsys.readouterr().out
    assert re.search(r"output_throughput +│ +1,234.50 │ +2,469 │ +2.00 │ +better", said)
    assert re.search(r"median_ttft_ms +│ +31.25 │ +62.50 │ +2.00 │ +worse", said)
    assert re.search(r"p99_ttft_ms +│ +77 │ +77 │ +1.00 │ +│", said)
    assert "The machines differ:\n  cpu: One <CPU> | Two\n" in said
    assert "Not the same was asked:\n  num_prompts: 3 | 6\n" in said
    assert bench.main(["diff", written(tmp_path, "before"), written(tmp_path, "same")]) == 0
    assert "differ" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "text, said",
    [("{", "not JSON"), ("[]", "no figures"), ('{"machine": {}}', "no figures"), (None, "No such")],
)
@pytest.mark.parametrize("command", ["diff", "report"])
def test_what_is_no_result_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, text: str | None, said: str
) -> None:
    path = tmp_path / "bad.json"
    if text is not None:
        path.write_text(text)
    assert bench.main([command, written(tmp_path, "good"), str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"penstock bench {command}: ") and said in line

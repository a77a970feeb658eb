"""A page of results: one HTML file that loads nothing, with plots and the slowest requests."""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

import numpy as np

from penstock.loadtest.report.result_file import ResultFile, differences
from penstock.loadtest.report.svg import NUM_COLOURS, Curve, number, plot

_PERCENTS = [*np.arange(0, 99, 0.5), *np.arange(99, 100, 0.1), 100.0]
_NUM_SLOWEST = 10
_MOST_RATIO = 1000  # the longest time to the shortest drawn; shorter ones are at the left edge
_COLUMNS = (
    ("tokens/s", "output_throughput"),
    ("requests/s", "request_throughput"),
    ("goodput/s", "request_goodput"),
    ("TTFT ms p50", "median_ttft_ms"),
    ("p99", "p99_ttft_ms"),
    ("ITL ms p50", "median_itl_ms"),
    ("p99", "p99_itl_ms"),
    ("E2EL ms p50", "median_e2el_ms"),
    ("p99", "p99_e2el_ms"),
    ("failed", "failed"),
)
_WRONG = ("lost_tokens", "repeated_tokens", "foreign_tokens", "unproved_streams")


def write_report(path: Path, results: Sequence[ResultFile]) -> None:
    path.write_text(page(results))


def page(results: Sequence[ResultFile]) -> str:
    style = Path(__file__).with_name("page.css").read_text()
    parts = [_head(results), _table(results), _plots(results), *map(_slowest, results)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(_title(results))}</title><style>\n{style}</style></head>"
        f"<body><main>{''.join(part for part in parts if part)}</main></body></html>\n"
    )


def _title(results: Sequence[ResultFile]) -> str:
    return "Load test: " + ", ".join(one.name for one in results)


def _head(results: Sequence[ResultFile]) -> str:
    lines = [f"<h1>{escape(_title(results))}</h1>"]
    machines = {_machine(one): None for one in results if one.machine}
    lines += [f'<p class="soft">{escape(each)}</p>' for each in machines]
    lines += [f'<p class="soft">{escape(_asked(one))}</p>' for one in results if _asked(one)]
    first, *rest = results
    if any(differences(first, other)[0] for other in rest):
        lines.append('<p class="bad">Not all of it was measured on the same machine.</p>')
    lines += map(_tokens, results)
    lines += [f"<p>{escape(each)}</p>" for one in results for each in one.texts("told")]
    return f"<header>{''.join(lines)}</header>"


def _machine(one: ResultFile) -> str:
    machine = one.machine
    return f"{machine.get('cpu')}, {machine.get('cores')} cores"


def _asked(one: ResultFile) -> str:
    raw = one.raw
    if "model_id" not in raw:
        return ""
    model = Path(str(raw["model_id"])).name
    asked = f"{raw.get('num_prompts')} requests, {one.load}, {model} by {raw.get('backend')}"
    return f"{one.name}: {raw.get('date')}, {asked}"


def _tokens(one: ResultFile) -> str:
    figures = [each for _, _, each in one.series() if _WRONG[0] in each]
    if not figures:
        return ""
    counts = [int(sum(each[key] for each in figures)) for key in _WRONG]
    lost, repeated, foreign, unproved = counts
    told = f"{one.name}: tokens lost {lost}, repeated {repeated}, foreign {foreign}"
    if unproved:
        told += f"; of {unproved} streams it is not known"
    return f'<p class="{"bad" if any(counts) else "good"}">{escape(told)}</p>'


def _table(results: Sequence[ResultFile]) -> str:
    rows = [
        (f"{one.name}: {load}" if len(results) > 1 else f"{series}: {load}", figures)
        for one in results
        for series, load, figures in one.series()
    ]
    columns = [(head, key) for head, key in _COLUMNS if any(key in row for _, row in rows)]
    cells = "".join(f"<th>{head}</th>" for head, _ in columns)
    lines = [f"<th>load</th>{cells}"]
    for name, figures in rows:
        found = [figures.get(key) for _, key in columns]
        cells = "".join(f"<td>{'' if one is None else number(one)}</td>" for one in found)
        lines.append(f'<td class="text">{escape(name)}</td>{cells}')
    return _section("Figures", _table_of(lines))


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def _plots(results: Sequence[ResultFile]) -> str:
    drawn = [
        *_throughput_plots(results),
        _distribution(results, "ttfts", "TTFT", "requests"),
        _distribution(results, "itls", "ITL", "gaps between tokens"),
        _distribution(results, "latencies", "E2EL", "requests"),
        *_depth_plots(results),
    ]
    found = "".join(one for one in drawn if one)
    return _section("Plots", f'<div class="plots">{found}</div>' if found else "")


def _throughput_plots(results: Sequence[ResultFile]) -> Iterator[str]:
    """Yield throughput against latency, where there is more than one load."""
    points = [point for one in results for point in one.series()]
    if len(points) < 2:
        return
    points.sort(key=lambda point: point[0])
    for metric, title in (("ttft", "TTFT, ms"), ("itl", "ITL, ms")):
        lines = list[Curve]()
        for colour, (name, of_one) in enumerate(groupby(points, key=lambda point: point[0])):
            ordered = list(of_one)  # as in the files: a sweep's by their loads
            for key, told in ((f"median_{metric}_ms", ""), (f"p99_{metric}_ms", ", p99")):
                found = [point for point in ordered if key in point[2]]
                places = [(each["output_throughput"], each[key]) for _, _, each in found]
                labels = [] if told else [load for _, load, _ in found]
                lines.append(Curve(name + told, places, colour, labels, is_dotted=bool(told)))
        drawn = plot(lines, "output tokens a second", title, y_is_log=True)
        yield _figure(f"Throughput against {title[:4].rstrip(',')}", drawn, lines)


def _distribution(results: Sequence[ResultFile], key: str, name: str, of: str) -> str:
    lines = []
    for colour, one in enumerate(results):
        values = one.numbers(key)
        for of_one in one.list_of(key):
            values += of_one if isinstance(of_one, list) else []
        if values:
            least_s = max(values) / _MOST_RATIO
            places = np.percentile([max(value, least_s) * 1e3 for value in values], _PERCENTS)
            points = [(float(at), percent) for at, percent in zip(places, _PERCENTS, strict=True)]
            lines.append(Curve(one.name, points, colour))
    title = f"{name}: percent of {of} that took no longer"
    drawn = plot(lines, f"{name}, ms", "percent", x_is_log=True, y_high=100)
    return _figure(title, drawn, lines)


def _depth_plots(results: Sequence[ResultFile]) -> Iterator[str]:
    lines = list[Curve]()
    for colour, one in enumerate(results):
        seen = [each for each in one.list_of("queue_depth") if isinstance(each, list)]
        own = f"{one.name}, " if len(results) > 1 else ""
        for column, state in ((1, "waiting"), (2, "running")):
            points = [(float(each[0]), float(each[column])) for each in seen]
            dotted = state == "running"
            lines.append(Curve(own + state, points, colour, is_dotted=dotted, is_stepped=True))
    drawn = plot(lines, "seconds since the first request", "requests")
    yield _figure("Requests in the server", drawn, lines)


def _figure(title: str, drawn: str, lines: Sequence[Curve]) -> str:
    if not drawn:
        return ""
    keys = "".join(
        f'<li class="c{line.colour % NUM_COLOURS}{" dotted" if line.is_dotted else ""}">'
        f"{escape(line.name)}</li>"
        for line in lines
        if len(line.points) > 1 or line.labels
    )
    return f'<figure><h3>{escape(title)}</h3>{drawn}<ul class="key">{keys}</ul></figure>'


def _slowest(one: ResultFile) -> str:
    """Return the requests that took longest, each with the ids by which it is found elsewhere."""
    took_s = one.numbers("latencies")
    if not took_s:
        return ""
    places = sorted(range(len(took_s)), key=lambda at: -took_s[at])[:_NUM_SLOWEST]
    begun, sent = one.numbers("start_times"), one.numbers("sent_times")
    ttfts, itls = one.numbers("ttfts"), one.list_of("itls")
    num_in, num_out = one.numbers("input_lens"), one.numbers("output_lens")
    jobs, traces, errors = one.texts("job_ids"), one.texts("trace_ids"), one.texts("errors")
    heads = ["job and trace", "due at s", "sent after ms", "TTFT ms", "longest gap ms", "E2EL ms"]
    heads += ["tokens in", "out", "until sent, first token, end"]
    rows = ["".join(f"<th>{head}</th>" for head in heads)]
    for at in places:
        gaps = itls[at] if at < len(itls) else []
        longest_s = max(gaps, default=0.0) if isinstance(gaps, list) else 0.0
        late_s = max(0.0, sent[at] - begun[at]) if sent else 0.0
        figures = [begun[at] - min(begun), late_s * 1e3, ttfts[at] * 1e3, longest_s * 1e3]
        cells = [number(each) for each in [*figures, took_s[at] * 1e3, num_in[at], num_out[at]]]
        ids = [escape(each[at]) for each in (jobs, traces) if each]
        bar = _bar(late_s, ttfts[at], took_s[at], max(took_s))
        last = f'<span class="bad">{escape(errors[at])}</span>' if errors and errors[at] else bar
        row = f'<td class="text"><code>{"<br>".join(ids)}</code></td>'
        row += "".join(f"<td>{cell}</td>" for cell in cells)
        rows.append(f'{row}<td class="text">{last}</td>')
    return _section(f"Slowest requests of {one.name}", _table_of(rows))


def _table_of(rows: Sequence[str]) -> str:
    lines = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="wide"><table>{lines}</table></div>'


def _bar(late_s: float, ttft_s: float, took_s: float, most_s: float) -> str:
    """Return a bar of three parts: until it was sent, until its first token, until its end."""
    ends = [0.0, late_s, max(ttft_s, late_s), took_s]
    parts = "".join(
        f'<rect class="bar c{colour}" x="{begin / most_s * 100:.2f}" y="0" height="8" '
        f'width="{(end - begin) / most_s * 100:.2f}"/>'
        for colour, begin, end in zip((4, 1, 0), ends, ends[1:], strict=False)
    )
    return f'<svg viewBox="0 0 100 8" preserveAspectRatio="none">{parts}</svg>'

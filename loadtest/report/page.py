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
    return "Load test: " + ", ".join(result.name for result in results)


def _head(results: Sequence[ResultFile]) -> str:
    lines = [f"<h1>{escape(_title(results))}</h1>"]
    machines = {_machine(result): None for result in results if result.machine}
    lines += [f'<p class="soft">{escape(machine)}</p>' for machine in machines]
    lines += [
        f'<p class="soft">{escape(_asked(result))}</p>' for result in results if _asked(result)
    ]
    first, *rest = results
    if any(differences(first, result)[0] for result in rest):
        lines.append('<p class="bad">Not all of it was measured on the same machine.</p>')
    lines += map(_tokens, results)
    lines += [f"<p>{escape(text)}</p>" for result in results for text in result.texts("told")]
    return f"<header>{''.join(lines)}</header>"


def _machine(result: ResultFile) -> str:
    machine = result.machine
    return f"{machine.get('cpu')}, {machine.get('cores')} cores"


def _asked(result: ResultFile) -> str:
    raw = result.raw
    if "model_id" not in raw:
        return ""
    model = Path(str(raw["model_id"])).name
    summary = f"{raw.get('num_prompts')} requests, {result.load}, {model} by {raw.get('backend')}"
    return f"{result.name}: {raw.get('date')}, {summary}"


def _tokens(result: ResultFile) -> str:
    figures = [row for _, _, row in result.series() if _WRONG[0] in row]
    if not figures:
        return ""
    counts = [int(sum(row[key] for row in figures)) for key in _WRONG]
    num_lost, num_repeated, num_foreign, num_unproved = counts
    text = f"{result.name}: tokens lost {num_lost}, repeated {num_repeated}, foreign {num_foreign}"
    if num_unproved:
        text += f"; of {num_unproved} streams it is not known"
    return f'<p class="{"bad" if any(counts) else "good"}">{escape(text)}</p>'


def _table(results: Sequence[ResultFile]) -> str:
    rows = [
        (f"{result.name}: {load}" if len(results) > 1 else f"{series}: {load}", figures)
        for result in results
        for series, load, figures in result.series()
    ]
    columns = [(head, key) for head, key in _COLUMNS if any(key in row for _, row in rows)]
    cells = "".join(f"<th>{head}</th>" for head, _ in columns)
    lines = [f"<th>load</th>{cells}"]
    for name, figures in rows:
        values = [figures.get(key) for _, key in columns]
        cells = "".join(f"<td>{'' if value is None else number(value)}</td>" for value in values)
        lines.append(f'<td class="text">{escape(name)}</td>{cells}')
    return _section("Figures", _table_of(lines))


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def _plots(results: Sequence[ResultFile]) -> str:
    parts = [
        *_throughput_plots(results),
        _distribution(results, "ttfts", "TTFT", "requests"),
        _distribution(results, "itls", "ITL", "gaps between tokens"),
        _distribution(results, "latencies", "E2EL", "requests"),
        *_depth_plots(results),
    ]
    content = "".join(part for part in parts if part)
    return _section("Plots", f'<div class="plots">{content}</div>' if content else "")


def _throughput_plots(results: Sequence[ResultFile]) -> Iterator[str]:
    """Yield throughput against latency, where there is more than one load."""
    points = [point for result in results for point in result.series()]
    if len(points) < 2:
        return
    points.sort(key=lambda point: point[0])
    for metric, title in (("ttft", "TTFT, ms"), ("itl", "ITL, ms")):
        lines = list[Curve]()
        for colour, (name, of_one) in enumerate(groupby(points, key=lambda point: point[0])):
            series = list(of_one)  # as in the files: a sweep's by their loads
            for key, suffix in ((f"median_{metric}_ms", ""), (f"p99_{metric}_ms", ", p99")):
                marks = [point for point in series if key in point[2]]
                places = [(figures["output_throughput"], figures[key]) for _, _, figures in marks]
                labels = [] if suffix else [load for _, load, _ in marks]
                lines.append(Curve(name + suffix, places, colour, labels, is_dotted=bool(suffix)))
        svg = plot(lines, "output tokens a second", title, y_is_log=True)
        yield _figure(f"Throughput against {title[:4].rstrip(',')}", svg, lines)


def _distribution(results: Sequence[ResultFile], key: str, name: str, of: str) -> str:
    lines = []
    for colour, result in enumerate(results):
        values = result.numbers(key)
        for of_one in result.list_of(key):
            values += of_one if isinstance(of_one, list) else []
        if values:
            least_s = max(values) / _MOST_RATIO
            places = np.percentile([max(value, least_s) * 1e3 for value in values], _PERCENTS)
            points = [(float(at), percent) for at, percent in zip(places, _PERCENTS, strict=True)]
            lines.append(Curve(result.name, points, colour))
    title = f"{name}: percent of {of} that took no longer"
    svg = plot(lines, f"{name}, ms", "percent", x_is_log=True, y_high=100)
    return _figure(title, svg, lines)


def _depth_plots(results: Sequence[ResultFile]) -> Iterator[str]:
    lines = list[Curve]()
    for colour, result in enumerate(results):
        depths = [depth for depth in result.list_of("queue_depth") if isinstance(depth, list)]
        own = f"{result.name}, " if len(results) > 1 else ""
        for column, state in ((1, "waiting"), (2, "running")):
            points = [(float(depth[0]), float(depth[column])) for depth in depths]
            dotted = state == "running"
            lines.append(Curve(own + state, points, colour, is_dotted=dotted, is_stepped=True))
    svg = plot(lines, "seconds since the first request", "requests")
    yield _figure("Requests in the server", svg, lines)


def _figure(title: str, svg: str, lines: Sequence[Curve]) -> str:
    if not svg:
        return ""
    keys = "".join(
        f'<li class="c{line.colour % NUM_COLOURS}{" dotted" if line.is_dotted else ""}">'
        f"{escape(line.name)}</li>"
        for line in lines
        if len(line.points) > 1 or line.labels
    )
    return f'<figure><h3>{escape(title)}</h3>{svg}<ul class="key">{keys}</ul></figure>'


def _slowest(result: ResultFile) -> str:
    """Return the requests that took longest, each with the ids by which it is found elsewhere."""
    took_s = result.numbers("latencies")
    if not took_s:
        return ""
    places = sorted(range(len(took_s)), key=lambda at: -took_s[at])[:_NUM_SLOWEST]
    due_s, sent_s = result.numbers("start_times"), result.numbers("sent_times")
    ttfts, itls = result.numbers("ttfts"), result.list_of("itls")
    num_in, num_out = result.numbers("input_lens"), result.numbers("output_lens")
    jobs, traces, errors = (
        result.texts("job_ids"),
        result.texts("trace_ids"),
        result.texts("errors"),
    )
    heads = ["job and trace", "due at s", "sent after ms", "TTFT ms", "longest gap ms", "E2EL ms"]
    heads += ["tokens in", "out", "until sent, first token, end"]
    rows = ["".join(f"<th>{head}</th>" for head in heads)]
    for at in places:
        gaps = itls[at] if at < len(itls) else []
        longest_s = max(gaps, default=0.0) if isinstance(gaps, list) else 0.0
        late_s = max(0.0, sent_s[at] - due_s[at]) if sent_s else 0.0
        figures = [due_s[at] - min(due_s), late_s * 1e3, ttfts[at] * 1e3, longest_s * 1e3]
        cells = [number(value) for value in [*figures, took_s[at] * 1e3, num_in[at], num_out[at]]]
        ids = [escape(column[at]) for column in (jobs, traces) if column]
        bar = _bar(late_s, ttfts[at], took_s[at], max(took_s))
        last = f'<span class="bad">{escape(errors[at])}</span>' if errors and errors[at] else bar
        row = f'<td class="text"><code>{"<br>".join(ids)}</code></td>'
        row += "".join(f"<td>{cell}</td>" for cell in cells)
        rows.append(f'{row}<td class="text">{last}</td>')
    return _section(f"Slowest requests of {result.name}", _table_of(rows))


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

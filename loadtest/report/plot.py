"""Plots throughput against latency; to the right and down is better. It needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from penstock.loadtest.report.points import Point, by_server
from penstock.loadtest.requests.measurement import Metric

_COLOURS = ("#0b6e99", "#d9730d", "#6940a5", "#0f7b6c", "#ad1a72", "#64473a")
_GREY, _PALE = "#5f5f5f", "#e4e4e4"


def draw(path: Path, title: str, points: Sequence[Point]) -> None:
    """Draw one line for each server: the median, and dotted the 99th percentile."""
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    itl_axes, ttft_axes = figure.subplots(1, 2)
    _panel(itl_axes, points, "itl", "Inter-token latency, ms")
    _panel(ttft_axes, points, "ttft", "Time to first token, ms")
    figure.suptitle(title, x=0.012, ha="left", fontweight="bold", fontsize=11)
    figure.supxlabel(
        "Output tokens a second. At each point its load; dotted: the 99th percentile",
        color=_GREY,
        fontsize=9,
    )
    lines, names = itl_axes.get_legend_handles_labels()
    figure.legend(lines, names, frameon=False, fontsize=9, ncols=6, loc="outside upper right")
    figure.savefig(path, dpi=160)


def _panel(axes: Axes, points: Sequence[Point], metric: Metric, title: str) -> None:
    for number, (server, of_one) in enumerate(by_server(points)):
        _line(axes, _COLOURS[number % len(_COLOURS)], server, of_one, metric)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlim(left=0)
    axes.margins(y=0.12)
    axes.set_title(title, loc="left", fontsize=10, color=_GREY)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GREY)
    axes.tick_params(which="both", colors=_GREY, labelsize=9)
    axes.grid(color=_PALE, linewidth=0.7)
    axes.set_axisbelow(True)


def _line(axes: Axes, colour: str, server: str, points: Sequence[Point], metric: Metric) -> None:
    valid = [point for point in points if point.measurement.completed]
    speeds = [point.measurement.tokens_per_s for point in valid]
    middle = [point.measurement.percentile(metric, 50) for point in valid]
    high = [point.measurement.percentile(metric, 99) for point in valid]
    axes.plot(speeds, middle, "o-", color=colour, markersize=4.5, label=server)
    axes.plot(speeds, high, ":", color=colour, linewidth=1.1)
    for point, speed, latency in zip(valid, speeds, middle, strict=True):
        axes.annotate(
            point.label,
            (speed, latency),
            xytext=(6, -9),
            textcoords="offset points",
            fontsize=8,
            color=colour,
        )

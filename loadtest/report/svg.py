"""Plots of lines as SVG, without a library. Colours are a page's: `page.css` names them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, log10

NUM_COLOURS = 6
_WIDTH, _HEIGHT = 520, 300
_LEFT_MARGIN, _RIGHT_MARGIN, _TOP_MARGIN, _BOTTOM_MARGIN = 52, 14, 12, 42
_TICKS = 6
_LETTER = 5.6  # the width of one in a label, about


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of one name, and with `labels` a mark and its label at each."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    labels: Sequence[str] = field(default_factory=list)
    is_dotted: bool = False
    is_stepped: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values to a place between `begin` and `end`, in pixels."""

    title: str
    low: float
    high: float
    begin: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        low, high, value = map(self._flat, (self.low, self.high, value))
        share = (value - low) / (high - low)
        return self.begin + (self.end - self.begin) * min(max(share, 0.0), 1.0)

    def ticks(self) -> list[float]:
        """Return round values on the axis: on a logarithmic one 1, 2 and 5 of each power."""
        if self.is_log:
            powers = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
            factors = (1, 2, 5) if len(powers) <= 4 else (1,)
            values = [factor * 10.0**power for power in powers for factor in factors]
        else:
            step = _round_step((self.high - self.low) / _TICKS)
            first = ceil(self.low / step)
            values = [step * number for number in range(first, first + 2 * _TICKS)]
        return [value for value in values if self.low <= value <= self.high * (1 + 1e-9)]

    def _flat(self, value: float) -> float:
        return log10(max(value, self.low)) if self.is_log else value


def plot(
    lines: Sequence[Curve],
    x_title: str,
    y_title: str,
    x_is_log: bool = False,
    y_is_log: bool = False,
    y_high: float | None = None,
) -> str:
    """Return an SVG element; empty where no line has a point."""
    points = [point for line in lines for point in line.points]
    if not points:
        return ""
    x = _axis(x_title, [x for x, _ in points], _LEFT_MARGIN, _WIDTH - _RIGHT_MARGIN, x_is_log)
    y = _axis(
        y_title, [y for _, y in points], _HEIGHT - _BOTTOM_MARGIN, _TOP_MARGIN, y_is_log, y_high
    )
    content = "".join([*_grid(x, y), *(_drawn(line, x, y) for line in lines)])
    marks = "".join(mark for line in lines for mark in _marks(line, x, y))
    label = escape(f"{y_title} over {x_title}")
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}"'
    return f"<svg {box}>{content}{marks}</svg>"


def number(value: float) -> str:
    """Return a number in few characters."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}".removesuffix(".0")
    return f"{value:.2g}" if abs(value) < 1 else f"{value:.2f}".rstrip("0").rstrip(".")


def _axis(
    title: str,
    values: Sequence[float],
    begin: float,
    end: float,
    is_log: bool,
    high: float | None = None,
) -> Axis:
    if not is_log:
        return Axis(title, 0.0, high or max(values) * 1.06 or 1.0, begin, end)
    above = [value for value in values if value > 0] or [1.0]
    low, top = min(above) / 1.15, max(above) * 1.15
    return Axis(title, low, max(top, low * 3), begin, end, is_log=True)


def _round_step(least: float) -> float:
    power = 10.0 ** floor(log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * 0.999)


def _grid(x: Axis, y: Axis) -> Iterator[str]:
    bottom, x_min, x_max = _HEIGHT - _BOTTOM_MARGIN, _LEFT_MARGIN, _WIDTH - _RIGHT_MARGIN
    for value in y.ticks():
        yield f'<path class="grid" d="M{x_min} {y.at(value):.1f}H{x_max}"/>'
        yield _text("tick", x_min - 6, y.at(value) + 3.5, number(value), "end")
    for value in x.ticks():
        yield f'<path class="grid" d="M{x.at(value):.1f} {_TOP_MARGIN}V{bottom}"/>'
        yield _text("tick", x.at(value), bottom + 15, number(value), "middle")
    yield f'<path class="axis" d="M{x_min} {_TOP_MARGIN}V{bottom}H{x_max}"/>'
    yield _text("title", (x_min + x_max) / 2, _HEIGHT - 8, x.title, "middle")
    high = (_TOP_MARGIN + bottom) / 2
    yield _text("title", 12, high, y.title, "middle", f' transform="rotate(-90 12 {high})"')


def _text(kind: str, x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}'
    return f'<text class="{kind}" {place}>{escape(text)}</text>'


def _drawn(line: Curve, x: Axis, y: Axis) -> str:
    places = [(x.at(at), y.at(value)) for at, value in line.points]
    if len(places) < 2:
        return ""
    (first_x, first_y), *rest = places
    if line.is_stepped:
        path = "".join(f"H{at:.1f}V{high:.1f}" for at, high in rest)
    else:
        path = "".join(f"L{at:.1f} {high:.1f}" for at, high in rest)
    kind = f"line c{line.colour % NUM_COLOURS}" + (" dotted" if line.is_dotted else "")
    return f'<path class="{kind}" d="M{first_x:.1f} {first_y:.1f}{path}"/>'


def _marks(line: Curve, x: Axis, y: Axis) -> Iterator[str]:
    """Yield the marks with their labels, each on the side where it has room."""
    colour = f"c{line.colour % NUM_COLOURS}"
    for (at, value), label in zip(line.points, line.labels, strict=False):
        mark_x, mark_y = x.at(at), y.at(value)
        description = escape(f"{line.name}, {label}: {number(at)}, {number(value)}")
        yield f'<circle class="mark {colour}" cx="{mark_x:.1f}" cy="{mark_y:.1f}" r="3.5">'
        yield f"<title>{description}</title></circle>"
        fits = mark_x + 7 + len(label) * _LETTER < _WIDTH
        place, anchor = (mark_x + 6, "start") if fits else (mark_x - 6, "end")
        below = mark_y + 13 if mark_y + 13 < _HEIGHT - _BOTTOM_MARGIN else mark_y - 6
        yield _text(f"label {colour}", place, below, label, anchor)

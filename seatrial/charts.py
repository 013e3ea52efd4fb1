"""Plots of a report, as SVG that takes its colours from the page around it.

Made here and not by a plotting library: three kinds of plot need no 60 MB on the control machine,
and only SVG with the page's own variables follows the reader's light or dark theme. A plot is 360
units wide, so that its text keeps its size on a phone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from seatrial.details import Comparison, Heatmap, Point, Series, Square
from seatrial.verdict import number

WIDTH = 360
LEFT, RIGHT = 46, 8
TEXT_WIDTH_MIN = 22
"""A square narrower than this has no room for its number; the tooltip has it."""
COLOURS = 6
FAR = 4
"""A bound beyond so many times the highest value is said and not drawn."""


class Plot(NamedTuple):
    """A plot and its words."""

    title: str
    svg: str
    legend: list[str]
    note: str


def short(value: float) -> str:
    """Return a number as the axis of a small plot has room for it."""
    if abs(value) >= 1000:
        return f"{value / 1000:.3g}k"
    return number(value)


def heatmap(shown: Heatmap) -> Plot:
    """Return a share over two quantities: a square each, dark where the share is small."""
    columns = sorted({square.x for square in shown.squares})
    rows = sorted({square.y for square in shown.squares})
    width = (WIDTH - LEFT - RIGHT) / max(1, len(columns))
    height = max(16.0, min(26.0, 190 / max(1, len(rows))))
    top, bottom = 16, 34
    total = top + height * len(rows) + bottom
    parts = [_open(total, f"{shown.title}: {shown.y_label} over {shown.x_label}")]
    for square in shown.squares:
        x = LEFT + columns.index(square.x) * width
        y = top + rows.index(square.y) * height
        parts.append(_square(shown, square, x, y, width, height))
    for index, row in enumerate(rows):
        y = top + (index + 0.5) * height + 4
        parts.append(_text(LEFT - 5, y, short(row), "end"))
    step = -(-len(columns) * 30 // (WIDTH - LEFT - RIGHT)) or 1
    for index, column in enumerate(columns):
        if index % step == 0:
            x = LEFT + (index + 0.5) * width
            parts.append(_text(x, total - bottom + 14, short(column), "middle"))
    parts.append(_text(0, total - 4, f"{shown.y_label} ↑", "start", "axis"))
    parts.append(_text(WIDTH - RIGHT, total - 4, f"{shown.x_label} →", "end", "axis"))
    parts += _mark(shown, columns, width, top, total - bottom)
    note = f"Squares below {number(shown.bound)} are framed." if shown.bound is not None else ""
    return Plot(shown.title, "".join([*parts, "</svg>"]), [], note)


def _square(shown: Heatmap, square: Square, x: float, y: float, width: float, height: float) -> str:
    share = square.successes / max(1, square.samples)
    is_low = shown.bound is not None and share < shown.bound
    said = (
        f"{shown.x_label} {number(square.x)}, {shown.y_label} {number(square.y)}: "
        f"{square.successes} of {square.samples} ({square.low:.2f}-{square.high:.2f})"
    )
    frame = ' class="below"' if is_low else ""
    mixed = f"color-mix(in oklab, var(--few), var(--all) {100 * share:.0f}%)"
    shape = (
        f'<rect{frame} x="{x + 0.75:.1f}" y="{y + 0.75:.1f}" width="{width - 1.5:.1f}" '
        f'height="{height - 1.5:.1f}" rx="2" style="fill:{mixed}"/>'
    )
    label = ""
    if width >= TEXT_WIDTH_MIN:
        label = _text(x + width / 2, y + height / 2 + 4, f"{100 * share:.0f}", "middle", "value")
    return f"<g><title>{escape(said)}</title>{shape}{label}</g>"


def _mark(
    shown: Heatmap, columns: Sequence[float], width: float, top: float, bottom: float
) -> Iterator[str]:
    """Yield the line from which on something changes, and its name."""
    if shown.mark is None:
        return
    before = sum(column <= shown.mark for column in columns)
    x = LEFT + before * width
    yield f'<line class="mark" x1="{x:.1f}" y1="{top - 4}" x2="{x:.1f}" y2="{bottom:.1f}"/>'
    anchor = "end" if x > WIDTH / 2 else "start"
    yield _text(x, 10, shown.mark_label, anchor, "axis")


def lines(together: Sequence[Series]) -> Plot:
    """Return series that share a title in one plot: points with intervals, bound, last good."""
    first = together[0]
    xs = sorted({point.x for series in together for point in (*series.points, *series.last_good)})
    low, high = _range(together)
    height, top, bottom = 190, 16, 34
    scale = _Scale(xs, low, high, top, height - bottom)
    parts = [_open(height, f"{first.title}: {first.y_label} over {first.x_label}")]
    for tick in _ticks(low, high):
        y = scale.y(tick)
        parts.append(
            f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>'
        )
        parts.append(_text(LEFT - 5, y + 4, short(tick), "end"))
    step = -(-len(xs) * 34 // (WIDTH - LEFT - RIGHT)) or 1
    for index, x in enumerate(xs):
        if index % step == 0:
            parts.append(_text(scale.x(x), height - bottom + 14, short(x), "middle"))
    for index, series in enumerate(together):
        parts += _last_good(series, scale, index % COLOURS)
    for bound in sorted({s.bound for s in together if s.bound is not None and s.bound <= high}):
        y = scale.y(bound)
        parts.append(
            f'<line class="bound" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>'
        )
        word = "at least" if first.bound_is == "min" else "at most"
        parts.append(_text(WIDTH - RIGHT, y - 3, f"{word} {short(bound)}", "end", "bound"))
    for index, series in enumerate(together):
        parts += _series(series, scale, index % COLOURS)
    parts.append(_text(LEFT, 10, first.y_label, "start", "axis"))
    parts.append(_text(WIDTH - RIGHT, height - 4, f"{first.x_label} →", "end", "axis"))
    legend = [series.name for series in together] if len(together) > 1 else []
    has_last_good = any(series.last_good for series in together)
    notes = ["Bands and dashes: the last good release."] if has_last_good else []
    far = sorted({s.bound for s in together if s.bound is not None and s.bound > high})
    notes += [f"Allowed are up to {short(bound)}, far above what is shown." for bound in far]
    return Plot(first.title, "".join([*parts, "</svg>"]), legend, " ".join(notes))


class _Scale:
    """Where values stand in a plot; the horizontal axis counts steps, since rungs double."""

    def __init__(
        self, xs: Sequence[float], low: float, high: float, top: float, bottom: float
    ) -> None:
        self._xs, self._low, self._high = xs, low, high
        self._top, self._bottom = top, bottom

    def x(self, value: float) -> float:
        """Return the horizontal place of a value that is among the steps."""
        room = WIDTH - LEFT - RIGHT
        return LEFT + room * (self._xs.index(value) + 0.5) / len(self._xs)

    def y(self, value: float) -> float:
        """Return the vertical place of a value."""
        share = (value - self._low) / (self._high - self._low)
        return self._bottom - share * (self._bottom - self._top)


def _series(series: Series, scale: _Scale, colour: int) -> Iterator[str]:
    points = sorted(series.points, key=lambda point: point.x)
    path = " ".join(f"{scale.x(p.x):.1f},{scale.y(p.y):.1f}" for p in points)
    yield f'<polyline class="line c{colour}" points="{path}"/>'
    for point in points:
        x = scale.x(point.x)
        interval = ""
        if point.low is not None and point.high is not None:
            interval = f" ({number(point.low)}-{number(point.high)})"
            yield (
                f'<line class="line c{colour}" x1="{x:.1f}" y1="{scale.y(point.low):.1f}" '
                f'x2="{x:.1f}" y2="{scale.y(point.high):.1f}"/>'
            )
        said = f"{series.name} {series.x_label} {number(point.x)}: {number(point.y)}{interval}"
        yield (
            f'<circle class="point c{colour}" cx="{x:.1f}" cy="{scale.y(point.y):.1f}" r="3.5">'
            f"<title>{escape(said.strip())}</title></circle>"
        )


def _last_good(series: Series, scale: _Scale, colour: int) -> Iterator[str]:
    points = sorted(series.last_good, key=lambda point: point.x)
    if not points:
        return
    path = " ".join(f"{scale.x(p.x):.1f},{scale.y(p.y):.1f}" for p in points)
    edge = [(p, p.low, p.high) for p in points if p.low is not None and p.high is not None]
    if edge:
        upper = [f"{scale.x(p.x):.1f},{scale.y(high):.1f}" for p, _, high in edge]
        lower = [f"{scale.x(p.x):.1f},{scale.y(low):.1f}" for p, low, _ in reversed(edge)]
        yield f'<polygon class="band c{colour}" points="{" ".join([*upper, *lower])}"/>'
    yield f'<polyline class="line past c{colour}" points="{path}"/>'


def comparison(shown: Comparison) -> str:
    """Return a change with its interval on a line with zero (or one) and what is allowed."""
    middle = 1.0 if "ratio" in shown.unit else 0.0
    values = [shown.low, shown.high, shown.allowed, shown.change, middle]
    low, high = min(values), max(values)
    pad = 0.1 * (high - low) or 0.1
    low, high = low - pad, high + pad

    def x(value: float) -> float:
        return 6 + (WIDTH - 12) * (value - low) / (high - low)

    said = f"{shown.what}: {number(shown.change)} ({number(shown.low)} to {number(shown.high)})"
    middle_x, allowed_x = f"{x(middle):.1f}", f"{x(shown.allowed):.1f}"
    low_x, high_x = f"{x(shown.low):.1f}", f"{x(shown.high):.1f}"
    parts = [
        _open(40, said),
        f'<line class="zero" x1="{middle_x}" y1="4" x2="{middle_x}" y2="26"/>',
        f'<line class="bound" x1="{allowed_x}" y1="4" x2="{allowed_x}" y2="26"/>',
        f'<line class="line c0" x1="{low_x}" y1="15" x2="{high_x}" y2="15"/>',
        f'<circle class="point c0" cx="{x(shown.change):.1f}" cy="15" r="4.5"/>',
        _text(x(middle), 37, number(middle), "middle"),
        _text(x(shown.allowed), 37, f"allowed {number(shown.allowed)}", "middle", "bound"),
    ]
    return "".join([*parts, "</svg>"])


def _range(together: Sequence[Series]) -> tuple[float, float]:
    """Return from where to where the vertical axis reaches."""
    values: list[float] = []
    for series in together:
        for point in (*series.points, *series.last_good):
            values += _values(point)
    # A bound far above would press everything else onto the axis.
    bounds = [series.bound for series in together if series.bound is not None]
    values += [bound for bound in bounds if bound <= FAR * max(values)]
    low, high = min([*values, 0.0]), max([*values, 0.0])
    return low, high + (0.08 * (high - low) or 1.0)


def _values(point: Point) -> list[float]:
    return [value for value in (point.y, point.low, point.high) if value is not None]


def _ticks(low: float, high: float) -> list[float]:
    """Return three to six round values between ``low`` and ``high``."""
    size = 10.0 ** (len(str(int(high - low))) - 1) if high - low >= 1 else 0.1
    for step in (size / 10, size / 5, size / 2, size, 2 * size, 5 * size):
        first = -(-low // step)
        count = int(high // step - first) + 1
        if count <= 6:
            return [(first + index) * step for index in range(max(1, count))]
    return [low, high]


def _open(height: float, said: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(said)}" '
        'xmlns="http://www.w3.org/2000/svg">'
    )


def _text(x: float, y: float, said: str, anchor: str, kind: str = "tick") -> str:
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(said)}</text>'
    )

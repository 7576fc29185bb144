"""Plots as SVG, written by hand: a few lines and bars need no library of fifty megabytes. Colours
are CSS variables, so that the page decides between dark and light."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TypeAlias

import attrs

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 44
COLOURS = 8
"""Number of colours, --c0 to --c7."""
Series: TypeAlias = Mapping[str, Sequence[tuple[float, float]]]
"""Points by the name of their line."""


@attrs.frozen
class Axis:
    """A scale from values to coordinates. `marks`: values that have a line and a label."""

    low: float
    high: float
    marks: tuple[float, ...]
    label: str

    def part(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


def from_zero(highest: float, label: str) -> Axis:
    """Return an axis with about five marks at round numbers, the last one at or above `highest`."""
    step = _round_step(highest / 5) if highest > 0 else 0.2
    count = max(1, math.ceil(highest / step - 1e-9))
    return Axis(0.0, step * count, tuple(step * k for k in range(count + 1)), label)


def _round_step(smallest: float) -> float:
    """Return a step of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(smallest))
    return next(
        factor * power for factor in (1, 2, 5, 10) if factor * power >= smallest * (1 - 1e-9)
    )


def lines(title: str, series: Series, x_label: str, y_label: str, *, doubling: bool = False) -> str:
    """Draw a line with points for each name. `doubling`: the distance from 1 to 2 is the same as
    from 2 to 4."""
    xs = sorted({x for points in series.values() for x, _ in points})
    highest = max((y for points in series.values() for _, y in points), default=0.0)
    y_axis = from_zero(highest, y_label)
    if doubling:
        low, high = math.log2(xs[0]), math.log2(xs[-1])
        x_axis = Axis(low - 0.2, high + 0.2, tuple(math.log2(x) for x in xs), x_label)
        labels = [_number(x) for x in xs]
        series = {name: [(math.log2(x), y) for x, y in points] for name, points in series.items()}
    else:
        x_axis = from_zero(xs[-1] if xs else 1.0, x_label)
        labels = [_number(mark) for mark in x_axis.marks]
    parts = [*_grid(y_axis), *_x_marks(x_axis, labels)]
    for index, points in enumerate(series.values()):
        parts += _line([(_x(x_axis, x), _y(y_axis, y)) for x, y in points], index)
    return _figure(title, parts, list(series))


def bars(title: str, values: Mapping[str, float], y_label: str) -> str:
    axis = from_zero(max(values.values(), default=0.0), y_label)
    parts = list(_grid(axis))
    room = (WIDTH - LEFT - RIGHT) / max(1, len(values))
    for index, (name, value) in enumerate(values.items()):
        middle, top = LEFT + room * (index + 0.5), _y(axis, value)
        parts.append(
            f'<rect x="{middle - room * 0.3:.1f}" y="{top:.1f}" width="{room * 0.6:.1f}" '
            f'height="{HEIGHT - BOTTOM - top:.1f}" fill="var(--c{index % COLOURS})"/>'
        )
        parts.append(_text(middle, top - 4, f"{_number(value)}"))
        parts.append(_text(middle, HEIGHT - BOTTOM + 16, name))
    return _figure(title, parts, [])


def _x(axis: Axis, value: float) -> float:
    return LEFT + axis.part(value) * (WIDTH - LEFT - RIGHT)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - axis.part(value) * (HEIGHT - TOP - BOTTOM)


def _grid(axis: Axis) -> Iterator[str]:
    for mark in axis.marks:
        y = _y(axis, mark)
        yield (
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" '
            'stroke="var(--grid)"/>'
        )
        yield _text(LEFT - 6, y + 4, _number(mark), anchor="end")
    middle = (TOP + HEIGHT - BOTTOM) / 2
    yield (
        f'<text transform="translate(14 {middle:.1f}) rotate(-90)" '
        f'text-anchor="middle">{escape(axis.label)}</text>'
    )


def _x_marks(axis: Axis, labels: Sequence[str]) -> Iterator[str]:
    for mark, label in zip(axis.marks, labels, strict=True):
        yield _text(_x(axis, mark), HEIGHT - BOTTOM + 16, label)
    yield _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, axis.label)


def _line(coordinates: Sequence[tuple[float, float]], number: int) -> Iterator[str]:
    colour = f"var(--c{number % COLOURS})"
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in coordinates)
    yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
    for x, y in coordinates:
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _figure(title: str, parts: Sequence[str], names: Sequence[str]) -> str:
    legend = "".join(
        f'<li><span style="background: var(--c{index % COLOURS})"></span>{escape(name)}</li>'
        for index, name in enumerate(names)
    )
    body = "\n".join(parts)
    return (
        f"<figure>\n<figcaption>{escape(title)}</figcaption>\n"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">\n{body}\n'
        "</svg>\n"
        f"<ul>{legend}</ul>\n</figure>"
    )

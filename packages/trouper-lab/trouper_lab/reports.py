"""Reports as NAME.json and NAME.html, with plots as SVG."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TypeAlias

import attrs
import click

from trouper.protocol.paths import is_directory

SUFFIXES = (".json", ".html")


class ReportName(click.ParamType[Path]):
    """Without .json and .html; in a directory, the command's name."""

    name = "path"

    def __init__(self, default: str) -> None:
        self._default = default

    def convert(
        self, value: object, param: click.Parameter | None, context: click.Context | None
    ) -> Path:
        if not str(value):
            self.fail("it is empty; give a name, or leave the flag out", param, context)
        path = Path(str(value))
        if str(value).endswith(os.sep) or is_directory(path):
            return path / self._default
        return path.with_suffix("") if path.suffix in SUFFIXES else path


def report_files(out: Path) -> list[Path]:
    return [out.with_name(out.name + suffix) for suffix in SUFFIXES]


STYLE = """:root { color-scheme: light dark; --ink: #1c2128; --faint: #57606a; --paper: #ffffff;
  --grid: #d8dee4;
  --c0: #0969da; --c1: #bc4c00; --c2: #1a7f37; --c3: #8250df; --c4: #9a6700; --c5: #bf3989;
  --c6: #1b7c83; --c7: #57606a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --faint: #9198a1; --paper: #0d1117;
  --grid: #30363d;
  --c0: #58a6ff; --c1: #f0883e; --c2: #56d364; --c3: #bc8cff; --c4: #e3b341; --c5: #f778ba;
  --c6: #56d4dd; --c7: #9198a1; } }
body { margin: 2rem auto; max-width: 76rem; padding: 0 1rem; color: var(--ink);
  background: var(--paper);
  font: 15px/1.5 system-ui, sans-serif; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; } dt {
  color: var(--faint); } dd { margin: 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--grid); }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr));
  gap: 1.5rem; }
figure { margin: 0; } figcaption { font-weight: 600; }
svg { width: 100%; height: auto; } svg text { fill: var(--faint); font-size: 12px; }
ul { display: flex; flex-wrap: wrap; gap: 0 1rem; margin: 0; padding: 0; list-style: none;
  color: var(--faint); }
li span { display: inline-block; width: .8em; height: .8em; margin-right: .4em;
  border-radius: 2px; }
"""


def html_page(title: str, body: str) -> str:
    """`body`: HTML."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>
{STYLE}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
{body}
</main>
</body>
</html>
"""


WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 44
COLOURS = 8
"""Of --c0 to --c7."""
Series: TypeAlias = Mapping[str, Sequence[tuple[float, float]]]
"""Points by line."""


@attrs.frozen
class Axis:
    """From values to coordinates. `marks`: labelled values."""

    low: float
    high: float
    marks: tuple[float, ...]
    label: str

    def part(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


def from_zero(highest: float, label: str) -> Axis:
    """With about five round marks."""
    step = _round_step(highest / 5) if highest > 0 else 0.2
    count = max(1, math.ceil(highest / step - 1e-9))
    return Axis(0.0, step * count, tuple(step * k for k in range(count + 1)), label)


def _round_step(smallest: float) -> float:
    """1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(smallest))
    return next(
        factor * power for factor in (1, 2, 5, 10) if factor * power >= smallest * (1 - 1e-9)
    )


def draw_lines(
    title: str, series: Series, x_label: str, y_label: str, *, doubling: bool = False
) -> str:
    """`doubling`: a logarithmic x axis."""
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


def draw_bars(title: str, values: Mapping[str, float], y_label: str) -> str:
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

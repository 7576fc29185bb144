"""Bars of `just bench-prefill beside`: `python -m benchmarks.prefill_plot PLOT NAME=JSON...`.

Each JSON file is what `--json` wrote on one machine, NAME its heading.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
COLUMNS = (
    ("first_token_s", "first token, s"),
    ("longest_gap_s", "longest gap, s"),
    ("pace", "pace of the streams, of 1 alone"),
)
LEFT, COLUMN, BAR, LINE, HEAD = 100, 220, 130, 22, 56
HEADER = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
    'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13" fill="#808080" '
    'role="img">\n<title>A long prompt beside streams, by --decode-stall-ms</title>'
)


def text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}"{more}>{words}</text>'


def panel(name: str, rows: Sequence[Row], top: int) -> list[str]:
    """A heading, and a line of bars for each bound. `top`: pixels above it."""
    heading = f"{name}: {rows[0]['long']:,} tokens beside {rows[0]['streams']} streams"
    drawn = [text(LEFT, top + 18, heading, ' font-weight="bold"')]
    drawn += [
        text(LEFT + COLUMN * place, top + 40, title) for place, (_, title) in enumerate(COLUMNS)
    ]
    most = {key: max(float(row[key]) for row in rows) for key, _ in COLUMNS}
    for line, row in enumerate(rows):
        y = top + HEAD + line * LINE
        drawn.append(text(LEFT - 8, y + 13, f"{row['stall_ms']:g} ms", ' text-anchor="end"'))
        for place, (key, _) in enumerate(COLUMNS):
            x, value = LEFT + COLUMN * place, float(row[key])
            width = max(1, round(BAR * value / most[key]))
            drawn.append(
                f'<rect x="{x}" y="{y}" width="{width}" height="16" fill="#7e57c2"/>'
                + text(x + width + 6, y + 13, f"{value:.3g}")
            )
    return drawn


def draw(machines: Mapping[str, Sequence[Row]]) -> str:
    drawn, top = list[str](), 0
    for name, rows in machines.items():
        drawn += panel(name, rows, top)
        top += HEAD + len(rows) * LINE + 16
    header = HEADER.format(width=LEFT + COLUMN * len(COLUMNS) + 60, height=top)
    return "\n".join([header, *drawn, "</svg>\n"])


def main(arguments: Sequence[str]) -> None:
    plot, *machines = arguments
    measured = dict(machine.split("=", 1) for machine in machines)
    rows = {name: json.loads(Path(path).read_text()) for name, path in measured.items()}
    Path(plot).write_text(draw(rows))


if __name__ == "__main__":
    main(sys.argv[1:])

"""`python -m tests.zoo [CONFIG...]`: play each config and each text module of mlx-vlm, or those
named, in every mix; all of them make docs/architectures.md."""

# ruff: noqa: T201
from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from difflib import get_close_matches

import click

import tests.conftest  # noqa: F401 - the threads of BLAS, before MLX

# isort: split
import mlx.core as mx

from tests.zoo.building import build
from tests.zoo.catalogue import BY_PIECES, COARSE, CONFIGS
from tests.zoo.mixes import ALL_SHAPES, BOUND, own_loop_error, play_all
from tests.zoo.table import PAGE, Line, figures, page
from tests.zoo.vlm_catalogue import modules as vlm_modules
from tests.zoo.vlm_playing import Played
from tests.zoo.vlm_playing import look_at as look_at_vlm
from tests.zoo.vlm_table import group_of, section

BAR = 40


@click.command()
@click.argument("names", nargs=-1, metavar="[CONFIG]...")
def main(names: tuple[str, ...]) -> None:
    """Play each CONFIG of tests/zoo/catalogue.py, or module of mlx-vlm, in every mix, or all; all
    of them write docs/architectures.md."""
    names_of_all = [*CONFIGS, *vlm_modules()]
    for name in names:
        if name not in names_of_all:
            near = get_close_matches(name, names_of_all) or sorted(names_of_all)
            raise click.BadParameter(f"there is no config {name!r}; there is {', '.join(near)}")
    sys.exit(bool(play(names)))


def play(names: Sequence[str]) -> int:
    """The number of configs that showed a fault."""
    lines, faults, worst, began = list[Line](), list[str](), (0.0, ""), time.perf_counter()
    played = list[Played]()
    chosen = names or (*CONFIGS, *vlm_modules())
    for done, name in enumerate(chosen):
        progress(done, len(chosen), name, len(faults))
        if name in CONFIGS:
            line, errors, shown = look_at(name)
            lines.append(line)
        else:
            played.append(look_at_vlm(name))
            errors, shown = [*played[-1].errors], [*played[-1].faults]
        worst = max([worst, *((error, name) for error in errors)])
        faults += [f"{name}: {fault}" for fault in shown]
        mx.clear_cache()
    progress(len(chosen), len(chosen), "", len(faults))
    print(
        f"\n{time.perf_counter() - began:.0f} s; the largest difference of a log-probability is "
        f"{worst[0]:.1e}, of {worst[1]}"
    )
    print("\n".join(map(str, lines)) if names else figures(lines))
    print("\n".join(f"{one.name}: {group_of(one)} {one.reason}" for one in played))
    print("\n".join(faults))
    if not names and not faults:
        PAGE.write_text(page(lines, section(played)), encoding="utf-8")
    return len({fault.split(":")[0] for fault in faults})


def look_at(name: str) -> tuple[Line, list[float], list[str]]:
    """How a config is run, the errors of its mixes, and its faults in words."""
    model, faults, errors = build(name), list[str](), list[float]()
    for kind, shapes in ALL_SHAPES.items():
        played, outcome = play_all(model, shapes)
        line = Line.of(name, played)
        errors += [error for error in outcome.errors.values() if error <= BOUND]
        faults += [
            f"{mix}, {kind} shapes: off by {error:.2g}"
            for mix, error in outcome.wrong.items()
            if error > COARSE.get(name, BOUND)
        ]
        faults += [f"{mix}, {kind} shapes: {text}" for mix, text in outcome.crashes.items()]
    if (own := own_loop_error(model)) > BOUND and name not in BY_PIECES:
        faults.append(f"mlx-lm's own loop depends on the pieces of a prompt, by {own:.2g}")
    return line, errors, faults


def progress(done: int, total: int, name: str, faults: int) -> None:
    """A bar on a terminal; elsewhere a line now and then."""
    filled = BAR * done // total
    bar = f"[{'#' * filled}{'.' * (BAR - filled)}] {done}/{total}, {faults} faults"
    if sys.stdout.isatty():
        print(f"\r{bar}  {name:44}", end="", flush=True)
    elif done % 20 == 0 or done == total:
        print(bar, flush=True)


if __name__ == "__main__":
    main()
